"""Both reductions, their intervals, and differences between two models, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unet_trainer.inference.evaluate import EvaluatedSet
from unet_trainer.inference.evaluation_summary import compare, summarise


def evaluated(rows):
    """Rows: for each image, (hits, truth, prediction) of each class. No boundaries."""
    counts = np.zeros((len(rows), len(rows[0]), 5), np.int64)
    counts[:, :, :3] = rows
    return EvaluatedSet(counts, np.eye(2, dtype=np.int64), np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64), [])


# Two classes in three images; the second is in the first image only, and was not found in it.
TWO_CLASSES = [[(5, 10, 5), (0, 4, 0)], [(10, 10, 10), (0, 0, 0)], [(0, 0, 5), (0, 0, 0)]]


def test_scores_of_the_whole_set_by_hand():
    summary = summarise(evaluated(TWO_CLASSES), ["road", "tree"])
    assert summary.row_names == ["road", "tree", "mean"]
    assert summary.dataset["iou"].tolist() == [15 / 25, 0.0, 0.3]
    assert summary.dataset["precision"][0] == 15 / 20
    assert math.isnan(summary.dataset["precision"][1])
    assert summary.dataset["precision"][2] == 15 / 20  # the mean over the classes that have one


def test_means_over_images_by_hand():
    summary = summarise(evaluated(TWO_CLASSES), ["road", "tree"])
    assert summary.image_means["iou"].tolist() == [(0.5 + 1 + 0) / 3, 0.0, 0.25]
    assert summary.image_means["recall"].tolist() == [(0.5 + 1) / 2, 0.0, 0.375]  # undefined in the third image, which has no road


def test_empty_truths_and_predictions_are_counted():
    summary = summarise(evaluated(TWO_CLASSES), ["road", "tree"])
    assert summary.num_images == 3
    assert summary.num_scored.tolist() == [3, 1]
    assert summary.empty_truths.tolist() == [1, 2]
    assert summary.empty_predictions.tolist() == [0, 3]


def test_with_one_class_there_is_no_row_for_the_mean():
    summary = summarise(evaluated([[(1, 2, 1)], [(2, 2, 2)]]), ["cell"])
    assert summary.row_names == ["cell"]
    assert summary.dataset["iou"].tolist() == [0.75, 0.75]


def test_an_interval_encloses_the_score_and_is_seeded():
    rows = [[(hits, 20, 20)] for hits in range(0, 21, 2)]
    first, again = summarise(evaluated(rows), ["cell"]), summarise(evaluated(rows), ["cell"])
    low, high = first.intervals["iou"][:, 0]
    assert 0.1 < low < first.dataset["iou"][0] < high < 0.9
    assert (first.intervals["iou"] == again.intervals["iou"]).all()


def test_a_single_image_has_no_interval():
    assert np.isnan(summarise(evaluated([[(1, 2, 1)]]), ["cell"]).intervals["iou"]).all()


def test_a_difference_is_this_model_minus_the_other_and_paired():
    """The other finds one pixel less of each image: images differ much, the difference hardly."""
    this = evaluated([[(hits, 40, 40)] for hits in range(5, 40, 3)])
    other = evaluated([[(hits - 1, 40, 40)] for hits in range(5, 40, 3)])
    comparison = compare(this, other)
    assert comparison.differences["recall"].tolist() == pytest.approx([1 / 40] * 2)
    assert comparison.others["recall"][0] == pytest.approx(summarise(this, ["cell"]).dataset["recall"][0] - 1 / 40)
    low, high = comparison.intervals["recall"][:, -1]
    assert low == pytest.approx(1 / 40)
    assert high == pytest.approx(1 / 40)
    assert comparison.shares_above["recall"].tolist() == [1.0, 1.0]
    assert not comparison.holds_zero("recall")
    assert compare(other, this).differences["recall"][0] == pytest.approx(-1 / 40)
    assert compare(other, this).shares_above["recall"][0] == 0.0


def test_a_model_compared_with_itself_leaves_open_which_is_better():
    rows = [[(hits, 40, 40)] for hits in range(5, 40, 3)]
    comparison = compare(evaluated(rows), evaluated(rows))
    assert comparison.differences["iou"].tolist() == [0.0, 0.0]
    assert comparison.holds_zero("iou")
    assert comparison.shares_above["iou"][-1] == 0.0


def test_two_models_that_win_on_half_of_the_images_each_are_not_told_apart():
    first, second = [[(30, 40, 40)], [(20, 40, 40)]] * 10, [[(20, 40, 40)], [(30, 40, 40)]] * 10
    comparison = compare(evaluated(first), evaluated(second))
    assert comparison.holds_zero("iou")
    assert 0.3 < comparison.shares_above["iou"][-1] < 0.7
