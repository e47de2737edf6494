"""Outlines and run lengths → pixels, exactly: a pixel belongs to a shape if its centre lies inside.

Coordinates are continuous, x to the right and y down; (0, 0) is the outer corner of the first pixel, whose centre is
(0.5, 0.5). A centre on a right or lower edge of a polygon is inside, on a left or upper edge outside, as with
pycocotools: two that share an edge share no pixel. A polygon that crosses itself is filled by the even-odd rule. What
lies beyond the border is cut off."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import Pixels

MAX_CROSSINGS = 2**25  # rows that the edges of one polygon cross, all together: 2 GB while it is filled
MAX_DRAWN = 2**35  # pixels visited for one image; a minute of work
CROWD = 2**30  # added to the size of a crowd region, so that every object is smaller
UNCLAIMED = 2**31 - 1
ROUND = 1.00001  # makes a polygon of a point each half degree as large as its circle, and centres on it belong to it


class Patch(NamedTuple):
    """The pixels of a shape, as a part of the image: row and column of its upper left corner, and H,W bool."""

    top: int
    left: int
    pixels: Pixels

    @property
    def area(self) -> tuple[slice, slice]:
        rows, columns = self.pixels.shape
        return slice(self.top, self.top + rows), slice(self.left, self.left + columns)


EMPTY = Patch(0, 0, np.zeros((0, 0), np.bool_))


def fill_polygon(points: Pixels, height: int, width: int) -> Patch:
    """The pixels inside the closed outline through `points`, N,2 float64 x and y; none of fewer than three points."""
    if len(points) < 3:
        return EMPTY
    start, stop = points, np.roll(points, -1, axis=0)
    goes_up = start[:, 1] > stop[:, 1]  # each edge downwards: the edge that two polygons share is the same for both
    (x0, y0), (x1, y1) = np.where(goes_up[:, None], stop, start).T, np.where(goes_up[:, None], start, stop).T
    first, end = _cells(y0, height), _cells(y1, height)  # rows whose centre an edge crosses
    crosses = first < end
    left, right = int(_cells(points[:, 0].min(), width)), int(_cells(points[:, 0].max(), width))
    if not crosses.any() or left >= right:
        return EMPTY
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
    return Patch(top, left, np.bitwise_xor.accumulate(flips[:, :-1], axis=1).astype(np.bool_))


def _cells(edges: Any, limit: int) -> Any:
    """The first row or column whose centre lies behind each coordinate, within the image."""
    return np.floor(edges + 0.5).clip(0, limit).astype(np.int64)


def box_outline(x0: float, y0: float, x1: float, y1: float) -> Pixels:
    """The box between two corners."""
    return np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float64)


def circle_outline(x: float, y: float, radius: float) -> Pixels:
    angles = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    return np.stack([x + ROUND * radius * np.cos(angles), y + ROUND * radius * np.sin(angles)], axis=1)


def draw_line(points: Pixels, line_width: float, height: int, width: int) -> Patch:
    """The pixels whose centre is at most half of `line_width` away from the line through `points`."""
    patches = []
    for start, stop in pairwise(points):
        half = np.linspace(-np.pi / 2, np.pi / 2, 361) + math.atan2(stop[1] - start[1], stop[0] - start[0])
        ends = [(stop, half), (start, half + np.pi)]
        around = [
            end + ROUND * line_width / 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1) for end, angles in ends
        ]
        patches.append(fill_polygon(np.concatenate(around), height, width))
    return join(patches)


# Pictures and run lengths


def paste(bitmap: Pixels, left: int, top: int, height: int, width: int) -> Patch:
    """A bitmap, H,W bool, with its upper left pixel at `left` and `top`."""
    kept = bitmap[max(0, -top) : max(0, height - top), max(0, -left) : max(0, width - left)]
    return Patch(max(0, top), max(0, left), kept) if kept.size else EMPTY


def crop(pixels: Pixels) -> Patch:
    """The part of an image that holds all its pixels, H,W bool."""
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    if not rows.size:
        return EMPTY
    return Patch(int(rows[0]), int(columns[0]), pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def join(patches: Sequence[Patch]) -> Patch:
    """All pixels that at least one of them has."""
    patches = [patch for patch in patches if patch.pixels.size]
    if len(patches) < 2:
        return patches[0] if patches else EMPTY
    top, left = min(patch.top for patch in patches), min(patch.left for patch in patches)
    bottom, right = (max(patch.area[side].stop for patch in patches) for side in (0, 1))
    joined = np.zeros((bottom - top, right - left), np.bool_)
    for patch in patches:
        joined[patch._replace(top=patch.top - top, left=patch.left - left).area] |= patch.pixels
    return Patch(top, left, joined)


def unroll(runs: Sequence[Any], height: int, width: int) -> Pixels:
    """H,W bool from run lengths along the rows, by turns outside and inside; raises DataError if they do not fit the
    size."""
    if any(type(run) is not int or run < 0 for run in runs) or sum(runs) != height * width:
        raise DataError(f"run lengths that are not {height * width} pixels together, those of the image")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)


def fill_runs(text: str, height: int, width: int, down_columns: bool) -> Patch:
    """From the start, counted from 1, and the length of each run: "3 2 9 4", as in tables of Kaggle. Raises ValueError,
    of which DataError is one."""
    numbers, area = np.array([int(word) for word in text.split()]).reshape(-1, 2) - [1, 0], height * width
    starts, lengths = numbers.T
    if numbers.min() < 0 or numbers.max() > area or (starts + lengths).max() > area or lengths.sum() > area:
        raise DataError(f"run lengths beyond the {area} pixels of the image, {width}×{height}")
    if not lengths.any():
        return EMPTY
    side = height if down_columns else width
    first, last = int(starts.min()) // side, int((starts + lengths).max() - 1) // side
    flat = np.zeros((last + 1 - first) * side, np.bool_)
    for start, length in zip((starts - first * side).tolist(), lengths.tolist(), strict=True):
        flat[start : start + length] = True
    patch = crop(flat.reshape(-1, side).T if down_columns else flat.reshape(-1, side))
    return patch._replace(left=patch.left + first) if down_columns else patch._replace(top=patch.top + first)


def decompress_runs(text: str) -> list[int]:
    """COCO's compressed run lengths: each number in groups of five bits, lowest first, with a bit that says whether
    more follow, plus 48; from the fourth on, the difference to the number two before. Raises DataError.

    pycocotools reads past the end of a damaged text, and gives uninitialized pixels where runs are too short."""
    runs: list[int] = []
    number = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 60:
            raise DataError(f"run lengths with {character!r}; need the characters 0 to o of COCO's compressed format")
        number |= (code & 0x1F) << shift
        shift += 5
        if not code & 0x20:
            number -= (1 << shift) if code & 0x10 else 0  # negative
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = shift = 0
    if shift:
        raise DataError("run lengths that end in the middle of a number")
    return runs


class Canvas:
    """The class ids of one image, drawn shape by shape.

    With `smaller_on_top`, of two shapes the one with fewer pixels is seen, whatever their order (of equal ones the
    later); without it, the later. Counts the pixels that shapes of different classes claim.
    """

    def __init__(self, height: int, width: int, smaller_on_top: bool) -> None:
        self.ids = np.zeros((height, width), np.uint8)
        self.contested = np.zeros((height, width), np.bool_)
        self.sizes = np.full((height, width), UNCLAIMED, np.int32) if smaller_on_top else None
        self.num_drawn = 0

    def draw(self, patch: Patch, class_id: int, is_crowd: bool = False) -> int:
        """Draws a shape; a crowd region is below all others. Returns its number of pixels. Raises DataError after
        MAX_DRAWN."""
        self.num_drawn += patch.pixels.size
        if self.num_drawn > MAX_DRAWN:
            raise DataError("its shapes cover the image thousands of times; need fewer or smaller ones")
        num_pixels = int(np.count_nonzero(patch.pixels))
        ids, pixels = self.ids[patch.area], patch.pixels
        if class_id:
            self.contested[patch.area] |= pixels & (ids != 0) & (ids != class_id)
        if self.sizes is not None:
            size, sizes = num_pixels + CROWD * is_crowd, self.sizes[patch.area]
            pixels = pixels & (sizes >= size)
            sizes[pixels] = size
        ids[pixels] = class_id
        return num_pixels
