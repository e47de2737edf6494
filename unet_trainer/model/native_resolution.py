"""Masks at their own size beside a model that sees another: scores are counted at the masks' size, the loss at the model's.

Nothing waits for the device, and memory does not grow with the masks: logits are upsampled a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from unet_trainer.images.tiling import Size, nearest_positions
from unet_trainer.loading.transfer import to_device
from unet_trainer.model.metrics import confusion_matrices

MAX_ELEMENTS = 2**23  # logits that are upsampled at a time; a CPU is slower with a quarter and with four times as many


def resize_masks(masks: torch.Tensor, sizes: Sequence[Size], size: Sequence[int]) -> torch.Tensor:
    """N,H,W ids, each with its own size in the upper left corner → N,h,w, the pixels that tiling.resize_mask takes.

    There may be fewer sizes than masks: the others are padding, ignored everywhere.
    """
    height, width = size
    own = [*sizes, *([(1, 1)] * (len(masks) - len(sizes)))]
    rows_and_columns = [np.concatenate([nearest_positions(h, height), nearest_positions(w, width)]) for h, w in own]
    positions = torch.from_numpy(np.stack(rows_and_columns))
    if masks.is_cuda:
        positions = positions.pin_memory()  # else the copy may wait for others before it
    (positions,) = to_device((positions,), masks.device)
    images = torch.arange(len(masks), device=masks.device).view(-1, 1, 1)
    return masks[images, positions[:, :height].unsqueeze(2), positions[:, height:].unsqueeze(1)]


def native_confusion_matrices(logits: torch.Tensor, masks: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
    """N,K,K counts of N,K,h,w logits, upsampled to each mask's own size, against N,H,W ids as in `resize_masks`."""
    num_ids = logits.shape[1]
    counts = torch.zeros(len(logits), num_ids, num_ids, dtype=torch.int64, device=logits.device)
    for (height, width), images in _by_size(sizes).items():
        num_at_once = max(1, MAX_ELEMENTS // (num_ids * max(width, logits.shape[3])))
        for start in range(0, len(images), num_at_once):
            some = images[start : start + num_at_once]
            truth = select_images(masks, some)
            for rows, upsampled in upsampled_rows(select_images(logits, some), (height, width)):
                ids = upsampled.max(1).indices  # the ids of predicted_ids; argmax is 30 times slower on CPUs in this memory format
                _add_to_images(counts, some, confusion_matrices(ids, truth[:, rows, :width], num_ids))
    return counts


def _by_size(sizes: Sequence[Size]) -> dict[Size, list[int]]:
    """The images of each size: they are counted together."""
    images: dict[Size, list[int]] = {}
    for image, size in enumerate(sizes):
        images.setdefault(size, []).append(image)
    return images


def select_images(tensor: torch.Tensor, images: Sequence[int]) -> torch.Tensor:
    """Without an index tensor, which would have to be copied to the device."""
    if _is_range(images):
        return tensor[images[0] : images[-1] + 1]
    return torch.stack([tensor[image] for image in images])


def _add_to_images(totals: torch.Tensor, images: Sequence[int], added: torch.Tensor) -> None:
    if _is_range(images):
        totals[images[0] : images[-1] + 1] += added
        return
    for image, one in zip(images, added, strict=True):
        totals[image] += one


def _is_range(images: Sequence[int]) -> bool:
    """Of ascending numbers: none is left out."""
    return images[-1] - images[0] + 1 == len(images)


def upsampled_rows(logits: torch.Tensor, size: Size) -> Iterator[tuple[slice, torch.Tensor]]:
    """F.interpolate(logits, size, mode="bilinear"), some rows at a time: which rows, and N,K,rows,W."""
    height, width = size
    num_images, num_ids, num_rows, num_columns = logits.shape
    num_at_once = max(1, MAX_ELEMENTS // (num_images * num_ids * max(width, num_columns)))
    for start in range(0, height, num_at_once):
        stop = min(start + num_at_once, height)
        # Row i lies at (i + ½) · num_rows / height - ½ of the logits; in integers, so that no rounding adds up.
        place = ((2 * torch.arange(start, stop, device=logits.device) + 1) * num_rows - height).clamp_min(0)
        above = place // (2 * height)
        share = (place % (2 * height)).to(logits.dtype) / (2 * height)
        below = (above + 1).clamp_max(num_rows - 1)
        blended = torch.lerp(logits.index_select(2, above), logits.index_select(2, below), share.unsqueeze(1))
        yield slice(start, stop), F.interpolate(blended, (stop - start, width), mode="bilinear")
