"""Untrusted YAML: scalars keep their text, what is dangerous or ambiguous is refused with its line."""

import pytest

from unet_trainer.config.safe_yaml import MAX_BYTES, MAX_DEPTH, YamlError, parse_yaml


def refusal(text):
    """The message that a text is refused with."""
    with pytest.raises(YamlError) as raised:
        parse_yaml(text)
    return str(raised.value)


@pytest.mark.parametrize(("text", "line", "tag"), [
    ("a: 1\nb: !!python/object/apply:os.system ['true']", 2, "python/object/apply:os.system"),
    ("a: !mine x", 1, "!mine"),
    ("!!map {a: 1}", 1, "map"),
    ("!!str a: 1", 1, "str"),
])  # fmt: skip
def test_every_tag_is_refused_with_its_line(text, line, tag):
    message = refusal(text)
    assert message.startswith(f"line {line}: tag '")
    assert message.endswith(f"{tag}'; tags are not allowed, write the plain value")


DEEP = ["[" * 100_000, "{a: " * 5_000, "- " * 100_000, "? " * 100_000, "[" * 100_000 + "]" * 100_000]
ALIASES = ["a: &a [*a]", "a: &a 1\nb: *a", "&a {x: 1}", "a: *a"]
OUT_OF_RANGE = [r'a: "\UFFFFFFFF"', r'a: "\U00110000"', "%YAML 1." + "9" * 5000 + "\n---\na: 1"]
REFUSED = [
    *((text, f"line 1: nested deeper than {MAX_DEPTH} levels") for text in DEEP),
    *((text, "line 1: anchors and aliases ('a') are not allowed, write the value") for text in ALIASES),
    *((text, "not valid YAML: a number in an escape or a directive is out of range") for text in OUT_OF_RANGE),
    *((f"a: x{chr(code)}y", f"not valid YAML: unacceptable character #x{code:04x}: special characters are not allowed")
      for code in (0, 7, 0x1B, 0x7F, 0xFFFE, 0xD800)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_dangerous_or_no_yaml_is_refused(text, message):
    assert refusal(text) == message


def test_text_above_the_size_limit_is_refused_and_text_at_it_is_read():
    assert parse_yaml("a: 1 #" + "x" * (MAX_BYTES - 6)) == {"a": "1"}
    assert refusal("a: 1 #" + "x" * (MAX_BYTES - 5)) == "more than 256 KiB; a config is far smaller"
