"""Decoded pairs in memory or in a file: the same pixels as from the files, within a limit, gone with the run."""

import os

import numpy as np
import pytest

from unet_trainer.loading.pixel_cache import BLOCK, delete_files, fill_cache

SHAPES = [(5, 7, 3), (40, 60, 3), (1, 9, 3), (8, 2, 3)]  # of 1, 3, 1 and 1 block
MASK_SIZES = [(10, 3), (4, 4), (1, 1), (20, 30)]


def pixels(index, dtype=np.uint8, shapes=SHAPES, mask_sizes=None):
    rng = np.random.default_rng(index)
    image = rng.integers(0, 256, shapes[index]).astype(dtype) * dtype(1)
    return image, rng.integers(0, 3, shapes[index][:2] if mask_sizes is None else mask_sizes[index]).astype(np.uint8)


def build(path, read=pixels, itemsize=1, limit=10**6, mask_sizes=None):
    ticks = []
    cache = fill_cache(SHAPES, itemsize, read, path, 2, lambda: ticks.append(1), limit, mask_sizes)
    return cache, len(ticks)


def refuse_to_read(index):
    raise AssertionError("read again")


@pytest.fixture(params=["ram", "disk"])
def path(request, tmp_path):
    return None if request.param == "ram" else tmp_path / ".cache/a.pixels"


@pytest.mark.parametrize(("dtype", "mask_sizes"), [(np.uint8, None), (np.float32, None), (np.float32, MASK_SIZES)])
def test_pixels_are_returned_as_they_were_read_and_cannot_be_written_to(path, dtype, mask_sizes):
    def read(index):
        return pixels(index, dtype, mask_sizes=mask_sizes)

    cache, num_ticks = build(path, read, itemsize=np.dtype(dtype).itemsize, mask_sizes=mask_sizes)
    assert len(cache) == num_ticks == 4
    for index in range(4):
        for stored, expected in zip(cache.pair(index), read(index), strict=True):
            assert stored.dtype == expected.dtype
            assert np.array_equal(stored, expected)
            with pytest.raises(ValueError, match="read-only"):
                stored[:] = 0


def test_the_cache_takes_half_of_what_is_free_and_leaves_the_other_pairs_to_the_files(path):
    for limit, num_pairs in ((10, 0), (2 * BLOCK, 1), (2 * 4 * BLOCK, 2), (2 * 4 * BLOCK - 2, 1)):
        cache, num_ticks = build(path, limit=limit)
        assert len(cache) == num_ticks == num_pairs
        if path is not None:
            path.unlink(missing_ok=True)


def test_another_process_of_the_run_finds_the_file_and_keeps_what_it_has_mapped_of_it(tmp_path):
    path = tmp_path / "a.pixels"
    cache, _ = build(path, limit=2 * 4 * BLOCK)
    found, num_ticks = build(path, refuse_to_read)
    assert (len(found), num_ticks) == (2, 0)
    delete_files(tmp_path, "a")
    assert not path.exists()
    for each in (cache, found):
        assert np.array_equal(each.pair(1)[0], pixels(1)[0])


def test_what_cannot_be_written_is_an_error_and_leaves_nothing_also_of_killed_runs(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    def interrupt(index):
        raise KeyboardInterrupt

    (tmp_path / "killed.pixels").touch()
    os.utime(tmp_path / "killed.pixels", (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            build(tmp_path / "a.pixels")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "a.pixels", interrupt)
    assert list(tmp_path.iterdir()) == []
