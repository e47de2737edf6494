"""Dataclasses from the content of a JSON file, each value checked against the type that its field declares.

What is remembered in a file may be damaged, edited or of another version: a value of a wrong type would fail much later, at every
start.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

Kind = TypeVar("Kind")
Convert = Callable[[Any], Any]


def from_plain(kind: type[Kind], content: Any) -> Kind:
    """As dataclasses.asdict and JSON left it. Raises ValueError for anything else."""
    converters: dict[str, Convert] = _converters(kind)  # type: ignore[arg-type] # a type is hashable
    if not isinstance(content, dict) or content.keys() != converters.keys():
        raise ValueError(f"these are not the fields of {kind.__name__}")
    return kind(**{name: convert(content[name]) for name, convert in converters.items()})


@lru_cache
def _converters(kind: Any) -> dict[str, Convert]:
    """By field. Made once of each type: a large dataset has hundreds of thousands of values."""
    hints = typing.get_type_hints(kind)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


@lru_cache
def _converter(hint: Any) -> Convert:
    """Makes of a value what the hint has: a tuple of a list, whole numbers as keys of texts. Raises ValueError if it cannot."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        rest = _converter(next(argument for argument in arguments if argument is not type(None)))
        return (lambda value: None if value is None else rest(value)) if type(None) in arguments else rest
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda value: from_plain(hint, value)
    if origin is tuple:
        return _tuple_converter(hint, arguments)
    if origin in (dict, Mapping):
        return _dict_converter(hint, arguments[0], _converter(arguments[1]))

    def convert(value: Any) -> Any:
        if type(value) is hint or (hint is float and type(value) is int):
            return value
        raise _wrong(hint, value)

    return convert


def _tuple_converter(hint: Any, arguments: tuple[Any, ...]) -> Convert:
    repeated = _converter(arguments[0]) if arguments[-1] is ... else None
    each = [] if repeated else [_converter(argument) for argument in arguments]

    def convert(value: Any) -> Any:
        if isinstance(value, list) and repeated:
            return tuple([repeated(item) for item in value])
        if isinstance(value, list) and len(value) == len(each):
            return tuple([convert_item(item) for convert_item, item in zip(each, value, strict=True)])
        raise _wrong(hint, value)

    return convert


def _dict_converter(hint: Any, key_hint: Any, convert_item: Convert) -> Convert:
    key: Convert = int if key_hint is int else lambda key: key  # JSON has no keys but text

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(hint, value)
        return {key(name): convert_item(item) for name, item in value.items()}

    return convert


def _wrong(hint: Any, value: Any) -> ValueError:
    return ValueError(f"{value!r:.40} is no {hint}")
