"""What a run that goes on is told and what it changes."""

from __future__ import annotations

import io

import pytest
from test_checkpoint import make_machine

from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
from unet_trainer.training import resume_messages as resuming


@pytest.fixture
def state():
    _, machine = make_machine()
    machine.state.epoch, machine.state.batch = 2, 3
    machine.state.learning_rate.factor, machine.state.num_rollbacks = 0.1, 1
    return machine.state


def test_a_position_is_an_epoch_or_a_batch_within_one(state):
    assert resuming.describe_position(state) == "batch 3 of epoch 3"
    state.begin_epoch_anew()
    assert resuming.describe_position(state) == "epoch 2"
    state.epoch = 0
    assert resuming.describe_position(state) == "the start"


@pytest.mark.parametrize(
    ("change", "batch", "factor"),
    [
        ({}, 3, 0.1),
        ({"batch_size": 4}, 0, 0.1),
        ({"accumulation_steps": 2}, 0, 0.1),
        ({"crops_per_image": 3}, 0, 0.1),
        ({"learning_rate": 0.5}, 3, 1.0),
    ],
)
def test_other_settings_move_the_position_or_lift_the_lowered_rate(change, batch, factor, state):
    before = as_dict(load_config({}))
    resuming.adapt_to_changes(load_config(change), before, state, Console(io.StringIO()))
    assert (state.batch, state.learning_rate.factor, state.num_rollbacks) == (batch, factor, 0 if factor == 1 else 1)


def test_what_is_lowered_and_where_it_goes_on_is_told(state):
    stream = io.StringIO()
    config = load_config({})
    resuming.tell_resumed(config, as_dict(config), state, ["seed: 1 → 2"], Console(stream))
    assert stream.getvalue() == (
        "Resuming after batch 3 of epoch 3\n"
        "Note: changed since then: seed: 1 → 2\n"
        "Note: numbers were not finite earlier: the learning rate is 0.1 of what is planned\n"
    )
