"""The files of shards, and open shards: the bytes of any file in them, checked. What is fetched of remote ones is kept
on the disk.

Files below a folder or a URL (s3://, gs://, http://, ...) are read in parts; remote ones through fsspec, with retries.
fsspec comes with torch; what it needs for a protocol (s3fs, gcsfs, aiohttp) is named where it is missing.

A file in a shard has a path below that of the shard: data/nuclei-000000.tar/cell_17.png. Whatever reads files asks
`file_bytes.find_member` for it; the stores that are open in this process answer. Of remote shards an image and its mask
are fetched together, ahead of their use where the reader says what it will read.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from unet_trainer.config.load import PROTOCOLS
from unet_trainer.datasets.shard_index import BLOCK, Member, Shard, ShardIndex
from unet_trainer.images.file_bytes import ShardError
from unet_trainer.system.atomic_files import ABANDONED_SECONDS, delete_drafts, make_own_folder, write_atomically
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import NO_FOLLOW, open_handle
from unet_trainer.system.os_errors import NO_ROOM, cannot
from unet_trainer.system.resources import free_disk

URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; together less than worker_timeout
CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0  # without an answer, or without a further byte of it
BLOCK_BYTES = 2**23  # that are read at a time from a file that is read from its beginning
MISSING_STATUSES = (None, 404, 410)  # None: no web server
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 425, 429}  # asking again gives the same answer
NUM_CONNECTIONS = 16  # of a process
AHEAD_BYTES = 2**26  # of a worker: fetched ahead
MAX_FETCHES = 3  # of content with wrong checksums
CHANGED = "the shards have changed since they were indexed"
MAX_SHARE = 0.5  # of the free disk, for what is kept of remote shards
SOURCE = "source.txt"  # the URL; its time is that of the last use
WRITING = os.O_RDWR | os.O_CREAT | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0)

Found = TypeVar("Found")


def is_url(text: str) -> bool:
    return URL_START.match(text) is not None


class MissingFile(ShardError):
    """There is no such file."""


class Files:
    """Files below a folder or a URL, by their names relative to it; from several threads, and in processes forked from
    this one."""

    def __init__(self, root: str, waits: tuple[float, ...] | None = None, workspace: Path | None = None) -> None:
        """`workspace`: where files are written before their upload."""
        self.is_remote = is_url(root)
        self.root = root.rstrip("/") if self.is_remote else root
        self.protocol = root.partition("://")[0].lower() if self.is_remote else ""
        self.waits = () if not self.is_remote else WAITS if waits is None else waits
        self.workspace, self.connect = workspace, _connect  # which gives fsspec's file system of a protocol
        self._systems: dict[int, Any] = {}  # by process: connections and their thread do not survive a fork

    def place(self, name: str) -> str:
        """As messages name a file."""
        return f"{self.root}/{name}".rstrip("/") if self.is_remote else str(Path(self.root, name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` up to `stop`, or to the end of the file."""

        def read_once(system: Any, place: str) -> bytes:
            content: bytes = system.cat_file(place, start=start, end=stop)
            if stop is None or len(content) == stop - start:
                return content
            if len(content) >= stop:  # a server that knows no ranges gives the whole file
                return content[start:stop]
            raise OSError(f"{len(content)} of {stop - start} bytes came")

        return self._retried(read_once, name)

    def size_and_version(self, name: str) -> tuple[int | None, str]:
        """In bytes, None if unknown; and what changes with the content, if anything does."""
        info = self._retried(lambda system, place: system.info(place), name)
        version = next((info[key] for key in ("ETag", "etag", "LastModified", "mtime", "updated") if info.get(key)), "")
        size = info.get("size")
        return size if isinstance(size, int) else None, str(version)

    def has_ranges(self, name: str) -> bool:
        """Whether the server gives parts of a file; some give the whole, whatever is asked for."""
        return len(self._retried(lambda system, place: system.cat_file(place, start=0, end=1), name)) <= 1

    def exists(self, name: str) -> bool:
        try:
            self.size_and_version(name)
        except MissingFile:
            return False
        return True

    def find(self) -> list[str]:
        """The names of all files."""
        if not self.is_remote:  # folders that may not be read are named when the data is searched
            return sorted(
                Path(place, name).relative_to(self.root).as_posix()
                for place, _, names in os.walk(self.root)
                for name in names
            )
        found = self._retried(lambda system, place: system.find(place), "", "be listed")
        urls = (name if is_url(name) else f"{self.protocol}://{name.lstrip('/')}" for name in found)
        return sorted(url.removeprefix(f"{self.root}/") for url in urls if url.startswith(f"{self.root}/"))

    def open_file(self, name: str) -> BinaryIO:
        """To be read from its beginning, with our retries, which fsspec's own files do not have."""
        if not self.is_remote:
            return self._retried(lambda system, place: os.fdopen(open_handle(place), "rb"), name)
        size, _ = self.size_and_version(name)
        if size is None:
            raise ShardError(
                f"{self.place(name)}: the server does not tell its size, so that it cannot be read in parts"
            )
        from fsspec.spec import AbstractBufferedFile  # 0.2 s

        kind = type(
            "RangeFile", (AbstractBufferedFile,), {"_fetch_range": lambda _, start, end: self.read(name, start, end)}
        )
        return cast(BinaryIO, kind(None, name, block_size=BLOCK_BYTES, cache_type="readahead", size=size))

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Completely or not at all. Raises UserError."""
        folder = self.workspace if self.is_remote else Path(self.place(name)).parent
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.is_remote:
                return write_atomically(Path(self.place(name)), fill)
            delete_drafts(folder, ["*"], ABANDONED_SECONDS)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".upload.", suffix=".tmp") as file:
                fill(cast(BinaryIO, file))
                file.flush()
                return self._retried(lambda system, url: system.put_file(file.name, url), name, "be written")
        except OSError as error:
            raise cannot(
                f"{folder}" if self.is_remote else f"--out: {self.place(name)}", "be written", error, folder
            ) from None

    def delete(self, name: str) -> None:
        with contextlib.suppress(ShardError):
            self._retried(lambda system, place: system.rm_file(place), name, "be deleted")

    def _retried(self, action: Callable[[Any, str], Found], name: str, what: str = "be read") -> Found:
        place = self.place(name)
        for wait in (*self.waits, None):
            try:
                if (system := self._systems.get(os.getpid())) is None:
                    system = self._systems[os.getpid()] = self.connect(self.protocol)
                return action(system, place)
            except ShardError:
                raise
            except NotImplementedError:
                raise ShardError(f"{place} cannot {what}: {self.protocol}:// does not allow it") from None
            except Exception as error:  # each library has its own
                # fsspec raises FileNotFoundError for any failed question about a web server's file; the cause has the
                # status.
                is_missing = isinstance(error, FileNotFoundError)
                failure = error.__cause__ or error if is_missing else error
                status = getattr(failure, "status", None)
                if is_missing and status in MISSING_STATUSES:
                    raise MissingFile(f"{place} is not there") from None
                if wait is None or status in FINAL_STATUSES or isinstance(error, PermissionError):
                    reason = getattr(failure, "strerror", None) or first_line(failure)
                    tries = f"; {len(self.waits) + 1} tries" if wait is None and self.waits else ""
                    raise ShardError(f"{place} cannot {what} ({reason}{tries})") from None
                time.sleep(
                    wait * random.uniform(0.5, 1.0)
                )  # processes that were refused together must not come back together
        raise AssertionError


class _LocalSystem:
    """What fsspec's file systems do, of a disk: without waiting for a pipe, hidden files, or a folder named ~."""

    def cat_file(self, path: str, start: int, end: int | None) -> bytes:
        with os.fdopen(open_handle(path), "rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    def info(self, path: str) -> dict[str, int]:
        status = Path(path).stat()
        return {"size": status.st_size, "mtime": status.st_mtime_ns}

    def rm_file(self, path: str) -> None:
        Path(path).unlink()


def _connect(protocol: str) -> Any:
    if not protocol:
        return _LocalSystem()
    if protocol not in PROTOCOLS:
        raise ShardError(
            f"{protocol}:// is not known; need s3://, gs://, abfs://, https:// or http://, or the path of a folder"
        )
    options: dict[str, Any] = {}
    try:
        import fsspec

        if protocol in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError:
        raise ShardError(
            f"{protocol}:// needs the package {PROTOCOLS[protocol]}: pip install {PROTOCOLS[protocol]}"
        ) from None


class Span(NamedTuple):
    """Part of a shard that is fetched at once: an image and its mask, or one of them."""

    shard: str
    start: int
    stop: int
    members: tuple[Member, ...]

    def is_right(self, content: bytes) -> bool:
        return all(zlib.crc32(self.cut(content, member)) == member.checksum for member in self.members)

    def cut(self, content: bytes, member: Member) -> memoryview:
        return memoryview(content)[member.offset - self.start : member.end - self.start]


@dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    """A file in a shard."""

    store: "ShardStore"
    member: Member
    span: Span
    facts: Mapping[str, Any] | None  # of an image or of a mask, as the scan caches them

    def read(self) -> bytes:
        """Raises ShardError."""
        return self.store.read(self)

    @property
    def place(self) -> str:
        """As messages name it: below the folder or URL of its shard."""
        return f"{self.store.files.place(self.span.shard)}/{self.member.name}"

    @property
    def stamp(self) -> list[int]:
        """Differs where the content does."""
        return [self.member.length, self.member.checksum, self.member.offset]


class _Worker(threading.local):
    """What a thread that reads has asked for ahead, and the span that it has read last: a mask follows its image."""

    def __init__(self) -> None:
        self.ahead: dict[Span, Future[bytes]] = {}
        self.last: tuple[Span | None, bytes] = None, b""


class _Process:
    """What must not be shared with a forked process."""

    def __init__(self) -> None:
        self.number, self.worker = os.getpid(), _Worker()
        self.threads = ThreadPoolExecutor(NUM_CONNECTIONS, "shards")
        self.whole = threading.Lock()  # see _fetch


class ShardStore:
    """Reads files from shards; from several threads, and in processes forked from this one."""

    def __init__(self, files: Files, index: ShardIndex, cache: "RangeCache | None" = None) -> None:
        self.files, self.index, self.cache = files, index, cache
        self.is_remote = files.is_remote
        folder = Path(files.root).as_posix()
        self.path_prefix = "" if folder == "." else f"{folder.rstrip('/')}/"  # of the paths of its files
        self.gives_whole_files = False  # a server that knows no ranges
        self.opened = time.monotonic()
        self._process = _Process()
        self._files: dict[str, StoredFile] = {}  # by their paths below the root
        for shard in index.shards:
            for sample in shard.samples:
                both = sample.image, sample.mask
                start, stop = min(member.offset for member in both), max(member.end for member in both)
                is_close = self.is_remote and stop - start <= 2 * (sum(member.length for member in both) + BLOCK)
                together = Span(shard.name, start, stop, both)
                for member, facts in zip(both, (sample.image_facts, sample.mask_facts), strict=True):
                    span = together if is_close else Span(shard.name, member.offset, member.end, (member,))
                    self._files[f"{shard.name}/{member.name}"] = StoredFile(self, member, span, facts)

    def find(self, path: str) -> StoredFile | None:
        """By a path below that of a shard, as find_member has it."""
        return self._files.get(path[len(self.path_prefix) :]) if path.startswith(self.path_prefix) else None

    def check(self) -> None:
        """Raises ShardError if a shard is missing or has another size than in the index."""
        with ThreadPoolExecutor(NUM_CONNECTIONS, "shards") as threads:  # no thread is left: this process may fork
            found = list(threads.map(self.files.size_and_version, [shard.name for shard in self.index.shards]))
        for shard, (size, _) in zip(self.index.shards, found, strict=True):
            if size not in (None, shard.num_bytes):
                sizes = (
                    f"{self.files.place(shard.name)} has {size} bytes, and {shard.num_bytes} by the index: {CHANGED}"
                )
                raise ShardError(
                    f"{sizes}; write them again with shard; of other tools, delete checkpoint_dir/.shards/index-*.json"
                )

    def read(self, file: StoredFile) -> bytes:
        """The content of a file. Raises ShardError."""
        if not self.is_remote:
            return self._fetch(file.span)
        worker = self._state().worker
        span, content = worker.last
        if span != file.span:
            coming = worker.ahead.pop(file.span, None)
            content = self._fetch(file.span) if coming is None else coming.result()
            worker.last = file.span, content
        return bytes(file.span.cut(content, file.member))

    def read_ahead(self, files: Iterable[StoredFile]) -> None:
        """Begins to fetch what this thread will read next, as far as memory allows. What it asked for earlier is
        dropped."""
        num_bytes, ahead = 0, {}
        state = self._state()
        for span in dict.fromkeys(file.span for file in files) if self.is_remote else ():
            num_bytes += span.stop - span.start
            if num_bytes > AHEAD_BYTES:
                break
            ahead[span] = state.worker.ahead.get(span) or state.threads.submit(self._fetch, span)
        state.worker.ahead = ahead

    def _state(self) -> _Process:
        if self._process.number != os.getpid():
            self._process = _Process()
        return self._process

    def _fetch(self, span: Span) -> bytes:
        """From the cache, or from where the shards are. Raises ShardError."""
        if (kept := self._kept(span)) is not None:
            return kept
        if (
            self.gives_whole_files
            and self.cache is not None
            and self.cache.keeps(span.shard, self.cache.sizes[span.shard])
        ):
            with self._state().whole:  # the whole shard, once for all threads of this process
                if (kept := self._kept(span)) is None:
                    self.cache.write(span.shard, 0, self.files.read(span.shard))
                    kept = self._kept(span)
            if kept is not None:
                return kept
        for _ in range(MAX_FETCHES if self.is_remote else 1):
            content = self.files.read(span.shard, span.start, span.stop)
            if span.is_right(content):
                if self.cache is not None:
                    self.cache.write(span.shard, span.start, content)
                return content
        raise ShardError(f"its content differs from the index (checksum): {CHANGED}, or the disk has damaged them")

    def _kept(self, span: Span) -> bytes | None:
        kept = None if self.cache is None else self.cache.read(span.shard, span.start, span.stop)
        return kept if kept is not None and span.is_right(kept) else None


class RangeCache:
    """Parts of remote shards on the local disk, in a bounded number of bytes, for all processes of a machine and for
    later runs.

    Each shard has a file here in which its parts lie where they lie in the shard; the rest of it is a hole that takes
    no room. The reader verifies checksums, so no table says which parts are there: what was never written, cut off by a
    kill or is of an older shard has wrong ones and is fetched. Kept are the first shards, as far as they fit: every
    epoch reads each sample once, so a cache that replaced the oldest by the newest would have discarded most of them
    before they are read again."""

    def __init__(self, folder: Path, url: str, shards: Sequence[Shard], max_bytes: int) -> None:
        """Makes room by deleting what is kept of other URLs, the longest unused first, and keeps at most half of what
        is free on the disk. Raises OSError where nothing can be written."""
        self.folder = folder / short_digest(url)
        self.sizes = {shard.name: shard.num_bytes for shard in shards}
        folder.mkdir(parents=True, exist_ok=True)
        make_own_folder(self.folder)
        if _allocated(self.folder) > max_bytes:  # of a time when it was allowed more
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        self._write(self.folder / SOURCE, 0, f"{url}\n".encode("utf-8", "surrogateescape"))
        wanted = min(max_bytes, sum(self.sizes.values()))
        sources = [place / SOURCE for place in folder.iterdir() if place != self.folder and not place.is_symlink()]
        others = sorted((source for source in sources if source.is_file()), key=lambda source: source.stat().st_mtime)
        while others and sum(_allocated(source.parent) for source in others) > max_bytes - wanted:
            shutil.rmtree(others.pop(0).parent, ignore_errors=True)
        room = int(MAX_SHARE * free_disk(folder)) + _allocated(self.folder)
        self.max_bytes, self.is_limited_by_disk, self._is_full = min(max_bytes, room), room < wanted, False
        self._starts = dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    def keeps(self, shard: str, stop: int) -> bool:
        """Whether the part of a shard up to `stop` is kept."""
        return self._starts[shard] + stop <= self.max_bytes

    def read(self, shard: str, start: int, stop: int) -> bytes | None:
        """What lies at that place, right or not; None if there is nothing."""
        with contextlib.suppress(OSError):
            if self.keeps(shard, stop):
                with os.fdopen(open_handle(self._file(shard), follow=False), "rb") as file:
                    file.seek(start)
                    return file.read(stop - start)
        return None

    def write(self, shard: str, start: int, content: bytes) -> None:
        """Where the disk is full, nothing more is kept."""
        if not self._is_full and self.keeps(shard, start + len(content)):
            try:
                self._write(self._file(shard), start, content)
            except OSError as error:
                self._is_full = error.errno in NO_ROOM  # any other error may not come again

    def _write(self, path: Path, start: int, content: bytes) -> None:
        """Links are not followed, and pipes not waited for."""
        with open(path, "r+b", opener=lambda path, flags: os.open(path, WRITING, 0o644)) as file:
            file.seek(start)
            file.write(content)

    def _file(self, shard: str) -> Path:
        return self.folder / f"{short_digest(shard)[:8]}-{shard.rpartition('/')[2][-180:]}"


def short_digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _allocated(folder: Path) -> int:
    """Bytes that its files take on the disk; holes take none."""
    statuses = [file.lstat() for file in folder.iterdir()]
    return sum(min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512) for status in statuses)
