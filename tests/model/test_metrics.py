"""IoU and Dice: by hand, against a brute force, and against common mistakes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.tiling import resize_mask
from unet_trainer.model import metrics
from unet_trainer.model.metrics import (
    compute_scores,
    confusion_matrix,
    native_confusion_matrices,
    predicted_ids,
    resize_masks,
)


def test_iou_and_dice_equal_the_hand_computed_values():
    # class 0: 3 hit, 4 true, 5 predicted; class 1: 5 hit, 8 true, 6 predicted; class 2: 1 hit, 1 true, 2 predicted
    found = compute_scores(torch.tensor([[3, 1, 0], [2, 5, 1], [0, 0, 1]]), num_classes=3)
    assert found.per_class_iou == [3 / 6, 5 / 9, 1 / 2]
    assert found.confusion == [[3, 1, 0], [2, 5, 1], [0, 0, 1]]
    assert [one["dice"] for one in found.classes] == [6 / 9, 10 / 14, 2 / 3]
    assert found.iou == pytest.approx((3 / 6 + 5 / 9 + 1 / 2) / 3)
    assert found.dice == pytest.approx((6 / 9 + 10 / 14 + 2 / 3) / 3)
    assert [one["precision"] for one in found.classes] == [3 / 5, 5 / 6, 1 / 2]
    assert [one["recall"] for one in found.classes] == [3 / 4, 5 / 8, 1 / 1]


@pytest.mark.parametrize("num_stray", [0, 2])
def test_a_class_that_is_not_in_the_truth_has_no_score_and_its_stray_pixels_cost_the_class_that_they_take(num_stray):
    found = compute_scores(torch.tensor([[3, 1, num_stray], [1, 3, 0], [0, 0, 0]]), num_classes=3)
    first = 3 / (5 + num_stray)
    assert found.per_class_iou == [first, 3 / 5, None]
    assert found.classes[2] == dict.fromkeys(["iou", "dice", "precision", "recall"])
    assert found.iou == pytest.approx((first + 3 / 5) / 2)
    assert found.dice == pytest.approx((6 / (8 + num_stray) + 6 / 8) / 2)


def test_the_mean_is_nan_when_no_class_is_in_the_truth():
    found = compute_scores(torch.tensor([[16, 3], [0, 0]]), num_classes=1)
    assert found.per_class_iou == [None]
    assert all(map(math.isnan, (found.iou, found.dice)))


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
    for class_id, scores in zip(reported, found.classes, strict=True):
        is_true, is_predicted = (truth == class_id) & counts, (predicted == class_id) & counts
        both, either = (is_true & is_predicted).sum(), (is_true | is_predicted).sum()
        assert scores["iou"] == pytest.approx(both / either, abs=1e-12)
        assert scores["dice"] == pytest.approx(2 * both / (is_true.sum() + is_predicted.sum()), abs=1e-12)


SIZES = [(64, 64), (100, 37), (32, 48), (7, 200), (1, 1), (64, 64), (33, 48), (32, 48)]


def padded(masks):
    """In the upper left corner of the smallest size that holds them all."""
    height, width = np.max([mask.shape for mask in masks], axis=0)
    batch = torch.full((len(masks), height, width), IGNORED, dtype=torch.uint8)
    for place, mask in zip(batch, masks, strict=True):
        place[: mask.shape[0], : mask.shape[1]] = torch.from_numpy(mask)
    return batch


def random_masks(sizes, num_ids=3):
    """Class ids, and a few ignored pixels."""
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, num_ids, size, dtype=np.uint8) for size in sizes]
    return [np.where(rng.random(mask.shape) < 0.1, IGNORED, mask).astype(np.uint8) for mask in masks]


def random_logits(num_images, num_ids=3, size=(32, 48)):
    return torch.randn(num_images, num_ids, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(32, 48), (64, 64), (96, 96), (5, 7)])
def test_masks_get_the_pixels_that_resizing_them_one_by_one_takes(size):
    """Images without a size, at the end, are padding and stay ignored."""
    masks, filling = random_masks([*SIZES, (192, 192), (511, 96)]), np.full((30, 40), IGNORED, np.uint8)
    found = resize_masks(padded([*masks, filling, filling]), [mask.shape for mask in masks], size)
    assert found.dtype == torch.uint8
    for mask, small in zip(masks, found, strict=False):
        assert np.array_equal(small.numpy(), resize_mask(mask, size))
    assert (found[-2:] == IGNORED).all()
    assert (resize_masks(padded([filling]), [], size) == IGNORED).all()


@pytest.mark.parametrize("max_elements", [1, 5000, 10**9])
@pytest.mark.parametrize("num_ids", [2, 3])
def test_counts_are_those_of_every_mask_alone(num_ids, max_elements, monkeypatch):
    """Masks of one size are counted together, next to each other in the batch or not; padding counts nowhere."""
    monkeypatch.setattr(metrics, "MAX_ELEMENTS", max_elements)
    masks, logits = random_masks(SIZES, num_ids), random_logits(len(SIZES) + 1, num_ids)
    batch = torch.cat([padded(masks), torch.ones(1, 100, 200, dtype=torch.uint8)])  # the last image has no size
    expected = torch.zeros(len(batch), num_ids, num_ids, dtype=torch.int64)
    for number, (mask, of_image) in enumerate(zip(masks, logits.split(1), strict=False)):
        upsampled = F.interpolate(of_image, mask.shape, mode="bilinear", align_corners=False)
        expected[number] = confusion_matrix(predicted_ids(upsampled), torch.from_numpy(mask).unsqueeze(0), num_ids)
    assert torch.equal(native_confusion_matrices(logits, batch, SIZES), expected)
    assert int(expected.sum()) == sum(int((mask != IGNORED).sum()) for mask in masks)
    assert int(native_confusion_matrices(logits, batch, []).sum()) == 0
