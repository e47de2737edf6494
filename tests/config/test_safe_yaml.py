"""Untrusted YAML: scalars keep their text, what is dangerous or ambiguous is refused with its line."""

from __future__ import annotations

import math

import pytest

from unet_trainer.config.safe_yaml import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    Plain,
    YamlError,
    parse_number,
    parse_yaml,
    shorten,
)

# Nine levels of nine: 9**9 = 387,420,489 values, were it expanded.
ALIAS_BOMB = """\
a: &a ["lol","lol","lol","lol","lol","lol","lol","lol","lol"]
b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]
c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]
d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]
e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]
f: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]
g: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]
h: &h [*g,*g,*g,*g,*g,*g,*g,*g,*g]
i: &i [*h,*h,*h,*h,*h,*h,*h,*h,*h]
"""


def refusal(text):
    """The message that a text is refused with."""
    with pytest.raises(YamlError) as raised:
        parse_yaml(text)
    return str(raised.value)


@pytest.mark.parametrize(
    "written", ["1e-3", "no", "on", "007", "0x1f", "1_000", "12:30:45", "2001-01-01", "null", "~", ".inf", "<<"]
)
def test_unquoted_scalar_keeps_the_text_that_was_typed(written):
    value = parse_yaml(f"key: {written}")["key"]
    assert value == written
    assert isinstance(value, Plain)


def test_alias_repeats_the_value_of_its_anchor():
    assert parse_yaml("a: &size [64, 96]\nb: *size\n") == {"a": ["64", "96"], "b": ["64", "96"]}


@pytest.mark.parametrize(
    ("text", "line", "tag"),
    [
        ("a: 1\nb: !!python/object/apply:os.system ['true']", 2, "python/object/apply:os.system"),
        ("a: !!python/object:os.path {}", 1, "python/object:os.path"),
        ("a: !!python/name:os.system", 1, "python/name:os.system"),
        ("a: !!int 3", 1, "int"),
        ("a: !mine x", 1, "!mine"),
        ("!!map {a: 1}", 1, "map"),
        ("!!str a: 1", 1, "str"),
    ],
)
def test_every_tag_is_refused_with_its_line(text, line, tag):
    message = refusal(text)
    assert message.startswith(f"line {line}: tag '")
    assert message.endswith(f"{tag}'; tags are not allowed, write the plain value")


def test_duplicates_are_collected_where_the_caller_asks_for_them():
    duplicates = []
    parse_yaml("a: 1\na: 2\nb: 3\nb: 4\n", duplicates)
    assert duplicates == ["line 2: 'a' is given twice; keep one", "line 4: 'b' is given twice; keep one"]


def test_alias_bomb_is_refused_before_it_is_expanded():
    # a holds 10 values, b 91, c 820; d would bring the sum past 5,000.
    assert refusal(ALIAS_BOMB) == f"line 4: more than {MAX_NODES} values (aliases counted in full)"


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5_000, "- " * 100_000, "? " * 100_000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting_is_refused_without_a_recursion_error(text):
    assert refusal(text) == f"line 1: nested deeper than {MAX_DEPTH} levels"


def test_aliases_cannot_exceed_the_depth():
    stacked = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 30))
    # a10 is 11 high and stands at depth 2 inside a11: its x would be at depth 13.
    assert refusal(stacked) == f"line 12: nested deeper than {MAX_DEPTH} levels"


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a {x: *a}"])
def test_alias_inside_its_own_anchor_is_refused(text):
    assert refusal(text) == "line 1: alias 'a' has no anchor before it"


def test_key_that_is_a_list_is_refused():
    assert refusal("a: 1\n? [b, c]\n: d\n") == "line 2: a key must be a word"


def test_text_above_the_size_limit_is_refused_and_text_at_it_is_read():
    assert parse_yaml("a: 1 #" + "x" * (MAX_BYTES - 6)) == {"a": "1"}
    assert refusal("a: 1 #" + "x" * (MAX_BYTES - 5)) == "more than 256 KiB; a config is far smaller"


@pytest.mark.parametrize("character", ["\0", "\x07", "\x1b", "\x7f", "\ufffe", "\ud800"])
def test_control_characters_are_refused(character):
    message = refusal(f"a: x{character}y")
    assert message == f"not valid YAML: unacceptable character #x{ord(character):04x}: special characters are not allowed"


@pytest.mark.parametrize("text", [r'a: "\UFFFFFFFF"', r'a: "\U00110000"', "%YAML 1." + "9" * 5000 + "\n---\na: 1"])
def test_number_out_of_range_in_an_escape_or_directive_is_refused(text):
    assert refusal(text) == "not valid YAML: a number in an escape or a directive is out of range"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("+4", 4),
        ("007", 7),
        (" 12 ", 12),
        ("1e-3", 0.001),
        ("3E5", 300_000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e+2", -150.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
def test_numbers_are_recognised(written, value):
    number = parse_number(written)
    assert number == value
    assert type(number) is type(value)


def test_value_in_a_message_is_short_and_on_one_line():
    assert shorten(Plain("a\nb")) == r"'a\nb'"
    assert shorten("x" * 100) == "'" + "x" * 58 + "…"
    assert shorten(10**5_000) == "a number of thousands of digits"
