"""SIGINT, SIGTERM and SIGHUP: recorded during training, so that the step can finish and the state be saved; raised at once
while a run starts. A second SIGINT never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from unet_trainer.system.background_writer import is_any_busy
from unet_trainer.system.distributed import is_broken

EXIT_INTERRUPTED = 130
WATCHED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


class Interrupted(KeyboardInterrupt):
    """Stopped by the signal `signal_number`; the state is saved if there was one."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Signals:
    """Handles signals while entered; only in the main thread, where Python delivers them.

    Python delivers them between any two instructions, also inside a destructor, where it prints what is raised as "Exception
    ignored" and goes on. Such a signal is still recorded, and acted on by the next `check`; a second SIGINT then ends the process.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.num_interrupts = 0
        self.is_deferred = False
        self.earlier: dict[int, Any] = {}
        self.earlier_hook: Any = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:  # else nohup set it
                    self.earlier[number] = signal.signal(number, self._handle)
            self.earlier_hook, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        if self.earlier_hook is not None:
            sys.unraisablehook = self.earlier_hook

    def _handle_unraisable(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self.earlier_hook(unraisable)
        elif self.num_interrupts > 1:
            leave_at_once(EXIT_INTERRUPTED)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, signals are recorded and raised by `check`: for work that must finish, or that swallows exceptions."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
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


def leave_at_once(code: int) -> NoReturn:
    """Without tearing the interpreter down, which waits for threads and prints what they raise."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def exit_process(code: int) -> NoReturn:
    """Ends the process; without tearing the interpreter down if a save is under way, as after a second Ctrl-C, or if another
    process of the job is gone."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))  # else Python prints a traceback while it ends
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe: the interpreter would flush again, print an error and exit with another code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if is_any_busy() or is_broken():
        os._exit(code)
    sys.exit(code)
