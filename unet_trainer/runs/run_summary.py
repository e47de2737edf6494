"""A run's folder, read for display: state, history, scores, settings, events. Imports no torch, and writes nothing.

Reads runs that are going on, runs that were killed and runs of earlier versions: what a run does not have is empty or None. All
that shows runs (curves, report, watch, compare, `runs`) reads them here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from unet_trainer.config.safe_yaml import interpret, parse_yaml
from unet_trainer.runs.event_log import current_epochs, read_events
from unet_trainer.runs.history import COLUMNS, read_metrics
from unet_trainer.runs.run_folder import BEST, EVENTS, LAST, PREVIOUS, SETTINGS, VAL_SCORES
from unet_trainer.runs.val_scores import ImageScore, read_val_scores
from unet_trainer.system.folder_lock import is_locked, is_locked_here

State = Literal["running", "finished", "stopped early", "interrupted", "failed"]
METRICS, RESULT, CONFIG, LOG = "metrics.csv", "result.json", "config.yaml", "train.log"
RUN_FILES = (EVENTS, LAST, PREVIOUS, BEST, METRICS, RESULT)  # a folder with one of them is a run's
DECIDED = "decided: "  # begins the comment of a setting in a config.yaml
INTERRUPTING = ("rollback", "shrink", "interrupted", "resumed", "killed", "failed")


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class on the validation set; None: undefined, because the class does not occur."""

    iou: float | None
    dice: float | None
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch. `row`: the columns of metrics.csv that it has; the other fields are empty in runs of earlier versions."""

    number: int
    row: dict[str, float]
    classes: dict[str, ClassScores] = field(default_factory=dict)
    confusion: list[list[int]] | None = None  # rows truth, columns prediction, of all ids
    stages: dict[str, float] = field(default_factory=dict)  # seconds
    time: datetime | None = None

    def get(self, column: str) -> float | None:
        """A number of the row; None if it is missing or not finite."""
        value = self.row.get(column)
        return value if value is not None and value == value and abs(value) != float("inf") else None


@dataclass(frozen=True)
class Setting:
    """`source`: default, file, config, command line, argument, decided; empty: not known."""

    value: Any
    source: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened: `kind` start, resumed, rollback, shrink, interrupted, killed, failed, finished, stopped early,
    warning, note. `epoch`: epochs that were finished then; None: not known."""

    kind: str
    time: datetime | None
    epoch: int | None
    text: str = ""
    batch: int = 0  # of the epoch after it that were done


