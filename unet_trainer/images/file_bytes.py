"""The bytes of a file of a dataset, on a disk or in an open shard; and the errors of data that cannot be read."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from unet_trainer.config.errors import UserError
from unet_trainer.shards.shard_store import StoredFile, find_member
from unet_trainer.shards.tar_files import ShardError

Stamp = list[int]  # size and times of a file; a list, because JSON gives lists back


class DataError(UserError):
    """The data cannot be trained on; the message names the files and the fix."""


class ReadError(DataError):
    """A file that cannot be read as an image. The message is the reason only; the caller adds the file's name."""


def read_bytes(path: Path) -> bytes:
    return read_with_stamp(path)[0]


def read_with_stamp(path: Path) -> tuple[bytes, Stamp]:
    """The content of a file, and its stamp from when it was opened. Raises ReadError."""
    if (stored := find_member(path)) is not None:
        return _read_member(stored), stored.stamp
    try:
        with open_file(path) as file:
            stamp = as_stamp(os.fstat(file.fileno()))
            data = file.read()
    except OSError as error:
        raise ReadError(error.strerror or str(error)) from None
    except MemoryError:
        raise ReadError("there is not enough memory to read it") from None
    if not data:
        raise ReadError("the file is empty")
    return data, stamp


def _read_member(stored: StoredFile) -> bytes:
    try:
        data = stored.read()
    except ShardError as error:
        raise ReadError(str(error)) from None
    if not data:
        raise ReadError("the file is empty")
    return data


def file_stamp(path: Path) -> Stamp | None:
    """Size and times of a file, or what tells a file in a shard from another; None where it is not there."""
    if (stored := find_member(path)) is not None:
        return stored.stamp
    try:
        return as_stamp(path.stat())
    except (OSError, ValueError):
        return None


def shown_path(path: Path) -> str:
    """As messages name a file: a path would turn the // of a URL into a /."""
    stored = find_member(path)
    return str(path) if stored is None else stored.place


def is_file(path: Path) -> bool:
    """Whether there is such a file, on the disk or in an open shard."""
    try:
        return find_member(path) is not None or path.is_file()
    except (OSError, ValueError):  # the name is too long, or holds a NUL
        return False


def as_stamp(status: os.stat_result) -> Stamp:
    """The modification time is not enough: files from one archive, swapped by renaming, share it."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def content_digest(data: bytes) -> str:
    """The same for two files only if their bytes are the same."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_file(path: Path) -> BinaryIO:
    """For reading. A pipe would be waited for for ever, and a device may never end: neither is opened. Raises ReadError."""
    if (stored := find_member(path)) is not None:
        return io.BytesIO(_read_member(stored))
    try:
        # Unbuffered, for fewer system calls: threads wait for the GIL after each.
        file = open(path, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115 # Path.open takes no opener
    except OSError as error:
        raise ReadError(error.strerror or str(error)) from None
    except ValueError:
        raise ReadError("its name holds a NUL") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ReadError("a pipe, a socket or a device; need a file")
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
