"""Dataclasses from the content of a JSON file, each value checked against the type that its field declares.

What is remembered in a file may be damaged, edited or of another version: a value of a wrong type would fail much later, at every
start.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def from_plain(kind: type[Kind], content: Any) -> Kind:
    """As dataclasses.asdict and JSON left it. Raises ValueError for anything else."""
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type] # a type is hashable
    if not isinstance(content, dict) or set(content) != set(hints):
        raise ValueError(f"these are not the fields of {kind.__name__}")
    return kind(**{name: _converted(hint, content[name]) for name, hint in hints.items()})


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _converted(hint: Any, value: Any) -> Any:
    """The value as the hint has it: a tuple from a list, whole numbers as keys from texts."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _converted(next(argument for argument in arguments if argument is not type(None)), value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    if origin is tuple and isinstance(value, list):
        hints = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        if len(hints) == len(value):
            return tuple(_converted(hint, item) for hint, item in zip(hints, value, strict=True))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {_key(arguments[0], key): _converted(arguments[1], item) for key, item in value.items()}
    if type(value) is hint or (hint is float and type(value) is int):
        return value
    raise ValueError(f"{value!r:.40} is no {hint}")


def _key(hint: Any, key: str) -> Any:
    """JSON has no keys but text."""
    return int(key) if hint is int else key
