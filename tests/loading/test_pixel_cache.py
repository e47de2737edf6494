"""Decoded pairs in shared memory or in a file: the same pixels as from the files, within a limit, found again, deleted in time."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.loading import pixel_cache
from unet_trainer.loading.checked_file import ContentDamage
from unet_trainer.loading.pixel_cache import ALIGNMENT, fill_cache, lay_out
from unet_trainer.loading.reading_threads import ReadTimeout

SHAPES = [(5, 7, 3), (4, 4, 3), (1, 9, 3), (8, 2, 3)]
DAY = 24 * 3600


def pixels(index, dtype=np.uint8, shapes=SHAPES):
    rng = np.random.default_rng(index)
    height, width, channels = shapes[index]
    image = rng.integers(0, 256, (height, width, channels)).astype(dtype)
    return image * dtype(1.5) if dtype is np.float32 else image, rng.integers(0, 3, (height, width)).astype(np.uint8)


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


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_pixels_are_returned_as_they_were_read(place, tmp_path):
    cache, num_ticks = build(place, tmp_path)
    assert len(cache) == num_ticks == 4
    for index in range(4):
        for ours, theirs in zip(cache.pair(index), pixels(index), strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


def test_float_images_keep_their_values(tmp_path):
    cache, _ = build("ram", tmp_path, lambda index: pixels(index, np.float32), itemsize=4)
    image, _ = cache.pair(2)
    assert image.dtype == np.float32
    assert np.array_equal(image, pixels(2, np.float32)[0])


def test_returned_arrays_cannot_be_written_to(tmp_path):
    cache, _ = build("ram", tmp_path)
    for array in cache.pair(0):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_the_cache_takes_half_of_what_is_free_and_leaves_the_other_pairs_to_the_files(tmp_path):
    sizes = [5 * 7 * 4, 4 * 4 * 4]  # three channels and a mask
    first = -(-sizes[0] // ALIGNMENT) * ALIGNMENT
    cache, num_ticks = build("ram", tmp_path, limit=2 * (first + sizes[1]))
    assert len(cache) == num_ticks == 2
    assert len(build("ram", tmp_path, limit=2 * (first + sizes[1]) - 2)[0]) == 1
    assert len(build("ram", tmp_path, limit=10)[0]) == 0
    assert len(build("disk", tmp_path, limit=10)[0]) == 0


def test_without_a_limit_the_free_memory_of_the_container_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_cache, "free_host_memory", lambda: 2 * 5 * 7 * 4)
    assert len(build("ram", tmp_path, limit=None)[0]) == 1


def test_entries_do_not_overlap():
    entries = lay_out([(3, 5, 2)] * 50, 4, 10**6)
    assert len(entries) == 50
    ends = [entry.start + entry.num_bytes for entry in entries]
    assert all(end <= following.start for end, following in zip(ends, entries[1:], strict=False))
    assert all(entry.start % ALIGNMENT == 0 for entry in entries)


# In memory


def mapping_of(tensor):
    """The line of /proc/self/maps that holds the tensor: addresses, permissions, offset, device, inode, file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split(maxsplit=5)
    raise AssertionError("not mapped")


def test_the_memory_is_anonymous_and_not_in_dev_shm(tmp_path):
    """Containers keep /dev/shm small: a file there is a SIGBUS once it is full."""
    cache, _ = build("ram", tmp_path)
    assert not cache.content.is_shared()  # torch's shared memory would be a file in /dev/shm
    _, permissions, _, _, _, file = mapping_of(cache.content)
    assert permissions == "rw-s"
    assert file == "/dev/zero (deleted)"  # how Linux shows anonymous shared memory


def test_forked_processes_see_what_is_written(tmp_path):
    """In both directions, and after the fork: the memory is shared, not copied."""
    cache, _ = build("ram", tmp_path)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    was_written = context.Event()

    def read_and_write():
        before = [int(cache.pair(index)[0].sum()) for index in range(4)]
        was_written.wait(30)
        sender.send((before, int(cache.content[0])))
        cache.content[1] = 88

    process = context.Process(target=read_and_write)
    process.start()
    cache.content[0] = 77
    was_written.set()
    assert receiver.poll(30)
    sums, seen = receiver.recv()
    process.join(30)
    assert seen == 77
    assert int(cache.content[1]) == 88
    assert sums[1:] == [int(pixels(index)[0].sum()) for index in range(1, 4)]  # the first one may hold the 77 already


