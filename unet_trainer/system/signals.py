"""How this process ends and what it was started with: signals, the end of its parent, closed standard streams. Signals
are recorded during training, so that the state can be saved, and raised while a run starts. A second SIGINT never
waits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

from unet_trainer.system.concurrency import SIGNALS, is_writing
from unet_trainer.system.console import EXIT_INTERRUPTED

PARENT_VARIABLE = "UNET_TRAINER_PARENT"  # in the environment of a child: the id of the process that it ends with
PARENT_SECONDS = 1.0  # between checks whether the parent lives
STANDARD_STREAMS = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}
_parent: tuple[int, str] | None = None  # id and name of the process that this one ends with
_skips_teardown = False


class Interrupted(KeyboardInterrupt):
    """Stopped by the signal `signal_number`; the state is saved if there was one."""

    is_told = False  # whether the user has read of it

    def __init__(self, signal_number: int, cause: str = "") -> None:
        """`cause`: what it was by, if not the signal, which this process may have sent itself."""
        if not cause and _parent is not None and os.getppid() != _parent[0]:
            cause = f"the end of {_parent[1]} (was it killed?)"
        super().__init__(cause or signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class Signals:
    """Handles signals while entered; only in the main thread, where Python delivers them."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.is_deferred = False
        self.earlier: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # else nohup set it
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
                    self.earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        self.earlier.clear()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside, signals go to the handlers of before."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, signals are recorded, for `check` to raise: around work that must finish or swallows exceptions."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self.received == signal.SIGINT
        self.received = number
        if not self.is_deferred:
            raise Interrupted(number)
        if is_second:
            raise KeyboardInterrupt

    def is_stopping(self) -> bool:
        return self.received is not None

    def check(self) -> None:
        """Raises Interrupted if a signal was received. Called where the state can be saved."""
        if self.received is not None:
            raise Interrupted(self.received)


def ending_with_this_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that is to end with this process, also when it is killed."""
    return {**environment, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent(is_torchrun: bool = False) -> None:
    """In the child: sends itself SIGTERM once its parent is gone. Does nothing in a process that others started but
    torchrun, which gives each process a session of its own, so that what kills torchrun reaches none of them."""
    global _parent
    parent = os.environ.pop(PARENT_VARIABLE, "")  # popped: it is not meant for the children of this process
    if is_torchrun:
        parent = str(os.getppid())
    if parent.isdigit():
        _parent = int(parent), "torchrun" if is_torchrun else "the process that started it"
        threading.Thread(target=_wait_for_parent, args=(int(parent),), name="parent watch", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def open_closed_streams() -> None:
    """Leads standard streams that were closed (>&-) to os.devnull. The next files that are opened would get their
    numbers: what a library prints would end up in a checkpoint."""
    for name, (number, mode) in STANDARD_STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115


def skip_teardown() -> None:
    """The interpreter's end could wait for ever: another process of the job is gone."""
    global _skips_teardown
    _skips_teardown = True


def exit_process(code: int) -> NoReturn:
    """Ends the process; if a save is under way, as after a second Ctrl-C, without tearing the interpreter down."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))  # else Python ends with a traceback
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe: the interpreter would flush again, and exit with another code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if is_writing() or _skips_teardown:
        os._exit(code)
    sys.exit(code)
