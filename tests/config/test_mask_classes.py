"""mask_values and ignore_value: how values, colours and several of them that are one class are written and read back."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.dump import as_dict, to_yaml
from unet_trainer.config.load import load_config
from unet_trainer.config.mask_classes import as_grey, implied_num_classes, parse_mask_class, parse_mask_values, split_values
from unet_trainer.config.safe_yaml import Plain, parse_yaml
from unet_trainer.config.schema import Config

VIOLET, PURPLE = (64, 0, 128), (64, 0, 192)


def need(parser, raw):
    """The part of the message that follows "got X; "."""
    with pytest.raises(ValueError) as raised:
        parser(raw)
    return str(raised.value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("auto", "auto"),
        (" nonzero ", "nonzero"),
        ("above 127", "above 127"),
        ("above  0", "above 0"),
        ("above 127.0", "above 127"),
        ("above 1e2", "above 100"),
        ("above 65534", "above 65534"),
        ([0, "255"], (0, 255)),
        ((np.uint8(0), np.uint8(255)), (0, 255)),
        ([[0, 0, 0], ["255", 0, 0]], ((0, 0, 0), (255, 0, 0))),
        ([0, [1, 2], [[64, 0, 128], [64, 0, 192]]], (0, (1, 2), (VIOLET, PURPLE))),
        (np.array([[0, 0, 0], [64, 0, 128]]), ((0, 0, 0), VIOLET)),
    ],
)
def test_mask_values_are_a_rule_or_what_becomes_each_class(raw, value):
    assert parse_mask_values(raw) == value


@pytest.mark.parametrize("raw", ["", "above", "above x", "above 1.5", "above -1", "above 65535", "below 3", "above .nan"])
def test_text_that_is_not_a_rule_for_masks_is_refused(raw):
    assert need(parse_mask_values, raw) == "need auto, nonzero, above 127, or a list such as [0, 255] or [[0, 0, 0], [255, 0, 0]]"


@pytest.mark.parametrize("raw", [[0], [0, 65536], [0, []], [0, [1, 2, 256]], [0, [[1, 2], 3]], [0, [[[1]]]], [0, None], 3, None])
def test_list_that_is_not_one_of_mask_values_is_refused(raw):
    assert need(parse_mask_values, raw).startswith("need a list")


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (5, [5]),
        ([5], [5]),
        ([1, 2], [1, 2]),
        ([64, 0, 128], [VIOLET]),  # three numbers always are a colour
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1], [2]], [1, 2]),
        ([[1], [2], [3]], [1, 2, 3]),  # three values that are one class
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([300, 301], [300, 301]),
        ([[64, 0, 128]], [VIOLET]),
        ([[64, 0, 128], [64, 0, 192]], [VIOLET, PURPLE]),
        ([7, [64, 0, 128]], [7, VIOLET]),
        ([7, [8], [64, 0, 128]], [7, 8, VIOLET]),
    ],
)
def test_each_way_to_write_a_class_reads_as_these_values_and_reads_back_the_same(written, values):
    parsed = parse_mask_class(written)
    assert list(split_values(parsed)) == values
    config = load_config({"mask_values": [0, written], "ignore_value": 9})
    again = load_config(parse_yaml(to_yaml(config, "written by a test")))
    assert again == config
    assert list(split_values(again.mask_values[1])) == values
    assert as_dict(again) == as_dict(config)


def test_three_numbers_that_are_no_colour_are_refused_with_the_way_to_write_three_values():
    answer = (
        "a list of three numbers is a colour, each from 0 to 255, and [300, 301, 302] is none; three values that are one class are "
        "[[300], [301], [302]]"
    )
    assert need(parse_mask_class, [300, 301, 302]) == answer
    assert need(parse_mask_values, [0, [Plain("300"), Plain("301"), Plain("302")]]).endswith(answer)
    assert list(split_values(parse_mask_class([[300], [301], [302]]))) == [300, 301, 302]


@pytest.mark.parametrize(
    ("raw", "parsed"),
    [(255, 255), ([10, 11], (10, 11)), ([255, 0, 0], (255, 0, 0)), ([[224, 224, 192], 255], ((224, 224, 192), 255)), (None, None)],
)
def test_ignore_value_is_a_value_a_colour_or_several(raw, parsed):
    assert load_config({"ignore_value": raw}).ignore_value == parsed


def test_several_ignored_values_can_be_given_on_the_command_line():
    config = load_config({}, ["ignore_value=[10, 11]", "mask_values=[0, [1, 2]]", "unknown_values=ignore"])
    assert (config.ignore_value, config.mask_values, config.unknown_values) == ((10, 11), (0, (1, 2)), "ignore")


def test_grey_colours_are_values():
    assert as_grey((7, 7, 7)) == as_grey(7) == 7
    assert as_grey((7, 7, 8)) == (7, 7, 8)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({}, None),
        ({"class_weights": "auto"}, None),
        ({"class_names": ["road"]}, 1),
        ({"class_names": ["sky", "road", "pole"]}, 3),
        ({"class_weights": [1, 2]}, 2),
        ({"mask_values": "nonzero"}, 1),
        ({"mask_values": "above 9"}, 1),
        ({"mask_values": [0, [1, 2]]}, 1),
        ({"mask_values": [0, 1, 2]}, 3),
        ({"mask_values": [0, 1], "class_names": ["field", "road"]}, 2),
    ],
)
def test_other_settings_tell_the_number_of_classes(settings, number):
    config = load_config(settings)
    assert config == Config(**{name: getattr(config, name) for name in settings})
    assert implied_num_classes(config.class_names, config.class_weights, config.mask_values) == number
