"""A run's folder, read for display: state, history, scores, settings, events. Imports no torch, and writes nothing.

Reads runs that are going on, that were killed or that lost files: what a run does not have is empty or None. Epochs are
those of events.jsonl. All that shows runs (curves, report, compare, `runs`) reads them here.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, Literal

from unet_trainer.system.input_files import read_json
from unet_trainer.system.json_cache import Shape, as_object, pick
from unet_trainer.system.locks import is_locked, is_locked_here
from unet_trainer.training.history import COLUMNS, PILOT, current_epochs, noting, read_events
from unet_trainer.training.run_folder import (
    BEST,
    EVENTS,
    LAST,
    METRICS_CSV,
    PREVIOUS,
    RESULT_JSON,
    SETTINGS,
    VAL_SCORES,
)
from unet_trainer.training.val_scores import MAX_PIXELS, ImageScore, read_val_scores

State = Literal["running", "finished", "stopped early", "interrupted", "failed", "damaged"]
RUN_FILES = (EVENTS, LAST, PREVIOUS, BEST, METRICS_CSV, RESULT_JSON)  # a folder with one of them is a run's
# What is read of result.json and of each setting in settings.json.
RESULT_SHAPE: Shape = {"warnings": list[str]}
SETTING_SHAPE: Shape = {"value": Any, "source": str, "reason": str}
NO_USE = "this model is of no use"  # what the warning of such a result starts with
MAX_NUMBER = 1e100  # beyond which a sum over epochs may not be finite


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch. `row`: the columns of metrics.csv that it has. `classes`: of each class that is reported, by
    its name, iou, dice, precision and recall; None: undefined, because the class does not occur."""

    number: int
    row: dict[str, float]
    classes: dict[str, dict[str, float | None]] = field(default_factory=dict)
    confusion: list[list[int]] | None = None  # rows truth, columns prediction, of all ids
    stages: dict[str, float] = field(default_factory=dict)  # seconds
    time: datetime | None = None

    def get(self, column: str) -> float | None:
        """A number of the row; None if it is missing or not finite."""
        value = self.row.get(column)
        return value if value is not None and abs(value) < MAX_NUMBER else None

    def score(self, name: str, kind: str) -> float | None:
        """Of a class: iou, dice, precision or recall."""
        return self.classes.get(name, {}).get(kind)


