"""A process that must not outlive the one that started it, however that one ends: a kill leaves no time to end its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping

VARIABLE = "UNET_TRAINER_PARENT"  # in the environment of the child: the number of the process that it ends with
POLL_SECONDS = 1.0


def end_with(parent: int) -> None:
    """Linux kills this process when the thread that forked it ends: a child that hangs would never see that its parent is gone."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def ending_with_this_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that is to end with this process."""
    return {**environment, VARIABLE: str(os.getpid())}


def end_with_parent(is_torchrun: bool = False) -> None:
    """In the child: SIGTERM for itself once its parent is gone. Does nothing in a process that others started, torchrun excepted:
    it puts each process into a session of its own, so that what kills torchrun reaches none of them."""
    parent = os.environ.pop(VARIABLE, "")  # popped: it is not meant for the children of this process
    if is_torchrun:
        parent = str(os.getppid())
    if not parent.isdigit():
        return
    threading.Thread(target=_wait_for, args=(int(parent),), name="parent watch", daemon=True).start()


def _wait_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
