"""Writes a file completely or not at all: a reader, or a crash at any moment, finds the old content or the new.

Names of our own within a folder: a link that stands there is replaced, never written through, and a device or pipe is refused.
For a path that the user names, see output_files.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # a link could lead out of a run's folder
BUFFER_BYTES = 2**16  # of a file that is written in pieces
# Temporary files, which a crash may leave behind: .last.pt.k2j3h4_a.tmp and, of a hard link, .previous.pt.1234.tmp
DRAFT = re.compile(r"\.(?P<name>.+)\.(?:[a-z0-9_]{8}|\d+|\d+-\d+)\.tmp")
_numbers = itertools.count()


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    verify: Callable[[Path], object] | None = None,
    previous: Path | None = None,
) -> None:
    """Temporary file in the same folder, flush, fsync, rename, fsync of the folder.

    `verify` is called with the finished draft and raises if it is bad. `previous` then gets the old content: at every
    instant one of the two names, and nearly always both, holds a complete file. An OSError names `path`, not the draft.
    """
    with _naming(path):
        refuse_special(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        _write_draft(path, handle, Path(name), write, verify, previous)


def _write_draft(
    path: Path,
    handle: int,
    draft: Path,
    write: Callable[[BinaryIO], object],
    verify: Callable[[Path], object] | None,
    previous: Path | None,
) -> None:
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        if verify is not None:
            verify(draft)
        if previous is not None and path.exists():
            _keep_previous(path, previous)
        draft.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A draft's name means nothing to the user: an error about one names the file that it was to become."""
    try:
        yield
    except OSError as error:
        if error.strerror is None or type(error) not in (OSError, *OSError.__subclasses__()):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def refuse_special(path: Path) -> None:
    """Raises OSError for a device, a pipe or a socket: a rename would destroy it. A link is not followed, but replaced."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.ENOTSUP, "it is a device, a pipe or a socket, which is not replaced", str(path))


def make_own_folder(folder: Path) -> None:
    """A folder of our own naming within another: one that is a link could lead out of it, and raises OSError."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"it is a link to {folder.readlink()}", str(folder))
    folder.mkdir(exist_ok=True)


def write_bytes_atomically(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def write_text_atomically(path: Path, text: str) -> None:
    """In UTF-8. Names of files that are not UTF-8 are written as the bytes that they are."""
    write_bytes_atomically(path, text.encode("utf-8", "surrogateescape"))


def open_to_append(path: Path) -> int:
    """Not through a link, which could lead out of a run's folder."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | NO_FOLLOW, 0o644)


class Draft:
    """A file that is written piece by piece under a temporary name beside its own, until `keep` gives it that name.

    Nothing waits for the disk: after a power failure, unlike after a crash of the program, the file may be damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft: Path | None = path.with_name(f"{_draft_start(path, os.getpid())}{next(_numbers)}.tmp")
        with _naming(path):
            refuse_special(path)
            self.file: BinaryIO = self.draft.open("xb", BUFFER_BYTES)

    def keep(self) -> None:
        assert self.draft is not None
        with _naming(self.path):
            self.file.close()
            self.draft.replace(self.path)
        self.draft = None

    def discard(self) -> None:
        """Does nothing after `keep`."""
        if self.draft is not None:
            with contextlib.suppress(OSError):  # a full disk: the last bytes cannot be written
                self.file.close()
            self.draft.unlink(missing_ok=True)
            self.draft = None


def discard_drafts(path: Path, process: int) -> None:
    """Deletes the drafts of one file that a killed process left behind."""
    for draft in path.parent.glob(f"{glob.escape(_draft_start(path, process))}*.tmp"):
        draft.unlink(missing_ok=True)


def _draft_start(path: Path, process: int) -> str:
    return f".{path.name[:200]}.{process}-"


def delete_drafts(folder: Path, names: Iterable[str]) -> int:
    """Deletes the temporary files that killed writers of these names (* for any text) left behind; returns how many."""
    patterns, count = list(names), 0
    for path in folder.iterdir():
        draft = DRAFT.fullmatch(path.name)
        if draft is None or not any(fnmatch.fnmatchcase(draft["name"], pattern) for pattern in patterns):
            continue
        if stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)
            count += 1
    return count


def _keep_previous(path: Path, previous: Path) -> None:
    """Gives the old content its second name by a hard link, so that the first name is never missing."""
    link = path.parent / f".{previous.name}.{os.getpid()}.tmp"
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # a file system without hard links
        path.replace(previous)
    else:
        link.replace(previous)
        link.unlink(missing_ok=True)  # renaming one name of a file to another of its names does nothing


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
