"""Outlines and run lengths → pixels, exactly: a pixel belongs to a shape if its centre lies inside.

Coordinates are continuous, x to the right and y down; (0, 0) is the outer corner of the first pixel, whose centre is (0.5, 0.5). A
centre on a right or lower edge of a polygon is inside, on a left or upper edge outside, as with pycocotools: two that share
an edge share no pixel. A polygon that crosses itself is filled by the even-odd rule. What lies beyond the border is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels

MAX_CROSSINGS = 2**28  # rows that the edges of one polygon cross, all together; a million points need a hundredth of it
CHUNK = 2**22  # of them at a time
MAX_DRAWN = 2**35  # pixels visited for one image; a minute of work
CROWD = 2**30  # added to the size of a crowd region, so that every object is smaller
UNCLAIMED = 2**31 - 1
ONE = np.uint8(1)


class Patch(NamedTuple):
    """The pixels of a shape, as a part of the image: row and column of its upper left corner, and H,W bool."""

    top: int
    left: int
    pixels: Pixels

    @property
    def num_pixels(self) -> int:
        return int(np.count_nonzero(self.pixels))


EMPTY = Patch(0, 0, np.zeros((0, 0), np.bool_))


def fill_polygon(points: Pixels, height: int, width: int) -> Patch:
    """The pixels inside the closed outline through `points`, N,2 float64 x and y."""
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
    flips = np.zeros((bottom - top, right - left + 1), np.uint8)
    cuts = [0, *np.unique(np.searchsorted(ends, np.arange(CHUNK, ends[-1], CHUNK))), len(counts)]
    for begin, stop_at in pairwise(cuts):
        edges = np.repeat(np.arange(begin, stop_at), counts[begin:stop_at])
        rows = first[edges] + np.arange(len(edges)) + (ends[begin - 1] if begin else 0) - (ends - counts)[edges]
        x = x0[edges] + (rows + 0.5 - y0[edges]) * slope[edges]
        columns = np.floor(x.clip(left, right) + 0.5).clip(left, right).astype(np.int64)
        places = (rows - top) * flips.shape[1] + columns - left
        np.bitwise_xor.at(flips.reshape(-1), places, ONE)  # a flat index and no other type: eight times faster
    inside = np.bitwise_xor.accumulate(flips[:, :-1], axis=1)
    return Patch(top, left, inside.astype(np.bool_))


def _cells(edges: Any, limit: int) -> Any:
    """The first row or column whose centre lies behind each coordinate, within the image."""
    return np.floor(edges + 0.5).clip(0, limit).astype(np.int64)


def box_corners(x0: float, y0: float, x1: float, y1: float, degrees: float = 0.0) -> Pixels:
    """4,2: the corners of the box between two of them, turned clockwise by `degrees` around its centre."""
    middle = np.array([(x0 + x1) / 2, (y0 + y1) / 2])
    corners = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float64)
    if not degrees:
        return corners
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return middle + (corners - middle) @ np.array([[cosine, sine], [-sine, cosine]])


def fill_ellipse(centre: tuple[float, float], radii: tuple[float, float], height: int, width: int, degrees: float = 0.0) -> Patch:
    """The pixels of an ellipse, turned clockwise by `degrees`; a circle has two equal radii."""
    reach = max(radii)
    cut = _cut_out(centre[0] - reach, centre[1] - reach, centre[0] + reach, centre[1] + reach, height, width)
    if cut is None or min(radii) <= 0:
        return EMPTY
    top, left, rows, columns = cut
    right_by, down_by = columns[None, :] - centre[0], rows[:, None] - centre[1]
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    along, across = cosine * right_by + sine * down_by, cosine * down_by - sine * right_by
    return Patch(top, left, (along / radii[0]) ** 2 + (across / radii[1]) ** 2 <= 1)


def draw_line(points: Pixels, line_width: float, height: int, width: int) -> Patch:
    """The pixels whose centre is at most half of `line_width` away from the line through `points`."""
    reach = line_width / 2
    parts = []
    for (x0, y0), (x1, y1) in zip(points[:-1].tolist(), points[1:].tolist(), strict=True):
        cut = _cut_out(min(x0, x1) - reach, min(y0, y1) - reach, max(x0, x1) + reach, max(y0, y1) + reach, height, width)
        if cut is None:
            continue
        top, left, rows, columns = cut
        right_by, down_by = columns[None, :] - x0, rows[:, None] - y0
        length_squared = (x1 - x0) ** 2 + (y1 - y0) ** 2
        share = ((right_by * (x1 - x0) + down_by * (y1 - y0)) / (length_squared or 1.0)).clip(0, 1)
        distance_squared = (right_by - share * (x1 - x0)) ** 2 + (down_by - share * (y1 - y0)) ** 2
        parts.append(Patch(top, left, distance_squared <= reach**2))
    return join(parts)


def _cut_out(x0: float, y0: float, x1: float, y1: float, height: int, width: int) -> tuple[int, int, Pixels, Pixels] | None:
    """Top, left, and the centres of rows and columns of the part of the image between two corners; None if there is none."""
    top, bottom = (min(max(side, 0), height) for side in (math.ceil(y0 - 0.5), math.floor(y1 - 0.5) + 1))
    left, right = (min(max(side, 0), width) for side in (math.ceil(x0 - 0.5), math.floor(x1 - 0.5) + 1))
    if top >= bottom or left >= right:
        return None
    return top, left, np.arange(top, bottom) + 0.5, np.arange(left, right) + 0.5


def paste(bitmap: Pixels, left: int, top: int, height: int, width: int) -> Patch:
    """A bitmap, H,W bool, with its upper left pixel at `left` and `top`."""
    rows, columns = bitmap.shape
    first_row, first_column = max(0, -top), max(0, -left)
    kept = bitmap[first_row : max(first_row, min(rows, height - top)), first_column : max(first_column, min(columns, width - left))]
    return Patch(max(0, top), max(0, left), kept) if kept.size else EMPTY


def join(patches: Sequence[Patch]) -> Patch:
    """All pixels that at least one of them has."""
    patches = [patch for patch in patches if patch.pixels.size]
    if len(patches) < 2:
        return patches[0] if patches else EMPTY
    top, left = min(patch.top for patch in patches), min(patch.left for patch in patches)
    bottom = max(patch.top + patch.pixels.shape[0] for patch in patches)
    right = max(patch.left + patch.pixels.shape[1] for patch in patches)
    joined = np.zeros((bottom - top, right - left), np.bool_)
    for patch in patches:
        rows, columns = patch.pixels.shape
        joined[patch.top - top : patch.top - top + rows, patch.left - left : patch.left - left + columns] |= patch.pixels
    return Patch(top, left, joined)


def without(patch: Patch, holes: Sequence[Patch]) -> Patch:
    """The pixels of a patch that are in none of the holes."""
    hole = join(holes)
    if not hole.pixels.size or not patch.pixels.size:
        return patch
    kept = patch.pixels.copy()
    rows, columns = kept.shape
    inside = paste(hole.pixels, hole.left - patch.left, hole.top - patch.top, rows, columns)
    area = kept[inside.top : inside.top + inside.pixels.shape[0], inside.left : inside.left + inside.pixels.shape[1]]
    area &= ~inside.pixels
    return Patch(patch.top, patch.left, kept)


class Canvas:
    """The class ids of one image, drawn shape by shape.

    With `smaller_on_top`, of two shapes the one with fewer pixels is seen, whatever their order (of equal ones the later);
    without it, the later. Counts the pixels that shapes of different classes claim.
    """

    def __init__(self, height: int, width: int, smaller_on_top: bool) -> None:
        self.ids = np.zeros((height, width), np.uint8)
        self.contested = np.zeros((height, width), np.bool_)
        self.sizes = np.full((height, width), UNCLAIMED, np.int32) if smaller_on_top else None
        self.num_drawn = 0

    def draw(self, patch: Patch, class_id: int, is_crowd: bool = False) -> int:
        """Draws a shape; a crowd region is below all others. Returns its number of pixels. Raises DataError after MAX_DRAWN."""
        rows, columns = patch.pixels.shape
        self.num_drawn += rows * columns
        if self.num_drawn > MAX_DRAWN:
            raise DataError("its shapes cover the image thousands of times; need fewer or smaller ones")
        area = (slice(patch.top, patch.top + rows), slice(patch.left, patch.left + columns))
        num_pixels = patch.num_pixels
        ids, pixels = self.ids[area], patch.pixels
        if class_id:
            self.contested[area] |= pixels & (ids != 0) & (ids != class_id)
        if self.sizes is not None:
            size, sizes = num_pixels + CROWD * is_crowd, self.sizes[area]
            pixels = pixels & (sizes >= size)
            sizes[pixels] = size
        ids[pixels] = class_id
        return num_pixels

    @property
    def num_contested(self) -> int:
        return int(np.count_nonzero(self.contested))
