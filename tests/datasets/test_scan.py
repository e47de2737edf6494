"""Every file is read once before the first step: its facts, the reason if it cannot be used, and the cache of facts."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from helpers.image_bytes import cv2_bytes, damaged_jpeg, pil_bytes
from unet_trainer.datasets import scan
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import (
    JPEG_DAMAGE,
    MAX_CACHED_VALUES,
    ImageFacts,
    MaskFacts,
    PairFacts,
    ScanCache,
    open_scan_cache,
    scan_pairs,
)
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_files import COLOUR, encode_image, write_image


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


def damage(path):
    path.write_bytes(damaged_jpeg(path.read_bytes()))


def save_array(folder, array):
    """A pair whose image is this array."""
    np.save(folder / "a.npy", array)
    return Pair("a", folder / "a.npy", make_pair(folder, "a", np.zeros(array.shape[:2], np.uint8)).mask)


def mask_of(*values):
    """2 rows, so that width and height differ."""
    return np.array([values, values], np.uint8)


def state_of(folder):
    return {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def forbid_decoding(monkeypatch):
    def refuse(data):
        raise AssertionError("decoded again")

    monkeypatch.setattr(scan, "decode_image", refuse)
    monkeypatch.setattr(scan, "decode_mask_or_alpha", refuse)


def log_reads(monkeypatch, log):
    """Writes the path of every file that is read into `log`: the reading is done in child processes."""
    read_bytes = scan.read_bytes

    def read_and_log(path):
        with log.open("a") as file:
            file.write(f"{path}\n")
        return read_bytes(path)

    monkeypatch.setattr(scan, "read_bytes", read_and_log)


# Facts


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, 1), (np.uint8, 3), (np.uint8, 6), (np.int16, 2), (np.float32, 5)])
def test_the_facts_of_an_image_are_those_that_numpy_computes(tmp_path, dtype, channels):
    image = (np.random.default_rng(0).normal(90, 30, (20, 30, channels)).clip(1, 250)).astype(dtype)
    pair = save_array(tmp_path, image)
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
    pair.image.write_bytes(cv2_bytes(".png", np.zeros((2, 2, 4), np.uint8)))
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


def test_wide_values_and_colours_are_counted_too(tmp_path):
    ids = make_pair(tmp_path, "ids", np.array([[0, 300, 300]], np.uint16))
    colours = make_pair(tmp_path, "colours", np.zeros((1, 2), np.uint8))
    write_image(colours.mask, np.array([[[255, 0, 0], [0, 0, 0]]], np.uint8))
    counts = [facts.mask.counts for facts in scan_pairs([ids, colours], 1)]
    assert counts == [{0: 1, 300: 2}, {0: 1, COLOUR + 0xFF0000: 1}]


def test_facts_that_tell_what_a_mask_means_are_found_and_cached(tmp_path):
    """Structure, compression, alpha and palette."""
    ids = np.zeros((8, 8), np.uint8)
    ids[2:4, 2:4], ids[5:7, 5:7] = 1, 2
    grey = make_pair(tmp_path, "grey", ids)
    jpeg = Pair("jpeg", make_pair(tmp_path, "jpeg", ids).image, tmp_path / "jpeg_mask.jpg")
    write_image(jpeg.mask, ids * 100)
    alpha = make_pair(tmp_path, "alpha", ids)
    alpha.mask.write_bytes(pil_bytes("PNG", np.dstack([np.full((8, 8, 3), 255, np.uint8), ids * 100])))
    palette = make_pair(tmp_path, "palette", ids)
    image = Image.frombytes("P", (8, 8), (ids > 0).astype(np.uint8).tobytes())
    image.putpalette([9, 8, 7, 255, 0, 0, 1, 1, 1])
    palette.mask.write_bytes(pil_bytes("PNG", image))
    pairs = [grey, jpeg, alpha, palette]
    cache = tmp_path / "cache.json"
    masks = [facts.mask for facts in scan_pairs(pairs, 1, cache=ScanCache(cache))]
    assert (masks[0].structure.num_values, masks[0].structure.num_pieces) == (2, 2)
    assert [mask.is_lossy for mask in masks] == [False, True, False, False]
    assert [mask.is_alpha for mask in masks] == [False, False, True, False]
    assert masks[2].counts == {0: 56, 100: 4, 200: 4}
    assert [mask.palette for mask in masks] == [None, None, None, {0: 0x090807, 1: 0xFF0000}]
    assert masks[3].structure is None
    assert [facts.mask for facts in scan_pairs(pairs, 1, cache=ScanCache(cache))] == masks


def test_every_pixel_of_a_mask_with_many_millions_is_counted(tmp_path):
    """A float32 counts no further than 2^24."""
    mask = np.zeros((4097, 4099), np.uint8)
    mask[0, :2] = 7
    pair = make_pair(tmp_path, "a", mask, image_size=(4, 4))
    assert scan_pairs([pair], 1)[0].mask.counts == {0: 4097 * 4099 - 2, 7: 2}  # an odd number


def test_the_order_of_pairs_is_kept_by_several_children(tmp_path):
    pairs = [make_pair(tmp_path, f"{value:02d}", np.full((8, 8), value, np.uint8)) for value in range(24)]
    assert [list(facts.mask.counts) for facts in scan_pairs(pairs, 4)] == [[value] for value in range(24)]


def test_tick_is_called_once_for_every_pair(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]
    ticks = []
    scan_pairs(pairs, 2, lambda: ticks.append(1))
    assert len(ticks) == 3


def test_a_scan_changes_no_file(tmp_path):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]
    before = state_of(tmp_path)
    scan_pairs(pairs, 2)
    assert state_of(tmp_path) == before


def test_where_processes_cannot_be_forked_threads_read_the_files(tmp_path, monkeypatch):
    pairs = [make_pair(tmp_path, f"{value}", mask_of(value, 0)) for value in range(5)]
    read, read_bytes = [], scan.read_bytes
    monkeypatch.setattr(scan, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    in_children = scan_pairs(pairs, 2)
    assert read == []  # children have a copy of the list
    monkeypatch.setattr("unet_trainer.system.forked_map.CAN_FORK", False)
    assert scan_pairs(pairs, 2) == in_children
    assert len(read) == 10


# Files that cannot be used


def test_an_unreadable_file_has_its_reason_and_its_partner_has_its_facts(tmp_path):
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
def test_values_that_are_not_finite_are_counted(tmp_path, bad):
    image = np.ones((4, 5, 2), np.float32)
    image[1, 2, 0] = image[3, 4, 1] = bad
    assert scan_pairs([save_array(tmp_path, image)], 1)[0].image == "2 of 40 values are NaN or infinite"


def test_numbers_too_large_for_float32_are_counted(tmp_path):
    """-1.8e308 marks missing pixels in maps; as float32 it is infinite."""
    image = np.ones((4, 5))
    image[0, 0] = np.finfo(np.float64).min
    assert scan_pairs([save_array(tmp_path, image)], 1)[0].image == "1 of 20 values are NaN or infinite"


def test_a_mark_for_missing_data_is_refused(tmp_path):
    values = np.ones((4, 4), np.float32)
    values[0, 0] = -3.4e38
    (facts,) = scan_pairs([save_array(tmp_path, values)], 1)
    assert facts.image == "values from -3.4e+38 to 1; a mark for missing data? replace it by an ordinary number"


def test_a_bomb_is_refused_and_an_empty_mask_of_a_large_image_is_not(tmp_path, monkeypatch):
    """With a limit of ten thousand pixels, so that the test is fast."""
    monkeypatch.setattr("unet_trainer.images.image_files.BOMB_PIXELS", 10_000)
    monkeypatch.setattr("unet_trainer.images.image_files.BOMB_RATIO", 5)
    nothing = np.zeros((150, 200), np.uint8)
    bomb = make_pair(tmp_path, "bomb", nothing)
    large = make_pair(tmp_path, "large", nothing)
    write_image(large.image, np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8))
    found = scan_pairs([bomb, large], 1)
    assert found[0].image.endswith("MB that decompress to 200×150 pixels: a decompression bomb")
    assert found[0].mask.endswith("MB that decompress to 200×150 pixels: a decompression bomb")
    assert isinstance(found[1].image, ImageFacts)
    assert isinstance(found[1].mask, MaskFacts)


# Damaged JPEGs


def test_a_damaged_jpeg_is_named_and_its_neighbours_are_not(tmp_path):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(6)]
    damage(pairs[3].image)
    assert cv2.imread(str(pairs[3].image)).shape == (64, 80, 3)  # OpenCV decodes it all the same
    found = scan_pairs(pairs, 4)
    assert found[3].image.startswith("the file is damaged (")
    assert [isinstance(facts.image, ImageFacts) for facts in found] == [True] * 3 + [False] + [True] * 2
    assert all(isinstance(facts.mask, MaskFacts) for facts in found)


@pytest.mark.parametrize("which", ["image", "mask"])
def test_damage_is_attributed_to_the_image_or_to_the_mask_while_each_file_is_read_once(tmp_path, monkeypatch, which):
    jpegs = [make_jpeg(tmp_path, f"{index}", index).image for index in range(6)]
    pairs = [Pair(f"{index}", jpegs[index], jpegs[index + 1]) for index in (0, 2, 4)]
    damage(getattr(pairs[1], which))
    log_reads(monkeypatch, tmp_path / "log")
    found = scan_pairs(pairs, 2)
    reasons = [
        (pair.name, kind)
        for pair, facts in zip(pairs, found, strict=True)
        for kind in ("image", "mask")
        if isinstance(getattr(facts, kind), str)
    ]
    assert reasons == [("2", which)]
    assert getattr(found[1], which).startswith("the file is damaged (")
    assert sorted((tmp_path / "log").read_text().split()) == [str(path) for path in sorted(jpegs)]


def test_what_a_failed_decoder_printed_is_not_attributed_to_the_next_file(tmp_path, monkeypatch):
    def print_and_fail(data):
        os.write(2, b"Corrupt JPEG data: bad Huffman code\n")
        raise ReadError("not an image that can be decoded")

    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(3)]
    monkeypatch.setattr(scan, "decode_image", print_and_fail)
    for facts in scan_pairs(pairs, 1):
        assert facts.image == "not an image that can be decoded"
        assert isinstance(facts.mask, MaskFacts)


def test_a_damaged_jpeg_is_not_cached(tmp_path):
    pair = make_jpeg(tmp_path, "a")
    damage(pair.image)
    for _ in range(2):
        cache = ScanCache(tmp_path / "cache.json")
        assert scan_pairs([pair], 1, cache=cache)[0].image.startswith("the file is damaged (")
    assert [key.split(":")[0] for key in ScanCache(tmp_path / "cache.json").known] == ["mask"]


def test_extra_bytes_before_the_end_marker_are_no_damage(tmp_path):
    """Some cameras write them."""
    pair = make_jpeg(tmp_path, "a")
    data = pair.image.read_bytes()
    pair.image.write_bytes(data[:-2] + b"\x00\x12\x34\x56" * 3 + data[-2:])
    assert isinstance(scan_pairs([pair], 1)[0].image, ImageFacts)
    assert not JPEG_DAMAGE.search("Corrupt JPEG data: 12 extraneous bytes before marker 0xd9")
    assert JPEG_DAMAGE.search("Corrupt JPEG data: 12 extraneous bytes before marker 0xda")
    assert JPEG_DAMAGE.search("Corrupt JPEG data: bad Huffman code").group(1) == "bad Huffman code"
    assert JPEG_DAMAGE.search("Premature end of JPEG file").group(1) is None


# Standard error


def test_messages_of_this_process_reach_standard_error_while_a_scan_runs(tmp_path, capfd):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(3)]
    damage(pairs[1].image)

    def tick():
        os.write(2, b"raw\n")
        print("text", file=sys.stderr, flush=True)

    scan_pairs(pairs, 2, tick)
    assert capfd.readouterr().err == "raw\ntext\n" * 3  # and nothing of libjpeg's, which names no file


def test_a_scan_does_not_touch_the_file_descriptor_of_standard_error(tmp_path, capfd):
    pair = make_jpeg(tmp_path, "a")
    before = os.fstat(2)
    seen = []
    scan_pairs([pair], 1, lambda: seen.append(os.fstat(2)))
    for status in (*seen, os.fstat(2)):
        assert (status.st_dev, status.st_ino) == (before.st_dev, before.st_ino)
    assert capfd.readouterr().err == ""


def test_an_interrupted_scan_leaves_no_child_process_behind(tmp_path, capfd):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "abc"]
    during = []

    def fail():
        during.append(len(multiprocessing.active_children()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:  # while its traceback is kept, so is all that the scan refers to
        scan_pairs(pairs, 2, fail)
    assert during == [2]
    assert raised.traceback
    assert multiprocessing.active_children() == []
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n"


# Decoders that crash


def crash_on(monkeypatch, name, path, message=b""):
    """The decoder `name` ends its own process for this file."""
    parent, decode, bad = os.getpid(), getattr(scan, name), path.read_bytes()

    def crash(data):
        if data == bad:
            assert os.getpid() != parent
            os.write(2, message)
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(data)

    monkeypatch.setattr(scan, name, crash)


@pytest.mark.parametrize("which", ["image", "mask"])
def test_a_file_that_crashes_the_decoder_is_named_and_the_others_are_read(tmp_path, monkeypatch, which):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(5)]
    write_image(pairs[2].mask, np.ones((64, 80), np.uint8))  # the bytes of each mask are compared
    decoder = "decode_image" if which == "image" else "decode_mask_or_alpha"
    crash_on(monkeypatch, decoder, getattr(pairs[2], which), b"double free\n detected")
    ticks = []
    found = scan_pairs(pairs, 2, lambda: ticks.append(1), ScanCache(tmp_path / "cache.json"))
    assert len(ticks) == 5
    assert getattr(found[2], which) == "decoding it crashed (SIGKILL: double free detected)"
    usable = [(isinstance(facts.image, ImageFacts), isinstance(facts.mask, MaskFacts)) for facts in found]
    assert usable == [(True, True)] * 2 + [(which == "mask", which == "image")] + [(True, True)] * 2
    monkeypatch.undo()
    again = scan_pairs(pairs, 2, cache=ScanCache(tmp_path / "cache.json"))
    assert isinstance(getattr(again[2], which), ImageFacts | MaskFacts)  # it is read again, not cached


def test_every_file_that_crashes_the_decoder_is_named(tmp_path, monkeypatch):
    pairs = [make_pair(tmp_path, f"{value}", mask_of(value, value)) for value in range(4)]
    monkeypatch.setattr(scan, "decode_image", lambda data: os.kill(os.getpid(), signal.SIGKILL))
    found = scan_pairs(pairs, 2)
    assert [facts.image for facts in found] == ["decoding it crashed (SIGKILL)"] * 4
    assert [facts.mask.counts for facts in found] == [{value: 4} for value in range(4)]


def test_a_crash_that_does_not_happen_again_costs_nothing(tmp_path, monkeypatch):
    """As when memory was short for a moment."""
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    decode, mark = scan.decode_image, tmp_path / "crashed"

    def crash_once(data):
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(data)

    monkeypatch.setattr(scan, "decode_image", crash_once)
    (facts,) = scan_pairs([pair], 1)
    assert mark.exists()
    assert (type(facts.image), type(facts.mask)) == (ImageFacts, MaskFacts)


# Cache


def test_a_second_scan_decodes_nothing_and_finds_the_same(tmp_path, monkeypatch):
    pairs = [make_pair(tmp_path, "a", mask_of(0, 0, 255)), make_jpeg(tmp_path, "b")]
    write_image(pairs[0].mask, np.array([[[255, 0, 0], [0, 0, 0], [9, 9, 9]]] * 2, np.uint8))
    first = scan_pairs(pairs, 2, cache=ScanCache(tmp_path / "deep" / "cache.json"))
    forbid_decoding(monkeypatch)
    ticks = []
    assert scan_pairs(pairs, 2, lambda: ticks.append(1), ScanCache(tmp_path / "deep" / "cache.json")) == first
    assert len(ticks) == 2
    assert [type(value) for value in first[0].image.mean] == [float] * 3
    with pytest.raises(RuntimeError, match="decoded again"):
        scan_pairs(pairs, 2)  # without the cache


@pytest.mark.parametrize("which", ["image", "mask"])
@pytest.mark.parametrize("change", ["size", "time"])
def test_a_file_that_changed_is_read_again_and_no_other(tmp_path, monkeypatch, which, change):
    pairs = [make_pair(tmp_path, name, mask_of(0, 1)) for name in "ab"]
    path = getattr(pairs[1], which)
    scan_pairs(pairs, 1, cache=ScanCache(tmp_path / "cache.json"))
    status = path.stat()
    if change == "size":
        path.write_bytes(path.read_bytes() + b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    log_reads(monkeypatch, tmp_path / "log")
    for _ in range(2):
        scan_pairs(pairs, 1, cache=ScanCache(tmp_path / "cache.json"))
        assert (tmp_path / "log").read_text() == f"{path}\n"


def test_one_file_as_image_and_as_mask_is_cached_as_both(tmp_path):
    write_image(tmp_path / "a.png", mask_of(0, 1))
    pair = Pair("a", tmp_path / "a.png", tmp_path / "a.png")
    first = scan_pairs([pair], 1, cache=ScanCache(tmp_path / "cache.json"))
    assert scan_pairs([pair], 1, cache=ScanCache(tmp_path / "cache.json")) == first


def test_an_unreadable_file_is_read_again(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    whole = pair.image.read_bytes()
    cache_file = tmp_path / "cache.json"
    scan_pairs([pair], 1, cache=ScanCache(cache_file))
    pair.image.write_bytes(whole[:40])
    assert scan_pairs([pair], 1, cache=ScanCache(cache_file))[0].image == "the file is cut off"
    pair.image.write_bytes(whole)
    assert isinstance(scan_pairs([pair], 1, cache=ScanCache(cache_file))[0].image, ImageFacts)


def test_a_deleted_file_is_not_found_in_the_cache(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    scan_pairs([pair], 1, cache=ScanCache(tmp_path / "cache.json"))
    pair.mask.unlink()
    assert scan_pairs([pair], 1, cache=ScanCache(tmp_path / "cache.json"))[0].mask == "No such file or directory"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'{"format": 2}',
        b'{"format": 2, "files": null}',
        b'{"format": 2, "files": [1, 2]}',
        b'{"format": 0, "files": {"image:/a": [[1, 2], {}]}}',
        b'{"files": {}}',
    ],
)
def test_a_broken_or_foreign_cache_is_written_anew(tmp_path, monkeypatch, content):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    cache_file = tmp_path / "cache.json"
    cache_file.write_bytes(content)
    first = scan_pairs([pair], 1, cache=ScanCache(cache_file))
    assert isinstance(first[0].image, ImageFacts)
    assert len(json.loads(cache_file.read_text())["files"]) == 2
    forbid_decoding(monkeypatch)
    assert scan_pairs([pair], 1, cache=ScanCache(cache_file)) == first


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file" / "cache.json", tmp_path):
        assert isinstance(scan_pairs([pair], 1, cache=ScanCache(path))[0].image, ImageFacts)
    assert (tmp_path / "file").read_text() == "no folder"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_no_error(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    assert isinstance(scan_pairs([pair], 1, cache=ScanCache(folder / "cache.json"))[0].image, ImageFacts)
    assert list(folder.iterdir()) == []


def test_a_mask_of_very_many_values_is_counted_and_not_cached(tmp_path):
    pair = make_pair(tmp_path, "a", np.arange(MAX_CACHED_VALUES + 1, dtype=np.uint16).reshape(1, -1))
    for _ in range(2):
        cache = ScanCache(tmp_path / "cache.json")
        assert len(scan_pairs([pair], 1, cache=cache)[0].mask.counts) == MAX_CACHED_VALUES + 1
    assert [key.split(":")[0] for key in ScanCache(tmp_path / "cache.json").known] == ["image"]


def test_each_dataset_has_its_own_cache(tmp_path):
    first, second = (open_scan_cache(tmp_path / name, tmp_path / "runs").path for name in ("one", "two"))
    assert first != second
    assert first.parent == tmp_path / "runs" / ".scan"
    assert open_scan_cache(tmp_path / "two" / ".." / "one", tmp_path / "runs").path == first


def test_a_scan_without_new_files_writes_nothing(tmp_path):
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    cache_file = tmp_path / "cache.json"
    scan_pairs([pair], 1, cache=ScanCache(cache_file))
    before = cache_file.stat().st_mtime_ns, cache_file.stat().st_ino
    scan_pairs([pair], 1, cache=ScanCache(cache_file))
    assert (cache_file.stat().st_mtime_ns, cache_file.stat().st_ino) == before


def test_a_broken_header_gives_no_warning(tmp_path):
    """PIL warns about tags beyond the end of a TIFF; here warnings are errors, in child processes too."""
    pair = make_pair(tmp_path, "a", mask_of(0, 1))
    data = bytearray(encode_image(np.zeros((8, 8), np.uint8), ".tif"))
    start = int.from_bytes(data[4:8], "little")
    data[start + 2 + 4 : start + 2 + 8] = b"\xff\xff\xff\x7f"
    pair.image.write_bytes(data)
    assert isinstance(scan_pairs([pair], 2)[0], PairFacts)


@pytest.mark.parametrize("role", ["image", "mask"])
@pytest.mark.parametrize("damage", ["missing", None, "text", [], {}, -0.5, [None], {"a": "b"}], ids=str)
def test_a_damaged_entry_of_the_cache_is_read_anew(role, damage, tmp_path):
    """Each field in turn, and the entry itself: never a traceback, and never other facts than those of the file."""
    pair = make_pair(tmp_path, "a", mask_of(0, 1, 2))
    cache_file = tmp_path / "cache.json"
    expected = scan_pairs([pair], 1, cache=ScanCache(cache_file))
    content = json.loads(cache_file.read_text())
    (key,) = (key for key in content["files"] if key.startswith(role))
    stamp, facts = content["files"][key]
    entries = [[stamp, {name: value for name, value in facts.items() if name != field}] for field in facts]
    if damage != "missing":
        kept = ["palette"] if damage == {} else []  # an empty one could be
        kept += [field for field in facts if type(facts[field]) is type(damage) and not isinstance(damage, list | dict)]
        entries = [[stamp, {**facts, field: damage}] for field in facts if field not in kept and facts[field] != damage]
        entries += [damage, [stamp, damage], [damage, facts]]
    for entry in entries:
        cache = ScanCache(None)
        cache.known = {**content["files"], key: entry}
        found = getattr(cache, f"find_{role}")(getattr(pair, role), stamp)
        optional = {"structure", "palette"}  # may be null
        assert found is None or (damage is None and optional & {field for field in facts if entry[1].get(field) is None}), entry
    content["files"][key] = entries[0]
    cache_file.write_text(json.dumps(content))
    assert scan_pairs([pair], 1, cache=ScanCache(cache_file)) == expected
