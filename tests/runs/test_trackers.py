"""Adapters of experiment trackers, against fake packages; TensorBoard against the real one where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.images.image_files import write_image
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.run_summary import ClassScores, EpochRecord, read_run_summary
from unet_trainer.runs.trackers import TRACKERS, TrackedRun, chosen_trackers, outcome_of, scalars_of

SETTINGS = {"batch_size": 8, "grad_clip": None, "loss": {"dice": 1.0}, "encoder": "resnet18", "use_amp": False}


class FakeModule(ModuleType):
    """Records every call."""

    def __init__(self, name, **attributes):
        super().__init__(name)
        self.calls = []
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return SimpleNamespace(id="run-1", info=SimpleNamespace(run_id="run-1"))

        return call


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "checkpoints" / "cells"
    folder.mkdir(parents=True)
    return TrackedRun(folder, SETTINGS)


@pytest.fixture
def picture(tmp_path):
    write_image(tmp_path / "picture.png", np.full((4, 6, 3), 200, np.uint8))
    return tmp_path / "picture.png"


@pytest.fixture
def fake(monkeypatch):
    def build(name, **attributes):
        module = FakeModule(name, **attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return build


def names(module):
    return [name for name, _, _ in module.calls]


def test_trackers_are_off_by_default():
    assert chosen_trackers(load_config({})) == []


def test_a_missing_package_is_one_message_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(UserError, match=rf"^{name}: the package is not installed; pip install {name}, or set {name}: false$"):
            chosen_trackers(load_config({name: True}))


def test_several_may_be_on(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert chosen_trackers(load_config({"mlflow": True, "tensorboard": True})) == ["tensorboard", "mlflow"]


def test_wandb_without_a_key_stays_offline_in_the_folder_of_the_run(fake, run, picture):
    module = fake("wandb", login=lambda prompt: False, run=SimpleNamespace(summary={}))
    tracker = TRACKERS["wandb"]()
    assert tracker.init(run) == "run-1"
    tracker.log(3, {"iou/val": 0.5}, picture)
    tracker.finish({"best_val_iou": 0.75}, is_complete=False)
    init, image, log, finish = module.calls
    assert init[2] == {
        "project": "unet-trainer",
        "name": "cells",
        "config": SETTINGS,
        "resume": "allow",
        "dir": str(run.folder),
        "id": None,
        "mode": "offline",
    }
    assert image == ("Image", (str(picture),), {})
    assert (log[1][0]["iou/val"], set(log[1][0]), log[2]) == (0.5, {"iou/val", "samples"}, {"step": 3})
    assert module.run.summary == {"best_val_iou": 0.75}
    assert finish == ("finish", (), {"exit_code": 1})


@pytest.mark.parametrize(
    ("key", "mode", "taken"), [("secret", None, "online"), ("secret", "disabled", "disabled"), (None, "online", "online")]
)
def test_wandb_is_online_where_the_user_set_it_up(key, mode, taken, fake, run, monkeypatch):
    module = fake("wandb", login=lambda: None, api=SimpleNamespace(api_key=key))  # an older version: login has no prompt
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    TRACKERS["wandb"]().init(run)
    assert module.calls[0][2]["mode"] == taken


def test_a_resumed_run_goes_on_under_its_id(fake, run):
    again = TrackedRun(run.folder, SETTINGS, first_epoch=5, earlier_id="before")
    wandb, mlflow = fake("wandb"), fake("mlflow")
    TRACKERS["wandb"]().init(again)
    TRACKERS["mlflow"]().init(again)
    assert [options["id"] for name, _, options in wandb.calls if name == "init"] == ["before"]
    assert ("start_run", (), {"run_id": "before", "run_name": "cells"}) in mlflow.calls
    assert "log_params" not in names(mlflow)  # it would refuse other values


def test_trackio_has_the_calls_of_wandb(fake, run, picture):
    module = fake("trackio", run=None)
    tracker = TRACKERS["trackio"]()
    tracker.init(run)
    tracker.log(1, {"iou/val": 0.5}, None)
    tracker.finish({}, is_complete=True)
    assert names(module) == ["init", "log", "finish"]
    assert module.calls[0][2] == {"project": "unet-trainer", "name": "cells", "config": SETTINGS, "resume": "allow"}
    assert module.calls[2][2] == {}


@pytest.mark.parametrize("uri", [None, "http://tracking:5000"])
def test_mlflow_writes_beside_the_runs_unless_the_user_names_a_server(uri, fake, run, picture, monkeypatch):
    module = fake("mlflow")
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = TRACKERS["mlflow"]()
    assert tracker.init(run) == "run-1"
    tracker.log(2, {"iou/val": 0.5}, picture)
    tracker.finish({"best_epoch": 2.0}, is_complete=True)
    calls = {name: (arguments, options) for name, arguments, options in module.calls}
    assert ("set_tracking_uri" in calls) == (uri is None)
    if uri is None:
        assert calls["set_tracking_uri"][0] == ((run.folder.parent / "mlruns").as_uri(),)
    assert calls["log_params"][0][0]["loss"] == "{'dice': 1.0}"
    assert module.calls[-4] == ("log_metrics", ({"iou/val": 0.5},), {"step": 2})
    assert calls["log_artifact"][0] == (str(picture), "samples")
    assert calls["end_run"][0] == ("FINISHED",)


def test_real_tensorboard_gets_scalars_pictures_and_settings(run, picture):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TRACKERS["tensorboard"]()
    tracker.init(run)
    tracker.log(1, {"iou/val": 0.25, "iou of classes/car": 0.5}, picture)
    tracker.log(2, {"iou/val": 0.75}, None)
    tracker.finish({"best_val_iou": 0.75}, is_complete=True)
    again = TRACKERS["tensorboard"]()
    again.init(TrackedRun(run.folder, SETTINGS, first_epoch=1))
    again.log(2, {"iou/val": 0.875}, None)
    again.finish({}, is_complete=True)
    found = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("iou/val")] == [(1, 0.25), (2, 0.875)]
    assert found.Images("samples")[0].width == 6
    assert "_hparams_/experiment" in found.PluginTagToContent("hparams")


def test_settings_that_are_no_numbers_or_text_are_written_as_text(run):
    assert run.flat_settings() == {
        "batch_size": 8,
        "grad_clip": "None",
        "loss": "{'dice': 1.0}",
        "encoder": "resnet18",
        "use_amp": False,
    }


def test_scalars_are_grouped_and_leave_out_what_is_undefined():
    classes = {"car": ClassScores(0.5, 0.6, 0.7, 0.8), "sky": ClassScores(None, None, None, 0.0)}
    epoch = EpochRecord(1, {"train_loss": 1.5, "val_iou": float("nan"), "epoch": 1}, classes)
    assert scalars_of(epoch) == {
        "loss/train": 1.5,
        "iou of classes/car": 0.5,
        "dice of classes/car": 0.6,
        "precision of classes/car": 0.7,
        "recall of classes/car": 0.8,
        "recall of classes/sky": 0.0,
    }


def test_the_outcome_is_that_of_the_best_epoch(tmp_path):
    log = EventLog()
    log.open(tmp_path)
    assert outcome_of(read_run_summary(tmp_path)) == {}
    for number, iou in enumerate((0.5, 0.75, 0.25), start=1):
        log.add("epoch", epoch=number, val_iou=iou)
    assert outcome_of(read_run_summary(Path(tmp_path))) == {"best_epoch": 2.0, "epochs": 3.0, "best_val_iou": 0.75}
