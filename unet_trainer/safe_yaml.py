"""Reads YAML text into plain values without trusting it.

Scalars keep the text the user typed (`Plain`), because only the key a value belongs to knows whether `no` is a word or a
switch and that `1e-3` is a number. Tags, several documents, duplicate keys, and anything past the bounds below are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12
MAX_NODES = 5_000  # counted after aliases are expanded, so an alias bomb runs into it
MAX_DIGITS = 300  # Python itself refuses to convert integers of several thousand digits

INTEGER = re.compile(r"[-+]?[0-9]+", re.ASCII)
FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
SPECIAL_FLOATS = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
NULLS = frozenset(["", "~", "null"])
BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


class YamlError(ValueError):
    """The text is not YAML that we accept; the message says why and where."""


class Plain(str):
    """A scalar written without quotes: its type is decided by the key it belongs to."""


class _Composer:
    """Builds values from parser events, so that nothing recurses or multiplies beyond the bounds."""

    def __init__(self, text: str, duplicates: list[str] | None) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.duplicates = duplicates
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.num_nodes = 0

    def document(self) -> Any:
        """The value of the only document; None for an empty text."""
        value: Any = None
        num_documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise YamlError(f"{_place(event)}: a second document (---); need one")
            elif isinstance(event, yaml.NodeEvent):
                value = self.node(event, depth=0)
        return value

    def node(self, event: yaml.Event, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag is not None:
            raise YamlError(f"{_place(event)}: tag {shorten(event.tag)}; tags are not allowed, write the plain value")
        if depth > MAX_DEPTH:
            raise YamlError(f"{_place(event)}: nested deeper than {MAX_DEPTH} levels")
        nodes_before = self.num_nodes
        self.count(1, event)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = Plain(event.value) if event.style is None else str(event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(depth)
        else:
            value = self.mapping(depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.num_nodes - nodes_before)
        return value

    def sequence(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return items

    def mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key, str):
                raise YamlError(f"{_place(event)}: a key must be a word")
            if str(key) in items:
                problem = f"{_place(event)}: {shorten(key)} is given twice; keep one"
                if self.duplicates is None:
                    raise YamlError(problem)
                self.duplicates.append(problem)
            items[str(key)] = self.node(next(self.events), depth + 1)
        return items

    def alias(self, event: yaml.AliasEvent, depth: int) -> Any:
        if event.anchor not in self.anchors:  # also an alias inside its own anchor
            raise YamlError(f"{_place(event)}: alias {shorten(event.anchor)} has no anchor before it")
        value, size = self.anchors[event.anchor]
        self.count(size, event)
        if depth + _height(value) > MAX_DEPTH:
            raise YamlError(f"{_place(event)}: nested deeper than {MAX_DEPTH} levels")
        return value

    def count(self, num_nodes: int, event: yaml.Event) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise YamlError(f"{_place(event)}: more than {MAX_NODES} values (aliases counted in full)")


def parse_yaml(text: str, duplicates: list[str] | None = None) -> Any:
    """One YAML document as None, Plain, str, list and dict; raises YamlError.

    Duplicate keys are put into `duplicates` where the caller wants them beside other problems.
    """
    if len(text) > MAX_BYTES:
        raise YamlError(f"more than {MAX_BYTES // 1024} KiB; a config is far smaller")
    try:
        return _Composer(text, duplicates).document()
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise YamlError(f"{where}not valid YAML: {_cut(error.problem or error.context or '', 200)}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {str(error).splitlines()[0]}") from None
    except YamlError:
        raise
    except (ValueError, OverflowError):  # PyYAML takes "\UFFFFFFFF" and %YAML 999... on trust
        raise YamlError("not valid YAML: a number in an escape or a directive is out of range") from None


def resolve(value: Any) -> Any:
    """A value whose key fixes no type: numbers, true/false and null are recognised, the rest is text."""
    if isinstance(value, list | tuple):
        return [resolve(item) for item in value]
    if isinstance(value, dict):
        return {str(key): resolve(item) for key, item in value.items()}
    if not isinstance(value, Plain):
        return value
    if value.lower() in NULLS:
        return None
    if value.lower() in ("true", "false"):
        return BOOLEANS[value.lower()]
    number = parse_number(value)
    return str(value) if number is None else number


def parse_number(text: str) -> int | float | None:
    """`12`, `1e-3`, `.5`, `.inf`; None when the text is no number."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return float(SPECIAL_FLOATS[text.lower()]) if text.lower() in SPECIAL_FLOATS else None


def shorten(value: object, limit: int = 60) -> str:
    """A value as it may stand in a message: repr, cut, on one line."""
    try:
        text = repr(str(value) if isinstance(value, Plain) else value)
    except ValueError:  # Python does not print integers of several thousand digits
        text = "a number of thousands of digits"
    return _cut(text.replace("\n", " "), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _height(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_height, children), default=0) if isinstance(value, dict | list) else 0


def _place(event: yaml.Event) -> str:
    assert event.start_mark is not None
    return f"line {event.start_mark.line + 1}"
