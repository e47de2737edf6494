"""Trackers in threads: slow, failing and hanging services neither slow nor end a run, and what they miss is told once."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from train_unet import train
from unet_trainer.images.image_files import write_image
from unet_trainer.runs import tracker_queue
from unet_trainer.runs.event_log import EventLog, read_events
from unet_trainer.runs.run_summary import EpochRecord
from unet_trainer.runs.tracker_queue import TrackerQueue, build_trackers, earlier_id
from unet_trainer.runs.trackers import TrackedRun

LIMIT = 60.0


class Recorder:
    """A tracker that remembers what it was told; `failing`: calls that raise; `gate`: waits for it in log."""

    def __init__(self, failing=(), error=None, gate=None):
        self.failing, self.error, self.gate = failing, error or ConnectionError("no route to host"), gate
        self.logged, self.finished = [], []
        self.begun = threading.Event()

    def init(self, run):
        self._check("init")
        return "run-1"

    def log(self, epoch, scalars, picture):
        self.begun.set()
        if self.gate is not None:
            self.gate.wait(LIMIT)
        self._check("log")
        self.logged.append((epoch, scalars, picture))

    def finish(self, outcome, is_complete):
        self._check("finish")
        self.finished.append((outcome, is_complete))

    def _check(self, name):
        if name in self.failing:
            raise self.error


@pytest.fixture
def folder(tmp_path):
    EventLog().open(tmp_path)
    return tmp_path


def make(folder, tracker, ids=None):
    queue = TrackerQueue("wandb", tracker, TrackedRun(folder, {}), (ids if ids is not None else []).append)
    queue.start()
    return queue


def epoch(number, iou=0.5):
    return EpochRecord(number, {"val_iou": iou})


def test_epochs_are_logged_in_order_and_the_outcome_at_the_end(folder):
    log, tracker, ids = EventLog(), Recorder(), []
    log.open(folder)
    queue = make(folder, tracker, ids)
    for number in (1, 2, 3):
        log.add("epoch", epoch=number, val_iou=0.5)
        queue.log(epoch(number))
    log.add("end", how="finished")
    assert queue.finish() is None
    assert queue.take_problem() is None
    assert tracker.logged == [(number, {"iou/val": 0.5}, None) for number in (1, 2, 3)]
    assert tracker.finished == [({"best_epoch": 1.0, "epochs": 3.0, "best_val_iou": 0.5}, True)]
    assert ids == ["run-1"]


def test_each_new_picture_is_logged_once(folder):
    tracker = Recorder()
    queue = make(folder, tracker)
    (folder / "samples").mkdir()
    write_image(folder / "samples" / "epoch_0001.png", np.zeros((2, 2, 3), np.uint8))
    for number in (1, 2):
        queue.log(epoch(number))
    queue.finish()
    assert [picture for _, _, picture in tracker.logged] == [folder / "samples" / "epoch_0001.png", None]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("no route to host"), SystemExit(1), KeyError("x")])
def test_whatever_a_service_raises_is_told_once(failing, error, folder):
    tracker = Recorder([failing], error)
    queue = make(folder, tracker)
    for number in (1, 2, 3):
        queue.log(epoch(number))
    assert queue.finish() is None
    problem = queue.take_problem()
    assert problem.startswith("wandb: ")
    assert problem.endswith("; training goes on, without it if it goes on failing")
    assert queue.take_problem() is None
    assert len(tracker.logged) == (3 if failing == "finish" else 0)


def test_a_service_that_recovers_is_logged_to_again(folder):
    tracker = Recorder(["log"])
    queue = make(folder, tracker)
    queue.log(epoch(1))
    assert tracker.begun.wait(LIMIT)
    tracker.failing = ()
    queue.log(epoch(2))
    queue.finish()
    assert 2 in [number for number, _, _ in tracker.logged]


def test_a_slow_service_loses_epochs_and_holds_nobody_up(folder, monkeypatch):
    monkeypatch.setattr(tracker_queue, "MAX_WAITING", 3)
    gate = threading.Event()
    tracker = Recorder(gate=gate)
    queue = make(folder, tracker)
    queue.log(epoch(0))
    assert tracker.begun.wait(LIMIT)
    for number in range(1, 9):  # three wait, five are lost
        queue.log(epoch(number))
    gate.set()
    assert queue.finish() == "wandb was too slow: 5 epochs were not logged there"
    assert [number for number, _, _ in tracker.logged] == [0, 1, 2, 3]


def test_a_service_that_hangs_is_left_behind(folder, monkeypatch):
    monkeypatch.setattr(tracker_queue, "FINISH_SECONDS", 0.05)
    gate = threading.Event()
    queue = make(folder, Recorder(gate=gate))
    queue.log(epoch(1))
    assert queue.finish() == "wandb did not answer within 0 s at the end; what it has not logged is lost there"
    gate.set()


def test_a_tracker_that_was_never_started_ends_at_once(folder):
    queue = TrackerQueue("wandb", Recorder(), TrackedRun(folder, {}), print)
    assert queue.finish() is None


def test_a_thread_that_cannot_be_started_is_told(folder, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    queue = make(folder, Recorder())
    assert "can't start new thread" in queue.take_problem()
    assert queue.finish() is None


def test_the_id_of_a_run_is_kept_until_it_begins_anew(tmp_path):
    log = EventLog()
    log.open(tmp_path, resumed_after=None)
    assert earlier_id(tmp_path, "wandb") is None
    log.add("tracker", name="wandb", id="one")
    log.add("tracker", name="mlflow", id="two")
    EventLog().open(tmp_path, resumed_after={"epoch": 1, "batch": 0})
    (queue,) = build_trackers(["wandb"], tmp_path, {}, 1, log)
    assert (queue.run.earlier_id, queue.run.first_epoch) == ("one", 1)
    EventLog().open(tmp_path, resumed_after=None)
    assert earlier_id(tmp_path, "wandb") is None


@pytest.fixture
def fake_trackio(monkeypatch):
    module = ModuleType("trackio")
    module.calls = []
    module.init = lambda **options: module.calls.append(("init", options)) or SimpleNamespace(id="run-1")
    module.log = lambda content, step: module.calls.append(("log", step))
    module.finish = lambda: module.calls.append(("finish", None))
    module.Image = str
    module.__spec__ = SimpleNamespace(name="trackio")
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


@pytest.mark.usefixtures("small_network")
def test_a_run_is_tracked_from_its_start_to_its_end(tiny_config, fake_trackio):
    result = train(tiny_config, trackio=True)
    assert [(name, fact) for name, fact in fake_trackio.calls if name != "init"] == [("log", 1), ("log", 2), ("finish", None)]
    assert fake_trackio.calls[0][1]["config"]["batch_size"] == 4
    assert ("tracker", "run-1") in [(event["kind"], event.get("id")) for event in read_events(result.run_dir)]


@pytest.mark.usefixtures("small_network")
def test_a_service_that_is_down_ends_no_run_and_is_told(tiny_config, fake_trackio, capsys):
    def fail(**options):
        raise ConnectionError("no route to host")

    fake_trackio.init = fail
    assert train(tiny_config, trackio=True).epochs == 2
    assert capsys.readouterr().out.count("trackio: no route to host") == 1
