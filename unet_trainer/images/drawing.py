"""Images to look at: masks drawn over images, contact sheets, what a model got wrong, and charts."""

from collections.abc import Sequence
from enum import IntEnum

import cv2
import numpy as np

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import find_missing
from unet_trainer.images.mask_decoding import IGNORED

Colour = tuple[int, int, int]

GAP, LINE_HEIGHT, SQUARE, MAX_LEGEND = 8, 24, 18, 40
CELL, COLUMNS = 200, 4  # longer side of an image in a contact sheet, and how many there are in a row
PANEL_SIDE, SAMPLE_SIDE = 512, 224  # longer side of a panel of one image, and of one among several
PANELS = ("image", "truth", "prediction", "errors")
INK, PAPER, DIMMED = (40, 40, 40), 255, 0.35  # of texts, of what is below all, and of the image below the errors
# Distinct on most images, the first with common colour blindness too; further classes start from the first again.
_COLOURS = """
    00c878 ff8200 3c82ff e63ca0 f0dc00 965adc 00c8e6 aa6e3c 0000fa 00fa00 0a5000 007896 dcf096 fa00fa
    6e2864 fab4fa 00508c 6eaa00 96fadc b4465a fabe5a 0028c8 00826e 961e00 82aaf0 78780a b4fa00 f0a0aa
    003ca0 82fa6e fa785a be0ab4 9600e6 6ea05a dcbe8c 8c6ea0 fa3c00 504614 fa82fa fa1e46
"""
COLOURS = np.array([*bytes.fromhex(_COLOURS)], np.uint8).reshape(-1, 3)
BACKGROUND_COLOUR, IGNORED_COLOUR = (0, 0, 0), (128, 128, 128)

# What a pixel of an error map says: WRONG with several classes, FOUND, MISSED and FALSE with a single one.
ErrorKind = IntEnum("ErrorKind", ["FOUND", "IGNORED", "MISSED", "FALSE", "WRONG"])
ERROR_COLOURS: dict[ErrorKind, Colour] = {  # distinct with common colour blindness as well
    ErrorKind.FOUND: (200, 200, 200),
    ErrorKind.IGNORED: IGNORED_COLOUR,
    ErrorKind.MISSED: (60, 130, 255),
    ErrorKind.FALSE: (255, 120, 0),
    ErrorKind.WRONG: (255, 60, 90),
}


def class_colours(num_ids: int, has_background: bool = True) -> tuple[Colour, ...]:
    """RGB of each class id. A class 0 that is no background has the last colour, so that the others keep theirs."""
    return (BACKGROUND_COLOUR if has_background else _colour_of(0), *(_colour_of(index) for index in range(1, num_ids)))


def _colour_of(class_id: int) -> Colour:
    red, green, blue = COLOURS[(class_id - 1) % len(COLOURS)] if class_id != IGNORED else IGNORED_COLOUR
    return int(red), int(green), int(blue)


def display_range(image: Pixels) -> tuple[float, float]:
    """The values of an image of any depth that are shown as black and white, as float64 of numpy."""
    is_missing = find_missing(image)
    held = image if is_missing is None else image[~is_missing]
    low, high = np.percentile(held if held.size else np.arange(2), (1, 99))
    return low, high


def to_display(image: Pixels, shown: tuple[float, float] | None = None) -> Pixels:
    """H,W,C of any depth → H,W,3 uint8: the first three channels; other depths than 8 bit are scaled to the values that
    occur, or to `shown`, the display_range of the whole of which this is a part."""
    if image.dtype != np.uint8:
        low, high = display_range(image) if shown is None else shown
        scaled = (image - low) / max(high - low, 1e-12) * 255
        image = (np.nan_to_num(scaled) if image.dtype.kind == "f" else scaled).clip(0, 255).astype(np.uint8)
    if image.shape[2] == 2:
        return np.dstack([image, np.zeros_like(image[:, :, 0])])
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else np.ascontiguousarray(image[:, :, :3])


def overlay(image: Pixels, ids: Pixels, has_background: bool = True) -> Pixels:
    """H,W,3 image with every class but the background tinted and outlined in its colour; ignored pixels are grey."""
    return overlay_rows(image, ids, None, None, np.array(class_colours(256, has_background), np.uint8))