@dataclass(frozen=True)
class Setting:
    """`source`: default, demo, file, config, command line, argument, decided; empty: not known."""

    value: Any
    source: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened: `kind` start, resumed, rollback, shrink, interrupted, killed, failed, finished, stopped
    early, warning, note. `epoch`: epochs that were finished then; None: not known."""

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
    warnings: list[str]  # about the result
    startup_seconds: float | None
    pilots: list[dict[str, Any]] = field(default_factory=list)  # learning rates that were tried, see history
    starts: list[datetime] = field(default_factory=list)
    updated: datetime | None = None  # the last sign of life
    # files and lines that hold other values than a run writes, and are left out
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    def value(self, setting: str, otherwise: Any = None) -> Any:
        return self.settings[setting].value if setting in self.settings else otherwise

    @property
    def is_of_no_use(self) -> bool:
        """Whether training found at its end that the model is no better than none."""
        return any(warning.startswith(NO_USE) for warning in self.warnings)

    @property
    def monitor(self) -> str:
        return str(self.value("monitor", "val_iou"))

    @property
    def num_epochs(self) -> int | None:
        """That are planned."""
        number = self.value("num_epochs")
        return number if type(number) is int else None

    @property
    def progress(self) -> str:
        """Epochs that are done, of those that are planned: 5/6; 5 where the plan is not known."""
        return f"{len(self.epochs)}/{self.num_epochs}" if self.num_epochs else f"{len(self.epochs)}"

    @property
    def class_names(self) -> list[str]:
        """Of the classes that are reported."""
        classes = next((epoch.classes for epoch in reversed(self.epochs) if epoch.classes), None)
        return list(classes or self.model.get("classes") or ["foreground"])

    @property
    def id_names(self) -> list[str]:
        """Of all class ids, in the order of a confusion matrix."""
        ids = self.model.get("ids")
        return list(ids) if ids else [*(["background"] if len(self.class_names) == 1 else []), *self.class_names]

    @property
    def has_background(self) -> bool:
        """Whether class 0 is not reported."""
        return len(self.class_names) < len(self.id_names)

    @property
    def best(self) -> EpochRecord | None:
        """The epoch with the best value of the monitored metric, the first of equals; None before there is one."""
        sign = -1 if self.monitor == "val_loss" else 1
        scored = [(epoch, value) for epoch in self.epochs if (value := epoch.get(self.monitor)) is not None]
        return max(scored, key=lambda pair: (sign * pair[1], -pair[0].number))[0] if scored else None

    @property
    def per_class_iou(self) -> dict[str, float | None]:
        """Of the best epoch."""
        return {} if self.best is None else {name: scores.get("iou") for name, scores in self.best.classes.items()}

    @property
    def best_iou(self) -> float | None:
        """Of the best epoch."""
        return None if self.best is None else self.best.get("val_iou")

    def worst_classes(self, most: int) -> list[str]:
        """All class names in their order; of more than `most` those that the best epoch scores worst."""
        names, best = self.class_names, self.per_class_iou
        if len(names) <= most:
            return names
        return sorted(names, key=lambda name: 2.0 if (value := best.get(name)) is None else value)[:most]

    @cached_property
    def image_scores(self) -> list[ImageScore]:
        """Of the best epoch, the worst first."""
        with noting(VAL_SCORES, self.problems):
            return read_val_scores(self.folder / VAL_SCORES, self.class_names)
        return []

    def column(self, name: str) -> dict[int, float]:
        """Of metrics.csv: epoch and value, where there is one."""
        return {epoch.number: value for epoch in self.epochs if (value := epoch.get(name)) is not None}

    def class_column(self, name: str) -> dict[int, float]:
        """IoU of a class by epoch, where there is one."""
        return {epoch.number: value for epoch in self.epochs if (value := epoch.score(name, "iou")) is not None}

    def peak(self, name: str) -> float:
        return max(self.column(name).values(), default=0.0)

    @property
    def seconds(self) -> float:
        """In epochs."""
        return sum(self.column("seconds").values())

    @property
    def images_per_second(self) -> float | None:
        values = [value for value in self.column("images_per_second").values() if value > 0]
        return harmonic_mean(values) if values else None


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
    return sorted(
        folders, key=lambda folder: (_touched(folder) or datetime.min.replace(tzinfo=UTC), folder.name), reverse=True
    )


def read_run_summary(folder: Path) -> RunSummary:
    """All that the folder tells. Never raises for what is missing, cut off or damaged; what is damaged is in
    `problems`."""
    problems: list[str] = []
    raw = read_events(folder, problems)
    last = {event["kind"]: event for event in raw}  # of each kind
    start = last.get("start", {})
    result: dict[str, Any] = {}
    with noting(RESULT_JSON, problems):
        result = pick(RESULT_SHAPE, read_json(folder / RESULT_JSON))
    pilots: list[dict[str, Any]] = last.get("pilots", {}).get("pilots", [])
    model = start.get("model", {})
    epochs, settings = _read_epochs(raw, model.get("ids"), problems), _read_settings(folder, problems)
    return RunSummary(
        folder=folder,
        state=_state(folder, raw, bool(problems)),
        epochs=epochs,
        settings=settings,
        events=list(_events(raw)),
        machine=start.get("machine", {}),
        data=start.get("data", {}),
        model=model,
        warnings=result.get("warnings", []),
        startup_seconds=last.get("ready", {}).get("startup_seconds"),
        pilots=[one for one in pilots if one.keys() == PILOT.keys()],  # that have all that a page shows of them
        starts=[time for event in raw if event["kind"] == "start" and (time := _time(event)) is not None],
        updated=_touched(folder),
        problems=problems,
    )


def _state(folder: Path, raw: Sequence[Mapping[str, Any]], is_damaged: bool) -> State:
    last = next((event for event in reversed(raw) if event["kind"] in ("start", "end")), {"kind": "start"})
    if is_locked(folder) and not (last["kind"] == "end" and is_locked_here(folder)):  # the lock is released last
        return "running"
    ends: dict[str | None, State] = {"finished": "finished", "stopped early": "stopped early", "failed": "failed"}
    return "damaged" if is_damaged else ends.get(last.get("how"), "interrupted")  # without an end it was killed


def _read_epochs(raw: list[dict[str, Any]], ids: list[str] | None, problems: list[str]) -> list[EpochRecord]:
    found = [read_epoch(event) for event in current_epochs(raw).values()]
    names = next((list(record.classes) for record in reversed(found) if record.classes), [])
    num_ids = len(ids) if ids else max(2, len(names))
    is_known = names == [name for name in ids or names if name in names]
    for record in found:  # each has the classes of the run and counts of all ids, or neither
        counts = record.confusion
        is_square = counts is None or [len(row) for row in counts] == [num_ids] * num_ids
        is_bounded = all(0 <= count <= MAX_PIXELS for row in counts or () for count in row)
        if not (is_known and is_square and is_bounded and list(record.classes) in ([], names)):
            problems.append(
                f"{EVENTS}: epoch {record.number} has other classes than the run, or no counts of their pixels"
            )
            return [replace(one, classes={}, confusion=None) for one in found]
    return found


def read_epoch(event: Mapping[str, Any]) -> EpochRecord:
    """An epoch event as a record."""
    row = {name: event[name] for name in COLUMNS if event.get(name) is not None}
    stages = {name: seconds for name, seconds in event.get("stages", {}).items() if seconds is not None}
    return EpochRecord(event["epoch"], row, event.get("classes", {}), event.get("confusion"), stages, _time(event))


def _read_settings(folder: Path, problems: list[str]) -> dict[str, Setting]:
    with noting(SETTINGS, problems):
        found = {}
        for name, entry in as_object(read_json(folder / SETTINGS)).items():
            with noting(f"{SETTINGS}, {name:.60}", problems):
                found[name] = Setting(**{"value": None, **pick(SETTING_SHAPE, entry)})
        return found
    return {}


def _events(raw: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """What happened, with what follows from the order: a start after one without an end was killed."""
    num_finished, is_open, last_time = 0, False, None
    for event in raw:
        kind, time, text = event["kind"], _time(event), event.get("text", "")
        if kind == "start":
            after = event.get("resumed_after", {})
            if is_open:
                yield Event("killed", last_time, num_finished, "the process ended without a word")
            num_finished, is_open = after.get("epoch", 0), True
            yield Event("resumed" if after else "start", time, num_finished, text, after.get("batch", 0))
        elif kind in ("epoch", "rollback", "shrink"):
            num_finished = event.get("epoch", 0)
        if kind in ("rollback", "shrink", "warning", "note"):
            yield Event(kind, time, num_finished, text, event.get("batch", 0))
        elif kind == "end":
            is_open = False
            yield Event(event.get("how") or "interrupted", time, num_finished, text)
        last_time = time or last_time


def _touched(folder: Path) -> datetime | None:
    """When the run last wrote one of its files."""
    times = []
    for name in RUN_FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    with contextlib.suppress(OverflowError, ValueError, OSError):  # a time that no calendar has
        return datetime.fromtimestamp(max(times), UTC) if times else None
    return None


def _time(event: Mapping[str, Any]) -> datetime | None:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(event.get("time", ""))
    return None
