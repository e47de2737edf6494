"""Parts of remote shards kept on the local disk, in at most so many bytes, for all processes of a machine and for later runs.

Each shard has a file here in which its parts lie where they lie in the shard; the rest of it is a hole that takes no room. Whoever
reads a part checks its checksums, so nothing says which parts are there: what was never written, was cut off by a kill or belongs
to an older shard has wrong ones and is fetched. Which parts are kept is fixed: those of the first shards, as far as they fit. Every
epoch reads each sample once, in an order of its own: a cache that replaced the oldest by the newest would have thrown most of them
away before they are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from unet_trainer.shards.shard_index import Shard
from unet_trainer.system.os_errors import NO_ROOM
from unet_trainer.system.shared_locks import is_in_use, lock_shared

PAGE = 4096
LOCK_NAME = "source.txt"


class RangeCache:
    """The parts of the shards of one place. May be used from several threads, and in processes forked from this one."""

    def __init__(self, folder: Path, url: str, shards: Sequence[Shard], max_bytes: int) -> None:
        """`url` names the place. Makes room by deleting what is kept of other places, and of this one what is no longer to be
        kept. Raises OSError where nothing can be written."""
        self.folder = folder / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.max_bytes = max_bytes
        sizes = [-(-shard.num_bytes // PAGE) * PAGE for shard in shards]
        self.starts = dict(zip((shard.name for shard in shards), itertools.accumulate(sizes, initial=0), strict=False))
        self.sizes = {shard.name: shard.num_bytes for shard in shards}
        self.num_bytes = min(max_bytes, sum(sizes))
        self.folder.mkdir(parents=True, exist_ok=True)
        source = self.folder / LOCK_NAME
        source.write_text(f"{url}\n", encoding="utf-8", errors="surrogateescape")
        lock = os.open(source, os.O_RDONLY)
        weakref.finalize(self, os.close, lock)
        lock_shared(lock)
        self._is_full = False
        self._trim()
        _make_room(folder, self.folder, max_bytes - self.num_bytes)

    def allocated(self) -> int:
        """Bytes that it takes on the disk."""
        return sum(_allocated(file) for file in self.folder.iterdir())

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = min(self.max_bytes, max_bytes)
        self._trim()

    def _trim(self) -> None:
        """Takes away what lies beyond the limit, and shards that are not among these."""
        kept = {self._file(shard).name: min(self.sizes[shard], self.max_bytes - start) for shard, start in self.starts.items()}
        for file in self.folder.iterdir():
            if file.name == LOCK_NAME:
                continue
            with contextlib.suppress(OSError):
                if kept.get(file.name, 0) <= 0:
                    file.unlink()
                elif file.stat().st_size > kept[file.name]:
                    os.truncate(file, kept[file.name])

    def keeps(self, shard: str, stop: int) -> bool:
        """Whether the part of a shard up to `stop` is kept."""
        return self.starts[shard] + stop <= self.max_bytes

    def read(self, shard: str, start: int, stop: int) -> bytes | None:
        """What lies at that place, whatever it is; None if there is nothing."""
        if not self.keeps(shard, stop):
            return None
        try:
            with self._open(shard, os.O_RDONLY) as handle:
                content = os.pread(handle, stop - start, start)
        except OSError:
            return None
        return content if len(content) == stop - start else None

    def write(self, shard: str, start: int, content: bytes) -> None:
        """Where the disk is full, nothing more is kept."""
        if self._is_full or not self.keeps(shard, start + len(content)):
            return
        try:
            left, offset = memoryview(content), start
            with self._open(shard, os.O_RDWR | os.O_CREAT) as handle:
                while left:
                    written = os.pwrite(handle, left, offset)
                    left, offset = left[written:], offset + written
        except OSError as error:
            self._is_full = error.errno in NO_ROOM  # else it may go better the next time

    @contextlib.contextmanager
    def _open(self, shard: str, flags: int) -> Iterator[int]:
        """Not kept open: there may be more shards than a process may have open files."""
        handle = os.open(self._file(shard), flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            yield handle
        finally:
            os.close(handle)

    def _file(self, shard: str) -> Path:
        digest = hashlib.sha256(shard.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return self.folder / f"{digest}-{shard.rpartition('/')[2][-180:]}"


def _make_room(folder: Path, keep: Path, max_others: int) -> None:
    """Deletes what is kept of other URLs, what was used longest ago first, until the rest takes at most so many bytes."""
    others = [place for place in folder.iterdir() if place.is_dir() and place != keep and (place / LOCK_NAME).is_file()]
    sizes = {place: sum(_allocated(file) for file in place.iterdir()) for place in others}
    for place in sorted(others, key=_used_at):
        if sum(sizes.values()) <= max_others:
            return
        with contextlib.suppress(OSError):
            if not is_in_use(place / LOCK_NAME):
                shutil.rmtree(place)
                del sizes[place]


def _allocated(file: Path) -> int:
    """Holes take no room."""
    with contextlib.suppress(OSError):
        status = file.stat()
        return min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512)
    return 0


def _used_at(place: Path) -> float:
    with contextlib.suppress(OSError):
        return (place / LOCK_NAME).stat().st_mtime
    return 0.0
