"""Experiment trackers that the user may switch on: TensorBoard, Weights & Biases, Trackio, MLflow. Never on by default.

Each adapter begins the run or goes on with it: `id` is what the service knows it by, `earlier_id` that of a run that is
resumed, whose epochs after `first_epoch` are logged again."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config, as_dict
from unet_trainer.runs.folder import SAMPLE_NAMES, SAMPLES
from unet_trainer.runs.record import COMPLETE, EpochRecord, RunRecord
from unet_trainer.system.console import first_line

PROJECT = "unet-trainer"
# column of metrics.csv → name in a tracker: what stands before the slash makes a group
SCALARS = {f"{split}_{score}": f"{score}/{split}" for score in ("loss", "iou", "dice") for split in ("train", "val")}
for _name in ("learning_rate", "images_per_second", "data_wait", "seconds", "peak_memory_gib"):
    SCALARS[_name] = f"training/{_name}"
Values = Mapping[str, Any]


class TensorBoard:
    """Writes into RUN/tensorboard: settings as text, scalars, pictures."""

    id = None

    def __init__(self, folder: Path, settings: Values, first_epoch: int, earlier_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # hides what was logged of epochs that are trained again
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_epoch + 1 if first_epoch else None)
        self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, epoch: int, scalars: Values, picture: Path | None) -> None:
        from unet_trainer.images.image_decoding import read_image

        for name, value in scalars.items():
            self.writer.add_scalar(name, value, epoch)
        if picture is not None:
            self.writer.add_image(SAMPLES, read_image(picture), epoch, dataformats="HWC")
        self.writer.flush()

    def finish(self, is_complete: bool) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases, and Trackio, which has its calls. Without an API key, wandb writes into RUN/wandb alone."""

    def __init__(self, package: str, folder: Path, settings: Values, first_epoch: int, earlier_id: str | None) -> None:
        self.package, self.module = package, importlib.import_module(package)
        options: dict[str, Any] = {"project": PROJECT, "name": folder.name, "resume": "allow", "config": dict(settings)}
        if package == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            has_key = os.environ.get("WANDB_API_KEY") or self.module.login(prompt=False)  # else it asks for one
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
            options |= {"dir": str(folder), "id": earlier_id, "mode": mode}
        self.id = getattr(self.module.init(**options), "id", None)

    def log(self, epoch: int, scalars: Values, picture: Path | None) -> None:
        pictures = {} if picture is None else {SAMPLES: self.module.Image(str(picture))}
        self.module.log({**scalars, **pictures}, step=epoch)

    def finish(self, is_complete: bool) -> None:
        self.module.finish(**({"exit_code": 0 if is_complete else 1} if self.package == "wandb" else {}))


class Mlflow:
    """MLflow, in checkpoint_dir/mlruns unless MLFLOW_TRACKING_URI says where."""

    def __init__(self, folder: Path, settings: Values, first_epoch: int, earlier_id: str | None) -> None:
        self.module = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.module.set_tracking_uri((folder.absolute().parent / "mlruns").as_uri())
        self.module.set_experiment(PROJECT)
        self.id = self.module.start_run(run_id=earlier_id, run_name=folder.name).info.run_id
        if earlier_id is None:
            self.module.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, epoch: int, scalars: Values, picture: Path | None) -> None:
        self.module.log_metrics(dict(scalars), step=epoch)
        if picture is not None:
            self.module.log_artifact(str(picture), SAMPLES)

    def finish(self, is_complete: bool) -> None:
        self.module.end_run("FINISHED" if is_complete else "KILLED")


TRACKERS: dict[str, Callable[..., Any]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(Wandb, "wandb"),
    "trackio": partial(Wandb, "trackio"),
    "mlflow": Mlflow,
}


class Trackers:
    """Those of a run that are switched on. The first error of a service switches it off."""

    def __init__(
        self, config: Config, folder: Path, first_epoch: int, record: RunRecord, warn: Callable[[str], object]
    ) -> None:
        self.folder, self.record, self.warn = folder, record, warn
        self.last_picture: Path | None = None
        settings, known, self.running = as_dict(config), record.content.trackers, dict[str, Any]()
        for name in filter(settings.__getitem__, TRACKERS):
            with self._leaving_out(name):
                self.running[name] = TRACKERS[name](folder, settings, first_epoch, known.get(name))
        ids = {name: str(tracker.id) for name, tracker in self.running.items() if tracker.id is not None}
        record.update(trackers={**known, **ids})

    def log(self, epoch: EpochRecord) -> None:
        """With the newest of the samples, which are written a little later than their epoch ends."""
        newest = max((self.folder / SAMPLES).glob(SAMPLE_NAMES), default=None)
        picture = None if newest == self.last_picture else newest
        self.last_picture = newest
        scalars = {shown: value for column, shown in SCALARS.items() if (value := epoch.get(column)) is not None}
        for name, scores in epoch.classes.items():
            scalars |= {f"{score} of classes/{name}": value for score, value in scores.items() if value is not None}
        self._call("log", epoch.number, scalars, picture)

    def finish(self) -> None:
        self._call("finish", self.record.content.last_end in COMPLETE)

    def _call(self, moment: str, *arguments: Any) -> None:
        for name, tracker in list(self.running.items()):
            with self._leaving_out(name):
                getattr(tracker, moment)(*arguments)

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # anything that a service may raise
            self.running.pop(name, None)
            self.warn(f"{name}: {type(error).__name__}: {first_line(error)}; training continues without it")
