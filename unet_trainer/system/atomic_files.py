"""Writes a file completely or not at all: a reader, or a crash at any moment, finds the old content or the new.

A link in its place is replaced, never written through; devices and pipes are refused. A path that the user names
(write_output) may be a link, which is followed, or standard output, and replaces a file of its kind alone.
"""

import contextlib
import errno
import fnmatch
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unet_trainer.config.errors import UserError
from unet_trainer.system.input_files import NO_FOLLOW, NOT_A_FILE, open_file
from unet_trainer.system.os_errors import cannot

ABANDONED_SECONDS = 3600.0  # a draft that nobody has written to for as long was left by a killed process
BUFFER_BYTES = 2**16  # of a file that is written in pieces
DRAFT = re.compile(r"\.(?P<name>.+)\.(?:[a-z0-9_]{8}|\d+-\d+)\.tmp")  # .last.pt.1234-5678.tmp, .upload.k2j3h4_a.tmp
STANDARD_OUTPUT = ("-", "/dev/stdout")


@contextlib.contextmanager
def atomic_open(
    path: Path, verify: Callable[[Path], object] | None = None, previous: Path | None = None
) -> Iterator[BinaryIO]:
    """A file to write to: a draft in the same folder; at the end flush, fsync, rename, fsync of the folder.

    `verify` gets the finished draft and raises if it is bad. `previous` then gets the old content: at every instant one
    of the two names holds a complete file. An OSError names `path`, not the draft."""
    draft = Draft(path)
    try:
        with _naming(path):
            yield draft.file
            draft.file.flush()
            os.fsync(draft.file.fileno())
            draft.file.close()
            if verify is not None:
                verify(draft.draft)
            if previous is not None and path.exists():
                path.replace(previous)
            draft.keep()
            if os.name != "nt":  # folders cannot be opened there
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
    finally:
        draft.discard()


def write_bytes_atomically(path: Path, content: bytes) -> None:
    with atomic_open(path) as file:
        file.write(content)


def write_text_atomically(path: Path, text: str) -> None:
    """In UTF-8; names of files that are not UTF-8 as their bytes."""
    write_bytes_atomically(path, text.encode("utf-8", "surrogateescape"))


class Draft:
    """A file that is written piece by piece under a temporary name until `keep`. Nothing waits for the disk: it may be
    damaged after a power failure, not after a crash of the program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft = path.with_name(f".{path.name[:200]}.{os.getpid()}-{time.time_ns()}.tmp")
        self.is_kept = False
        with _naming(path):
            if path.exists() and not path.is_symlink() and not path.is_file():  # a rename would destroy it
                raise OSError(errno.ENOTSUP, "it is a folder" if path.is_dir() else NOT_A_FILE, str(path))
            self.file: BinaryIO = self.draft.open("xb", BUFFER_BYTES)

    def keep(self) -> None:
        with _naming(self.path):
            self.file.close()
            self.draft.replace(self.path)
        self.is_kept = True

    def discard(self) -> None:
        """Does nothing after `keep`."""
        if not self.is_kept:
            with contextlib.suppress(OSError):  # a full disk: the last bytes cannot be written
                self.file.close()
            self.draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error about a draft names the file that it was to become."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def delete_drafts(folder: Path, names: Iterable[str], min_age: float = -math.inf) -> None:
    """Deletes the drafts that killed writers of these names (* for any text) left behind. `min_age`: seconds since a
    file was written to, where other processes may be writing."""
    patterns = list(names)
    for path in folder.iterdir():
        draft = DRAFT.fullmatch(path.name)
        if draft is not None and any(fnmatch.fnmatchcase(draft["name"], pattern) for pattern in patterns):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if path.is_file() and not path.is_symlink() and time.time() - path.stat().st_mtime >= min_age:
                    path.unlink()


def make_own_folder(folder: Path) -> None:
    """A folder of our own naming within another: one that is a link could lead out of it, and raises OSError."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"it is a link to {folder.readlink()}", str(folder))
    folder.mkdir(exist_ok=True)


def open_to_append(path: Path) -> int:
    """Not through a link, which could lead out of a run's folder; nor is the reader of a pipe waited for."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0), 0o644)


class Kind(NamedTuple):
    """Files that may replace each other."""

    name: str
    start: bytes  # a regular expression that the first bytes of each match


HTML_PAGE = Kind("HTML page", rb"(?i)\s*<!doctype html")
CHECK_JSON = Kind("JSON of check", rb'\{\s*"ok": (true|false)')
START_BYTES = 1024  # that a kind is recognised by


@contextlib.contextmanager
def _refusing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot(f"{option}: {path}", "be written", error, path) from None


def check_replaceable(option: str, path: Path, kind: Kind | None) -> None:
    """Raises UserError where a file of another kind would be lost (None: any file), or where a link is. For a name that
    the user chose, final_path comes first."""
    with _refusing(option, path), contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            raise UserError(f"{option}: {path} is a link to {path.readlink()}; remove it, or choose another place")
        with open_file(path) as file:
            if kind is None:
                raise UserError(f"{option}: {path} exists; name another file, or remove it")
            if re.match(kind.start, file.read(START_BYTES), re.DOTALL) is None:
                raise UserError(f"{option}: {path} is there and is no {kind.name}; choose another folder or name")


def check_output(option: str, path: Path, kind: Kind | None) -> None:
    """Before minutes are spent: raises UserError where `write_output` would, and where check_replaceable does."""
    if str(path) in STANDARD_OUTPUT:
        return
    folder = final_path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option}: there is no folder {folder} that can be written to")
    check_replaceable(option, final_path(path), kind)


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a text where `option` (--json) says. Raises UserError, which names both."""
    with _refusing(option, path):
        if str(path) in STANDARD_OUTPUT:
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))  # whatever the encoding of the terminal
        else:
            write_text_atomically(final_path(path), text)


def final_path(path: Path) -> Path:
    """Where links lead."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
