"""Decoded pairs kept for the run: in memory that all workers share, or in a file that later runs find again.

A cache is filled before the first step and only read afterwards, so workers need no locks. The name of its file is a
digest of the time and size of every image and mask: when one of them changes, the cache is built anew. All who may read
the folder share it. Drafts of killed runs and files that no run has used for a while are deleted, never one that a run
has open. In the file each pair ends with a checksum, which is checked when a run reads the pair first.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.system.concurrency import read_ahead
from unet_trainer.system.input_files import open_handle
from unet_trainer.system.locks import is_in_use, lock_file
from unet_trainer.system.resources import free_disk, free_host_memory

MAX_SHARE = 0.5  # of the free memory or disk: the rest is left to the run
BLOCK = 4096  # bytes: a pair begins with a block
FORMAT = 5
CHECKSUM_BYTES = 4  # the last ones of a pair's blocks
SUFFIX, DRAFT_SUFFIX = ".pixels", ".draft"
DRAFT_SECONDS = 24 * 3600  # where files cannot be locked, an older draft was left by a killed run
UNUSED_SECONDS = 14 * 24 * 3600  # a cache that was not used for longer is deleted

Place = Literal["ram", "disk"]


class NotWritable(UserError):
    """There can be no cache on the disk."""


class ContentDamage(Exception):
    """The file does not hold what was written; the message says how."""


class CacheEntry(NamedTuple):
    """Where a pair lies in the cache: the image, and its mask right after it."""

    start: int
    shape: tuple[int, int, int]
    itemsize: int
    mask_size: Size

    @property
    def end(self) -> int:
        num_bytes = math.prod(self.shape) * self.itemsize + math.prod(self.mask_size) + CHECKSUM_BYTES
        return self.start + -(-num_bytes // BLOCK) * BLOCK

    def views(self, content: Pixels) -> tuple[Pixels, Pixels]:
        """Image and mask of a pair that begins with these bytes."""
        middle = math.prod(self.shape) * self.itemsize
        image = content[:middle].view(np.uint8 if self.itemsize == 1 else np.float32).reshape(self.shape)
        return image, content[middle : middle + math.prod(self.mask_size)].reshape(self.mask_size)


def _end(entries: Sequence[CacheEntry]) -> int:
    return entries[-1].end if entries else 0


class MemoryCache:
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids. In memory that forked workers share."""

    def __init__(self, entries: Sequence[CacheEntry]) -> None:
        self.entries = entries
        # Anonymous: /dev/shm is small in containers.
        self.content: Pixels = np.frombuffer(mmap.mmap(-1, max(1, _end(entries))), np.uint8)

    @property
    def num_bytes(self) -> int:
        return _end(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def write(self, index: int, pixels: tuple[Pixels, Pixels]) -> None:
        entry = self.entries[index]
        for view, part in zip(entry.views(self.content[entry.start : entry.end]), pixels, strict=True):
            view[:] = part

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        """They cannot be written to. Raises ContentDamage."""
        entry = self.entries[index]
        image, mask = entry.views(self.content[entry.start : entry.end])
        image.flags.writeable = mask.flags.writeable = False
        return image, mask

    def discard(self) -> None:
        """Makes the next start build it anew."""


class DiskCache(MemoryCache):
    """As MemoryCache, in a file that is mapped into memory; may be read from several threads and forked processes."""

    def __init__(self, path: Path, every_entry: Sequence[CacheEntry]) -> None:
        """The file has these entries or the first of them, by its size. Raises OSError, and ContentDamage."""
        self.path = path
        self.handle = open_handle(path, follow=False)
        weakref.finalize(self, os.close, self.handle)
        self.size = os.fstat(self.handle).st_size
        self.entries = [entry for entry in every_entry if entry.end <= self.size]
        if not self.entries or _end(self.entries) != self.size:
            raise ContentDamage("it does not end with a pair")
        self.content = np.frombuffer(mmap.mmap(self.handle, self.size, access=mmap.ACCESS_READ), np.uint8)
        self.is_checked = np.frombuffer(mmap.mmap(-1, len(self.entries)), np.uint8)  # shared with forked processes

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        if os.fstat(self.handle).st_size != self.size:  # reading beyond its end would be a SIGBUS
            raise ContentDamage("it has become shorter")
        entry = self.entries[index]
        if not self.is_checked[index]:
            content = self.content[entry.start : entry.end]
            if _checksum(content) != content[-CHECKSUM_BYTES:].tobytes():
                raise ContentDamage("its content has changed")
            self.is_checked[index] = 1
        return super().pair(index)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


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
) -> MemoryCache:
    """A cache of as many pairs as fit. `stamp`: when it is the same, a file on disk still holds what `read` would
    return.

    `mask_sizes`: of each pair, where they differ from the images'. Raises ReadTimeout if a pair is not read in
    `timeout` seconds."""

    def for_each(store: Callable[[int, tuple[Pixels, Pixels]], None], num_entries: int) -> None:
        ahead = read_ahead(lambda index: store(index, read(index)), range(num_entries), num_threads, timeout=timeout)
        with contextlib.closing(ahead):
            for _ in ahead:
                tick()

    every_entry: list[CacheEntry] = []
    for shape, mask_size in zip(shapes, mask_sizes or [shape[:2] for shape in shapes], strict=True):
        every_entry.append(CacheEntry(_end(every_entry), shape, itemsize, mask_size))

    def fitting(free: int) -> list[CacheEntry]:
        return [entry for entry in every_entry if entry.end <= MAX_SHARE * (free if limit is None else limit)]

    if place == "ram":
        cache = MemoryCache(fitting(free_host_memory()))
        for_each(cache.write, len(cache))
        return cache
    identity = [FORMAT, list(stamp), itemsize, list(shapes), *([] if mask_sizes is None else [list(mask_sizes)])]
    digest = hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:24]
    path = folder / f"{digest}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_old_files(folder, keep=path)
        found = _find_cache(path, every_entry)
        entries = fitting(free_disk(folder))
        if found is None and not entries:
            return MemoryCache([])
        if found is None or len(found) < len(entries):
            _build(path, entries, for_each)
            found = _find_cache(path, entries)
        if found is None:
            raise UserError(f"cache: disk: {path} was changed while it was written; set cache: none or ram")
        with contextlib.suppress(OSError):  # another user's file
            os.utime(path)  # it was used now
        lock_file(found.handle)
        return found
    except OSError as error:
        raise NotWritable(
            f"cache: disk cannot be written to {path} ({error.strerror}); set cache: none or checkpoint_dir"
        ) from None


