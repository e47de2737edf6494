"""CutMix: where the rectangles lie, and what is moved."""

from __future__ import annotations

import torch

from unet_trainer.loading.cutmix import cut_boxes, paste_pieces


def test_rectangles_are_a_function_of_seed_epoch_and_batch():
    first = cut_boxes((1, 2, 3), 16, (64, 96), 0.5)
    assert torch.equal(first, cut_boxes((1, 2, 3), 16, (64, 96), 0.5))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, cut_boxes(other, 16, (64, 96), 0.5))


def test_rectangles_lie_in_the_image_and_have_a_fifth_to_seven_tenths_of_its_side():
    boxes = cut_boxes((0, 0, 0), 4000, (100, 200), 1.0)
    top, bottom, left, right = boxes.T
    assert (top >= 0).all()
    assert (bottom <= 100).all()
    assert (left >= 0).all()
    assert (right <= 200).all()
    whole = (top > 0) & (bottom < 100) & (left > 0) & (right < 200)  # the others are cut off by the border
    heights, widths = (bottom - top)[whole], (right - left)[whole]
    assert whole.sum() > 500
    assert heights.min() in (20, 21)
    assert heights.max() in range(60, 71)
    assert ((widths - 2 * heights).abs() <= 2).all()  # the same share of both sides, rounded


def test_a_share_of_the_images_gets_a_rectangle():
    boxes = cut_boxes((0, 0, 0), 10_000, (100, 100), 0.3)
    share = (boxes[:, 1] > boxes[:, 0]).float().mean()
    assert abs(share - 0.3) < 0.02
    assert not cut_boxes((0, 0, 0), 100, (100, 100), 0.0).any()


def test_pieces_come_from_the_image_before_with_their_masks():
    images = torch.arange(3).view(3, 1, 1, 1).expand(3, 4, 5, 2).to(torch.uint8)
    masks = torch.arange(3).view(3, 1, 1).expand(3, 4, 5).to(torch.uint8) + 10
    boxes = torch.tensor([[1, 3, 2, 5], [0, 0, 0, 0], [0, 4, 0, 1]])
    mixed, mixed_masks = paste_pieces(images, masks, boxes)
    assert mixed[0, :, :, 0].tolist() == [[0, 0, 0, 0, 0], [0, 0, 2, 2, 2], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert torch.equal(mixed[1], images[1])
    assert torch.equal(mixed_masks[1], masks[1])
    assert mixed[2, :, :, 1].tolist() == [[1, 2, 2, 2, 2]] * 4
    assert torch.equal(mixed_masks, mixed[..., 0] + 10)
    assert mixed.dtype == mixed_masks.dtype == torch.uint8
