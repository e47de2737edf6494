"""Resampled sums by hand, and intervals that hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unet_trainer.inference import bootstrap
from unet_trainer.inference.bootstrap import interval, resampled_sums, share_above_zero
from unet_trainer.inference.image_scores import scores_from_counts


def counts_of(hits, truth, predicted):
    """N images, one class, without boundaries."""
    counts = np.zeros((len(hits), 1, 5), np.int64)
    counts[:, 0, 0], counts[:, 0, 1], counts[:, 0, 2] = hits, truth, predicted
    return counts


def test_every_draw_has_as_many_images_as_there_are():
    ones = np.ones((7, 1, 3), np.int64)
    assert (resampled_sums([ones], num_draws=50)[0] == 7).all()


def test_a_draw_is_a_sum_over_images_that_may_come_twice():
    """With the powers of 5, the digits of a sum tell how often each of four images came."""
    powers = 5 ** np.arange(4)[:, None, None].repeat(3, 2)
    sums = resampled_sums([powers], num_draws=3000)[0][..., 0].ravel().astype(int)
    times = np.stack([sums // 5**digit % 5 for digit in range(4)], 1)
    assert (times.sum(1) == 4).all()
    assert times.mean(0) == pytest.approx([1] * 4, abs=0.07)  # each image once in the mean
    assert times.var(0) == pytest.approx([3 / 4] * 4, abs=0.08)  # of a multinomial: n · p · (1 − p)
    assert (times > 1).any()
    assert (times == 0).any()


def test_draws_are_seeded_and_the_same_for_several_models():
    counts = np.random.default_rng(0).integers(0, 100, (9, 2, 5))
    first, again = resampled_sums([counts]), resampled_sums([counts])
    assert (first[0] == again[0]).all()
    assert len(np.unique(first[0][:, 0, 0])) > 100
    mine, theirs = resampled_sums([counts, counts * 2])
    assert (theirs == 2 * mine).all()
    assert (mine == first[0]).all()


def test_draws_depend_neither_on_the_order_of_the_images_nor_on_that_of_the_models():
    rng = np.random.default_rng(0)
    mine, theirs = rng.integers(0, 100, (2, 9, 2, 5))
    mine[3, ..., :3] = mine[7, ..., :3]  # images that differ in what IoU does not count
    theirs[..., 1] = mine[..., 1]  # the same truth
    order = rng.permutation(9)
    whole, shuffled = resampled_sums([mine])[0], resampled_sums([mine[order]])[0]
    assert (shuffled[..., :3] == whole[..., :3]).all()
    assert (resampled_sums([mine[..., :3]])[0] == whole[..., :3]).all()  # without boundaries
    first, second = resampled_sums([mine, theirs])
    assert [(one == other).all() for one, other in zip(resampled_sums([theirs, mine]), (second, first), strict=True)] == [True] * 2


def test_of_many_images_fewer_draws_are_made(monkeypatch):
    monkeypatch.setattr(bootstrap, "MAX_DRAWN", 6000)
    assert [len(resampled_sums([np.ones((num_images, 1, 3))])[0]) for num_images in (2, 20, 200)] == [2000, 300, 200]


def test_draws_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch):
    counts = np.random.default_rng(0).integers(0, 100, (9, 1, 5))
    whole = resampled_sums([counts], num_draws=100)[0]
    monkeypatch.setattr(bootstrap, "MAX_WEIGHTS", 9 * 7)  # 7 draws at a time
    assert (resampled_sums([counts], num_draws=100)[0] == whole).all()


def test_the_interval_holds_the_central_95_percent():
    draws = np.arange(1001.0)[:, None]
    assert interval(draws).ravel().tolist() == [25.0, 975.0]


def test_an_interval_leaves_out_draws_without_a_score():
    draws = np.array([[math.nan, math.nan], [1.0, math.nan], [1.0, math.nan]])
    ends = interval(draws)
    assert ends[:, 0].tolist() == [1.0, 1.0]
    assert np.isnan(ends[:, 1]).all()


def test_the_share_above_zero_by_hand():
    draws = np.array([[1.0, math.nan], [0.0, math.nan], [2.0, math.nan], [-1.0, math.nan], [math.nan, math.nan]])
    assert share_above_zero(draws)[0] == 0.5  # 0 itself is not above 0
    assert math.isnan(share_above_zero(draws)[1])


def test_the_interval_of_equal_images_is_their_score():
    counts = counts_of([5] * 6, [10] * 6, [5] * 6)
    draws = scores_from_counts(resampled_sums([counts])[0])["iou"]
    assert interval(draws).ravel().tolist() == [0.5, 0.5]


def test_an_interval_covers_the_true_score_about_95_times_of_100():
    """200 sets of 60 images from one population, whose recall is 0.7."""
    random = np.random.default_rng(1)
    num_covered = 0
    for _ in range(200):
        found = random.beta(7, 3, 60)  # share of each image's 1000 pixels that is found: 0.7 in the mean
        counts = counts_of((1000 * found).round(), [1000] * 60, [1000] * 60)
        low, high = interval(scores_from_counts(resampled_sums([counts], num_draws=300)[0])["recall"]).ravel()
        num_covered += low <= 0.7 <= high
    assert 180 <= num_covered <= 200
