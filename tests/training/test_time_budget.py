"""What is left of a time budget, and what its parts may take, by a clock that stands still."""

from __future__ import annotations

import math

import pytest

from helpers.small_runs import stopped_budget
from unet_trainer.training.time_budget import TimeBudget


def test_the_time_since_the_command_and_of_earlier_starts_is_spent():
    budget = stopped_budget("2m")
    budget.now = 50.0
    assert (budget.spent(), budget.left()) == (50.0, 70.0)
    budget.seconds_before = 100.0
    assert (budget.spent(), budget.left()) == (150.0, -30.0)


def test_a_budget_counts_from_when_it_was_made_unless_told():
    assert TimeBudget("2m", clock=lambda: 7.0).spent() == 0.0
    assert TimeBudget("2m", started=3.0, clock=lambda: 7.0).spent() == 4.0


def test_training_is_planned_without_what_is_spent_and_the_end_of_the_run():
    budget = stopped_budget("2m")
    budget.now = 30.0
    assert budget.lost_to_training() == 30.0 + 12.0


@pytest.mark.parametrize(("text", "seconds"), [("10m", 90.0), ("2m", 18.0), ("1m", 0.0), (None, math.inf)])
def test_a_trial_may_take_a_share_of_the_time_and_has_none_where_that_is_short(text, seconds):
    assert stopped_budget(text).trial_seconds() == seconds


@pytest.mark.parametrize(
    ("text", "pictures", "seconds"), [("2m", 4.0, 7.0), ("2m", 40.0, 12.0), ("10s", 4.0, 1.0), (None, 4.0, 7.0)]
)
def test_the_end_takes_as_long_as_its_pictures_within_a_share_of_the_time(text, pictures, seconds):
    assert stopped_budget(text).end_seconds(pictures) == seconds
