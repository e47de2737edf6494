"""How processes begin together, each function by itself; whole jobs are in tests/test_torchrun.py."""

from __future__ import annotations

import dataclasses
import io

import pytest

from helpers.steps import make_settings, small_components
from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config
from unet_trainer.system.console import Console
from unet_trainer.system.distributed import Job, Launch, decode, encode
from unet_trainer.training.resume import adapt_to_world_size
from unet_trainer.training.setup import check_same, config_facts


class Told(Job):
    """Rank 1 of two; this is what rank 0 has sent."""

    def __init__(self, sent):
        super().__init__(Launch(rank=1, world_size=2, local_rank=1, local_world_size=2, is_torchrun=True))
        self.sent = sent

    def broadcast(self, value):
        return self.sent


class First(Job):
    """Rank 0 of two, which notes what it sends."""

    def __init__(self):
        super().__init__(Launch(world_size=2, local_world_size=2, is_torchrun=True))

    def broadcast(self, value):
        self.sent = decode(encode(value))
        return value


@pytest.fixture
def console():
    return Console(io.StringIO())


def said(console):
    return console.stream.getvalue()


def test_other_facts_on_another_machine_are_refused_by_name():
    """All would take rank 0's, in silence."""
    told = Told({"batch_size": "2", "seed": "42"})
    check_same(told, {"batch_size": "2", "seed": "42"}, "", "the same config")
    with pytest.raises(UserError, match=r"^batch_size: 4 on .*, 2 for rank 0; seed: 7 on .*, 42 for rank 0; all machines need the"):
        check_same(told, {"batch_size": "4", "seed": "7"}, "", "the same config")


def test_what_may_differ_between_machines_is_left_out_and_packages_are_not():
    one, two = (config_facts(Config(data_dir=f"/scratch/{name}", num_workers=number)) for name, number in (("a", 4), ("b", 8)))
    assert one == two
    assert one != config_facts(Config(batch_size=4))
    assert {"torch", "timm"} <= set(one)


def test_a_best_epoch_whose_weights_are_lost_is_forgotten_by_all():
    """Or they would disagree on which epoch is the best, and when patience runs out."""
    first, second = small_components().state, small_components().state
    for state in (first, second):
        state.early_stopping.update(0.8, 1)
        state.per_class_iou = [0.8]
    first.early_stopping.forget_best()
    first.per_class_iou = []
    sender = First()
    first.broadcast_best(sender)
    second.broadcast_best(Told(sender.sent))
    assert repr(second.early_stopping) == repr(first.early_stopping)  # NaN equals nothing
    assert second.per_class_iou == []


@pytest.mark.parametrize(
    ("before", "batch", "expected"),
    [(2, 3, 6), (2, 0, 0), (3, 1, 3)],
)
def test_another_number_of_processes_goes_on_at_the_same_sample(before, batch, expected, console):
    """Batches of 2 images: 3 batches of 2 processes are 12 samples, and 6 batches of one."""
    components = small_components()
    components.state.batch = batch
    config = dataclasses.replace(make_settings().taken, batch_size=2)
    adapt_to_world_size(config, before, Launch(), components.state, console)
    assert components.state.batch == expected
    assert f"{before} processes → 1. The effective batch is 2 instead of {2 * before}; learning_rate stays" in said(console)
    assert "The order of the samples stays that of the seed" in said(console)


def test_an_epoch_begins_anew_where_its_samples_end_within_a_step(console):
    components = small_components()
    components.state.batch = 3
    config = dataclasses.replace(make_settings().taken, batch_size=2)
    adapt_to_world_size(config, 1, Launch(world_size=2, is_torchrun=True), components.state, console)
    assert components.state.batch == 0
    assert "epoch 1 begins anew: its 6 samples so far end within a step of today's size" in said(console)
