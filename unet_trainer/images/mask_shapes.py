"""The shapes in a mask: outlines as polygons, centre lines, and how its values lie. Decides nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.image_decoding import Pixels

Ring = NDArray[np.int64]  # n,2: column and row of each corner, the first not repeated at the end
# Neighbours of a pixel as the bits of a number, anticlockwise from the right, which is 1.
NEIGHBOURS = np.array([[8, 4, 2], [16, 0, 1], [32, 64, 128]], np.float32)

# Outlines. Unlike OpenCV's contours, which run through the centres of pixels, a polygon covers exactly the pixels of
# its object. Pixels that touch at a corner only belong to different objects, and no ring touches itself: the polygons
# are valid ones.


@dataclass(frozen=True)
class Polygon:
    """One object. Its outer ring runs clockwise as displayed, its holes the other way round."""

    outer: Ring
    holes: Sequence[Ring]
    num_pixels: int


def find_polygons(ids: Pixels) -> Iterator[tuple[int, Polygon]]:
    """Class id and outline of every object of an H,W mask but those of class 0; class by class, from top to bottom."""
    for class_id in (np.flatnonzero(cv2.calcHist([ids], [0], None, [256], [0, 256])[1:]) + 1).tolist():
        _, labels, boxes, _ = cv2.connectedComponentsWithStats((ids == class_id).astype(np.uint8), connectivity=4)
        for label in np.argsort(boxes[1:, cv2.CC_STAT_TOP], kind="stable") + 1:
            left, top, width, height, num_pixels = boxes[label].tolist()
            is_object = (labels[top : top + height, left : left + width] == label).astype(np.uint8)
            # Each pixel becomes 2×2: a contour is then a quarter of a pixel from the edge, and rounds to its corner.
            doubled = cv2.resize(is_object, None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
            contours, tree = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
            rings = [_ring(contour[:, 0]) + np.array([left, top]) for contour in contours]
            outer = int(np.argmin(tree[0, :, 3]))  # the one without a parent
            yield class_id, Polygon(rings[outer], rings[:outer] + rings[outer + 1 :], num_pixels)


def _ring(contour: Pixels) -> Ring:
    """The corners of a contour in a doubled mask. OpenCV runs the other way round. An inner corner comes twice: as the
    two ends of a step from one edge to the next."""
    points = (contour[::-1].astype(np.int64) + 1) // 2
    return points[(points != np.roll(points, 1, axis=0)).any(1)]


def joined_rings(polygon: Polygon) -> Ring:
    """One ring with the same inside, for formats without holes: it goes to each hole and back along the same line."""
    ring = polygon.outer
    for hole in polygon.holes:
        first = int(np.lexsort((hole[:, 0], hole[:, 1]))[0])
        nearest = int(np.abs(ring - hole[first]).sum(1).argmin())
        there = np.concatenate([hole[first:], hole[: first + 1]])
        ring = np.concatenate([ring[: nearest + 1], there, ring[nearest:]])
    return ring


# Centre lines: thinning by Guo and Hall (1989), in the form of Lam, Lee and Suen (1992). Pixels are removed from the
# edge inwards, in two alternating passes; no 8-connected part of the mask falls apart or vanishes. The result is a line
# of one pixel's width.


def thin(mask: Pixels) -> Pixels:
    """H,W mask (0: outside) → H,W uint8 of 0 and 1. Beyond the border of the image nothing belongs to the mask."""
    lines = cv2.copyMakeBorder((mask != 0).astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    before = lines[:0]
    while not np.array_equal(lines, before):
        before = lines.copy()
        for is_removable in REMOVABLE:
            codes = cv2.filter2D(lines, -1, NEIGHBOURS, borderType=cv2.BORDER_CONSTANT)
            lines ^= cv2.LUT(codes, is_removable) & lines
    return np.ascontiguousarray(lines[1:-1, 1:-1])


def _removable_pixels() -> tuple[Pixels, Pixels]:
    """For the first and the second pass: whether a pixel with these neighbours is removed. Names as in the paper."""
    tables = np.zeros((2, 256), np.uint8)
    for code in range(256):
        x = [0, *(code >> bit & 1 for bit in range(8)), code & 1]  # x[1] to x[8], and x[1] again
        crossings = sum(not x[k] and bool(x[k + 1] or x[k + 2]) for k in (1, 3, 5, 7))
        n1, n2 = (sum(x[k + side] | x[k + side + 1] for k in (1, 3, 5, 7)) for side in (0, 1))
        if crossings == 1 and 2 <= min(n1, n2) <= 3:
            tables[0, code] = not ((x[2] or x[3] or not x[8]) and x[1])
            tables[1, code] = not ((x[6] or x[7] or not x[4]) and x[5])
    return tables[0], tables[1]


REMOVABLE = _removable_pixels()


# How the values of a mask lie: classes fill areas, void and soft edges are thin, objects are pieces.


@dataclass(frozen=True)
class MaskStructure:
    """Of a mask of three values or more. A pixel is solid where its four neighbours have its value."""

    solid: dict[int, int]  # value → number of its solid pixels
    num_pieces: int  # connected pieces of solid pixels, each of a single value but 0
    void_is_apart: bool  # 255 touches nothing but 0, and no border, as an object may


def measure_structure(mask: Pixels) -> MaskStructure:
    """H,W as decode_mask gives it."""
    is_solid = np.ones(mask.shape, np.bool_)
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        is_same = mask[one] == mask[other]
        is_solid[one] &= is_same
        is_solid[other] &= is_same
    if mask.dtype == np.int32:  # colours
        values, counts = np.unique(mask[is_solid], return_counts=True)
    else:  # ten times faster
        size = int(np.iinfo(mask.dtype).max) + 1
        counts = cv2.calcHist([mask], [0], is_solid.view(np.uint8), [size], [0, size]).ravel().astype(np.int64)
        values = np.flatnonzero(counts)
        counts = counts[values]
    num_labels, _ = cv2.connectedComponents((is_solid & (mask != 0)).astype(np.uint8), connectivity=4)
    is_apart = False
    if (mask == 255).any():
        padded = np.pad(mask, 1, constant_values=1)  # beyond the border is no background
        is_void = (padded == 255).astype(np.uint8)
        beside_void = padded[cv2.dilate(is_void, np.ones((3, 3), np.uint8)) > is_void]
        is_apart = len(beside_void) > 0 and not beside_void.any()
    return MaskStructure(dict(zip(values.tolist(), counts.tolist(), strict=True)), num_labels - 1, bool(is_apart))
