"""Files behind a URL (s3://, gs://, http://, ...), through fsspec: parts of them, with retries. No cache here.

fsspec comes with torch; what it needs for a protocol (s3fs, gcsfs, aiohttp) is named where it is missing.
"""

from __future__ import annotations

import io
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from unet_trainer.shards.tar_files import ShardError
from unet_trainer.system.console import first_line

URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
# Protocol → what fsspec needs for it. No others: a name in a config must not choose which code is loaded.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp", "memory": "fsspec"}
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; together less than worker_timeout
CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0  # without an answer, or without a further byte of it
BLOCK_BYTES = 2**23  # that are read at a time from a file that is read from its beginning
MISSING_STATUSES = (None, 404, 410)  # None: no web server
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 425, 429}  # asking again gives the same answer

Found = TypeVar("Found")


def is_url(text: str) -> bool:
    return URL.match(text) is not None


def url_join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


class RemoteFiles:
    """Reads and writes files by their URLs; may be used from several threads, and in processes forked from this one."""

    def __init__(self, waits: tuple[float, ...] = WAITS, connect: Callable[[str], Any] | None = None) -> None:
        """`connect` gives the file system of a protocol, as fsspec has them."""
        self.waits = waits
        self.connect = connect or _connect
        self._systems: dict[tuple[int, str], Any] = {}  # connections and their thread do not survive a fork

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file from `start` up to `stop`, or to its end. Raises ShardError."""

        def read_once() -> bytes:
            content: bytes = self._system(url).cat_file(url, start=start, end=stop)
            if stop is None or len(content) == stop - start:
                return content
            if len(content) >= stop:  # a server that knows no ranges gives the whole file
                return content[start:stop]
            raise OSError(f"{len(content)} of {stop - start} bytes came")

        return self._retried(read_once, url, "be read")

    def size(self, url: str) -> int | None:
        """In bytes; None where the server does not tell. Raises ShardError, also for a file that is not there."""
        return self.size_and_version(url)[0]

    def size_and_version(self, url: str) -> tuple[int | None, str]:
        """And what tells other content of the same size, if the server says it."""
        info = self._retried(lambda: self._system(url).info(url), url, "be read")
        version = next((info[name] for name in ("ETag", "etag", "LastModified", "mtime", "updated") if info.get(name)), "")
        size = info.get("size")
        return size if isinstance(size, int) else None, str(version)

    def has_ranges(self, url: str) -> bool:
        """Whether the server gives parts of a file; some give the whole, whatever is asked for."""
        return len(self._retried(lambda: self._system(url).cat_file(url, start=0, end=1), url, "be read")) <= 1

    def find(self, url: str) -> list[str]:
        """The URLs of all files below a folder, sorted. Raises ShardError."""
        protocol = _protocol(url)
        found = self._retried(lambda: self._system(url).find(url), url, "be listed")
        return sorted(name if is_url(name) else f"{protocol}://{name.lstrip('/')}" for name in found)

    def exists(self, url: str) -> bool:
        try:
            self.size(url)
        except MissingFile:
            return False
        return True

    def write(self, url: str, file: Path) -> None:
        """Uploads a file. Raises ShardError."""
        self._retried(lambda: self._system(url).put_file(str(file), url), url, "be written")

    def delete(self, url: str) -> None:
        self._retried(lambda: self._system(url).rm_file(url), url, "be deleted")

    def open(self, url: str) -> io.BufferedReader:
        """A file to read from its beginning on."""
        size = self.size(url)
        if size is None:
            raise ShardError(f"{url}: the server does not tell its size, so that it cannot be read in parts")
        return io.BufferedReader(_RangeFile(self, url, size), BLOCK_BYTES)

    def _system(self, url: str) -> Any:
        protocol = _protocol(url)
        key = os.getpid(), protocol
        if key not in self._systems:
            self._systems[key] = self.connect(protocol)
        return self._systems[key]

    def _retried(self, action: Callable[[], Found], url: str, what: str) -> Found:
        for wait in (*self.waits, None):
            try:
                return action()
            except ShardError:
                raise
            except FileNotFoundError as error:
                # fsspec says so of any failed question about a web server's file; the cause has the server's answer.
                status = getattr(error.__cause__, "status", None)
                if status in MISSING_STATUSES:
                    raise MissingFile(f"{url} is not there") from None
                self._wait_or_raise(wait, error.__cause__ or error, url, what)
            except PermissionError as error:
                raise ShardError(f"{url} cannot {what} ({first_line(error) or 'no permission'})") from None
            except NotImplementedError:
                raise ShardError(f"{url} cannot {what}: {_protocol(url)}:// does not allow it") from None
            except Exception as error:  # each library has its own
                self._wait_or_raise(wait, error, url, what)
        raise AssertionError

    def _wait_or_raise(self, wait: float | None, error: BaseException, url: str, what: str) -> None:
        """`wait` None: it was the last try."""
        status = getattr(error, "status", None)
        if wait is None or status in FINAL_STATUSES:
            tries = f"; {len(self.waits) + 1} tries" if wait is None else ""
            raise ShardError(f"{url} cannot {what} ({first_line(error)}{tries})") from None
        # Many processes that were sent away together must not come back together.
        time.sleep(wait * random.uniform(0.5, 1.0))


class MissingFile(ShardError):
    """There is no such file."""


class _RangeFile(io.RawIOBase):
    """A remote file that can be read at any place."""

    def __init__(self, files: RemoteFiles, url: str, size: int) -> None:
        self.files, self.url, self.length, self.position = files, url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.length)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, place: Any) -> int:
        stop = min(self.position + len(place), self.length)
        if stop <= self.position:
            return 0
        content = self.files.read(self.url, self.position, stop)
        place[: len(content)] = content
        self.position = stop
        return len(content)


def _protocol(url: str) -> str:
    found = URL.match(url)
    assert found is not None, url
    return found["protocol"].lower()


def _connect(protocol: str) -> Any:
    if protocol not in PACKAGES:
        raise ShardError(f"{protocol}:// is not known; need s3://, gs://, abfs://, https:// or http://")
    try:
        import fsspec

        return fsspec.filesystem(protocol, skip_instance_cache=True, **_options(protocol))
    except ImportError:
        raise ShardError(f"{protocol}:// needs the package {PACKAGES[protocol]}: pip install {PACKAGES[protocol]}") from None


def _options(protocol: str) -> dict[str, Any]:
    if protocol not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}
