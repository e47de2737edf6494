"""Experiment trackers that a user may switch on: TensorBoard, Weights & Biases, Trackio, MLflow. Never on by default.

One small protocol for all of them. The packages are optional and imported when a run begins; calls are made in a thread of their
own (tracker_queue), so that no adapter here needs to be careful.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config
from unet_trainer.runs.run_summary import EpochRecord, RunSummary

PROJECT = "unet-trainer"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}  # key → package to install
PICTURES = "samples"
# column of metrics.csv → name in a tracker: what stands before the slash makes a group
SCALARS = {
    "train_loss": "loss/train",
    "val_loss": "loss/val",
    "train_iou": "iou/train",
    "val_iou": "iou/val",
    "val_dice": "dice/val",
    "learning_rate": "training/learning_rate",
    "images_per_second": "training/images_per_second",
    "data_wait": "training/data_wait",
    "seconds": "training/seconds",
    "peak_memory_gib": "training/peak_memory_gib",
}


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run begins."""

    folder: Path
    settings: Mapping[str, Any]  # plain values
    first_epoch: int = 0  # epochs that are done: later ones are logged again
    earlier_id: str | None = None  # by which the tracker knows the run, if it was resumed

    @property
    def name(self) -> str:
        return self.folder.name

    def flat_settings(self) -> dict[str, str | int | float | bool]:
        """Numbers, flags and text; everything else as text."""
        return {name: value if isinstance(value, str | int | float | bool) else str(value) for name, value in self.settings.items()}


class Tracker(Protocol):
    """A service that shows runs."""

    def init(self, run: TrackedRun) -> str | None:
        """Begins a run, or goes on with it; returns the id by which the service knows it."""

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        """What an epoch came to; the picture is of this epoch or an earlier one."""

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        """`outcome`: figures of the whole run. `is_complete`: it was neither interrupted nor did it fail."""


@dataclass
class TensorBoardTracker:
    """Writes into RUN/tensorboard: scalars, pictures, and settings with their outcome as hparams."""

    run: TrackedRun | None = None
    writer: Any = None

    def init(self, run: TrackedRun) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        # What was logged of epochs that are trained again is hidden.
        purge = run.first_epoch + 1 if run.first_epoch else None
        self.run, self.writer = run, SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        return None

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, epoch)
        if picture is not None:
            from unet_trainer.images.image_files import read_image

            self.writer.add_image(PICTURES, read_image(picture), epoch, dataformats="HWC")
        self.writer.flush()

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        assert self.run is not None
        named = {f"hparam/{name}": value for name, value in outcome.items()}
        self.writer.add_hparams(self.run.flat_settings(), named, run_name=".")  # in the same folder, not in one of its own
        self.writer.close()


@dataclass
class WandbTracker:
    """Weights & Biases, and Trackio, which has its calls. Without an API key, wandb writes into RUN/wandb and sends nothing."""

    package: str
    module: Any = None

    def init(self, run: TrackedRun) -> str | None:
        self.module = importlib.import_module(self.package)
        options: dict[str, Any] = {"project": PROJECT, "name": run.name, "config": dict(run.settings), "resume": "allow"}
        if self.package == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            options |= {"dir": str(run.folder), "id": run.earlier_id}
            options["mode"] = os.environ.get("WANDB_MODE") or ("online" if self._has_key() else "offline")  # else it asks for one
        begun = self.module.init(**options)
        return getattr(begun, "id", None)

    def _has_key(self) -> bool:
        """Whether wandb has an API key. Never asks for one."""
        if os.environ.get("WANDB_API_KEY"):
            return True
        try:
            return bool(self.module.login(prompt=False))
        except TypeError:  # before wandb 0.28
            return bool(self.module.api.api_key)

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        content: dict[str, Any] = dict(scalars)
        if picture is not None:
            content[PICTURES] = self.module.Image(str(picture))
        self.module.log(content, step=epoch)

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        run = getattr(self.module, "run", None)
        if hasattr(run, "summary"):
            run.summary.update(dict(outcome))  # type: ignore[union-attr]
        if self.package == "wandb":
            self.module.finish(exit_code=0 if is_complete else 1)
        else:
            self.module.finish()


@dataclass
class MlflowTracker:
    """MLflow, in checkpoint_dir/mlruns unless MLFLOW_TRACKING_URI says where."""

    module: Any = None

    def init(self, run: TrackedRun) -> str | None:
        self.module = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.module.set_tracking_uri((run.folder.absolute().parent / "mlruns").as_uri())
        self.module.set_experiment(PROJECT)
        begun = self.module.start_run(run_id=run.earlier_id, run_name=run.name)
        if run.earlier_id is None:
            self.module.log_params({name: str(value)[:500] for name, value in run.settings.items()})
        return str(begun.info.run_id)

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        self.module.log_metrics(dict(scalars), step=epoch)
        if picture is not None:
            self.module.log_artifact(str(picture), PICTURES)

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        self.module.log_metrics(dict(outcome))
        self.module.end_run("FINISHED" if is_complete else "KILLED")


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": lambda: WandbTracker("wandb"),
    "trackio": lambda: WandbTracker("trackio"),
    "mlflow": MlflowTracker,
}


def chosen_trackers(config: Config) -> list[str]:
    """The names of those that are switched on. Raises UserError where a package is missing."""
    chosen = [name for name in TRACKERS if getattr(config, name)]
    for name in chosen:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(f"{name}: the package is not installed; pip install {PACKAGES[name]}, or set {name}: false")
    return chosen


def scalars_of(epoch: EpochRecord) -> dict[str, float]:
    """The figures of an epoch under the names that trackers show; what is undefined is left out."""
    found = {shown: value for column, shown in SCALARS.items() if (value := epoch.get(column)) is not None}
    for name, scores in epoch.classes.items():
        per_class = {"iou": scores.iou, "dice": scores.dice, "precision": scores.precision, "recall": scores.recall}
        found |= {f"{score} of classes/{name}": value for score, value in per_class.items() if value is not None}
    return found


def outcome_of(summary: RunSummary) -> dict[str, float]:
    """Figures of the whole run."""
    best = summary.best
    if best is None:
        return {}
    columns = {"best_val_iou": "val_iou", "best_val_dice": "val_dice", "best_val_loss": "val_loss"}
    found = {name: value for name, column in columns.items() if (value := best.get(column)) is not None}
    return {"best_epoch": float(best.number), "epochs": float(len(summary.epochs)), **found}
