"""Calls a function on many items in threads and gives the results in the items' order, a bounded number of items ahead.

For work that releases the GIL: reading and decoding files, OpenCV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def ordered_map(
    function: Callable[[Item], Outcome], items: Iterable[Item], num_threads: int, num_ahead: int
) -> Generator[Outcome, None, None]:
    """The outcome of each item. At most `num_ahead` items are begun and not yet taken; an exception is raised at its item's turn.

    When the generator is closed, what has not begun is dropped and what runs is waited for.
    """
    threads = ThreadPoolExecutor(num_threads)
    pending: deque[Future[Outcome]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(function, item))
            if len(pending) >= num_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
