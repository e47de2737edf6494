"""Errors of the operating system as sentences: why it failed, and what to do. An error of the machine (permission,
room, limits, a failing disk) is shown as one; any other, such as a missing file, is a bug and keeps its traceback.
"""

import contextlib
import errno
import os
from pathlib import Path

from unet_trainer.config.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ADVICE = {  # where the system's own words do not say what to do
    errno.ENOSPC: "make room",
    errno.EEXIST: "it is not a folder; name another",
    errno.ENOTDIR: "a part of that path is a file, not a folder",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.EMFILE: "allow more with ulimit -n 4096",
    errno.EAGAIN: "allow more processes with ulimit -u, or end other programs",
    errno.ENOMEM: "end other programs",
    errno.EIO: "the disk or its connection fails; look at the system's log",
}
OF_A_BUG = (None, errno.ENOENT, errno.EEXIST, errno.EINVAL, errno.EBADF)  # where nobody expects it


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine is the cause, so that a sentence helps more than a traceback."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in OF_A_BUG)


def explain(error: BaseException, path: Path | None = None) -> tuple[str, str]:
    """Why it failed, and what to do where the reason does not say that. `path`: what was to be written."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None) or 0
    if number == errno.ENOSPC and _lacks_inodes(path or Path(named_file(error) or os.curdir)):
        return "No inodes left on device: it has room, but for no more files", "delete files there, however small"
    return getattr(error, "strerror", None) or str(error) or os.strerror(number), ADVICE.get(number, "")


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
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Windows has no statvfs
        disk = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
        return disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0
    return False
