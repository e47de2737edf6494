"""The shapes in a mask: outlines as polygons, centre lines, and how its values lie. Decides nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import COLOUR

Ring = NDArray[np.int64]  # n,2: column and row of each corner, the first not repeated at the end
# Neighbours of a pixel as the bits of a number, anticlockwise from the right, which is 1.
NEIGHBOURS = np.array([[8, 4, 2], [16, 0, 1], [32, 64, 128]], np.float32)
EDGE_WIDTH = 48  # greys within this distance of the darkest or the brightest value belong to it
MIN_EDGE = 4 * EDGE_WIDTH  # between the darkest and the brightest value of masks with soft edges
EDGE_SIDE = 7  # pixels: in a square of this side around a pixel of a soft edge lie both ends
PIECES_SIDE = 256  # pieces are counted in a smaller mask

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


@dataclass(frozen=True)
class MaskStructure:
    """Of a mask of three values or more."""

    num_values: int  # values but 0, in a smaller mask
    num_pieces: int  # connected pieces of one of these values
    stray: int  # pixels of greys far from both the darkest and the brightest one, and not between the two
    solid: dict[int, int]  # value → its pixels whose neighbours all have the same value


def measure_structure(mask: Pixels) -> MaskStructure:
    """H,W as decode_mask gives it."""
    num_values, num_pieces = _count_pieces(mask)
    pixels = mask
    if mask.dtype == np.int32:  # colours. OpenCV has no morphology for int32, and float32 is exact up to 2**24
        pixels = np.where(mask >= COLOUR, mask - COLOUR, -1 - mask).astype(np.float32)
    square = np.ones((3, 3), np.uint8)
    is_solid = cv2.compare(cv2.dilate(pixels, square), cv2.erode(pixels, square), cv2.CMP_EQ)
    if mask.dtype == np.int32:
        values, counts = np.unique(mask[is_solid > 0], return_counts=True)
    else:  # ten times faster
        size = int(np.iinfo(mask.dtype).max) + 1
        counts = cv2.calcHist([mask], [0], is_solid, [size], [0, size]).ravel().astype(np.int64)
        values = np.flatnonzero(counts)
        counts = counts[values]
    solid = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return MaskStructure(num_values, num_pieces, _stray_greys(mask), solid)


def _stray_greys(mask: Pixels) -> int:
    """Soft edges have both ends nearby: in a square of EDGE_SIDE pixels. None if the ends are close to each other."""
    low, high = int(mask.min()), int(mask.max())
    if mask.dtype != np.uint8 or high - low < MIN_EDGE:
        return 0
    is_low, is_high = mask <= low + EDGE_WIDTH, mask >= high - EDGE_WIDTH
    square = np.ones((EDGE_SIDE, EDGE_SIDE), np.uint8)
    near_low, near_high = (cv2.dilate(end.astype(np.uint8), square) > 0 for end in (is_low, is_high))
    return int(np.count_nonzero(~(is_low | is_high | (near_low & near_high))))


def piece_stride(size: tuple[int, ...]) -> int:
    """Every so many rows and columns of a mask of this height and width are taken to count its pieces."""
    return -(-max(size) // PIECES_SIDE)


def _count_pieces(mask: Pixels) -> tuple[int, int]:
    """Values but 0, and pieces of a single one of them, touching along an edge."""
    stride = piece_stride(mask.shape)
    small = mask[::stride, ::stride]
    # A grid of pixels and of the links between them: a link is there where both pixels have the same value.
    grid = np.zeros((2 * small.shape[0] - 1, 2 * small.shape[1] - 1), np.uint8)
    grid[::2, ::2] = small != 0
    grid[1::2, ::2] = (small[1:] == small[:-1]) & (small[1:] != 0)
    grid[::2, 1::2] = (small[:, 1:] == small[:, :-1]) & (small[:, 1:] != 0)
    return int(np.count_nonzero(np.unique(small))), cv2.connectedComponents(grid, connectivity=4)[0] - 1
