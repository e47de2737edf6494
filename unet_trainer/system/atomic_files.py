"""Writes a file completely or not at all: a reader, or a crash at any moment, finds the old content or the new."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

DRAFTS = ".*.*.tmp"  # temporary files, which a crash may leave behind
BUFFER_BYTES = 2**16  # of a file that is written in pieces
_numbers = itertools.count()


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    verify: Callable[[Path], object] | None = None,
    previous: Path | None = None,
) -> None:
    """Temporary file in the same folder, flush, fsync, rename, fsync of the folder.

    `verify` is called with the finished draft and raises if it is bad. `previous` then gets the old content: at every
    instant one of the two names, and nearly always both, holds a complete file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    draft = Path(name)
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
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise


def write_bytes_atomically(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def write_text_atomically(path: Path, text: str) -> None:
    """In UTF-8. Names of files that are not UTF-8 are written as the bytes that they are."""
    write_bytes_atomically(path, text.encode("utf-8", "surrogateescape"))


class Draft:
    """A file that is written piece by piece under a temporary name beside its own, until `keep` gives it that name.

    Nothing waits for the disk: after a power failure, unlike after a crash of the program, the file may be damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft: Path | None = path.with_name(f".{path.name[:200]}.{os.getpid()}-{next(_numbers)}.tmp")
        self.file: BinaryIO = self.draft.open("xb", BUFFER_BYTES)

    def keep(self) -> None:
        assert self.draft is not None
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


def delete_drafts(folder: Path) -> int:
    """Deletes the temporary files of writers that were killed; returns how many."""
    drafts = [path for path in folder.glob(DRAFTS) if path.is_file()]
    for draft in drafts:
        draft.unlink(missing_ok=True)
    return len(drafts)


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
