"""Decoded pairs in shared memory or in a file: the same pixels as from the files, bounded, found again, renewed."""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np
import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.loading.pixel_cache import ALIGNMENT, fill_cache, free_memory, lay_out
from unet_trainer.system.resources import free_disk

SHAPES = [(5, 7, 3), (4, 4, 3), (1, 9, 3), (8, 2, 3)]


def pixels(index, dtype=np.uint8, shapes=SHAPES):
    chooser = np.random.default_rng(index)
    height, width, channels = shapes[index]
    image = chooser.integers(0, 256, (height, width, channels)).astype(dtype)
    return image * dtype(1.5) if dtype is np.float32 else image, chooser.integers(0, 3, (height, width)).astype(np.uint8)


def build(place, folder, read=pixels, stamp=("a",), itemsize=1, limit=10**6, shapes=SHAPES):
    ticks = []
    cache = fill_cache(shapes, itemsize, read, place, folder, stamp, 2, lambda: ticks.append(1), limit)
    return cache, len(ticks)


def refuse_to_read(index):
    raise AssertionError("read again")


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_pixels_come_back_as_they_were_read(place, tmp_path):
    cache, ticks = build(place, tmp_path)
    assert len(cache) == ticks == 4
    for index in range(4):
        for ours, theirs in zip(cache.pair(index), pixels(index), strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


def test_float_images_keep_their_values(tmp_path):
    cache, _ = build("ram", tmp_path, lambda index: pixels(index, np.float32), itemsize=4)
    image, _ = cache.pair(2)
    assert image.dtype == np.float32
    assert np.array_equal(image, pixels(2, np.float32)[0])


def test_what_is_handed_out_cannot_be_written_to(tmp_path):
    cache, _ = build("ram", tmp_path)
    for array in cache.pair(0):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_the_cache_takes_half_of_the_room_and_leaves_the_rest_to_the_files(tmp_path):
    sizes = [5 * 7 * 4, 4 * 4 * 4]  # three channels and a mask
    first = -(-sizes[0] // ALIGNMENT) * ALIGNMENT
    cache, ticks = build("ram", tmp_path, limit=2 * (first + sizes[1]))
    assert len(cache) == ticks == 2
    assert len(build("ram", tmp_path, limit=2 * (first + sizes[1]) - 2)[0]) == 1
    assert len(build("ram", tmp_path, limit=10)[0]) == 0
    assert len(build("disk", tmp_path, limit=10)[0]) == 0


def test_slots_do_not_overlap():
    slots = lay_out([(3, 5, 2)] * 50, 4, 10**6)
    ends = [slot.start + slot.num_bytes for slot in slots]
    assert all(end <= following.start for end, following in zip(ends, slots[1:], strict=False))
    assert all(slot.start % ALIGNMENT == 0 for slot in slots)


def test_a_file_is_found_again_by_its_stamp_and_not_by_another(tmp_path):
    build("disk", tmp_path)
    cache, ticks = build("disk", tmp_path, refuse_to_read)
    assert ticks == 0
    assert np.array_equal(cache.pair(3)[0], pixels(3)[0])
    with pytest.raises(AssertionError, match="read again"):
        build("disk", tmp_path, refuse_to_read, stamp=("b",))


def test_a_file_that_was_not_filled_to_its_end_is_filled_anew(tmp_path):
    def stop_at_two(index):
        if index == 2:
            raise KeyboardInterrupt
        return pixels(index)

    with pytest.raises(KeyboardInterrupt):
        build("disk", tmp_path, stop_at_two)
    cache, ticks = build("disk", tmp_path)
    assert ticks == 4
    assert np.array_equal(cache.pair(3)[0], pixels(3)[0])


def test_a_folder_that_cannot_be_written_to_is_told_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache: disk cannot be written to .* set cache: none or checkpoint_dir"):
        build("disk", tmp_path / "file" / "cache")


def _sum_in_child(cache, queue):
    queue.put([int(cache.pair(index)[0].sum()) for index in range(len(cache))])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_sees_the_same_memory(method, tmp_path):
    cache, _ = build("ram", tmp_path)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(cache, queue))
    child.start()
    assert queue.get(timeout=60) == [int(pixels(index)[0].sum()) for index in range(4)]
    child.join()
    assert cache.content.is_shared()


def test_what_is_free_is_measured(tmp_path):
    assert 2**20 < free_memory() < 2**50
    assert 0 < free_disk(tmp_path / "not" / "there") < 2**60


def test_two_runs_that_fill_the_same_file_do_not_spoil_it(tmp_path):
    """One begins while the other is at it, and is killed; the file that stays is whole."""

    def killed(index):
        raise KeyboardInterrupt

    def while_another_begins(index):
        if index == 2:
            with pytest.raises(KeyboardInterrupt):
                build("disk", tmp_path, killed)
        return pixels(index)

    build("disk", tmp_path, while_another_begins)
    cache, ticks = build("disk", tmp_path, refuse_to_read)
    assert ticks == 0
    assert all(np.array_equal(cache.pair(index)[0], pixels(index)[0]) for index in range(4))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_whole_file_is_found_again_when_there_is_no_room_for_another(tmp_path):
    build("disk", tmp_path)
    cache, ticks = build("disk", tmp_path, refuse_to_read, limit=10)
    assert (len(cache), ticks) == (4, 0)


def test_a_file_of_some_pairs_is_used_until_there_is_room_for_more(tmp_path):
    some, _ = build("disk", tmp_path, limit=600)
    assert 0 < len(some) < 4
    assert build("disk", tmp_path, refuse_to_read, limit=600)[1] == 0
    every, ticks = build("disk", tmp_path)
    assert len(every) == ticks == 4
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_is_full_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match="No space left on device"):
        build("disk", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_swept_but_not_what_another_is_at(tmp_path):
    for name, age in (("old", 2 * 24 * 3600), ("young", 60)):
        draft = tmp_path / f".{name}.pixels.x.draft"
        draft.touch()
        os.utime(draft, (time.time() - age,) * 2)
    build("disk", tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [".young.pixels.x.draft"]
