"""Which pairs train and which validate: seeded and stratified by class, groups and identical images together; or
contiguous blocks of a sequence; or blocks of pixels, for an image that is alone. Opens no file."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.dataset_notices import Finding
from unet_trainer.data.listing import resolved
from unet_trainer.data.pairs import FoundPairs, Pair, Part, Question, composed, first_few
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system.console import counted

SPLIT_STREAM = 1  # part of the seed: random numbers of the split are independent of those of the batches
MAX_UNIT = 0.5  # of the images that stay together as near-duplicates: more are a scene that stands
MAX_BLOCKS, MIN_BLOCK = 5, 10  # split: blocks validates on so many blocks at most, of so many images at least
GAP_SHARE, MAX_GAP = 0.2, 25  # images left out on both sides of a block: a share of its length
NUM_ARRANGEMENTS = 64  # of blocks that are tried
NUM_IMAGE_BLOCKS, MIN_IMAGE_BLOCKS = 20, 4  # that one image is cut into, unless their sides would be
IMAGE_BLOCK_SIDES = 256, 1024  # shorter or longer than this, about
IMAGE_GAP = 8  # between blocks of train and val: the shorter side of a block divided by this
MIN_RUN = 3  # images in a row that make a sequence
NUMBER = re.compile(r"(\d+)")
BY_HAND = "split_file=FILE.csv divides them as you say"
OF_ONE_IMAGE = "train and val are parts of one image: on other images the model is likely worse than val_iou"
UNUSED = "unused"  # split of the pairs that neither train nor validate nor test

Labels = Sequence[Iterable[int]]  # the classes in the mask of each pair
Sides = tuple[int, int, int, int]  # top, left, bottom and right of a block of pixels


@dataclass(frozen=True)
class Split:
    """The pairs of training and of validation, how they were chosen, and what the user should know about it."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    rule: str
    notices: tuple[Finding, ...] = ()
    test: tuple[Pair, ...] = ()  # for `evaluate`; training does not touch them
    unused: tuple[Pair, ...] = ()  # left out of both: the gaps between blocks, training images that also validate


def describe_split(split: Split) -> str:
    """8 train, 2 val; and what is kept for evaluate."""
    kept = f", {len(split.test)} test kept for evaluate" if split.test else ""
    return f"{len(split.train)} train, {len(split.val)} val{kept}"


def build_split(
    config: Config,
    found: FoundPairs,
    labels: Labels,
    digests: Sequence[str],
    near_duplicates: Sequence[tuple[int, int]] = (),
) -> Split:
    """Splits the pairs. Images with the same digest, and near-duplicates (two indices each) unless that leaves too
    little choice, stay together. Raises DataError."""
    if found.is_divided:
        return _split_as_divided(config, found, digests)
    if config.split == "blocks":
        return _split_into_blocks(config, found, labels, digests)
    units = _group_pairs(found.pairs, digests, near_duplicates)
    if len(units) < max(2, config.num_folds or 0) or max(map(len, units)) > MAX_UNIT * len(found.pairs):
        units = _group_pairs(found.pairs, digests)
    return _split_at_random(config, found, units, labels, digests)


def _divide(
    found: FoundPairs, parts: Sequence[str | None], digests: Sequence[str], rule: str, *notices: Finding
) -> Split:
    """The pairs by their parts: train, val or UNUSED. A training image that also validates is left out."""
    by_part: dict[str | None, list[Pair]] = defaultdict(list)
    validating = {digest for part, digest in zip(parts, digests, strict=True) if part == "val"} - {""}
    for pair, part, digest in zip(found.pairs, parts, digests, strict=True):
        by_part["identical" if part == "train" and digest in validating else part].append(pair)
    identical = by_part["identical"]
    notices = (Finding("also validate", [pair.shown_image for pair in identical]), *notices)
    train, val, unused = (tuple(by_part[part]) for part in ("train", "val", UNUSED))
    return Split(train, val, rule, tuple(filter(None, notices)), found.test, (*unused, *identical))


