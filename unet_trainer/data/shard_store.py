"""The files of shards, on a disk or behind a URL, and shards that are open: the bytes of any file in them, checked.

Read through fsspec, whose file system of web servers asks once, and whose caches have no bound."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from unet_trainer.config.errors import UserError
from unet_trainer.data.shard_index import Member, Sample, Shard, ShardIndex
from unet_trainer.images.file_bytes import ShardError, StoredFile
from unet_trainer.system.atomic_files import atomic_open, make_own_folder
from unet_trainer.system.concurrency import read_ahead
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import NO_FOLLOW, open_handle
from unet_trainer.system.resources import free_disk

URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; together less than worker_timeout
CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0  # without an answer, or without a further byte of it
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 425, 429}  # asking again gives the same answer
FINAL_ERRORS = (PermissionError, NotImplementedError, ImportError)
NUM_CONNECTIONS = 16  # of a process
AHEAD_BYTES = 2**26  # of a worker: fetched ahead
MAX_FETCHES = 3  # of content with wrong checksums
CHANGED = "the shards have changed since they were indexed"
WRITING = os.O_RDWR | os.O_CREAT | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0)
Result = TypeVar("Result")


def is_url(text: str) -> bool:
    return URL_START.match(text) is not None


class MissingFile(ShardError):
    """There is no such file."""


class Files:
    """Files below a folder or a URL, by their names relative to it; from several threads, and in forked processes."""

    def __init__(self, root: str, waits: tuple[float, ...] | None = None) -> None:
        self.is_remote = is_url(root)
        self.root = root.rstrip("/") if self.is_remote else root
        self.protocol = root.partition("://")[0].lower() if self.is_remote else "file"
        self.waits = () if not self.is_remote else WAITS if waits is None else waits
        self.connect = cache(_connect)

    def place(self, name: str) -> str:
        """As messages name a file."""
        return f"{self.root}/{name}".rstrip("/") if self.is_remote else str(Path(self.root, name).absolute())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` up to `stop`, or to the end of the file."""

        def read_once(system: Any, place: str) -> bytes:
            content: bytes = system.cat_file(place, start=start, end=stop)
            if stop is None or len(content) == stop - start:
                return content
            if len(content) >= stop:  # the whole file, as a server may answer now and then
                return content[start:stop]
            raise OSError(f"{len(content)} of {stop - start} bytes came")

        return self.retry(read_once, name)

    def size(self, name: str) -> int | None:
        """In bytes, None if unknown."""
        info = self.retry(lambda system, place: system.info(place), name)
        if info.get("type", "file") != "file":  # reading a pipe would wait
            raise ShardError(f"{self.place(name)} is no file")
        return cast("int | None", info.get("size"))

    def find(self) -> list[str]:
        """The names of the files in the folder itself. Empty where none can be listed."""
        try:
            paths = self.retry(lambda system, place: system.find(place, maxdepth=1), "", "be listed")
        except MissingFile:
            return []
        start = f"{self.place('')}/"
        urls = [path if path.startswith(start) else f"{self.protocol}://{path.lstrip('/')}" for path in paths]
        return sorted(url.removeprefix(start) for url in urls if url.startswith(start))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A file to write to; on a disk it is there completely at the end of the block, or not at all."""
        place = self.place(name)
        try:
            if not self.is_remote:
                Path(place).parent.mkdir(parents=True, exist_ok=True)
            system = self.connect(self.protocol, os.getpid())
            with system.open(place, "wb") if self.is_remote else atomic_open(Path(place)) as file:
                yield file
        except UserError:
            raise
        except Exception as error:  # each library has its own
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ShardError(f"--out: {place} cannot be written ({reason})") from error

    def delete(self, name: str) -> None:
        with contextlib.suppress(ShardError):
            self.retry(lambda system, place: system.rm_file(place), name, "be deleted")

    def retry(self, action: Callable[[Any, str], Result], name: str, what: str = "be read") -> Result:
        """What the action makes of the file system and a file's place there. Raises ShardError."""
        place, waits = self.place(name), [*self.waits]
        while True:
            try:
                return action(self.connect(self.protocol, os.getpid()), place)
            except Exception as error:  # each library has its own
                # of any failed question about a web server's file; the cause has the status
                is_missing = isinstance(error, FileNotFoundError)
                failure = error.__cause__ or error if is_missing else error
                status = getattr(failure, "status", None)
                if is_missing and status in (None, 404, 410):
                    raise MissingFile(f"{place} is not there") from None
                if not waits or status in FINAL_STATUSES or isinstance(error, FINAL_ERRORS):
                    reason = getattr(failure, "strerror", None) or first_line(failure)
                    tries = f"; {len(self.waits) + 1} tries" if not waits and self.waits else ""
                    raise ShardError(f"{place} cannot {what} ({reason}{tries})") from None
            time.sleep(waits.pop(0) * random.uniform(0.5, 1.0))  # processes refused together come back apart


def _connect(protocol: str, process: int) -> Any:
    """fsspec's file system, one for each process: connections and their thread do not survive a fork."""
    import fsspec

    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    return fsspec.filesystem(protocol, skip_instance_cache=True, **options)


