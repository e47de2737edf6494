"""Experiment trackers that a user may switch on: TensorBoard, Weights & Biases, Trackio, MLflow. Never on by default.

Their packages are optional and imported when a run begins. Each adapter has `init`, which begins the run or goes on
with it and returns the id by which the service knows it, `log` and `finish`. `first_epoch`: epochs that are done, later
ones are logged again; `earlier_id`: of a run that is resumed.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config, as_dict
from unet_trainer.runs.folder import SAMPLE_NAMES, SAMPLES
from unet_trainer.runs.record import COMPLETE, EpochRecord, RunFile, RunRecord
from unet_trainer.system.console import first_line

PROJECT = "unet-trainer"
# column of metrics.csv → name in a tracker: what stands before the slash makes a group
SCALARS = {f"{split}_{score}": f"{score}/{split}" for score in ("loss", "iou", "dice") for split in ("train", "val")}
for _name in ("learning_rate", "images_per_second", "data_wait", "seconds", "peak_memory_gib"):
    SCALARS[_name] = f"training/{_name}"


class TensorBoardTracker:
    """Writes into RUN/tensorboard: scalars, pictures, and settings with their outcome as hparams."""

    def init(self, folder: Path, settings: Mapping[str, Any], first_epoch: int, earlier_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # hides what was logged of epochs that are trained again
        purge = first_epoch + 1 if first_epoch else None
        self.settings, self.writer = settings, SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, epoch: int, scalars: Mapping[str, float], picture: Path | None) -> None:
        from unet_trainer.images.image_decoding import read_image

        for name, value in scalars.items():
            self.writer.add_scalar(name, value, epoch)
        if picture is not None:
            self.writer.add_image(SAMPLES, read_image(picture), epoch, dataformats="HWC")
        self.writer.flush()

    def finish(self, outcome: Mapping[str, float], is_complete: bool) -> None:
        types = (str, int, float)  # that hparams take
        plain = {name: value if isinstance(value, types) else str(value) for name, value in self.settings.items()}
        named = {f"hparam/{name}": value for name, value in outcome.items()}
        self.writer.add_hparams(plain, named, run_name=".")  # in the same folder, not in one of its own
        self.writer.close()


class WandbTracker:
    """Weights & Biases, and Trackio, which has its calls. Without an API key, wandb writes into RUN/wandb and sends
    nothing."""

    def __init__(self, package: str) -> None:
        self.package = package

    def init(self, folder: Path, settings: Mapping[str, Any], first_epoch: int, earlier_id: str | None) -> str | None:
        self.module = importlib.import_module(self.package)
        options: dict[str, Any] = {"project": PROJECT, "name": folder.name, "resume": "allow", "config": dict(settings)}
        if self.package == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            mode = os.environ.get("WANDB_MODE")
            if not mode:  # else it asks for a key
                mode = "online" if os.environ.get("WANDB_API_KEY") or self.module.login(prompt=False) else "offline"
            options |= {"dir": str(folder), "id": earlier_id, "mode": mode}
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

    def init(self, folder: Path, settings: Mapping[str, Any], first_epoch: int, earlier_id: str | None) -> str | None:
        self.module = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.module.set_tracking_uri((folder.absolute().parent / "mlruns").as_uri())
        self.module.set_experiment(PROJECT)
        begun = self.module.start_run(run_id=earlier_id, run_name=folder.name)
        if earlier_id is None:
            self.module.log_params({name: str(value)[:500] for name, value in settings.items()})
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


class Trackers:
    """Those of a run that are switched on, with the ids by which they know a run that is resumed. The first error of a
    service switches it off."""

    def __init__(
        self, config: Config, folder: Path, first_epoch: int, record: RunRecord, warn: Callable[[str], object]
    ) -> None:
        self.folder, self.record, self.warn = folder, record, warn
        settings, earlier = as_dict(config), record.content.trackers
        self.running = {name: make() for name, make in TRACKERS.items() if settings[name]}
        self.last_picture = ""
        ids = self._call(lambda name, tracker: tracker.init(folder, settings, first_epoch, earlier.get(name)))
        known = {name: str(run_id) for name, run_id in ids.items() if run_id is not None}
        record.update(trackers={**earlier, **known})

    def log(self, epoch: EpochRecord) -> None:
        """With the newest of the samples, if there is one since the last call: they are written a little later than
        their epoch ends."""
        newest = max((self.folder / SAMPLES).glob(SAMPLE_NAMES), default=None)
        picture = newest if newest is not None and newest.name > self.last_picture else None
        self.last_picture = newest.name if newest is not None else ""
        scalars = scalars_of(epoch)
        self._call(lambda name, tracker: tracker.log(epoch.number, scalars, picture))

    def finish(self) -> None:
        outcome, is_complete = outcome_of(self.record.content), self.record.content.last_end in COMPLETE
        self._call(lambda name, tracker: tracker.finish(outcome, is_complete))

    def _call(self, call: Callable[[str, Tracker], Any]) -> dict[str, Any]:
        """What the call returns for each tracker."""
        returned = {}
        for name, tracker in list(self.running.items()):
            try:
                returned[name] = call(name, tracker)
            except (Exception, SystemExit) as error:  # anything that a service may raise
                del self.running[name]
                self.warn(f"{name}: {type(error).__name__}: {first_line(error)}; training continues without it")
        return returned