def _find_cache(path: Path, every_entry: Sequence[CacheEntry]) -> DiskCache | None:
    with contextlib.suppress(OSError, ContentDamage):
        return DiskCache(path, every_entry)
    return None


def _checksum(content: Pixels) -> bytes:
    """Of the blocks of a pair, without the checksum at their end."""
    return zlib.crc32(content[:-CHECKSUM_BYTES].data).to_bytes(CHECKSUM_BYTES, "little")


def _build(path: Path, entries: Sequence[CacheEntry], for_each: Callable[[Callable[..., None], int], None]) -> None:
    """Written under a temporary name until it is complete: another run may be building the same cache."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{time.time_ns()}{DRAFT_SUFFIX}")
    lock = threading.Lock()

    def store(index: int, pixels: tuple[Pixels, Pixels]) -> None:
        entry = entries[index]
        content = np.zeros(entry.end - entry.start, np.uint8)
        for view, part in zip(entry.views(content), pixels, strict=True):
            view[:] = part
        content[-CHECKSUM_BYTES:] = np.frombuffer(_checksum(content), np.uint8)
        with lock:
            file.seek(entry.start)
            file.write(content.data)

    try:
        with draft.open("xb") as file:
            lock_file(file.fileno())  # as long as this process lives, nobody takes the draft for that of a killed run
            if hasattr(os, "posix_fallocate"):  # a full disk is told before hours are spent
                os.posix_fallocate(file.fileno(), 0, _end(entries))
            for_each(store, len(entries))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _delete_old_files(folder: Path, keep: Path) -> None:
    """Deletes drafts of killed runs, and caches that no run has used for a while."""
    for pattern, max_age in ((f".*{DRAFT_SUFFIX}", DRAFT_SECONDS), (f"*{SUFFIX}", UNUSED_SECONDS)):
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = file.lstat()
                is_old = time.time() - status.st_mtime > max_age
                is_used = is_in_use(file)
                # Without content it may be one that was begun just now and is not locked yet.
                is_killed_draft = pattern.endswith(DRAFT_SUFFIX) and is_used is False and status.st_size > 0
                if file != keep and not is_used and (is_old or is_killed_draft):
                    file.unlink()
