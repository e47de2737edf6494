"""One process at a time trains in a run's folder. The system frees it when the process ends, however it ends."""

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

from unet_trainer.config import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
PATIENCE_SECONDS = 30  # a run that was asked to end may still be saving
POLL_SECONDS = 0.2


class FolderLock:
    """Held from `take` until the end of the block. Forked workers do not hold it: it is this process's own."""

    def __init__(self) -> None:
        self.path = Path()
        self.file: TextIO | None = None
        self.is_mine = False

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_mine:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self.file is not None:
            self.file.close()

    def take(self, folder: Path, tell: Callable[[str], object]) -> None:
        """Waits a little for the process that has it; raises UserError if it stays. Where nothing can be locked, goes on."""
        if self.file is not None or fcntl is None:
            return
        self.path = folder / NAME
        asked, has_told = time.monotonic(), False
        while True:
            try:
                self.is_mine = self._try()
            except OSError:  # a file system without locks, or a folder that cannot be written to: told when the run opens it
                return
            if self.is_mine:
                return
            owner = self._owner()
            if time.monotonic() - asked > PATIENCE_SECONDS:
                raise UserError(f"{folder} is in use: {owner} trains there; end it first, or choose another run_name")
            if not has_told:
                tell(f"{folder} is in use: {owner} trains there; waiting for its end, {PATIENCE_SECONDS} s at most")
                has_told = True
            time.sleep(POLL_SECONDS)

    def _try(self) -> bool:
        if self.file is not None:
            self.file.close()
        self.file = self.path.open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        if not _is_same(self.file, self.path):  # the one before took the file with it in this very moment
            return False
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()
        return True

    def _owner(self) -> str:
        assert self.file is not None
        self.file.seek(0)
        return self.file.read().strip() or "another process"


def _is_same(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
