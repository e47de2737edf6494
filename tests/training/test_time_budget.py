"""What is left of a time budget, and what its parts may take, by a clock that stands still."""

import dataclasses
import math

import pytest

from helpers.small_runs import stopped_budget
from helpers.steps import make_settings
from unet_trainer.config.facts import StepCost
from unet_trainer.training.time_budget import SampleCost, forecast, with_loading


@pytest.mark.parametrize(("text", "seconds"), [("10m", 90.0), ("1m", 9.0), (None, math.inf)])
def test_trials_may_take_a_share_of_the_time(text, seconds):
    assert stopped_budget(text).trial_seconds() == seconds


COST = StepCost(seconds=0.5, eval_seconds=0.1, memory=7)
FREE = SampleCost(0.0, 0.0, 0.0)
SLOW = SampleCost(read_seconds=0.3, augment_seconds=0.1, val_seconds=0.2)


def make_config(**values):
    given = {"batch_size": 4, "num_epochs": 3, "num_workers": 2, "cache": "none", **values}
    device, budget = given.pop("device", "cpu"), given.pop("time_budget", None)
    return dataclasses.replace(make_settings(**given).taken, device=device, time_budget=budget)


def test_a_run_is_its_epochs_and_what_comes_once():
    found = forecast(make_config(device="cuda"), 41, 20, COST, FREE, num_cores=8, start_seconds=60.0)
    assert found.seconds_per_epoch == pytest.approx(10 * 0.5 + 20 * 0.1)  # the last partial batch is dropped
    assert found.seconds == pytest.approx(60 + 3 * 7)
    assert (found.num_epochs, found.memory) == (3, 7)


@pytest.mark.parametrize(
    ("device", "num_workers", "num_cores", "seconds"),
    [
        ("cuda", 2, 8, 0.8),  # 1.6 s of loading by two workers, beside 0.5 s of the GPU
        ("cuda:1", 4, 8, 0.5),  # hidden behind the GPU
        ("cuda", 0, 8, 2.1),
        ("cpu", 2, 8, 0.8),  # 0.5 + 1.6 / 8 = 0.7 is less than what two workers need
        ("cpu", 4, 4, 0.9),  # the same cores do both
        ("cpu", 0, 4, 2.1),
    ],
)
def test_loading_is_hidden_by_workers_beside_a_gpu_and_shares_the_cores_of_a_cpu(
    device, num_workers, num_cores, seconds
):
    assert with_loading(0.5, 1.6, make_config(device=device, num_workers=num_workers), num_cores) == pytest.approx(
        seconds
    )


def test_a_cache_spares_reading_but_not_augmenting():
    uncached = forecast(make_config(num_workers=0), 40, 10, COST, SLOW, num_cores=4)
    assert uncached.seconds_per_epoch == pytest.approx(10 * (0.5 + 4 * 0.4) + 10 * (0.1 + 0.2))
    cached = forecast(make_config(num_workers=0, cache="ram"), 40, 10, COST, SLOW, num_cores=4)
    assert cached.seconds_per_epoch == pytest.approx(10 * (0.5 + 4 * 0.1) + 10 * 0.1)


@pytest.mark.parametrize(
    ("budget", "start_seconds", "num_epochs", "seconds"),
    [
        ("3m", 60.0, 17, 60 + 17 * 7),  # 120 s / 7 s: 10 steps of 0.5 s and 20 images of 0.1 s
        ("5s", 0.0, 1, 5.0),  # the epoch ends early
        ("5s", 60.0, 1, 60.0 + 0.5 + 2.0),  # a step, and the validation
        ("300d", 0.0, 2400, 2400 * 7),  # 96,000 augmented images, which is enough
    ],
)
def test_with_a_time_budget_the_epochs_are_those_that_there_is_time_for(budget, start_seconds, num_epochs, seconds):
    config = make_config(device="cuda", time_budget=budget)
    found = forecast(config, 40, 20, COST, FREE, num_cores=8, start_seconds=start_seconds)
    assert (found.num_epochs, found.seconds) == (num_epochs, pytest.approx(seconds))