def _split_as_divided(config: Config, found: FoundPairs, digests: Sequence[str]) -> Split:
    """Takes the parts as the data has them. A group on both sides is an error."""
    if config.num_folds is not None or config.split == "blocks":
        key = "split: blocks" if config.num_folds is None else "num_folds"
        raise DataError(f"{key}: the data is already divided into train and val ({found.rule}); leave {key} out")
    if all(pair.part == "val" for pair in found.pairs):
        raise DataError(f"every pair validates and none trains ({found.rule}); need train as well; {BY_HAND}")
    train, val = ({pair.group for pair in found.pairs if pair.part == part} for part in ("train", "val"))
    if shared := sorted((train & val) - {""}):
        what = f"{counted(len(shared), 'group')} in train and in val: {first_few(shared)}"
        raise DataError(f"{what}; put each on one side; {BY_HAND}")
    for both in _find_overlaps(found.pairs):
        one, other = sorted((found.pairs[index] for index in both), key=lambda pair: pair.part != "train")
        if one.part != other.part:
            raise DataError(f"{one.shown_image} is in train, and some of its pixels are in val; move one of the boxes")
    split = _divide(found, [pair.part for pair in found.pairs], digests, found.rule)
    if not split.train:
        raise DataError(f"every training image also validates (the files are identical); {BY_HAND}")
    return split


def _find_overlaps(pairs: Sequence[Pair]) -> Iterator[tuple[int, int]]:
    """Pairs that share pixels of one image: two boxes, or a box and the whole."""
    by_image: dict[Path, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs if any(pair.box for pair in pairs) else ()):
        by_image[resolved(pair.user_files[0])].append(index)
    for both in (both for its in by_image.values() for both in combinations(its, 2)):
        boxes = [box for index in both if (box := pairs[index].box) is not None]
        if len(boxes) == 1 or (len(boxes) == 2 and boxes[0].overlaps(boxes[1])):
            yield both


