"""Precision, batch, steps, learning rate and the rest follow from the hardware, the size of the data and the time."""

from __future__ import annotations

import pytest

from unet_trainer.config.choices import (
    COMPILE_SECONDS,
    MAX_VIEWS,
    NUM_VIEWS,
    choose_batch_size,
    choose_cache,
    choose_compile,
    choose_ema_decay,
    choose_learning_rate,
    plan_steps,
    wanted_views,
)
from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost

GPU = HardwareFacts("cuda", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8)
OLD_GPU = HardwareFacts("cuda", "Tesla K80", has_bfloat16=False, has_float16=False, num_cores=8)
CPU = HardwareFacts("cpu", "x86_64", has_bfloat16=True, has_float16=False, num_cores=8)
GIB = 2**30


def plan(num_samples, batch_size=16, cost=None, num_val=0, budget=None, **others):
    return plan_steps(num_samples, batch_size, 1, cost, num_val, budget, **others)


@pytest.mark.parametrize("num_samples", [5, 20, 367, 2000])
def test_sets_of_up_to_a_few_thousand_images_get_the_same_number_of_steps(num_samples):
    found = plan(num_samples)
    steps = found.num_epochs * (num_samples * found.repeats // 16)
    assert steps == pytest.approx(NUM_VIEWS / 16, rel=0.03)
    assert 45 <= found.num_epochs <= 125


def test_a_large_set_is_seen_forty_times_up_to_a_limit():
    assert plan(10_000).num_epochs == 40
    assert wanted_views(10_000) == 400_000
    assert wanted_views(10**6) == MAX_VIEWS


def test_a_budget_limits_the_steps():
    cost = StepCost(seconds=1.0, eval_seconds=0.0, memory=0)
    found = plan(160, cost=cost, budget=600.0)
    steps = found.num_epochs * (160 * found.repeats // 16)
    assert 500 <= steps <= 600
    assert "10 min allow" in found.reason


def test_validation_takes_a_fifth_of_the_time_at_most():
    """100 validation images of 0.1 s are 10 s: an epoch trains for 40 s at least, 40 steps."""
    cost = StepCost(seconds=1.0, eval_seconds=0.1, memory=0)
    found = plan(160, cost=cost, num_val=100, budget=2000.0)
    steps_per_epoch = 160 * found.repeats // 16
    assert steps_per_epoch >= 40
    assert found.num_epochs * (steps_per_epoch * 1.0 + 10) <= 2000 * 1.05


@pytest.mark.parametrize(
    ("num_samples", "repeats"),
    [
        (1600, 1),  # 58 s of training are 928 images, and an epoch of them would be the whole pass: the time ends it
        (3000, 1 / 3),
        (100, 10),
    ],
)
def test_where_one_epoch_is_all_that_there_is_time_for_it_is_as_long_as_that(num_samples, repeats):
    """Two epochs with a validation of 20 s each would leave half of 78 s for training."""
    cost = StepCost(seconds=1.0, eval_seconds=0.1, memory=0)
    found = plan(num_samples, cost=cost, num_val=200, budget=78.0)
    assert (found.num_epochs, found.repeats) == (1, repeats)
    assert found.reason.endswith(" augmented images are what 78 s allow: one epoch, as long as there is time")
    assert plan(num_samples, cost=cost, num_val=200, budget=78.0, repeats=0.5).repeats == 0.5


def test_the_wanted_batch_is_taken_when_it_fits():
    size, reason = choose_batch_size({16: StepCost(0.02, 0.001, 7 * GIB)}, 40 * GIB, 16)
    assert size == 16
    assert reason == "measured: 800 images/s, 7.0 GiB"


def test_a_batch_that_did_not_fit_is_halved_until_one_does():
    size, reason = choose_batch_size(
        {16: TOO_LARGE, 8: StepCost(0.02, 0.001, 7 * GIB), 4: StepCost(0.02, 0.001, 3 * GIB)}, 7 * GIB, 16
    )
    assert size == 4
    assert reason.endswith("8 do not fit into memory")


def test_the_learning_rate_grows_with_the_root_of_the_batch():
    assert choose_learning_rate("adamw", 16, is_pretrained=False)[0] == 2e-3
    assert choose_learning_rate("adamw", 64, is_pretrained=False)[0] == 4e-3
    assert choose_learning_rate("adamw", 4, is_pretrained=False)[0] == 1e-3
    assert choose_learning_rate("adamw", 16, is_pretrained=True)[0] == 1e-3
    assert choose_learning_rate("sgd", 16, is_pretrained=False)[0] == 5e-2


@pytest.mark.parametrize(("steps", "decay"), [(6000, 0.99833), (200, 0.95), (10, 0.5), (10**7, 0.9999)])
def test_the_average_spans_a_tenth_of_the_run(steps, decay):
    assert choose_ema_decay(steps)[0] == decay


def test_compiling_must_save_more_than_it_costs():
    cost = StepCost(0.02, 0.001, 0)
    enough = int(COMPILE_SECONDS / (0.5 * 0.02)) + 10
    assert choose_compile(GPU, cost, enough)[0]
    assert not choose_compile(GPU, cost, enough - 20)[0]
    assert not choose_compile(CPU, cost, enough)[0]
    assert not choose_compile(GPU, None, enough)[0]


def test_what_fits_into_a_quarter_of_the_memory_is_cached():
    assert choose_cache(2 * GIB, 8 * GIB, 10)[0] == "ram"
    assert choose_cache(3 * GIB, 8 * GIB, 10)[0] == "none"
    assert choose_cache(GIB, 8 * GIB, 1)[0] == "none"
    assert choose_cache(GIB, 0, 10)[0] == "none"


@pytest.mark.parametrize("num_samples", [25, 33, 47, 100, 1000])
@pytest.mark.parametrize("budget", [0.001, 1.0, 20.0])
def test_however_short_the_time_is_an_epoch_has_a_batch(num_samples, budget):
    found = plan(num_samples, cost=StepCost(0.5, 0.01, 0), num_val=5, budget=budget)
    assert found.num_epochs >= 1
    assert num_samples // max(1, round(1 / found.repeats)) >= 16
