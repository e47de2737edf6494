"""Facts of masks without files, and masks of objects, classes and colours to try decisions on."""

from __future__ import annotations

import cv2
import numpy as np

from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_shapes import measure_structure

SIDE = 96


def facts_of(mask, **others):
    """The facts of an array, as a scan would find them."""
    values, pixels = np.unique(mask, return_counts=True)
    counts = dict(zip(values.tolist(), pixels.tolist(), strict=True))
    structure = measure_structure(mask, max(counts, key=counts.__getitem__)) if len(counts) > 2 else None
    return MaskFacts(*mask.shape, counts, "", structure=structure, **others)


def place(index, number):
    """A place for an object that no other of the mask has."""
    return 8 + 16 * ((number + index) % 6), 8 + 16 * ((number // 6 + index) % 6)


def objects(index, number, radius=6):
    """H,W uint16 with ids 1 to `number` of discs that do not touch."""
    mask = np.zeros((SIDE, SIDE), np.uint16)
    for one in range(number):
        cv2.circle(mask, place(index, one), radius, one + 1, -1)
    return mask


def stripes(num_ids, index=0, width=8):
    """H,W uint8 with ids 0 to `num_ids` - 1 in stripes, several of each."""
    ids = (np.arange(SIDE) // width + index) % num_ids
    return np.repeat(ids.astype(np.uint8)[:, None], SIDE, axis=1)


def with_border(mask, value, width=2):
    """The mask with lines of this value where others meet."""
    square = np.ones((width + 1, width + 1), np.uint8)
    is_edge = cv2.dilate(mask, square) != cv2.erode(mask, square)
    return np.where(is_edge, value, mask).astype(mask.dtype)


def soft_discs(index, number=5, radius=7):
    """H,W uint8: discs of 255 on 0 with an anti-aliased edge."""
    sharp = (objects(index, number, radius) > 0).astype(np.uint8) * 255
    large = cv2.resize(sharp, (SIDE * 4, SIDE * 4), interpolation=cv2.INTER_NEAREST)
    return cv2.resize(cv2.GaussianBlur(large, (0, 0), 3), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