def _split_at_random(
    config: Config, found: FoundPairs, units: Sequence[Sequence[int]], labels: Labels, digests: Sequence[str]
) -> Split:
    """A share of the pairs validates, or one of several folds. `units`: indices of pairs that stay together."""
    num_pairs, num_folds, fold = len(found.pairs), config.num_folds, config.fold
    needed = max(2, num_folds or 0)
    if len(units) < needed:
        alike = "or with identical images, or boxes that overlap"
        grouped = f" in {counted(len(units), 'group')} ({alike}); {BY_HAND}" if len(units) < num_pairs else ""
        side = IMAGE_BLOCK_SIDES[0]
        room = f", or one image with room for {MIN_IMAGE_BLOCKS} blocks of {side}×{side}" if num_pairs == 1 else ""
        raise DataError(f"need at least {needed} pairs{room}; got {counted(num_pairs, 'pair')}{grouped}")
    if num_folds is None:
        num_val = min(max(1, round(num_pairs * config.val_fraction)), num_pairs - 1)
        how, fold, sizes = f"val_fraction {config.val_fraction:g}", 1, [num_pairs - num_val, num_val]
    else:
        how = f"fold {fold} of {num_folds}"
        sizes = [num_pairs // num_folds + (index < num_pairs % num_folds) for index in range(num_folds)]
    parts = ["train"] * num_pairs
    for unit, side in zip(units, assign(units, labels, sizes, config.seed), strict=True):
        for index in unit if side == fold else ():
            parts[index] = "val"
    num_groups = len({pair.group for pair in found.pairs} - {""})
    grouped = f", {counted(num_groups, 'group')} kept together" if num_groups else ""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for pair, digest in zip(found.pairs, digests, strict=True):
        by_digest[digest].append(pair.shown_image)
    identical = [images for digest, images in by_digest.items() if digest and len(images) > 1]
    rule = f"{found.rule}; {how}, seed {config.seed}{grouped}"
    return _divide(found, parts, digests, rule, Finding("identical", identical))


def _group_pairs(
    pairs: Sequence[Pair], digests: Sequence[str], near_duplicates: Sequence[tuple[int, int]] = ()
) -> list[list[int]]:
    """Indices of pairs that share a group, an image, near-duplicates or pixels, also through others (union-find)."""
    parents = list(range(len(pairs)))

    def find_root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    first: dict[tuple[str, str], int] = {}
    keys = ((("group", pair.group), ("image", digest)) for pair, digest in zip(pairs, digests, strict=True))
    links = ((index, first.setdefault(key, index)) for index, both in enumerate(keys) for key in both if key[1])
    for one, other in (*links, *_find_overlaps(pairs), *near_duplicates):
        parents[find_root(one)] = find_root(other)
    units: dict[int, list[int]] = defaultdict(list)
    for index in range(len(pairs)):
        units[find_root(index)].append(index)
    return [units[index] for index in sorted(units)]


def assign(units: Sequence[Sequence[int]], labels: Labels, sizes: Sequence[int], seed: int) -> list[int]:
    """The side of each unit (indices of pairs that stay together), so that sides get their size and class shares.

    Iterative stratification (Sechidis et al., 2011), with units of several pairs: class by class, the rarest first,
    each unit goes to the side that lacks most of that class."""
    free = [float(size) for size in sizes]  # pairs that each side still lacks
    holding = [Counter(label for index in unit for label in labels[index]) for unit in units]  # pairs of each class
    counts: Counter[int] = sum(holding, Counter())
    wanted = {label: [count * size / sum(sizes) for size in sizes] for label, count in counts.items()}
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(units)).tolist()
    order.sort(key=lambda index: -len(units[index]))  # large units first, while no side is full
    sides = [-1] * len(units)
    for label in [*sorted(counts, key=lambda label: (counts[label], label)), None]:
        for index in order:
            if sides[index] >= 0 or (label is not None and label not in holding[index]):
                continue
            lacking = wanted[label] if label is not None else [0.0] * len(sizes)
            open_sides = [side for side in range(len(sizes)) if free[side] > 0] or range(len(sizes))
            sides[index] = side = max(open_sides, key=lambda side: (lacking[side], free[side], -side))
            free[side] -= len(units[index])
            for held, count in holding[index].items():
                wanted[held][side] -= count
    for empty in sorted({*range(len(sizes))} - {*sides}):  # the smallest unit of a side that has several
        shared = [index for index, side in enumerate(sides) if sides.count(side) > 1]
        sides[min(shared, key=lambda index: len(units[index]))] = empty
    return sides


