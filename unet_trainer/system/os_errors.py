"""Errors of the operating system as sentences: why it failed, and what to do. No other module interprets error numbers.

An error of the machine (permission, room, limits, a failing disk) is the user's to mend and is shown as one sentence.
Any other OSError, such as a missing file that nobody named, is a bug and keeps its traceback.
"""

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
ADVICE = {
    errno.EACCES: "",
    errno.EPERM: "",
    errno.ENAMETOOLONG: "",
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
NO_TEMPORARY_FOLDER = "No usable temporary directory"  # as Python says it
NO_THREAD = "can't start new thread"


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine is the cause, so that a sentence helps more than a traceback."""
    if isinstance(error, OSError):
        return error.errno in ADVICE or NO_TEMPORARY_FOLDER in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_THREAD in str(error))


def explain(error: BaseException, path: Path | None = None) -> tuple[str, str]:
    """Why it failed, in the system's own words where they say it, and what to do, where the reason does not say that.
    `path`: what was to be written."""
    if NO_TEMPORARY_FOLDER in str(error):
        return "there is no folder for temporary files that can be written to", "name one: TMPDIR=FOLDER"
    number = error.errno or 0 if isinstance(error, OSError) else errno.EAGAIN if NO_THREAD in str(error) else 0
    number = errno.ENOMEM if isinstance(error, MemoryError) else number
    if number == errno.ENOSPC and _lacks_inodes(path or Path(named_file(error) or os.curdir)):
        return "No inodes left on device: it has room, but for no more files", "delete files there, however small"
    reason = getattr(error, "strerror", None) or str(error) or os.strerror(number)
    if number == errno.EMFILE:
        reason += _limit("RLIMIT_NOFILE", "ulimit -n")
    if number == errno.EAGAIN:
        reason = f"no more processes or threads may be started{_limit('RLIMIT_NPROC', 'ulimit -u')}"
    if number == errno.EEXIST:  # not in ADVICE: where nobody expects it, it is a fault of the program
        return reason, "it is no folder; name another"
    return reason, ADVICE.get(number, "")


def with_advice(error: BaseException, path: Path | None = None) -> str:
    return "; ".join(filter(None, explain(error, path)))


def sentence(error: BaseException, path: Path | None = None) -> str:
    """The file, the reason and what to do."""
    return ": ".join(filter(None, (named_file(error), with_advice(error, path))))


def named_file(error: BaseException) -> str:
    """The file that the error is about; of a rename, the one that it was to become."""
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def cannot(where: str, what: str, error: OSError, path: Path | None = None) -> UserError:
    """cannot("--json: report.json", "be written", error): the message, for exit code 2."""
    why, todo = explain(error, path)
    return UserError("; ".join(filter(None, (f"{where} cannot {what} ({why})", todo))))


def _lacks_inodes(path: Path) -> bool:
    """Whether a disk that takes no more files still has room: deleting large files would not help."""
    for place in (path, *path.parents) if hasattr(os, "statvfs") else ():
        with contextlib.suppress(OSError, ValueError):
            disk = os.statvfs(place)
            return disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0
    return False


def _limit(name: str, command: str) -> str:
    soft = resource.getrlimit(getattr(resource, name))[0] if hasattr(resource, name) else -1
    return "" if soft < 0 or soft == resource.RLIM_INFINITY else f" ({command} is {soft})"
