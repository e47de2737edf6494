"""Errors of the operating system as sentences: why it failed, and what to do. No other module interprets error numbers.

An error of the machine (permission, room, limits, a failing disk) is the user's to mend and is shown as one sentence. Any other
OSError, such as a missing file that nobody named, is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from unet_trainer.config.errors import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
PERMISSION = (errno.EACCES, errno.EPERM)
PROCESS_LIMIT = "no more processes or threads may be started"
NO_TEMPORARY_FOLDER = "there is no folder for temporary files that can be written to"
ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within your quota",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.EMFILE: "allow more with ulimit -n 1024",
    errno.ENFILE: "end other programs",
    errno.EAGAIN: "allow more with ulimit -u, or end other programs",
    errno.EIO: "the disk or its connection fails; look at the system's log",
    errno.ENOTDIR: "a part of that path is a file, not a folder",
    errno.ELOOP: "a link there leads elsewhere or back to itself",
    errno.ENOMEM: "end other programs",
    errno.ESTALE: "the network disk was mounted anew; start again",
    errno.ENOTCONN: "the network disk is not connected",
    errno.ETXTBSY: "another program runs that file",
    errno.ENXIO: "nobody reads from it",
    errno.EPIPE: "whoever read from it is gone",
    errno.EISDIR: "name a file",
    errno.ENOTSUP: "name a file",
}
OF_THE_MACHINE = frozenset((*ADVICE, *PERMISSION, errno.ENAMETOOLONG))


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine is the cause, so that a sentence helps more than a traceback."""
    if isinstance(error, OSError):
        return error.errno in OF_THE_MACHINE or _lacks_temporary_folder(error)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def reason(error: BaseException, path: Path | None = None) -> str:
    """Why it failed, in the system's own words where they say it. `path`: what was to be written."""
    if not isinstance(error, OSError):
        return PROCESS_LIMIT if is_of_the_machine(error) else str(error)
    if _lacks_temporary_folder(error):
        return NO_TEMPORARY_FOLDER
    if lacks_inodes(error, path):
        return "No inodes left on device: it has room, but for no more files"
    if error.errno == errno.EMFILE:
        return f"{os.strerror(errno.EMFILE)}{_limit('RLIMIT_NOFILE', 'ulimit -n')}"
    if error.errno == errno.EAGAIN:
        return f"{PROCESS_LIMIT}{_limit('RLIMIT_NPROC', 'ulimit -u')}"
    return error.strerror or str(error)


def advice(error: BaseException, path: Path | None = None) -> str:
    """What to do about it; empty where the reason says all."""
    if not isinstance(error, OSError):
        return ADVICE[errno.EAGAIN] if is_of_the_machine(error) else ""
    if _lacks_temporary_folder(error):
        return "name one: TMPDIR=FOLDER"
    if lacks_inodes(error, path):
        return "delete files there, however small"
    return ADVICE.get(error.errno or 0, "")


def sentence(error: BaseException, path: Path | None = None) -> str:
    """The file, the reason and what to do."""
    where = f"{shown}: " if (shown := named_file(error)) else ""
    return f"{where}{with_advice(error, path)}"


def with_advice(error: BaseException, path: Path | None = None) -> str:
    todo = advice(error, path)
    return reason(error, path) + (f"; {todo}" if todo else "")


def named_file(error: BaseException) -> str:
    """The file that the error is about; of a rename, the one that it was to become."""
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def cannot(where: str, what: str, error: OSError, path: Path | None = None) -> UserError:
    """cannot("--json: report.json", "be written", error): the message, for exit code 2."""
    todo = advice(error, path)
    return UserError(f"{where} cannot {what} ({reason(error, path)})" + (f"; {todo}" if todo else ""))


def lacks_inodes(error: OSError, path: Path | None = None) -> bool:
    """Whether a disk that takes no more files still has room: deleting large files would not help."""
    if error.errno != errno.ENOSPC or not hasattr(os, "statvfs"):
        return False
    place = path or (Path(name) if (name := named_file(error)) else None)
    while place is not None:
        with contextlib.suppress(OSError, ValueError):
            disk = os.statvfs(place)
            return disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0
        place = place.parent if place.parent != place else None
    return False


def _lacks_temporary_folder(error: OSError) -> bool:
    return "No usable temporary directory" in str(error)


def _limit(name: str, command: str) -> str:
    if resource is None or not hasattr(resource, name):
        return ""
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "" if soft == resource.RLIM_INFINITY else f" ({command} is {soft})"
