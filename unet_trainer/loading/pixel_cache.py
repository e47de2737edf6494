"""Decoded pairs in memory, or in a file of the run on the disk: no file is decoded a second time. Filled before workers
are forked, which share it. Pairs that do not fit are read from their files."""

import contextlib
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.system.concurrency import read_ahead
from unet_trainer.system.resources import free_disk, free_host_memory

MAX_SHARE = 0.5  # of the free memory or disk: the rest is left to the run
BLOCK = 4096  # bytes: a pair begins with a block
SUFFIX = ".pixels"
ABANDONED_SECONDS = 86400.0  # a file has a name while it is filled: one as old was left by a killed run


class PixelCache:
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids."""

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], mask_sizes: Sequence[Size], itemsize: int, max_bytes: float
    ) -> None:
        self.shapes, self.mask_sizes = shapes, mask_sizes
        self.dtype = np.dtype(np.uint8 if itemsize == 1 else np.float32)
        sizes = [math.prod(shape) * itemsize + math.prod(mask) for shape, mask in zip(shapes, mask_sizes, strict=True)]
        ends = itertools.accumulate(-(-size // BLOCK) * BLOCK for size in sizes)
        self.starts = [0, *itertools.takewhile(lambda end: end <= max_bytes, ends)]
        self.num_bytes = self.starts.pop()
        self.content = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.starts)

    def fill(self, read: Callable[[int], tuple[Pixels, Pixels]], index: int) -> None:
        image, mask = self._views(index)
        image[:], mask[:] = read(index)

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        """They cannot be written to."""
        image, mask = self._views(index)
        image.flags.writeable = mask.flags.writeable = False
        return image, mask

    def _views(self, index: int) -> tuple[Pixels, Pixels]:
        shape, mask_size, start = self.shapes[index], self.mask_sizes[index], self.starts[index]
        middle = start + math.prod(shape) * self.dtype.itemsize
        mask = self.content[middle : middle + math.prod(mask_size)]
        return self.content[start:middle].view(self.dtype).reshape(shape), mask.reshape(mask_size)


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
    `mask_sizes`: where they differ from the images'. Raises OSError, and ReadTimeout after `timeout` s a pair."""
    sizes = mask_sizes or [shape[:2] for shape in shapes]
    if path is not None and path.exists():
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        cache = PixelCache(shapes, sizes, itemsize, len(content))
        cache.content = content
        return cache
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_files(path.parent, "*", ABANDONED_SECONDS)
    free = limit or (free_host_memory() if path is None else free_disk(path.parent))
    cache = PixelCache(shapes, sizes, itemsize, MAX_SHARE * free)
    try:
        cache.content = np.frombuffer(_allocate(path if len(cache) else None, max(1, cache.num_bytes)), np.uint8)
        ahead = read_ahead(partial(cache.fill, read), range(len(cache)), num_threads, timeout=timeout)
        with contextlib.closing(ahead):
            for _ in ahead:
                tick()
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    return cache


def _allocate(path: Path | None, num_bytes: int) -> mmap.mmap:
    """Shared memory; raises OSError where a disk has no room, before hours are spent and instead of SIGBUS."""
    if path is None:
        return mmap.mmap(-1, num_bytes)
    with path.open("x+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def delete_files(folder: Path, stem: str, min_age: float = 0.0) -> None:
    """Caches of these names. Who has mapped one keeps its content."""
    for path in folder.glob(f"{stem}{SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= min_age:
                path.unlink()
