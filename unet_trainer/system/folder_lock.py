"""A lock on a run's folder: one process at a time trains in it. The system releases it when the process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from unet_trainer.config.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
WAIT_SECONDS = 30  # a run that was asked to end may still be saving
POLL_SECONDS = 0.2
_held: set[Path] = set()  # by this process


class FolderLock:
    """Held from `acquire` until the end of the block. Forked workers do not hold it: POSIX locks belong to one process."""

    def __init__(self) -> None:
        self.path = Path()
        self.file: TextIO | None = None
        self.is_held = False

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_held:
            _held.discard(self.path.absolute())
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self.file is not None:
            self.file.close()

    def acquire(self, folder: Path, notify: Callable[[str], object]) -> None:
        """Waits up to WAIT_SECONDS for another holder, then raises UserError. Does nothing where locks are unsupported."""
        if self.file is not None or fcntl is None:
            return
        self.path = folder / NAME
        asked, has_notified = time.monotonic(), False
        while True:
            try:
                self.is_held = self._try_lock()
            except OSError:  # no locks on this file system, or the folder cannot be written to, which the run reports itself
                return
            if self.is_held:
                _held.add(self.path.absolute())
                return
            owner = self._owner()
            if time.monotonic() - asked > WAIT_SECONDS:
                raise UserError(f"{folder} is in use: {owner} trains there; end it first, or choose another run_name")
            if not has_notified:
                notify(f"{folder} is in use: {owner} trains there; waiting for its end, {WAIT_SECONDS} s at most")
                has_notified = True
            time.sleep(POLL_SECONDS)

    def _try_lock(self) -> bool:
        if self.file is not None:
            self.file.close()
        self.file = self.path.open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        if not _is_same(self.file, self.path):  # the previous holder has deleted the file meanwhile
            return False
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()
        return True

    def _owner(self) -> str:
        assert self.file is not None
        self.file.seek(0)
        return self.file.read().strip() or "another process"


def is_locked_here(folder: Path) -> bool:
    """Whether this process holds the folder."""
    return (folder / NAME).absolute() in _held


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder: this one or another. Where locks are unsupported it looks as if none did."""
    if is_locked_here(folder):  # the file must not be opened: closing it would release this process's lock
        return True
    path = folder / NAME
    if fcntl is None:
        return False
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _is_same(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
