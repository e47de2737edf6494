"""The files of shards, in a folder or behind a URL (s3://, gs://, http://, ...): parts of them, sizes, lists, writing.

Remote files go through fsspec, with retries. fsspec comes with torch; what it needs for a protocol (s3fs, gcsfs, aiohttp) is named
where it is missing. Every error is a ShardError with the name of the file.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from unet_trainer.config.load import PROTOCOLS
from unet_trainer.datasets.file_tree import walk
from unet_trainer.images.file_bytes import ShardError
from unet_trainer.system.atomic_files import ABANDONED_SECONDS, delete_drafts, write_atomically
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import open_handle
from unet_trainer.system.os_errors import cannot

URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; together less than worker_timeout
CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0  # without an answer, or without a further byte of it
BLOCK_BYTES = 2**23  # that are read at a time from a file that is read from its beginning
MISSING_STATUSES = (None, 404, 410)  # None: no web server
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 425, 429}  # asking again gives the same answer

Found = TypeVar("Found")


def is_url(text: str) -> bool:
    return URL.match(text) is not None


class MissingFile(ShardError):
    """There is no such file."""


class Files:
    """Files below a folder or a URL, by their names relative to it; from several threads, and in processes forked from this one."""

    def __init__(
        self,
        root: str,
        waits: tuple[float, ...] | None = None,
        workspace: Path | None = None,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        """`workspace`: where files are written before their upload. `connect` gives fsspec's file system of a protocol."""
        self.is_remote = is_url(root)
        self.root = root.rstrip("/") if self.is_remote else root
        self.protocol = root.partition("://")[0].lower() if self.is_remote else ""
        self.waits = () if not self.is_remote else WAITS if waits is None else waits
        self.workspace, self.connect = workspace, connect or _connect
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
        found = self._retried(lambda system, place: system.find(place), "", "be listed")
        if not self.is_remote:
            return sorted(Path(path).relative_to(self.root).as_posix() for path in found)
        urls = (name if is_url(name) else f"{self.protocol}://{name.lstrip('/')}" for name in found)
        return sorted(url.removeprefix(f"{self.root}/") for url in urls if url.startswith(f"{self.root}/"))

    def open_file(self, name: str) -> BinaryIO:
        """To be read from its beginning, with our retries, which fsspec's own files do not have."""
        if not self.is_remote:
            return self._retried(lambda system, place: os.fdopen(open_handle(place), "rb"), name)
        size, _ = self.size_and_version(name)
        if size is None:
            raise ShardError(f"{self.place(name)}: the server does not tell its size, so that it cannot be read in parts")
        from fsspec.spec import AbstractBufferedFile  # 0.2 s

        kind = type("RangeFile", (AbstractBufferedFile,), {"_fetch_range": lambda _, start, end: self.read(name, start, end)})
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
            raise cannot(f"{folder}" if self.is_remote else f"--out: {self.place(name)}", "be written", error, folder) from None

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
                # fsspec raises FileNotFoundError for any failed question about a web server's file; the cause has the status.
                is_missing = isinstance(error, FileNotFoundError)
                failure = error.__cause__ or error if is_missing else error
                status = getattr(failure, "status", None)
                if is_missing and status in MISSING_STATUSES:
                    raise MissingFile(f"{place} is not there") from None
                if wait is None or status in FINAL_STATUSES or isinstance(error, PermissionError):
                    reason = getattr(failure, "strerror", None) or first_line(failure)
                    tries = f"; {len(self.waits) + 1} tries" if wait is None and self.waits else ""
                    raise ShardError(f"{place} cannot {what} ({reason}{tries})") from None
                time.sleep(wait * random.uniform(0.5, 1.0))  # processes that were refused together must not come back together
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

    def find(self, path: str) -> list[Path]:
        return [folder / name for folder, names in walk(Path(path)) for name in names]

    def rm_file(self, path: str) -> None:
        Path(path).unlink()


def _connect(protocol: str) -> Any:
    if not protocol:
        return _LocalSystem()
    if protocol not in PROTOCOLS:
        raise ShardError(f"{protocol}:// is not known; need s3://, gs://, abfs://, https:// or http://")
    options: dict[str, Any] = {}
    try:
        import fsspec

        if protocol in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError:
        raise ShardError(f"{protocol}:// needs the package {PROTOCOLS[protocol]}: pip install {PROTOCOLS[protocol]}") from None
