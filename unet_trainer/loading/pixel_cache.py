"""Decoded pairs kept for the run: in memory that all workers share, or in a file that later runs find again.

A cache is filled before the first step and only read afterwards, so workers need no locks. The name of its file is a digest of
the time and size of every image and mask: when one of them changes, the cache is built anew. What the file holds is checked when
it is read. All who may read the folder share it. Drafts of killed runs and files that no run has used for a while are deleted,
and on a full disk those used longest ago make room; never one that a run has open.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.loading.checked_file import CheckedFile, CheckedWriter, ContentDamage, file_bytes
from unet_trainer.loading.reading_threads import map_in_threads
from unet_trainer.system.resources import free_disk, free_host_memory
from unet_trainer.system.shared_locks import is_in_use, lock_shared

MAX_SHARE = 0.5  # of the free memory or disk: the rest is left to the run
ALIGNMENT = 64
SUFFIX, DRAFT_SUFFIX = ".pixels", ".draft"
FORMAT = 2
DRAFT_SECONDS = 24 * 3600  # where files cannot be locked, an older draft was left by a killed run
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


class PixelCache(Protocol):
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids."""

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def pair(self, index: int) -> tuple[Any, Any]:
        """Arrays, or StoredPixels that are read when they are looked at. They cannot be written to."""

    def discard(self) -> None:
        """Makes the next start build it anew."""


@dataclass(frozen=True)
class MemoryCache:
    entries: Sequence[CacheEntry]
    content: torch.Tensor  # bytes, in memory that processes share

    @property
    def num_bytes(self) -> int:
        return _end(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        image, mask = _views(self.entries[index], self.content.numpy())
        image.flags.writeable = mask.flags.writeable = False
        return image, mask

    def discard(self) -> None:
        pass


@dataclass(frozen=True)
class DiskCache:
    entries: Sequence[CacheEntry]
    file: CheckedFile

    @property
    def num_bytes(self) -> int:
        return _end(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def pair(self, index: int) -> tuple[StoredPixels, StoredPixels]:
        entry = self.entries[index]
        dtype = np.dtype(np.uint8 if entry.itemsize == 1 else np.float32)
        image = StoredPixels(self.file, index, 0, entry.shape, dtype)
        return image, StoredPixels(self.file, index, entry.image_bytes, entry.mask_size, np.dtype(np.uint8))

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.file.path.unlink()


@dataclass(frozen=True)
class StoredPixels:
    """An image or a mask in a file. Taking rows and columns of it reads those rows; np.asarray reads all. Raises ContentDamage."""

    file: CheckedFile
    index: int
    start: int  # in the entry
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, place: tuple[slice, slice]) -> Pixels:
        rows, columns = place
        top, bottom, _ = rows.indices(self.shape[0])
        return self._read(top, max(top, bottom))[:, columns]  # whole rows: faster than a call for each part of a row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Pixels:
        whole = self._read(0, self.shape[0])
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _read(self, top: int, bottom: int) -> Pixels:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        content = self.file.read(self.index, self.start + top * row_bytes, self.start + bottom * row_bytes)
        return content.view(self.dtype).reshape(bottom - top, *self.shape[1:])


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
    timeout: float | None = None,
) -> PixelCache:
    """A cache of as many pairs as fit. `stamp`: when it is the same, a file on disk still holds what `read` would return.

    `mask_sizes`: of each pair, where they differ from the images'. Raises ReadTimeout if no pair is read in `timeout` seconds.
    """
    if place == "ram":
        free = free_host_memory() if limit is None else limit
        entries = lay_out(shapes, itemsize, int(free * MAX_SHARE), mask_sizes)
        content = _shared_memory(_end(entries))
        raw = content.numpy()

        def store(index: int) -> None:
            for view, pixels in zip(_views(entries[index], raw), read(index), strict=True):
                view[:] = pixels

        for _ in map_in_threads(store, len(entries), num_threads, timeout):
            tick()
        return MemoryCache(entries, content)
    identity = [FORMAT, list(stamp), itemsize, list(shapes), *([] if mask_sizes is None else [list(mask_sizes)])]
    digest = hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:24]
    path = folder / f"{digest}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_old_files(folder, keep=path)
        whole = lay_out(shapes, itemsize, sys.maxsize, mask_sizes)
        found = _find_cache(path, whole)
        max_bytes = int((free_disk(folder) if limit is None else limit) * MAX_SHARE)
        if found is None and limit is None and _end(whole) > max_bytes:
            _make_room(folder, _end(whole))
            max_bytes = int(free_disk(folder) * MAX_SHARE)
        entries = lay_out(shapes, itemsize, max_bytes, mask_sizes)
        if found is None or len(found.entries) < len(entries):
            _build(path, entries, read, num_threads, tick, timeout)
            found = _open_cache(path, entries)
        if found is None:
            raise UserError(f"cache: disk: {path} was changed while it was written; set cache: none or ram")
        with contextlib.suppress(OSError):  # another user's file
            os.utime(path)  # it was used now
        lock_shared(found.file.handle)
        return found
    except OSError as error:
        raise UserError(f"cache: disk cannot be written to {path} ({error.strerror}); set cache: none or checkpoint_dir") from None


