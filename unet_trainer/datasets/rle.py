"""Run lengths as COCO writes them: numbers of pixels, by turns outside and inside, down the columns from left to right.

Compressed, they are a text: each number in groups of five bits, lowest first, with a bit that says whether more follow, plus 48;
from the fourth on, the difference to the number two before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unet_trainer.datasets.rasterize import EMPTY, Patch
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels

FIRST_CODE = 48
MORE, SIGN, BITS = 0x20, 0x10, 0x1F
MAX_SHIFT = 60  # a number has at most this many bits


def decompress_runs(text: str) -> list[int]:
    """The run lengths in a compressed text; raises DataError."""
    runs: list[int] = []
    number = shift = 0
    for character in text:
        code = ord(character) - FIRST_CODE
        if not 0 <= code < 2 * MORE or shift > MAX_SHIFT:
            raise DataError(f"run lengths with {character!r}; need the characters 0 to o of COCO's compressed format")
        number |= (code & BITS) << shift
        shift += 5
        if code & MORE:
            continue
        if code & SIGN:
            number -= 1 << shift
        runs.append(number + (runs[-2] if len(runs) > 2 else 0))
        number = shift = 0
    if shift:
        raise DataError("run lengths that end in the middle of a number")
    return runs


def fill_runs(runs: Sequence[int], height: int, width: int) -> Patch:
    """The pixels of run lengths down the columns of an image; raises DataError if they are not those of this size."""
    if any(type(run) is not int or run < 0 for run in runs) or sum(runs) != height * width:
        raise DataError(f"run lengths that are not {height * width} pixels together, those of {width}×{height}")
    ends = np.cumsum(np.array(runs, np.int64))
    inside = np.arange(1, len(runs), 2)
    inside = inside[np.diff(ends, prepend=0)[inside] > 0]
    if not len(inside):
        return EMPTY
    left, right = int(ends[inside[0] - 1]) // height, -(-int(ends[inside[-1]]) // height)
    flips = np.zeros((right - left) * height + 1, np.uint8)  # only the columns that the shape has
    for borders in (ends[inside - 1], ends[inside]):
        flips[borders - left * height] ^= 1  # the borders of one kind all differ
    pixels = np.bitwise_xor.accumulate(flips)[:-1].astype(np.bool_)
    return Patch(0, left, pixels.reshape(right - left, height).T)


def unroll_rows(runs: Sequence[int], height: int, width: int) -> Pixels:
    """H,W bool from run lengths along the rows, as CVAT has them; raises DataError."""
    if any(run < 0 for run in runs) or sum(runs) != height * width:
        raise DataError(f"run lengths that are not {height * width} pixels together, those of {width}×{height}")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)
