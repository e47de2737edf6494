"""Experiment trackers against fake packages, TensorBoard against the real one where it is installed; and that a service that
fails does not end a run."""

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from train_unet import train
from unet_trainer.config.schema import Config
from unet_trainer.images.image_decoding import write_image
from unet_trainer.runs.record import RunRecord, read_run_summary
from unet_trainer.runs.trackers import TRACKERS, Trackers

SETTINGS = {"batch_size": 8, "grad_clip": None, "loss": {"dice": 1.0}, "encoder": "resnet18", "use_amp": False}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "cells"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def picture(tmp_path):
    write_image(tmp_path / "picture.png", np.full((4, 6, 3), 200, np.uint8))
    return tmp_path / "picture.png"


@pytest.fixture
def fake(monkeypatch):
    """Puts a package into the place of a service's, which takes every call."""

    def install(name):
        package = mock.MagicMock()
        package.__spec__ = SimpleNamespace(name=name)
        package.init.return_value.id = package.start_run.return_value.info.run_id = "run-1"
        monkeypatch.setitem(sys.modules, name, package)
        return package

    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return install


@pytest.mark.parametrize("earlier_id", [None, "before"])
def test_wandb_without_a_key_stays_offline_in_the_folder_of_the_run(earlier_id, fake, folder, picture):
    wandb = fake("wandb")
    wandb.login.return_value = False
    tracker = TRACKERS["wandb"](folder, SETTINGS, 0, earlier_id)
    assert tracker.id == "run-1"
    about = {"project": "unet-trainer", "name": "cells", "config": SETTINGS, "dir": str(folder)}
    wandb.init.assert_called_once_with(**about, resume="allow", id=earlier_id, mode="offline")
    tracker.log(3, {"iou/val": 0.5}, picture)
    wandb.Image.assert_called_once_with(str(picture))
    wandb.log.assert_called_once_with({"iou/val": 0.5, "samples": wandb.Image.return_value}, step=3)
    tracker.finish(is_complete=False)
    wandb.finish.assert_called_once_with(exit_code=1)


@pytest.mark.parametrize(("uri", "earlier_id"), [(None, None), ("http://tracking:5000", "before")])
def test_mlflow_writes_beside_the_runs_unless_the_user_names_a_server(
    uri, earlier_id, fake, folder, picture, monkeypatch
):
    mlflow = fake("mlflow")
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = TRACKERS["mlflow"](folder, SETTINGS, 0, earlier_id)
    assert tracker.id == "run-1"
    beside = mock.call((folder.parent / "mlruns").as_uri())
    assert mlflow.set_tracking_uri.mock_calls == ([beside] if uri is None else [])
    mlflow.start_run.assert_called_once_with(run_id=earlier_id, run_name="cells")
    settings = [call.args[0]["loss"] for call in mlflow.log_params.mock_calls]
    assert settings == (["{'dice': 1.0}"] if earlier_id is None else [])  # it would refuse other values
    tracker.log(2, {"iou/val": 0.5}, picture)
    mlflow.log_metrics.assert_called_once_with({"iou/val": 0.5}, step=2)
    mlflow.log_artifact.assert_called_once_with(str(picture), "samples")
    tracker.finish(is_complete=True)
    mlflow.end_run.assert_called_once_with("FINISHED")


def test_real_tensorboard_gets_scalars_pictures_and_settings(folder, picture):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TRACKERS["tensorboard"](folder, SETTINGS, 0, None)
    tracker.log(1, {"iou/val": 0.25, "iou of classes/car": 0.5}, picture)
    tracker.log(2, {"iou/val": 0.75}, None)
    tracker.finish(is_complete=True)
    again = TRACKERS["tensorboard"](folder, SETTINGS, 1, None)
    again.log(2, {"iou/val": 0.875}, None)
    again.finish(is_complete=True)
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("iou/val")] == [(1, 0.25), (2, 0.875)]
    assert found.Images("samples")[0].width == 6
    assert found.Tags()["tensors"] == ["settings/text_summary"]


@pytest.mark.parametrize(
    ("failing", "error", "num_logged"),
    [
        ("", None, 3),
        ("init", SystemExit(1), 0),
        ("log", ConnectionError("no route to host"), 1),
        ("finish", KeyError("x"), 3),
    ],
)
def test_epochs_are_logged_in_order_and_a_service_that_fails_is_left_out_and_named_once(
    failing, error, num_logged, tmp_path, monkeypatch
):
    record, tracker, warnings = RunRecord(), mock.Mock(), []
    tracker.id, begin = "run-1", mock.Mock(return_value=tracker)
    if failing:
        (begin if failing == "init" else getattr(tracker, failing)).side_effect = error
    record.open(tmp_path)
    monkeypatch.setitem(TRACKERS, "wandb", begin)
    tracked = Trackers(Config(wandb=True), tmp_path, 0, record, warnings.append)
    for number in (1, 2, 3):
        tracked.log(record.add_epoch({"epoch": number, "val_iou": 0.5}, {}, None, {}))
    record.end("finished")
    tracked.finish()
    calls = [mock.call(number, {"iou/val": 0.5}, None) for number in (1, 2, 3)]
    assert tracker.log.mock_calls == calls[:num_logged]
    if failing:
        (warning,) = warnings
        assert warning.startswith(f"wandb: {type(error).__name__}: ")
        assert warning.endswith("; training continues without it")
    else:
        assert (read_run_summary(tmp_path).trackers, warnings) == ({"wandb": "run-1"}, [])
        tracker.finish.assert_called_once_with(True)


def test_the_id_of_a_run_is_kept_until_it_begins_anew(tmp_path, fake):
    wandb = fake("wandb")
    for resumed_after, known in ((None, None), ({"epoch": 1, "batch": 0}, "run-1"), (None, None)):
        record = RunRecord()
        record.open(tmp_path, resumed_after)
        Trackers(Config(wandb=True), tmp_path, 1, record, pytest.fail)
        assert wandb.init.call_args.kwargs["id"] == known


@pytest.mark.usefixtures("small_network")
def test_a_run_is_tracked_from_its_start_to_its_end(tiny_config, fake):
    trackio = fake("trackio")
    result = train(tiny_config, trackio=True)
    assert trackio.init.call_args.kwargs["config"]["batch_size"] == 4
    assert [call.kwargs["step"] for call in trackio.log.mock_calls] == [1, 2]
    trackio.finish.assert_called_once_with()
    assert read_run_summary(result.run_dir).trackers == {"trackio": "run-1"}
