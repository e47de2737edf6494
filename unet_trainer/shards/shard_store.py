"""Shards, in a folder or behind a URL, with their index: gives the bytes of any file in them, checked.

A file in a shard has a path below that of the shard: data/nuclei-000000.tar/cell_17.png. Whatever reads files asks `find_member`
for it; the stores that are open in this process answer. Of remote shards an image and its mask are fetched together, ahead of their
use where the reader says what it will read.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unet_trainer.shards.range_cache import RangeCache
from unet_trainer.shards.remote_files import RemoteFiles, is_url, url_join
from unet_trainer.shards.shard_index import Member, ShardIndex, iterate_samples
from unet_trainer.shards.tar_files import BLOCK, ShardError

NUM_CONNECTIONS = 16  # of a process
AHEAD_BYTES = 2**26  # of a process: fetched, and not used yet or not long ago
MAX_HANDLES = 64  # open shards of a process
MAX_FETCHES = 3  # of content with wrong checksums
CHANGED = "the shards have changed since they were indexed"

Stamp = list[int]


class Span(NamedTuple):
    """A stretch of a shard that is fetched at once: an image and its mask."""

    shard: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredFile:
    """A file in a shard."""

    store: ShardStore
    shard: str
    member: Member
    facts: Mapping[str, Any] | None  # of an image or of a mask, as the scan remembers them

    def read(self) -> bytes:
        """Raises ShardError."""
        return self.store.read(self.shard, self.member.name)

    @property
    def place(self) -> str:
        """As messages name it: below the folder or URL of its shard."""
        return f"{self.store.place(self.shard)}/{self.member.name}"

    @property
    def stamp(self) -> Stamp:
        """Tells other content by its length and checksum."""
        return [self.member.length, self.member.checksum, self.member.offset]


@dataclass(eq=False)
class _Process:
    """What must not be shared with a forked process: locks, threads and connections."""

    number: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    spans: OrderedDict[Span, Future[bytes]] = field(default_factory=OrderedDict)
    unread: dict[Span, set[str]] = field(default_factory=dict)  # members of a span that nobody has asked for yet
    num_bytes: int = 0  # of the spans
    whole: dict[str, threading.Lock] = field(default_factory=dict)  # by shard: see _fetch_whole
    handles: OrderedDict[str, int] = field(default_factory=OrderedDict)
    threads: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self.handles)

    def add(self, span: Span, coming: Future[bytes], members: Iterable[str]) -> None:
        """Forgets what was asked for longest ago beyond what may be kept. The caller holds the lock."""
        self.spans[span], self.unread[span] = coming, set(members)
        self.num_bytes += span.stop - span.start
        while self.num_bytes > 2 * AHEAD_BYTES and len(self.spans) > 1:
            self.forget(next(iter(self.spans)))

    def forget(self, span: Span) -> None:
        """The caller holds the lock."""
        if self.spans.pop(span, None) is not None:
            del self.unread[span]
            self.num_bytes -= span.stop - span.start


class ShardStore:
    """Reads files from shards; from several threads, and in processes forked from this one."""

    def __init__(self, root: str, index: ShardIndex, cache: RangeCache | None = None, files: RemoteFiles | None = None) -> None:
        """`root`: the folder or URL that the names in the index start from. `cache`: for remote shards."""
        self.root, self.index, self.cache = root, index, cache
        self.is_remote = is_url(root)
        folder = Path(root).as_posix()
        self.path_prefix = "" if folder == "." else f"{folder.rstrip('/')}/"  # of the paths that `find_member` knows
        self.files = files or RemoteFiles()
        self._entries: dict[str, dict[str, tuple[Member, Span, Mapping[str, Any] | None]]] = {
            shard.name: {} for shard in index.shards
        }
        self._in_span: dict[Span, tuple[Member, ...]] = {}
        self._num_bytes = {shard.name: shard.num_bytes for shard in index.shards}
        for shard, sample in iterate_samples(index):
            image, mask = sample.image, sample.mask
            span = Span(shard.name, min(image.offset, mask.offset), max(image.end, mask.end))
            is_close = span.stop - span.start <= 2 * (image.length + mask.length + BLOCK)
            for member, facts in ((image, sample.image_facts), (mask, sample.mask_facts)):
                its_span = span if is_close else Span(shard.name, member.offset, member.end)
                self._in_span[its_span] = (image, mask) if is_close else (member,)
                self._entries[shard.name][member.name] = member, its_span, facts
        self.gives_whole_files = False  # a server that knows no ranges
        self._process = _Process(os.getpid())

    def place(self, shard: str) -> str:
        """Folder and name, or URL, of a shard."""
        return url_join(self.root, shard) if self.is_remote else str(Path(self.root) / shard)

    def find(self, shard: str, member: str) -> StoredFile | None:
        entry = self._entries.get(shard, {}).get(member)
        return None if entry is None else StoredFile(self, shard, entry[0], entry[2])

    def read(self, shard: str, name: str) -> bytes:
        """The content of a file. Raises ShardError."""
        member, span, _ = self._entries[shard][name]
        if not self.is_remote:
            return self._read_local(shard, member)
        content = self._span_content(span, name)
        return content[member.offset - span.start : member.end - span.start]

    def read_ahead(self, files: Iterable[StoredFile]) -> None:
        """Begins to fetch what will be read soon, as far as memory allows."""
        if not self.is_remote:
            return
        state = self._state()
        num_bytes = 0
        for span in dict.fromkeys(self._entries[file.shard][file.member.name][1] for file in files):
            num_bytes += span.stop - span.start
            if num_bytes > AHEAD_BYTES:
                return
            with state.lock:
                if span not in state.spans:
                    state.threads = state.threads or ThreadPoolExecutor(NUM_CONNECTIONS, "shards")
                    state.add(span, state.threads.submit(self._fetch, span), (one.name for one in self._in_span[span]))

    def check(self) -> None:
        """Raises ShardError if a shard is missing or has another size than in the index."""
        with ThreadPoolExecutor(NUM_CONNECTIONS, "shards") as threads:
            for shard, found in zip(self.index.shards, threads.map(self._size, self.index.shards), strict=True):
                if found is not None and found != shard.num_bytes:
                    raise ShardError(
                        f"{self.place(shard.name)} has {found} bytes, and {shard.num_bytes} by the index: {CHANGED}; "
                        "write them again with shard; the index of those of other tools is checkpoint_dir/.shards/index-*.json"
                    )

    def _size(self, shard: Any) -> int | None:
        place = self.place(shard.name)
        if self.is_remote:
            return self.files.size(place)
        try:
            return Path(place).stat().st_size
        except OSError as error:
            raise ShardError(f"{place}: {error.strerror}; the index names it") from None

    def _state(self) -> _Process:
        if self._process.number != os.getpid():
            self._process = _Process(os.getpid())
        return self._process

    def _read_local(self, shard: str, member: Member) -> bytes:
        try:
            content = self._pread(shard, member)
        except OSError as error:
            raise ShardError(f"{self.place(shard)}: {error.strerror or error}") from None
        if len(content) != member.length or zlib.crc32(content) != member.checksum:
            raise ShardError(f"not what the index says of it (checksum): {CHANGED}, or the disk has damaged them")
        return content

    def _pread(self, shard: str, member: Member) -> bytes:
        state = self._state()
        with state.lock:
            handle = state.handles.pop(shard, None)
            if handle is None:
                handle = os.open(self.place(shard), os.O_RDONLY | getattr(os, "O_BINARY", 0))
            state.handles[shard] = handle
            if not hasattr(os, "pread"):  # Windows
                os.lseek(handle, member.offset, os.SEEK_SET)
                return os.read(handle, member.length)
            if len(state.handles) > MAX_HANDLES:
                os.close(state.handles.popitem(last=False)[1])
            handle = os.dup(handle)  # another thread may close it
        try:
            return os.pread(handle, member.length, member.offset)
        finally:
            os.close(handle)

    def _span_content(self, span: Span, name: str) -> bytes:
        """Of a span that is coming, has come, or is fetched now; forgotten when all of its members were asked for."""
        state = self._state()
        with state.lock:
            coming = state.spans.get(span)
            is_own = coming is None
            if coming is None:
                coming = Future()
                state.add(span, coming, (one.name for one in self._in_span[span]))
            state.unread[span].discard(name)
            if not state.unread[span]:
                state.forget(span)
        if is_own:
            try:
                coming.set_result(self._fetch(span))
            except BaseException as error:
                coming.set_exception(error)
        try:
            return coming.result()
        except BaseException:
            with state.lock:
                state.forget(span)  # the next reader tries again
            raise

    def _fetch(self, span: Span) -> bytes:
        """From the cache, or from where the shards are. Raises ShardError."""
        kept = None if self.cache is None else self.cache.read(*span)
        if kept is not None and self._is_right(span, kept):
            return kept
        if self.gives_whole_files and self.cache is not None and self.cache.keeps(span.shard, self._num_bytes[span.shard]):
            self._fetch_whole(span)
            kept = self.cache.read(*span)
            if kept is not None and self._is_right(span, kept):
                return kept
        for _ in range(MAX_FETCHES):
            content = self.files.read(self.place(span.shard), span.start, span.stop)
            if self._is_right(span, content):
                if self.cache is not None:
                    self.cache.write(span.shard, span.start, content)
                return content
        raise ShardError(f"not what the index says of it (checksum): {CHANGED}")

    def _fetch_whole(self, span: Span) -> None:
        """The shard of a span into the cache, once for all threads of this process."""
        state = self._state()
        with state.lock:
            lock = state.whole.setdefault(span.shard, threading.Lock())
        with lock:
            assert self.cache is not None
            kept = self.cache.read(*span)
            if kept is None or not self._is_right(span, kept):
                self.cache.write(span.shard, 0, self.files.read(self.place(span.shard)))

    def _is_right(self, span: Span, content: bytes) -> bool:
        view = memoryview(content)
        return all(
            zlib.crc32(view[member.offset - span.start : member.end - span.start]) == member.checksum
            for member in self._in_span[span]
        )


def _close_all(handles: MutableMapping[str, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


_open: dict[Hashable, ShardStore] = {}  # by what names them, the one that was opened last at the end


def open_store(store: ShardStore, key: Hashable = None) -> ShardStore:
    """From now on `find_member` finds its files. In place of one that was opened with the same key, which is the root if none."""
    key = store.root if key is None else key
    _open.pop(key, None)
    _open[key] = store
    return store


def find_store(key: Hashable) -> ShardStore | None:
    return _open.get(key)


def find_member(path: Path) -> StoredFile | None:
    """The file in an open shard that has this path; None for any other path."""
    if not _open or ".tar" not in (text := path.as_posix()):
        return None
    for store in reversed(_open.values()):
        if not text.startswith(store.path_prefix):
            continue
        rest, end = text[len(store.path_prefix) :], 0
        while (end := rest.find(".tar/", end)) >= 0:
            end += len(".tar")
            if (found := store.find(rest[:end], rest[end + 1 :])) is not None:
                return found
    return None
