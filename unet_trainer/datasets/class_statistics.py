"""How often each mask value and each class occurs in the masks of a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_coding import IGNORED, MaskCoding, show_values

UNNAMED = "class 0"
BACKGROUND_NAMES = ("background", "bg", "back", "none", "nothing", "unlabeled", "unlabelled", "void", "other", "others", "rest")
NUM_SHOWN = 8  # classes in the line that describes them


def total_counts(masks: Sequence[MaskFacts]) -> Counter[int]:
    """Pixels of each value in all masks."""
    total: Counter[int] = Counter()
    for mask in masks:
        total.update(mask.counts)
    return total


class ValueRow(NamedTuple):
    """A value that occurs in masks."""

    value: int
    share: float  # of all pixels
    num_masks: int  # that hold it


def value_table(masks: Sequence[MaskFacts]) -> list[ValueRow]:
    """A row for each value that occurs, the most frequent first."""
    pixels = total_counts(masks)
    holders = Counter(value for mask in masks for value in mask.counts)
    total = sum(pixels.values())
    return [ValueRow(value, count / total, holders[value]) for value, count in pixels.most_common()]


def class_ids(mask: MaskFacts, coding: MaskCoding) -> dict[int, int]:
    """Class id → number of pixels of a mask; includes IGNORED and UNKNOWN."""
    return _pixels_of_ids(mask.counts, coding)


def _pixels_of_ids(counts: Mapping[int, int], coding: MaskCoding) -> dict[int, int]:
    values = tuple(sorted(counts))
    pixels: Counter[int] = Counter()
    for value, class_id in zip(values, _encoded(values, coding), strict=True):
        pixels[class_id] += counts[value]
    return dict(pixels)


@lru_cache(maxsize=1024)
def _encoded(values: tuple[int, ...], coding: MaskCoding) -> tuple[int, ...]:
    """The class ids of values; most masks of a dataset hold the same ones."""
    return tuple(coding.encode(np.array(values)).tolist())


def class_shares(masks: Sequence[MaskFacts], coding: MaskCoding, num_ids: int) -> list[float]:
    """Share of each class id among the pixels that are not ignored."""
    total = _pixels_of_ids(total_counts(masks), coding)
    per_class = [total.get(class_id, 0) for class_id in range(num_ids)]
    return [pixels / max(1, sum(per_class)) for pixels in per_class]


def has_background(names: Sequence[str], shares: Sequence[float]) -> bool:
    """Whether class 0 is what no class is: by its name, or, if it has none, because most pixels are of it."""
    if names[0] != UNNAMED:
        return names[0].lower().strip("_ ") in BACKGROUND_NAMES
    return shares[0] == max(shares)


class ClassRow(NamedTuple):
    """The file values that become a class, its name, and its share of the pixels that are not ignored."""

    values: str
    name: str
    share: float


def class_table(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[ClassRow]:
    """A row for each class id."""
    shares = class_shares(masks, coding, len(names))
    return [ClassRow(coding.describe(index), name, share) for index, (name, share) in enumerate(zip(names, shares, strict=True))]


def describe_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> str:
    """The table in one line, with the ignored share and the reason for the coding."""
    table = [f"{row.values} → {row.name} {row.share:.1%}" for row in class_table(masks, coding, names)]
    ignored = ignored_share(masks, coding)
    values = describe_ignored(coding)
    is_one = values == show_values(coding.ignored[:1])
    ignored_text = f"; {values} {'is' if is_one else 'are'} ignored, {ignored:.1%} of all pixels" if ignored else ""
    reason = f" ({coding.reason})" if coding.reason != "mask_values" else ""
    return ", ".join(table[:NUM_SHOWN]) + (", …" if len(table) > NUM_SHOWN else "") + f" of pixels{ignored_text}{reason}"


def describe_ignored(coding: MaskCoding) -> str:
    """The values that are ignored."""
    named = show_values(coding.ignored)
    if coding.ignores_unknown or coding.tolerance:
        return f"{named} and other values" if named else "other values"
    return named


def ignored_share(masks: Sequence[MaskFacts], coding: MaskCoding) -> float:
    """Share of ignored pixels among all pixels."""
    counts = total_counts(masks)
    return _pixels_of_ids(counts, coding).get(IGNORED, 0) / max(1, sum(counts.values()))


def absent_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[str]:
    """Names of the classes without any pixel."""
    return [row.name for row in class_table(masks, coding, names) if row.share == 0]
