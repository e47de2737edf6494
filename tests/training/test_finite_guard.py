"""A step whose numbers are not finite, wherever they went bad, changes nothing and is counted."""

import math

import pytest
import torch

from helpers.bad_numbers import SPOILERS, spoil_loss
from helpers.steps import (
    CPU,
    everything,
    make_batch,
    make_step,
    plain_segmenter,
    same,
    small_components,
    take_step,
    weights,
)
from unet_trainer.training.state import EpochMetrics

PRECISIONS = {"float32": {"use_amp": False}, "bfloat16": {"use_amp": True}}


def step(components, *batches, metrics=None):
    return take_step(components.train_step, *batches, metrics=metrics)


def batch(seed):
    return make_batch(2, seed, side=32)


@pytest.mark.parametrize(
    ("place", "value"), [*((place, math.nan) for place in SPOILERS), ("input", math.inf), ("gradient", math.inf)]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bad_step_changes_nothing_wherever_the_number_went_bad(precision, place, value):
    components = small_components(ema_decay=0.9, grad_clip=1.0, **PRECISIONS[precision])
    metrics = EpochMetrics(1, CPU)
    step(components, batch(0), metrics=metrics)
    before = everything(components)
    step(components, SPOILERS[place](components, batch(1), value), metrics=metrics)
    assert same(before, everything(components))
    assert (int(metrics.num_skipped), int(metrics.num_nan)) == (1, 1)
    step(components, batch(2), metrics=metrics)
    assert not same(before, everything(components))
    assert (int(metrics.num_skipped), int(metrics.num_nan)) == (1, 1)
    assert math.isfinite(metrics.loss())


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_after_a_bad_step_each_optimizer_goes_on_as_if_it_had_not_been(optimizer):
    """The first step of all is bad, when an optimizer has no state yet; and a later one."""
    components, untouched = (small_components(ema_decay=0.9, optimizer=optimizer) for _ in range(2))
    for seed in range(2):
        step(components, spoil_loss(components, batch(9), math.nan))
        step(components, batch(seed))
        step(untouched, batch(seed))
    assert same(everything(components), everything(untouched))


@pytest.mark.parametrize(
    ("scale", "loss_weight", "num_nan"),
    [(2.0**127, 1e6, 0), (1.0, math.inf, 1), (1024.0, math.inf, 1)],
    ids=["gradients overflow", "nothing left to scale down", "the loss itself is infinite"],
)
def test_overflows_that_a_lower_loss_scale_cures_are_counted_apart(scale, loss_weight, num_nan):
    segmenter = plain_segmenter()
    before = weights(segmenter)
    one_step = make_step(segmenter, scaler=torch.amp.GradScaler("cpu", init_scale=scale), loss_weight=loss_weight)
    metrics = take_step(one_step, make_batch(4), learning_rate=1.0)
    assert torch.equal(weights(segmenter), before)
    assert (int(metrics.num_skipped), int(metrics.num_nan)) == (1, num_nan)
