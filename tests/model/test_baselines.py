"""Predictions that need no model: their IoU by hand."""

import pytest

from unet_trainer.model.baselines import Baseline, best_baseline

TWO = ("background", "foreground")


@pytest.mark.parametrize("confusion", [[[68, 2], [2, 28]], [[70, 0], [30, 0]]])
def test_the_baseline_of_one_class_is_all_foreground_whatever_was_predicted(confusion):
    assert best_baseline(confusion, 1, TWO) == Baseline("all foreground", 0.3)
    assert best_baseline([[70, 0], [0, 0]], 1, TWO) == Baseline("all background", 0.0)


def test_the_baseline_of_many_classes_is_the_most_frequent_one_over_those_that_occur():
    confusion = [[10, 0, 0, 0], [5, 50, 5, 0], [0, 0, 30, 0], [0, 0, 0, 0]]  # truth 10, 60, 30, 0
    assert best_baseline(confusion, 4, ("sky", "road", "cow", "sea")) == Baseline("all road", 0.6 / 3)
    assert best_baseline([[0, 0], [0, 0]], 1, TWO) is best_baseline([], 1, TWO) is None
