"""A run in its folder: what is saved when, in which order, and what comes back."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import time

import numpy as np
import pytest
import torch
from test_checkpoint import SPLIT, make_machine, take_step

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.runs import checkpoint_file as checkpoint
from unet_trainer.runs import checkpointer as keeper_room
from unet_trainer.runs.checkpoint_file import read_run
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.console import Console

ROW = {"epoch": 1, "train_loss": 1.0, "val_loss": 1.0, "train_iou": 0.5, "val_iou": 0.5, "val_dice": 0.5, "learning_rate": 1e-3}
ROW |= {
    "seconds": 1.0,
    "images_per_second": 1.0,
    "data_wait": 0.0,
    "skipped_steps": 0,
    "nan_steps": 0,
    "peak_memory_gib": 0.0,
    "peak_reserved_gib": 0.0,
}


@pytest.fixture
def machine():
    return make_machine()[1]


@pytest.fixture
def keeper(machine, tmp_path):
    config = make_machine()[0]
    return Checkpointer(tmp_path, config, machine.state, SPLIT, Console(io.StringIO()))


def draw():
    return np.zeros((4, 4, 3), np.uint8)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def weights(machine):
    return [value.clone() for value in machine.state.model.state_dict().values()]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_epoch_leaves_state_table_settings_and_the_best_weights_if_they_are(keeper, machine, tmp_path):
    machine.state.epoch, machine.state.history = 1, [dict(ROW)]
    keeper.save_epoch(ROW, None, lambda: draw)
    keeper.finish()
    assert names(tmp_path) == ["config.yaml", "last.pt", "metrics.csv"]
    keeper.save_epoch(ROW, machine.eval_step.model, lambda: draw)
    keeper.finish()
    assert names(tmp_path) == ["best.pt", "config.yaml", "last.pt", "metrics.csv", "previous.pt", "samples"]
    assert names(tmp_path / "samples") == ["epoch_0001.png"]


def test_the_start_comes_back_as_often_as_needed_while_nothing_is_saved(keeper, machine):
    before = weights(machine)
    for _ in range(2):
        take_step(machine)
        assert not same(before, weights(machine))
        keeper.restore_last()
        assert same(before, weights(machine))
    assert keeper.describe() == "nothing is saved"


def test_the_last_saved_state_comes_back_once_there_is_one(keeper, machine, tmp_path):
    take_step(machine)
    saved = weights(machine)
    keeper.save_state()
    take_step(machine, seed=1)
    keeper.restore_last()
    assert same(saved, weights(machine))
    assert keeper.start is None
    assert keeper.describe() == f"{tmp_path / 'last.pt'} is whole; to go on: python train_unet.py --resume {tmp_path}"


def test_a_state_that_is_not_whole_is_not_saved_but_the_start_is(keeper, machine, tmp_path):
    before = weights(machine)
    take_step(machine)
    keeper.save_on_failure(state_is_whole=False)
    assert same(before, checkpoint.read_last(tmp_path / "last.pt")["model"].values())
    keeper.save_on_failure(state_is_whole=True)
    assert same(weights(machine), checkpoint.read_last(tmp_path / "last.pt")["model"].values())


def test_weights_that_are_not_finite_are_told_and_the_earlier_state_stays(keeper, machine, tmp_path):
    keeper.save_state()
    keeper.finish()
    before = (tmp_path / "last.pt").read_bytes()
    with torch.no_grad():
        next(machine.state.model.parameters()).fill_(float("inf"))
    keeper.save_on_failure(state_is_whole=True)
    assert "are not finite and were not saved" in keeper.console.stream.getvalue()
    assert (tmp_path / "last.pt").read_bytes() == before


@pytest.mark.parametrize(("minutes", "is_saved"), [(None, False), (10.0, False), (1e-9, True)])
def test_the_state_is_saved_within_an_epoch_when_it_is_time(minutes, is_saved, keeper, tmp_path):
    keeper.config = dataclasses.replace(keeper.config, checkpoint_minutes=minutes)
    keeper.save_state_if_due()
    keeper.finish()
    assert (tmp_path / "last.pt").exists() is is_saved


def test_what_cannot_be_written_ends_the_run_or_is_told(keeper, tmp_path, monkeypatch):
    def full(path, write, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    keeper.save_state()
    with pytest.raises(
        TrainingFailed, match=r"last\.pt could not be written \(No space left on device\): .* MB are needed, .*; nothing is saved"
    ):
        keeper.finish()
    keeper.config = load_config({"on_save_error": "continue"})
    keeper.save_state()
    keeper.finish()
    assert "training goes on (on_save_error: continue)" in keeper.console.stream.getvalue()


@pytest.mark.parametrize(("number", "advice"), [(28, "Make room, or set"), (30, "Set")])
def test_room_is_asked_for_where_it_is_missing(number, advice, keeper, monkeypatch):
    def refuse(path, write, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint, "write_atomically", refuse)
    keeper.save_state()
    with pytest.raises(TrainingFailed, match=rf"; nothing is saved\. {advice} on_save_error: continue to train on$"):
        keeper.finish()


def test_what_there_is_to_go_on_from_is_named_as_it_is(keeper, tmp_path):
    (tmp_path / "previous.pt").touch()
    assert keeper.describe().startswith(f"{tmp_path / 'previous.pt'} is whole; ")
    keeper.folder = tmp_path / "gone"
    assert keeper.describe() == f"{tmp_path / 'gone'} is no longer there"


@pytest.fixture
def slow_disk(monkeypatch):
    """Checkpoints are written only when the test lets them be."""
    may_go_on = threading.Event()
    write = keeper_room.write_checkpoint

    def slow(*arguments, **options):
        assert may_go_on.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(keeper_room, "write_checkpoint", slow)
    return may_go_on


def fall_behind(keeper, machine):
    """The second epoch ends while the first one's state is still being written."""
    machine.state.epoch, machine.state.history = 1, [dict(ROW)]
    keeper.save_epoch(ROW, None, lambda: draw)
    take_step(machine)
    machine.state.epoch = 2
    keeper.save_epoch(ROW, machine.eval_step.model, lambda: draw)


