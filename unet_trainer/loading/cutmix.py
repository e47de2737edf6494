"""CutMix: in some images of a batch, a rectangle is replaced by that of the image before, and so is its mask.

A model that sees the same images hundreds of times learns them by heart; a piece of another image is a context that it has not
seen. Where the rectangles lie is a pure function of (seed, epoch, batch); the pixels are moved on the device.
"""

from __future__ import annotations

import numpy as np
import torch

CUTMIX_STREAM = 5  # part of the seed: independent of the random numbers of order, augmentation and crops
SMALLEST, LARGEST = 0.2, 0.7  # side of a rectangle, as a share of the image's


def cut_boxes(key: tuple[int, int, int], num_images: int, size: tuple[int, int], share: float) -> torch.Tensor:
    """N,4 int64 of a batch: first and last + 1 of the rows, then of the columns, that each image takes from the one before it.

    `key`: seed, epoch, batch. A share of the images has none: 0, 0, 0, 0. Rectangles may be cut off by the border.
    """
    seed, epoch, batch = key
    drawn = np.random.default_rng([seed, CUTMIX_STREAM, epoch, batch]).random((4, num_images))
    sides = SMALLEST + (LARGEST - SMALLEST) * drawn[0]
    boxes = np.zeros((num_images, 4), np.int64)
    for axis, (length, centre) in enumerate(zip(size, drawn[1:3], strict=True)):
        first, last = (centre - sides / 2) * length, (centre + sides / 2) * length
        boxes[:, 2 * axis], boxes[:, 2 * axis + 1] = first.round().clip(0, length), last.round().clip(0, length)
    boxes[drawn[3] >= share] = 0
    return torch.from_numpy(boxes)


def paste_pieces(images: torch.Tensor, masks: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """N,H,W,C images and N,H,W masks with the rectangles in place; all three on one device, for which nothing waits."""
    rows = torch.arange(masks.shape[1], device=masks.device)
    columns = torch.arange(masks.shape[2], device=masks.device)
    in_rows = (rows >= boxes[:, :1]) & (rows < boxes[:, 1:2])
    in_columns = (columns >= boxes[:, 2:3]) & (columns < boxes[:, 3:])
    inside = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
    mixed = torch.where(inside.unsqueeze(3), images.roll(1, 0), images)
    return mixed, torch.where(inside, masks.roll(1, 0), masks)
