"""What the values of many masks look like together, and how often each class occurs."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.mask_facts import facts_of, objects, soft_discs, stripes, with_border
from unet_trainer.datasets.mask_evidence import (
    MaskEvidence,
    describe_classes,
    has_background,
)
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding

RED, GREEN = COLOUR + 0xFF0000, COLOUR + 0x00FF00


def evidence_of(make, number=8, **others):
    return MaskEvidence([facts_of(make(index), **others) for index in range(number)])


def counts_of(*counts, ignored=()):
    """A mask for each dict value → pixels."""
    return MaskEvidence([MaskFacts(1, sum(count.values()), count, "") for count in counts], ignored)


# Soft edges


def test_a_grey_class_between_the_ends_is_no_soft_edge():
    def with_class(index):
        mask = soft_discs(index)
        mask[88:94, 2:90] = 128  # 6 % of the pixels
        return mask

    assert evidence_of(with_class).edge_threshold() is None


# Ids of objects


def test_ids_that_begin_anywhere_are_those_of_objects():
    def track(index):
        ids = objects(index, 6)
        return np.where(ids > 0, ids + 10 * index, 0).astype(np.uint16)

    assert evidence_of(track).are_objects


# Void


def test_a_last_value_in_few_masks_or_in_many_pixels_is_a_class():
    thin = [with_border(stripes(3, index, width=24), 3) if index < 4 else stripes(3, index, width=24) for index in range(8)]
    assert not MaskEvidence([facts_of(mask) for mask in thin]).last_may_be_void
    assert not evidence_of(lambda index: with_border(stripes(3, index, width=24), 3, width=6)).last_may_be_void  # 19 % of pixels


# Noise


def test_rare_values_of_one_mask_are_noise():
    masks = [{0: 9000, 255: 1000} for _ in range(5)]
    masks[3] = {0: 9000, 255: 990, 7: 6, RED: 4}
    assert counts_of(*masks).noise == [7, RED]
    assert counts_of(*masks[2:]).noise == []  # three masks
    assert counts_of(*[{0: 9000, 1: 1000}] * 5, {0: 9000, 1: 1000, 2: 1}).noise == []  # a rare class: 0, 1, 2
    masks[3] = {0: 9000, 255: 900, 7: 100}  # 0.2 % of all pixels
    assert counts_of(*masks).noise == []


def masks_of(*counts):
    """A mask for each dict value → pixels."""
    return [MaskFacts(1, sum(count.values()), count, "") for count in counts]


# 10 pixels of void, 60 + 20 of class 0, 10 of class 1, none of class 2
MASKS = masks_of({0: 60, 1: 10, 255: 10}, {0: 20})
CODING = MaskCoding((0, 1, 2), 0, 255, reason="class ids; 255 is taken as void")
NAMES = ("sky", "road", "cow")


def test_the_description_has_shares_ignored_pixels_and_the_reason():
    assert describe_classes(MASKS, CODING, NAMES) == (
        "0 → sky 88.9%, 1 → road 11.1%, 2 → cow 0.0% of pixels; 255 is ignored, 10.0% of all pixels "
        "(class ids; 255 is taken as void)"
    )
    given = MaskCoding(None, 127)
    assert describe_classes(masks_of({0: 3, 255: 1}), given, ("no", "yes")) == "≤ 127 → no 75.0%, > 127 → yes 25.0% of pixels"


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
