"""What a model got wrong: image | truth | prediction | errors of one image, or of several below each other, with a legend."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import cv2
import numpy as np

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.overlays import IGNORED_COLOUR, legend, overlay

Colour = tuple[int, int, int]

MAX_SIDE = 512  # of a panel's longer side: large images are shown smaller, small ones larger by a whole factor
SAMPLE_SIDE = 224  # the same of one among several images
PANELS = ("image", "truth", "prediction", "errors")
GAP = 8
LINE_HEIGHT = 24
LETTER_WIDTH = 9  # of the font below, at most
INK, PAPER = (40, 40, 40), 255
DIMMED = 0.35  # of the image below the errors
# Distinct with common colour blindness as well.
RIGHT_COLOUR, MISSED_COLOUR, FALSE_COLOUR, WRONG_COLOUR = (200, 200, 200), (60, 130, 255), (255, 120, 0), (255, 60, 90)


class ErrorKind(IntEnum):
    """What a pixel of an error map says."""

    FOUND = 1  # of the class, with one class against a background
    IGNORED = 2
    MISSED = 3
    FALSE = 4
    WRONG = 5  # with several classes


ERROR_COLOURS: dict[ErrorKind, Colour] = {
    ErrorKind.FOUND: RIGHT_COLOUR,
    ErrorKind.IGNORED: IGNORED_COLOUR,
    ErrorKind.MISSED: MISSED_COLOUR,
    ErrorKind.FALSE: FALSE_COLOUR,
    ErrorKind.WRONG: WRONG_COLOUR,
}


def error_picture(
    image: Pixels, truth: Pixels, predicted: Pixels, id_names: Sequence[str], title: str, has_background: bool
) -> Pixels:
    """H,W,3 uint8 image and H,W ids at one size → RGB. `has_background`: class 0 is what no class is, and has no colour."""
    is_binary = has_background and len(id_names) == 2
    panels = _panels(image, truth, predicted, has_background, is_binary, MAX_SIDE)
    sheet = np.vstack([_beside([_text_line([(name, None)], panels[0].shape[1]) for name in PANELS]), _beside(panels)])
    rows = [_text_line([(title, None)], sheet.shape[1]), sheet, *_legends([truth], id_names, has_background, sheet.shape[1])]
    return np.pad(np.vstack(rows), ((GAP, GAP), (GAP, GAP), (0, 0)), constant_values=PAPER)


def sample_sheet(
    images: Sequence[Pixels],
    truths: Sequence[Pixels],
    predictions: Sequence[Pixels],
    id_names: Sequence[str],
    has_background: bool,
) -> Pixels:
    """A row for each image, as in error_picture; one legend for all of them."""
    is_binary = has_background and len(id_names) == 2
    rows = [_panels(*one, has_background, is_binary, SAMPLE_SIDE) for one in zip(images, truths, predictions, strict=True)]
    width = max(panel.shape[1] for panels in rows for panel in panels)
    header = _beside([_text_line([(name, None)], width) for name in PANELS])
    shown = [_beside([_widened(panel, width) for panel in panels]) for panels in rows]
    gap = np.full((GAP, header.shape[1], 3), PAPER, np.uint8)
    parts = [header, *(part for row in shown for part in (row, gap)), *_legends(truths, id_names, has_background, header.shape[1])]
    return np.pad(np.vstack(parts), ((0, GAP), (GAP, GAP), (0, 0)), constant_values=PAPER)


def _panels(image: Pixels, truth: Pixels, predicted: Pixels, has_background: bool, is_binary: bool, most: int) -> list[Pixels]:
    """Those of PANELS, none of their sides longer than `most`."""
    size = _panel_size(truth.shape[0], truth.shape[1], most)
    return [
        _resized(image, size),
        _resized(overlay(image, truth, has_background), size),
        _resized(overlay(image, predicted, has_background), size),
        error_map(image, truth, predicted, size, is_binary),
    ]


def _beside(pictures: Sequence[Pixels]) -> Pixels:
    white = np.full((pictures[0].shape[0], GAP, 3), PAPER, np.uint8)
    return np.hstack([part for picture in pictures for part in (picture, white)][:-1])


def _widened(picture: Pixels, width: int) -> Pixels:
    return np.pad(picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)), constant_values=PAPER)


def error_map(image: Pixels, truth: Pixels, predicted: Pixels, size: tuple[int, int], is_binary: bool) -> Pixels:
    """The image dimmed, with wrong pixels in colour; of one class and background, missed and falsely found ones in two colours.

    Made smaller, a pixel is wrong if any of those that it stands for is.
    """
    grey = cv2.cvtColor(_resized(image, size), cv2.COLOR_RGB2GRAY) * DIMMED
    result = np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    kinds = error_kinds(truth, predicted, size, is_binary)
    for kind, colour in ERROR_COLOURS.items():
        result[kinds == kind] = colour
    return result


def error_kinds(truth: Pixels, predicted: Pixels, size: tuple[int, int], is_binary: bool) -> Pixels:
    """H,W ids → h,w of ErrorKind, 0 where there is nothing to show; made smaller as error_map says."""
    is_counted = truth != IGNORED
    is_wrong = (truth != predicted) & is_counted
    if is_binary:
        layers = [((truth == 1) & (predicted == 1), ErrorKind.FOUND)]
        errors = [(is_wrong & (truth == 1), ErrorKind.MISSED), (is_wrong & (predicted == 1), ErrorKind.FALSE)]
    else:
        layers, errors = [], [(is_wrong, ErrorKind.WRONG)]
    kinds = np.zeros(size, np.uint8)
    for mask, kind in [*layers, (~is_counted, ErrorKind.IGNORED)]:
        kinds[_coverage(mask, size) >= 0.5] = kind
    coverages = [_coverage(mask, size) for mask, _ in errors]
    most = np.max(coverages, axis=0)
    for coverage, (_, kind) in zip(coverages, errors, strict=True):
        kinds[(coverage > 0) & (coverage == most)] = kind
    return kinds


def _panel_size(height: int, width: int, most: int) -> tuple[int, int]:
    longest = max(height, width)
    if longest > most:
        return max(1, round(height * most / longest)), max(1, round(width * most / longest))
    factor = most // longest
    return height * factor, width * factor


def _resized(picture: Pixels, size: tuple[int, int]) -> Pixels:
    shrinks = picture.shape[0] > size[0]
    return cv2.resize(picture, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_NEAREST)


def _coverage(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Share of each pixel that the mask covers, at another size."""
    return _resized(mask.astype(np.float32), size)


