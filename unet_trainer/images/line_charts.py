"""Line charts as a picture: panels with grid, lines, legend and marks. Knows numbers and colours, not what they stand for.

Lines are drawn by OpenCV, anti-aliased at a sixteenth of a pixel, text by PIL with the font that it brings along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from unet_trainer.images.image_files import Pixels

Colour = tuple[int, int, int]
Point = tuple[float, float]

PANEL_WIDTH, PANEL_HEIGHT = 640, 360
MARGIN = 20
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 40, 34  # of a panel, around its plot
TITLE_HEIGHT, LINE_HEIGHT = 44, 24
SHIFT = 4  # binary digits of a pixel in OpenCV's coordinates
PAPER, INK, FAINT, GRID = (255, 255, 255), (45, 49, 56), (120, 126, 136), (228, 231, 236)
# Okabe and Ito's, distinct with common colour blindness, without their yellow, which is too light on white.
LINE_COLOURS: tuple[Colour, ...] = (
    (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (230, 159, 0), (110, 110, 110), (120, 60, 160),
)  # fmt: skip
MAX_DOTS = 40  # a line with fewer points shows them


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: Colour
    width: int = 2


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`, in every panel."""

    x: float
    colour: Colour
    is_dotted: bool = True


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Sequence[Line]
    limits: tuple[float, float] | None = None  # of the values; None: those that occur
    circled: Point | None = None  # a point to notice
    note: str = ""  # right of the title


@dataclass(frozen=True)
class Picture:
    """Charts over one axis, below a title; at the bottom, what the marks mean."""

    title: str
    subtitle: str
    charts: Sequence[Chart]
    marks: Sequence[Mark] = ()
    meanings: Sequence[tuple[str, Colour]] = field(default_factory=list)
    x_name: str = "epoch"


