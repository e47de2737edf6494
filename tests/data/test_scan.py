"""Every file is read once before the first step: its facts, the reason if it cannot be used, and the cache of facts."""

import contextlib
import io
import json
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from helpers.image_bytes import damaged_jpeg
from helpers.no_files import NO_FILES, replace_by
from helpers.shards import pairs_on_a_dead_remote
from unet_trainer.config.auto_images import choose_normalize
from unet_trainer.data import file_facts, scan
from unet_trainer.data.file_facts import TABLE, _key, plain_facts
from unet_trainer.data.pairs import Pair
from unet_trainer.data.scan import ImageFacts, MaskFacts, ScanCache, scan_pairs
from unet_trainer.images.file_bytes import DataError, file_stamp
from unet_trainer.images.image_decoding import EncodedImage, write_image
from unet_trainer.system.console import Console

QUIET = Console(io.StringIO())


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


def save_array(folder, array):
    """A pair whose image is this array."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "a.npy", array)
    return Pair("a", folder / "a.npy", make_pair(folder, "a", np.zeros(array.shape[:2], np.uint8)).mask)


def log_reads(monkeypatch, log):
    """Writes the path of every file that is read into `log`: the reading is done in child processes."""
    read_bytes = scan.read_bytes

    def read_and_log(path):
        with log.open("a") as file:
            file.write(f"{path}\n")
        return read_bytes(path)

    monkeypatch.setattr(scan, "read_bytes", read_and_log)


@pytest.mark.parametrize(("light", "normalize"), [(20, "dataset"), (90, "image")])
def test_images_that_differ_much_from_each_other_are_normalised_one_by_one(tmp_path, light, normalize):
    def share_of(images):
        pairs = [save_array(tmp_path / str(number), image) for number, image in enumerate(images)]
        return scan.brightness_share([found.image for found in scan_pairs(pairs, QUIET)], 3)

    grain = np.random.default_rng(0).normal(60, 30, (3, 20, 30, 3)).clip(0, 120)
    images = (grain + light * np.arange(3)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    pixels, share = images.astype(np.float64), share_of(images)
    assert share == pytest.approx((pixels.mean((1, 2)).var(0) / pixels.var((0, 1, 2))).mean())
    images[..., 1:] = 0  # as fluorescence in an RGB file
    assert share_of(images) == pytest.approx(share, rel=0.1)
    assert choose_normalize(share) == (normalize, f"{share:.0%} of the variance of pixels lies between images")


def test_a_bomb_is_refused_and_an_empty_mask_of_a_large_image_is_not(tmp_path, monkeypatch):
    """With a limit of ten thousand pixels, so that the test is fast."""
    monkeypatch.setattr("unet_trainer.images.tiff_files.BOMB_PIXELS", 10_000)
    monkeypatch.setattr("unet_trainer.images.tiff_files.BOMB_RATIO", 5)
    nothing = np.zeros((150, 200), np.uint8)
    bomb = make_pair(tmp_path, "bomb", nothing)
    large = make_pair(tmp_path, "large", nothing)
    write_image(large.image, np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8))
    found = scan_pairs([bomb, large], QUIET)
    assert {why.partition(" MB ")[2] for why in found[0]} == {"that decompress to 200×150 pixels: a decompression bomb"}
    assert isinstance(found[1].image, ImageFacts)
    assert isinstance(found[1].mask, MaskFacts)


def test_damage_is_attributed_to_the_image_or_to_the_mask_while_each_file_is_read_once(tmp_path, monkeypatch):
    jpegs = [make_jpeg(tmp_path, f"{index}", index).image for index in range(6)]
    pairs = [Pair(f"{index}", jpegs[index], jpegs[index + 1]) for index in (0, 2, 4, 0)]  # the first one twice
    pairs[1].mask.write_bytes(damaged_jpeg(pairs[1].mask.read_bytes()))
    log_reads(monkeypatch, tmp_path / "log")
    found = scan_pairs(pairs, QUIET)
    is_damaged = [[isinstance(fact, str) for fact in facts] for facts in found]
    assert is_damaged == [[False] * 2, [False, True], [False] * 2, [False] * 2]
    assert found[1].mask.startswith("the file is damaged (")
    assert sorted((tmp_path / "log").read_text().split()) == [str(path) for path in sorted(jpegs)]


def test_a_file_that_crashes_the_decoder_is_named_and_the_others_are_read(tmp_path, monkeypatch):
    pairs = [make_jpeg(tmp_path, f"{index}", index) for index in range(3)]
    parent, decode, bad = os.getpid(), EncodedImage.decode, pairs[1].image.read_bytes()

    def crash(self, min_side=None, channels=None):
        if self.data == bad:
            assert os.getpid() != parent
            os.write(2, b"double free\n detected")
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(self, min_side, channels)

    monkeypatch.setattr(EncodedImage, "decode", crash)
    found = scan_pairs(pairs, QUIET, ScanCache(tmp_path / "cache.sqlite"))
    assert found[1].image == "decoding it crashed (SIGKILL: double free detected)"
    assert [isinstance(facts.image, ImageFacts) for facts in found] == [True, False, True]
    assert all(isinstance(facts.mask, MaskFacts) for facts in found)
    monkeypatch.undo()
    again = scan_pairs(pairs, QUIET, ScanCache(tmp_path / "cache.sqlite"))
    assert isinstance(again[1].image, ImageFacts)  # it is read again, not cached


@pytest.mark.parametrize(("which", "change"), [("image", "size"), ("mask", "time")])
def test_a_file_that_changed_is_read_again_and_no_other(tmp_path, monkeypatch, which, change):
    pairs = [make_pair(tmp_path, name, np.array([[0, 1]] * 3, np.uint8)) for name in "ab"]
    path = getattr(pairs[1], which)
    scan_pairs(pairs, QUIET, ScanCache(tmp_path / "cache.sqlite"))
    status = path.stat()
    if change == "size":
        path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (1_000_000 if change == "time" else 0)))
    log_reads(monkeypatch, tmp_path / "log")
    for _ in range(2):
        scan_pairs(pairs, QUIET, ScanCache(tmp_path / "cache.sqlite"))
        assert (tmp_path / "log").read_text() == f"{path}\n"


@pytest.mark.parametrize("kind", ["image", "mask"])
def test_a_damaged_entry_of_the_cache_is_read_anew(kind, tmp_path):
    """Each field in turn of another type, and the entry itself: never other facts than those of the file."""
    pair = make_pair(tmp_path, "a", np.array([[0, 1, 2]] * 2, np.uint8))
    expected = scan_pairs([pair], QUIET, ScanCache(tmp_path / "cache.sqlite"))
    facts = [*plain_facts(kind, getattr(expected[0], kind)).values()]
    damaged = [None, "text", [], [0, *facts[1:]], facts[:-7], [*facts, 1]]
    damaged += [[*facts[:-1], text] for text in ("AAAA", "é")]
    damaged += [[*facts[:place], [{}], *facts[place + 1 :]] for place in range(len(facts))]
    for content in (b"", b"{", b"\xff", b"[" * 100_000, 5, "text", *(json.dumps(one).encode() for one in damaged)):
        with contextlib.closing(sqlite3.connect(tmp_path / "cache.sqlite")) as file, file:
            file.execute(f"UPDATE {TABLE} SET facts = ? WHERE file = ?", (content, _key(kind, getattr(pair, kind))))
        assert [*ScanCache(tmp_path / "cache.sqlite").find(kind, [getattr(pair, kind)])] == [None], content
    assert scan_pairs([pair], QUIET, ScanCache(tmp_path / "cache.sqlite")) == expected


@pytest.mark.parametrize(
    "damage", ["text", "empty", "cut off", "overwritten", "in its schema", "of another program", *NO_FILES]
)
def test_a_cache_that_is_damaged_is_made_anew_and_what_is_no_file_left_alone(damage, tmp_path):
    pair = make_pair(tmp_path, "a", np.array([[0, 1]] * 3, np.uint8))
    ((facts, _),) = scan_pairs([pair], QUIET)
    place, files = tmp_path / "cache.sqlite", [tmp_path / f"{number}.png" for number in range(60)]

    def fill():
        cache = ScanCache(place)
        for path in files:
            path.touch()
            cache.add("image", path, facts, file_stamp(path))
        cache.save()
        return [*cache.find("image", files)]

    assert fill() == [facts] * 60
    data = place.read_bytes()
    whole, middle = len(data) // 2, len(data) // 4
    contents = {
        "text": b"a text" * 1000,
        "empty": b"",
        "cut off": data[:whole],
        "overwritten": data[:middle] + whole * b"x",
        "in its schema": data.replace(b"CREATE TABLE", b"CREATE" + 6 * b"\xff"),
    }
    if damage == "of another program":
        with contextlib.closing(sqlite3.connect(place)) as file, file:
            file.execute(f"DROP TABLE {TABLE}")
            file.execute(f"CREATE TABLE {TABLE} (a, b)")
    elif damage in NO_FILES:
        replace_by(damage, place)
    else:
        place.write_bytes(contents[damage])
    assert set(ScanCache(place).find("image", files)) <= {None, facts}
    fill()  # of some damage, this finds more
    assert fill() == [facts if damage in contents else None] * 60


def test_runs_at_once_write_one_cache_and_a_place_that_cannot_be_used_stops_no_run(tmp_path, monkeypatch):
    pairs = [make_pair(tmp_path, f"{index}", np.array([[0, 1]] * 3, np.uint8)) for index in range(9)]
    place = tmp_path / "runs/.scan/cache.sqlite"
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda first: scan_pairs(pairs[first : first + 3], QUIET, ScanCache(place)), (0, 3, 6))]
    assert [*ScanCache(place).find("image", [pair.image for pair in pairs])] == [
        one.image for each in found for one in each
    ]
    (tmp_path / "file").touch()
    assert scan_pairs(pairs[:3], QUIET, ScanCache(tmp_path / "file/cache.sqlite")) == found[0]
    monkeypatch.setattr(file_facts, "WAIT_SECONDS", 0.1)
    with contextlib.closing(sqlite3.connect(place, isolation_level="EXCLUSIVE")) as other:
        other.execute(f"DELETE FROM {TABLE}")  # a run that hangs while it writes: it is waited for once
        cache = ScanCache(place)
        assert scan_pairs(pairs[:3], QUIET, cache) == found[0]
        assert cache.path is None


def test_what_was_read_before_an_interruption_is_kept(tmp_path, monkeypatch):
    pairs, place = [make_jpeg(tmp_path, f"{index}", index) for index in range(3)], tmp_path / "cache.sqlite"
    monkeypatch.setattr(scan, "count_cores", lambda: 1)
    scan_image, images = scan._scan_image, [pair.image for pair in pairs]
    monkeypatch.setattr(
        scan, "_scan_image", lambda path, nodata: scan_image(path, nodata) if path in images[:2] else 1 / 0
    )
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        scan_pairs(pairs, QUIET, ScanCache(place))
    assert [facts is not None for facts in ScanCache(place).find("image", images)] == [True, True, False]


def test_facts_are_those_of_the_value_that_marks_missing_data_now(tmp_path):
    pair = save_array(tmp_path, np.array([[1, -5], [2, 3]], np.float32))
    for nodata, missing, low in (("fill", (), -5.0), (-5.0, (1,), 1.0), ("ignore", (), -5.0)):
        ((image, _),) = scan_pairs([pair], QUIET, ScanCache(tmp_path / "cache.sqlite", nodata))
        assert (image.missing, image.low) == (missing, low)


def test_the_first_error_of_a_remote_shard_ends_it(tmp_path, monkeypatch):
    """Each of them is tried again for half a minute: all together would take hours."""
    monkeypatch.setattr(scan, "count_cores", lambda: 1)
    pairs, num_asked = pairs_on_a_dead_remote(tmp_path, [f"frame_{number:03d}" for number in range(40)])
    why = r"http://dead/x/dead.tar/.*: http://dead/x/dead.tar cannot be read \(connection refused; 2 tries\)"
    with pytest.raises(DataError, match=why):
        scan_pairs(pairs, QUIET)
    assert num_asked() == 2
