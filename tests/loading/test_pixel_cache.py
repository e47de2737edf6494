"""Decoded pairs in shared memory or in a file: the same pixels as from the files, within a limit, found again, deleted in time."""

import multiprocessing
import os
import time

import numpy as np
import pytest

from helpers.no_files import needs_pipes, replace_by
from unet_trainer.config.errors import UserError
from unet_trainer.loading import pixel_cache
from unet_trainer.loading.pixel_cache import BLOCK, ContentDamage, fill_cache

SHAPES = [(5, 7, 3), (40, 60, 3), (1, 9, 3), (8, 2, 3)]  # of 1, 3, 1 and 1 block
MASK_SIZES = [(10, 3), (4, 4), (1, 1), (20, 30)]
DAY = 24 * 3600


def pixels(index, dtype=np.uint8, shapes=SHAPES, mask_sizes=None):
    rng = np.random.default_rng(index)
    image = rng.integers(0, 256, shapes[index]).astype(dtype) * dtype(1)
    return image, rng.integers(0, 3, shapes[index][:2] if mask_sizes is None else mask_sizes[index]).astype(np.uint8)


def build(place, folder, read=pixels, stamp=("a",), itemsize=1, limit=10**6, shapes=SHAPES, mask_sizes=None):
    ticks = []
    cache = fill_cache(shapes, itemsize, read, place, folder, stamp, 2, lambda: ticks.append(1), limit, mask_sizes)
    return cache, len(ticks)


def refuse_to_read(index):
    raise AssertionError("read again")


def set_age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def own_file(folder):
    (path,) = folder.glob("*.pixels")
    return path


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize(("dtype", "mask_sizes"), [(np.uint8, None), (np.float32, None), (np.float32, MASK_SIZES)])
def test_pixels_are_returned_as_they_were_read_and_cannot_be_written_to(place, dtype, mask_sizes, tmp_path):
    def read(index):
        return pixels(index, dtype, mask_sizes=mask_sizes)

    cache, num_ticks = build(place, tmp_path, read, itemsize=np.dtype(dtype).itemsize, mask_sizes=mask_sizes)
    assert len(cache) == num_ticks == 4
    for index in range(4):
        for stored, expected in zip(cache.pair(index), read(index), strict=True):
            ours = np.asarray(stored)
            assert ours.dtype == expected.dtype
            assert np.array_equal(ours, expected)
            with pytest.raises(ValueError, match="read-only"):
                ours[:] = 0


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_the_cache_takes_half_of_what_is_free_and_leaves_the_other_pairs_to_the_files(place, tmp_path):
    for limit, num_pairs in ((10, 0), (2 * BLOCK, 1), (2 * 4 * BLOCK, 2), (2 * 4 * BLOCK - 2, 1)):
        cache, num_ticks = build(place, tmp_path / str(limit), limit=limit)
        assert len(cache) == num_ticks == num_pairs


def test_a_file_is_found_again_by_its_stamp_and_sizes_and_not_by_others(tmp_path):
    build("disk", tmp_path)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read, limit=10)  # also when the disk is full
    assert (len(cache), num_ticks) == (4, 0)
    assert np.array_equal(cache.pair(3)[0], pixels(3)[0])
    for other in ({"stamp": ("b",)}, {"mask_sizes": MASK_SIZES}, {"itemsize": 4}):
        with pytest.raises(AssertionError, match="read again"):
            build("disk", tmp_path, refuse_to_read, **other)


def test_what_cannot_be_written_is_an_error_with_the_fix_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(
        UserError, match=r"cache: disk cannot be written to .*No space left.* set cache: none or checkpoint_dir"
    ):
        build("disk", tmp_path)
    assert names(tmp_path) == []


def test_two_runs_that_fill_the_same_file_do_not_spoil_it(tmp_path):
    """One begins while the other is filling it, and is interrupted; the file that stays is complete."""

    def interrupt(index):
        raise KeyboardInterrupt

    def while_another_begins(index):
        if index == 2:
            with pytest.raises(KeyboardInterrupt):
                build("disk", tmp_path, interrupt)
        return pixels(index)

    build("disk", tmp_path, while_another_begins)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read)
    assert num_ticks == 0
    assert all(np.array_equal(cache.pair(index)[0], pixels(index)[0]) for index in range(4))
    assert len(names(tmp_path)) == 1


def test_a_file_that_is_cut_off_while_it_is_used_is_an_error_and_no_crash(tmp_path):
    cache, _ = build("disk", tmp_path)
    os.truncate(own_file(tmp_path), 100)
    with pytest.raises(ContentDamage, match="it has become shorter"):
        np.asarray(cache.pair(3)[0])
    assert build("disk", tmp_path)[1] == 4


@needs_pipes
@pytest.mark.parametrize("kind", ["pipe", "zeros", "loop", "link to a whole cache"])
def test_what_is_no_file_is_neither_waited_for_nor_followed_but_replaced(kind, tmp_path):
    cache, _ = build("disk", tmp_path)
    if kind.startswith("link"):
        cache.path.rename(tmp_path / "elsewhere")
        cache.path.symlink_to("elsewhere")
    else:
        for path in (
            cache.path,
            tmp_path / f"other{pixel_cache.SUFFIX}",
            tmp_path / f".other{pixel_cache.DRAFT_SUFFIX}",
        ):
            replace_by(kind, path)
    assert build("disk", tmp_path)[1] == 4
    assert cache.path.is_file()
    assert not cache.path.is_symlink()


def fill_and_hang(folder, is_filling):
    def read(index):
        if index < 3:
            return pixels(index)
        is_filling.set()
        return time.sleep(600)

    build("disk", folder, read)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed")
def test_drafts_of_killed_runs_are_deleted_but_not_those_in_progress(tmp_path):
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        is_filling = context.Event()
        process = context.Process(target=fill_and_hang, args=(tmp_path, is_filling))
        process.start()
        assert is_filling.wait(60)
        (draft,) = tmp_path.glob(".*.draft")  # each start has deleted that of the one before
        if _ == 0:
            process.kill()
            process.join(60)
    begun = tmp_path / ".begun.pixels.x.draft"
    begun.touch()
    build("disk", tmp_path, stamp=("other",))
    assert set(tmp_path.glob(".*.draft")) == {draft, begun}  # in progress, and begun just now
    process.kill()
    process.join(60)
    set_age(begun, 2 * DAY)
    build("disk", tmp_path)
    assert not list(tmp_path.glob(".*.draft"))


def test_caches_that_were_not_used_for_14_days_are_deleted_and_others_stay(tmp_path):
    for name, age in (("old.pixels", 15 * DAY), ("young.pixels", 13 * DAY), ("other.txt", 100 * DAY)):
        (tmp_path / name).touch()
        set_age(tmp_path / name, age)
    cache, _ = build("disk", tmp_path)
    path = cache.path
    assert set(names(tmp_path)) == {"young.pixels", "other.txt", path.name}
    set_age(path, 100 * DAY)
    build("disk", tmp_path, stamp=("other",))
    assert path.exists()  # it is open, as the cache of the training set while that of the validation set is built
    build("disk", tmp_path, refuse_to_read)
    assert time.time() - path.stat().st_mtime < DAY
