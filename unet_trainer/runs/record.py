"""run.json, in which a run records what it is and what happened: its writer, and its reader. Replaced whole with each
save of the state; a damaged one is not read. Imports no torch."""

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import harmonic_mean
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic refuses that of Python 3.11

from unet_trainer.config.safe_yaml import map_leaves
from unet_trainer.runs.folder import RUN_JSON, VAL_SCORES, written_at
from unet_trainer.runs.tables import MAX_PIXELS, ImageScore, Row, read_val_scores
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import read_json
from unet_trainer.system.json_cache import check_plain
from unet_trainer.system.locks import is_locked, is_locked_here

State = Literal["running", "finished", "stopped early", "interrupted", "failed", "damaged"]
ENDS: tuple[State, ...] = ("finished", "stopped early", "interrupted", "failed")
COMPLETE: tuple[State, ...] = ENDS[:2]  # the run ended by itself
STARTS = ("start", "resumed")
MARKED = ("interrupted", "killed", "failed", "shrink")  # events that charts show
MIN_GAIN = 0.01  # of what lies between the baseline and an IoU of 1; a model below it is of no use
MAX_NUMBER = 1e100  # beyond which a sum over epochs may not be finite
Number = Annotated[float, Field(strict=True, gt=-MAX_NUMBER, lt=MAX_NUMBER, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_PIXELS)]
Plain = Annotated[Any, AfterValidator(check_plain)]


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch. `row`: the finite columns of metrics.csv. `classes`: of each class that is reported, by its
    name, iou, dice, precision and recall; None: the class does not occur."""

    number: Annotated[Count, Field(ge=1)]
    row: dict[str, Number]
    classes: dict[str, dict[str, Number | None]] = Field(default_factory=dict)
    # rows truth, columns prediction, of all ids; of the best epoch alone: a thousand of them take 100 MB
    confusion: list[list[Count]] | None = None
    stages: dict[str, Number] = Field(default_factory=dict)  # seconds
    time: AwareDatetime | None = None

    def get(self, column: str) -> float | None:
        return self.row.get(column)

    def score(self, name: str, kind: str) -> float | None:
        """Of a class: iou, dice, precision or recall."""
        return self.classes.get(name, {}).get(kind)


@dataclass(frozen=True)
class Setting:
    """`source`: default, demo, file, config, command line, argument, decided, trials; empty: not known."""

    value: Plain = None
    source: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Event:
    """`kind`: start, resumed, shrink, interrupted, killed, failed, finished, stopped early, warning, note. `epoch`:
    epochs that were finished then; `batch`: batches of the next one."""

    kind: str
    time: AwareDatetime | None = None
    epoch: Count = 0
    text: str = ""
    batch: Count = 0


@dataclass(frozen=True)
class Trial:
    """A learning rate that was tried before the first epoch, and the training IoU that it came to."""

    learning_rate: Number
    iou: Number
    steps: Count
    is_chosen: bool


class Machine(TypedDict, total=False):
    device: str
    name: str
    host: str
    system: str
    python: str
    cores: Count
    memory_gib: Number
    versions: dict[str, str]


class ClassShare(TypedDict, total=False):
    name: str
    values: str
    share: Number | None


class Data(TypedDict, total=False):
    data_dir: str
    split: str
    images: str
    sizes: str
    fit: str
    num_train: Count
    num_val: Count
    num_test: Count
    model_size: list[Count]
    classes: list[ClassShare]
    ignored_share: Number | None
    notices: list[str]


class Model(TypedDict, total=False):
    architecture: str
    encoder: str
    init_from: str | None
    parameters: Count
    ids: list[str]  # names of all classes, in the order of a confusion matrix
    classes: list[str]  # of those that are reported


class Result(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc] # all of TrainResult but history and folder
    number_format: str
    is_compiled: bool
    best_val_iou: Number | None
    baseline_iou: Number | None
    warnings: list[str]


class RunFile(BaseModel):
    """The content of run.json."""

    format: Literal[1] = 1
    machine: Machine = {}
    data: Data = {}
    model: Model = {}
    settings: dict[str, Setting] = {}
    events: list[Event] = []
    trials: list[Trial] = []
    result: Result = {}  # empty until the run has ended by itself
    startup_seconds: Number | None = None
    trackers: dict[str, str] = {}  # the id of the run by the name of the service
    epochs: list[EpochRecord] = []

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        """Each has the classes of the run and counts of all ids, or neither."""
        size = len(self.id_names)
        if self.class_names != self.id_names[-len(self.class_names) :]:
            raise ValueError("the classes of the run are not those of its ids")
        for epoch in self.epochs:
            is_square = epoch.confusion is None or [len(row) for row in epoch.confusion] == [size] * size
            if not is_square or list(epoch.classes) not in ([], self.class_names):
                raise ValueError(f"epoch {epoch.number} has other classes than the run, or no counts of their pixels")
        for before, epoch in pairwise(self.epochs):
            if epoch.number <= before.number:
                raise ValueError(f"epoch {epoch.number} comes after epoch {before.number}")
        return self

    def value(self, setting: str, otherwise: Any = None) -> Any:
        return self.settings[setting].value if setting in self.settings else otherwise

    @property
    def class_names(self) -> list[str]:
        """Of the classes that are reported."""
        return self.model.get("classes") or ["foreground"]

    @property
    def id_names(self) -> list[str]:
        """Of all class ids, in the order of a confusion matrix."""
        return self.model.get("ids") or ["background", "foreground"]

    @property
    def monitor(self) -> str:
        return str(self.value("monitor", "val_iou"))

    @property
    def best(self) -> EpochRecord | None:
        """The epoch with the best value of the monitored metric, the first of equals; None before there is one."""
        sign = -1 if self.monitor == "val_loss" else 1
        scored = [epoch for epoch in self.epochs if self.monitor in epoch.row]
        return max(scored, key=lambda epoch: sign * epoch.row[self.monitor], default=None)

    @property
    def last_end(self) -> State | None:
        """None while the run goes on, or where it was killed."""
        last = next((event.kind for event in reversed(self.events) if event.kind in (*STARTS, *ENDS)), None)
        return next((state for state in ENDS if state == last), None)

    @property
    def num_finished(self) -> int:
        """Epochs, with those that a run in a new folder was resumed after."""
        return self.epochs[-1].number if self.epochs else self.events[-1].epoch if self.events else 0


def read_run_file(path: Path) -> RunFile:
    """Raises OSError, and ValueError for what no run has written."""
    content = read_json(path)
    try:
        return RunFile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")) from None


class RunRecord:
    """The writer of run.json. What happens before the run has its folder waits until it has; safe from two threads."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.content = RunFile()
        self._lock = threading.RLock()

    def open(self, folder: Path, resumed_after: Mapping[str, int] | None = None, **about: Mapping[str, Any]) -> None:
        """Begin the record in the folder, or go on with the one there (`resumed_after`: epoch and batch). `about`:
        machine, data, model."""
        self.path, values, kind, text = folder / RUN_JSON, finite(about), "start", ""
        if resumed_after is not None:
            kind = "resumed"
            try:
                before = read_run_file(self.path)
                if before.events and before.last_end is None:
                    last = (before.epochs or before.events)[-1].time
                    before.events.append(Event("killed", last, before.num_finished, "the process ended without a word"))
                epochs = [record for record in before.epochs if record.number <= resumed_after["epoch"]]
                values = {**vars(before), **values, "epochs": epochs, "result": {}}
            except FileNotFoundError:
                pass
            except ValueError as error:
                text = f"what the run recorded before is lost ({RUN_JSON}: {first_line(error)})"
        start = Event(kind, _now(), text=text, **(resumed_after or {}))
        with self._lock:
            early = [replace(event, epoch=start.epoch) for event in self.content.events]
            self.content = RunFile(**values)
            self.content.events += [*early, start]
            self._write()

    def add(self, kind: str, text: str = "", epoch: int | None = None, batch: int = 0) -> None:
        """Add an event, written with the next save. `epoch`, `batch`: of a restored state."""
        with self._lock:
            if epoch is not None:
                self.content.epochs[:] = [record for record in self.content.epochs if record.number <= epoch]
            number = self.content.num_finished if epoch is None else epoch
            self.content.events.append(Event(kind, _now(), number, text, batch))

    def end(self, how: str, text: str = "") -> None:
        """Add the end of the run, once: what happens while a report is written is no other one."""
        if self.content.last_end is None:
            self.add(how, text)
        self.save()

    def add_epoch(
        self,
        row: Row,
        classes: Mapping[str, Mapping[str, float | None]],
        confusion: list[list[int]] | None,
        stages: Mapping[str, float],
    ) -> EpochRecord:
        """Add an epoch, which is written with the next save."""
        numbers = {name: value for name, value in row.items() if name != "epoch" and abs(value) < MAX_NUMBER}
        epoch = EpochRecord(int(row["epoch"]), numbers, finite(classes), confusion, dict(stages), _now())
        with self._lock:
            epochs = self.content.epochs
            epochs.append(epoch)
            best = self.content.best
            epochs[:] = [one if one is best or not one.confusion else replace(one, confusion=None) for one in epochs]
        return epoch

    def update(self, **values: Any) -> None:
        """Replace fields of the content, and save it if they change."""
        with self._lock:
            before, self.content = self.content, RunFile(**{**vars(self.content), **finite(values)})
            if any(getattr(before, name) != getattr(self.content, name) for name in values):
                self.save()

    def save(self) -> None:
        """Write the file. A disk that refuses it is reported by the save of the state."""
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        with self._lock:
            if self.path is not None:
                text = json.dumps(self.content, default=_plain, ensure_ascii=False, allow_nan=False)
                # names that are not UTF-8 become escapes of JSON
                write_bytes_atomically(self.path, text.encode("utf-8", "backslashreplace"))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else vars(value)


def finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    return map_leaves(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, value)


class Mark(NamedTuple):
    """What charts show of a run."""

    kind: str
    place: float  # on an axis of epochs
    epoch: int  # epochs that were finished then


class RunSummary(RunFile):
    """What a run's folder holds."""

    folder: Path
    state: State
    updated: datetime | None  # the last sign of life
    problems: list[str]  # what is damaged, and left out

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def warnings(self) -> list[str]:
        """About the result."""
        return self.result.get("warnings", [])

    @property
    def is_of_no_use(self) -> bool:
        """Whether training found at its end that the model is no better than none."""
        iou, baseline = self.result.get("best_val_iou"), self.result.get("baseline_iou")
        if iou is None or baseline is None or baseline == 1:  # 1: validation has one class
            return False
        return iou - baseline < MIN_GAIN * (1 - baseline)

    @property
    def num_epochs(self) -> int | None:
        """That are planned."""
        return number if type(number := self.value("num_epochs")) is int else None

    @property
    def progress(self) -> str:
        """Epochs that are done, of those that are planned: 5/6; 5 where the plan is not known."""
        return f"{len(self.epochs)}/{self.num_epochs}" if self.num_epochs else f"{len(self.epochs)}"

    @property
    def has_background(self) -> bool:
        """Whether class 0 is not reported."""
        return len(self.class_names) < len(self.id_names)

    @property
    def best_iou(self) -> float | None:
        return None if self.best is None else self.best.get("val_iou")

    @property
    def per_class_iou(self) -> dict[str, float | None]:
        """Of the best epoch."""
        return {} if self.best is None else {name: scores.get("iou") for name, scores in self.best.classes.items()}

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
            return read_val_scores(self.folder / VAL_SCORES)
        return []

    def column(self, name: str, kind: str = "") -> dict[int, float]:
        """Epoch and value, where there is one: of a column of metrics.csv, or this kind of score of a class."""
        values = {one.number: one.score(name, kind) if kind else one.get(name) for one in self.epochs}
        return {number: value for number, value in values.items() if value is not None}

    @property
    def marks(self) -> list[Mark]:
        """Of a run with epochs: the best one, interruptions, the early stop."""
        last, marked = self.epochs[-1].number, [event for event in self.events if event.kind in MARKED]
        found = [] if self.best is None else [Mark("best", self.best.number, self.best.number)]
        # between two epochs, within the chart
        found += [Mark(one.kind, min(max(one.epoch + 0.5, 1), max(1, last)), one.epoch) for one in marked]
        return found + ([Mark("stopped", last, last)] if self.state == "stopped early" else [])

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


def read_run_summary(folder: Path) -> RunSummary:
    """All that the folder tells. Never raises: what is damaged is in `problems`."""
    content, problems = RunFile(), list[str]()
    with noting(RUN_JSON, problems):
        content = read_run_file(folder / RUN_JSON)
    state: State = "damaged" if problems else content.last_end or "interrupted"  # without an end it was killed
    if is_locked(folder) and not (content.last_end and is_locked_here(folder)):  # the lock is released last
        state = "running"
    updated = None if (time := written_at(folder)) is None else datetime.fromtimestamp(time, UTC)
    return RunSummary(**vars(content), folder=folder, state=state, updated=updated, problems=problems)


@contextlib.contextmanager
def noting(name: str, problems: list[str]) -> Iterator[None]:
    """Around reading a file that need not be there: what is wrong with it is noted."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problems.append(f"{name}: {getattr(error, 'strerror', None) or first_line(error)}")
