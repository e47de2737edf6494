"""IoU and Dice: by hand, against a brute force, and against common mistakes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.model.metrics import compute_scores, confusion_matrices, confusion_matrix


def test_iou_and_dice_equal_the_hand_computed_values():
    # class 0: 3 hit, 4 true, 5 predicted; class 1: 5 hit, 8 true, 6 predicted; class 2: 1 hit, 1 true, 2 predicted
    found = compute_scores(torch.tensor([[3, 1, 0], [2, 5, 1], [0, 0, 1]]), num_classes=3)
    assert found.per_class_iou == [3 / 6, 5 / 9, 1 / 2]
    assert found.confusion == [[3, 1, 0], [2, 5, 1], [0, 0, 1]]
    assert found.per_class_dice == [6 / 9, 10 / 14, 2 / 3]
    assert found.iou == pytest.approx((3 / 6 + 5 / 9 + 1 / 2) / 3)
    assert found.dice == pytest.approx((6 / 9 + 10 / 14 + 2 / 3) / 3)


def test_a_class_that_does_not_occur_has_no_iou_and_is_left_out_of_the_mean():
    found = compute_scores(torch.tensor([[3, 1, 0], [1, 3, 0], [0, 0, 0]]), num_classes=3)
    assert found.per_class_iou == [3 / 5, 3 / 5, None]
    assert found.per_class_dice == [6 / 8, 6 / 8, None]
    assert found.iou == pytest.approx(3 / 5)


def test_ignored_pixels_count_nowhere():
    truth = torch.tensor([[[0, 1], [IGNORED, IGNORED]]])
    for painted in (0, 1):
        predicted = torch.tensor([[[0, 1], [painted, painted]]])
        assert confusion_matrix(predicted, truth, 2).tolist() == [[1, 0], [0, 1]]


def test_with_one_class_the_foreground_alone_is_reported():
    found = compute_scores(torch.tensor([[90, 2], [3, 5]]), num_classes=1)
    assert found.per_class_iou == [5 / 10]
    assert found.per_class_dice == [10 / 15]
    assert found.iou == 5 / 10
    assert len(compute_scores(torch.tensor([[90, 2], [3, 5]]), num_classes=2).per_class_iou) == 2


def test_the_mean_is_nan_when_no_class_occurs():
    found = compute_scores(torch.tensor([[16, 0], [0, 0]]), num_classes=1)
    assert found.per_class_iou == [None]
    assert math.isnan(found.iou)
    assert math.isnan(found.dice)


@pytest.mark.parametrize("num_classes", [1, 2, 5, 254])
def test_counts_and_iou_equal_a_brute_force_on_random_data(num_classes):
    num_ids = max(2, num_classes)
    rng = np.random.default_rng(num_classes)
    truth = rng.integers(0, num_ids, (3, 33, 35)).astype(np.uint8)  # a number of pixels that no power of two divides
    truth[rng.random(truth.shape) < 0.2] = IGNORED
    predicted = rng.integers(0, num_ids, truth.shape)

    matrix = confusion_matrix(torch.from_numpy(predicted), torch.from_numpy(truth), num_ids)
    assert matrix.dtype == torch.int64
    assert int(matrix.sum()) == int((truth != IGNORED).sum())
    counts = truth != IGNORED
    found = compute_scores(matrix, num_classes)
    reported = [1] if num_classes == 1 else list(range(num_classes))
    assert len(found.per_class_iou) == len(reported)
    for class_id, iou, dice in zip(reported, found.per_class_iou, found.per_class_dice, strict=True):
        is_true, is_predicted = (truth == class_id) & counts, (predicted == class_id) & counts
        both, either = (is_true & is_predicted).sum(), (is_true | is_predicted).sum()
        assert iou == pytest.approx(both / either, abs=1e-12)
        assert dice == pytest.approx(2 * both / (is_true.sum() + is_predicted.sum()), abs=1e-12)


@pytest.mark.parametrize("num_ids", [2, 3, 200])
def test_each_image_has_its_own_matrix(num_ids):
    """200 ids: more cells than counters, so that there is one lane."""
    random = torch.Generator().manual_seed(0)
    predicted, truth = (torch.randint(0, num_ids, (5, 6, 7), generator=random) for _ in range(2))
    truth[2, :3] = 255
    truth[4] = 255  # padding
    matrices = confusion_matrices(predicted, truth, num_ids)
    assert matrices.shape == (5, num_ids, num_ids)
    for index in range(5):
        assert torch.equal(matrices[index], confusion_matrix(predicted[index : index + 1], truth[index : index + 1], num_ids))
    assert int(matrices[4].sum()) == 0
    assert torch.equal(matrices.sum(0), confusion_matrix(predicted, truth, num_ids))


def test_precision_and_recall_are_those_computed_by_hand():
    scores = compute_scores(torch.tensor([[5, 1, 0], [3, 2, 0], [0, 0, 0]]), 3)
    assert scores.per_class_precision == [5 / 8, 2 / 3, None]
    assert scores.per_class_recall == [5 / 6, 2 / 5, None]
    foreground = compute_scores(torch.tensor([[5, 1], [3, 2]]), 1)
    assert (foreground.per_class_precision, foreground.per_class_recall) == ([2 / 3], [2 / 5])
