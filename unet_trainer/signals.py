"""SIGINT and SIGTERM in training: noted, so that the step can finish and the state be saved. A second SIGINT leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

from unet_trainer.saver import is_any_at_work

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Asked to stop, and the state is saved. `signal_number` says by what."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Signals:
    """Listens while it is entered, in the main thread alone: Python hands signals to no other."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.earlier: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self.earlier = {number: signal.signal(number, self._note) for number in WATCHED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def is_stopping(self) -> bool:
        return self.received is not None

    def check(self) -> None:
        """Raises Interrupted if a signal came; for places where the state can be saved."""
        if self.received is not None:
            raise Interrupted(self.received)


def leave(code: int) -> NoReturn:
    """Ends the process; at once, when a second Ctrl-C came while the disk is still at a save."""
    if is_any_at_work():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
