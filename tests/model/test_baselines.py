"""Predictions that need no model: their IoU by hand."""

from __future__ import annotations

import pytest

from unet_trainer.model.baselines import Baseline, baselines, best_baseline

TWO = ("background", "foreground")
GOOD, ALL_BACKGROUND = [[68, 2], [2, 28]], [[70, 0], [30, 0]]  # 30% foreground; rows truth, columns prediction


def test_baselines_of_one_class_are_all_background_and_all_foreground():
    expected = [Baseline("all background", 0.0), Baseline("all foreground", 0.3)]
    assert baselines(GOOD, 1, TWO) == baselines(ALL_BACKGROUND, 1, TWO) == expected  # whatever was predicted
    assert best_baseline(GOOD, 1, TWO) == Baseline("all foreground", 0.3)


def test_the_baseline_of_many_classes_is_the_most_frequent_one_over_those_that_occur():
    confusion = [[10, 0, 0, 0], [5, 50, 5, 0], [0, 0, 30, 0], [0, 0, 0, 0]]  # truth 10, 60, 30, 0
    assert baselines(confusion, 4, ("sky", "road", "cow", "sea")) == [Baseline("all road", 0.6 / 3)]


@pytest.mark.parametrize("confusion", [[], [[0, 0], [0, 0]]])
def test_without_pixels_that_count_there_is_no_baseline(confusion):
    assert best_baseline(confusion, 1, TWO) is None