def draw_charts(picture: Picture, columns: int = 2) -> Pixels:
    """H,W,3 RGB."""
    num_rows = max(1, -(-len(picture.charts) // columns))
    width = columns * PANEL_WIDTH + 2 * MARGIN
    height = 2 * MARGIN + TITLE_HEIGHT + num_rows * PANEL_HEIGHT + LINE_HEIGHT
    canvas = np.full((height, width, 3), 255, np.uint8)
    texts: list[_Text] = [
        _Text(MARGIN, MARGIN - 4, _shortened(picture.title, 20, width // 2), INK, 20),
        _Text(width - MARGIN, MARGIN, _shortened(picture.subtitle, 14, width // 2 - 2 * MARGIN), FAINT, 14, "ra"),
    ]
    x_range = _x_range(picture)
    for index, chart in enumerate(picture.charts):
        row, column = divmod(index, columns)
        corner = MARGIN + column * PANEL_WIDTH, MARGIN + TITLE_HEIGHT + row * PANEL_HEIGHT
        texts += _Panel(canvas, corner, chart, x_range).draw(picture.marks, picture.x_name)
    place = MARGIN
    for meaning, colour in picture.meanings:
        cv2.line(canvas, (place, height - MARGIN - 18), (place, height - MARGIN), colour, 2, cv2.LINE_AA)
        texts.append(_Text(place + 8, height - MARGIN - 17, meaning, INK, 14))
        place += 34 + _text_width(meaning, 14)
    return _with_texts(canvas, texts)


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    colour: Colour
    size: int = 13
    anchor: str = "la"  # of PIL: left, ascender


class _Panel:
    """One chart at its place on the canvas."""

    def __init__(self, canvas: Pixels, corner: tuple[int, int], chart: Chart, x_range: tuple[float, float]) -> None:
        self.canvas = canvas
        self.chart = chart
        self.left, self.top = corner[0] + LEFT, corner[1] + TOP
        self.right, self.bottom = corner[0] + PANEL_WIDTH - RIGHT, corner[1] + PANEL_HEIGHT - BOTTOM
        self.corner = corner
        self.x_range = x_range
        values = [y for line in chart.lines for _, y in line.points]
        self.y_range = chart.limits or _padded(min(values, default=0.0), max(values, default=1.0))

    def draw(self, marks: Sequence[Mark], x_name: str) -> list[_Text]:
        texts = self._grid(x_name)
        for mark in marks:
            self._vertical(mark)
        for line in self.chart.lines:
            self._line(line)
        if self.chart.circled is not None:
            cv2.circle(self.canvas, self._place(self.chart.circled), 7 << SHIFT, INK, 2, cv2.LINE_AA, SHIFT)
        return texts + self._legend()

    def _place(self, point: Point) -> tuple[int, int]:
        (x_low, x_high), (y_low, y_high) = self.x_range, self.y_range
        x = self.left + (point[0] - x_low) / (x_high - x_low) * (self.right - self.left)
        y = self.bottom - (point[1] - y_low) / (y_high - y_low) * (self.bottom - self.top)
        y = min(max(y, self.top - 2), self.bottom + 2)
        return round(x * 2**SHIFT), round(y * 2**SHIFT)

    def _grid(self, x_name: str) -> list[_Text]:
        texts = [_Text(self.corner[0] + 4, self.corner[1] + 4, self.chart.title, INK, 15)]
        if self.chart.note:
            texts.append(_Text(self.right, self.corner[1] + 5, self.chart.note, FAINT, 13, "ra"))
        ticks = nice_ticks(*self.y_range, most=7)
        for value, text in zip(ticks, tick_texts(ticks), strict=True):
            y = self._place((self.x_range[0], value))[1] >> SHIFT
            cv2.line(self.canvas, (self.left, y), (self.right, y), GRID, 1)
            texts.append(_Text(self.left - 8, y, text, FAINT, 12, "rm"))
        for value in nice_ticks(*self.x_range, most=9, whole=True):
            x = self._place((value, self.y_range[0]))[0] >> SHIFT
            cv2.line(self.canvas, (x, self.bottom), (x, self.bottom + 4), FAINT, 1)
            texts.append(_Text(x, self.bottom + 7, f"{value:g}", FAINT, 12, "ma"))
        cv2.line(self.canvas, (self.left, self.bottom), (self.right, self.bottom), FAINT, 1)
        texts.append(_Text(self.left - 8, self.bottom + 7, x_name, FAINT, 12, "ra"))
        return texts

    def _vertical(self, mark: Mark) -> None:
        x = self._place((mark.x, self.y_range[0]))[0] >> SHIFT
        length, step = (5, 8) if mark.is_dotted else (self.bottom - self.top, self.bottom - self.top)
        for y in range(self.top, self.bottom, step):
            cv2.line(self.canvas, (x, y), (x, min(y + length, self.bottom)), mark.colour, 1)

    def _line(self, line: Line) -> None:
        places = np.array([self._place(point) for point in line.points if math.isfinite(point[1])], np.int32)
        if len(places) > 1:
            cv2.polylines(self.canvas, [places], False, line.colour, line.width, cv2.LINE_AA, SHIFT)
        if len(places) <= MAX_DOTS:
            for place in places.tolist():
                cv2.circle(self.canvas, place, (line.width + 1) << SHIFT, line.colour, -1, cv2.LINE_AA, SHIFT)

    def _legend(self) -> list[_Text]:
        """Names in one line below the title, the boldest first, as many as have room."""
        lines = sorted((line for line in self.chart.lines if line.name), key=lambda line: -line.width)
        texts, place, y = [], self.left, self.top - 12
        for number, line in enumerate(lines):
            name = _shortened(line.name, 12, 150)
            if place + 26 + _text_width(name, 12) > self.right - 60 and number < len(lines) - 1:
                texts.append(_Text(place, y, f"and {len(lines) - number} more", FAINT, 12, "lm"))
                break
            cv2.line(self.canvas, (place, y), (place + 14, y), line.colour, line.width + 1, cv2.LINE_AA)
            texts.append(_Text(place + 19, y, name, INK, 12, "lm"))
            place += 34 + _text_width(name, 12)
        return texts


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers between low and high, `most` at most; `whole`: no fractions."""
    raw = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * size for factor in (1, 2, 2.5, 5) if factor * size >= raw * 0.999), 10 * size)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    if last - first + 1 > most:
        return nice_ticks(low, high, most - 1, whole) if most > 2 else [first * step, last * step]
    return [number * step for number in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """With as many digits as tell them apart."""
    largest = max((abs(value) for value in values), default=0.0)
    form = "e" if largest and (largest < 1e-2 or largest >= 1e6) else "f"
    for digits in range(6):
        texts = [f"{value:.{digits}{form}}" if value else "0" for value in values]
        if all(math.isclose(float(text), value, rel_tol=1e-6) for text, value in zip(texts, values, strict=True)):
            break
    return [text.replace("e-0", "e-").replace("e+0", "e") for text in texts]


def _x_range(picture: Picture) -> tuple[float, float]:
    xs = [x for chart in picture.charts for line in chart.lines for x, _ in line.points] + [mark.x for mark in picture.marks]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    return (low, high) if high - low >= 1 else (low - 0.5, low + 0.5)


def _padded(low: float, high: float) -> tuple[float, float]:
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if low >= 0 and low - margin < 0 else low - margin), high + margin


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _text_width(text: str, size: int) -> int:
    return math.ceil(_font(size).getlength(text))


def _shortened(text: str, size: int, width: int) -> str:
    """At most so many pixels wide; of what is longer, the beginning."""
    while text and _text_width(text, size) > width:
        text = f"{text.removesuffix('…')[:-1]}…" if len(text) > 1 else ""
    return text


def _with_texts(canvas: Pixels, texts: Sequence[_Text]) -> Pixels:
    image = Image.fromarray(canvas)
    draw = ImageDraw.Draw(image)
    for text in texts:
        draw.text((text.x, text.y), text.text, fill=text.colour, font=_font(text.size), anchor=text.anchor)
    return np.asarray(image)
