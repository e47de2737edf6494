"""Reads in threads that the training process does not have to wait for: a file that never answers (a dead network disk) ends in an
error after a time limit, and a signal ends the wait at once. A thread that hangs is left behind; it ends with the process.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

Outcome = TypeVar("Outcome")

POLL_SECONDS = 0.1  # between two looks at is_stopping


class ReadTimeout(Exception):
    """Nothing was read in the time limit, or soon after a signal."""


class _Answer(NamedTuple, Generic[Outcome]):
    outcome: Outcome | None
    error: BaseException | None


class ReadingThread:
    """Calls functions in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer[object]] = queue.SimpleQueue()
        self._is_started = False

    def call(
        self,
        function: Callable[[], Outcome],
        timeout: float | None,
        is_stopping: Callable[[], bool] = lambda: False,
        stop_seconds: float = 0.0,
    ) -> Outcome:
        """What the function returns or raises. Raises ReadTimeout after `timeout` seconds, or `stop_seconds` after is_stopping; the
        thread still hangs then, and must not be used again."""
        if not self._is_started:
            threading.Thread(target=_answer_calls, args=(self._calls, self._answers), name="reading", daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
            self._is_started = True
        started = time.monotonic()
        stopping_since: float | None = None
        self._calls.put(function)
        while True:
            try:
                answer = self._answers.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                now = time.monotonic()
            if stopping_since is None and is_stopping():
                stopping_since = now
            is_late = timeout is not None and now - started > timeout
            if is_late or (stopping_since is not None and now - stopping_since > stop_seconds):
                raise ReadTimeout
        if answer.error is not None:
            raise answer.error
        return answer.outcome  # type: ignore[return-value]


def _answer_calls(calls: queue.SimpleQueue[Callable[[], object] | None], answers: queue.SimpleQueue[_Answer[object]]) -> None:
    """Knows nothing of the ReadingThread, which would never be freed otherwise; ends with it."""
    while (function := calls.get()) is not None:
        try:
            answer: _Answer[object] = _Answer(function(), None)
        except BaseException as error:  # raised where the outcome is waited for
            answer = _Answer(None, error)
        del function
        answers.put(answer)
        del answer  # and what it holds, while the next is waited for


def map_in_threads(function: Callable[[int], object], num_items: int, num_threads: int, timeout: float | None) -> Iterator[int]:
    """Calls the function with 0, 1, ... and gives each number as it is done; raises what the function raises.

    Raises ReadTimeout when no call ends for `timeout` seconds. Ends without waiting for calls that are under way.
    """
    waiting, done = iter(range(num_items)), queue.SimpleQueue[tuple[int, BaseException | None]]()
    lock, is_over = threading.Lock(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            try:
                function(index)
                done.put((index, None))
            except BaseException as error:
                done.put((index, error))

    for _ in range(min(num_threads, num_items)):
        threading.Thread(target=work, name="reading", daemon=True).start()
    try:
        for _ in range(num_items):
            try:
                index, error = done.get(timeout=timeout)
            except queue.Empty:
                raise ReadTimeout from None
            if error is not None:
                raise error
            yield index
    finally:
        is_over.set()
