"""The parsers: their messages, and the Python objects that they take. What each key accepts is in test_load."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from unet_trainer.config import parsers as p
from unet_trainer.config.safe_yaml import Plain


def need(parser, raw):
    """The part of the message that follows "got X; "."""
    with pytest.raises(ValueError) as raised:
        parser(raw)
    return str(raised.value)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"above": 0}, "need a positive number, e.g. 1"),
        ({"minimum": 0}, "need a number at least 0, e.g. 1"),
        ({"above": 0, "below": 1}, "need a number above 0 and below 1, e.g. 1"),
        ({"minimum": 0, "maximum": 0.5}, "need a number at least 0 and at most 0.5, e.g. 1"),
        ({}, "need a number, e.g. 1"),
    ],
)
def test_number_names_its_bounds(bounds, words):
    assert need(p.number(**bounds, example="1"), "many") == words


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"above": 0}, "1e-300", "0"),
        ({"minimum": 0}, "0", "-1e-300"),
        ({"below": 1}, "0.999999", "1"),
        ({"maximum": 1}, "1", "1.000001"),
    ],
)
def test_number_keeps_to_its_bounds(bounds, inside, outside):
    parser = p.number(**bounds, example="1")
    assert parser(Plain(inside)) == float(inside)
    assert need(parser, Plain(outside)).startswith("need a")


@pytest.mark.parametrize(
    "raw", [".inf", ".nan", "1e999", math.inf, math.nan, pytest.param(10**400, id="huge"), Fraction(10**400), None, [1], 1j, True]
)
def test_value_that_is_not_a_finite_number_is_refused(raw):
    assert need(p.number(example="1"), raw) == "need a number, e.g. 1"


@pytest.mark.parametrize("raw", ["8", "8.0", "0.8e1", 8, 8.0, np.int64(8), np.uint8(8), np.float32(8), np.float64(8), np.array(8)])
def test_whole_numbers_of_many_types_become_int(raw):
    value = p.integer(minimum=1, example="8")(raw)
    assert value == 8
    assert type(value) is int


@pytest.mark.parametrize(
    "raw", ["8.5", "eight", 8.5, True, np.True_, None, math.inf, math.nan, np.array([8]), "1e300", pytest.param(10**400, id="huge")]
)
def test_what_is_not_a_whole_number_is_refused(raw):
    assert need(p.integer(minimum=1, example="8"), raw) == "need a whole number of at least 1, e.g. 8"


def test_integer_with_a_maximum_names_both_ends():
    parser = p.integer(minimum=0, maximum=255, example="0")
    assert (parser("0"), parser("255")) == (0, 255)
    assert need(parser, "256") == "need a whole number from 0 to 255, e.g. 0"


@pytest.mark.parametrize(("raw", "value"), [("yes", True), ("ON", True), ("off", False), (False, False), (np.True_, True)])
def test_flag_becomes_bool(raw, value):
    assert p.flag(raw) is value


@pytest.mark.parametrize("raw", [1, 0, "1", "maybe", "", None, 1.0, np.int64(1)])
def test_flag_is_not_a_number(raw):
    assert need(p.flag, raw) == "need true or false"


def test_text_takes_paths_and_nothing_empty_or_unwritable():
    parser = p.text("data/mine")
    assert parser(Path("data") / "mine") == "data/mine"
    for raw in ("", "  ", "a\0b", "a\ud800", None, 3, b"data"):
        assert need(parser, raw) == "need text, e.g. data/mine"


def test_pattern_is_a_regular_expression_and_says_where_it_is_not():
    assert p.pattern(r"(patient\d+)_") == r"(patient\d+)_"
    assert type(p.pattern(Plain("a+"))) is str
    words = r"need a regular expression, e.g. '(patient\d+)_'"
    for raw in ("", None, 3, "a\0b", ["a"]):
        assert need(p.pattern, raw) == words
    assert need(p.pattern, "*a") == f"{words} (nothing to repeat at position 0)"
    assert need(p.pattern, "[a") == f"{words} (unterminated character set at position 0)"
    assert need(p.pattern, "a{99999999999999999999}").startswith(words)  # more than the engine can count


def test_plain_text_becomes_str():
    assert type(p.text()(Plain("no"))) is str
    assert type(p.word_or_empty(Plain(""))) is str
    assert type(p.choice("auto")(Plain("auto"))) is str


def test_choice_names_its_options_and_the_nearest():
    parser = p.choice("bfloat16", "float16", other_spellings={"half": "float16"})
    assert need(parser, "float32") == "need one of bfloat16, float16; did you mean float16?"
    assert need(parser, "HALF") == "need one of bfloat16, float16; did you mean float16?"
    assert need(parser, "int8") == "need one of bfloat16, float16"
    assert need(parser, 16) == "need one of bfloat16, float16"


def test_optional_takes_null_and_says_so():
    parser = p.optional(p.integer(minimum=1, example="20"))
    assert [parser(raw) for raw in (None, Plain("null"), Plain("~"), Plain(""), Plain("NULL"))] == [None] * 5
    assert need(parser, "0") == "need a whole number of at least 1, e.g. 20, or null"


def test_quoted_null_is_text():
    assert p.optional(p.text())("null") == "null"


def test_either_names_both_options():
    parser = p.either(p.choice("auto"), p.integer(minimum=0, maximum=512, example="4"))
    assert (parser("auto"), parser("4")) == ("auto", 4)
    assert need(parser, "many") == "need auto, or a whole number from 0 to 512, e.g. 4"
    assert need(parser, "atuo") == "need auto; did you mean auto?"


@pytest.mark.parametrize("raw", ["auto", "AUTO", " auto ", Plain("Auto")])
def test_auto_is_taken_however_it_is_spelled(raw):
    value = p.auto_or(p.integer(minimum=1, example="8"))(raw)
    assert value == "auto"
    assert type(value) is str


def test_auto_or_another_value_names_both():
    parse = p.auto_or(p.number(above=0, example="1e-3"))
    assert parse("0.5") == 0.5
    assert need(parse, "fast") == "need a positive number, e.g. 1e-3, or auto"
    assert need(parse, None) == "need a positive number, e.g. 1e-3, or auto"
    assert need(p.optional(parse), 0) == "need a positive number, e.g. 1e-3, or auto, or null"
    assert p.optional(parse)(None) is None


def test_a_suggestion_stays_the_end_of_the_answer():
    assert need(p.auto_or(p.choice("dice", "focal")), "dcie") == "need one of dice, focal; did you mean dice?"


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [
        ("90s", 90.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("0.5s", 0.5),
        (" 1H30M ", 5400.0),
        (Plain("20s"), 20.0),
        ("10m10m", 1200.0),
    ],
)
def test_a_duration_is_kept_as_text_that_has_so_many_seconds(raw, seconds):
    text = p.duration(raw)
    assert text == raw.strip().lower()
    assert type(text) is str
    assert p.seconds_of(text) == seconds
    assert p.duration(text) == text


@pytest.mark.parametrize(("text", "twice"), [("10m", "20m"), ("1h30m", "180m"), ("20s", "1m"), ("31s", "2m"), ("2d", "5760m")])
def test_twice_a_duration_is_one_in_whole_minutes(text, twice):
    assert p.doubled(text) == twice
    assert p.duration(twice) == twice


@pytest.mark.parametrize(
    "raw",
    [
        *("", "10", 600, 1.5, None, True, "m", "10 m", "10min", "1h 30m", "1h30", "-1h", "1e3s", ".5h", "0s", "0h0m", "12000d"),
        *("1:30", "9" * 400 + "s", ["10m"]),
    ],
)
def test_a_time_without_its_unit_or_of_no_length_is_refused(raw):
    assert need(p.duration, raw) == "need a time with its unit, e.g. 10m, 2h or 1h30m"


@pytest.mark.parametrize(("raw", "value"), [(1, 1), ("4", 4), (4.0, 4), (0.25, 0.25), ("0.3", 1 / 3), (0.9, 1), (1e-3, 1e-3)])
def test_repeats_are_whole_or_one_part_of_so_many(raw, value):
    found = p.repeats(raw)
    assert found == value
    assert p.repeats(found) == found


@pytest.mark.parametrize("raw", [0, -1, "many", None, True, 100_001, 1e-320])
def test_repeats_are_more_than_none_and_not_without_end(raw):
    assert need(p.repeats, raw) == "need a number at least 1e-05 and at most 100000, e.g. 4 or 0.25"


@pytest.mark.parametrize("raw", [1.5, "2.25"])
def test_repeats_above_one_are_whole(raw):
    assert need(p.repeats, raw) == "need a whole number, or a share below 1, e.g. 4 or 0.25"


def test_listing_is_a_tuple_and_names_the_wrong_item():
    parser = p.listing(p.integer(minimum=32, example="512"), example="[512, 768]", minimum=2, maximum=2)
    assert parser(["64", 96]) == (64, 96)
    assert parser(np.array([64, 96])) == (64, 96)
    assert need(parser, "64") == "need a list, e.g. [512, 768]"
    assert need(parser, {"a": 1}) == "need a list, e.g. [512, 768]"
    assert need(parser, [64]) == "need a list of 2 values, e.g. [512, 768]"
    assert need(parser, [64, "x"]) == "need a list, e.g. [512, 768]; in it: need a whole number of at least 32, e.g. 512"


def test_weighted_terms_are_always_a_dict():
    parser = p.weighted_terms(["dice", "bce"])
    assert parser(Plain("dice")) == {"dice": 1.0}
    assert parser({"dice": Plain("1"), "bce": 0.5}) == {"dice": 1.0, "bce": 0.5}
    assert need(parser, {}) == "need a loss or a weighted sum, e.g. {dice: 1, bce: 1}"
    assert need(parser, {"dcie": 1}) == "need one of dice, bce; did you mean dice?"
    assert need(parser, {"dice": 0}) == "need a positive number, e.g. 1"


def test_transforms_are_names_with_plain_parameters():
    raw = [
        Plain("HorizontalFlip"),
        {"Affine": {"rotate": (Plain("-15"), np.float32(15)), "p": np.float64(0.5)}},
        {"Transpose": None},
    ]
    parsed = p.transform_list(raw)
    assert parsed == ("HorizontalFlip", {"Affine": {"rotate": [-15, 15.0], "p": 0.5}}, {"Transpose": None})
    assert type(parsed[1]["Affine"]["p"]) is float


@pytest.mark.parametrize("raw", ["HorizontalFlip", [3], [["HorizontalFlip"]], [{}], [{"A": {}, "B": {}}], [{"Affine": 15}], None])
def test_value_that_is_not_a_list_of_transforms_is_refused(raw):
    assert need(p.transform_list, raw) == "need a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}]"


def test_transform_parameter_that_cannot_be_written_to_yaml_is_refused():
    words = "need numbers, text, true, false or null as parameters of a transform, or lists of them"
    assert need(p.transform_list, [{"Affine": {"rotate": object()}}]) == words
    assert need(p.transform_list, [{"Affine": {"rotate": [np.zeros(2)]}}]) == words


def test_near_miss_is_the_most_similar_name():
    assert p.near_miss("Batchsize", ["batch_size", "image_size"]) == "batch_size"
    assert p.near_miss("resnet35", ["resnet50", "resnet34", "resnet18"]) == "resnet34"
    assert p.near_miss("zzz", ["batch_size", "image_size"]) is None
