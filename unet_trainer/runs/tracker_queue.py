"""Calls a tracker in a thread of its own: a service that is slow, fails or hangs neither slows nor ends a run."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.runs.event_log import EventLog, read_events
from unet_trainer.runs.run_summary import EpochRecord, read_run_summary
from unet_trainer.runs.trackers import TRACKERS, TrackedRun, Tracker, outcome_of, scalars_of
from unet_trainer.system.console import counted, first_line

MAX_WAITING = 1000  # epochs that may wait for a slow service; further ones are not logged
FINISH_SECONDS = 10.0  # that a service has at the end


class TrackerQueue:
    """Epochs wait in a queue of limited length for the thread that calls the tracker. What goes wrong is told once."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, on_id: Callable[[str], object]) -> None:
        self.name = name
        self.tracker = tracker
        self.run = run
        self.on_id = on_id
        self._waiting: queue.Queue[EpochRecord | None] = queue.Queue(MAX_WAITING)  # None: the run has ended
        self._error: Exception | None = None
        self._was_told = False
        self._num_lost = 0
        self._last_picture = ""
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._error = error

    def log(self, epoch: EpochRecord) -> None:
        """Returns at once."""
        try:
            self._waiting.put_nowait(epoch)
        except queue.Full:
            self._num_lost += 1

    def take_problem(self) -> str | None:
        """What went wrong, the first time that it did."""
        if self._error is None or self._was_told:
            return None
        self._was_told = True
        return f"{self.name}: {first_line(self._error)}; training goes on, without it if it goes on failing"

    def finish(self) -> str | None:
        """Waits for a while until all is logged; returns what was not."""
        if self._thread.ident is not None:
            deadline = time.monotonic() + FINISH_SECONDS
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=FINISH_SECONDS)
                self._thread.join(max(0.0, deadline - time.monotonic()))
        num_left = self._num_lost + self._waiting.qsize()
        if self._thread.is_alive():
            return f"{self.name} did not answer within {FINISH_SECONDS:.0f} s at the end; what it has not logged is lost there"
        return f"{self.name} was too slow: {counted(num_left, 'epoch')} were not logged there" if num_left else None

    def _work(self) -> None:
        try:
            run_id = self.tracker.init(self.run)
            if run_id is not None:
                self.on_id(run_id)
        except (Exception, SystemExit) as error:  # anything that a service may raise
            self._error = _as_exception(error)
            while self._waiting.get() is not None:  # it has no run to log to
                pass
            return
        while (epoch := self._waiting.get()) is not None:
            self._try(partial(self._log, epoch))
        summary = read_run_summary(self.run.folder)
        self._try(lambda: self.tracker.finish(outcome_of(summary), summary.state in ("finished", "stopped early")))

    def _log(self, epoch: EpochRecord) -> None:
        self.tracker.log(epoch.number, scalars_of(epoch), self._new_picture())

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._error = self._error or _as_exception(error)

    def _new_picture(self) -> Path | None:
        """The newest of the samples, if there is one since the last call: they are written a little later than their epoch ends."""
        pictures = sorted(path.name for path in (self.run.folder / "samples").glob("epoch_*.png"))
        if not pictures or pictures[-1] <= self._last_picture:
            return None
        self._last_picture = pictures[-1]
        return self.run.folder / "samples" / pictures[-1]


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"it tried to end the process ({error})")


def earlier_id(folder: Path, name: str) -> str | None:
    """By which a tracker knows the run, if it was told of it before and the run has not begun anew since."""
    found = None
    for event in read_events(folder):
        if event["kind"] == "start" and event.get("resumed_after") is None:
            found = None
        elif event["kind"] == "tracker" and event.get("name") == name:
            found = str(event.get("id"))
    return found


def build_trackers(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], first_epoch: int, events: EventLog
) -> list[TrackerQueue]:
    """One queue for each tracker that is switched on."""
    return [
        TrackerQueue(
            name,
            TRACKERS[name](),
            TrackedRun(folder, settings, first_epoch, earlier_id(folder, name)),
            partial(_remember_id, events, name),
        )
        for name in names
    ]


def _remember_id(events: EventLog, name: str, run_id: str) -> None:
    events.add("tracker", name=name, id=run_id)
