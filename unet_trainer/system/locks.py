"""Locks of files, which the system releases when the process ends: one run at a time trains in a folder (FolderLock),
and what no process uses may be deleted. filelock's own FileLock cannot say who holds it.
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
from unet_trainer.system.input_files import NO_FOLLOW

NAME = ".lock"
DRAFT_LOCK = "lock"  # a file in each draft_folder, locked by the process that fills it
WAIT_SECONDS = 30  # a run that was asked to end may still be saving
POLL_SECONDS = 0.2
MAX_OWNER_BYTES = 300
OWNER_START = 1  # Windows lets no other process read the byte that is locked, the first one

# Folders that runs of this process hold. A network disk may give a second run of the process the same lock.
_held_here: set[Path] = set()


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Held from `acquire` until the end of the block. Where locks are unsupported, it holds none."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.handle: int | None = None  # of the locked file

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            _held_here.discard(self.folder)
        if self.handle is not None and self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / NAME).unlink()
            with contextlib.suppress(OSError):  # forked workers have the same open file, and may live longer
                unlock_descriptor(self.handle)
            os.close(self.handle)
            self.handle = None

    def acquire(self, folder: Path, notify: Callable[[str], object]) -> None:
        """Waits up to WAIT_SECONDS for another holder, then raises UserError."""
        if self.folder is not None:
            return
        started, message = time.monotonic(), ""
        with contextlib.suppress(OSError):  # no locks on this file system; or an unusable folder, reported by the run
            while (owner := self._lock(folder)) is not None:
                if not message:
                    message = f"{folder} is in use: {owner} trains there"
                    notify(f"{message}; waiting for its end, {WAIT_SECONDS} s at most")
                elif time.monotonic() > started + WAIT_SECONDS:
                    raise UserError(f"{message}; end it first, or choose another run_name")
                time.sleep(POLL_SECONDS)
        self.folder = folder.resolve()
        _held_here.add(self.folder)

    def _lock(self, folder: Path) -> str | None:
        """None if the file is locked from here on, else its owner. Raises OSError where it cannot be."""
        if is_locked_here(folder):
            return "another run of this process"
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            # Without a link the holder before has deleted it meanwhile.
            if lock_descriptor(handle, blocking=False) and os.fstat(handle).st_nlink:
                with contextlib.suppress(OSError):  # a full disk: the lock is held, without the name of its holder
                    os.ftruncate(handle, 0)
                    os.write(handle, f" process {os.getpid()} on {socket.gethostname()}\n".encode())
                self.handle = handle
                stack.pop_all()
                return None
            os.lseek(handle, OWNER_START, os.SEEK_SET)
            return os.read(handle, MAX_OWNER_BYTES).decode(errors="replace").strip() or "another process"


def is_locked(folder: Path) -> bool:
    """Whether a run trains in the folder. Where locks are unsupported it looks as if none did."""
    with contextlib.suppress(OSError):
        return is_locked_here(folder) or bool(is_in_use(folder / NAME))
    return False


def is_locked_here(folder: Path) -> bool:
    """Whether the run that trains there is one of this process."""
    return folder.resolve() in _held_here


def is_in_use(path: Path) -> bool | None:
    """Whether a process has locked the file; None where files cannot be locked. Raises OSError."""
    handle = os.open(path, os.O_RDWR | NO_FOLLOW)  # a network disk locks only what may be written to
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
        with contextlib.suppress(OSError):  # no locks there; the system releases one when the process dies
            lock_descriptor(file.fileno(), blocking=False)
        yield Path(name)
