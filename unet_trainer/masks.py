"""What mask values mean: the value in the file → class id. Decides from the values that occur, or refuses by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from unet_trainer.images import DataError, Pixels

IGNORED = 255  # id of pixels that count nowhere: void, padding
UNKNOWN = 254  # id of values that no class has; never reaches a batch


def choose_mask_values(
    mask_values: Literal["auto"] | Sequence[int], num_classes: int, ignore_value: int | None, values_seen: Sequence[int]
) -> tuple[int, ...]:
    """The file's value for each class id. `auto` decides from all values that occur in the masks; raises DataError."""
    if mask_values != "auto":
        return tuple(mask_values)
    seen = set(values_seen) - {ignore_value}
    if num_classes <= 2 and seen <= {0, 255} and 255 in seen:
        return (0, 255)
    ids = tuple(range(max(2, num_classes)))
    if not seen <= set(ids):
        raise DataError(_misfit(num_classes, ignore_value, sorted(seen)))
    return ids


def _misfit(num_classes: int, ignore_value: int | None, seen: list[int]) -> str:
    shown = ", ".join(str(value) for value in seen[:12]) + (f", … ({len(seen)} values)" if len(seen) > 12 else "")
    expected = "{0, 1} or {0, 255}" if num_classes == 1 else f"0 to {num_classes - 1}"
    fixes = [f"mask_values: [{', '.join(map(str, seen))}]"] if len(seen) == max(2, num_classes) else []
    if _are_ids(seen) and len(seen) != num_classes:
        fixes.append(f"num_classes: {len(seen)}")
    if ignore_value is None and seen[-1] == 255 and len(seen) > 2 and _are_ids(seen[:-1]):
        fixes.append("ignore_value: 255, if those pixels are not to be learnt")
    fixes = fixes or ["num_classes, mask_values (the value of each class) or ignore_value"]
    return f"the masks hold the values {shown}; num_classes: {num_classes} takes {expected}. Set {' or '.join(fixes)}"


def _are_ids(values: list[int]) -> bool:
    return values == list(range(len(values))) and len(values) <= UNKNOWN


def build_lookup(mask_values: Sequence[int], ignore_value: int | None) -> Pixels:
    """256 entries: file value → class id, IGNORED or UNKNOWN."""
    lookup = np.full(256, UNKNOWN, np.uint8)
    for class_id, value in enumerate(mask_values):
        lookup[value] = class_id
    if ignore_value is not None:
        lookup[ignore_value] = IGNORED
    return lookup
