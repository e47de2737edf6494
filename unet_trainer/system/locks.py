"""Locks of files, which the system releases when the process ends: one run at a time trains in a folder (FolderLock),
and what no process uses may be deleted. filelock's FileLock follows no folder that is renamed, and may fall back to a
file that a killed process leaves behind.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from unet_trainer.config.errors import UserError
from unet_trainer.system.input_files import NO_FOLLOW, open_handle

NAME = ".lock"
DRAFT_LOCK = "lock"  # a file in each draft_folder, locked by the process that fills it
WAIT_SECONDS = 30  # a run that was asked to end may still be saving
POLL_SECONDS = 0.2
MAX_OWNER_BYTES = 300
OWNER_START = 1  # Windows lets no other process read the byte that is locked, the first one

FolderId = tuple[int, int]  # device, inode
# Folders that runs of this process hold. A network disk may give a second run of the process the same lock.
_held_here: set[FolderId] = set()


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Held from `acquire` until the end of the block. Where locks are unsupported, it holds none."""

    def __init__(self) -> None:
        self.path = Path()
        self.folder_id: FolderId | None = None  # of the folder that was locked, whatever bears its name later
        self.handle: int | None = None  # of the locked file

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            with contextlib.suppress(OSError):
                if self._is_at_path(self.handle):
                    self.path.unlink()
            for end in (unlock_descriptor, os.close):  # forked workers have the same open file, and may live longer
                with contextlib.suppress(OSError):
                    end(self.handle)
            self.handle = None
        if self.folder_id is not None:
            _held_here.discard(self.folder_id)

    def acquire(self, folder: Path, notify: Callable[[str], object]) -> None:
        """Waits up to WAIT_SECONDS for another holder, then raises UserError."""
        if self.folder_id is not None:
            return
        self.path, started, message = folder / NAME, time.monotonic(), ""
        with contextlib.suppress(OSError):  # no locks on this file system; or an unusable folder, reported by the run
            while (owner := self._lock()) is not None:
                if not message:
                    message = f"{folder} is in use: {owner} trains there"
                    notify(f"{message}; waiting for its end, {WAIT_SECONDS} s at most")
                elif time.monotonic() > started + WAIT_SECONDS:
                    raise UserError(f"{message}; end it first, or choose another run_name")
                time.sleep(POLL_SECONDS)
        self.folder_id = id_of(folder)
        if self.folder_id is not None:
            _held_here.add(self.folder_id)

    def is_ours(self) -> bool:
        """Whether the folder is still the one that was locked: not made anew, or moved away."""
        return self.folder_id is None or id_of(self.path.parent) == self.folder_id

    def _is_at_path(self, handle: int) -> bool:
        return os.path.samestat(os.fstat(handle), self.path.lstat())

    def _lock(self) -> str | None:
        """None if the file is locked from here on, else its owner. Raises OSError where it cannot be."""
        if is_locked_here(self.path.parent):
            return "another run of this process"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            is_free = lock_descriptor(handle, blocking=False)
            if is_free and self._is_at_path(handle):  # else the previous holder has deleted the file meanwhile
                with contextlib.suppress(OSError):  # a full disk: the lock is held, without the name of its holder
                    os.ftruncate(handle, 0)
                    os.write(handle, f" process {os.getpid()} on {socket.gethostname()}\n".encode())
                self.handle = handle
                stack.pop_all()
                return None
            os.lseek(handle, OWNER_START, os.SEEK_SET)
            owner = b"" if is_free else os.read(handle, MAX_OWNER_BYTES)
        return owner.decode(errors="replace").strip() or "another process"


def is_locked(folder: Path) -> bool:
    """Whether a run trains in the folder. Where locks are unsupported it looks as if none did."""
    with contextlib.suppress(OSError):
        return is_locked_here(folder) or bool(is_in_use(folder / NAME))
    return False


def is_locked_here(folder: Path) -> bool:
    """Whether the run that trains there is one of this process."""
    return id_of(folder) in _held_here


def lock_file(handle: int) -> None:
    """Marks an open file as in use until it is closed, where its file system has locks."""
    with contextlib.suppress(OSError):
        lock_descriptor(handle, blocking=False)


def is_in_use(path: Path) -> bool | None:
    """Whether a process has locked the file; None where files cannot be locked. Raises OSError."""
    try:
        handle = os.open(path, os.O_RDWR | NO_FOLLOW)  # a network disk locks only what may be written to
    except PermissionError:
        handle = open_handle(path, follow=False)
    try:
        return not lock_descriptor(handle, blocking=False)
    except OSError:  # no locks on this file system
        return None
    finally:
        os.close(handle)


@contextlib.contextmanager
def draft_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in which another can be filled before it gets its name; deleted at the end. Those of killed processes
    are deleted too. Raises OSError."""
    for left in parent.glob(f"{prefix}*"):
        if not left.is_symlink() and (left / DRAFT_LOCK).is_file() and is_in_use(left / DRAFT_LOCK) is False:
            shutil.rmtree(left, ignore_errors=True)
    draft = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with draft as name, (Path(name) / DRAFT_LOCK).open("x") as file:
        lock_file(file.fileno())  # released by the system when the process dies
        yield Path(name)


def id_of(folder: Path) -> FolderId | None:
    """Device and inode; None where there is no such folder."""
    with contextlib.suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None
