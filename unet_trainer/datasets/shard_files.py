"""The files of shards, in a local folder or behind a URL (s3://, gs://, http://, ...): parts of them, sizes, lists, writing.

Remote files go through fsspec, with retries. fsspec comes with torch; what it needs for a protocol (s3fs, gcsfs, aiohttp) is named
where it is missing. Every error is a ShardError with the name of the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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
BLOCK_BYTES = 2**23  # that are read at a time from a remote file that is read from its beginning
MISSING_STATUSES = (None, 404, 410)  # None: no web server
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 425, 429}  # asking again gives the same answer

Found = TypeVar("Found")


def is_url(text: str) -> bool:
    return URL.match(text) is not None


class MissingFile(ShardError):
    """There is no such file."""


class LocalFiles:
    """Files below a folder, by their names relative to it."""

    is_remote = False

    def __init__(self, root: str) -> None:
        self.root = root

    def place(self, name: str) -> str:
        """As messages name a file."""
        return str(Path(self.root) / name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` up to `stop`, or to the end of the file."""
        with self.open_file(name) as file, self._told(name, "be read"):
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def size_and_version(self, name: str) -> tuple[int | None, str]:
        """In bytes, None if unknown; and what changes with the content, if anything does."""
        with self._told(name, "be read"):
            status = Path(self.place(name)).stat()
        return status.st_size, str(status.st_mtime_ns)

    def has_ranges(self, name: str) -> bool:
        return True

    def exists(self, name: str) -> bool:
        return Path(self.place(name)).is_file()

    def find(self) -> list[str]:
        """The names of all files."""
        with self._told("", "be read"):
            root = Path(self.root)
            return sorted((folder / name).relative_to(root).as_posix() for folder, names in walk(root) for name in names)

    def open_file(self, name: str) -> BinaryIO:
        with self._told(name, "be read"):
            return os.fdopen(open_handle(self.place(name)), "rb")

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        path = Path(self.place(name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, fill)
        except OSError as error:
            raise cannot(f"--out: {path}", "be written", error, path.parent) from None

    def delete(self, name: str) -> None:
        Path(self.place(name)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _told(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFile(f"{self.place(name)}: {error.strerror}") from None
        except OSError as error:
            raise ShardError(f"{self.place(name)} cannot {what} ({error.strerror or error})") from None


class RemoteFiles:
    """The same behind a URL; may be used from several threads, and in processes forked from this one."""

    is_remote = True

    def __init__(
        self,
        root: str,
        waits: tuple[float, ...] = WAITS,
        workspace: Path | None = None,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        """`workspace`: where files are written before their upload. `connect` gives fsspec's file system of a protocol."""
        self.root, self.waits, self.workspace = root.rstrip("/"), waits, workspace
        self.protocol = root.partition("://")[0].lower()
        self.connect = connect or _connect
        self._systems: dict[int, Any] = {}  # by process: connections and their thread do not survive a fork

    def place(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        def read_once(system: Any, url: str) -> bytes:
            content: bytes = system.cat_file(url, start=start, end=stop)
            if stop is None or len(content) == stop - start:
                return content
            if len(content) >= stop:  # a server that knows no ranges gives the whole file
                return content[start:stop]
            raise OSError(f"{len(content)} of {stop - start} bytes came")

        return self._retried(read_once, name, "be read")

    def size_and_version(self, name: str) -> tuple[int | None, str]:
        info = self._retried(lambda system, url: system.info(url), name, "be read")
        version = next((info[key] for key in ("ETag", "etag", "LastModified", "mtime", "updated") if info.get(key)), "")
        size = info.get("size")
        return size if isinstance(size, int) else None, str(version)

    def has_ranges(self, name: str) -> bool:
        """Whether the server gives parts of a file; some give the whole, whatever is asked for."""
        return len(self._retried(lambda system, url: system.cat_file(url, start=0, end=1), name, "be read")) <= 1

    def exists(self, name: str) -> bool:
        try:
            self.size_and_version(name)
        except MissingFile:
            return False
        return True

    def find(self) -> list[str]:
        found = self._retried(lambda system, url: system.find(url), "", "be listed")
        urls = (name if is_url(name) else f"{self.protocol}://{name.lstrip('/')}" for name in found)
        return sorted(url.removeprefix(f"{self.root}/") for url in urls if url.startswith(f"{self.root}/"))

    def open_file(self, name: str) -> BinaryIO:
        size, _ = self.size_and_version(name)
        if size is None:
            raise ShardError(f"{self.place(name)}: the server does not tell its size, so that it cannot be read in parts")
        return io.BufferedReader(_RangeFile(self, name, size), BLOCK_BYTES)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Uploads a file whole."""
        assert self.workspace is not None
        try:
            self.workspace.mkdir(parents=True, exist_ok=True)
            delete_drafts(self.workspace, ["*"], ABANDONED_SECONDS)
            with tempfile.NamedTemporaryFile(dir=self.workspace, prefix=".upload.", suffix=".tmp") as file:
                fill(file)  # type: ignore[arg-type] # it writes as a file does
                file.flush()
                self._retried(lambda system, url: system.put_file(file.name, url), name, "be written")
        except OSError as error:
            raise cannot(f"{self.workspace}", "be written to", error, self.workspace) from None

    def delete(self, name: str) -> None:
        with contextlib.suppress(ShardError):
            self._retried(lambda system, url: system.rm_file(url), name, "be deleted")

    def _retried(self, action: Callable[[Any, str], Found], name: str, what: str) -> Found:
        url = self.place(name)
        for wait in (*self.waits, None):
            try:
                if (system := self._systems.get(os.getpid())) is None:
                    system = self._systems[os.getpid()] = self.connect(self.protocol)
                return action(system, url)
            except ShardError:
                raise
            except PermissionError as error:
                raise ShardError(f"{url} cannot {what} ({first_line(error) or 'no permission'})") from None
            except NotImplementedError:
                raise ShardError(f"{url} cannot {what}: {self.protocol}:// does not allow it") from None
            except Exception as error:  # each library has its own
                # fsspec raises FileNotFoundError for any failed question about a web server's file; the cause has the status.
                is_missing = isinstance(error, FileNotFoundError)
                failure = error.__cause__ or error if is_missing else error
                status = getattr(failure, "status", None)
                if is_missing and status in MISSING_STATUSES:
                    raise MissingFile(f"{url} is not there") from None
                if wait is None or status in FINAL_STATUSES:
                    tries = f"; {len(self.waits) + 1} tries" if wait is None else ""
                    raise ShardError(f"{url} cannot {what} ({first_line(failure)}{tries})") from None
                time.sleep(wait * random.uniform(0.5, 1.0))  # processes that were refused together must not come back together
        raise AssertionError


Files = LocalFiles | RemoteFiles


class _RangeFile(io.RawIOBase):
    """A remote file that can be read at any place. fsspec's own files have no retries."""

    def __init__(self, files: RemoteFiles, name: str, size: int) -> None:
        self.files, self.name, self.length, self.position = files, name, size, 0

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
        content = self.files.read(self.name, self.position, stop)
        place[: len(content)] = content
        self.position = stop
        return len(content)


def _connect(protocol: str) -> Any:
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
