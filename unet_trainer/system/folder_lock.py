"""A lock on a run's folder: one run of one process at a time trains there. The system releases it when the process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import NO_FOLLOW

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
WAIT_SECONDS = 30  # a run that was asked to end may still be saving
POLL_SECONDS = 0.2
MAX_OWNER_BYTES = 300

FolderId = tuple[int, int]  # device, inode
# Folders that runs of this process hold. POSIX locks belong to the process: a second thread would be given the same lock, and
# closing its file would release that of the first.
_held_here: set[FolderId] = set()
_guard = threading.Lock()


class FolderLock:
    """Held from `acquire` until the end of the block. Forked workers do not hold it: POSIX locks belong to one process."""

    def __init__(self) -> None:
        self.folder = Path()
        self.folder_id: FolderId | None = None  # of the folder that was locked, whatever bears its name later
        self.handle: int | None = None
        self.is_held = False

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_held and self.is_same_file():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._close()
        if self.folder_id is not None:
            with _guard:
                _held_here.discard(self.folder_id)

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def acquire(self, folder: Path, notify: Callable[[str], object]) -> None:
        """Waits up to WAIT_SECONDS for another holder, then raises UserError. Where locks are unsupported, it holds none."""
        if self.folder_id is not None:
            return
        self.folder = folder
        asked, has_notified = time.monotonic(), False
        while True:
            owner = self._try_acquire()
            if owner is None:
                return
            if time.monotonic() - asked > WAIT_SECONDS:
                raise UserError(f"{folder} is in use: {owner} trains there; end it first, or choose another run_name")
            if not has_notified:
                notify(f"{folder} is in use: {owner} trains there; waiting for its end, {WAIT_SECONDS} s at most")
                has_notified = True
            time.sleep(POLL_SECONDS)

    def _try_acquire(self) -> str | None:
        """None if the folder is this run's from here on, else who has it."""
        try:
            folder_id = id_of(self.folder)
        except OSError:  # the run says itself that its folder cannot be used
            return None
        with _guard:
            if folder_id in _held_here:
                return "another run of this process"
            _held_here.add(folder_id)
        owner = None
        try:
            owner = self._lock_file()
        except OSError:  # no locks on this file system, or the folder cannot be written to, which the run says itself
            self._close()
        finally:
            if owner is not None:
                with _guard:
                    _held_here.discard(folder_id)
        if owner is None:
            self.folder_id = folder_id
        return owner

    def is_ours(self) -> bool:
        """Whether the folder is still the one that was locked, and no other process has locked it since.

        A folder that was deleted and made anew, or moved away, is not. A lock file that was deleted alone is made again.
        """
        if self.folder_id is None:
            return True
        try:
            if id_of(self.folder) != self.folder_id:
                return False
        except OSError:
            return False
        if not self.is_held or self.is_same_file():
            return True
        try:
            return self._lock_file() is None
        except OSError:  # as in _try_acquire; the folder itself is the same
            return True

    def is_same_file(self) -> bool:
        """Whether the lock file that is held is the one in the folder."""
        try:
            return self.handle is not None and os.path.samestat(os.fstat(self.handle), self.path.lstat())
        except OSError:
            return False

    def _lock_file(self) -> str | None:
        """None if the file is locked from here on, else its owner. Raises OSError where it cannot be."""
        self._close()
        if fcntl is None:
            return None
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_FOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return os.pread(self.handle, MAX_OWNER_BYTES, 0).decode(errors="replace").strip() or "another process"
            raise
        if not self.is_same_file():  # the previous holder has deleted the file meanwhile
            return "another process"
        self.is_held = True
        with contextlib.suppress(OSError):  # a full disk: the lock is held, without the name of its holder
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return None

    def _close(self) -> None:
        handle, self.handle, self.is_held = self.handle, None, False
        if handle is not None:
            with contextlib.suppress(OSError):  # a full disk: what was written last is lost, and told where it matters
                os.close(handle)


def is_locked_here(folder: Path) -> bool:
    """Whether this process holds the folder."""
    try:
        return id_of(folder) in _held_here
    except OSError:
        return False


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


def id_of(folder: Path) -> FolderId:
    status = folder.stat()
    return status.st_dev, status.st_ino