@dataclass(frozen=True)
class RunSummary:
    """What a run's folder holds."""

    folder: Path
    state: State
    epochs: list[EpochRecord]
    settings: dict[str, Setting]
    events: list[Event]
    machine: dict[str, Any]  # of the last start: device, name, cores, versions, ...
    data: dict[str, Any]  # data_dir, num_train, num_val, sizes, classes with shares, notices, ...
    model: dict[str, Any]  # architecture, encoder, parameters
    result: dict[str, Any] | None  # result.json
    startup_seconds: float | None
    starts: list[datetime] = field(default_factory=list)
    updated: datetime | None = None  # the last sign of life

    @property
    def name(self) -> str:
        return self.folder.name

    def value(self, setting: str, otherwise: Any = None) -> Any:
        return self.settings[setting].value if setting in self.settings else otherwise

    @property
    def monitor(self) -> str:
        return str(self.value("monitor", "val_iou"))

    @property
    def num_epochs(self) -> int | None:
        """That are planned."""
        number = self.value("num_epochs")
        return number if isinstance(number, int) else None

    @property
    def class_names(self) -> list[str]:
        """Of the classes that are reported."""
        for epoch in reversed(self.epochs):
            if epoch.classes:
                return list(epoch.classes)
        given, number = self.value("class_names"), self.value("num_classes")
        if isinstance(given, list):
            return [str(name) for name in given]
        if isinstance(number, int) and number > 1:
            return [f"class {index}" for index in range(number)]
        return ["foreground"] if number == 1 else list((self.result or {}).get("per_class_iou") or ["foreground"])

    @property
    def id_names(self) -> list[str]:
        """Of all class ids, in the order of a confusion matrix."""
        ids = self.model.get("ids")
        return list(ids) if ids else [*(["background"] if len(self.class_names) == 1 else []), *self.class_names]

    @property
    def best(self) -> EpochRecord | None:
        """The epoch with the best value of the monitored metric, the first of equals; None before there is one."""
        sign = -1 if self.monitor == "val_loss" else 1
        scored = [(epoch, value) for epoch in self.epochs if (value := epoch.get(self.monitor)) is not None]
        return max(scored, key=lambda pair: (sign * pair[1], -pair[0].number))[0] if scored else None

    @property
    def per_class_iou(self) -> dict[str, float | None]:
        """Of the best epoch."""
        best = self.best
        if best is not None and best.classes:
            return {name: scores.iou for name, scores in best.classes.items()}
        return dict((self.result or {}).get("per_class_iou") or {})

    @property
    def warnings(self) -> list[Event]:
        return [event for event in self.events if event.kind == "warning"]

    @property
    def interruptions(self) -> list[Event]:
        """Rollbacks, interruptions, kills and what followed them: what to mark in a curve."""
        return [event for event in self.events if event.kind in INTERRUPTING]

    @cached_property
    def image_scores(self) -> list[ImageScore]:
        """Of the best epoch, the worst first."""
        return read_val_scores(self.folder / VAL_SCORES, self.class_names)

    def column(self, name: str) -> list[tuple[int, float]]:
        """Epoch and value, where there is one."""
        return [(epoch.number, value) for epoch in self.epochs if (value := epoch.get(name)) is not None]

    def class_column(self, class_name: str, score: Literal["iou", "dice", "precision", "recall"]) -> list[tuple[int, float]]:
        found = ((epoch.number, epoch.classes.get(class_name)) for epoch in self.epochs)
        values = ((number, None if scores is None else getattr(scores, score)) for number, scores in found)
        return [(number, value) for number, value in values if value is not None]


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_dir() and any((folder / name).is_file() for name in RUN_FILES)
    return False


def find_runs(checkpoint_dir: Path) -> list[Path]:
    """The folders of all runs, the one that was touched last first."""
    try:
        folders = [path for path in checkpoint_dir.iterdir() if not path.name.startswith(".") and is_run(path)]
    except OSError:
        return []
    return sorted(folders, key=lambda folder: (_touched(folder) or datetime.min.replace(tzinfo=UTC), folder.name), reverse=True)


def read_run_summary(folder: Path) -> RunSummary:
    """All that the folder tells. Never raises for what is missing, cut off or damaged."""
    raw = read_events(folder)
    starts = [event for event in raw if event["kind"] == "start"]
    last_start = starts[-1] if starts else {}
    ready: dict[str, Any] = next((event for event in reversed(raw) if event["kind"] == "ready"), {})
    result = _read_json(folder / RESULT)
    epochs = _read_epochs(folder, raw)
    return RunSummary(
        folder=folder,
        state=_state(folder, raw, result, len(epochs)),
        epochs=epochs,
        settings=_read_settings(folder),
        events=list(_events(raw)) if raw else list(_warnings_in_log(folder)),
        machine=_mapping(last_start.get("machine")),
        data=_mapping(last_start.get("data")),
        model=_mapping(last_start.get("model")),
        result=result,
        startup_seconds=_number(ready.get("startup_seconds")),
        starts=[time for start in starts if (time := _time(start)) is not None],
        updated=_touched(folder),
    )


def _state(folder: Path, raw: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None, num_epochs: int) -> State:
    ends = [event for event in raw if event["kind"] in ("start", "end")]
    ends_here = bool(ends) and ends[-1]["kind"] == "end" and is_locked_here(folder)  # the lock is released last
    if is_locked(folder) and not ends_here:
        return "running"
    if ends:
        how = ends[-1].get("how")  # a start without an end: the process was killed
        return how if how in ("finished", "stopped early", "failed") else "interrupted"
    if result is None or _whole(result.get("epochs")) < num_epochs:  # of an earlier version, killed or resumed since its end
        return "interrupted"
    return "stopped early" if result.get("stopped_early") else "finished"


