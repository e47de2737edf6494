"""Which pairs train and which validate: seeded and stratified by class. Pairs of a group, and identical images, stay together.

Or contiguous blocks of a sequence, for images that are like their neighbours.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from unet_trainer.datasets.pairs import FoundPairs, Pair, composed
from unet_trainer.datasets.problems import Question, first_few
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.concurrency import Crash, ReadStderr, forked_map
from unet_trainer.system.console import counted

SPLIT_STREAM = 1  # part of the seed: random numbers of the split are independent of those of the batches
MAX_BLOCKS, MIN_BLOCK = 5, 10  # split: blocks validates on up to so many blocks, of at least so many images if there are several
GAP_SHARE, MAX_GAP = 0.2, 25  # images left out on both sides of a block: a share of its length
BY_HAND = "split_file=FILE.csv divides them as you say"
CHUNK, SECONDS = 10_000, 20.0  # paths that group_pattern is matched with, and its limit; ordinary ones take a microsecond each
NUM_ARRANGEMENTS = 64  # of blocks that are tried
NUMBER = re.compile(r"\d+")
MIN_RUN = 3  # images in a row that make a sequence


@dataclass(frozen=True)
class Split:
    """The pairs of training and of validation, how they were chosen, and what the user should know about it."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    rule: str
    notices: tuple[str, ...] = ()
    test: tuple[Pair, ...] = ()  # for `evaluate`; training does not touch them
    unused: tuple[Pair, ...] = ()  # left out of both: the gaps between blocks, training images that also validate


def describe_split(split: Split) -> str:
    """8 train, 2 val; and what is kept for evaluate."""
    kept = f", {len(split.test)} test kept for evaluate" if split.test else ""
    return f"{len(split.train)} train, {len(split.val)} val{kept}"


@dataclass
class Unit:
    """Indices of pairs that stay together, and how many of them hold each class."""

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
    in_blocks: bool = False,
) -> Split:
    """Splits the pairs. `labels` are the classes in each mask; images with the same digest are identical. Raises DataError."""
    if found.is_divided:
        for key, is_set in (("num_folds", num_folds is not None), ("split: blocks", in_blocks)):
            if is_set:
                raise DataError(f"{key}: the data is already divided into train and val ({found.rule}); leave {key} out")
        return _given_split(found, digests)
    if in_blocks:
        return _split_into_blocks(found, labels, digests, val_fraction, seed, num_folds, fold)
    units = _group_pairs(found.pairs, labels, digests)
    if len(units) < max(2, num_folds or 0):
        raise DataError(_describe_too_few(found.pairs, len(units), num_folds))
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
    grouped = f", {counted(num_groups, 'group')} kept together" if num_groups else ""
    return Split(
        tuple(pair for index, pair in enumerate(found.pairs) if index not in held_out),
        tuple(pair for index, pair in enumerate(found.pairs) if index in held_out),
        f"{found.rule}; {how}{grouped}",
        _describe_identical(found.pairs, digests),
        found.test,
    )


def assign(units: Sequence[Unit], sizes: Sequence[int], seed: int) -> list[int]:
    """The side of each unit, so that every side gets about its size and its share of each class.

    Iterative stratification (Sechidis et al., 2011), with units of several pairs: class by class, the rarest first, each unit
    goes to the side that lacks most of that class. The same units and seed give the same sides on every machine.
    """
    total = sum(sizes)
    free = [float(size) for size in sizes]  # pairs that each side still lacks
    counts: Counter[int] = sum((unit.labels for unit in units), Counter())
    wanted = {label: [count * size / total for size in sizes] for label, count in counts.items()}
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(units)).tolist()
    order.sort(key=lambda index: -len(units[index].members))  # large units first, while no side is full
    sides = [-1] * len(units)
    for label in [*sorted(counts, key=lambda label: (counts[label], label)), None]:
        for index in order:
            unit = units[index]
            if sides[index] >= 0 or (label is not None and label not in unit.labels):
                continue
            open_sides = [side for side in range(len(sizes)) if free[side] > 0] or list(range(len(sizes)))
            sides[index] = max(open_sides, key=lambda side: (0.0 if label is None else wanted[label][side], free[side], -side))
            free[sides[index]] -= len(unit.members)
            for held, count in unit.labels.items():
                wanted[held][sides[index]] -= count
    _fill_empty_sides(units, sides, len(sizes))
    return sides


