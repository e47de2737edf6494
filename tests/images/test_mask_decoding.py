"""Which class each mask value becomes, and how a coding is written into configs and checkpoints."""

import json

import numpy as np
import pytest

from unet_trainer.images.mask_decoding import COLOUR, IGNORED, UNKNOWN, MaskCoding, given_coding

RED, GREEN = COLOUR + 0xFF0000, COLOUR + 0x00FF00
VIOLET, PURPLE = COLOUR + 0x400080, COLOUR + 0x4000C0


@pytest.mark.parametrize(
    ("mask_values", "values", "expected"),
    [
        ((0, 128, 255), [255, 0, 128, 1], [2, 0, 1, UNKNOWN]),
        (((0, 0, 0), (255, 0, 0), (0, 255, 0)), [0, RED, GREEN, 255], [0, 1, 2, UNKNOWN]),
        (((255, 255, 255), (255, 0, 0)), [255, RED], [0, 1]),  # a grey colour is its brightness
        ("nonzero", [0, RED, 7], [0, 1, 1]),
        ("above 100", [0, 100, 101, 255], [0, 0, 1, 1]),
        ((0, (1, 2), ((64, 0, 128), (64, 0, 192))), [0, 1, 3, VIOLET, PURPLE, RED], [0, 1, UNKNOWN, 2, 2, UNKNOWN]),
        (((1, 4), ((0,), (2,), (3,))), [0, 1, 2, 3, 4, 5], [1, 0, 1, 1, 0, UNKNOWN]),
        (((300, 2), 301), [2, 300, 301, 302], [0, 0, 1, UNKNOWN]),
    ],
)
def test_given_values_are_used_as_they_are(mask_values, values, expected):
    coding = given_coding(mask_values)
    assert coding.encode(np.array(values, np.int32)).tolist() == expected
    if max(values) < 256:
        assert coding.encode(np.array(values, np.uint8)).tolist() == expected


def test_several_values_and_colours_may_be_ignored():
    for mask_values in ((0, 1), "nonzero"):
        coding = given_coding(mask_values, (10, (255, 0, 0), 11))
        assert coding.ignored == (10, RED, 11)
        assert coding.encode(np.array([0, 1, 10, 11, RED], np.int32)).tolist() == [0, 1, IGNORED, IGNORED, IGNORED]
        assert coding.encode(np.array([[0, 1, 10, 11]], np.uint8)).tolist() == [[0, 1, IGNORED, IGNORED]]
        assert coding.written_ignore_value == (10, (255, 0, 0), 11)
    assert given_coding((0, 1), (255, 0, 0)).ignore_value == RED
    assert given_coding((0, 1)).ignored == ()


def test_with_a_tolerance_values_close_to_those_of_a_class_are_of_it_and_others_count_nowhere():
    coding = given_coding((0, (255, 0, 0), 128), ignore_value=200, tolerance=10)
    near_red, far_red = COLOUR + 0xF50A0A, COLOUR + 0xF40000  # 10 and 11 away in a channel
    values = [0, 10, 11, near_red, far_red, COLOUR + 0x0A0009, 118, 138, 139, 190, 210, 300]
    expected = [0, 0, IGNORED, 1, IGNORED, 0, 2, 2, IGNORED, IGNORED, IGNORED, IGNORED]
    assert coding.encode(np.array(values, np.int32)).tolist() == expected
    of_8_bit = coding.encode(np.array([[0, 10, 11, 118, 139, 205]], np.uint8))
    assert of_8_bit.tolist() == [[0, 0, IGNORED, 2, IGNORED, IGNORED]]


CODINGS = [
    MaskCoding((0, RED)),
    MaskCoding(None, 0),
    MaskCoding(None, 127, (9, RED)),
    MaskCoding((3, 1, 2), 0, 9),
    MaskCoding((0, 1, VIOLET), 0, (255, GREEN), ((), (2, 7), (PURPLE,)), ignores_unknown=True),
    MaskCoding((0, 1), 0, None, ((), (2, 3))),
    MaskCoding((0, RED), tolerance=40),
]


@pytest.mark.parametrize("coding", CODINGS)
def test_a_coding_goes_through_a_checkpoint(coding):
    again = MaskCoding.from_dict(json.loads(json.dumps(coding.to_dict())))
    assert again == coding
    assert np.array_equal(again.lookup, coding.lookup)
