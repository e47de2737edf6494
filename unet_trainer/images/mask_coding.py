"""What mask values mean: value in the file → class id. `auto` decides from the values that occur, or raises with the choices.

A value is a whole number as it is in the file. A colour is one number too: a grey one is its brightness, any other is
COLOUR + 0xRRGGBB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np

from unet_trainer.images.image_files import COLOUR, DataError, Pixels

IGNORED = 255  # id of pixels that count in no loss and no metric: void, padding
UNKNOWN = 254  # id of values that belong to no class; never reaches a batch

MANY_VALUES = 8  # as many distinct greys in masks of two classes come from soft edges or compression
EDGE_WIDTH = 48  # greys within this distance of the darkest or the brightest value belong to it
MIN_CLEAR_SHARE = 0.9  # share of pixels that must be within EDGE_WIDTH; with fewer, a grey between may be a class

MaskValue = int | tuple[int, int, int]
MaskValues = str | Sequence[MaskValue]  # as in the config: auto, nonzero, "above N", or one value or colour per class


@dataclass(frozen=True)
class MaskCoding:
    """Value → class id: by the value of each class, or by a threshold (higher values are class 1)."""

    values: tuple[int, ...] | None  # by class id; None: by threshold
    threshold: int = 0
    ignore_value: int | None = None
    reason: str = "mask_values"
    lookup: Pixels = field(init=False, repr=False, compare=False)  # 256 ids, for 8-bit masks

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", self._encode(np.arange(256)))

    def encode(self, mask: Pixels) -> Pixels:
        """H,W values of a file → H,W uint8 ids, with IGNORED and UNKNOWN."""
        if mask.dtype == np.uint8 and mask.ndim == 2:
            return cv2.LUT(mask, self.lookup)  # ten times faster than indexing
        return self._encode(mask)

    def _encode(self, mask: Pixels) -> Pixels:
        if self.values is None:
            ids = (mask > self.threshold).astype(np.uint8)
        else:
            order = np.argsort(self.values)
            known = np.array(self.values)[order]
            position = np.searchsorted(known, mask).clip(max=len(known) - 1)
            ids = np.where(known[position] == mask, order[position], UNKNOWN).astype(np.uint8)
        if self.ignore_value is not None:
            ids[mask == self.ignore_value] = IGNORED
        return ids

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint holds them."""
        return {
            "values": None if self.values is None else list(self.values),
            "threshold": self.threshold,
            "ignore_value": self.ignore_value,
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> MaskCoding:
        values = content["values"]
        return MaskCoding(None if values is None else tuple(values), content["threshold"], content["ignore_value"])

    @property
    def mask_values(self) -> str | tuple[MaskValue, ...]:
        """As the config writes it."""
        if self.values is not None:
            return tuple(_as_written(value) for value in self.values)
        return "nonzero" if self.threshold == 0 else f"above {self.threshold}"

    def describe(self, class_id: int) -> str:
        """Which values in the file become this class."""
        if self.values is not None:
            return show_value(self.values[class_id])
        return f"{'>' if class_id else '≤'} {self.threshold}" if self.threshold else ("not 0" if class_id else "0")


def build_coding(
    mask_values: MaskValues, num_classes: int, ignore_value: int | None, counts: Mapping[int, int], are_16bit: bool = False
) -> MaskCoding:
    """The coding for mask_values; `auto` decides from `counts`, the pixels of each value in all masks. Raises DataError."""
    if mask_values == "nonzero":
        return MaskCoding(None, 0, ignore_value)
    if isinstance(mask_values, str) and mask_values.startswith("above "):
        return MaskCoding(None, int(mask_values.removeprefix("above ")), ignore_value)
    if not isinstance(mask_values, str):
        return MaskCoding(tuple(_as_number(value) for value in mask_values), 0, ignore_value)
    seen = sorted(set(counts) - {ignore_value})
    if are_16bit and num_classes == 1 and len(seen) > 2 and seen[0] == 0 and seen[-1] < COLOUR and ignore_value is None:
        return MaskCoding(None, 0, None, "16-bit object ids: any value but 0 is foreground")
    coding = _decide(num_classes, ignore_value, seen, counts)
    if coding is None:
        raise DataError(_describe_choices(num_classes, ignore_value, seen, counts))
    return coding


def _decide(num_classes: int, ignore_value: int | None, seen: list[int], counts: Mapping[int, int]) -> MaskCoding | None:
    """The coding if the values that occur allow only one, else None."""
    num_ids = max(2, num_classes)
    if num_ids == 2 and set(seen) <= {0, 255} and 255 in seen:
        return MaskCoding((0, 255), 0, ignore_value, "0 and 255")
    ids = tuple(range(num_ids))
    if set(seen) <= set(ids):
        return MaskCoding(ids, 0, ignore_value, "class ids")
    if ignore_value is None and set(seen) <= {*ids, IGNORED}:
        return MaskCoding(ids, 0, IGNORED, "class ids; 255 is taken as void")
    if len(seen) == num_ids and _is_order_clear(num_classes, seen):
        return MaskCoding(tuple(seen), 0, ignore_value, f"{num_ids} values, in their order")
    if num_classes > 1:
        return None
    if 0 in seen and 255 < seen[-1] < COLOUR:
        return MaskCoding(None, 0, ignore_value, "16-bit object ids: any value but 0 is foreground")
    threshold = _edge_threshold(seen, counts)
    if threshold is None:
        return None
    return MaskCoding(None, threshold, ignore_value, f"greys around {seen[0]} and {seen[-1]}, split at {threshold}")


def _is_order_clear(num_classes: int, seen: list[int]) -> bool:
    """Greys are ordered by brightness. Colours have no order, but a single one beside black must be the foreground."""
    return seen[-1] < COLOUR or (num_classes == 1 and seen[0] == 0)


def _edge_threshold(seen: list[int], counts: Mapping[int, int]) -> int | None:
    """The middle between darkest and brightest if nearly all pixels are near one of them: soft edges, or a mask saved as JPEG."""
    low, high = seen[0], seen[-1]
    if len(seen) < MANY_VALUES or high > 255 or high - low < 4 * EDGE_WIDTH:
        return None
    total = sum(counts[value] for value in seen)
    clear = sum(counts[value] for value in seen if value - low <= EDGE_WIDTH or high - value <= EDGE_WIDTH)
    return (low + high) // 2 if clear >= MIN_CLEAR_SHARE * total else None


def _describe_choices(num_classes: int, ignore_value: int | None, seen: list[int], counts: Mapping[int, int]) -> str:
    """The table of values and the config lines to choose from."""
    total = sum(counts[value] for value in seen)
    largest = sorted(seen, key=lambda value: -counts[value])[:12]
    table = [f"{show_value(value)}: {counts[value] / total:.2%} of pixels" for value in sorted(largest)]
    table += [f"… {len(seen)} values in all"] if len(seen) > len(largest) else []
    expected = (
        "{0, 1}, {0, 255} or any two values" if num_classes == 1 else f"the ids 0 to {num_classes - 1} or any {num_classes} greys"
    )
    lines = _choices(num_classes, ignore_value, seen)
    return (
        f"mask_values: auto cannot tell what the values in the masks mean; num_classes: {num_classes} accepts {expected}\n  "
        + "\n  ".join(table)
        + "\n  Set one of\n    "
        + "\n    ".join(lines)
    )


def _choices(num_classes: int, ignore_value: int | None, seen: list[int]) -> list[str]:
    lines = []
    dense = list(range(len(seen) - 1))
    if ignore_value is None and seen == [*dense, IGNORED] and 2 < len(dense) != num_classes:
        lines.append(f"num_classes: {len(dense)}   # 255 is taken as void")
    if len(seen) == max(2, num_classes):
        lines.append(f"mask_values: {[_listed(value) for value in seen]}   # in the order of the classes")
    if seen == list(range(len(seen))) and 1 < len(seen) < UNKNOWN and len(seen) != num_classes:
        lines.append(f"num_classes: {len(seen)}")
    elif 2 < len(seen) <= 40:
        lines.append(f"num_classes: {len(seen)} with mask_values: {[_listed(value) for value in seen]}")
    if ignore_value is None and len(seen) == max(2, num_classes) + 1 and seen[-1] < COLOUR:
        lines.append(f"ignore_value: {show_value(seen[-1])}, if these pixels should be ignored")
    if num_classes == 1 and 0 in seen:
        lines.append("mask_values: nonzero   # any value but 0 is foreground")
    if num_classes == 1 and 16 < seen[-1] <= 255:
        lines.append(f"mask_values: above {(seen[0] + seen[-1]) // 2}   # brighter is foreground")
    return lines or ["num_classes, mask_values (the value or [red, green, blue] of each class) or ignore_value"]


def show_value(value: int) -> str:
    return f"#{value - COLOUR:06x}" if value >= COLOUR else str(value)


def _as_number(value: MaskValue) -> int:
    """A value or colour in the config → its number in a mask."""
    if isinstance(value, int):
        return value
    red, green, blue = value
    return red if red == green == blue else COLOUR + (red << 16) + (green << 8) + blue


def _as_written(value: int) -> MaskValue:
    if value < COLOUR:
        return value
    return (value >> 16) & 255, (value >> 8) & 255, value & 255


def _listed(value: int) -> int | list[int]:
    written = _as_written(value)
    return list(written) if isinstance(written, tuple) else written