def _split_into_blocks(config: Config, found: FoundPairs, labels: Labels, digests: Sequence[str]) -> Split:
    """Contiguous blocks in the order of the names validate; their neighbours neither train nor validate."""
    num_pairs, num_folds, fold = len(found.pairs), config.num_folds, config.fold
    if any(pair.group for pair in found.pairs):
        what = "split: blocks divides a sequence, and the pairs have groups that stay together"
        raise DataError(f"{what}; leave one of them out")
    what = f"{counted(num_pairs, 'pair')} are too few to train on, to validate on and to leave a gap between"
    too_few = Question(f"split: blocks: {what}", {"split": "random"})
    if num_pairs < max(3, num_folds or 0):  # one to train on, one to validate on and one between them
        raise too_few
    places = places_of([pair.name for pair in found.pairs])
    order = sorted(range(num_pairs), key=places.__getitem__)
    if num_folds is None:
        how = f"val_fraction {config.val_fraction:g}, seed {config.seed}"
        num_val = min(max(1, round(num_pairs * config.val_fraction)), num_pairs - 2)
        blocks = _choose_blocks([set(labels[index]) for index in order], num_val, config.seed)
    else:
        how = f"fold {fold} of {num_folds}"
        blocks = [(num_pairs * fold // num_folds, num_pairs * (fold + 1) // num_folds)]
    gap = max(1, min(MAX_GAP, round(GAP_SHARE * max(end - start for start, end in blocks))))
    parts = ["train"] * num_pairs
    for start, end in blocks:
        for position in range(max(0, start - gap), min(num_pairs, end + gap)):
            nearest = min(max(position, start), end - 1)  # of the block
            if places[order[position]].sequence == places[order[nearest]].sequence:
                parts[order[position]] = UNUSED
    for position in (position for start, end in blocks for position in range(start, end)):
        parts[order[position]] = "val"
    rule = f"{found.rule}; split: blocks, {how}: {counted(len(blocks), 'block')} of val"
    split = _divide(found, parts, digests, rule, Finding("gaps", parts.count(UNUSED)))
    if not split.train:
        raise too_few
    return split


def _choose_blocks(labels: Sequence[set[int]], num_val: int, seed: int) -> list[tuple[int, int]]:
    """Start and end of the blocks that validate: one in each of several stretches, where classes are most like all."""
    num_blocks = max(1, min(MAX_BLOCKS, num_val // MIN_BLOCK))
    stretches = list(pairwise(len(labels) * index // num_blocks for index in range(num_blocks + 1)))
    wanted = [num_val // num_blocks + (index < num_val % num_blocks) for index in range(num_blocks)]
    sizes = [min(end - start, size) for (start, end), size in zip(stretches, wanted, strict=True)]
    counts = Counter(label for its in labels for label in its)
    rng, tried = np.random.default_rng([seed, SPLIT_STREAM]), []
    for _ in range(NUM_ARRANGEMENTS):
        starts = [int(rng.integers(start, end - size + 1)) for (start, end), size in zip(stretches, sizes, strict=True)]
        blocks = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        held = Counter(label for start, end in blocks for its in labels[start:end] for label in its)
        distance = sum(abs(held[label] / num_val - count / len(labels)) for label, count in counts.items())
        tried.append((round(distance, 9), blocks))
    return min(tried, key=lambda one: one[0])[1]


class Place(NamedTuple):
    """Where an image lies among its neighbours. Sorted, places are in the order in which the images were taken."""

    sequence: tuple[tuple[int, int | str], ...]  # sortable; equal for the images of one sequence
    number: int


def places_of(names: Sequence[str]) -> list[Place]:
    """The sequence and number of each name; of several numbers, the one that forms the longest runs counts."""
    pieces = [NUMBER.split(PurePosixPath(name).name) for name in names]  # numbers at odd places
    by_template: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, its in enumerate(pieces):
        by_template[tuple(its[::2])].append(index)
    counters = {}  # of each template, the piece that counts: the last of those with most names in runs
    for template, members in by_template.items():
        numbers = [tuple(map(int, pieces[index][1::2])) for index in members]
        # Names that differ in this number only.
        runs = [Counter((*its[:place], *its[place + 1 :]) for its in numbers) for place in range(len(template) - 1)]
        in_runs = [sum(count for count in each.values() if count >= MIN_RUN) for each in runs]
        counters[template] = max(range(len(runs)), key=lambda place: (in_runs[place], place), default=None)
    places = []
    for name, its in zip(names, pieces, strict=True):
        counter, number = counters[tuple(its[::2])], 0
        if counter is not None:
            number, its[2 * counter + 1] = int(its[2 * counter + 1]), "#"
        # In parts that sort as people count: 2 before 10.
        texts = (str(PurePosixPath(name).parent), "/", "".join(its))
        parts = [part for text in texts for part in NUMBER.split(text) if part]
        places.append(Place(tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts), number))
    return places


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path) -> tuple[Pair, ...]:
    """The pairs with their groups: the pattern's match in the path, or its first bracket. Raises DataError."""
    compiled = re.compile(composed(pattern))
    paths = [pair.path_in(data_dir) for pair in pairs]
    groups = [match[min(1, compiled.groups)] if (match := compiled.search(path)) else "" for path in paths]
    if unmatched := [path for path, group in zip(paths, groups, strict=True) if not group]:
        what = f"matches nothing in {len(unmatched)} of {len(pairs)} paths, such as {first_few(unmatched)}"
        raise DataError(f"group_pattern: {'the first bracket of ' * bool(compiled.groups)}{pattern!r} {what}")
    return tuple(replace(pair, group=group) for pair, group in zip(pairs, groups, strict=True))


def choose_image_blocks(
    ids: Pixels, val_fraction: float, seed: int
) -> tuple[dict[Part, list[Sides]], tuple[int, int], int] | None:
    """Divides an image by the class ids of its mask; None if it is too small. Top, left, bottom and right of the blocks
    that train and that validate, the height and width of most of them, and the gap between train and val.

    Blocks are cells of a grid; those that train are cut back by the gap where they meet one that validates. Of several
    choices, the one with fewest classes that a side lacks, and then with shares of classes most like the image's."""
    side = min(max(math.sqrt(ids.size / NUM_IMAGE_BLOCKS), IMAGE_BLOCK_SIDES[0]), IMAGE_BLOCK_SIDES[1])
    numbers = [max(1, round(length / side)) for length in ids.shape]
    size = ids.shape[0] // numbers[0], ids.shape[1] // numbers[1]
    gap = min(size) // IMAGE_GAP
    grid = [[length * index // num for index in range(num + 1)] for length, num in zip(ids.shape, numbers, strict=True)]
    # Each cell in 3×3 parts, the outer ones as wide as the gap: rows,3,columns,3,classes of numbers of pixels.
    down, across = ([start + d for start, end in pairwise(its) for d in (0, gap, end - start - gap)] for its in grid)
    lines = [*pairwise([*down, ids.shape[0]])], [*pairwise([*across, ids.shape[1]])]
    parts = [ids[top:bottom, left:right] for top, bottom in lines[0] for left, right in lines[1]]
    counts = np.array([np.bincount(part.ravel(), minlength=256)[:IGNORED] for part in parts])
    total = counts.sum(0)
    counts = counts[:, total > 0].reshape(numbers[0], 3, numbers[1], 3, -1)
    usable = np.flatnonzero(counts.any((1, 3, 4)))
    if len(usable) < MIN_IMAGE_BLOCKS:
        return None
    num_val = min(max(1, round(len(usable) * val_fraction)), len(usable) - 1)
    total, rng = total[total > 0], np.random.default_rng([seed, SPLIT_STREAM])
    tried: list[tuple[int, float, Pixels]] = []
    for _ in range(NUM_ARRANGEMENTS):
        is_val = np.zeros(numbers, np.bool_)
        is_val.flat[rng.permutation(usable)[:num_val]] = True
        is_train = np.tile(~is_val[:, None, :, None], (1, 3, 1, 3))
        top, bottom, left, right = ~_cut_sides(is_val)
        is_train[:, 0] &= top[..., None]
        is_train[:, 2] &= bottom[..., None]
        is_train[..., 0] &= left[:, None]
        is_train[..., 2] &= right[:, None]
        train, val = counts[is_train].sum(0), counts.sum((1, 3))[is_val].sum(0)
        difference = np.abs(val / max(1, val.sum()) - total / total.sum()).sum()
        tried.append((int(((val == 0) | (train == 0)).sum()), round(float(difference), 9), is_val))
    *_, is_val = min(tried, key=lambda one: one[:2])
    cut = gap * _cut_sides(is_val).astype(int)
    blocks: dict[Part, list[Sides]] = {"train": [], "val": []}
    for row, column in (divmod(int(place), numbers[1]) for place in usable):
        top, bottom, left, right = cut[:, row, column].tolist()
        box = grid[0][row] + top, grid[1][column] + left, grid[0][row + 1] - bottom, grid[1][column + 1] - right
        blocks["val" if is_val[row, column] else "train"].append(box)
    return blocks, size, gap


def _cut_sides(is_val: Pixels) -> Pixels:
    """4,rows,columns: whether a cell that trains is cut back at its top, bottom, left and right; at a corner of one of
    val, at its top or bottom."""
    around = np.pad(is_val, 1)
    above, here, below = around[:-2], around[1:-1], around[2:]
    left, right = here[:, :-2], here[:, 2:]
    top, bottom = (row[:, 1:-1] | (row[:, :-2] & ~left) | (row[:, 2:] & ~right) for row in (above, below))
    return np.stack([top, bottom, left, right]) & ~is_val
