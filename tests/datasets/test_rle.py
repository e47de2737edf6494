"""Run lengths: decoded by hand-computed cases and as pycocotools decodes them; damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.datasets.rle import decompress_runs, fill_runs, unroll_rows
from unet_trainer.images.file_bytes import DataError


def whole(patch, height, width):
    image = np.zeros((height, width), np.uint8)
    rows, columns = patch.pixels.shape
    image[patch.top : patch.top + rows, patch.left : patch.left + columns] = patch.pixels
    return image


def test_runs_go_down_the_columns():
    """3 high and 4 wide: two outside, three inside (row 2 of column 0, rows 0 and 1 of column 1), seven outside."""
    assert whole(fill_runs([2, 3, 7], 3, 4), 3, 4).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_hole_and_runs_of_no_length():
    assert whole(fill_runs([0, 2, 1, 2, 1], 2, 3), 2, 3).tolist() == [[1, 0, 1], [1, 1, 0]]
    assert whole(fill_runs([0, 1, 0, 2, 3], 2, 3), 2, 3).tolist() == [[1, 1, 0], [1, 0, 0]]
    assert fill_runs([6], 2, 3).num_pixels == fill_runs([3, 0, 3], 2, 3).num_pixels == 0
    assert fill_runs([0, 6], 2, 3).num_pixels == 6


def test_only_the_columns_of_the_shape_are_kept():
    patch = fill_runs([200, 5, 795], 10, 100)
    assert (patch.left, patch.pixels.shape) == (20, (10, 1))


@pytest.mark.parametrize("runs", [[2, 3], [2, 3, 8], [-1, 13], [2.0, 3, 7], ["2", 3, 7], [2, True, 9], [], [10**30]])
def test_runs_that_are_not_of_this_size_are_refused(runs):
    with pytest.raises(DataError, match="not 12 pixels together, those of 4×3"):
        fill_runs(runs, 3, 4)


def test_compressed_runs_by_hand():
    """5 and 31 have one group and two (31 has its fifth bit set, which would be a sign); 52 = 1 of 20 + 1 × 32."""
    assert decompress_runs("5") == [5]
    assert decompress_runs("o0") == [31]
    assert decompress_runs("d1") == [52]
    # From the fourth on the difference to the number two before: 2, 3, 4, then 3 - 1.
    assert decompress_runs("234O") == [2, 3, 4, 2]


def test_every_length_reads_back_as_pycocotools_wrote_it():
    mask_utils = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    generator = np.random.default_rng(3)
    for size in ((1, 1), (7, 5), (64, 33), (300, 200)):
        for density in (0.0, 0.02, 0.5, 1.0):
            mask = (generator.random(size) < density).astype(np.uint8)
            if size[0] > 100:
                mask = np.repeat(np.repeat(mask[::25, ::25], 25, 0), 25, 1)  # long runs
            encoded = mask_utils.encode(np.asfortranarray(mask))
            patch = fill_runs(decompress_runs(encoded["counts"].decode()), *size)
            assert (whole(patch, *size) == mask).all()


@pytest.mark.parametrize(("text", "reason"), [
    ("5 ", "run lengths with ' '; need the characters 0 to o"),
    ("5é", "need the characters 0 to o"),
    ("5o", "end in the middle of a number"),
    ("o" * 20, "need the characters 0 to o"),
])  # fmt: skip
def test_a_damaged_text_is_refused(text, reason):
    with pytest.raises(DataError, match=reason):
        decompress_runs(text)


def test_rows_are_unrolled_for_cvat():
    assert unroll_rows([1, 2, 3], 2, 3).tolist() == [[False, True, True], [False, False, False]]
    for runs in ([1, 2], [7, -1]):
        with pytest.raises(DataError, match="not 6 pixels together, those of 3×2"):
            unroll_rows(runs, 2, 3)
