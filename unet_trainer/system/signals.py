"""How this process ends. Signals are recorded during training, so that the state can be saved, and raised while a run
starts. A second SIGINT never waits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from unet_trainer.system.concurrency import SIGNALS, is_writing
from unet_trainer.system.console import EXIT_INTERRUPTED

STANDARD_STREAMS = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}
_skips_teardown = False


class Interrupted(KeyboardInterrupt):
    """Stopped by the signal `signal_number`; the state is saved if there was one."""

    is_told = False  # whether the user has read of it

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
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
