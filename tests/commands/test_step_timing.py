"""The step alone: what is timed, and what is told."""

from __future__ import annotations

import io
import re

import pytest

from helpers.project import TINY_MODEL
from train_unet import main
from unet_trainer.commands import step_timing as stopwatch
from unet_trainer.config.load import load_config
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_step
from unet_trainer.training.step import TrainStep


def test_rounds_are_long_enough_and_the_first_steps_do_not_count():
    taken = []

    def take_steps(count):
        taken.append(count)
        return 0.01

    assert stopwatch.rounds(take_steps, 7) == [0.01] * 5
    assert taken == [7, 1, 30, 30, 30, 30, 30]  # of 10 ms each


def test_a_slow_step_is_taken_once_a_round():
    assert stopwatch.rounds(lambda count: 2.0 * count, 1) == [2.0] * 5


def test_the_step_is_that_of_the_config(monkeypatch):
    calls = []
    step = TrainStep.__call__

    def watched(self, batch, *more, **options):
        calls.append((tuple(batch.images.shape), options["closes_window"]))
        step(self, batch, *more, **options)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    monkeypatch.setattr(stopwatch, "ROUND_SECONDS", 0.001)
    console = Console(io.StringIO())
    config = load_config({**TINY_MODEL, "device": "cpu", "image_size": [32, 64], "batch_size": 3, "class_weights": "auto"})
    result = stopwatch.time_step(*build_step(config, console), console)
    assert set(calls) == {((3, 32, 64, 3), True)}
    assert len(calls) == 1 + 1 + 5
    assert 0 < result.fastest <= result.seconds <= result.slowest < 60
    assert re.search(r"The step alone: \d+ images/s at batch 3 \(.* ms; \d+ to \d+ in 5 rounds\)\n$", console.stream.getvalue())


def test_memory_that_runs_out_is_told_in_one_sentence(monkeypatch):
    def fail(self, *arguments, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(TrainStep, "__call__", fail)
    console = Console(io.StringIO())
    machine, batch = build_step(load_config({**TINY_MODEL, "device": "cpu", "image_size": 32}), console)
    with pytest.raises(TrainingFailed, match=r"out of memory \(no room\)\. Try a smaller batch_size"):
        stopwatch.time_step(machine, batch, console)


def test_the_command_line_knows_it(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(stopwatch, "time_step", lambda machine, batch, console: seen.append(len(batch.images)))
    assert main(["bench", "--step", "batch_size=6"]) == 0
    assert seen == [6]
    with pytest.raises(SystemExit):
        main(["bench", "--step", "--quick"])
    assert "not allowed with" in capsys.readouterr().err
