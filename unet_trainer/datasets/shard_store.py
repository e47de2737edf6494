"""Open shards: gives the bytes of any file in them, checked. What is fetched of remote shards is kept on the local disk.

A file in a shard has a path below that of the shard: data/nuclei-000000.tar/cell_17.png. Whatever reads files asks
`file_bytes.find_member` for it; the stores that are open in this process answer. Of remote shards an image and its mask are fetched
together, ahead of their use where the reader says what it will read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unet_trainer.datasets.shard_files import Files
from unet_trainer.datasets.shard_index import BLOCK, Member, Shard, ShardIndex
from unet_trainer.images.file_bytes import ShardError, open_stores
from unet_trainer.system.atomic_files import make_own_folder
from unet_trainer.system.input_files import NO_FOLLOW, open_handle
from unet_trainer.system.os_errors import NO_ROOM
from unet_trainer.system.resources import free_disk

NUM_CONNECTIONS = 16  # of a process
AHEAD_BYTES = 2**26  # of a process: fetched ahead; as much again may be in use
MAX_FETCHES = 3  # of content with wrong checksums
CHANGED = "the shards have changed since they were indexed"
MAX_SHARE = 0.5  # of the free disk, for what is kept of remote shards
SOURCE = "source.txt"  # the URL; its time is that of the last use
WRITING = os.O_RDWR | os.O_CREAT | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0)


class Span(NamedTuple):
    """Part of a shard that is fetched at once: an image and its mask, or one of them."""

    shard: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    """A file in a shard."""

    store: ShardStore
    shard: str
    member: Member
    span: Span
    facts: Mapping[str, Any] | None  # of an image or of a mask, as the scan caches them

    def read(self) -> bytes:
        """Raises ShardError."""
        return self.store.read(self)

    @property
    def place(self) -> str:
        """As messages name it: below the folder or URL of its shard."""
        return f"{self.store.files.place(self.shard)}/{self.member.name}"

    @property
    def stamp(self) -> list[int]:
        """Differs where the content does."""
        return [self.member.length, self.member.checksum, self.member.offset]


@dataclass
class _Process:
    """What must not be shared with a forked process."""

    number: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(NUM_CONNECTIONS, "shards"))
    spans: OrderedDict[Span, Future[bytes]] = field(default_factory=OrderedDict)  # the one that was asked for last at the end
    whole: dict[str, threading.Lock] = field(default_factory=dict)  # by shard: see _fetch_whole


class ShardStore:
    """Reads files from shards; from several threads, and in processes forked from this one."""

    def __init__(self, files: Files, index: ShardIndex, cache: RangeCache | None = None) -> None:
        self.files, self.index, self.cache = files, index, cache
        self.is_remote = files.is_remote
        folder = Path(files.root).as_posix()
        self.path_prefix = "" if folder == "." else f"{folder.rstrip('/')}/"  # of the paths of its files
        self.gives_whole_files = False  # a server that knows no ranges
        self._process = _Process()
        self._files: dict[tuple[str, str], StoredFile] = {}
        self._in_span: dict[Span, tuple[Member, ...]] = {}
        for shard in index.shards:
            for sample in shard.samples:
                image, mask = sample.image, sample.mask
                both = Span(shard.name, min(image.offset, mask.offset), max(image.end, mask.end))
                is_close = both.stop - both.start <= 2 * (image.length + mask.length + BLOCK)
                for member, facts in ((image, sample.image_facts), (mask, sample.mask_facts)):
                    span = both if is_close else Span(shard.name, member.offset, member.end)
                    self._in_span[span] = (image, mask) if is_close else (member,)
                    self._files[shard.name, member.name] = StoredFile(self, shard.name, member, span, facts)

    def find(self, shard: str, member: str) -> StoredFile | None:
        return self._files.get((shard, member))

    def find_path(self, path: str) -> StoredFile | None:
        """By a path below that of a shard, as find_member has it."""
        if not path.startswith(self.path_prefix):
            return None
        rest, end = path[len(self.path_prefix) :], 0
        while (end := rest.find(".tar/", end)) >= 0:
            end += len(".tar")
            if (found := self.find(rest[:end], rest[end + 1 :])) is not None:
                return found
        return None

    def check(self) -> None:
        """Raises ShardError if a shard is missing or has another size than in the index."""
        with ThreadPoolExecutor(NUM_CONNECTIONS, "shards") as threads:  # no thread is left: this process may fork
            found = list(threads.map(self.files.size_and_version, [shard.name for shard in self.index.shards]))
        for shard, (size, _) in zip(self.index.shards, found, strict=True):
            if size not in (None, shard.num_bytes):
                raise ShardError(
                    f"{self.files.place(shard.name)} has {size} bytes, and {shard.num_bytes} by the index: {CHANGED}; "
                    "write them again with shard; the index of those of other tools is checkpoint_dir/.shards/index-*.json"
                )

    def read(self, file: StoredFile) -> bytes:
        """The content of a file. Raises ShardError."""
        member, span = file.member, file.span
        if not self.is_remote:
            content = self.files.read(file.shard, member.offset, member.end)
            if len(content) != member.length or zlib.crc32(content) != member.checksum:
                raise ShardError(f"its content differs from the index (checksum): {CHANGED}, or the disk has damaged them")
            return content
        state = self._state()
        coming = self._request(span)
        try:
            content = coming.result()
        except BaseException:
            with state.lock:
                state.spans.pop(span, None)  # the next reader tries again
            raise
        if member == self._in_span[span][-1]:  # a mask is read after its image
            with state.lock:
                state.spans.pop(span, None)
        return content[member.offset - span.start : member.end - span.start]

    def read_ahead(self, files: Iterable[StoredFile]) -> None:
        """Begins to fetch what will be read soon, as far as memory allows."""
        num_bytes = 0
        for span in dict.fromkeys(file.span for file in files) if self.is_remote else ():
            num_bytes += span.stop - span.start
            if num_bytes > AHEAD_BYTES:
                return
            self._request(span, ahead=True)

    def _state(self) -> _Process:
        if self._process.number != os.getpid():
            self._process = _Process()
        return self._process

    def _request(self, span: Span, ahead: bool = False) -> Future[bytes]:
        """A span that has come, is coming or is fetched now. Forgets what was asked for longest ago beyond the limit."""
        state = self._state()
        with state.lock:
            if (known := state.spans.get(span)) is not None:
                return known
            coming = state.spans[span] = Future()
            sizes = [one.stop - one.start for one in state.spans]
            while sum(sizes) > 2 * AHEAD_BYTES and len(sizes) > 1:
                state.spans.popitem(last=False)
                del sizes[0]
        if ahead:
            state.threads.submit(self._fill, span, coming)
        else:
            self._fill(span, coming)
        return coming

    def _fill(self, span: Span, coming: Future[bytes]) -> None:
        try:
            coming.set_result(self._fetch(span))
        except BaseException as error:
            coming.set_exception(error)

    def _fetch(self, span: Span) -> bytes:
        """From the cache, or from where the shards are. Raises ShardError."""
        if (kept := self._kept(span)) is not None:
            return kept
        if self.gives_whole_files and self.cache is not None and self._fetch_whole(span) and (kept := self._kept(span)) is not None:
            return kept
        for _ in range(MAX_FETCHES):
            content = self.files.read(*span)
            if self._is_right(span, content):
                if self.cache is not None:
                    self.cache.write(span.shard, span.start, content)
                return content
        raise ShardError(f"its content differs from the index (checksum): {CHANGED}")

    def _kept(self, span: Span) -> bytes | None:
        kept = None if self.cache is None else self.cache.read(*span)
        return kept if kept is not None and self._is_right(span, kept) else None

    def _fetch_whole(self, span: Span) -> bool:
        """The shard of a span into the cache, once for all threads of this process; False if the cache has no room for it."""
        assert self.cache is not None
        if not self.cache.keeps(span.shard, self.cache.sizes[span.shard]):
            return False
        state = self._state()
        with state.lock:
            lock = state.whole.setdefault(span.shard, threading.Lock())
        with lock:
            if self._kept(span) is None:
                self.cache.write(span.shard, 0, self.files.read(span.shard))
        return True

    def _is_right(self, span: Span, content: bytes) -> bool:
        view = memoryview(content)
        parts = ((view[member.offset - span.start : member.end - span.start], member) for member in self._in_span[span])
        return all(zlib.crc32(part) == member.checksum for part, member in parts)


def open_store(store: ShardStore, key: Hashable = None) -> ShardStore:
    """From now on `find_member` finds its files. Replaces one that was opened with the same key, which is the root if none."""
    key = store.files.root if key is None else key
    open_stores.pop(key, None)
    open_stores[key] = store
    return store


class RangeCache:
    """Parts of remote shards on the local disk, in a bounded number of bytes, for all processes of a machine and for later runs.

    Each shard has a file here in which its parts lie where they lie in the shard; the rest of it is a hole that takes no room. The
    reader verifies checksums, so no table says which parts are there: what was never written, cut off by a kill or is of an older
    shard has wrong ones and is fetched. Kept are the first shards, as far as they fit: every epoch reads each sample once, so
    a cache that replaced the oldest by the newest would have discarded most of them before they are read again.
    """

    def __init__(self, folder: Path, url: str, shards: Sequence[Shard], max_bytes: int) -> None:
        """Makes room by deleting what is kept of other URLs, and keeps at most half of what is free on the disk. Raises OSError
        where nothing can be written."""
        self.folder = folder / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.sizes = {shard.name: shard.num_bytes for shard in shards}
        self.starts: dict[str, int] = {}
        total = 0
        for shard in shards:
            self.starts[shard.name], total = total, total + shard.num_bytes
        folder.mkdir(parents=True, exist_ok=True)
        make_own_folder(self.folder)
        with _opened(self.folder / SOURCE) as handle:
            os.pwrite(handle, f"{url}\n".encode("utf-8", "surrogateescape"), 0)
        self._make_room(max_bytes - min(max_bytes, total))
        room = int(MAX_SHARE * free_disk(folder)) + self.allocated()
        self.max_bytes = min(max_bytes, room)
        self.is_limited_by_disk = room < min(max_bytes, total)
        self._is_full = False
        self._trim()

    def allocated(self) -> int:
        """Bytes that it takes on the disk."""
        return _allocated(self.folder)

    def keeps(self, shard: str, stop: int) -> bool:
        """Whether the part of a shard up to `stop` is kept."""
        return self.starts[shard] + stop <= self.max_bytes

    def read(self, shard: str, start: int, stop: int) -> bytes | None:
        """What lies at that place, right or not; None if there is nothing."""
        with contextlib.suppress(OSError):
            if self.keeps(shard, stop):
                with _closing(open_handle(self._file(shard), follow=False)) as handle:
                    content = os.pread(handle, stop - start, start)
                    return content if len(content) == stop - start else None
        return None

    def write(self, shard: str, start: int, content: bytes) -> None:
        """Where the disk is full, nothing more is kept."""
        if self._is_full or not self.keeps(shard, start + len(content)):
            return
        try:
            left, offset = memoryview(content), start
            with _opened(self._file(shard)) as handle:
                while left:
                    written = os.pwrite(handle, left, offset)
                    left, offset = left[written:], offset + written
        except OSError as error:
            self._is_full = error.errno in NO_ROOM  # any other error may not come again

    def _file(self, shard: str) -> Path:
        digest = hashlib.sha256(shard.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return self.folder / f"{digest}-{shard.rpartition('/')[2][-180:]}"

    def _trim(self) -> None:
        """Removes what lies beyond the limit, and shards that are not among these. Links are never followed."""
        kept = {self._file(shard).name: min(self.sizes[shard], self.max_bytes - start) for shard, start in self.starts.items()}
        for file in self.folder.iterdir():
            with contextlib.suppress(OSError):
                status = file.lstat()
                if file.name != SOURCE and (kept.get(file.name, 0) <= 0 or not stat.S_ISREG(status.st_mode)):
                    file.unlink()
                elif status.st_size > kept.get(file.name, status.st_size):
                    with _opened(file) as handle:
                        os.ftruncate(handle, kept[file.name])

    def _make_room(self, max_others: int) -> None:
        """Deletes what is kept of other URLs, what was used longest ago first, until the rest takes at most so many bytes."""
        places = [place for place in self.folder.parent.iterdir() if place != self.folder and not place.is_symlink()]
        others = sorted(
            (place for place in places if (place / SOURCE).is_file()), key=lambda place: (place / SOURCE).stat().st_mtime
        )
        while others and sum(map(_allocated, others)) > max_others:
            shutil.rmtree(others.pop(0), ignore_errors=True)


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[int]:
    """Files are not kept open: there may be more shards than a process may have open files."""
    try:
        yield handle
    finally:
        os.close(handle)


def _opened(file: Path) -> contextlib.AbstractContextManager[int]:
    return _closing(os.open(file, WRITING, 0o644))


def _allocated(folder: Path) -> int:
    """Holes take no room."""
    statuses = [file.lstat() for file in folder.iterdir()]
    return sum(min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512) for status in statuses)
