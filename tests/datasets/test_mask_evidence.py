"""What the values of many masks look like together, and how often each class occurs."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from helpers.mask_facts import SIDE, facts_of, objects, soft_discs
from unet_trainer.datasets.mask_evidence import (
    MaskEvidence,
    has_background,
)
from unet_trainer.images.mask_decoding import COLOUR

RED, GREEN = COLOUR + 0xFF0000, COLOUR + 0x00FF00


def evidence_of(make, number=8, **others):
    return MaskEvidence([facts_of(make(index), **others) for index in range(number)])


# Soft edges


def test_a_grey_class_between_the_ends_is_no_soft_edge():
    def with_class(index):
        mask = soft_discs(index)
        mask[88:94, 2:90] = 128  # 6 % of the pixels
        return mask

    assert evidence_of(with_class).edge_threshold() is None


def test_a_grey_ring_between_the_ends_of_masks_saved_as_jpeg_is_a_class():
    def with_ring(index):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        for number in range(5):
            place = 16 + 30 * (number % 3), 16 + 30 * (number // 3) + 2 * index
            cv2.circle(mask, place, 14, 128, -1)  # a ring of 3 pixels, 12 % of all pixels
            cv2.circle(mask, place, 11, 255, -1)
        return cv2.imdecode(cv2.imencode(".jpg", mask)[1], cv2.IMREAD_GRAYSCALE)

    assert evidence_of(with_ring, is_lossy=True).edge_threshold() is None


# Ids of objects


def test_ids_that_begin_anywhere_are_those_of_objects():
    def track(index):
        ids = objects(index, 6)
        return np.where(ids > 0, ids + 10 * index, 0).astype(np.uint16)

    assert evidence_of(track).are_objects


# Noise


# 10 pixels of void, 60 + 20 of class 0, 10 of class 1, none of class 2


@pytest.mark.parametrize(
    ("names", "shares", "is_background"),
    [
        (["background", "cell"], [0.1, 0.9], True),
        (["_background_", "cell", "wall"], [0.1, 0.5, 0.4], True),
        (["sky", "road", "car"], [0.8, 0.1, 0.1], False),
        (["class 0", "class 1", "class 2"], [0.2, 0.5, 0.3], False),
        (["class 0", "class 1", "class 2"], [0.6, 0.1, 0.3], True),
    ],
)
def test_class_0_is_the_background_by_its_name_or_where_it_has_none_by_its_share(names, shares, is_background):
    assert has_background(names, shares) is is_background
