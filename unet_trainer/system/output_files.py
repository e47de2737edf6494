"""Writes to a path that the user names, as a shell's > would, and never puts a file in place of something that is not a file.

a device, a pipe     is written to; so is what this program's own output goes to (/dev/stdout)
a link               is followed
an ordinary file     is replaced, completely or not at all
a disk (/dev/sda)    is refused: a slip of the pen would destroy all that it holds
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.os_errors import cannot

STANDARD_STREAMS = (1, 2)


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a text where `option` (--json) says. Raises UserError, which names both."""
    try:
        _write(path, text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise cannot(f"{option}: {path}", "be written", error, path) from None


def check_output(option: str, path: Path) -> None:
    """Before minutes are spent: raises UserError where `write_output` would."""
    try:
        status = _status(path)
        if status is not None and _is_written_through(status):
            return
        if status is not None and not stat.S_ISREG(status.st_mode):
            _refuse(path, status)
        folder = final_path(path).parent
        if not folder.is_dir():
            raise UserError(f"{option}: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise cannot(f"{option}: {path}", "be written", error, path) from None


def is_replaceable(path: Path) -> bool:
    """Whether an ordinary file stands there, whose content would be lost."""
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode) and _own_stream(status) is None


def final_path(path: Path) -> Path:
    """Where links lead. Raises OSError for links that lead back to themselves."""
    status = _status(path)
    if status is None and path.is_symlink() and Path(os.path.realpath(path)).is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def _write(path: Path, content: bytes) -> None:
    status = _status(path)
    if status is None or (stat.S_ISREG(status.st_mode) and _own_stream(status) is None):
        write_bytes_atomically(final_path(path), content)
        return
    stream = _own_stream(status)
    if stream is not None:  # at the place where its text stands; a handle of its own would begin at 0
        for text in (sys.stdout, sys.stderr):
            text.flush()
        _write_all(stream, content)
        return
    if not _is_written_through(status):
        _refuse(path, status)
    handle = os.open(path, os.O_WRONLY | os.O_NOCTTY)  # of a pipe: waits for its reader
    try:
        _write_all(handle, content)
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _status(path: Path) -> os.stat_result | None:
    """Of what a link leads to; None where there is nothing yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _own_stream(status: os.stat_result) -> int | None:
    """Standard output or error, if that is what the path means."""
    for number in STANDARD_STREAMS:
        try:
            if os.path.samestat(os.fstat(number), status):
                return number
        except OSError:  # closed
            continue
    return None


def _is_written_through(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode) or _own_stream(status) is not None


def _refuse(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    what = "a disk" if stat.S_ISBLK(status.st_mode) else "no file"
    raise OSError(errno.ENOTSUP, f"it is {what}", str(path))
