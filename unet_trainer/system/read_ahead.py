"""Calls a function on many items in threads, ahead of their turn, and gives the results in the items' order.

What is held ahead is bounded by its bytes, so that memory does not grow with the number of items. For work that releases the GIL:
reading and decoding files, OpenCV.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

JOIN_SECONDS = 30  # for the calls that are under way when it ends early


class ReadAhead(Generic[Item, Outcome]):
    """Iterate over it once, inside `with`. An exception of the function is raised at its item's turn.

    No call begins while results of `max_bytes` or more, or `max_items`, wait: with the calls under way they may become more.
    """

    def __init__(
        self,
        function: Callable[[Item], Outcome],
        items: Sequence[Item],
        num_threads: int,
        num_bytes: Callable[[Outcome], int],
        max_bytes: int,
        max_items: int,
    ) -> None:
        self.function, self.items, self.num_bytes = function, items, num_bytes
        self.max_bytes, self.max_items = max_bytes, max_items
        # Two conditions, and one thread woken at a time: waking all of them for each item costs more than the items.
        lock = threading.Lock()
        self.has_room, self.is_ready = threading.Condition(lock), threading.Condition(lock)
        self.ready: dict[int, tuple[Callable[[], Outcome], int]] = {}  # gives or raises it; with its bytes
        self.num_begun = self.num_taken = self.num_waiting_bytes = 0
        self.is_stopping = False
        num_threads = min(num_threads, len(items))
        self.threads = [threading.Thread(target=self._work, name="read ahead", daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> ReadAhead[Item, Outcome]:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.has_room:
            self.is_stopping = True
            self.has_room.notify_all()
        for thread in self.threads:
            thread.join(JOIN_SECONDS)

    def __iter__(self) -> Iterator[tuple[Item, Outcome]]:
        for index, item in enumerate(self.items):
            with self.is_ready:
                while index not in self.ready:
                    self.is_ready.wait()
                take, num_bytes = self.ready.pop(index)
                self.num_taken += 1
                self.num_waiting_bytes -= num_bytes
                self.has_room.notify()
            yield item, take()
            del take  # and what it holds, while the next is waited for

    def _work(self) -> None:
        while True:
            with self.has_room:
                while not self._may_begin() and not self.is_stopping:
                    self.has_room.wait()
                if self.is_stopping or self.num_begun == len(self.items):
                    self.has_room.notify()  # the next thread ends too
                    return
                index = self.num_begun
                self.num_begun += 1
                if self._may_begin():
                    self.has_room.notify()
            take: Callable[[], Outcome]
            try:
                outcome = self.function(self.items[index])
                take, num_bytes = partial(_give, outcome), self.num_bytes(outcome)
                del outcome
            except BaseException as error:  # raised where the result is taken
                take, num_bytes = partial(_raise, error), 0
            with self.is_ready:
                self.ready[index] = take, num_bytes
                self.num_waiting_bytes += num_bytes
                if index == self.num_taken:
                    self.is_ready.notify()
            del take  # else it would be held until the next is there

    def _may_begin(self) -> bool:
        has_room = self.num_begun - self.num_taken < self.max_items and self.num_waiting_bytes < self.max_bytes
        # The next that is to be taken must not wait for others behind it to be taken.
        return has_room or self.num_begun == self.num_taken or self.num_begun == len(self.items)


def _give(outcome: Outcome) -> Outcome:
    return outcome


def _raise(error: BaseException) -> NoReturn:
    raise error
