"""Reads untrusted YAML text into plain values.

Scalars keep the text the user typed (`Plain`), because only the key decides whether `no` is text or a boolean and that `1e-3`
is a number. Tags, several documents, duplicate keys, and anything past the limits below are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12
MAX_NODES = 5_000  # with aliases expanded, so that an alias bomb is refused
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


class _BoundedLoader(yaml.SafeLoader):
    """Composes YAML nodes, refusing tags, deep nesting and alias bombs before anything is built from them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.num_nodes = 0
        self.expanded_sizes: dict[yaml.Node, int] = {}  # with aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            target = self.anchors.get(event.anchor)
            if target is None or target.end_mark is None:  # an alias inside its own anchor: the node is not complete yet
                raise YamlError(f"{_place(event)}: alias {shorten(event.anchor)} has no anchor before it")
            self._count(self.expanded_sizes[target], self.depth + _height(target), event)
            return super().compose_node(parent, index)
        if event.tag is not None:
            raise YamlError(f"{_place(event)}: tag {shorten(event.tag)}; tags are not allowed, write the plain value")
        num_nodes_before = self.num_nodes
        self._count(1, self.depth, event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        assert node is not None
        self.expanded_sizes[node] = self.num_nodes - num_nodes_before
        return node

    def _count(self, num_nodes: int, depth: int, event: yaml.Event) -> None:
        if depth > MAX_DEPTH:
            raise YamlError(f"{_place(event)}: nested deeper than {MAX_DEPTH} levels")
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise YamlError(f"{_place(event)}: more than {MAX_NODES} values (aliases counted in full)")


def parse_yaml(text: str, duplicates: list[str] | None = None) -> Any:
    """One YAML document as None, Plain, str, list and dict; raises YamlError.

    Duplicate keys are appended to `duplicates` if it is given, so that they can be reported with other problems.
    """
    if len(text) > MAX_BYTES:
        raise YamlError(f"more than {MAX_BYTES // 1024} KiB; a config is far smaller")
    try:
        loader = _BoundedLoader(text)
        loader.get_event()  # the start of the stream
        if loader.check_event(yaml.StreamEndEvent):
            return None
        node = loader.compose_document()
        if not loader.check_event(yaml.StreamEndEvent):
            raise YamlError(f"{_place(loader.peek_event())}: a second document (---); need one")
        return None if node is None else _to_value(node, duplicates, {})
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise YamlError(f"{where}not valid YAML: {_cut(error.problem or error.context or '', 200)}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {str(error).splitlines()[0]}") from None
    except YamlError:
        raise
    except (ValueError, OverflowError):  # PyYAML does not check "\UFFFFFFFF" and %YAML 999...
        raise YamlError("not valid YAML: a number in an escape or a directive is out of range") from None


def _to_value(node: yaml.Node, duplicates: list[str] | None, built: dict[yaml.Node, Any]) -> Any:
    """Plain, str, list or dict of a node; an alias gives the value that its anchor was given."""
    if node in built:
        return built[node]
    value: Any
    if isinstance(node, yaml.ScalarNode):
        value = Plain(node.value) if node.style is None else str(node.value)
    elif isinstance(node, yaml.SequenceNode):
        value = [_to_value(item, duplicates, built) for item in node.value]
    else:
        value = {}
        for key_node, value_node in node.value:
            key = _to_value(key_node, duplicates, built)
            if not isinstance(key, str):
                raise YamlError(f"{_place(key_node)}: a key must be a word")
            if str(key) in value:
                problem = f"{_place(key_node)}: {shorten(key)} is given twice; keep one"
                if duplicates is None:
                    raise YamlError(problem)
                duplicates.append(problem)
            value[str(key)] = _to_value(value_node, duplicates, built)
    built[node] = value
    return value


def interpret(value: Any) -> Any:
    """A value whose key fixes no type: numbers, true/false and null are recognised, the rest is text."""
    if isinstance(value, list | tuple):
        return [interpret(item) for item in value]
    if isinstance(value, dict):
        return {str(key): interpret(item) for key, item in value.items()}
    if not isinstance(value, Plain):
        return value
    if value.lower() in NULLS:
        return None
    if value.lower() in ("true", "false"):
        return BOOLEANS[value.lower()]
    number = parse_number(value)
    return str(value) if number is None else number


def parse_number(text: str) -> int | float | None:
    """`12`, `1e-3`, `.5`, `.inf`; None if the text is not a number."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return float(SPECIAL_FLOATS[text.lower()]) if text.lower() in SPECIAL_FLOATS else None


def shorten(value: object, limit: int = 60) -> str:
    """The repr of a value for a message, cut to `limit` characters, on one line."""
    try:
        text = repr(str(value) if isinstance(value, Plain) else value)
    except ValueError:  # Python does not print integers of several thousand digits
        text = "a number of thousands of digits"
    return _cut(text.replace("\n", " "), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _height(node: yaml.Node) -> int:
    """Levels below the node."""
    if isinstance(node, yaml.ScalarNode):
        return 0
    children = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
    return 1 + max(map(_height, children), default=0)


def _place(marked: yaml.Event | yaml.Node) -> str:
    assert marked.start_mark is not None
    return f"line {marked.start_mark.line + 1}"
