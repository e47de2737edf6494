"""How this process ends and what it was started with: signals, the end of its parent, closed standard streams.

SIGINT, SIGTERM and SIGHUP are recorded during training, so that the step can finish and the state be saved, and raised
at once while a run starts. A second SIGINT never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn

from unet_trainer.system.concurrency import SIGNALS, is_waiting, is_writing
from unet_trainer.system.console import EXIT_INTERRUPTED

PARENT_VARIABLE = "UNET_TRAINER_PARENT"  # in the environment of a child: the id of the process that it ends with
PARENT_SECONDS = 1.0  # between checks whether the parent lives
AGAIN_SECONDS = 0.01  # until a signal is raised again
STANDARD_STREAMS = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}
_parent: tuple[int, str] | None = None  # id and name of the process that this one ends with
_skips_teardown = False


class Interrupted(KeyboardInterrupt):
    """Stopped by the signal `signal_number`; the state is saved if there was one."""

    is_told = False  # whether the user has read of it
    is_of_job = False  # whether all processes of a job stop by it at the same step

    def __init__(self, signal_number: int, cause: str = "") -> None:
        """`cause`: what it was by, if not the signal, which this process may have sent itself."""
        ended = _parent[1] if _parent is not None and os.getppid() != _parent[0] else ""
        super().__init__(
            cause or (f"the end of {ended} (was it killed?)" if ended else signal.Signals(signal_number).name)
        )
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class Signals:
    """Handles signals while entered; only in the main thread, where Python delivers them.

    Python delivers them between any two instructions, also inside a destructor, where what is raised is ignored. Such a
    signal is raised again a moment later, or by the next `check` if it is deferred; a second SIGINT then ends the
    process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.num_interrupts = 0
        self.is_deferred = False
        self.earlier: dict[int, Any] = {}
        self.earlier_hook: Any = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # else nohup set it
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
                    self.earlier[number] = signal.signal(number, self._handle)
            self.earlier_hook, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(signal, "setitimer") and signal.SIGALRM in self.earlier:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        self.earlier.clear()
        if self.earlier_hook is not None:
            sys.unraisablehook, self.earlier_hook = self.earlier_hook, None

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside, signals go to the handlers of before."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _handle_unraisable(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self.earlier_hook(unraisable)
        elif self.num_interrupts > 1:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(EXIT_INTERRUPTED)
        elif hasattr(signal, "setitimer"):
            earlier = signal.signal(signal.SIGALRM, self._raise_again)
            self.earlier.setdefault(signal.SIGALRM, earlier)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    def _raise_again(self, alarm: int, frame: FrameType | None) -> None:
        if not is_waiting(alarm) and not self.is_deferred:
            self.check()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, signals are recorded and raised by `check`: for work that must finish, or that swallows
        exceptions."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if is_waiting(number):
            return
        self.num_interrupts += number == signal.SIGINT
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
    """In the child: SIGTERM for itself once its parent is gone. Does nothing in a process that others started, torchrun
    excepted: it puts each process into a session of its own, so that what kills torchrun reaches none of them."""
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
    """Standard streams that were closed (>&-) lead to os.devnull from here on. The system would give their numbers to
    the files
    that are opened next: what a library prints would end up in a checkpoint."""
    for name, (number, mode) in STANDARD_STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:  # on Windows, where the number of a missing stream is taken
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115


def skip_teardown() -> None:
    """The interpreter's end could wait for ever: another process of the job is gone."""
    global _skips_teardown
    _skips_teardown = True


def exit_process(code: int) -> NoReturn:
    """Ends the process; without tearing the interpreter down if a save is under way, as after a second Ctrl-C, or it
    could hang."""
    if threading.current_thread() is threading.main_thread():
        # else Python prints a traceback while it ends
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (
            OSError,
            ValueError,
        ):  # a closed pipe: the interpreter would flush again, print an error and exit with another code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if is_writing() or _skips_teardown:
        os._exit(code)
    sys.exit(code)
