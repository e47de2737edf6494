"""How the values of one mask lie: greys beside an edge, one piece for each value, thin borders.

Few numbers, which tell soft edges from classes, ids of objects from ids of classes, and void from a class. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from unet_trainer.images.image_files import COLOUR, Pixels

EDGE_WIDTH = 48  # greys within this distance of the darkest or the brightest value belong to it
MIN_EDGE = 4 * EDGE_WIDTH  # between the darkest and the brightest value of a mask with soft edges
EDGE_SIDE = 7  # pixels: in a square of this side around a pixel of a soft edge lie both ends
BORDER_SIDE = 5  # pixels: a square of this side around a pixel away from any border holds one value
PIECES_SIDE = 256  # pieces are counted in a smaller mask


@dataclass(frozen=True)
class MaskStructure:
    """Of a mask of three values or more."""

    between: int = 0  # pixels far from both its darkest and its brightest value; 0 if these are close to each other
    beside_both: int = 0  # of these, pixels with both ends nearby
    num_values: int = 0  # values but 0, in a smaller mask
    num_pieces: int = 0  # connected pieces of one of these values
    border: int = 0  # pixels close to one of another value
    border_of_last: int = 0  # of these, pixels of the highest value
    border_of_most: int = 0  # and of the most frequent one


def measure_structure(mask: Pixels, most_frequent: int) -> MaskStructure:
    """H,W as decode_mask gives it, and its most frequent value."""
    between, beside_both = _soft_edges(mask) if mask.dtype == np.uint8 else (0, 0)
    num_values, num_pieces = _count_pieces(mask)
    is_border = _is_border(mask)
    border, of_last, of_most = (
        int(np.count_nonzero(part)) for part in (is_border, is_border & (mask == mask.max()), is_border & (mask == most_frequent))
    )
    return MaskStructure(between, beside_both, num_values, num_pieces, border, of_last, of_most)


def _soft_edges(mask: Pixels) -> tuple[int, int]:
    low, high = int(mask.min()), int(mask.max())
    if high - low < MIN_EDGE:
        return 0, 0
    is_low, is_high = (mask <= low + EDGE_WIDTH), (mask >= high - EDGE_WIDTH)
    is_between = ~(is_low | is_high)
    square = np.ones((EDGE_SIDE, EDGE_SIDE), np.uint8)
    near_low, near_high = (cv2.dilate(end.astype(np.uint8), square) > 0 for end in (is_low, is_high))
    return int(np.count_nonzero(is_between)), int(np.count_nonzero(is_between & near_low & near_high))


def piece_stride(size: tuple[int, ...]) -> int:
    """Every so many rows and columns of a mask of this height and width are taken to count its pieces."""
    return -(-max(size) // PIECES_SIDE)


def _count_pieces(mask: Pixels) -> tuple[int, int]:
    """Values but 0, and pieces of a single one of them, touching along an edge."""
    stride = piece_stride(mask.shape)
    small = mask[::stride, ::stride]
    height, width = small.shape
    # A grid of pixels and of the links between them: a link is there where both pixels have the same value.
    grid = np.zeros((2 * height - 1, 2 * width - 1), np.uint8)
    grid[::2, ::2] = small != 0
    grid[1::2, ::2] = (small[1:] == small[:-1]) & (small[1:] != 0)
    grid[::2, 1::2] = (small[:, 1:] == small[:, :-1]) & (small[:, 1:] != 0)
    num_labels, _ = cv2.connectedComponents(grid, connectivity=4)
    values = np.unique(small)
    return int(np.count_nonzero(values)), num_labels - 1


def _is_border(mask: Pixels) -> Pixels:
    """Where the square around a pixel holds several values. Outside of the mask there are none."""
    pixels = mask
    if mask.dtype == np.int32:  # colours. OpenCV has no morphology for int32, and float32 is exact up to 2**24
        pixels = np.where(mask >= COLOUR, mask - COLOUR, -1 - mask).astype(np.float32)
    square = np.ones((BORDER_SIDE, BORDER_SIDE), np.uint8)
    return np.asarray(cv2.dilate(pixels, square) != cv2.erode(pixels, square))
