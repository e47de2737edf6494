"""Experiment trackers that a user may switch on: TensorBoard, Weights & Biases, Trackio, MLflow. Never on by default.

Their packages are optional and imported when a run begins. They are called once an epoch; one that fails is left out
from then on. Each has `init(run)`, which begins the run or goes on with it and returns the id by which the service
knows it, `log(epoch, scalars, picture)` and `finish(outcome, is_complete)`.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config, as_dict
from unet_trainer.runs.folder import SAMPLE_NAMES, SAMPLES
from unet_trainer.runs.record import EpochRecord, RunFile, RunRecord
from unet_trainer.system.console import first_line

PROJECT = "unet-trainer"
# column of metrics.csv → name in a tracker: what stands before the slash makes a group
SCALARS = {f"{split}_{score}": f"{score}/{split}" for score in ("loss", "iou", "dice") for split in ("train", "val")}
for _name in ("learning_rate", "images_per_second", "data_wait", "seconds", "peak_memory_gib"):
    SCALARS[_name] = f"training/{_name}"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run begins."""

    folder: Path
    settings: Mapping[str, Any]  # plain values
    first_epoch: int = 0  # epochs that are done: later ones are logged again
    earlier_id: str | None = None  # by which the tracker knows the run, if it was resumed


class TensorBoardTracker:
    """Writes into RUN/tensorboard: scalars, pictures, and settings with their outcome as hparams."""

    def init(self, run: TrackedRun) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        # hides what was logged of epochs that are trained again
        purge = run.first_epoch + 1 if run.first_epoch else None
        self.run, self.writer = run, SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        return None

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, epoch)
        if picture is not None:
            from unet_trainer.images.image_decoding import read_image

            self.writer.add_image(SAMPLES, read_image(picture), epoch, dataformats="HWC")
        self.writer.flush()

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        settings, takes = self.run.settings, (str, int, float)
        plain = {name: value if isinstance(value, takes) else str(value) for name, value in settings.items()}
        named = {f"hparam/{name}": value for name, value in outcome.items()}
        self.writer.add_hparams(plain, named, run_name=".")  # in the same folder, not in one of its own
        self.writer.close()


class WandbTracker:
    """Weights & Biases, and Trackio, which has its calls. Without an API key, wandb writes into RUN/wandb and sends
    nothing."""

    def __init__(self, package: str) -> None:
        self.package = package

    def init(self, run: TrackedRun) -> str | None:
        self.module = importlib.import_module(self.package)
        options: dict[str, Any] = {"project": PROJECT, "name": run.folder.name, "resume": "allow"}
        options["config"] = dict(run.settings)
        if self.package == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            options |= {"dir": str(run.folder), "id": run.earlier_id}
            options["mode"] = os.environ.get("WANDB_MODE")
            if not options["mode"]:  # else it asks for a key
                has_key = os.environ.get("WANDB_API_KEY") or self.module.login(prompt=False)
                options["mode"] = "online" if has_key else "offline"
        return getattr(self.module.init(**options), "id", None)

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        pictures = {} if picture is None else {SAMPLES: self.module.Image(str(picture))}
        self.module.log({**scalars, **pictures}, step=epoch)

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        if (summary := getattr(getattr(self.module, "run", None), "summary", None)) is not None:
            summary.update(dict(outcome))
        self.module.finish(**({"exit_code": 0 if is_complete else 1} if self.package == "wandb" else {}))


class MlflowTracker:
    """MLflow, in checkpoint_dir/mlruns unless MLFLOW_TRACKING_URI says where."""

    def init(self, run: TrackedRun) -> str | None:
        self.module = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.module.set_tracking_uri((run.folder.absolute().parent / "mlruns").as_uri())
        self.module.set_experiment(PROJECT)
        begun = self.module.start_run(run_id=run.earlier_id, run_name=run.folder.name)
        if run.earlier_id is None:
            self.module.log_params({name: str(value)[:500] for name, value in run.settings.items()})
        return str(begun.info.run_id)

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        self.module.log_metrics(dict(scalars), step=epoch)
        if picture is not None:
            self.module.log_artifact(str(picture), SAMPLES)

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        self.module.log_metrics(dict(outcome))
        self.module.end_run("FINISHED" if is_complete else "KILLED")


Tracker = TensorBoardTracker | WandbTracker | MlflowTracker
TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": partial(WandbTracker, "wandb"),
    "trackio": partial(WandbTracker, "trackio"),
    "mlflow": MlflowTracker,
}


def scalars_of(epoch: EpochRecord) -> dict[str, float]:
    """The figures of an epoch under the names that trackers show; what is undefined is left out."""
    found = {shown: value for column, shown in SCALARS.items() if (value := epoch.get(column)) is not None}
    for name, scores in epoch.classes.items():
        found |= {f"{score} of classes/{name}": value for score, value in scores.items() if value is not None}
    return found


def outcome_of(content: RunFile) -> dict[str, float]:
    """Figures of the whole run."""
    if (best := content.best) is None:
        return {}
    names = ("val_iou", "val_dice", "val_loss")
    scores = {f"best_{name}": value for name in names if (value := best.get(name)) is not None}
    return {"best_epoch": float(best.number), "epochs": float(len(content.epochs)), **scores}


class RunTracker:
    """A tracker of a run, which the first error of its service switches off."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, record: RunRecord) -> None:
        self.name, self.tracker, self.run, self.record = name, tracker, run, record
        self.warn: Callable[[str], object] = print
        self.is_on = True
        self._last_picture = ""

    def start(self, warn: Callable[[str], object]) -> None:
        self.warn = warn
        self._try(self._init)

    def _init(self) -> None:
        if (run_id := self.tracker.init(self.run)) is not None:
            self.record.update(trackers={**self.record.content.trackers, self.name: str(run_id)})

    def log(self, epoch: EpochRecord) -> None:
        """With the newest of the samples, if there is one since the last call: they are written a little later than
        their epoch ends."""
        newest = max((self.run.folder / SAMPLES).glob(SAMPLE_NAMES), default=None)
        is_new = newest is not None and newest.name > self._last_picture
        self._last_picture = newest.name if newest is not None else ""
        self._try(lambda: self.tracker.log(epoch.number, scalars_of(epoch), newest if is_new else None))

    def finish(self) -> None:
        content = self.record.content
        is_complete = content.last_end in ("finished", "stopped early")
        self._try(lambda: self.tracker.finish(outcome_of(content), is_complete))

    def _try(self, call: Callable[[], object]) -> None:
        if not self.is_on:
            return
        try:
            call()
        except (Exception, SystemExit) as error:  # anything that a service may raise
            self.is_on = False
            self.warn(f"{self.name}: {type(error).__name__}: {first_line(error)}; training continues without it")


def build_trackers(config: Config, folder: Path, first_epoch: int, record: RunRecord) -> list[RunTracker]:
    """Those that are switched on, with the id by which they know a run that is resumed."""
    ids, settings = record.content.trackers, as_dict(config)
    runs = {name: TrackedRun(folder, settings, first_epoch, ids.get(name)) for name in TRACKERS if settings[name]}
    return [RunTracker(name, TRACKERS[name](), run, record) for name, run in runs.items()]
