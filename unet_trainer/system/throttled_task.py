"""Repeats a piece of work in a background thread, whenever it is asked for, but for a small share of the time only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.01  # of the time, that the work may keep a core busy
FINISH_SECONDS = 30.0


class ThrottledTask:
    """What is asked for while the work is under way, or too soon after it, is done once, later. Errors wait for `take_error`."""

    def __init__(self, name: str, work: Callable[[], object], share: float = SHARE) -> None:
        self.work = work
        self.share = share
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._changed = threading.Condition()
        self._is_asked = self._is_ending = False
        self._not_before = 0.0
        self._error: Exception | None = None

    def request(self) -> None:
        """Returns at once."""
        with self._changed:
            self._is_asked = True
            self._changed.notify()
            is_new = self._thread.ident is None and not self._is_ending
        if is_new:
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads
                self._is_ending, self._error = True, error

    def finish(self) -> None:
        """Does what is still asked for, without delay, and ends the thread; gives up waiting after FINISH_SECONDS."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(FINISH_SECONDS)

    def take_error(self) -> Exception | None:
        """The first error since the last call."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _is_due(self) -> bool:
        if not self._is_asked:
            return self._is_ending
        return self._is_ending or time.monotonic() >= self._not_before

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    self._changed.wait(max(0.01, self._not_before - time.monotonic()) if self._is_asked else None)
                if not self._is_asked:
                    return
                self._is_asked = False
            started, used = time.monotonic(), time.thread_time()
            try:
                self.work()
            except Exception as error:  # of any kind: this work must not end a run
                with self._changed:
                    self._error = self._error or error
            self._not_before = started + (time.thread_time() - used) / self.share
