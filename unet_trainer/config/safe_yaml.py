"""Reads untrusted YAML text into plain values, and writes values as YAML that reads back as the same.

Scalars keep the text the user typed (`Plain`), because only the key decides whether `no` is text or a boolean and that
`1e-3` is a number. Tags, anchors, several documents, duplicate keys, deep nesting and long texts are refused.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12
MAX_DIGITS = 300  # Python itself refuses to convert integers of several thousand digits
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
NULLS = frozenset(["", "~", "null"])
BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
TOO_LONG = f"more than {MAX_BYTES // 1024} KiB; a config is far smaller"


class YamlError(ValueError):
    """The text is not YAML that we accept; the message says why and where."""


class Plain(str):
    """A scalar written without quotes: its type is decided by the key it belongs to."""


def parse_yaml(text: str) -> Any:
    """One YAML document as None, Plain, str, list and dict; raises YamlError."""
    if len(text) > MAX_BYTES:
        raise YamlError(TOO_LONG)
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        next(events)  # the start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            return None
        value = _value(events, next(events))
        next(events)  # the end of the document
        if isinstance(event := next(events), yaml.DocumentStartEvent):
            raise _refusal(event, "a second document (---); need one")
        return value
    except yaml.YAMLError as error:
        raise YamlError(_explain(error)) from None
    except (ValueError, OverflowError) as error:  # PyYAML does not check "\UFFFFFFFF" and %YAML 999...
        if isinstance(error, YamlError):
            raise
        raise YamlError("not valid YAML: a number in an escape or a directive is out of range") from None


def _explain(error: yaml.YAMLError) -> str:
    problem, context = getattr(error, "problem", None) or str(error).splitlines()[0], getattr(error, "context", None)
    # What is not closed, or lacks a space after its colon, is seen in a later line.
    is_begun = context is not None and ("simple key" in context or "flow" in context)
    mark = getattr(error, "context_mark" if is_begun else "problem_mark", None)
    tab = "; use spaces in place of tabs" if r"'\t'" in problem else ""
    todo = "; is a space missing behind a colon?" if "expected ':'" in problem else tab
    return f"{f'line {mark.line + 1}: ' if mark else ''}not valid YAML: {_cut(problem, 200)}{todo}"


def _value(events: Iterator[Any], event: Any, depth: int = 0) -> Any:
    """What begins with an event, read to its end."""
    if depth > MAX_DEPTH:
        raise _refusal(event, f"nested deeper than {MAX_DEPTH} levels")
    if event.anchor is not None:
        raise _refusal(event, f"anchors and aliases ({shorten(event.anchor)}) are not allowed, write the value")
    if event.tag is not None:
        raise _refusal(event, f"tag {shorten(event.tag)}; tags are not allowed, write the plain value")
    if isinstance(event, yaml.ScalarEvent):
        return Plain(event.value) if event.style is None else event.value
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_value(events, event, depth + 1))
        return items
    found: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(events, event, depth + 1)
        if not isinstance(key, str):
            raise _refusal(event, "a key must be a word")
        if key in found:
            raise _refusal(event, f"{shorten(key)} is given twice; keep one")
        found[str(key)] = _value(events, next(events), depth + 1)
    return found


def _refusal(event: Any, problem: str) -> YamlError:
    return YamlError(f"line {event.start_mark.line + 1}: {problem}")


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested lists and dicts with what the function makes of all else in them. Tuples become lists."""
    if isinstance(value, list | tuple):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, dict):
        return {str(key): map_leaves(function, item) for key, item in value.items()}
    return function(value)


def interpret(value: Any) -> Any:
    """A scalar whose key fixes no type: numbers, true/false and null are recognised, the rest is text."""
    if not isinstance(value, Plain):
        return value
    if value.lower() in NULLS:
        return None
    number = parse_number(value)
    return {"true": True, "false": False}.get(value.lower(), str(value)) if number is None else number


def parse_number(text: str) -> int | float | None:
    """`12`, `1e-3`, `.5`; None if the text is not a number."""
    text = text.strip().lower()
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text):
        return None
    return float(text) if set(".e") & set(text) else int(text)


def shorten(value: object) -> str:
    """The repr of a value for a message, cut to 60 characters, on one line."""
    try:
        text = repr(str(value) if isinstance(value, Plain) else value)
    except ValueError:  # Python does not print integers of several thousand digits
        text = "a number of thousands of digits"
    return _cut(text.replace("\n", " "), 60)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read back as something else: our numbers are not PyYAML's, and it loses a \\x85."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if not text.isprintable() else "'" if interpret(Plain(text)) != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def value_text(value: Any) -> str:
    """A plain value in YAML, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
