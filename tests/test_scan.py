"""Every pair is read before the first step: all problems in one message, and what the masks hold."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from unet_trainer.images import COLOUR, DataError, write_image
from unet_trainer.masks import MaskCoding
from unet_trainer.pairs import Pair
from unet_trainer.scan import balanced_weights, class_shares, refuse_misfits, scan_pairs


def make_pair(folder, name, mask, image_size=None):
    height, width = image_size or mask.shape
    pair = Pair(name, folder / f"{name}.png", folder / f"{name}_mask.png")
    write_image(pair.image, np.full((height, width, 3), 100, np.uint8))
    write_image(pair.mask, mask)
    return pair


def mask_of(*values):
    """2 rows, so that width and height differ."""
    return np.array([values, values], np.uint8)


def refusal(call, *arguments):
    with pytest.raises(DataError) as raised:
        call(*arguments)
    return str(raised.value)


def test_values_are_counted_for_each_pair_and_sizes_for_all(tmp_path):
    pairs = [make_pair(tmp_path, "a", mask_of(0, 0, 255)), make_pair(tmp_path, "b", mask_of(0, 1, 1, 1))]
    scan = scan_pairs(pairs, 2)
    assert scan.counts_by_pair == [{0: 4, 255: 2}, {0: 2, 1: 6}]
    assert scan.counts == {0: 6, 1: 6, 255: 2}
    assert scan.sizes == Counter({(2, 3): 1, (2, 4): 1})


def test_the_order_of_pairs_is_kept_by_many_threads(tmp_path):
    pairs = [make_pair(tmp_path, f"{value:02d}", np.full((8, 8), value, np.uint8)) for value in range(24)]
    scan = scan_pairs(pairs, 8)
    assert [list(counts) for counts in scan.counts_by_pair] == [[value] for value in range(24)]


def test_every_pair_ticks_once(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]
    ticks = []
    scan_pairs(pairs, 2, lambda: ticks.append(1))
    assert len(ticks) == 3


def test_sizes_that_differ_name_both_files_and_sizes(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1, 1), image_size=(20, 30))
    assert refusal(scan_pairs, [pair], 1) == (
        f"1 files that cannot be used:\n  {pair.mask}: 3×2, its image {pair.image} is 30×20; sizes in a pair must agree"
    )


def test_all_problems_come_in_one_message(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in ("cut", "empty", "fine", "size", "text", "twice")]
    cut, empty, _, size, text, twice = pairs
    cut.image.write_bytes(cut.image.read_bytes()[:40])
    empty.mask.write_bytes(b"")
    write_image(size.mask, mask_of(0, 1, 1, 1))
    text.image.write_text("hello")
    twice.image.unlink()
    twice.mask.write_text("hello")
    assert refusal(scan_pairs, pairs, 2).splitlines() == [
        "6 files that cannot be used:",
        f"  {cut.image}: the file is cut off",
        f"  {empty.mask}: the file is empty",
        f"  {size.mask}: 4×2, its image {size.image} is 2×2; sizes in a pair must agree",
        f"  {text.image}: not an image that can be decoded",
        f"  {twice.image}: No such file or directory",
        f"  {twice.mask}: not an image that can be decoded",
    ]


def test_more_problems_than_anyone_reads_are_counted(tmp_path):
    pairs = [Pair(f"{i}", tmp_path / f"{i}.png", tmp_path / f"{i}_mask.png") for i in range(15)]
    lines = refusal(scan_pairs, pairs, 2).splitlines()
    assert lines[0] == "30 files that cannot be used:"
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  … and 10 more"


def test_values_that_are_no_class_are_refused_with_file_and_share(tmp_path):
    pairs = [
        make_pair(tmp_path, "good", mask_of(0, 255)),
        make_pair(tmp_path, "odd", mask_of(0, 0, 0, 255, 7, 7, 9, 0)),
        make_pair(tmp_path, "void", mask_of(0, 128)),
    ]
    scan = scan_pairs(pairs, 1)
    assert refusal(refuse_misfits, pairs, scan, MaskCoding((0, 255), 0, 128)).splitlines() == [
        "1 mask values that are no class (classes have 0, 255):",
        f"  {pairs[1].mask}: 7 (25.0% of pixels), 9 (12.5% of pixels)",
    ]
    assert refusal(refuse_misfits, pairs, scan, MaskCoding((0, 255))).splitlines()[2] == f"  {pairs[2].mask}: 128 (50.0% of pixels)"
    refuse_misfits(pairs[::2], scan_pairs(pairs[::2], 1), MaskCoding((0, 255), 0, 128))


def test_a_single_pixel_of_another_value_is_found(tmp_path):
    mask = np.zeros((300, 300), np.uint8)
    mask[123, 45] = 3
    pairs = [make_pair(tmp_path, "a", mask)]
    assert "3 (0.0% of pixels)" in refusal(refuse_misfits, pairs, scan_pairs(pairs, 1), MaskCoding((0, 1)))


def test_shares_are_those_of_the_pixels_that_count(tmp_path):
    pairs = [make_pair(tmp_path, "a", mask_of(0, 0, 0, 255)), make_pair(tmp_path, "b", mask_of(128, 128, 128, 128))]
    scan = scan_pairs(pairs, 1)
    assert class_shares(scan, MaskCoding((0, 255), 0, 128), 2) == [0.75, 0.25]


def test_shares_of_ignored_pixels_alone_are_0(tmp_path):
    scan = scan_pairs([make_pair(tmp_path, "a", mask_of(255, 255))], 1)
    assert class_shares(scan, MaskCoding((0, 1), 0, 255), 2) == [0.0, 0.0]


def test_a_scan_leaves_the_files_as_they_are(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]

    def state():
        return {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}

    before = state()
    scan_pairs(pairs, 2)
    assert state() == before


def test_wide_values_and_colours_are_counted_too(tmp_path):
    ids = make_pair(tmp_path, "ids", np.array([[0, 300, 300]], np.uint16))
    colours = make_pair(tmp_path, "colours", np.zeros((1, 2), np.uint8))
    write_image(colours.mask, np.array([[[255, 0, 0], [0, 0, 0]]], np.uint8))
    assert scan_pairs([ids, colours], 1).counts_by_pair == [{0: 1, 300: 2}, {0: 1, COLOUR + 0xFF0000: 1}]


def test_rare_classes_weigh_more_within_bounds():
    assert balanced_weights([0.5, 0.25, 0.25]) == (0.5, 1.0, 1.0)
    assert balanced_weights([0.998, 0.001, 0.001]) == (0.1, 1.0, 1.0)  # never below a tenth
    assert balanced_weights([0.6, 0.3999, 0.0001])[2] == 10.0
    assert balanced_weights([0.5, 0.0, 0.5]) == (1.0, 1.0, 1.0)  # a class that does not occur
    assert balanced_weights([0.0, 0.0]) == (1.0, 1.0)
