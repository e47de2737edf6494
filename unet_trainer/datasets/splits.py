"""Which pairs train and which validate: seeded, with the classes in proportion; a group never stands on both sides, and
neither do identical images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.image_files import DataError
from unet_trainer.system.console import counted

SPLIT_STREAM = 1  # keeps the split's random numbers apart from those of the batches


@dataclass(frozen=True)
class Split:
    """Which pairs train and which validate, the rules that said so, and what was moved."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    rule: str
    notices: tuple[str, ...] = ()


@dataclass
class Unit:
    """Pairs that stay together, and how many of them hold each class."""

    members: list[int] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)


def split_pairs(
    found: FoundPairs,
    labels: Sequence[Iterable[int]],
    digests: Sequence[str],
    *,
    val_fraction: float,
    seed: int,
    num_folds: int | None = None,
    fold: int = 0,
) -> Split:
    """The split of the pairs; `labels` are the classes in each mask, `digests` tell identical images. Raises DataError."""
    if found.is_divided:
        if num_folds is not None:
            raise DataError(f"num_folds: the data says itself what validates ({found.rule}); leave num_folds out")
        return _given_split(found, digests)
    units = _gather(found.pairs, labels, digests)
    if len(units) < max(2, num_folds or 0):
        raise DataError(_too_few(found.pairs, len(units), num_folds))
    if num_folds is None:
        num_val = min(max(1, round(len(found.pairs) * val_fraction)), len(found.pairs) - 1)
        sides = assign(units, [len(found.pairs) - num_val, num_val], seed)
        how = f"val_fraction {val_fraction:g}, seed {seed}"
    else:
        sizes = [len(found.pairs) // num_folds + (index < len(found.pairs) % num_folds) for index in range(num_folds)]
        sides = [int(side == fold) for side in assign(units, sizes, seed)]
        how = f"fold {fold} of {num_folds}, seed {seed}"
    held_out = {index for unit, side in zip(units, sides, strict=True) if side == 1 for index in unit.members}
    num_groups = len({pair.group for pair in found.pairs} - {""})
    grouped = f", {num_groups} groups kept together" if num_groups else ""
    return Split(
        tuple(pair for index, pair in enumerate(found.pairs) if index not in held_out),
        tuple(pair for index, pair in enumerate(found.pairs) if index in held_out),
        f"{found.rule}; {how}{grouped}",
        _tell_twins(found.pairs, digests),
    )


def assign(units: Sequence[Unit], sizes: Sequence[int], seed: int) -> list[int]:
    """The side of each unit, so that every side gets about its size and its share of each class, the rarest class first.

    The greedy rule of Sechidis et al. (2011), with units of several pairs: each unit goes to the side that lacks most of the
    class at hand. The same units and seed give the same answer on every machine.
    """
    total = sum(sizes)
    room = [float(size) for size in sizes]
    counts: Counter[int] = sum((unit.labels for unit in units), Counter())
    wanted = {label: [count * size / total for size in sizes] for label, count in counts.items()}
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(units)).tolist()
    order.sort(key=lambda index: -len(units[index].members))  # large groups first: there is room for them
    sides = [-1] * len(units)
    for label in [*sorted(counts, key=lambda label: (counts[label], label)), None]:
        for index in order:
            unit = units[index]
            if sides[index] >= 0 or (label is not None and label not in unit.labels):
                continue
            open_sides = [side for side in range(len(sizes)) if room[side] > 0] or list(range(len(sizes)))
            sides[index] = max(open_sides, key=lambda side: (0.0 if label is None else wanted[label][side], room[side], -side))
            room[sides[index]] -= len(unit.members)
            for held, count in unit.labels.items():
                wanted[held][sides[index]] -= count
    _fill_empty_sides(units, sides, len(sizes))
    return sides


def _fill_empty_sides(units: Sequence[Unit], sides: list[int], num_sides: int) -> None:
    """A side without any unit gets the smallest one of a side that has several."""
    for empty in sorted(set(range(num_sides)) - set(sides)):
        shared = [index for index, side in enumerate(sides) if sides.count(side) > 1]
        sides[min(shared, key=lambda index: len(units[index].members))] = empty


def _gather(pairs: Sequence[Pair], labels: Sequence[Iterable[int]], digests: Sequence[str]) -> list[Unit]:
    """Pairs of one group, or with one image, as one unit."""
    leader = list(range(len(pairs)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    first: dict[tuple[str, str], int] = {}
    for index, (pair, digest) in enumerate(zip(pairs, digests, strict=True)):
        for tie in (("group", pair.group), ("image", digest)):
            if tie[1]:
                leader[find(index)] = find(first.setdefault(tie, index))
    units: dict[int, Unit] = defaultdict(Unit)
    for index, held in enumerate(labels):
        unit = units[find(index)]
        unit.members.append(index)
        unit.labels.update(held)
    return [units[index] for index in sorted(units)]


def _given_split(found: FoundPairs, digests: Sequence[str]) -> Split:
    """As the data says; an image that also validates is left out of training, and a group on both sides is refused."""
    if all(pair.part == "val" for pair in found.pairs):
        raise DataError(f"every pair validates and none trains ({found.rule}); need train as well")
    groups = [{pair.group for pair in found.pairs if pair.part == part and pair.group} for part in ("train", "val")]
    torn = sorted(groups[0] & groups[1])
    if torn:
        raise DataError(f"{len(torn)} groups stand in train and in val: {first_few(torn)}; put each on one side")
    validating = {digest for pair, digest in zip(found.pairs, digests, strict=True) if pair.part == "val" and digest}
    kept: list[Pair] = []
    left_out: list[Pair] = []
    for pair, digest in zip(found.pairs, digests, strict=True):
        if pair.part == "train":
            (left_out if digest in validating else kept).append(pair)
    if not kept:
        raise DataError("every training image also validates (the files are identical); need others in one of the two folders")
    notices: tuple[str, ...] = ()
    if left_out:
        what = "image that also validates is" if len(left_out) == 1 else "images that also validate are"
        notices = (f"{len(left_out)} {what} left out of training (identical files): {first_few(pair.image for pair in left_out)}",)
    return Split(tuple(kept), tuple(pair for pair in found.pairs if pair.part == "val"), found.rule, notices)


def _tell_twins(pairs: Sequence[Pair], digests: Sequence[str]) -> tuple[str, ...]:
    by_digest: dict[str, list[Pair]] = defaultdict(list)
    for pair, digest in zip(pairs, digests, strict=True):
        if digest:
            by_digest[digest].append(pair)
    twins = [members for members in by_digest.values() if len(members) > 1]
    if not twins:
        return ()
    num_images = sum(len(members) for members in twins)
    shown = first_few((" = ".join(str(pair.image) for pair in members[:3]) for members in twins), 2)
    return (f"{num_images} images are identical to another one; each lot stays on one side: {shown}",)


def _too_few(pairs: Sequence[Pair], num_units: int, num_folds: int | None) -> str:
    there_are = counted(len(pairs), "pair")
    if num_units < len(pairs):
        there_are += f" in {counted(num_units, 'group')} (or with identical images)"
    needed = "2, one to train on and one to validate on" if num_folds is None else f"{num_folds}, one for each of num_folds"
    return f"only {there_are}; need at least {needed}"
