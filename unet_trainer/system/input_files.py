"""Every file that is read is opened here: a regular file, without waiting as for a pipe, and read up to a limit.
Imports nothing of this project, so that every package may use it.
"""

import errno
import io
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

MAX_BYTES = 2**30  # of a text or a JSON file, unless its reader allows fewer
NOT_A_FILE = "a pipe, a socket or a device; need a file"
FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
NO_FILE = (errno.EISDIR, errno.ENOTSUP)  # the error of a folder, and of what is NOT_A_FILE
ZIP_START = b"PK\x03\x04"
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def open_handle(path: Path | str, follow: bool = True) -> int:
    """For reading; not inherited by other programs. `follow`: whether a link may lead to the file. Raises OSError."""
    try:
        handle = os.open(path, FLAGS if follow else FLAGS | NO_FOLLOW)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL", str(path)) from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOTSUP
    raise OSError(number, os.strerror(number) if stat.S_ISDIR(mode) else NOT_A_FILE, str(path))


def open_file(path: Path | str, follow: bool = True) -> BinaryIO:
    """As open_handle. Unbuffered, for fewer system calls: threads wait for the GIL after each."""
    file = io.FileIO(open_handle(path, follow))
    file.name = os.fspath(path)
    return cast(BinaryIO, file)


def read_bytes(path: Path | str, max_bytes: int = MAX_BYTES, follow: bool = True) -> bytes:
    """The whole content. Raises OSError, also for a file of more bytes."""
    with open_file(path, follow) as file:
        return read_rest(file, max_bytes)


def read_rest(file: BinaryIO, max_bytes: int) -> bytes:
    """As read_bytes, of a file that is open at its beginning."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"{size / 1e6:.1f} MB; need at most {max_bytes / 1e6:.1f}", file.name)
    return file.read()


def read_text(path: Path | str, max_bytes: int = MAX_BYTES, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Line breaks as they stand in the file. Raises OSError, and UnicodeDecodeError, which is a ValueError."""
    return read_bytes(path, max_bytes).decode(encoding, errors)


def read_json(path: Path | str, max_bytes: int = MAX_BYTES, follow: bool = True) -> Any:
    """Raises OSError, and ValueError for what is no JSON."""
    return parse_json(read_bytes(path, max_bytes, follow))


def parse_json(content: bytes | str) -> Any:
    """Raises ValueError, whatever is wrong with it."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_zip(file: BinaryIO) -> list[str]:
    """The names in an archive that takes no more memory than its file: nothing is compressed, nothing is there twice.
    Raises ValueError, and BadZipFile for what is no archive."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if is_compressed or sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise ValueError("it unpacks to more than it is")
    names = [entry.filename for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError("it holds two entries of one name")
    return names
