"""What a run writes as it goes: metrics.csv with one row for each epoch, result.json, and events.jsonl.

events.jsonl has all that happened, a JSON object a line, in the order of time. Lines are added and never changed.

    start      the process, the machine, the data; `resumed_after` says from which epoch and batch a resumed run goes on
    ready      the first step can be taken
    epoch      the row of metrics.csv, scores of each class, the confusion matrix, seconds of each stage
    pilots     learning rates that were tried before the first epoch
    warning, note    what was said
    rollback, shrink    the run went back to an earlier state, or takes a batch in smaller parts
    end        how: finished, stopped early, interrupted, failed

A state that was restored (start, rollback, shrink) is after `epoch`: lines of later epochs before it are void. So the
file needs no rewriting when a killed run is resumed. A line that was cut off by a kill or a full disk is skipped by
readers."""

import contextlib
import csv
import io
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unet_trainer.config.safe_yaml import map_leaves
from unet_trainer.system.atomic_files import open_to_append, write_text_atomically
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import open_file, parse_json, read_bytes, read_text
from unet_trainer.system.json_cache import Shape, pick
from unet_trainer.system.locks import FolderId, id_of
from unet_trainer.training.run_folder import EVENTS

Row = dict[str, float | int]

COLUMNS = (
    "epoch", "train_loss", "val_loss", "train_iou", "val_iou", "val_dice", "learning_rate", "seconds",
    "images_per_second",
    "data_wait", "skipped_steps", "nan_steps", "peak_memory_gib", "peak_reserved_gib",
)  # fmt: skip
# What a line may have besides its kind and its time.
POSITION = {"epoch": int, "batch": int}
MACHINE = {
    **dict.fromkeys(("device", "name", "host", "system", "python"), str),
    **{"cores": int, "memory_gib": float, "versions": dict[str, str]},
}
DATA = {
    **dict.fromkeys(("data_dir", "split", "images", "sizes", "fit"), str),
    **dict.fromkeys(("num_train", "num_val", "num_test"), int),
    **{"model_size": list[int], "classes": [{"name": str, "values": str, "share": float}]},
    **{"ignored_share": float, "notices": list[str]},
}
MODEL = {
    **dict.fromkeys(("architecture", "encoder", "init_from"), str),
    **{"parameters": int, "ids": list[str], "classes": list[str]},
}
EPOCH = {
    **dict.fromkeys(COLUMNS[1:], float),
    **{"classes": dict[str, dict[str, float | None]], "confusion": list[list[int]], "stages": dict[str, float | None]},
}
START = {"resumed_after": POSITION, "machine": MACHINE, "data": DATA, "model": MODEL}
PILOT = {"learning_rate": float, "iou": float, "steps": int, "is_chosen": bool}
OTHERS = {
    "startup_seconds": float,
    "batch_parts": int,
    "pilots": [PILOT],
    **dict.fromkeys(("text", "how", "name", "id"), str),
}
EVENT: Shape = {"kind": str, "time": str, **POSITION, **START, **EPOCH, **OTHERS}
KINDS = frozenset(["start", "ready", "epoch", "warning", "note", "rollback", "shrink", "tracker", "pilots", "end"])


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a column, without the rows that do not have it: an earlier version may have written them."""
    return [float(row[name]) for row in rows if name in row]


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Writes the whole table, so that a resumed run leaves no epoch in it twice."""
    text = io.StringIO()
    # columns that a row lacks are empty
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    write_text_atomically(path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a table that write_metrics wrote; empty cells are left out."""
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    return [{name: float(value) for name, value in row.items() if value} for row in table]


def finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    return map_leaves(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, value)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    write_text_atomically(path, json.dumps(finite(result), indent=2, allow_nan=False) + "\n")


class EventLog:
    """Adds lines to events.jsonl. Those from before the run has its folder are kept until it has.

    A line is with the operating system when `add` returns, so a killed process loses none; `sync` brings them to the
    disk. What cannot be written is kept and tried again with the next line: a full disk ends no run here.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._folder_id: FolderId | None = (
            None  # lines go into this folder, not into another one that has its name later
        )
        self._unwritten: list[str] = []
        self._is_cut = False  # the last line in the file may lack its end
        self.has_ended = False  # an end is the last of its kind: what happens while a report is written is no other one
        self._lock = threading.Lock()

    def open(self, folder: Path, **start: Any) -> None:
        """From here on lines go into the folder's file, the first of this start before those that wait. Raises
        OSError."""
        path = folder / EVENTS
        os.close(open_to_append(path))  # makes it
        with open_file(path, follow=False) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            self._is_cut = file.read() not in (b"", b"\n")
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


@contextlib.contextmanager
def noting(name: str, problems: list[str]) -> Iterator[None]:
    """Around reading a file that need not be there: what is wrong with it is noted, and reading goes on after the
    block."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{name}: {error.strerror}")
    except ValueError as error:
        problems.append(f"{name}: {first_line(error)}")


def read_events(folder: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """All events of a run; none where there is no file. Lines that are not whole, or not of a kind that is known, are
    left out; those that hold other values than a run writes as well, and `problems` then has the reason."""
    reasons = [] if problems is None else problems
    content, found = b"", []
    with noting(EVENTS, reasons):
        content = read_bytes(folder / EVENTS)
    cut_off = json.JSONDecodeError, UnicodeDecodeError  # by a kill or a full disk
    for number, line in enumerate(content.split(b"\n"), start=1):
        with noting(f"{EVENTS}, line {number}", reasons), contextlib.suppress(*cut_off):
            event = parse_json(line)
            if isinstance(event, dict) and isinstance(event.get("kind"), str) and event["kind"] in KINDS:
                found.append(pick(EVENT, event))
    if b"\n" in content and not found and not reasons:
        reasons.append(f"{EVENTS}: none of its lines is an event")
    return found


def current_epochs(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The epoch events of the run as it is now, by number: those that a restored state has undone are left out."""
    epochs: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "start":
            number = event.get("resumed_after", {}).get("epoch", 0)
        elif event["kind"] in ("epoch", "rollback", "shrink") and "epoch" in event:
            number = event["epoch"]
        else:
            continue
        epochs = {earlier: one for earlier, one in epochs.items() if earlier <= number}
        if event["kind"] == "epoch":
            epochs[number] = event
    return dict(sorted(epochs.items()))
