"""What is kept of remote shards: at most so many bytes, found again, and room made among several URLs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from unet_trainer.shards.range_cache import LOCK_NAME, PAGE, RangeCache
from unet_trainer.shards.shard_index import Shard

SHARDS = [Shard("a.tar", 10 * PAGE, ()), Shard("x/b.tar", 10 * PAGE, ())]


def test_what_was_written_is_found_by_this_and_by_the_next_start(tmp_path):
    first = RangeCache(tmp_path, "s3://one", SHARDS, 100 * PAGE)
    assert first.read("a.tar", 100, 105) is None
    first.write("a.tar", 100, b"hello")
    first.write("x/b.tar", 0, b"other")
    for cache in (first, RangeCache(tmp_path, "s3://one", SHARDS, 100 * PAGE)):
        assert cache.read("a.tar", 100, 105) == b"hello"
        assert cache.read("x/b.tar", 0, 5) == b"other"
        assert cache.read("a.tar", 103, 110) is None  # more than there is


def test_another_url_has_a_place_of_its_own(tmp_path):
    RangeCache(tmp_path, "s3://one", SHARDS, 100 * PAGE).write("a.tar", 0, b"hello")
    assert RangeCache(tmp_path, "s3://two", SHARDS, 100 * PAGE).read("a.tar", 0, 5) is None


def test_the_first_shards_are_kept_up_to_the_limit(tmp_path):
    cache = RangeCache(tmp_path, "s3://one", SHARDS, 12 * PAGE)
    assert cache.keeps("a.tar", 10 * PAGE)
    assert cache.keeps("x/b.tar", 2 * PAGE)
    assert not cache.keeps("x/b.tar", 2 * PAGE + 1)
    for shard in ("a.tar", "x/b.tar"):
        for page in range(10):
            cache.write(shard, page * PAGE, os.urandom(PAGE))
    assert cache.read("a.tar", 9 * PAGE, 10 * PAGE) is not None
    assert cache.read("x/b.tar", PAGE, 2 * PAGE) is not None
    assert cache.read("x/b.tar", 2 * PAGE, 3 * PAGE) is None
    assert cache.allocated() <= 13 * PAGE  # and a page for its own file
    cache.limit(5 * PAGE)
    assert not cache.keeps("a.tar", 6 * PAGE)


def test_holes_take_no_room(tmp_path):
    cache = RangeCache(tmp_path, "s3://one", [Shard("a.tar", 2**30, ())], 2**31)
    cache.write("a.tar", 2**29, b"x")
    assert cache.allocated() < 2**20


@pytest.mark.parametrize(("call", "number", "kept"), [("pwrite", errno.ENOSPC, None), ("open", errno.EMFILE, b"hello")])
def test_a_full_disk_ends_keeping_and_another_error_does_not(tmp_path, monkeypatch, call, number, kept):
    cache = RangeCache(tmp_path, "s3://one", SHARDS, 100 * PAGE)

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    cache.write("a.tar", 0, b"hello")
    monkeypatch.undo()
    cache.write("a.tar", 0, b"hello")
    assert cache.read("a.tar", 0, 5) == kept


def folders(tmp_path):
    return {(place / LOCK_NAME).read_text().strip() for place in tmp_path.iterdir()}


def filled(tmp_path, url, age):
    cache = RangeCache(tmp_path, url, SHARDS, 1000 * PAGE)
    cache.write("a.tar", 0, os.urandom(8 * PAGE))
    os.utime(cache.folder / LOCK_NAME, (age, age))
    return cache


def test_room_is_made_of_what_was_used_longest_ago_and_is_not_in_use(tmp_path):
    used = filled(tmp_path, "s3://in-use", 1)
    for url, age in (("s3://old", 2), ("s3://new", 3)):
        filled(tmp_path, url, age)
    RangeCache(tmp_path, "s3://now", SHARDS, 1000 * PAGE)
    assert folders(tmp_path) == {"s3://in-use", "s3://old", "s3://new", "s3://now"}
    RangeCache(tmp_path, "s3://now", SHARDS, 40 * PAGE)  # 20 for itself, and 27 are taken
    assert folders(tmp_path) == {"s3://in-use", "s3://new", "s3://now"}
    RangeCache(tmp_path, "s3://now", SHARDS, 20 * PAGE)
    assert folders(tmp_path) == {"s3://in-use", "s3://now"}
    assert used.read("a.tar", 0, PAGE) is not None


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "of-the-user").mkdir()
    (tmp_path / "of-the-user/file").write_bytes(os.urandom(100 * PAGE))
    RangeCache(tmp_path, "s3://now", SHARDS, 20 * PAGE)
    assert (tmp_path / "of-the-user/file").is_file()


def test_many_shards_take_no_open_files(tmp_path):
    cache = RangeCache(tmp_path, "s3://one", [Shard(f"{number}.tar", PAGE, ()) for number in range(50)], 1000 * PAGE)
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir())) if opened.is_dir() else 0
    for number in range(50):
        cache.write(f"{number}.tar", 0, b"x" * 100)
        assert cache.read(f"{number}.tar", 0, 100) == b"x" * 100
    if before:
        assert len(list(opened.iterdir())) == before


def test_what_is_no_longer_to_be_kept_is_taken_away_at_the_next_start(tmp_path):
    first = RangeCache(tmp_path, "s3://one", SHARDS, 100 * PAGE)
    for shard in ("a.tar", "x/b.tar"):
        first.write(shard, 0, os.urandom(10 * PAGE))
    assert first.allocated() >= 20 * PAGE
    less = RangeCache(tmp_path, "s3://one", SHARDS, 12 * PAGE)
    assert less.allocated() <= 13 * PAGE
    assert less.read("x/b.tar", 0, PAGE) is not None
    others = RangeCache(tmp_path, "s3://one", SHARDS[1:], 100 * PAGE)
    assert others.allocated() <= 3 * PAGE
