"""What is said about images that are like their neighbours: why the split is too easy, and the lines that mend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from unet_trainer.datasets.group_pattern import add_groups
from unet_trainer.datasets.name_patterns import in_order, places_of
from unet_trainer.datasets.neighbours import Likeness, Neighbours
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import setting_lines
from unet_trainer.datasets.splits import split_pairs
from unet_trainer.images.file_bytes import DataError

VAL_SHARES = (0.4, 2.5)  # times val_fraction: what a pattern with few groups may make of it


class Note(NamedTuple):
    text: str
    settings: dict[str, Any]  # that keep neighbours apart


def describe_neighbours(
    neighbours: Neighbours, pairs: Sequence[Pair], data_dir: Path, val_fraction: float, num_folds: int | None
) -> Note | None:
    """The note with its settings: the pattern with most groups that can be split, or split: blocks for a sequence."""
    paths = [pair.path_in(data_dir) for pair in pairs]
    for grouping in neighbours.groupings:
        if _can_be_split(pairs, grouping.pattern, data_dir, val_fraction, num_folds):
            counts = Counter(grouping.groups)
            smallest, largest = min(counts.values()), max(counts.values())
            sizes = f"of {smallest} images" if smallest == largest else f"of {smallest} to {largest} images"
            example = next(group for group, count in counts.most_common())
            alike = [Path(path).stem for path, group in zip(paths, grouping.groups, strict=True) if group == example][:3]
            fix = f"{len(counts)} groups {sizes} can stay together"
            return _note(neighbours, alike, fix, {"group_pattern": grouping.pattern})
    if not neighbours.is_sequence:
        return None
    order = in_order(places_of(paths))
    middle = len(order) // 2
    alike = [Path(paths[index]).stem for index in order[middle : middle + 3]]
    return _note(neighbours, alike, "blocks of the sequence can validate, with a gap", {"split": "blocks"})


def _note(neighbours: Neighbours, alike: Sequence[str], fix: str, settings: dict[str, Any]) -> Note:
    names, likeness = ", ".join(alike), neighbours.likeness
    if likeness is None:
        why = f"images of one number are of the same subject by their names ({names})"
    else:
        share, chance = likeness.by_number if neighbours.is_sequence else likeness.by_group[settings["group_pattern"]]
        what = "in the numbering" if neighbours.is_sequence else "by name"
        shares = f"the most similar image is a neighbour in {share:.0%} of cases (chance: {chance:.0%})"
        why = f"images are like their neighbours {what} ({names}): {shares}"
        if likeness.neighbour_iou is not None and likeness.other_iou is not None and neighbours.is_sequence:
            why += f", and copying a neighbour's mask scores IoU {likeness.neighbour_iou:.2f} (another's {likeness.other_iou:.2f})"
    lines = "\n".join(f"  {line}" for line in setting_lines(settings))
    return Note(f"{why}. A random split puts them into train and val, and val_iou is too good; {fix}:\n{lines}", settings)


def _can_be_split(pairs: Sequence[Pair], pattern: str, data_dir: Path, val_fraction: float, num_folds: int | None) -> bool:
    """Whether the pattern, set in the config, gives a split with about as many validation images as asked for."""
    no_labels: list[set[int]] = [set() for _ in pairs]
    no_digests = [""] * len(pairs)
    try:
        grouped = add_groups([replace(pair, group="") for pair in pairs], pattern, data_dir)
        split = split_pairs(FoundPairs(grouped, ""), no_labels, no_digests, val_fraction=val_fraction, seed=0, num_folds=num_folds)
    except DataError:
        return False
    wanted = 1 / num_folds if num_folds else val_fraction
    low, high = VAL_SHARES
    return low * wanted <= len(split.val) / len(pairs) <= high * wanted


def describe_neighbours_across(likeness: Likeness) -> str:
    """The note for a split that the data gives."""
    share, chance = likeness.by_number
    often = f"in {share:.0%} of cases (chance: {chance:.0%})"
    return (
        "validation images are like their neighbours in train: the most similar training image is the one before or after in the "
        f"numbering {often}; val_iou shows how well the model knows these sequences, not new ones"
    )