def _legends(truths: Sequence[Pixels], id_names: Sequence[str], has_background: bool, width: int) -> list[Pixels]:
    """The classes, then what the errors' colours mean."""
    kinds: list[tuple[str, Colour | None]] = [("wrong", WRONG_COLOUR)]
    if has_background and len(id_names) == 2:
        name = id_names[1]
        kinds = [(f"{name}, found", RIGHT_COLOUR), (f"{name}, missed", MISSED_COLOUR), (f"{name}, falsely found", FALSE_COLOUR)]
    return [legend(truths, id_names, has_background, width), _text_line([("errors:", None), *kinds], width)]


def _text_line(entries: Sequence[tuple[str, Colour | None]], width: int) -> Pixels:
    """Texts beside each other on white, each after a square of its colour. OpenCV draws ASCII only; what is too long is cut."""
    line = np.full((LINE_HEIGHT, width, 3), PAPER, np.uint8)
    place = 0
    for text, colour in entries:
        if colour is not None:
            cv2.rectangle(line, (place, 6), (place + 12, 18), colour, -1)
            place += 18
        shown = text.encode("ascii", "replace").decode()
        most = max(4, (width - place) // LETTER_WIDTH)
        shown = shown if len(shown) <= most else f"{shown[: most - 3]}..."
        cv2.putText(line, shown, (place, LINE_HEIGHT - 7), cv2.FONT_HERSHEY_SIMPLEX, 0.45, INK, 1, cv2.LINE_AA)
        place += LETTER_WIDTH * len(shown) + 2 * GAP
    return line
