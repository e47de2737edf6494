"""Scores at the masks' own size from logits at the model's: as F.interpolate and OpenCV would have it, in little memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.tiling import resize_mask
from unet_trainer.model import metrics
from unet_trainer.model.metrics import (
    confusion_matrix,
    native_confusion_matrices,
    predicted_ids,
    resize_masks,
    upsampled_rows,
)

SIZES = [(64, 64), (100, 37), (32, 48), (7, 200), (1, 1), (64, 64), (33, 48), (32, 48)]


def padded(masks):
    """In the upper left corner of the smallest size that holds them all."""
    height, width = (max(mask.shape[axis] for mask in masks) for axis in (0, 1))
    batch = torch.full((len(masks), height, width), IGNORED, dtype=torch.uint8)
    for index, mask in enumerate(masks):
        batch[index, : mask.shape[0], : mask.shape[1]] = torch.from_numpy(mask)
    return batch


def random_masks(sizes, num_ids=3):
    """Class ids, and a few ignored pixels."""
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, num_ids, size, dtype=np.uint8) for size in sizes]
    return [np.where(rng.random(mask.shape) < 0.1, IGNORED, mask).astype(np.uint8) for mask in masks]


def random_logits(num_images, num_ids=3, size=(32, 48)):
    return torch.randn(num_images, num_ids, *size, generator=torch.Generator().manual_seed(0))


# Masks at the model's size


@pytest.mark.parametrize("size", [(32, 48), (64, 64), (96, 96), (5, 7)])
def test_masks_get_the_pixels_that_resizing_them_one_by_one_takes(size):
    masks = random_masks([*SIZES, (192, 192), (511, 96)])
    found = resize_masks(padded(masks), [mask.shape for mask in masks], size)
    assert found.dtype == torch.uint8
    for mask, small in zip(masks, found, strict=True):
        assert np.array_equal(small.numpy(), resize_mask(mask, size))


def test_images_without_a_size_are_padding_and_stay_ignored():
    masks = torch.cat([torch.ones(1, 20, 30, dtype=torch.uint8), torch.full((2, 20, 30), IGNORED, dtype=torch.uint8)])
    found = resize_masks(masks, [(20, 30)], (8, 9))
    assert (found[0] == 1).all()
    assert (found[1:] == IGNORED).all()
    assert (resize_masks(masks[1:], [], (8, 9)) == IGNORED).all()


# Logits at the masks' size


@pytest.mark.parametrize("max_elements", [1, 10_000, 10**9])
@pytest.mark.parametrize("size", [(100, 37), (32, 48), (7, 200), (1, 1)])
def test_rows_that_are_upsampled_in_turn_are_those_of_the_whole(size, max_elements, monkeypatch):
    """Larger, smaller, of another shape, or as large as the logits."""
    monkeypatch.setattr(metrics, "MAX_ELEMENTS", max_elements)
    logits = random_logits(2).to(memory_format=torch.channels_last)
    rows, parts = zip(*upsampled_rows(logits, size), strict=True)
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(size[0]))
    whole = F.interpolate(logits, size, mode="bilinear", align_corners=False)
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-4)
    num_most = max(1, max_elements // (2 * 3 * max(48, size[1])))
    assert max(part.shape[2] for part in parts) == min(num_most, size[0])


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


def test_of_two_equal_logits_the_first_class_is_predicted():
    """As predicted_ids does."""
    logits = torch.ones(1, 3, 4, 4)
    masks = torch.full((1, 8, 8), 2, dtype=torch.uint8)
    assert native_confusion_matrices(logits, masks, [(8, 8)])[0][2].tolist() == [64, 0, 0]
