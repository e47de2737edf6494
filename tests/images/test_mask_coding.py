"""Which class each mask value becomes, and what the error offers where that cannot be decided."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from unet_trainer.images.image_files import COLOUR, DataError
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, build_coding, show_value

RED, GREEN = COLOUR + 0xFF0000, COLOUR + 0x00FF00


def decide(num_classes, seen, ignore_value=None):
    """`seen`: values, each of 100 pixels, or value → pixels."""
    counts = seen if isinstance(seen, dict) else dict.fromkeys(seen, 100)
    return build_coding("auto", num_classes, ignore_value, counts)


def choices(num_classes, seen, ignore_value=None):
    """The message of the error."""
    with pytest.raises(DataError) as raised:
        decide(num_classes, seen, ignore_value)
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
        (1, None, [0, 128], (0, 128)),  # any two values
        (1, None, [38, 75], (38, 75)),
        (1, None, [0, 4000], (0, 4000)),
        (3, None, [0, 128, 255], (0, 128, 255)),  # as many greys as classes
        (3, None, [1, 2, 3], (1, 2, 3)),
        (1, None, [0, RED], (0, (255, 0, 0))),  # one colour on black
    ],
)
def test_auto_decides_from_the_values_that_occur(num_classes, ignore_value, seen, expected):
    coding = decide(num_classes, seen, ignore_value)
    assert coding.mask_values == expected
    assert coding.ignore_value == ignore_value


@pytest.mark.parametrize(("num_classes", "seen"), [(1, [0, 1, 255]), (11, [*range(11), 255]), (3, [0, 2, 255])])
def test_255_beside_dense_ids_is_taken_as_void_with_the_reason(num_classes, seen):
    coding = decide(num_classes, seen)
    assert coding.mask_values == tuple(range(max(2, num_classes)))
    assert coding.ignore_value == 255
    assert coding.reason == "class ids; 255 is taken as void"
    assert coding.encode(np.array([[255]], np.uint8)).item() == IGNORED


def test_16_bit_object_ids_are_one_foreground():
    coding = decide(1, [0, 1, 2, 7, 300])
    assert coding.mask_values == "nonzero"
    assert coding.encode(np.array([[0, 1, 300, 65535]], np.uint16)).tolist() == [[0, 1, 1, 1]]


def test_a_mask_saved_as_jpeg_is_split_in_the_middle_with_the_reason():
    """The values of a real file: 0 to 45 and 211 to 255."""
    counts = dict.fromkeys(range(46), 40) | {0: 9000} | dict.fromkeys(range(211, 256), 20) | {255: 3000}
    coding = decide(1, counts)
    assert coding.mask_values == "above 127"
    assert coding.reason == "greys around 0 and 255, split at 127"
    assert coding.encode(np.array([[0, 45, 211, 255]], np.uint8)).tolist() == [[0, 0, 1, 1]]


def test_soft_edges_are_split_but_a_class_between_them_is_not():
    soft = dict.fromkeys(range(256), 4) | {0: 9000, 255: 4000}
    assert decide(1, soft).mask_values == "above 127"
    third_class = soft | {128: 5000}
    assert "128: " in choices(1, third_class)


def test_object_ids_in_8_bit_could_be_classes_and_both_choices_are_offered():
    message = choices(1, list(range(30)))
    assert "mask_values: auto cannot tell" in message
    assert "num_classes: 30" in message
    assert "mask_values: nonzero   # any value but 0 is foreground" in message


def test_the_error_shows_the_values_and_config_lines_that_work():
    message = choices(1, {0: 700, 40: 200, 200: 100})
    for part in (
        "0: 70.00% of pixels",
        "40: 20.00% of pixels",
        "200: 10.00% of pixels",
        "num_classes: 3 with mask_values: [0, 40, 200]",
    ):
        assert part in message
    assert "ignore_value: 200, if these pixels should be ignored" in message
    assert decide(3, {0: 700, 40: 200, 200: 100}).mask_values == (0, 40, 200)


def test_the_order_of_colours_is_never_guessed():
    message = choices(3, [0, RED, GREEN])
    assert "#ff0000: 33.33% of pixels" in message
    assert "mask_values: [0, [0, 255, 0], [255, 0, 0]]   # in the order of the classes" in message


def test_of_many_values_twelve_are_listed_and_all_are_counted():
    message = choices(2, list(range(0, 200, 2)))
    assert "… 100 values in all" in message
    assert message.count("of pixels") == 12


@pytest.mark.parametrize(
    ("mask_values", "values", "expected"),
    [
        ((7, 3), [3, 7, 9], [1, 0, UNKNOWN]),
        ((0, 128, 255), [255, 0, 128, 1], [2, 0, 1, UNKNOWN]),
        (((0, 0, 0), (255, 0, 0), (0, 255, 0)), [0, RED, GREEN, 255], [0, 1, 2, UNKNOWN]),
        (((255, 255, 255), (255, 0, 0)), [255, RED], [0, 1]),  # a grey colour is its brightness
        ("nonzero", [0, 1, 255], [0, 1, 1]),
        ("above 100", [0, 100, 101, 255], [0, 0, 1, 1]),
    ],
)
def test_given_values_are_used_as_they_are(mask_values, values, expected):
    coding = build_coding(mask_values, 1, None, {})
    assert coding.encode(np.array(values, np.int32)).tolist() == expected
    if max(values) < 256:
        assert coding.encode(np.array(values, np.uint8)).tolist() == expected


def test_ignored_values_are_ignored_in_every_kind_of_coding():
    for mask_values in ((2, 1), "nonzero", "above 0"):  # a trimap: 1 inside, 2 outside, 3 border
        coding = build_coding(mask_values, 1, 3, {})
        assert coding.encode(np.array([[1, 3]], np.uint8)).tolist() == [[1, IGNORED]]
        assert coding.encode(np.array([[1, 3]], np.uint16)).tolist() == [[1, IGNORED]]


def test_a_coding_can_be_pickled():
    coding = pickle.loads(pickle.dumps(MaskCoding((0, 255), 0, 9)))
    assert coding == MaskCoding((0, 255), 0, 9)
    assert coding.lookup[[0, 255, 9, 8]].tolist() == [0, 1, IGNORED, UNKNOWN]


def test_the_values_written_to_config_yaml_give_the_same_coding():
    for coding in (MaskCoding((0, RED)), MaskCoding(None, 0), MaskCoding(None, 127), MaskCoding((3, 1, 2))):
        again = build_coding(coding.mask_values, 3, None, {})
        assert (again.values, again.threshold) == (coding.values, coding.threshold)


def test_a_coding_goes_through_a_checkpoint():
    for coding in (MaskCoding((0, 255), 0, 9), MaskCoding(None, 127, None)):
        content = json.loads(json.dumps(coding.to_dict()))
        assert content == {
            "values": None if coding.values is None else [0, 255],
            "threshold": coding.threshold,
            "ignore_value": coding.ignore_value,
        }
        assert MaskCoding.from_dict(content) == coding


def test_values_are_shown_as_users_write_them():
    assert show_value(255) == "255"
    assert show_value(RED) == "#ff0000"
    assert [MaskCoding((0, RED)).describe(index) for index in (0, 1)] == ["0", "#ff0000"]
    assert [MaskCoding(None, 0).describe(index) for index in (0, 1)] == ["0", "not 0"]
    assert [MaskCoding(None, 127).describe(index) for index in (0, 1)] == ["≤ 127", "> 127"]
