"""Locks that say that a file is in use, shared by all who use it: what nobody uses may be deleted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_shared(handle: int) -> None:
    """Until it is closed. Deleting an open file would free no space."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_in_use(path: Path) -> bool | None:
    """Whether a process holds it locked; None where files cannot be locked. Raises OSError."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return None
    finally:
        os.close(handle)
    return False
