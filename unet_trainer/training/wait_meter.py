"""How long the device was idle for want of a batch.

On a CUDA device the host runs ahead: while it waits for a batch, the device may still be busy with queued steps. So the gap
between two steps is measured on the device's own clock, and counts for no longer than the host has waited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Item = TypeVar("Item")


class TimedEvent(Protocol):
    """A moment on the device's clock; torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class WaitMeter:
    """Measures one epoch of training. `seconds` lags behind by the steps that the device has not reached yet."""

    def __init__(self, device: torch.device, seconds: float = 0.0, new_event: Callable[[], TimedEvent] | None = None) -> None:
        if new_event is None and device.type == "cuda":
            new_event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
        self.new_event = new_event
        self.seconds = seconds
        self.host_seconds = 0.0  # of the batch that was taken last
        self.last_end: TimedEvent | None = None
        self.gaps: deque[tuple[TimedEvent, TimedEvent, float]] = deque()  # end of a step, begin of the next, host's wait

    def wait_for(self, take: Callable[[], Item]) -> Item:
        """Takes a batch; the host's time in it counts as waiting, unless the device was busy."""
        started = time.perf_counter()
        item = take()
        self.host_seconds = time.perf_counter() - started
        if self.new_event is None:  # the host is the device
            self.seconds += self.host_seconds
        return item

    def step_begins(self) -> None:
        if self.new_event is None:
            return
        if self.last_end is None:  # the first step of an epoch: nothing is queued before it
            self.seconds += self.host_seconds
            return
        begin = self.new_event()
        begin.record()
        self.gaps.append((self.last_end, begin, self.host_seconds))
        self._collect()

    def step_ends(self) -> None:
        if self.new_event is not None:
            self.last_end = self.new_event()
            self.last_end.record()

    def _collect(self) -> None:
        while self.gaps and self.gaps[0][1].query():
            end, begin, host_seconds = self.gaps.popleft()
            self.seconds += min(end.elapsed_time(begin) / 1000, host_seconds)

    def finish(self) -> float:
        """The seconds of the epoch. Called when the device is done with it."""
        self._collect()
        return self.seconds
