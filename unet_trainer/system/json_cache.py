"""What was computed once, in JSON files of our own naming: one that is lost, damaged or a link costs the time to
compute it. What is read is to be checked by its reader.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from unet_trainer.system.atomic_files import ABANDONED_SECONDS, atomic_open, delete_drafts
from unet_trainer.system.input_files import parse_json, read_bytes

MAX_DEPTH = 8  # of a value of any type


def read_cache(path: Path) -> dict[str, Any]:
    """Empty where there is nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        content = parse_json(read_bytes(path, follow=False))
        if isinstance(content, dict):
            return content
    return {}


def write_cache(path: Path, content: Any) -> None:
    """Deletes drafts that killed processes left beside it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_drafts(path.parent, ["*"], ABANDONED_SECONDS)
        with atomic_open(path) as file:
            file.write(json.dumps(content).encode())


def check_plain(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """The value. Raises ValueError where it is nested deeply, or has a number that is infinite, NaN or over 64 bits."""
    is_float = isinstance(value, float)
    if max_depth == 0 or (isinstance(value, int) and abs(value) >= 2**63) or (is_float and not math.isfinite(value)):
        raise ValueError("Input should be a plain value")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_plain(item, max_depth - 1)
    return value
