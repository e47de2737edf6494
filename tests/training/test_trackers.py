"""Experiment trackers against fake packages, TensorBoard against the real one where it is installed; and that a service that
fails does not end a run."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from train_unet import train
from unet_trainer.config.schema import Config
from unet_trainer.images.image_decoding import write_image
from unet_trainer.training.history import EventLog, read_events
from unet_trainer.training.run_summary import EpochRecord
from unet_trainer.training.trackers import TRACKERS, RunTracker, TrackedRun, build_trackers

SETTINGS = {"batch_size": 8, "grad_clip": None, "loss": {"dice": 1.0}, "encoder": "resnet18", "use_amp": False}


class FakeModule(ModuleType):
    """Records every call."""

    def __init__(self, name, **attributes):
        super().__init__(name)
        self.calls, self.__spec__ = [], SimpleNamespace(name=name)
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


def test_wandb_without_a_key_stays_offline_in_the_folder_of_the_run(fake, run, picture):
    module = fake("wandb", login=lambda prompt: False, run=SimpleNamespace(summary={}))
    tracker = TRACKERS["wandb"]()
    assert tracker.init(run) == "run-1"
    tracker.log(3, {"iou/val": 0.5}, picture)
    tracker.finish({"best_val_iou": 0.75}, is_complete=False)
    init, image, log, finish = module.calls
    about = {"project": "unet-trainer", "name": "cells", "config": SETTINGS, "dir": str(run.folder)}
    assert init[2] == {**about, "resume": "allow", "id": None, "mode": "offline"}
    assert image == ("Image", (str(picture),), {})
    assert (log[1][0]["iou/val"], set(log[1][0]), log[2]) == (0.5, {"iou/val", "samples"}, {"step": 3})
    assert module.run.summary == {"best_val_iou": 0.75}
    assert finish == ("finish", (), {"exit_code": 1})


def test_a_resumed_run_goes_on_under_its_id(fake, run):
    again = TrackedRun(run.folder, SETTINGS, first_epoch=5, earlier_id="before")
    wandb, mlflow = fake("wandb"), fake("mlflow")
    TRACKERS["wandb"]().init(again)
    TRACKERS["mlflow"]().init(again)
    assert [options["id"] for name, _, options in wandb.calls if name == "init"] == ["before"]
    assert ("start_run", (), {"run_id": "before", "run_name": "cells"}) in mlflow.calls
    assert "log_params" not in [name for name, _, _ in mlflow.calls]  # it would refuse other values


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


class Recorder:
    """A tracker that remembers what it was told; `failing`: the call that raises `error`."""

    def __init__(self, failing="", error=None):
        self.failing, self.error = failing, error
        self.logged, self.finished = [], []

    def init(self, run):
        self._check("init")
        return "run-1"

    def log(self, epoch, scalars, picture):
        self._check("log")
        self.logged.append((epoch, scalars, picture))

    def finish(self, outcome, is_complete):
        self._check("finish")
        self.finished.append((outcome, is_complete))

    def _check(self, name):
        if name == self.failing:
            raise self.error


@pytest.mark.parametrize(
    ("failing", "error", "num_logged"),
    [
        ("", None, 3),
        ("init", SystemExit(1), 0),
        ("log", ConnectionError("no route to host"), 0),
        ("finish", KeyError("x"), 3),
    ],
)
def test_epochs_are_logged_in_order_and_a_service_that_fails_is_left_out_and_named_once(
    failing, error, num_logged, tmp_path
):
    log, tracker, ids, warnings = EventLog(), Recorder(failing, error), [], []
    log.open(tmp_path)
    tracked = RunTracker("wandb", tracker, TrackedRun(tmp_path, {}), ids.append)
    tracked.start(warnings.append)
    for number in (1, 2, 3):
        log.add("epoch", epoch=number, val_iou=0.5)
        tracked.log(EpochRecord(number, {"val_iou": 0.5}))
    log.add("end", how="finished")
    tracked.finish()
    assert tracker.logged == [(number, {"iou/val": 0.5}, None) for number in (1, 2, 3)][:num_logged]
    if failing:
        (warning,) = warnings
        assert warning.startswith(f"wandb: {type(error).__name__}: ")
        assert warning.endswith("; training continues without it")
    else:
        assert (ids, warnings) == (["run-1"], [])
        assert tracker.finished == [({"best_epoch": 1.0, "epochs": 3.0, "best_val_iou": 0.5}, True)]


def test_the_id_of_a_run_is_kept_until_it_begins_anew(tmp_path):
    log = EventLog()
    log.open(tmp_path, resumed_after=None)
    log.add("tracker", name="wandb", id="one")
    log.add("tracker", name="mlflow", id="two")
    EventLog().open(tmp_path, resumed_after={"epoch": 1, "batch": 0})
    (tracked,) = build_trackers(Config(wandb=True), tmp_path, 1, log)
    assert (tracked.run.earlier_id, tracked.run.first_epoch) == ("one", 1)
    EventLog().open(tmp_path, resumed_after=None)
    (tracked,) = build_trackers(Config(wandb=True), tmp_path, 0, log)
    assert tracked.run.earlier_id is None


@pytest.mark.usefixtures("small_network")
def test_a_run_is_tracked_from_its_start_to_its_end(tiny_config, fake):
    module = fake("trackio", run=None)
    result = train(tiny_config, trackio=True)
    assert [(name, options.get("step")) for name, _, options in module.calls if name != "Image"] == [
        *(("init", None), ("log", 1), ("log", 2), ("finish", None))
    ]
    assert module.calls[0][2]["config"]["batch_size"] == 4
    assert ("tracker", "run-1") in [(event["kind"], event.get("id")) for event in read_events(result.run_dir)]
