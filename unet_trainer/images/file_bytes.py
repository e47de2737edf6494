"""The bytes of a file of a dataset, on a disk or in a shard; and the errors of data that cannot be read."""

import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from unet_trainer.config.errors import UserError
from unet_trainer.system import input_files

MAX_BYTES = 2**35  # of a file that is read whole
Stamp = list[int]  # size and times of a file; a list, because JSON gives lists back


class DataError(UserError):
    """The data cannot be trained on; the message names the files and the fix."""


class ReadError(DataError):
    """A file that cannot be read as an image. The message is the reason only; the caller adds the file's name."""


class ShardError(ReadError):
    """A shard that cannot be read or written: the message names it, the reason and the fix."""


@contextlib.contextmanager
def naming(shown: object) -> Iterator[None]:
    """Puts the name of the file before the reason of a ReadError, which becomes a DataError."""
    try:
        yield
    except ReadError as error:
        raise DataError(f"{shown}: {error}") from None


class StoredFile(type(Path())):  # type: ignore[misc] # before Python 3.12 nothing can be derived from Path itself
    """A file in a shard, where a Path is one on the disk: it has a path below that of its shard,
    data/cells-000000.tar/cell_17.png, and is read by its store, which sets these fields."""

    store: Any  # data.shard_store.ShardStore
    shown: str  # as messages name it: a path would turn the // of a URL into a /
    stamp: Stamp  # differs where the content does
    facts: Mapping[str, Any] | None  # of an image or of a mask, as the scan caches them
    member: Any  # its shard's name, and where it lies in it


def open_file(path: Path) -> BinaryIO:
    """For reading. Raises ReadError."""
    if isinstance(path, StoredFile):
        return io.BytesIO(read_bytes(path))
    try:
        return input_files.open_file(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise ReadError(f"a link to {path.readlink()}, which does not exist") from None
        raise ReadError(error.strerror or str(error)) from None


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises ReadError, also where there is none."""
    if isinstance(path, StoredFile):
        data = path.store.read(path)
    else:
        with open_file(path) as file:
            try:
                data = input_files.read_rest(file, MAX_BYTES)
            except OSError as error:
                raise ReadError(error.strerror or str(error)) from None
    if not data:
        raise ReadError("the file is empty")
    return data


def file_stamp(path: Path) -> Stamp | None:
    """What tells the content of a file from another; None where it is not there. The modification time is not enough:
    files from one archive, swapped by renaming, share it."""
    if isinstance(path, StoredFile):
        return path.stamp
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return None


def shown_path(path: Path) -> str:
    """As messages name a file."""
    return path.shown if isinstance(path, StoredFile) else str(path)


def is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # the name is too long, or holds a NUL
        return isinstance(path, StoredFile) or path.is_file()
    return False


def content_digest(data: bytes | memoryview) -> str:
    """The same for two files only if their bytes are the same."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
