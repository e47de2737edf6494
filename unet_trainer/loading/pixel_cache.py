"""Decoded pairs kept for the run: in memory that all workers share, or in a file that later runs find again.

A cache is filled before the first step and only read afterwards, so workers need no locks. The name of its file is a digest of
the time and size of every image and mask: when one of them changes, the cache is built anew. Files that no run has used for a
while are deleted, and on a full disk those used longest ago make room; never one that a run has open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.system.resources import free_disk, free_host_memory

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_SHARE = 0.5  # of the free memory or disk: the rest is left to the run
ALIGNMENT = 64
SUFFIX, DRAFT_SUFFIX = ".pixels", ".draft"
DRAFT_SECONDS = 24 * 3600  # an older draft was left by a killed run
UNUSED_SECONDS = 14 * 24 * 3600  # a cache that was not used for longer is deleted

Place = Literal["ram", "disk"]


class CacheEntry(NamedTuple):
    """Where a pair lies in the cache: the image, and its mask right after it."""

    start: int
    shape: tuple[int, int, int]
    itemsize: int
    mask_size: Size

    @property
    def image_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def num_bytes(self) -> int:
        return self.image_bytes + math.prod(self.mask_size)


@dataclass(frozen=True)
class PixelCache:
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids."""

    entries: Sequence[CacheEntry]
    content: torch.Tensor  # bytes, in memory that processes share

    def __len__(self) -> int:
        return len(self.entries)

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        """Views that cannot be written to."""
        image, mask = _views(self.entries[index], self.content.numpy())
        image.flags.writeable = mask.flags.writeable = False
        return image, mask


def fill_cache(
    shapes: Sequence[tuple[int, int, int]],
    itemsize: int,
    read: Callable[[int], tuple[Pixels, Pixels]],
    place: Place,
    folder: Path,
    stamp: Sequence[object],
    num_threads: int,
    tick: Callable[[], object],
    limit: int | None = None,
    mask_sizes: Sequence[Size] | None = None,
) -> PixelCache:
    """A cache of as many pairs as fit. `stamp`: when it is the same, a file on disk still holds what `read` would return.

    `mask_sizes`: of each pair, where they differ from the images'.
    """
    if place == "ram":
        free = free_host_memory() if limit is None else limit
        entries = lay_out(shapes, itemsize, int(free * MAX_SHARE), mask_sizes)
        content = _shared_memory(_end(entries))
        _fill(entries, content, read, num_threads, tick)
        return PixelCache(entries, content)
    identity = [list(stamp), itemsize, list(shapes), *([] if mask_sizes is None else [list(mask_sizes)])]
    digest = hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:24]
    path = folder / f"{digest}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_old_files(folder, keep=path)
        whole = lay_out(shapes, itemsize, sys.maxsize, mask_sizes)
        found = _entries_in(path, whole)
        max_bytes = int((free_disk(folder) if limit is None else limit) * MAX_SHARE)
        if found is None and limit is None and _end(whole) > max_bytes:
            _make_room(folder, _end(whole))
            max_bytes = int(free_disk(folder) * MAX_SHARE)
        entries = lay_out(shapes, itemsize, max_bytes, mask_sizes)
        if found is not None and len(found) >= len(entries):
            os.utime(path)  # it was used now
            return _mark_in_use(PixelCache(found, _map(path, _end(found))), path)
        return _mark_in_use(PixelCache(entries, _build(path, entries, read, num_threads, tick)), path)
    except OSError as error:
        raise UserError(f"cache: disk cannot be written to {path} ({error.strerror}); set cache: none or checkpoint_dir") from None


def _shared_memory(num_bytes: int) -> torch.Tensor:
    """Anonymous memory that forked workers share. Not in /dev/shm, which is small in containers."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))


def _end(entries: Sequence[CacheEntry]) -> int:
    return entries[-1].start + entries[-1].num_bytes if entries else 0


def _entries_in(path: Path, entries: Sequence[CacheEntry]) -> list[CacheEntry] | None:
    """The entries that the file holds, or None if there is no such file. A file of this name is complete."""
    if not path.exists():
        return None
    num_bytes = path.stat().st_size
    ends = [0, *(entry.start + entry.num_bytes for entry in entries)]
    return list(entries[: ends.index(num_bytes)]) if num_bytes in ends else None


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _build(
    path: Path,
    entries: Sequence[CacheEntry],
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
) -> torch.Tensor:
    """Written under a temporary name until it is complete: another run may be building the same cache."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=DRAFT_SUFFIX)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if entries and hasattr(os, "posix_fallocate"):  # else a disk that fills up later is a SIGBUS
                os.posix_fallocate(file.fileno(), 0, _end(entries))
            file.truncate(_end(entries))
        content = _map(draft, _end(entries))
        _fill(entries, content, read, num_threads, tick)
        _flush(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return content


def _delete_old_files(folder: Path, keep: Path) -> None:
    """Deletes drafts of killed runs, and caches that no run has used for a while."""
    for pattern, max_age in ((f".*{DRAFT_SUFFIX}", DRAFT_SECONDS), (f"*{SUFFIX}", UNUSED_SECONDS)):
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if file != keep and time.time() - file.stat().st_mtime > max_age and not _is_in_use(file):
                    file.unlink()


def _make_room(folder: Path, num_bytes: int) -> None:
    """Deletes caches, those used longest ago first, until a file of so many bytes fits."""
    for file in sorted(folder.glob(f"*{SUFFIX}"), key=_used_at):
        if free_disk(folder) * MAX_SHARE >= num_bytes:
            return
        with contextlib.suppress(OSError):
            if not _is_in_use(file):
                file.unlink()


def _used_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another run has just deleted it
        return 0.0


def _mark_in_use(cache: PixelCache, path: Path) -> PixelCache:
    """Holds a shared lock on the file as long as the cache exists. Deleting a mapped file would free no space."""
    if fcntl is not None:
        handle = os.open(path, os.O_RDONLY)
        weakref.finalize(cache, os.close, handle)
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return cache


def _is_in_use(path: Path) -> bool:
    """Whether a cache of any process has the file open."""
    if fcntl is None:
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(handle)
    return False


def lay_out(
    shapes: Sequence[tuple[int, int, int]], itemsize: int, max_bytes: int, mask_sizes: Sequence[Size] | None = None
) -> list[CacheEntry]:
    """Entries for the first pairs, one after the other, up to `max_bytes`."""
    entries: list[CacheEntry] = []
    start = 0
    for shape, mask_size in zip(shapes, mask_sizes or [shape[:2] for shape in shapes], strict=True):
        entry = CacheEntry(start, shape, itemsize, mask_size)
        if start + entry.num_bytes > max_bytes:
            break
        entries.append(entry)
        start += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
    return entries


def _fill(
    entries: Sequence[CacheEntry],
    content: torch.Tensor,
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
) -> None:
    raw = content.numpy()

    def fill(index: int) -> None:
        image, mask = read(index)
        image_view, mask_view = _views(entries[index], raw)
        image_view[:] = image
        mask_view[:] = mask

    with ThreadPoolExecutor(num_threads) as pool:  # decoding releases the GIL
        for _ in pool.map(fill, range(len(entries))):
            tick()


def _views(entry: CacheEntry, raw: Pixels) -> tuple[Pixels, Pixels]:
    middle = entry.start + entry.image_bytes
    image = raw[entry.start : middle].view(np.uint8 if entry.itemsize == 1 else np.float32).reshape(entry.shape)
    return image, raw[middle : entry.start + entry.num_bytes].reshape(entry.mask_size)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