def _shared_memory(num_bytes: int) -> torch.Tensor:
    """Anonymous memory that forked workers share. Not in /dev/shm, which is small in containers."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))


def _end(entries: Sequence[CacheEntry]) -> int:
    return entries[-1].start + entries[-1].num_bytes if entries else 0


def _records(entries: Sequence[CacheEntry]) -> list[tuple[int, int]]:
    return [(entry.start, entry.num_bytes) for entry in entries]


def _find_cache(path: Path, whole: Sequence[CacheEntry]) -> DiskCache | None:
    """The cache in the file, of all entries or of the first ones; None if there is no whole file."""
    try:
        num_bytes = path.stat().st_size
    except OSError:
        return None
    records = _records(whole)
    low, high = 0, len(whole)
    while low < high:  # the file of more entries is longer
        middle = (low + high + 1) // 2
        low, high = (middle, high) if file_bytes(records[:middle]) <= num_bytes else (low, middle - 1)
    return _open_cache(path, whole[:low])


def _open_cache(path: Path, entries: Sequence[CacheEntry]) -> DiskCache | None:
    try:
        if path.stat().st_size != file_bytes(_records(entries)):
            return None
        return DiskCache(entries, CheckedFile(path, _records(entries)))
    except (OSError, ContentDamage):
        return None


def _build(
    path: Path,
    entries: Sequence[CacheEntry],
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
    timeout: float | None,
) -> None:
    """Written under a temporary name until it is complete: another run may be building the same cache."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=DRAFT_SUFFIX)
    draft = Path(name)
    try:
        with os.fdopen(handle, "r+b", buffering=0) as file:
            lock_shared(handle)  # as long as this process lives, nobody takes the draft for that of a killed run
            if hasattr(os, "posix_fallocate"):  # a full disk is told before hours are spent
                os.posix_fallocate(handle, 0, file_bytes(_records(entries)))
            _fill(file, entries, read, num_threads, tick, timeout)
            if hasattr(os, "fchmod"):
                os.fchmod(handle, 0o666 & ~_umask())
            os.fsync(handle)
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _fill(
    file: IO[bytes],
    entries: Sequence[CacheEntry],
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
    timeout: float | None,
) -> None:
    writer = CheckedWriter(file, _records(entries))  # type: ignore[arg-type]

    def store(index: int) -> None:
        content = np.empty(entries[index].num_bytes, np.uint8)
        for view, pixels in zip(_views(entries[index]._replace(start=0), content), read(index), strict=True):
            view[:] = pixels
        writer.write(index, content.tobytes())

    for _ in map_in_threads(store, len(entries), num_threads, timeout):  # decoding releases the GIL
        tick()
    writer.finish()


def _umask() -> int:
    """It can only be read by setting it."""
    before = os.umask(0o022)
    os.umask(before)
    return before


def _delete_old_files(folder: Path, keep: Path) -> None:
    """Deletes drafts of killed runs, and caches that no run has used for a while."""
    for pattern, max_age in ((f".*{DRAFT_SUFFIX}", DRAFT_SECONDS), (f"*{SUFFIX}", UNUSED_SECONDS)):
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = file.stat()
                is_old = time.time() - status.st_mtime > max_age
                is_used = is_in_use(file)
                # Without content it may be one that was begun just now and is not locked yet.
                is_killed_draft = pattern.endswith(DRAFT_SUFFIX) and is_used is False and status.st_size > 0
                if file != keep and not is_used and (is_old or is_killed_draft):
                    file.unlink()


def _make_room(folder: Path, num_bytes: int) -> None:
    """Deletes caches, those used longest ago first, until a file of so many bytes fits."""
    for file in sorted(folder.glob(f"*{SUFFIX}"), key=_used_at):
        if free_disk(folder) * MAX_SHARE >= num_bytes:
            return
        with contextlib.suppress(OSError):
            if not is_in_use(file):
                file.unlink()


def _used_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another run has just deleted it
        return 0.0


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


def _views(entry: CacheEntry, raw: Pixels) -> tuple[Pixels, Pixels]:
    middle = entry.start + entry.image_bytes
    image = raw[entry.start : middle].view(np.uint8 if entry.itemsize == 1 else np.float32).reshape(entry.shape)
    return image, raw[middle : entry.start + entry.num_bytes].reshape(entry.mask_size)
