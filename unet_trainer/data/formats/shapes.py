"""Outlines and run lengths → pixels, exactly: a pixel belongs to a shape if its centre lies inside. Each function adds
its shape to a canvas, H,W bool; what lies beyond the border is cut off.

Coordinates are continuous, x to the right and y down; (0, 0) is the outer corner of the first pixel, whose centre is
(0.5, 0.5). A centre on a right or lower edge of a polygon is inside, on a left or upper edge outside, as with
pycocotools: two that share an edge share no pixel. A polygon that crosses itself is filled by the even-odd rule."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels

MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_CROSSINGS = 2**25  # rows that the edges of one polygon cross, all together: 2 GB while it is filled
ROUND = 1.00001  # makes a polygon of a point each half degree as large as its circle, and centres on it belong to it


def paste(canvas: Pixels, top: int, left: int, pixels: Pixels) -> None:
    """Add H,W bool with its upper left pixel at `top` and `left`."""
    pixels = pixels[max(0, -top) :, max(0, -left) :]
    place = canvas[max(0, top) :, max(0, left) :][: pixels.shape[0], : pixels.shape[1]]
    place |= pixels[: place.shape[0], : place.shape[1]]


def as_points(value: Any) -> Pixels:
    """N,2 float64 from [[x, y], ...] or [x, y, x, y, ...], none of it NaN or so large that nothing can be drawn."""
    points = np.array(value, np.float64)
    if points.ndim == 1 and points.size % 2 == 0:
        points = points.reshape(-1, 2)
    if points.ndim != 2 or points.shape[1] < 2 or not (np.abs(points) <= MAX_COORDINATE).all():
        need = f"need x and y of each point, numbers up to {MAX_COORDINATE:.0f}"
        raise ReadError(f"coordinates are {value!r:.60}; {need}")
    return points[:, :2]


def fill_polygon(canvas: Pixels, points: Pixels) -> None:
    """Fill the closed outline through `points`, N,2 float64 x and y; fewer than three have no pixel."""
    height, width = canvas.shape
    start, stop = points, np.roll(points, -1, axis=0)
    goes_up = (start[:, 1] > stop[:, 1])[:, None]  # each edge downwards: one that two polygons share is equal in both
    (x0, y0), (x1, y1) = np.where(goes_up, stop, start).T, np.where(goes_up, start, stop).T
    first, end = _cells(y0, height), _cells(y1, height)  # rows whose centre an edge crosses
    crosses = first < end
    if len(points) < 3 or not crosses.any():
        return
    left, right = int(_cells(points[:, 0].min(), width)), int(_cells(points[:, 0].max(), width))
    x0, y0, first, counts = x0[crosses], y0[crosses], first[crosses], (end - first)[crosses]
    slope = (x1[crosses] - x0) / (y1[crosses] - y0)
    top, bottom, ends = int(first.min()), int((first + counts).max()), np.cumsum(counts)
    if ends[-1] > MAX_CROSSINGS:
        raise DataError(f"an outline of {len(points)} points that crosses {ends[-1]} rows; need a simpler one")
    edges = np.repeat(np.arange(len(counts)), counts)
    rows = first[edges] + np.arange(len(edges)) - (ends - counts)[edges]
    x = x0[edges] + (rows + 0.5 - y0[edges]) * slope[edges]
    columns = np.floor(x.clip(left, right) + 0.5).clip(left, right).astype(np.int64)
    flips = np.zeros((bottom - top, right - left + 1), np.uint8)
    # A flat index and an operand of the same type: eight times faster.
    np.bitwise_xor.at(flips.reshape(-1), (rows - top) * flips.shape[1] + columns - left, np.uint8(1))
    paste(canvas, top, left, np.bitwise_xor.accumulate(flips[:, :-1], axis=1).astype(np.bool_))


def _cells(edges: Any, limit: int) -> Any:
    """The first row or column whose centre lies behind each coordinate, within the image."""
    return np.floor(edges + 0.5).clip(0, limit).astype(np.int64)


def draw_line(canvas: Pixels, points: Pixels, width: float) -> None:
    """Fill what is at most half of `width` away from the line through `points`; a circle is a line to itself."""
    for start, stop in pairwise(points):
        angles = np.linspace(-np.pi / 2, np.pi / 2, 361) + math.atan2(stop[1] - start[1], stop[0] - start[0])
        half = ROUND * width / 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        fill_polygon(canvas, np.concatenate([stop + half, start - half]))


def fill_runs(canvas: Pixels, starts: Sequence[int], lengths: Sequence[int]) -> None:
    """Fill runs of pixels, down the columns, that lie inside of the image; the first pixel is 0."""
    height, runs = len(canvas), [*zip(starts, map(sum, zip(starts, lengths, strict=True)), strict=True)]
    left, right = min(starts, default=0) // height, -(-max((stop for _, stop in runs), default=0) // height)
    flat = np.zeros((right - left) * height, np.bool_)
    for start, stop in runs:
        flat[start - left * height : stop - left * height] = True
    paste(canvas, 0, left, flat.reshape(-1, height).T)


def fill_counts(canvas: Pixels, counts: Any) -> None:
    """Fill COCO's run lengths, down the columns, by turns outside and inside: a list, or compressed."""
    counts = _decompress(counts) if isinstance(counts, str) else counts
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != canvas.size:
        raise DataError(f"run lengths that are not {canvas.size} pixels together, those of the image")
    fill_runs(canvas, np.cumsum(counts)[:-1:2].tolist(), counts[1::2])


def _decompress(text: str) -> list[int]:
    """COCO's compressed run lengths: each number in groups of five bits, lowest first, with a bit that says whether
    more follow, plus 48; from the fourth on, the difference to the number two before. pycocotools reads past the end of
    a damaged text."""
    words = re.findall("[P-o]{0,12}[0-O]", text)
    if sum(map(len, words)) < len(text):
        need = "need the characters 0 to o of COCO's compressed format, to the end of a number"
        raise DataError(f"run lengths {text!r:.60}; {need}")
    counts: list[int] = []
    for word in words:
        number = sum((ord(character) - 48 & 0x1F) << 5 * place for place, character in enumerate(word))
        number -= (ord(word[-1]) - 48 & 0x10) << 5 * len(word) - 4  # negative
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
    return counts