def _fill_empty_sides(units: Sequence[Unit], sides: list[int], num_sides: int) -> None:
    """Moves the smallest unit of a side that has several to each side that has none."""
    for empty in sorted(set(range(num_sides)) - set(sides)):
        shared = [index for index, side in enumerate(sides) if sides.count(side) > 1]
        sides[min(shared, key=lambda index: len(units[index].members))] = empty


def _group_pairs(pairs: Sequence[Pair], labels: Sequence[Iterable[int]], digests: Sequence[str]) -> list[Unit]:
    """Units of pairs that share a group or an image, directly or through other pairs (union-find)."""
    parents = list(range(len(pairs)))

    def find_root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    first: dict[tuple[str, str], int] = {}
    for index, (pair, digest) in enumerate(zip(pairs, digests, strict=True)):
        for key in (("group", pair.group), ("image", digest)):
            if key[1]:
                parents[find_root(index)] = find_root(first.setdefault(key, index))
    units: dict[int, Unit] = defaultdict(Unit)
    for index, held in enumerate(labels):
        unit = units[find_root(index)]
        unit.members.append(index)
        unit.labels.update(held)
    return [units[index] for index in sorted(units)]


def _given_split(found: FoundPairs, digests: Sequence[str]) -> Split:
    """The parts that the data gives. A training image that also validates is left out; a group on both sides is an error."""
    if all(pair.part == "val" for pair in found.pairs):
        raise DataError(f"every pair validates and none trains ({found.rule}); need train as well; {BY_HAND}")
    groups = [{pair.group for pair in found.pairs if pair.part == part and pair.group} for part in ("train", "val")]
    shared = sorted(groups[0] & groups[1])
    if shared:
        raise DataError(
            f"{counted(len(shared), 'group')} in train and in val: {first_few(shared)}; put each on one side; {BY_HAND}"
        )
    validating = {digest for pair, digest in zip(found.pairs, digests, strict=True) if pair.part == "val" and digest}
    training = [(pair, digest in validating) for pair, digest in zip(found.pairs, digests, strict=True) if pair.part == "train"]
    train, left_out = (tuple(pair for pair, is_held_out in training if is_held_out == which) for which in (False, True))
    if not train:
        raise DataError(f"every training image also validates (the files are identical); {BY_HAND}")
    val = tuple(pair for pair in found.pairs if pair.part == "val")
    return Split(train, val, found.rule, _describe_left_out(left_out), found.test, left_out)


def _describe_left_out(pairs: Sequence[Pair]) -> tuple[str, ...]:
    if not pairs:
        return ()
    what = f"{counted(len(pairs), 'training image')} left out, identical to a validation image"
    return (f"{what}: {first_few(pair.shown_image for pair in pairs)}",)


def _describe_identical(pairs: Sequence[Pair], digests: Sequence[str]) -> tuple[str, ...]:
    by_digest: dict[str, list[Pair]] = defaultdict(list)
    for pair, digest in zip(pairs, digests, strict=True):
        if digest:
            by_digest[digest].append(pair)
    identical = [members for members in by_digest.values() if len(members) > 1]
    if not identical:
        return ()
    num_images = sum(len(members) for members in identical)
    shown = first_few((" = ".join(pair.shown_image for pair in members[:3]) for members in identical), 2)
    return (f"{num_images} images are identical to another one; identical images stay on one side: {shown}",)


