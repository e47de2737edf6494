"""What was computed once, in JSON files of our own naming: one that is lost, damaged or a link costs the time to
compute it. What is read is checked by pydantic against declared types: a wrong value would fail much later.
"""

import contextlib
import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from unet_trainer.system.atomic_files import ABANDONED_SECONDS, atomic_open, delete_drafts
from unet_trainer.system.input_files import MAX_BYTES, parse_json, read_bytes

Kind = TypeVar("Kind")
MAX_DEPTH = 8  # of a value of any type


def read_cache_bytes(path: Path | None, max_bytes: int = MAX_BYTES) -> bytes:
    """Empty where there is nothing that can be read. What it holds is to be checked."""
    with contextlib.suppress(OSError):
        return b"" if path is None else read_bytes(path, max_bytes, follow=False)
    return b""


def read_cache(path: Path | None) -> dict[str, Any]:
    """As read_cache_bytes."""
    with contextlib.suppress(ValueError):
        content = parse_json(read_cache_bytes(path))
        if isinstance(content, dict):
            return content
    return {}


def write_cache_bytes(path: Path | None, parts: Iterable[bytes]) -> None:
    """Deletes drafts that killed processes left beside it."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_drafts(path.parent, ["*"], ABANDONED_SECONDS)
        with atomic_open(path) as file:
            file.writelines(parts)


def write_cache(path: Path | None, content: Any) -> None:
    """As write_cache_bytes."""
    write_cache_bytes(path, [json.dumps(content).encode()])


def from_plain(kind: type[Kind], content: Any) -> Kind:
    """A dataclass, from what dataclasses.asdict and JSON made of it. Raises ValueError for anything else."""
    adapter = _adapter(kind)  # type: ignore[arg-type] # a type is hashable
    (value,) = adapter.validate_python([content])
    if adapter.dump_python([value], mode="json") != [content]:  # a field was missing, or a number was a text
        raise ValueError(f"these are not the fields of {kind.__name__}")
    return value


@lru_cache
def _adapter(kind: Any) -> Any:
    """Of a list of one value: nested dataclasses take over its configuration, one that is not nested has none."""
    from pydantic import ConfigDict, TypeAdapter  # 0.1 s

    return TypeAdapter(list[kind], config=ConfigDict(allow_inf_nan=False))


def check_plain(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """The value. Raises ValueError where it is nested deeply, or has a number that is infinite, NaN or over 64 bits."""
    is_float = isinstance(value, float)
    if max_depth == 0 or (isinstance(value, int) and abs(value) >= 2**63) or (is_float and not math.isfinite(value)):
        raise ValueError("Input should be a plain value")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_plain(item, max_depth - 1)
    return value