# On disk


def test_a_file_is_found_again_by_its_stamp_and_not_by_another(tmp_path):
    build("disk", tmp_path)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read)
    assert num_ticks == 0
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
    cache, num_ticks = build("disk", tmp_path)
    assert num_ticks == 4
    assert np.array_equal(cache.pair(3)[0], pixels(3)[0])


def test_a_folder_that_cannot_be_written_to_is_an_error_with_the_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache: disk cannot be written to .* set cache: none or checkpoint_dir"):
        build("disk", tmp_path / "file" / "cache")


def test_two_runs_that_fill_the_same_file_do_not_spoil_it(tmp_path):
    """One begins while the other is filling it, and is killed; the file that stays is complete."""

    def killed(index):
        raise KeyboardInterrupt

    def while_another_begins(index):
        if index == 2:
            with pytest.raises(KeyboardInterrupt):
                build("disk", tmp_path, killed)
        return pixels(index)

    build("disk", tmp_path, while_another_begins)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read)
    assert num_ticks == 0
    assert all(np.array_equal(cache.pair(index)[0], pixels(index)[0]) for index in range(4))
    assert len(names(tmp_path)) == 1


def test_a_complete_file_is_found_again_when_the_disk_is_full(tmp_path):
    build("disk", tmp_path)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read, limit=10)
    assert (len(cache), num_ticks) == (4, 0)


def test_a_file_of_some_pairs_is_used_until_more_fit(tmp_path):
    some, _ = build("disk", tmp_path, limit=600)
    assert 0 < len(some) < 4
    assert build("disk", tmp_path, refuse_to_read, limit=600)[1] == 0
    every, num_ticks = build("disk", tmp_path)
    assert len(every) == num_ticks == 4
    assert len(names(tmp_path)) == 1


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match="No space left on device"):
        build("disk", tmp_path)
    assert names(tmp_path) == []


# Deleting what is not needed


def test_drafts_of_killed_runs_are_deleted_at_once_but_not_those_in_progress(tmp_path):
    for name, content in (("killed", b"x" * 1000), ("begun", b"")):
        (tmp_path / f".{name}.pixels.x.draft").write_bytes(content)

    def while_another_begins(index):
        if index == 2:
            build("disk", tmp_path, stamp=("other",))
            assert len(list(tmp_path.glob(".*.draft"))) == 2  # ours, and that which was begun just now
        return pixels(index)

    build("disk", tmp_path, while_another_begins)
    assert [path.name for path in tmp_path.glob(".*")] == [".begun.pixels.x.draft"]
    set_age(tmp_path / ".begun.pixels.x.draft", 2 * DAY)
    build("disk", tmp_path)
    assert not list(tmp_path.glob(".*"))


def fill_and_hang(folder, is_filling):
    def read(index):
        if index < 3:
            return pixels(index)
        is_filling.set()
        return time.sleep(600)

    build("disk", folder, read)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed")
def test_a_killed_filling_leaves_no_draft_behind_for_the_next_start(tmp_path):
    context = multiprocessing.get_context("fork")
    drafts = set()
    for _ in range(3):
        is_filling = context.Event()
        process = context.Process(target=fill_and_hang, args=(tmp_path, is_filling))
        process.start()
        assert is_filling.wait(60)
        process.kill()
        process.join(60)
        (draft,) = tmp_path.glob(".*.draft")  # each start has deleted that of the one before
        drafts.add(draft)
    assert len(drafts) == 3
    build("disk", tmp_path)
    assert len(names(tmp_path)) == 1


# Content that something else has changed


def own_file(folder):
    (path,) = folder.glob("*.pixels")
    return path


def test_a_zeroed_file_is_noticed_when_it_is_read(tmp_path):
    build("disk", tmp_path)
    own = own_file(tmp_path)
    table = own.read_bytes()[384:]
    own.write_bytes(bytes(384) + table)
    cache, num_ticks = build("disk", tmp_path, refuse_to_read)
    assert num_ticks == 0
    for index in range(4):
        with pytest.raises(ContentDamage, match="its content has changed"):
            np.asarray(cache.pair(index)[0])
    cache.discard()
    assert build("disk", tmp_path)[1] == 4