class ShardStore:
    """Reads files from shards; from several threads, and in processes forked from this one."""

    def __init__(self, files: Files, index: ShardIndex, cache: RangeCache | None = None) -> None:
        self.files, self.index, self.cache = files, index, cache
        self.is_remote = files.is_remote
        self.samples: list[tuple[str, Sample, StoredFile, StoredFile]] = []  # shard, sample, image and mask
        for name, sample in ((shard.name, sample) for shard in index.shards for sample in shard.samples):
            image = self._stored(name, sample.image, sample.image_facts)
            self.samples.append((name, sample, image, self._stored(name, sample.mask, sample.mask_facts)))
        self._by_path = {file.as_posix(): file for _, _, *files in self.samples for file in files}
        self._ahead = threading.local()  # what a thread has fetched ahead

    def _stored(self, shard: str, member: Member, facts: dict[str, Any] | None) -> StoredFile:
        file = StoredFile(Path(self.files.root, shard, member.name))
        file.store, file.member, file.facts = self, (shard, member), facts
        file.shown = f"{self.files.place(shard)}/{member.name}"
        file.stamp = [member.length, member.checksum, member.offset]
        return file

    def find(self, path: str) -> StoredFile | None:
        """By its path, data/cells-000000.tar/cell_17.png."""
        return self._by_path.get(path)

    def check(self) -> None:
        """Raises ShardError if a shard is missing or has another size than in the index, or cannot be read in parts."""
        names = [shard.name for shard in self.index.shards]
        sizes = read_ahead(self.files.size, names, NUM_CONNECTIONS)
        for shard, (name, size) in zip(self.index.shards, sizes, strict=True):
            if size not in (None, shard.num_bytes):
                differ = f"{self.files.place(name)} has {size} bytes, and {shard.num_bytes} by the index"
                raise ShardError(f"{differ}: {CHANGED}; write them again with shard")
        if self.is_remote and self.files.retry(lambda system, place: len(system.cat_file(place, 0, 1)), names[0]) > 1:
            fix = "need a server with HTTP ranges, such as nginx, or a copy of the shards on a disk"
            raise ShardError(f"{self.files.root} gives whole files only, not parts of them; {fix}")

    def read(self, file: StoredFile) -> bytes:
        """The content of a file. Raises ShardError."""
        ahead = getattr(self._ahead, "contents", {}).pop(file, None)
        if isinstance(ahead, ShardError):
            raise ahead
        return ahead or self._fetch(file)

    def read_ahead(self, files: Iterable[StoredFile]) -> None:
        """Fetch what this thread will read next, as far as memory allows; errors are raised by `read`."""
        self._ahead.contents = {}
        if self.is_remote:
            files = list(dict.fromkeys(files))
            ends = accumulate(file.member[1].length for file in files)
            first = [file for file, end in zip(files, ends, strict=True) if end <= AHEAD_BYTES]
            fetched = read_ahead(self._try_fetch, first, NUM_CONNECTIONS, max_items=len(first))
            with contextlib.closing(fetched):
                self._ahead.contents = dict(fetched)

    def _try_fetch(self, file: StoredFile) -> bytes | ShardError:
        try:
            return self._fetch(file)
        except ShardError as error:
            return error

    def _fetch(self, file: StoredFile) -> bytes:
        """From the cache, or from where the shards are. Raises ShardError."""
        shard, member = file.member
        if self.cache is not None and zlib.crc32(kept := self.cache.read(shard, member)) == member.checksum:
            return kept
        for _ in range(MAX_FETCHES if self.is_remote else 1):
            content = self.files.read(shard, member.offset, member.end)
            if zlib.crc32(content) == member.checksum:
                if self.cache is not None:
                    self.cache.write(shard, member, content)
                return content
        raise ShardError(f"its content differs from the index (checksum): {CHANGED}, or the disk has damaged them")


class RangeCache:
    """Parts of remote shards on the local disk, in a bounded number of bytes, for all processes and later runs.

    Each shard has a file with holes, in which its parts lie where they lie in the shard. Kept are the first shards, as
    far as they fit: an epoch reads each sample once, so a cache that replaces the oldest would have discarded most of
    them before they are read again."""

    def __init__(self, folder: Path, url: str, shards: Sequence[Shard], max_bytes: int) -> None:
        """Keeps at most half of what is free on the disk. Raises OSError where nothing can be written."""
        self.folder = folder / _digest(url)
        folder.mkdir(parents=True, exist_ok=True)
        make_own_folder(self.folder)
        # holes take no blocks; Windows does not tell
        num_kept = sum(getattr(file.lstat(), "st_blocks", 0) * 512 for file in self.folder.iterdir())
        max_bytes = min(max_bytes, free_disk(folder) // 2 + num_kept)
        ends = accumulate(shard.num_bytes for shard in shards)
        self.kept = {shard.name for shard, end in zip(shards, ends, strict=True) if end <= max_bytes}

    def read(self, shard: str, member: Member) -> bytes:
        """What lies at that place, right or not; empty if there is nothing."""
        with contextlib.suppress(OSError):
            if shard in self.kept:
                with os.fdopen(open_handle(self.path(shard), follow=False), "rb") as file:
                    file.seek(member.offset)
                    return file.read(member.length)
        return b""

    def write(self, shard: str, member: Member, content: bytes) -> None:
        """Where the disk is full, nothing is kept. Links are not followed, and pipes not waited for."""
        if shard in self.kept:
            with contextlib.suppress(OSError), os.fdopen(os.open(self.path(shard), WRITING, 0o644), "r+b") as file:
                file.seek(member.offset)
                file.write(content)

    def path(self, shard: str) -> Path:
        return self.folder / _digest(shard)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
