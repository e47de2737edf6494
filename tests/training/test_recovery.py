"""When an epoch cannot be finished. How it looks to a user is tested in test_trouble.py; here, what is asked of whom."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from test_machine import built  # noqa: F401 (a fixture)

from unet_trainer.config.load import load_config
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training import recovery

CONFIG = load_config({"on_nan": "recover", "on_oom": "shrink", "batch_size": 2})


@pytest.fixture
def run(built, tmp_path):  # noqa: F811
    data, machine = built
    return machine, data, Checkpointer(tmp_path, CONFIG, machine.state, data.split, Console(io.StringIO())), Console(io.StringIO())


def test_the_first_time_it_goes_back_with_a_tenth_of_the_rate_and_saves_that(run):
    machine, _, keeper, console = run
    machine.state.batch = 3
    recovery.roll_back(CONFIG, *run, NonFinite("8 steps in a row were not finite", batch_number=4))
    keeper.finish()
    assert (machine.state.batch, machine.state.num_rollbacks, machine.state.learning_rate.factor) == (0, 1, 0.1)
    said = console.stream.getvalue()
    assert "8 steps in a row were not finite from step 5 on (epoch 1, batch 5 of 5)" in said
    assert "with 0.1 of the learning rate" in said
    assert (keeper.folder / "last.pt").exists()


@pytest.mark.parametrize(("on_nan", "num_rollbacks"), [("recover", 1), ("stop", 0)])
def test_the_second_time_or_when_asked_to_it_ends(on_nan, num_rollbacks, run):
    run[0].state.num_rollbacks = num_rollbacks
    with pytest.raises(
        TrainingFailed, match=r"the validation loss is not finite in epoch 1\. Try a lower learning_rate, grad_clip=1\.0;"
    ):
        recovery.roll_back(
            dataclasses.replace(CONFIG, on_nan=on_nan), *run, NonFinite("the validation loss is not finite", val_batch=0)
        )


def test_trouble_that_belongs_to_no_batch_is_told_as_it_is(run):
    machine, data, _, _ = run
    assert recovery._explain(machine, data, NonFinite("the weights (a) are not finite")) == "the weights (a) are not finite"


@pytest.mark.parametrize("is_open", [False, True])
def test_with_less_memory_it_goes_on_from_the_last_state_that_is_whole(is_open, run, monkeypatch):
    machine, _, keeper, console = run
    went_back = []
    monkeypatch.setattr(keeper, "restore_last", lambda: went_back.append(1))
    machine.train_step.is_open = is_open
    config = recovery.handle_out_of_memory(CONFIG, machine, keeper, console, "no room")
    keeper.finish()
    assert config.batch_parts == keeper.config.batch_parts == machine.train_step.num_parts == 2
    assert went_back == [1] * is_open
    assert machine.train_step.is_open is False
    assert "going on from" in console.stream.getvalue()
    assert load_config(keeper.folder / "config.yaml").batch_parts == 2


def test_an_explanation_that_needs_more_memory_than_there_is_is_done_without(run, monkeypatch):
    machine, data, _, _ = run

    def fail(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(recovery, "explain", fail)
    said = recovery._explain(machine, data, NonFinite("a step was not finite", batch_number=1))
    assert said == "a step was not finite from step 2 on (epoch 1, batch 2 of 5)"