def saved_epoch(folder):
    return read_run(folder, print)["epoch"]


def test_an_epoch_shorter_than_a_save_is_saved_as_soon_as_the_disk_is_free(keeper, machine, slow_disk, tmp_path, monkeypatch):
    fall_behind(keeper, machine)
    copies = []
    copy_state = Checkpointer._copy_state
    monkeypatch.setattr(Checkpointer, "_copy_state", lambda self, *more: (copies.append(1), copy_state(self, *more))[1])
    keeper.save_state_if_due()
    assert copies == []  # the disk is busy: nothing that would only wait
    slow_disk.set()
    keeper.saver.wait()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()  # it comes with the state that speaks of it
    machine.state.batch = 3
    keeper.save_state_if_due()
    keeper.saver.wait()
    assert checkpoint.read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert copies == [1]
    assert (saved_epoch(tmp_path), read_run(tmp_path, print)["batch"]) == (2, 3)
    keeper.save_state_if_due()
    assert copies == [1]


def test_whoever_waits_for_the_disk_finds_the_last_epoch_on_it(keeper, machine, slow_disk, tmp_path):
    fall_behind(keeper, machine)
    slow_disk.set()
    keeper.finish()
    assert saved_epoch(tmp_path) == 2


def test_going_back_saves_nothing_of_what_it_goes_back_from(keeper, machine, slow_disk, tmp_path):
    before = weights(machine)
    fall_behind(keeper, machine)
    assert not same(before, weights(machine))
    slow_disk.set()
    keeper.restore_last()
    assert same(before, weights(machine))
    assert machine.state.epoch == 1
    keeper.finish()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()  # that of an epoch that never was


def test_a_state_that_is_not_whole_is_not_kept_even_when_the_last_epoch_was_not_saved(keeper, machine, slow_disk, tmp_path):
    fall_behind(keeper, machine)
    slow_disk.set()
    keeper.save_on_failure(state_is_whole=False)
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), UserError("a file went bad"), MemoryError()])
def test_a_picture_that_cannot_be_drawn_costs_no_best_weights(error, keeper, machine, tmp_path):
    def fail():
        raise error

    machine.state.epoch, machine.state.history = 1, [dict(ROW)]
    keeper.save_epoch(ROW, machine.eval_step.model, fail)
    keeper.finish()
    assert names(tmp_path) == ["best.pt", "config.yaml", "last.pt", "metrics.csv"]
    assert "Warning: no picture of epoch 1: " in keeper.console.stream.getvalue()


def test_pictures_that_cannot_be_written_keep_nothing_else_from_the_disk(keeper, machine, tmp_path):
    keeper.config = dataclasses.replace(keeper.config, on_save_error="continue")
    (tmp_path / "samples").write_text("no folder")
    machine.state.epoch, machine.state.history = 1, [dict(ROW)]
    keeper.save_epoch(ROW, machine.eval_step.model, lambda: draw)
    keeper.finish()
    assert names(tmp_path) == ["best.pt", "config.yaml", "last.pt", "metrics.csv", "samples"]
    assert "samples" in keeper.console.stream.getvalue()


def test_finishing_waits_for_what_is_tried_once_more(keeper, machine, tmp_path, monkeypatch):
    write, attempts = keeper_room.write_checkpoint, []

    def full_once(*arguments, **options):
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(28, "No space left on device")
        time.sleep(0.3)
        write(*arguments, **options)

    monkeypatch.setattr(keeper_room, "write_checkpoint", full_once)
    machine.state.epoch = 4
    keeper.save_state()
    deadline = time.monotonic() + 30
    while keeper.saver.is_busy():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    keeper.finish()
    assert not keeper.saver.is_busy()
    assert saved_epoch(tmp_path) == 4
    assert keeper.console.stream.getvalue() == ""  # it went well in the end


def test_a_disk_that_stays_full_is_heard_of_once_a_minute_and_not_at_every_step(keeper, machine, monkeypatch):
    attempts, clock = [], [1000.0]

    def full(*arguments, **options):
        attempts.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keeper_room, "write_checkpoint", full)
    monkeypatch.setattr(keeper_room.time, "monotonic", lambda: clock[0])
    keeper.config = dataclasses.replace(keeper.config, on_save_error="continue")
    keeper.save_state()
    for _ in range(50):
        while keeper.saver.is_busy():
            time.sleep(0.001)
        keeper.save_state_if_due()
    assert len(attempts) == 1
    assert keeper.console.stream.getvalue().count("Warning: ") == 1
    clock[0] += 61
    keeper.save_state_if_due()
    while keeper.saver.is_busy():
        time.sleep(0.001)
    assert len(attempts) == 2
    assert keeper.unwritten() == ["last.pt"]