def overlay_rows(image: Pixels, ids: Pixels, above: Pixels | None, below: Pixels | None, colours: Pixels) -> Pixels:
    """As `overlay`, of some rows of an image. `above` and `below`: ids of the row before and after, None at the image's
    edge, along which no outline lies. `colours`: 256,3, by id; a class 0 that is black is the background."""
    around = np.vstack([ids[:1] if above is None else above, ids, ids[-1:] if below is None else below])
    around = cv2.copyMakeBorder(around, 0, 0, 1, 1, cv2.BORDER_REPLICATE)
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    is_border = (cv2.dilate(around, cross) != cv2.erode(around, cross))[1:-1, 1:-1]
    colour = colours[ids]
    drawn = np.where(is_border[:, :, None], colour, cv2.addWeighted(image, 0.6, colour, 0.4, 0))
    return drawn if colours[0].any() else np.where((ids == 0)[:, :, None], image, drawn)


def contact_sheet(
    pictures: Sequence[tuple[Pixels, Pixels]],
    labels: Sequence[str],
    names: Sequence[str] = (),
    has_background: bool = True,
) -> Pixels:
    """Each image with its overlay beside it and its label above. `names`: of the classes, for a legend below."""
    cells = []
    for (image, ids), label in zip(pictures, labels, strict=True):
        size = _size_within(image, CELL)
        drawn = np.hstack(
            [_pad(_resized(each, size), CELL, CELL + GAP) for each in (image, overlay(image, ids, has_background))]
        )
        cells.append(np.vstack([_text([(label, None)], drawn.shape[1]), drawn]))
    cells += [np.full_like(cells[0], PAPER)] * (-len(cells) % min(COLUMNS, len(cells)))
    rows = [np.hstack(cells[start : start + COLUMNS]) for start in range(0, len(cells), COLUMNS)]
    sheet = np.vstack([_pad(row, row.shape[0] + 2 * GAP, row.shape[1]) for row in rows])
    return np.vstack([sheet, legend([ids for _, ids in pictures], names, has_background, sheet.shape[1])])


def error_sheet(
    samples: Sequence[tuple[Pixels, Pixels, Pixels]], id_names: Sequence[str], has_background: bool, title: str = ""
) -> Pixels:
    """H,W,3 uint8 image, H,W true and predicted ids of each sample → a row of image | truth | prediction | errors, as
    RGB; one legend for all of them. `has_background`: class 0 is what no class is, and has no colour."""
    is_binary, side = has_background and len(id_names) == 2, PANEL_SIDE if len(samples) == 1 else SAMPLE_SIDE
    sizes = [_size_within(truth, side) for _, truth, _ in samples]
    width, rows = max(width for _, width in sizes), list[Pixels]()
    for (image, truth, predicted), size in zip(samples, sizes, strict=True):
        drawn = (image, overlay(image, truth, has_background), overlay(image, predicted, has_background))
        shown = [*(_resized(picture, size) for picture in drawn), error_map(image, truth, predicted, size, is_binary)]
        rows.append(np.hstack([_pad(panel, size[0] + GAP, width + GAP) for panel in shown]))
    heads = np.hstack([_pad(_text([(name, None)], width), LINE_HEIGHT, width + GAP) for name in PANELS])
    panels, width = np.vstack([heads, *rows])[:-GAP, :-GAP], heads.shape[1] - GAP
    titles = [_text([(title, None)], width)] if title else []
    classes = legend([truth for _, truth, _ in samples], id_names, has_background, width)
    words = {"found": ErrorKind.FOUND, "missed": ErrorKind.MISSED, "falsely found": ErrorKind.FALSE}
    of_class = {f"{id_names[1]}, {word}": kind for word, kind in words.items()} if is_binary else {}
    names = of_class or {"wrong": ErrorKind.WRONG}
    meanings = _text([("errors:", None), *((text, ERROR_COLOURS[kind]) for text, kind in names.items())], width)
    whole = np.vstack([*titles, panels, classes, meanings])
    return np.pad(whole, ((GAP, GAP), (GAP, GAP), (0, 0)), constant_values=PAPER)