def _read_epochs(folder: Path, raw: list[dict[str, Any]]) -> list[EpochRecord]:
    """From the events; epochs that they do not have, from metrics.csv."""
    records = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        for row in read_metrics(folder / METRICS):
            records[int(row["epoch"])] = EpochRecord(int(row["epoch"]), row)
    told = {event["epoch"]: read_epoch(event) for event in current_epochs(raw)}
    if told:  # metrics.csv may be older, or of a state that was undone
        last = max(told)
        records = {number: record for number, record in records.items() if number <= last}
    return [record for _, record in sorted({**records, **told}.items())]


def read_epoch(event: Mapping[str, Any]) -> EpochRecord:
    """An epoch event as a record."""
    row = {name: value for name in COLUMNS if (value := _number(event.get(name))) is not None}
    scores = ("iou", "dice", "precision", "recall")
    classes = {
        str(name): ClassScores(*(_number(found.get(score)) for score in scores))
        for name, found in _mapping(event.get("classes")).items()
        if isinstance(found, dict)
    }
    confusion = event.get("confusion")
    stages = {name: value for name, item in _mapping(event.get("stages")).items() if (value := _number(item)) is not None}
    return EpochRecord(event["epoch"], row, classes, confusion if isinstance(confusion, list) else None, stages, _time(event))


def _read_settings(folder: Path) -> dict[str, Setting]:
    found = _read_json(folder / SETTINGS)
    if found is not None:
        return {
            name: Setting(entry.get("value"), str(entry.get("source", "")), str(entry.get("reason", "")))
            for name, entry in found.items()
            if isinstance(entry, dict)
        }
    try:  # a run of an earlier version: what was decided is in the comments
        text = (folder / CONFIG).read_text(encoding="utf-8")
        values = interpret(parse_yaml(text))
    except (OSError, ValueError):
        return {}
    reasons = {}
    for line in text.splitlines():
        key, _, comment = line.partition("  # ")
        if comment.startswith(DECIDED):
            reasons[key.partition(":")[0]] = comment.removeprefix(DECIDED)
    given = _mapping(values)
    return {name: Setting(value, "decided" if name in reasons else "", reasons.get(name, "")) for name, value in given.items()}


def _events(raw: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """What happened, with what follows from the order: a start after one without an end was killed."""
    num_finished, is_open, last_time = 0, False, None
    for event in raw:
        kind, time, text = event["kind"], _time(event), str(event.get("text") or "")
        if kind == "start":
            after = _mapping(event.get("resumed_after"))
            if is_open:
                yield Event("killed", last_time, num_finished, "the process ended without a word")
            num_finished, is_open = _whole(after.get("epoch")), True
            yield Event("resumed" if after else "start", time, num_finished, text, _whole(after.get("batch")))
        elif kind == "epoch":
            num_finished = _whole(event.get("epoch"))
        elif kind in ("rollback", "shrink"):
            num_finished = _whole(event.get("epoch"))
            yield Event(kind, time, num_finished, text, _whole(event.get("batch")))
        elif kind in ("warning", "note"):
            yield Event(kind, time, num_finished, text)
        elif kind == "end":
            is_open = False
            yield Event(str(event.get("how") or "interrupted"), time, num_finished, text)
        last_time = time or last_time


def _warnings_in_log(folder: Path) -> Iterator[Event]:
    """Of a run of an earlier version."""
    with contextlib.suppress(OSError):
        for line in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Warning: "):
                yield Event("warning", None, None, line.removeprefix("Warning: "))


def _touched(folder: Path) -> datetime | None:
    """When the run last wrote one of its files."""
    times = []
    for name in RUN_FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _read_json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None


def _time(event: Mapping[str, Any]) -> datetime | None:
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(event.get("time", ""))
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
