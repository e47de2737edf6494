"""Every file is read before the first step, once: what it holds, what is wrong with it, and what is remembered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time

import cv2
import numpy as np
import pytest
import tifffile

from unet_trainer.config.resolve import class_weights
from unet_trainer.datasets import scan
from unet_trainer.datasets.class_statistics import class_ids, class_shares, describe_rarest_values, total_counts
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import (
    JPEG_DAMAGE,
    MAX_REMEMBERED,
    ImageFacts,
    MaskFacts,
    PairFacts,
    ScanMemory,
    memory_of,
    scan_pairs,
)
from unet_trainer.images.image_files import COLOUR, encode_image, write_image
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding


def make_pair(folder, name, mask, image_size=None):
    height, width = image_size or mask.shape
    pair = Pair(name, folder / f"{name}.png", folder / f"{name}_mask.png")
    write_image(pair.image, np.full((height, width, 3), 100, np.uint8))
    write_image(pair.mask, mask)
    return pair


def make_jpeg(folder, name, seed=0):
    pair = Pair(name, folder / f"{name}.jpg", folder / f"{name}_mask.png")
    write_image(pair.image, np.random.default_rng(seed).integers(0, 256, (64, 80, 3), np.uint8))
    write_image(pair.mask, np.zeros((64, 80), np.uint8))
    return pair


def mask_of(*values):
    """2 rows, so that width and height differ."""
    return np.array([values, values], np.uint8)


def masks_of(*counts):
    return [MaskFacts(1, sum(count.values()), count, "") for count in counts]


def forbid_decoding(monkeypatch):
    def refuse(data):
        raise AssertionError("decoded again")

    monkeypatch.setattr(scan, "decode_image", refuse)
    monkeypatch.setattr(scan, "decode_mask", refuse)


# Facts


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, 1), (np.uint8, 3), (np.uint8, 6), (np.int16, 2), (np.float32, 5)])
def test_facts_of_an_image_are_those_that_numpy_finds(tmp_path, dtype, channels):
    image = (np.random.default_rng(0).normal(90, 30, (20, 30, channels)).clip(1, 250)).astype(dtype)
    pair = make_pair(tmp_path, "a", np.zeros((20, 30), np.uint8))
    pair = Pair("a", tmp_path / "a.npy", pair.mask)
    np.save(pair.image, image)
    facts = scan_pairs([pair], 1)[0].image
    assert (facts.height, facts.width, facts.channels, facts.dtype) == (20, 30, channels, np.dtype(dtype).name)
    assert facts.size == (20, 30)
    assert facts.mean == pytest.approx(image.astype(np.float64).mean((0, 1)))
    assert facts.std == pytest.approx(image.astype(np.float64).std((0, 1)))
    assert (facts.low, facts.high) == (image.min(), image.max())
    assert not facts.has_alpha
    assert not facts.is_turned
    assert facts.digest == hashlib.blake2b(pair.image.read_bytes(), digest_size=16).hexdigest()


def test_alpha_and_orientation_are_among_the_facts(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    pair.image.write_bytes(cv2.imencode(".png", np.zeros((2, 2, 4), np.uint8))[1].tobytes())
    facts = scan_pairs([pair], 1)[0].image
    assert (facts.channels, facts.has_alpha, facts.is_turned) == (3, True, False)
    tifffile.imwrite(pair.image, np.zeros((2, 2), np.uint16), extratags=[(274, 3, 1, 6, True)])
    facts = scan_pairs([pair], 1)[0].image
    assert (facts.channels, facts.has_alpha, facts.is_turned) == (1, False, True)


def test_values_of_each_mask_are_counted(tmp_path):
    pairs = [make_pair(tmp_path, "a", mask_of(0, 0, 255)), make_pair(tmp_path, "b", mask_of(0, 1, 1, 1))]
    masks = [facts.mask for facts in scan_pairs(pairs, 2)]
    assert [mask.counts for mask in masks] == [{0: 4, 255: 2}, {0: 2, 1: 6}]
    assert [mask.size for mask in masks] == [(2, 3), (2, 4)]
    assert total_counts(masks) == {0: 6, 1: 6, 255: 2}


def test_wide_values_and_colours_are_counted_too(tmp_path):
    ids = make_pair(tmp_path, "ids", np.array([[0, 300, 300]], np.uint16))
    colours = make_pair(tmp_path, "colours", np.zeros((1, 2), np.uint8))
    write_image(colours.mask, np.array([[[255, 0, 0], [0, 0, 0]]], np.uint8))
    counts = [facts.mask.counts for facts in scan_pairs([ids, colours], 1)]
    assert counts == [{0: 1, 300: 2}, {0: 1, COLOUR + 0xFF0000: 1}]


def test_a_mask_of_many_millions_of_pixels_is_counted_to_the_last():
    """A float32 counts no further than 2^24."""
    mask = np.zeros((4097, 4099), np.uint8)
    mask[0, :2] = 7
    assert scan._count_values(mask) == {0: 4097 * 4099 - 2, 7: 2}  # an odd number


def test_the_order_of_pairs_is_kept_by_many_threads(tmp_path):
    pairs = [make_pair(tmp_path, f"{value:02d}", np.full((8, 8), value, np.uint8)) for value in range(24)]
    assert [list(facts.mask.counts) for facts in scan_pairs(pairs, 8)] == [[value] for value in range(24)]


def test_every_pair_ticks_once(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]
    ticks = []
    scan_pairs(pairs, 2, lambda: ticks.append(1))
    assert len(ticks) == 3


def test_a_scan_leaves_the_files_as_they_are(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]

    def state():
        return {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}

    before = state()
    scan_pairs(pairs, 2)
    assert state() == before


# What is wrong


def test_a_file_that_cannot_be_read_stands_with_its_reason_beside_its_partner(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in ("cut", "empty", "fine", "text", "gone")]
    cut, empty, _, text, gone = pairs
    cut.image.write_bytes(cut.image.read_bytes()[:40])
    empty.mask.write_bytes(b"")
    text.image.write_text("hello")
    gone.image.unlink()
    gone.mask.write_text("hello")
    found = scan_pairs(pairs, 2)
    assert [facts.image if isinstance(facts.image, str) else "" for facts in found] == [
        "the file is cut off",
        "",
        "",
        "not an image that can be decoded",
        "No such file or directory",
    ]
    assert [facts.mask if isinstance(facts.mask, str) else "" for facts in found] == [
        "",
        "the file is empty",
        "",
        "",
        "not an image that can be decoded",
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_named(tmp_path, bad):
    pair = Pair("a", tmp_path / "a.npy", make_pair(tmp_path, "a", np.zeros((4, 5), np.uint8)).mask)
    image = np.ones((4, 5, 2), np.float32)
    image[1, 2, 0] = image[3, 4, 1] = bad
    np.save(pair.image, image)
    assert scan_pairs([pair], 1)[0].image == "2 of 40 values are NaN or infinite"


def test_numbers_too_large_for_a_batch_are_named(tmp_path):
    """-1.8e308 marks missing pixels in maps; as float32 it is infinite."""
    pair = Pair("a", tmp_path / "a.npy", make_pair(tmp_path, "a", np.zeros((4, 5), np.uint8)).mask)
    image = np.ones((4, 5))
    image[0, 0] = np.finfo(np.float64).min
    np.save(pair.image, image)
    assert scan_pairs([pair], 1)[0].image == "1 of 20 values are NaN or infinite"


def test_a_bomb_is_named_and_an_empty_mask_of_a_large_image_is_not(tmp_path, monkeypatch):
    """Ten thousand pixels are many here, so that the test is small."""
    monkeypatch.setattr("unet_trainer.images.image_files.BOMB_PIXELS", 10_000)
    monkeypatch.setattr("unet_trainer.images.image_files.BOMB_RATIO", 5)
    nothing = np.zeros((150, 200), np.uint8)
    bomb = make_pair(tmp_path, "bomb", nothing)
    large = make_pair(tmp_path, "large", nothing)
    write_image(large.image, np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8))
    found = scan_pairs([bomb, large], 1)
    assert found[0].image.endswith("MB that unfold to 200×150 pixels: a decompression bomb")
    assert found[0].mask.endswith("MB that unfold to 200×150 pixels: a decompression bomb")
    assert isinstance(found[1].image, ImageFacts)
    assert isinstance(found[1].mask, MaskFacts)


def damage(path, seed=0):
    """Overwrites entropy-coded data in the middle until libjpeg complains; the end marker stays."""
    data = path.read_bytes()
    start = data.index(b"\xff\xda") + 20
    rng = np.random.default_rng(seed)
    for _ in range(200):
        broken = bytearray(data)
        place = int(rng.integers(start, len(data) - 200))
        broken[place : place + 40] = rng.integers(0, 255, 40, np.uint8).tobytes()
        path.write_bytes(broken)
        if isinstance(scan_pairs([Pair("x", path, path)], 1)[0].image, str):
            return
    raise AssertionError("no damage found that libjpeg notices")


def test_a_jpeg_damaged_in_the_middle_is_named_and_its_neighbours_are_not(tmp_path):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(6)]
    damage(pairs[3].image)
    assert pairs[3].image.read_bytes().endswith(b"\xff\xd9")
    assert cv2.imread(str(pairs[3].image)).shape == (64, 80, 3)  # why: OpenCV decodes it all the same
    found = scan_pairs(pairs, 4)
    assert found[3].image.startswith("the file is damaged (")
    assert [isinstance(facts.image, ImageFacts) for facts in found] == [True] * 3 + [False] + [True] * 2
    assert all(isinstance(facts.mask, MaskFacts) for facts in found)


def test_a_damaged_jpeg_mask_is_named(tmp_path):
    image = make_jpeg(tmp_path, "a")
    mask = make_jpeg(tmp_path, "b", 1)
    damage(mask.image)
    found = scan_pairs([Pair("a", image.image, mask.image)], 1)[0]
    assert isinstance(found.image, ImageFacts)
    assert found.mask.startswith("the file is damaged (")


def test_a_damaged_jpeg_is_not_remembered(tmp_path):
    pair = make_jpeg(tmp_path, "a")
    damage(pair.image)
    for _ in range(2):
        memory = ScanMemory(tmp_path / "memory.json")
        assert scan_pairs([pair], 1, memory=memory)[0].image.startswith("the file is damaged (")
    assert [key.split(":")[0] for key in ScanMemory(tmp_path / "memory.json").known] == ["mask"]


def test_bytes_before_the_end_marker_are_no_damage(tmp_path):
    """Some cameras write them."""
    pair = make_jpeg(tmp_path, "a")
    data = pair.image.read_bytes()
    pair.image.write_bytes(data[:-2] + b"\x00\x12\x34\x56" * 3 + data[-2:])
    assert isinstance(scan_pairs([pair], 1)[0].image, ImageFacts)
    assert not JPEG_DAMAGE.search("Corrupt JPEG data: 12 extraneous bytes before marker 0xd9")
    assert JPEG_DAMAGE.search("Corrupt JPEG data: 12 extraneous bytes before marker 0xda")
    assert JPEG_DAMAGE.search("Corrupt JPEG data: bad Huffman code").group(1) == "bad Huffman code"
    assert JPEG_DAMAGE.search("Premature end of JPEG file").group(1) is None


def test_a_file_that_vanishes_while_damage_is_looked_for_is_named(tmp_path, monkeypatch):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(3)]
    damage(pairs[0].image)
    search = scan._find_damaged

    def lose_one(*arguments):
        pairs[1].image.unlink()
        return search(*arguments)

    monkeypatch.setattr(scan, "_find_damaged", lose_one)
    found = scan_pairs(pairs, 1)
    assert found[0].image.startswith("the file is damaged (")
    assert found[1].image == "No such file or directory"
    assert isinstance(found[2].image, ImageFacts)


def test_standard_error_is_the_users_again_after_a_scan(tmp_path, capfd):
    pair = make_jpeg(tmp_path, "a")
    damage(pair.image)
    capfd.readouterr()
    before = os.fstat(2)
    scan_pairs([pair], 2)
    assert (os.fstat(2).st_dev, os.fstat(2).st_ino) == (before.st_dev, before.st_ino)
    assert capfd.readouterr().err == ""  # libjpeg's words name no file
    os.write(2, b"raw\n")
    print("word", file=sys.stderr)
    assert capfd.readouterr().err == "raw\nword\n"


def test_standard_error_is_the_users_again_after_a_failing_scan(tmp_path, capfd):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_pairs([pair], 1, fail)
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n"


# Memory


def test_a_second_scan_decodes_nothing_and_finds_the_same(tmp_path, monkeypatch):
    pairs = [make_pair(tmp_path, "a", mask_of(0, 0, 255)), make_jpeg(tmp_path, "b")]
    write_image(pairs[0].mask, np.array([[[255, 0, 0], [0, 0, 0], [9, 9, 9]]] * 2, np.uint8))
    first = scan_pairs(pairs, 2, memory=ScanMemory(tmp_path / "deep" / "memory.json"))
    forbid_decoding(monkeypatch)
    ticks = []
    assert scan_pairs(pairs, 2, lambda: ticks.append(1), ScanMemory(tmp_path / "deep" / "memory.json")) == first
    assert len(ticks) == 2
    assert [type(value) for value in first[0].image.mean] == [float] * 3
    with pytest.raises(AssertionError, match="decoded again"):
        scan_pairs(pairs, 2)  # without the memory


@pytest.mark.parametrize("which", ["image", "mask"])
@pytest.mark.parametrize("change", ["size", "time"])
def test_a_file_that_changed_is_read_again_and_no_other(tmp_path, monkeypatch, which, change):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "ab"]
    path = getattr(pairs[1], which)
    scan_pairs(pairs, 1, memory=ScanMemory(tmp_path / "memory.json"))
    status = path.stat()
    if change == "size":
        path.write_bytes(path.read_bytes() + b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    read = []
    read_bytes = scan.read_bytes
    monkeypatch.setattr(scan, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    scan_pairs(pairs, 1, memory=ScanMemory(tmp_path / "memory.json"))
    assert read == [path]
    scan_pairs(pairs, 1, memory=ScanMemory(tmp_path / "memory.json"))
    assert read == [path]


def test_one_file_as_image_and_as_mask_is_remembered_as_both(tmp_path):
    write_image(tmp_path / "a.png", mask_of(0, 1))
    pair = Pair("a", tmp_path / "a.png", tmp_path / "a.png")
    first = scan_pairs([pair], 1, memory=ScanMemory(tmp_path / "memory.json"))
    assert scan_pairs([pair], 1, memory=ScanMemory(tmp_path / "memory.json")) == first


def test_what_cannot_be_read_is_tried_again(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    whole = pair.image.read_bytes()
    memory = tmp_path / "memory.json"
    scan_pairs([pair], 1, memory=ScanMemory(memory))
    pair.image.write_bytes(whole[:40])
    assert scan_pairs([pair], 1, memory=ScanMemory(memory))[0].image == "the file is cut off"
    pair.image.write_bytes(whole)
    assert isinstance(scan_pairs([pair], 1, memory=ScanMemory(memory))[0].image, ImageFacts)


def test_a_file_that_is_gone_is_not_remembered_as_being_there(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    scan_pairs([pair], 1, memory=ScanMemory(tmp_path / "memory.json"))
    pair.mask.unlink()
    assert scan_pairs([pair], 1, memory=ScanMemory(tmp_path / "memory.json"))[0].mask == "No such file or directory"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "files": null}',
        b'{"format": 1, "files": [1, 2]}',
        b'{"format": 0, "files": {"image:/a": [[1, 2], {}]}}',
        b'{"files": {}}',
    ],
)
def test_a_memory_that_is_broken_or_foreign_is_written_anew(tmp_path, monkeypatch, content):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    memory = tmp_path / "memory.json"
    memory.write_bytes(content)
    first = scan_pairs([pair], 1, memory=ScanMemory(memory))
    assert isinstance(first[0].image, ImageFacts)
    assert len(json.loads(memory.read_text())["files"]) == 2
    forbid_decoding(monkeypatch)
    assert scan_pairs([pair], 1, memory=ScanMemory(memory)) == first


def test_a_place_that_cannot_be_written_costs_nothing_but_the_memory(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file" / "memory.json", tmp_path):
        assert isinstance(scan_pairs([pair], 1, memory=ScanMemory(path))[0].image, ImageFacts)
    assert (tmp_path / "file").read_text() == "no folder"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_costs_nothing_but_the_memory(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    assert isinstance(scan_pairs([pair], 1, memory=ScanMemory(folder / "memory.json"))[0].image, ImageFacts)
    assert list(folder.iterdir()) == []


def test_a_mask_of_very_many_values_is_counted_and_not_remembered(tmp_path):
    pair = make_pair(tmp_path, "a", np.arange(MAX_REMEMBERED + 1, dtype=np.uint16).reshape(1, -1))
    for _ in range(2):
        memory = ScanMemory(tmp_path / "memory.json")
        assert len(scan_pairs([pair], 1, memory=memory)[0].mask.counts) == MAX_REMEMBERED + 1
    assert [key.split(":")[0] for key in ScanMemory(tmp_path / "memory.json").known] == ["image"]


def test_each_dataset_has_a_memory_of_its_own(tmp_path):
    first, second = (memory_of(tmp_path / name, tmp_path / "runs").path for name in ("one", "two"))
    assert first != second
    assert first.parent == tmp_path / "runs" / ".scan"
    assert memory_of(tmp_path / "two" / ".." / "one", tmp_path / "runs").path == first


def test_a_scan_that_found_nothing_new_writes_nothing(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    memory = tmp_path / "memory.json"
    scan_pairs([pair], 1, memory=ScanMemory(memory))
    before = memory.stat().st_mtime_ns, memory.stat().st_ino
    scan_pairs([pair], 1, memory=ScanMemory(memory))
    assert (memory.stat().st_mtime_ns, memory.stat().st_ino) == before


def test_a_broken_header_warns_nobody(tmp_path):
    """PIL warns about tags beyond the end of a TIFF; here warnings are errors, even in threads."""
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    data = bytearray(encode_image(np.zeros((8, 8), np.uint8), ".tif"))
    start = int.from_bytes(data[4:8], "little")
    data[start + 2 + 4 : start + 2 + 8] = b"\xff\xff\xff\x7f"
    pair.image.write_bytes(data)
    assert isinstance(scan_pairs([pair], 2)[0], PairFacts)


# Classes


def test_ids_of_a_mask_with_ignored_and_unknown_pixels():
    mask = masks_of({0: 5, 255: 3, 128: 2, 7: 1, 9: 1})[0]
    assert class_ids(mask, MaskCoding((0, 255), 0, 128)) == {0: 5, 1: 3, IGNORED: 2, UNKNOWN: 2}
    assert class_ids(mask, MaskCoding(None, 8)) == {0: 6, 1: 6}


def test_shares_are_those_of_the_pixels_that_count():
    assert class_shares(masks_of({0: 6, 255: 2}, {128: 8}), MaskCoding((0, 255), 0, 128), 2) == [0.75, 0.25]


def test_shares_of_ignored_pixels_alone_are_0():
    assert class_shares(masks_of({255: 4}), MaskCoding((0, 1), 0, 255), 2) == [0.0, 0.0]


def test_the_rarest_values_are_named_with_a_mask_that_holds_them(tmp_path):
    pairs = [Pair(name, tmp_path / f"{name}.png", tmp_path / f"{name}_mask.png") for name in "ab"]
    masks = masks_of({0: 90, 1: 5, 7: 1}, {0: 90, 1: 5, 2: 3, COLOUR + 0xFF: 2})
    assert describe_rarest_values(pairs, masks) == (
        f"Rarest: 7 in 1 of 2 masks, e.g. {pairs[0].mask}; #0000ff in 1 of 2 masks, e.g. {pairs[1].mask}; "
        f"2 in 1 of 2 masks, e.g. {pairs[1].mask}"
    )


def test_rare_classes_weigh_more_within_bounds():
    assert class_weights([0.5, 0.25, 0.25]) == (0.5, 1.0, 1.0)
    assert class_weights([0.998, 0.001, 0.001]) == (0.1, 1.0, 1.0)  # never below a tenth
    assert class_weights([0.6, 0.3999, 0.0001])[2] == 10.0
    assert class_weights([0.5, 0.0, 0.5]) == (1.0, 1.0, 1.0)  # a class that does not occur
    assert class_weights([0.0, 0.0]) == (1.0, 1.0)


def test_a_mark_for_missing_data_is_named(tmp_path):
    pair = make_pair(tmp_path, "a", np.zeros((4, 4), np.uint8))
    path = tmp_path / "a.npy"
    values = np.ones((4, 4), np.float32)
    values[0, 0] = -3.4e38
    np.save(path, values)
    (facts,) = scan_pairs([dataclasses.replace(pair, image=path)], 1)
    assert facts.image == "values from -3.4e+38 to 1; a mark for missing data? put an ordinary number in its place"


def test_files_of_one_size_and_time_that_are_exchanged_are_not_taken_for_each_other(tmp_path):
    """As they come out of an archive."""
    one, two, aside = (tmp_path / name for name in ("1.npy", "2.npy", "aside"))
    for path, text in ((one, "a"), (two, "b")):
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
    before = scan.file_stamp(one)
    time.sleep(0.02)  # the system's clock for such stamps ticks every few milliseconds
    for source, target in ((one, aside), (two, one), (aside, two)):
        source.rename(target)
    assert scan.file_stamp(one) != before
    assert scan.file_stamp(one) == scan.file_stamp(one)
