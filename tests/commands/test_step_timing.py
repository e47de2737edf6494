"""The step alone: what is timed, and what is printed."""

from __future__ import annotations

import io
import math
import re

import pytest

from helpers.project import TINY_MODEL
from helpers.steps import silent_console, take_step
from train_unet import main
from unet_trainer.commands import step_timing
from unet_trainer.commands.step_timing import build_step
from unet_trainer.config.load import load_config
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training.step import TrainStep


def test_rounds_are_long_enough_and_the_first_steps_do_not_count():
    taken = []

    def take_steps(count):
        taken.append(count)
        return 0.01

    assert step_timing.rounds(take_steps, 7) == [0.01] * 5
    assert taken == [7, 1, 30, 30, 30, 30, 30]  # of 10 ms each


def test_a_slow_step_is_taken_once_a_round():
    assert step_timing.rounds(lambda count: 2.0 * count, 1) == [2.0] * 5


def test_whole_steps_of_the_config_are_timed(monkeypatch):
    calls = []

    def watch(name, describe):
        real = getattr(TrainStep, name)

        def watched(self, *arguments, **options):
            calls.append(describe(*arguments))
            return real(self, *arguments, **options)

        monkeypatch.setattr(TrainStep, name, watched)

    watch("begin_group", lambda num_batches, first_batch: f"a group of {num_batches}")
    watch("__call__", lambda batch, metrics: tuple(batch.images.shape))
    watch("optimizer_step", lambda metrics: "optimizer")
    monkeypatch.setattr(step_timing, "ROUND_SECONDS", 0)
    console = Console(io.StringIO())
    config = load_config({**TINY_MODEL, "device": "cpu", "image_size": [32, 64], "batch_size": 3, "class_weights": "auto"})
    result = step_timing.time_step(*build_step(config, console), console)
    assert calls == ["a group of 1", (3, 32, 64, 3), "optimizer"] * (1 + 1 + 5)
    assert 0 < result.fastest <= result.seconds <= result.slowest
    assert result.peak_gib == 0
    assert re.search(r"The step alone: \d+ images/s at batch 3 \(.* ms; \d+ to \d+ in 5 rounds\)\n$", console.stream.getvalue())


def test_out_of_memory_is_one_message(monkeypatch):
    def fail(self, *arguments, **options):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(TrainStep, "__call__", fail)
    console = Console(io.StringIO())
    components, batch = build_step(load_config({**TINY_MODEL, "device": "cpu", "image_size": 32}), console)
    with pytest.raises(TrainingFailed, match=r"out of memory \(cannot allocate\)\. Try a smaller batch_size"):
        step_timing.time_step(components, batch, console)


def test_the_command_times_the_step_of_its_config(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(step_timing, "build_step", lambda config, console: (config, "a batch"))
    monkeypatch.setattr(step_timing, "time_step", lambda config, batch, console: seen.append((config.batch_size, batch)))
    assert main(["bench", "--step", "batch_size=6"]) == 0
    assert seen == [(6, "a batch")]
    with pytest.raises(SystemExit):
        main(["bench", "--step", "--quick"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_step_can_be_built_without_a_dataset(tiny_config):
    components, batch = build_step(load_config({**tiny_config, "data_dir": "no/such/folder"}), silent_console())
    assert batch.images.shape == (4, 32, 32, 3)
    components.set_training_mode(0)
    assert math.isfinite(take_step(components.train_step, batch).loss())
