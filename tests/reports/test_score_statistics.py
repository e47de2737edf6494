"""Scores of a set from the counts of its images, by hand; and when two runs may be compared image by image."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.report_runs import FOUR_IMAGES, scores_of
from unet_trainer.inference.evaluate import EvaluatedSet
from unet_trainer.inference.evaluation_summary import summarise
from unet_trainer.reports.score_statistics import count_array, histogram, paired_difference, same_images, set_scores
from unet_trainer.runs.val_scores import worst_first

SCORES = scores_of(FOUR_IMAGES)
# Hits 2 + 8 + 16 + 20 = 46, truth 60, prediction 52.
WHOLE = 46 / (60 + 52 - 46)


def test_the_score_of_a_set_comes_from_all_counts_together_and_lies_in_its_interval():
    found = set_scores(SCORES)
    assert found.num_images == 4
    assert found.iou == pytest.approx(WHOLE)
    assert found.classes == {"foreground": pytest.approx(WHOLE)}
    low, high = found.interval
    assert 0.2 <= low < WHOLE < high <= 1.0
    assert found.class_intervals["foreground"] == found.interval


def test_with_several_classes_the_score_is_the_mean_of_those_that_occur():
    images = [[[4, 8, 4], [2, 2, 6], [0, 0, 0]], [[4, 4, 4], [2, 2, 2], [0, 0, 0]]]
    found = set_scores(scores_of(images, ("sky", "road", "cow")))
    assert found.classes == {"sky": pytest.approx(8 / 12), "road": pytest.approx(4 / 8), "cow": None}
    assert found.iou == pytest.approx((8 / 12 + 4 / 8) / 2)
    assert found.class_intervals["cow"] is None


def test_one_image_has_no_interval_and_none_no_scores():
    assert set_scores(SCORES[:1]).interval is None
    assert set_scores([]) is None


def test_a_report_and_an_evaluation_of_the_same_images_give_one_interval():
    """The table of a run lists its images worst first and without boundaries; an evaluation has them in the order of the files."""
    hits = np.random.default_rng(0).integers(0, 100, 10).tolist()
    scores = worst_first(scores_of([[[0, 900, 900], [number, 100, 100]] for number in hits]))
    counts = np.zeros((10, 1, 5), np.int64)
    counts[..., :3] = count_array(sorted(scores, key=lambda score: score.image))
    evaluated = EvaluatedSet(counts, np.zeros((2, 2), np.int64), np.zeros(10, np.int64), np.zeros(10, np.int64), [])
    assert summarise(evaluated, ["foreground"]).intervals["iou"][:, -1].tolist() == list(set_scores(scores).interval)


def test_counts_are_images_by_classes_by_columns():
    assert count_array(SCORES[:2]).tolist() == [[[2, 6, 6]], [[8, 16, 8]]]


def test_a_difference_is_paired_by_the_names_of_the_images_in_any_order():
    better = scores_of([[row[0], [row[1][1]] * 3] for row in FOUR_IMAGES])  # the same truth, all of it found
    difference = paired_difference(better[::-1], SCORES)
    assert difference.iou == pytest.approx(1 - WHOLE)
    assert difference.num_images == 4
    assert difference.interval[0] >= 0
    assert difference.share_above > 0.9
    assert paired_difference(SCORES, SCORES).is_open
    assert paired_difference(SCORES, SCORES).interval == (0.0, 0.0)


def test_other_images_other_masks_and_other_classes_are_not_compared():
    assert same_images(SCORES, SCORES[::-1])
    assert not same_images(SCORES, SCORES[:3])
    assert not same_images(SCORES, scores_of(FOUR_IMAGES, prefix="elsewhere/"))
    assert not same_images(SCORES, scores_of(FOUR_IMAGES, ("cell",)))
    other_masks = [*FOUR_IMAGES[:3], [[80, 80, 80], [20, 21, 20]]]
    assert not same_images(SCORES, scores_of(other_masks))
    assert not same_images([], [])
    assert paired_difference(SCORES, SCORES[:3]) is None


def test_the_histogram_counts_images_by_iou_and_those_without():
    counts, num_undefined = histogram([*SCORES, *scores_of([[[5, 5, 5], [0, 0, 0]]], prefix="empty/")])
    assert num_undefined == 1
    # 2 / 10 is 0.2, 8 / 16 is 0.5, 16 / 20 is 0.8, 20 / 20 is 1: in the last bin.
    assert [index for index, number in enumerate(counts) if number] == [4, 10, 16, 19]
    assert sum(counts) == 4
