"""Decoded pairs kept for the run, in memory or in a mapped file: filled before the first step, then read by all workers
without locks. A file is deleted by the process that made it, or, if that was killed, by the next run there."""

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.system.concurrency import read_ahead
from unet_trainer.system.input_files import open_file
from unet_trainer.system.locks import is_in_use, lock_file
from unet_trainer.system.resources import free_disk, free_host_memory

MAX_SHARE = 0.5  # of the free memory or disk: the rest is left to the run
BLOCK = 4096  # bytes: a pair begins with a block
SUFFIX = ".pixels"


class NotWritable(UserError):
    """There can be no cache on the disk."""


class CacheEntry(NamedTuple):
    """Where a pair lies in the cache: the image, and its mask right after it."""

    start: int
    shape: tuple[int, int, int]
    itemsize: int
    mask_size: Size

    @property
    def middle(self) -> int:
        return self.start + math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        return self.start + -(-(self.middle - self.start + math.prod(self.mask_size)) // BLOCK) * BLOCK


class PixelCache:
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids."""

    def __init__(self, entries: Sequence[CacheEntry], content: mmap.mmap) -> None:
        self.entries, self.content = entries, np.frombuffer(content, np.uint8)

    @property
    def num_bytes(self) -> int:
        return _end(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def write(self, index: int, pixels: tuple[Pixels, Pixels]) -> None:
        for view, part in zip(self._views(index), pixels, strict=True):
            view[:] = part

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        """They cannot be written to."""
        image, mask = self._views(index)
        image.flags.writeable = mask.flags.writeable = False
        return image, mask

    def _views(self, index: int) -> tuple[Pixels, Pixels]:
        entry = self.entries[index]
        image = self.content[entry.start : entry.middle].view(np.uint8 if entry.itemsize == 1 else np.float32)
        mask = self.content[entry.middle : entry.middle + math.prod(entry.mask_size)]
        return image.reshape(entry.shape), mask.reshape(entry.mask_size)


def fill_cache(
    shapes: Sequence[tuple[int, int, int]],
    itemsize: int,
    read: Callable[[int], tuple[Pixels, Pixels]],
    path: Path | None,
    num_threads: int,
    tick: Callable[[], object],
    limit: int | None = None,
    mask_sizes: Sequence[Size] | None = None,
    timeout: float | None = None,
) -> PixelCache:
    """A cache of as many pairs as fit, in memory or in the file `path`, if no other process of the run has filled it.
    `mask_sizes`: where they differ from the images'. Raises NotWritable, and ReadTimeout after `timeout` s a pair."""
    entries: list[CacheEntry] = []
    for shape, mask_size in zip(shapes, mask_sizes or [shape[:2] for shape in shapes], strict=True):
        entries.append(CacheEntry(_end(entries), shape, itemsize, mask_size))

    def fill(cache: PixelCache) -> PixelCache:
        items = range(len(cache))
        ahead = read_ahead(lambda index: cache.write(index, read(index)), items, num_threads, timeout=timeout)
        with contextlib.closing(ahead):
            for _ in ahead:
                tick()
        return cache

    try:
        if path is not None and path.exists():
            with open_file(path, follow=False) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return PixelCache([entry for entry in entries if entry.end <= len(content)], content)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"*{SUFFIX}"):  # of killed runs
                with contextlib.suppress(OSError):
                    if is_in_use(left) is False:
                        left.unlink()
        free = limit or (free_host_memory() if path is None else free_disk(path.parent))
        entries = [entry for entry in entries if entry.end <= MAX_SHARE * free]
        num_bytes = _end(entries)
        if path is None or not entries:
            return fill(PixelCache(entries, mmap.mmap(-1, max(1, num_bytes))))
        with path.open("x+b") as file:
            lock_file(file.fileno())  # until no process maps it any more
            try:
                if hasattr(os, "posix_fallocate"):  # a full disk is reported before hours are spent, and is no SIGBUS
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                else:
                    file.truncate(num_bytes)
                cache = fill(PixelCache(entries, mmap.mmap(file.fileno(), num_bytes)))
            except BaseException:
                _delete(path, os.getpid())
                raise
        weakref.finalize(cache, _delete, path, os.getpid())
        return cache
    except OSError as error:
        what = f"cache: disk cannot be written to {path} ({error.strerror})"
        raise NotWritable(f"{what}; set cache: none or checkpoint_dir") from None


def _end(entries: Sequence[CacheEntry]) -> int:
    return entries[-1].end if entries else 0


def _delete(path: Path, process: int) -> None:
    if os.getpid() == process:  # not a worker that was forked from it
        with contextlib.suppress(OSError):
            path.unlink()