def test_a_file_whose_checksums_are_damaged_is_filled_anew(tmp_path):
    build("disk", tmp_path)
    content = own_file(tmp_path).read_bytes()
    own_file(tmp_path).write_bytes(content[:390] + bytes([content[390] ^ 1]) + content[391:])
    assert build("disk", tmp_path)[1] == 4


def test_a_file_that_is_cut_off_while_it_is_used_is_an_error_and_no_crash(tmp_path):
    cache, _ = build("disk", tmp_path)
    os.truncate(own_file(tmp_path), 100)
    with pytest.raises(ContentDamage, match="it has become shorter"):
        np.asarray(cache.pair(3)[0])


def test_only_the_rows_that_are_looked_at_are_read(tmp_path, monkeypatch):
    shapes = [(400, 300, 3)]
    image, mask = pixels(0, shapes=shapes)
    cache, _ = build("disk", tmp_path, lambda index: (image, mask), shapes=shapes, limit=10**8)
    num_bytes = []
    real = os.preadv
    monkeypatch.setattr(
        "os.preadv", lambda handle, places, offset: num_bytes.append(sum(map(len, places))) or real(handle, places, offset)
    )
    stored_image, stored_mask = cache.pair(0)
    assert np.array_equal(stored_image[100:110, 20:40], image[100:110, 20:40])
    assert np.array_equal(stored_mask[100:110, 20:40], mask[100:110, 20:40])
    assert max(num_bytes) <= 2 * 2**16  # whole blocks, which are checked
    num_bytes.clear()
    assert np.array_equal(stored_image[100:110, 20:40], image[100:110, 20:40])
    assert num_bytes == [10 * 300 * 3]  # they were checked before
    assert stored_mask[400:500, 0:7].shape == (0, 7)


