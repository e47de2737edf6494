"""events.jsonl: what happened to a run, a JSON object a line, in the order of time. Lines are added and never changed.

    start      the process, the machine, the data; `resumed_after` says from which epoch and batch a resumed run goes on
    ready      the first step can be taken
    epoch      the row of metrics.csv, scores of each class, the confusion matrix, seconds of each stage
    warning, note    what was said
    rollback, shrink    the run went back to an earlier state, or takes a batch in smaller parts
    end        how: finished, stopped early, interrupted, failed

A state that was restored (start, rollback, shrink) is after `epoch`: lines of later epochs before it are void. So the file needs no
rewriting when a killed run is resumed. A line that was cut off by a kill or a full disk is skipped by readers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unet_trainer.runs.run_folder import EVENTS
from unet_trainer.system.atomic_files import open_to_append
from unet_trainer.system.folder_lock import FolderId, id_of


class EventLog:
    """Adds lines to events.jsonl. Those from before the run has its folder are kept until it has.

    A line is with the operating system when `add` returns, so a killed process loses none; `sync` brings them to the disk. What
    cannot be written is kept and tried again with the next line: a full disk ends no run here.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._folder_id: FolderId | None = None  # lines go into this folder, not into another one that has its name later
        self._unwritten: list[str] = []
        self._is_cut = False  # the last line in the file may lack its end
        self.has_ended = False  # an end is the last of its kind: what happens while a report is written is no other one
        self._lock = threading.Lock()

    def open(self, folder: Path, **start: Any) -> None:
        """From here on lines go into the folder's file, the first of this start before those that wait. Raises OSError."""
        path = folder / EVENTS
        with os.fdopen(open_to_append(path), "ab") as file:
            has_lines = file.tell() > 0
        if has_lines:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._is_cut = file.read() != b"\n"
        with self._lock:
            self.path, self._folder_id = path, id_of(folder)
            self._unwritten.insert(0, _line("start", start))
            self._write()

    def add(self, kind: str, **facts: Any) -> None:
        """A second end is left out."""
        with self._lock:
            if kind == "end" and self.has_ended:
                return
            self.has_ended = self.has_ended or kind == "end"
            self._unwritten.append(_line(kind, facts))
            self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        content = ("\n" if self._is_cut else "") + "".join(self._unwritten)
        try:
            if id_of(self.path.parent) != self._folder_id:
                return
            with os.fdopen(open_to_append(self.path), "ab") as file:
                self._is_cut = True
                file.write(content.encode("utf-8", "backslashreplace"))
        except OSError:  # failed saves of the state are told elsewhere
            return
        self._is_cut = False
        self._unwritten = []

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        if self.path is None:
            return
        with contextlib.suppress(OSError), os.fdopen(open_to_append(self.path), "ab") as file:
            os.fsync(file.fileno())


def _line(kind: str, facts: Mapping[str, Any]) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps(finite({"kind": kind, "time": now, **facts}), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run; none where there is no file. Lines that are not whole, or not ours, are left out."""
    try:
        content = (folder / EVENTS).read_bytes()
    except OSError:
        return []
    return list(_events_in(content))


def _events_in(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event


def current_epochs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The epoch events of the run as it is now, in order: those that a restored state has undone are left out."""
    epochs: dict[int, dict[str, Any]] = {}
    for event in events:
        number = _epoch_after(event)
        if number is None:
            continue
        epochs = {earlier: one for earlier, one in epochs.items() if earlier <= number}
        if event["kind"] == "epoch":
            epochs.pop(number, None)
            epochs[number] = event
    return [epochs[number] for number in sorted(epochs)]


def _epoch_after(event: Mapping[str, Any]) -> int | None:
    """The number of finished epochs after an event that sets it; None for all others."""
    if event["kind"] == "start":
        after = event.get("resumed_after")
        number = after.get("epoch") if isinstance(after, dict) else 0
    elif event["kind"] in ("epoch", "rollback", "shrink"):
        number = event.get("epoch")
    else:
        return None
    return number if isinstance(number, int) else None
