"""What was computed once, in JSON files of our own naming: one that is lost, damaged or a link costs the time to
compute it. What is read is checked by pydantic against declared types: a wrong value would fail much later.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from unet_trainer.system.atomic_files import ABANDONED_SECONDS, delete_drafts, write_text_atomically
from unet_trainer.system.input_files import read_json

Kind = TypeVar("Kind")
# By the name of a field, its type; a mapping again for an object in it.
Shape = Mapping[str, Any]
MAX_DEPTH = 8  # of a value of any type


def read_cache(path: Path | None) -> dict[str, Any]:
    """Empty where there is nothing that can be read. What it holds is to be checked."""
    with contextlib.suppress(OSError, ValueError):
        content = None if path is None else read_json(path, follow=False)
        if isinstance(content, dict):
            return content
    return {}


def write_cache(path: Path | None, content: Any) -> None:
    """Deletes drafts that killed processes left beside it."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_drafts(path.parent, ["*"], ABANDONED_SECONDS)
        write_text_atomically(path, json.dumps(content))


def read_known(kind: type[Kind], path: Path | None, number: int) -> Kind | None:
    """The dataclass that write_known wrote, if it was of this kind and number."""
    content = read_cache(path)
    with contextlib.suppress(ValueError):
        if content.pop("format", None) == number:
            return from_plain(kind, content)
    return None


def write_known(value: Any, path: Path | None, number: int) -> None:
    """`number`: of the format, another one whenever values mean something else."""
    write_cache(path, {"format": number, **asdict(value)})


def from_plain(kind: type[Kind], content: Any) -> Kind:
    """A dataclass, from what dataclasses.asdict and JSON made of it. Raises ValueError for anything else."""
    adapter = _adapter(kind, False)  # type: ignore[arg-type] # a type is hashable
    (value,) = adapter.validate_python([content])
    if adapter.dump_python([value], mode="json") != [content]:  # a field was missing, or a number was a text
        raise ValueError(f"these are not the fields of {kind.__name__}")
    return value


def pick(shape: Shape, content: Any) -> dict[str, Any]:
    """The declared fields that an object has, without those that are null. Raises ValueError."""
    if not isinstance(content, dict):
        raise ValueError(f"{content!r:.40}: Input should be a valid dictionary")
    picked: dict[str, Any] = {}
    for name, declared in shape.items():
        if (value := content.get(name)) is None:
            continue
        try:
            picked[name] = pick(declared, value) if isinstance(declared, Mapping) else _checked(declared, value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return picked


def _checked(hint: Any, value: Any) -> Any:
    """Raises ValueError if the value is not what the hint has."""
    from pydantic import ValidationError  # 0.1 s

    try:
        (checked,) = _adapter(hint, True).validate_python([value])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{first['input']!r:.40}: {first['msg']}") from None
    check_plain(value)
    return checked


@lru_cache
def _adapter(hint: Any, is_strict: bool) -> Any:
    """Of a list of one value: nested dataclasses take over its configuration, one that is not nested has none."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(list[hint], config=ConfigDict(strict=is_strict, allow_inf_nan=False))


def check_plain(value: Any) -> Any:
    """The value. Raises ValueError where it is nested deeply, or has a number that is not finite or beyond 64 bits."""
    if not _is_plain(value):
        raise ValueError("Input should be a plain value")
    return value


def _is_plain(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    if isinstance(value, int | float):
        return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max_depth > 0 and all(_is_plain(item, max_depth - 1) for item in items)
