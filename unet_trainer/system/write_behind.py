"""Runs tasks in threads behind the caller, such as encoding and writing files, while it goes on.

The tasks that wait are bounded by the bytes that they hold: the caller waits while there is no room.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

JOIN_SECONDS = 60  # for the tasks that are under way when it ends early


class WriteBehind:
    """With one thread, tasks run in their order. After a task raised, no other begins, and the caller gets the exception from its
    next call. Left by an exception of the caller's, tasks that have not begun are dropped and those under way are waited for.
    """

    def __init__(self, num_threads: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        lock = threading.Lock()
        self.has_work, self.has_room = threading.Condition(lock), threading.Condition(lock)  # one waits for work, one for room
        self.waiting: deque[tuple[Callable[[], object], int]] = deque()
        self.num_bytes = 0  # of the tasks that wait or run
        self.num_running = 0
        self.error: BaseException | None = None
        self.is_stopping = False
        self.threads = [threading.Thread(target=self._work, name="write behind", daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> WriteBehind:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            with self.has_work:
                self.is_stopping = True
                self.waiting.clear()
                self.has_work.notify_all()
            for thread in self.threads:
                thread.join(JOIN_SECONDS)

    def submit(self, task: Callable[[], object], num_bytes: int) -> None:
        with self.has_room:
            while self.error is None and self.num_bytes and self.num_bytes + num_bytes > self.max_bytes:
                self.has_room.wait()
            self._raise()
            self.waiting.append((task, num_bytes))
            self.num_bytes += num_bytes
            self.has_work.notify()

    def finish(self) -> None:
        """Waits until all tasks are done."""
        with self.has_room:
            self.has_room.wait_for(lambda: self.error is not None or not (self.waiting or self.num_running))
            self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        while True:
            with self.has_work:
                self.has_work.wait_for(lambda: self.waiting or self.is_stopping)
                if not self.waiting:
                    return
                task, num_bytes = self.waiting.popleft()
                self.num_running += 1
            error: BaseException | None = None
            try:
                task()
            except BaseException as raised:  # raised where the caller is
                error = raised
            del task  # and what it holds
            with self.has_room:
                self.num_running -= 1
                self.num_bytes -= num_bytes
                if error is not None and self.error is None:
                    self.error = error
                    self.waiting.clear()
                self.has_room.notify()
