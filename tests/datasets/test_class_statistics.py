"""How often values and classes occur: class ids, shares, the table and its description."""

from __future__ import annotations

import pytest

from unet_trainer.datasets.class_statistics import (
    ClassRow,
    absent_classes,
    class_ids,
    class_shares,
    class_table,
    describe_classes,
    has_background,
    ignored_share,
    total_counts,
    value_table,
)
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.image_files import COLOUR
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, given_coding


def masks_of(*counts):
    """A mask for each dict value → pixels."""
    return [MaskFacts(1, sum(count.values()), count, "") for count in counts]


# 10 pixels of void, 60 + 20 of class 0, 10 of class 1, none of class 2
MASKS = masks_of({0: 60, 1: 10, 255: 10}, {0: 20})
CODING = MaskCoding((0, 1, 2), 0, 255, reason="class ids; 255 is taken as void")
NAMES = ("sky", "road", "cow")


def test_values_are_counted_over_all_masks():
    assert total_counts(MASKS) == {0: 80, 1: 10, 255: 10}
    assert value_table(MASKS) == [(0, 0.8, 2), (1, 0.1, 1), (255, 0.1, 1)]
    assert value_table([]) == []


def test_class_ids_of_a_mask_include_ignored_and_unknown_pixels():
    mask = masks_of({0: 5, 255: 3, 128: 2, 7: 1, 9: 1})[0]
    assert class_ids(mask, MaskCoding((0, 255), 0, 128)) == {0: 5, 1: 3, IGNORED: 2, UNKNOWN: 2}
    assert class_ids(mask, MaskCoding(None, 8)) == {0: 6, 1: 6}


def test_class_shares_are_those_of_the_pixels_that_are_not_ignored():
    assert class_shares(masks_of({0: 6, 255: 2}, {128: 8}), MaskCoding((0, 255), 0, 128), 2) == [0.75, 0.25]
    assert class_shares(MASKS, CODING, 3) == [80 / 90, 10 / 90, 0.0]


def test_class_shares_of_ignored_pixels_only_are_0():
    assert class_shares(masks_of({255: 4}), MaskCoding((0, 1), 0, 255), 2) == [0.0, 0.0]


def test_the_ignored_share_is_that_of_all_pixels():
    assert ignored_share(MASKS, CODING) == pytest.approx(0.1)
    assert ignored_share(masks_of({0: 4}), CODING) == 0
    assert ignored_share([], CODING) == 0


def test_the_table_has_values_name_and_share_of_each_class():
    assert class_table(MASKS, CODING, NAMES) == [
        ClassRow("0", "sky", 80 / 90),
        ClassRow("1", "road", 10 / 90),
        ClassRow("2", "cow", 0.0),
    ]
    colours = MaskCoding((0, COLOUR + 0xFF0000))
    assert [row.values for row in class_table(masks_of({0: 1}), colours, ("a", "b"))] == ["0", "#ff0000"]


def test_a_class_without_a_pixel_is_absent():
    assert absent_classes(MASKS, CODING, NAMES) == ["cow"]
    assert absent_classes(masks_of({0: 1, 1: 1, 2: 1}), CODING, NAMES) == []


def test_the_description_has_shares_ignored_pixels_and_the_reason():
    assert describe_classes(MASKS, CODING, NAMES) == (
        "0 → sky 88.9%, 1 → road 11.1%, 2 → cow 0.0% of pixels; 255 is ignored, 10.0% of all pixels "
        "(class ids; 255 is taken as void)"
    )
    given = MaskCoding(None, 127)
    assert describe_classes(masks_of({0: 3, 255: 1}), given, ("no", "yes")) == "≤ 127 → no 75.0%, > 127 → yes 25.0% of pixels"


def test_the_description_names_eight_classes_at_most():
    text = describe_classes(masks_of({0: 1}), MaskCoding(tuple(range(9))), [f"c{index}" for index in range(9)])
    assert text == "0 → c0 100.0%, " + ", ".join(f"{index} → c{index} 0.0%" for index in range(1, 8)) + ", … of pixels"


def test_merged_values_and_several_ignored_ones_are_described():
    coding = given_coding((0, (1, 2)), (9, (255, 0, 0)))
    masks = masks_of({0: 4, 1: 2, 2: 2, 9: 1, COLOUR + 0xFF0000: 1})
    assert describe_classes(masks, coding, ("no", "yes")) == (
        "0 → no 50.0%, 1, 2 → yes 50.0% of pixels; 9, #ff0000 are ignored, 20.0% of all pixels"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ignores_unknown": True}, "other values are ignored, 20.0% of all pixels"),
        ({"ignores_unknown": True, "ignore_value": 9}, "9 and other values are ignored, 20.0% of all pixels"),
        ({"tolerance": 5}, "other values are ignored, 20.0% of all pixels"),
    ],
)
def test_values_of_no_class_that_count_nowhere_are_described(options, said):
    masks = masks_of({0: 7, 200: 1, 9: 1, 100: 1})
    assert describe_classes(masks, given_coding((0, 200), **options), ("no", "yes")).endswith(f" of pixels; {said}")


@pytest.mark.parametrize(
    ("names", "shares", "is_background"),
    [
        (["background", "cell"], [0.1, 0.9], True),
        (["_background_", "cell", "wall"], [0.1, 0.5, 0.4], True),
        (["Unlabeled", "road", "car"], [0.1, 0.5, 0.4], True),
        (["sky", "road", "car"], [0.8, 0.1, 0.1], False),
        (["class 0", "class 1", "class 2"], [0.2, 0.5, 0.3], False),
        (["class 0", "class 1", "class 2"], [0.6, 0.1, 0.3], True),
    ],
)
def test_class_0_is_the_background_by_its_name_or_where_it_has_none_by_its_share(names, shares, is_background):
    assert has_background(names, shares) is is_background
