"""What the values in mask files are taken for, and what is suggested when they fit nothing."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.images import DataError
from unet_trainer.masks import IGNORED, UNKNOWN, build_lookup, choose_mask_values


def refusal(num_classes, seen, ignore_value=None):
    with pytest.raises(DataError) as raised:
        choose_mask_values("auto", num_classes, ignore_value, seen)
    return str(raised.value)


@pytest.mark.parametrize(
    ("num_classes", "ignore_value", "seen", "expected"),
    [
        (1, None, [0, 1], (0, 1)),
        (1, None, [0, 255], (0, 255)),
        (2, None, [0, 1], (0, 1)),
        (2, None, [0, 255], (0, 255)),
        (1, None, [0], (0, 1)),  # every mask is empty
        (1, None, [255], (0, 255)),  # every mask is full
        (1, None, [1], (0, 1)),
        (3, None, [0, 1, 2], (0, 1, 2)),
        (3, None, [0, 2], (0, 1, 2)),  # a class may be absent
        (254, None, [0, 253], tuple(range(254))),
        (1, 255, [0, 1, 255], (0, 1)),
        (1, 255, [0, 255], (0, 1)),  # 255 is ignored, so it is no foreground
        (3, 255, [0, 1, 2, 255], (0, 1, 2)),
        (11, 11, list(range(12)), tuple(range(11))),
        (1, 128, [0, 128, 255], (0, 255)),
    ],
)
def test_auto_decides_from_the_values_that_occur(num_classes, ignore_value, seen, expected):
    assert choose_mask_values("auto", num_classes, ignore_value, seen) == expected


def test_values_that_were_given_are_taken_as_they_are():
    assert choose_mask_values([7, 3], 1, None, [0, 1, 2]) == (7, 3)


@pytest.mark.parametrize(
    ("num_classes", "ignore_value", "seen", "expected"),
    [
        (1, None, [0, 128], "the masks hold the values 0, 128; num_classes: 1 takes {0, 1} or {0, 255}. Set mask_values: [0, 128]"),
        (3, None, [1, 2, 3], "the masks hold the values 1, 2, 3; num_classes: 3 takes 0 to 2. Set mask_values: [1, 2, 3]"),
        (1, None, [0, 1, 2], "the masks hold the values 0, 1, 2; num_classes: 1 takes {0, 1} or {0, 255}. Set num_classes: 3"),
        (
            1,
            None,
            [0, 1, 255],
            "the masks hold the values 0, 1, 255; num_classes: 1 takes {0, 1} or {0, 255}. "
            "Set ignore_value: 255, if those pixels are not to be learnt",
        ),
        (
            3,
            None,
            [0, 1, 255],
            "the masks hold the values 0, 1, 255; num_classes: 3 takes 0 to 2. "
            "Set mask_values: [0, 1, 255] or ignore_value: 255, if those pixels are not to be learnt",
        ),
        (
            1,
            None,
            [0, 40, 200],
            "the masks hold the values 0, 40, 200; num_classes: 1 takes {0, 1} or {0, 255}. "
            "Set num_classes, mask_values (the value of each class) or ignore_value",
        ),
    ],
)
def test_values_that_fit_nothing_are_refused_with_the_setting_that_helps(num_classes, ignore_value, seen, expected):
    assert refusal(num_classes, seen, ignore_value) == expected


def test_many_values_are_counted_and_not_all_listed():
    message = refusal(1, list(range(20)))
    assert message.startswith("the masks hold the values 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … (20 values); ")
    assert message.endswith("Set num_classes: 20")


@pytest.mark.parametrize("seen", [list(range(256)), [*range(46), *range(211, 256)]])
def test_blurred_masks_are_not_taken_for_hundreds_of_classes_or_for_ignored_pixels(seen):
    """Anti-aliased masks hold all 256 values, JPEG masks 0–45 and 211–255."""
    message = refusal(1, seen)
    assert message.endswith("Set num_classes, mask_values (the value of each class) or ignore_value")


def test_a_suggestion_that_is_followed_is_accepted():
    assert "mask_values: [0, 128]" in refusal(1, [0, 128])
    assert choose_mask_values([0, 128], 1, None, [0, 128]) == (0, 128)
    assert "num_classes: 3" in refusal(1, [0, 1, 2])
    assert choose_mask_values("auto", 3, None, [0, 1, 2]) == (0, 1, 2)
    assert "ignore_value: 255" in refusal(1, [0, 1, 255])
    assert choose_mask_values("auto", 1, 255, [0, 1, 255]) == (0, 1)


def test_the_lookup_turns_values_into_ids():
    lookup = build_lookup((0, 255), None)
    assert (lookup.dtype, lookup.shape) == (np.uint8, (256,))
    assert lookup[[0, 255]].tolist() == [0, 1]
    assert (lookup[1:255] == UNKNOWN).all()


def test_the_lookup_keeps_the_order_of_the_classes():
    assert build_lookup((7, 3, 0), None)[[7, 3, 0]].tolist() == [0, 1, 2]


def test_the_lookup_marks_ignored_values():
    lookup = build_lookup((0, 1, 2), 11)
    assert lookup[[0, 1, 2, 11, 12]].tolist() == [0, 1, 2, IGNORED, UNKNOWN]


def test_254_classes_and_ignored_pixels_have_ids_of_their_own():
    lookup = build_lookup(tuple(range(254)), 255)
    assert lookup[:254].tolist() == list(range(254))
    assert lookup[[254, 255]].tolist() == [UNKNOWN, IGNORED]
    assert UNKNOWN not in lookup[:254]