def _describe_too_few(pairs: Sequence[Pair], num_units: int, num_folds: int | None) -> str:
    there_are = counted(len(pairs), "pair")
    if num_units < len(pairs):
        there_are += f" in {counted(num_units, 'group')} (or with identical images)"
    needed = "2, one to train on and one to validate on" if num_folds is None else f"{num_folds}, one for each of num_folds"
    by_hand = f"; {BY_HAND}" if num_folds is None and any(pair.group for pair in pairs) else ""
    return f"only {there_are}; need at least {needed}{by_hand}"


def _split_into_blocks(
    found: FoundPairs,
    labels: Sequence[Iterable[int]],
    digests: Sequence[str],
    val_fraction: float,
    seed: int,
    num_folds: int | None,
    fold: int,
) -> Split:
    """Contiguous blocks in the order of the names validate; their neighbours on both sides neither train nor validate."""
    if any(pair.group for pair in found.pairs):
        raise DataError("split: blocks divides a sequence, and the pairs have groups that stay together; leave one of them out")
    num_pairs = len(found.pairs)
    if num_pairs < max(3, num_folds or 0):  # one to train on, one to validate on and one between them
        raise _too_few_for_blocks(num_pairs)
    places = places_of([pair.name for pair in found.pairs])
    order = in_order(places)
    if num_folds is None:
        num_val = min(max(1, round(num_pairs * val_fraction)), num_pairs - 2)
        blocks = _choose_blocks([set(labels[index]) for index in order], num_val, seed)
        how = f"split: blocks, val_fraction {val_fraction:g}, seed {seed}"
    else:
        blocks = [(num_pairs * fold // num_folds, num_pairs * (fold + 1) // num_folds)]
        how = f"split: blocks, fold {fold} of {num_folds}"
    gap = max(1, min(MAX_GAP, round(GAP_SHARE * max(end - start for start, end in blocks))))
    val = {position for start, end in blocks for position in range(start, end)}
    around = {
        near
        for start, end in blocks
        for position, step in ((start, -1), (end - 1, 1))
        for near in range(position + step, position + step * (gap + 1), step)
        if 0 <= near < num_pairs and near not in val and places[order[near]].sequence == places[order[position]].sequence
    }
    validating = {digests[order[position]] for position in val} - {""}
    rest = [order[position] for position in range(num_pairs) if position not in val and position not in around]
    train = sorted(index for index in rest if digests[index] not in validating)
    if not train:
        raise _too_few_for_blocks(num_pairs)
    left_out = [found.pairs[index] for index in rest if digests[index] in validating]
    unused = tuple(found.pairs[order[position]] for position in sorted(around))
    notices = _describe_left_out(left_out)
    if unused:
        notices += (f"{counted(len(unused), 'pair')} between the blocks of train and val left out, as a gap",)
    return Split(
        tuple(found.pairs[index] for index in train),
        tuple(found.pairs[index] for index in sorted(order[position] for position in val)),
        f"{found.rule}; {how}: {counted(len(blocks), 'block')} of val",
        notices,
        found.test,
        (*unused, *left_out),
    )


def _too_few_for_blocks(num_pairs: int) -> Question:
    text = f"split: blocks: {counted(num_pairs, 'pair')} are too few to train on, to validate on and to leave a gap between"
    return Question(text, {"split": "random"})


def _choose_blocks(labels: Sequence[set[int]], num_val: int, seed: int) -> list[tuple[int, int]]:
    """Start and end of the blocks that validate: one in each of several equal stretches, at places where their classes are most
    like those of all images."""
    num_blocks = max(1, min(MAX_BLOCKS, num_val // MIN_BLOCK))
    stretches = [(len(labels) * index // num_blocks, len(labels) * (index + 1) // num_blocks) for index in range(num_blocks)]
    sizes = [
        min(end - start, num_val // num_blocks + (index < num_val % num_blocks)) for index, (start, end) in enumerate(stretches)
    ]
    counts: Counter[int] = Counter(label for held in labels for label in held)
    rng = np.random.default_rng([seed, SPLIT_STREAM])
    best: tuple[float, list[tuple[int, int]]] | None = None
    for _ in range(NUM_ARRANGEMENTS):
        starts = [int(rng.integers(start, end - size + 1)) for (start, end), size in zip(stretches, sizes, strict=True)]
        blocks = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        held: Counter[int] = Counter(label for start, end in blocks for its in labels[start:end] for label in its)
        distance = sum(abs(held[label] / num_val - count / len(labels)) for label, count in counts.items())
        if best is None or distance < best[0] - 1e-9:
            best = distance, blocks
    assert best is not None  # there is at least one arrangement
    return best[1]


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path, seconds: float = SECONDS) -> tuple[Pair, ...]:
    """The pairs with their groups: what the pattern matches in the path inside data_dir, or its first bracket if it has one.

    The pattern is the user's, and some take years for one name: it is matched in a child process, which can be killed.
    """
    paths, compiled = [pair.path_in(data_dir) for pair in pairs], re.compile(composed(pattern))
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]

    def match(chunk: Sequence[str], _: ReadStderr) -> list[str | None]:
        found = [compiled.search(path) for path in chunk]
        return [None if match is None else match.group(1 if compiled.groups else 0) or "" for match in found]

    groups: list[str | None] = []
    for index, outcome in forked_map(match, chunks, 1, timeout=seconds):
        if isinstance(outcome, Crash):
            raise DataError(
                f"group_pattern: {pattern!r} has not decided after {seconds:g} s about {first_few(chunks[index], 2)}; a "
                r"repeat inside of a repeat, like (a+)+, takes for ever where nothing matches: use a simpler one, e.g. ^([^_]+)_"
            )
        groups += outcome
    unmatched = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if unmatched:
        raise DataError(
            f"group_pattern: {pattern!r} matches nothing in {len(unmatched)} of {len(pairs)} paths, such as {first_few(unmatched)}"
        )
    return tuple(replace(pair, group=group or "") for pair, group in zip(pairs, groups, strict=True))


# The order of a sequence


class Place(NamedTuple):
    """Where an image lies among its neighbours. Sorted, places are in the order in which the images were taken."""

    sequence: tuple[tuple[int, int | str], ...]  # sortable; equal for the images of one sequence
    number: int


def places_of(names: Sequence[str]) -> list[Place]:
    """The sequence and number of each name. Of several numbers in a name, the one that forms the longest runs counts."""
    by_template: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        by_template[NUMBER.sub("#", _stem(name))].append(index)
    places: list[Place] = [Place((), 0)] * len(names)
    for members in by_template.values():
        numbers = {index: [int(found) for found in NUMBER.findall(_stem(names[index]))] for index in members}
        position = _counter_position(list(numbers.values()))
        for index in members:
            counter = numbers[index][position] if position is not None else 0
            places[index] = Place(_without_number(names[index], position), counter)
    return places


def _stem(name: str) -> str:
    return PurePosixPath(name).name


def _counter_position(numbers: Sequence[Sequence[int]]) -> int | None:
    """Which of the numbers counts: with the others fixed, it has runs of MIN_RUN or more; the last one if several are alike."""
    best, position = -1, None
    for candidate in range(len(numbers[0])):
        runs = Counter((*found[:candidate], *found[candidate + 1 :]) for found in numbers)
        in_runs = sum(count for count in runs.values() if count >= MIN_RUN)
        if in_runs >= best:
            best, position = in_runs, candidate
    return position


def _without_number(name: str, position: int | None) -> tuple[tuple[int, int | str], ...]:
    """The name in parts that sort as people count (2 before 10), without one of the numbers of its last part."""
    pieces = re.split(r"(\d+)", _stem(name))  # numbers at odd places
    if position is not None:
        pieces[2 * position + 1] = "#"
    texts = (str(PurePosixPath(name).parent), "/", "".join(pieces))
    parts = [part for text in texts for part in re.split(r"(\d+)", text) if part]
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def in_order(places: Sequence[Place]) -> list[int]:
    """Indices in the order of the places."""
    return sorted(range(len(places)), key=lambda index: places[index])