def error_map(image: Pixels, truth: Pixels, predicted: Pixels, size: tuple[int, int], is_binary: bool) -> Pixels:
    """The image dimmed, with wrong pixels in colour; of one class and background, missed and falsely found ones in two
    colours."""
    grey = (cv2.cvtColor(_resized(image, size), cv2.COLOR_RGB2GRAY) * DIMMED).astype(np.uint8)
    kinds = error_kinds(truth, predicted, size, is_binary)
    colours = np.array([BACKGROUND_COLOUR, *ERROR_COLOURS.values()], np.uint8)
    return np.where(kinds[:, :, None] > 0, colours[kinds], grey[:, :, None])


def error_kinds(truth: Pixels, predicted: Pixels, size: tuple[int, int], is_binary: bool) -> Pixels:
    """H,W ids → h,w of ErrorKind, 0 where there is nothing to show. Made smaller, the highest kind of the pixels that
    one stands for: a small error is not lost."""
    kinds = np.where(truth != predicted, np.uint8(ErrorKind.WRONG), np.uint8(0))
    if is_binary:
        kinds[(truth == 1) & (predicted == 1)] = ErrorKind.FOUND
        kinds[(truth == 1) & (predicted == 0)] = ErrorKind.MISSED
        kinds[(truth == 0) & (predicted == 1)] = ErrorKind.FALSE
    kinds[truth == IGNORED] = ErrorKind.IGNORED
    factor = max(1, -(-truth.shape[0] // size[0]))
    return cv2.resize(cv2.dilate(kinds, np.ones((factor, factor))), size[::-1], interpolation=cv2.INTER_NEAREST)


def legend(masks: Sequence[Pixels], names: Sequence[str], has_background: bool, width: int) -> Pixels:
    """A square and a name for each class that is drawn, and for ignored pixels if a mask has any."""
    drawn = [(name, _colour_of(index)) for index, name in enumerate(names) if index or not has_background]
    entries: list[tuple[str, Colour | None]] = [*drawn[:MAX_LEGEND]]
    if names and any((ids == IGNORED).any() for ids in masks):
        entries.append(("ignored", IGNORED_COLOUR))
    return _text(entries, width)


def _text(entries: Sequence[tuple[str, Colour | None]], width: int) -> Pixels:
    """Texts beside each other on white, each after a square of its colour, in as many rows as it takes. OpenCV draws
    ASCII only. What is longer than a row loses its beginning: names of files end in what differs."""
    rows, place = [np.empty((0, width, 3), np.uint8)], width
    for text, colour in entries:
        start, shown = 0 if colour is None else SQUARE, text.encode("ascii", "replace").decode()
        while len(shown) > 1 and start + _text_width(shown) > width:
            shown = shown[1 + len(shown) // 20 :]
        if place + start + _text_width(shown) > width:
            rows.append(np.full((LINE_HEIGHT, width, 3), PAPER, np.uint8))
            place = 0
        if colour is not None:
            cv2.rectangle(rows[-1], (place, 6), (place + 12, 18), colour, -1)
        corner = (place + start, LINE_HEIGHT - 7)
        cv2.putText(rows[-1], shown, corner, cv2.FONT_HERSHEY_SIMPLEX, 0.45, INK, 1, cv2.LINE_AA)
        place += start + _text_width(shown) + 2 * GAP
    return np.vstack(rows)


def _text_width(text: str) -> int:
    return int(cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)[0][0])


def _size_within(picture: Pixels, side: int) -> tuple[int, int]:
    """Large images are shown smaller, small ones larger by a whole factor."""
    height, width = picture.shape[:2]
    factor = side / max(height, width)
    factor = int(factor) if factor >= 1 else factor
    return max(1, round(height * factor)), max(1, round(width * factor))


def _resized(picture: Pixels, size: tuple[int, int]) -> Pixels:
    shrinks = picture.shape[0] > size[0]
    return cv2.resize(picture, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_NEAREST)


def _pad(picture: Pixels, height: int, width: int) -> Pixels:
    """On white, in the upper left corner."""
    beyond = ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0))
    return np.pad(picture, beyond, constant_values=PAPER)