def test_a_file_can_be_read_by_other_users_and_is_opened_for_reading_only(tmp_path):
    before = os.umask(0o022)
    try:
        build("disk", tmp_path)
    finally:
        os.umask(before)
    assert own_file(tmp_path).stat().st_mode & 0o777 == 0o644
    cache, _ = build("disk", tmp_path, refuse_to_read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(cache.file.handle, b"x")


def test_a_disk_that_never_answers_ends_in_an_error(tmp_path):
    for place in ("ram", "disk"):
        with pytest.raises(ReadTimeout):
            fill_cache(SHAPES, 1, lambda index: time.sleep(600), place, tmp_path, (), 2, lambda: None, 10**6, timeout=0.2)
    assert names(tmp_path) == []


def test_caches_that_were_not_used_for_14_days_are_deleted_and_others_stay(tmp_path):
    for name, age in (("old.pixels", 15 * DAY), ("young.pixels", 13 * DAY), ("other.txt", 100 * DAY)):
        (tmp_path / name).touch()
        set_age(tmp_path / name, age)
    build("disk", tmp_path)
    (own,) = set(names(tmp_path)) - {"young.pixels", "other.txt"}
    assert own != "old.pixels"
    assert {"young.pixels", "other.txt"} < set(names(tmp_path))


def test_the_cache_in_use_is_kept_however_old_and_counts_as_used_now(tmp_path):
    build("disk", tmp_path)
    (own,) = tmp_path.iterdir()
    set_age(own, 100 * DAY)
    assert build("disk", tmp_path, refuse_to_read)[1] == 0
    assert time.time() - own.stat().st_mtime < DAY


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk of 1000 bytes, with caches of 300 bytes; `pixels` of 4 pairs need 384, and half of what is free may be used.

    A file has four bytes more for each pair, and 16 at its end.
    """

    def free_disk(folder):
        return 1000 - sum(path.stat().st_size for path in folder.iterdir())

    monkeypatch.setattr(pixel_cache, "free_disk", free_disk)
    for name, age in (("middle", 2), ("oldest", 3), ("newest", 1)):
        path = tmp_path / f"{name}.pixels"
        path.write_bytes(bytes(300))
        set_age(path, age * DAY)
    return tmp_path


@pytest.mark.parametrize(
    ("num_pairs", "num_bytes", "kept"),
    [
        (1, 160, ["middle.pixels", "newest.pixels"]),  # 100 bytes are free: the oldest goes, and 400 are enough
        (2, 280, ["newest.pixels"]),  # 512 are needed, and two caches must go
        (4, 416, []),  # 768 are needed, and all must go
    ],
)
def test_caches_make_room_those_used_longest_ago_first(small_disk, num_pairs, num_bytes, kept):
    cache, num_ticks = build("disk", small_disk, limit=None, shapes=SHAPES[:num_pairs])
    assert len(cache) == num_ticks == num_pairs
    (own,) = set(names(small_disk)) - {"middle.pixels", "oldest.pixels", "newest.pixels"}
    assert (small_disk / own).stat().st_size == num_bytes
    assert sorted(set(names(small_disk)) - {own}) == kept


def test_a_cache_that_is_found_again_deletes_no_other(small_disk):
    build("disk", small_disk, shapes=SHAPES[:1])
    before = names(small_disk)
    assert build("disk", small_disk, refuse_to_read, limit=None, shapes=SHAPES[:1])[1] == 0
    assert names(small_disk) == before


def test_a_cache_that_was_used_again_is_not_the_first_to_be_deleted(small_disk):
    build("disk", small_disk, shapes=SHAPES[:1])  # 140 bytes
    (own,) = set(names(small_disk)) - {"middle.pixels", "oldest.pixels", "newest.pixels"}
    set_age(small_disk / own, 10 * DAY)
    build("disk", small_disk, refuse_to_read, shapes=SHAPES[:1])
    build("disk", small_disk, limit=None, shapes=SHAPES[:1], stamp=("b",))
    assert own in names(small_disk)
    assert "oldest.pixels" not in names(small_disk)


def test_a_cache_that_is_open_is_not_deleted_neither_for_its_age_nor_to_make_room(small_disk):
    """Such as the cache of the training set while that of the validation set is built."""
    cache, _ = build("disk", small_disk, shapes=SHAPES[:1])
    (own,) = set(names(small_disk)) - {"middle.pixels", "oldest.pixels", "newest.pixels"}
    set_age(small_disk / own, 100 * DAY)
    build("disk", small_disk, limit=None, stamp=("b",))  # four pairs: all others must go
    assert own in names(small_disk)
    assert not {"middle.pixels", "oldest.pixels", "newest.pixels"} & set(names(small_disk))
    assert np.array_equal(cache.pair(0)[0], pixels(0)[0])
    del cache
    build("disk", small_disk, limit=None, stamp=("b",))
    assert own not in names(small_disk)


def test_a_deleted_cache_can_still_be_read_by_the_run_that_uses_it(tmp_path):
    cache, _ = build("disk", tmp_path)
    (own,) = tmp_path.iterdir()
    own.unlink()
    assert np.array_equal(cache.pair(3)[0], pixels(3)[0])


# Masks of another size than their images


MASK_SIZES = [(10, 3), (4, 4), (1, 1), (20, 30)]


def pixels_with_native_masks(index, dtype=np.uint8):
    mask = np.random.default_rng(index).integers(0, 3, MASK_SIZES[index]).astype(np.uint8)
    return pixels(index, dtype)[0], mask


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_masks_may_have_another_size_than_their_images(place, dtype, tmp_path):
    def read(index):
        return pixels_with_native_masks(index, dtype)

    cache, _ = build(place, tmp_path, read, itemsize=np.dtype(dtype).itemsize, mask_sizes=MASK_SIZES)
    assert len(cache) == 4
    for index in range(4):
        for ours, theirs in zip(cache.pair(index), read(index), strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


def test_room_is_needed_for_the_masks_at_their_own_size():
    sizes = [5 * 7 * 3 + 10 * 3, 4 * 4 * 3 + 4 * 4]
    first = -(-sizes[0] // ALIGNMENT) * ALIGNMENT
    assert [entry.num_bytes for entry in lay_out(SHAPES, 1, first + sizes[1], MASK_SIZES)] == sizes
    assert len(lay_out(SHAPES, 1, first + sizes[1] - 1, MASK_SIZES)) == 1


def test_a_file_with_masks_of_another_size_is_another_file(tmp_path):
    build("disk", tmp_path)
    for mask_sizes in (MASK_SIZES, [shape[:2] for shape in SHAPES]):
        with pytest.raises(AssertionError, match="read again"):
            build("disk", tmp_path, refuse_to_read, mask_sizes=mask_sizes)
    build("disk", tmp_path, pixels_with_native_masks, mask_sizes=MASK_SIZES)
    assert len(names(tmp_path)) == 2
    assert build("disk", tmp_path, refuse_to_read, mask_sizes=MASK_SIZES)[1] == 0
    assert build("disk", tmp_path, refuse_to_read)[1] == 0
