"""Which pairs train and which validate: seeded and stratified by class. Pairs of a group, and identical images, stay
together.

Or contiguous blocks of a sequence, for images that are like their neighbours; or blocks of pixels, for an image that is
alone. And the split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv
of a run, which has the names of the pairs and digests of their content besides, and the boxes of blocks. Names that are
not UTF-8 are written there as the bytes that they are, and read back.
"""

import contextlib
import csv
import io
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.datasets.converted import Converter, cut_blocks
from unet_trainer.datasets.listing import Listing, resolved, walk
from unet_trainer.datasets.name_matching import PARTS
from unet_trainer.datasets.pairs import NUM_NAMED, Box, FoundPairs, Pair, Part, Question, composed, first_few, path_in
from unet_trainer.images.file_bytes import DataError, is_file
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system import input_files
from unet_trainer.system.concurrency import Crash, ReadStderr, forked_map
from unet_trainer.system.console import UNDECODED, counted, csv_line
from unet_trainer.system.input_files import read_text

SPLIT_STREAM = 1  # part of the seed: random numbers of the split are independent of those of the batches
MAX_BLOCKS, MIN_BLOCK = 5, 10  # split: blocks validates on so many blocks at most, of so many images at least
GAP_SHARE, MAX_GAP = 0.2, 25  # images left out on both sides of a block: a share of its length
BY_HAND = "split_file=FILE.csv divides them as you say"
SECONDS = 60.0  # in which group_pattern must match all paths; ordinary ones take a microsecond each
NUM_ARRANGEMENTS = 64  # of blocks that are tried
NUM_IMAGE_BLOCKS, MIN_IMAGE_BLOCKS = 20, 4  # that one image is cut into, unless their sides would be
IMAGE_BLOCK_SIDES = 256, 1024  # shorter or longer than this, about
OF_ONE_IMAGE = "train and val are parts of one image: on other images the model is likely worse than val_iou"
IMAGE_GAP = 8  # between blocks of train and val: the shorter side of a block divided by this
NUMBER = re.compile(r"\d+")
MIN_RUN = 3  # images in a row that make a sequence
MAX_UNIT = 0.5  # of the images that stay together as near-duplicates: more are a scene that stands
COLUMNS = ("image", "mask", "split", "group", "name", "content")
BOX = "box"  # a further column, where there are blocks of images: top, left, bottom and right in pixels
UNUSED = "unused"  # split of the rows that neither train nor validate nor test
MAX_BYTES = 256 * 2**20
MAX_TABLES, MAX_HEADER = 100, 2**12  # files that are looked at for a table that is not read, and bytes of each
NOT_UTF8 = "The file is not UTF-8 text, as some programs save CSV files; save it as UTF-8"


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


def build_split(
    config: Config,
    found: FoundPairs,
    labels: Sequence[Iterable[int]],
    digests: Sequence[str],
    near_duplicates: Sequence[tuple[int, int]] = (),
) -> Split:
    """Splits the pairs. `labels` are the classes in each mask; images with the same digest are identical.
    Near-duplicates, two indices each, stay together unless that leaves too little choice. Raises DataError."""
    num_pairs, num_folds, fold, in_blocks = len(found.pairs), config.num_folds, config.fold, config.split == "blocks"
    how = f"fold {fold} of {num_folds}" if num_folds else f"val_fraction {config.val_fraction:g}, seed {config.seed}"
    if found.is_divided:
        for key, is_set in (("num_folds", num_folds is not None), ("split: blocks", in_blocks)):
            if is_set:
                what = f"the data is already divided into train and val ({found.rule})"
                raise DataError(f"{key}: {what}; leave {key} out")
        return _split_as_divided(found, digests)
    if in_blocks:
        if any(pair.group for pair in found.pairs):
            what = "split: blocks divides a sequence, and the pairs have groups that stay together"
            raise DataError(f"{what}; leave one of them out")
        return _split_into_blocks(config, found, labels, digests, how)
    units, needed = _group_pairs(found.pairs, digests, near_duplicates), max(2, num_folds or 0)
    if len(units) < needed or max(map(len, units)) > MAX_UNIT * num_pairs:
        units = _group_pairs(found.pairs, digests)
    if len(units) < needed:
        alike = "or with identical images, or boxes that overlap"
        grouped = f" in {counted(len(units), 'group')} ({alike}); {BY_HAND}" if len(units) < num_pairs else ""
        side = IMAGE_BLOCK_SIDES[0]
        room = f", or one image with room for {MIN_IMAGE_BLOCKS} blocks of {side}×{side}" if num_pairs == 1 else ""
        raise DataError(f"need at least {needed} pairs{room}; got {counted(num_pairs, 'pair')}{grouped}")
    if num_folds is None:
        num_val = min(max(1, round(num_pairs * config.val_fraction)), num_pairs - 1)
        fold, sizes = 1, [num_pairs - num_val, num_val]
    else:
        how += f", seed {config.seed}"
        sizes = [num_pairs // num_folds + (index < num_pairs % num_folds) for index in range(num_folds)]
    sides = assign(units, labels, sizes, config.seed)
    held_out = {index for unit, side in zip(units, sides, strict=True) if side == fold for index in unit}
    num_groups = len({pair.group for pair in found.pairs} - {""})
    grouped = f", {counted(num_groups, 'group')} kept together" if num_groups else ""
    parts = ["val" if index in held_out else "train" for index in range(num_pairs)]
    return _divide(found, parts, digests, f"{found.rule}; {how}{grouped}", *_describe_identical(found.pairs, digests))


def _divide(found: FoundPairs, parts: Sequence[str | None], digests: Sequence[str], rule: str, *notices: str) -> Split:
    """The pairs by their parts: train, val or UNUSED. A training image that also validates is left out."""
    by_part: dict[str | None, list[Pair]] = defaultdict(list)
    validating = {digest for part, digest in zip(parts, digests, strict=True) if part == "val"} - {""}
    for pair, part, digest in zip(found.pairs, parts, digests, strict=True):
        by_part["identical" if part == "train" and digest in validating else part].append(pair)
    if identical := by_part["identical"]:
        what = f"{counted(len(identical), 'training image')} left out, identical to a validation image"
        notices = (f"{what}: {first_few(pair.shown_image for pair in identical)}", *notices)
    return Split(
        tuple(by_part["train"]), tuple(by_part["val"]), rule, notices, found.test, (*by_part[UNUSED], *identical)
    )


def assign(
    units: Sequence[Sequence[int]], labels: Sequence[Iterable[int]], sizes: Sequence[int], seed: int
) -> list[int]:
    """The side of each unit, so that every side gets about its size and its share of each class. A unit: indices of
    pairs that stay together. `labels`: the classes that each pair holds.

    Iterative stratification (Sechidis et al., 2011), with units of several pairs: class by class, the rarest first,
    each unit goes to the side that lacks most of that class. The same units and seed give the same sides on every
    machine."""
    total = sum(sizes)
    free = [float(size) for size in sizes]  # pairs that each side still lacks
    holding = [Counter(label for index in unit for label in labels[index]) for unit in units]  # pairs of each class
    counts: Counter[int] = sum(holding, Counter())
    wanted = {label: [count * size / total for size in sizes] for label, count in counts.items()}
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(units)).tolist()
    order.sort(key=lambda index: -len(units[index]))  # large units first, while no side is full
    sides = [-1] * len(units)
    for label in [*sorted(counts, key=lambda label: (counts[label], label)), None]:
        for index in order:
            if sides[index] >= 0 or (label is not None and label not in holding[index]):
                continue
            open_sides = [side for side in range(len(sizes)) if free[side] > 0] or list(range(len(sizes)))
            sides[index] = max(
                open_sides, key=lambda side: (0.0 if label is None else wanted[label][side], free[side], -side)
            )
            free[sides[index]] -= len(units[index])
            for held, count in holding[index].items():
                wanted[held][sides[index]] -= count
    for empty in sorted(set(range(len(sizes))) - set(sides)):  # the smallest unit of a side that has several
        shared = [index for index, side in enumerate(sides) if sides.count(side) > 1]
        sides[min(shared, key=lambda index: len(units[index]))] = empty
    return sides


def _group_pairs(
    pairs: Sequence[Pair], digests: Sequence[str], near_duplicates: Sequence[tuple[int, int]] = ()
) -> list[list[int]]:
    """Indices of pairs that share a group, an image, near-duplicates or pixels, directly or through other pairs
    (union-find)."""
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
    index_of = {pair: index for index, pair in enumerate(pairs)}
    overlapping = [(index_of[one], index_of[other]) for one, other in _find_overlaps(pairs)]
    for one, other in (*overlapping, *near_duplicates):
        parents[find_root(one)] = find_root(other)
    units: dict[int, list[int]] = defaultdict(list)
    for index in range(len(pairs)):
        units[find_root(index)].append(index)
    return [units[index] for index in sorted(units)]


def _split_as_divided(found: FoundPairs, digests: Sequence[str]) -> Split:
    """Takes the parts as the data has them. A group on both sides is an error."""
    if all(pair.part == "val" for pair in found.pairs):
        raise DataError(f"every pair validates and none trains ({found.rule}); need train as well; {BY_HAND}")
    train, val = ({pair.group for pair in found.pairs if pair.part == part} for part in ("train", "val"))
    if shared := sorted((train & val) - {""}):
        what = f"{counted(len(shared), 'group')} in train and in val: {first_few(shared)}"
        raise DataError(f"{what}; put each on one side; {BY_HAND}")
    for one, other in _find_overlaps(found.pairs):
        if one.part != other.part:
            pair = one if one.part == "train" else other
            raise DataError(f"{pair.shown_image} is in train, and some of its pixels are in val; move one of the boxes")
    split = _divide(found, [pair.part for pair in found.pairs], digests, found.rule)
    if not split.train:
        raise DataError(f"every training image also validates (the files are identical); {BY_HAND}")
    return split


def _find_overlaps(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Pair]]:
    """Pairs that share pixels of one image: two boxes, or a box and the whole."""
    by_image: dict[Path, list[Pair]] = defaultdict(list)
    boxed = {resolved(pair.box.image) for pair in pairs if pair.box is not None}
    for pair in pairs if boxed else ():
        if (image := resolved(pair.user_files[0])) in boxed:
            by_image[image].append(pair)
    for its in by_image.values():
        whole = [pair for pair in its if pair.box is None]
        yield from ((one, other) for one in whole for other in its if other is not one)
        above: list[tuple[Box, Pair]] = []  # boxes that reach down to where the next begins
        boxes = [(pair.box, pair) for pair in its if pair.box is not None]
        for box, pair in sorted(boxes, key=lambda item: item[0].top):
            above = [item for item in above if item[0].bottom > box.top]
            yield from ((other, pair) for other_box, other in above if other_box.overlaps(box))
            above.append((box, pair))


def _describe_identical(pairs: Sequence[Pair], digests: Sequence[str]) -> tuple[str, ...]:
    by_digest: dict[str, list[str]] = defaultdict(list)
    for pair, digest in zip(pairs, digests, strict=True):
        by_digest[digest].append(pair.shown_image)
    identical = [images for digest, images in by_digest.items() if digest and len(images) > 1]
    shown = first_few((" = ".join(images[:3]) for images in identical), 2)
    what = f"{sum(map(len, identical))} images are identical to another one"
    return (f"{what}; identical images stay on one side: {shown}",) if identical else ()


def _split_into_blocks(
    config: Config, found: FoundPairs, labels: Sequence[Iterable[int]], digests: Sequence[str], how: str
) -> Split:
    """Contiguous blocks in the order of the names validate; their neighbours on both sides neither train nor
    validate."""
    num_pairs, num_folds, fold = len(found.pairs), config.num_folds, config.fold
    too_few_for = "are too few to train on, to validate on and to leave a gap between"
    too_few = Question(f"split: blocks: {counted(num_pairs, 'pair')} {too_few_for}", {"split": "random"})
    if num_pairs < max(3, num_folds or 0):  # one to train on, one to validate on and one between them
        raise too_few
    places = places_of([pair.name for pair in found.pairs])
    order = sorted(range(num_pairs), key=places.__getitem__)
    blocks = [(num_pairs * fold // (num_folds or 1), num_pairs * (fold + 1) // (num_folds or 1))]
    if num_folds is None:
        num_val = min(max(1, round(num_pairs * config.val_fraction)), num_pairs - 2)
        blocks = _choose_blocks([set(labels[index]) for index in order], num_val, config.seed)
    gap = max(1, min(MAX_GAP, round(GAP_SHARE * max(end - start for start, end in blocks))))
    val = {order[position] for start, end in blocks for position in range(start, end)}
    around = {
        order[near]
        for start, end in blocks
        for position, step in ((start, -1), (end - 1, 1))
        for near in range(position + step, position + step * (gap + 1), step)
        if 0 <= near < num_pairs
        and order[near] not in val
        and places[order[near]].sequence == places[order[position]].sequence
    }
    parts = ["val" if index in val else UNUSED if index in around else "train" for index in range(num_pairs)]
    gaps = (f"{counted(len(around), 'pair')} between the blocks of train and val left out, as a gap",) if around else ()
    rule = f"{found.rule}; split: blocks, {how}: {counted(len(blocks), 'block')} of val"
    split = _divide(found, parts, digests, rule, *gaps)
    if not split.train:
        raise too_few
    return split


def _choose_blocks(labels: Sequence[set[int]], num_val: int, seed: int) -> list[tuple[int, int]]:
    """Start and end of the blocks that validate: one in each of several equal stretches, at places where their classes
    are most like those of all images."""
    num_blocks = max(1, min(MAX_BLOCKS, num_val // MIN_BLOCK))
    stretches = list(pairwise(len(labels) * index // num_blocks for index in range(num_blocks + 1)))
    wanted = [num_val // num_blocks + (index < num_val % num_blocks) for index in range(num_blocks)]
    sizes = [min(end - start, size) for (start, end), size in zip(stretches, wanted, strict=True)]
    counts: Counter[int] = Counter(label for held in labels for label in held)
    rng, tried = np.random.default_rng([seed, SPLIT_STREAM]), []
    for _ in range(NUM_ARRANGEMENTS):
        starts = [int(rng.integers(start, end - size + 1)) for (start, end), size in zip(stretches, sizes, strict=True)]
        blocks = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        held: Counter[int] = Counter(label for start, end in blocks for its in labels[start:end] for label in its)
        distance = sum(abs(held[label] / num_val - count / len(labels)) for label, count in counts.items())
        tried.append((round(distance, 9), blocks))
    return min(tried, key=lambda one: one[0])[1]


def choose_image_blocks(
    ids: Pixels, val_fraction: float, seed: int
) -> tuple[dict[Part, list[tuple[int, int, int, int]]], tuple[int, int], int] | None:
    """Divides an image by the class ids of its mask; None if it is too small. Top, left, bottom and right of the blocks
    that train and that validate, the height and width of most of them, and the pixels that lie at least between one of
    train and one of val.

    Blocks are the cells of a grid. Those that train are cut back by the gap where they meet one that validates. Of
    several choices, the one with fewest classes that one side lacks, and then with shares of the classes in val most
    like those of the image. Cells with ignored pixels only are left out.
    """
    side = min(max(math.sqrt(ids.size / NUM_IMAGE_BLOCKS), IMAGE_BLOCK_SIDES[0]), IMAGE_BLOCK_SIDES[1])
    numbers = [max(1, round(length / side)) for length in ids.shape]
    size = ids.shape[0] // numbers[0], ids.shape[1] // numbers[1]
    gap = min(size) // IMAGE_GAP
    rows, columns = (
        [length * index // number for index in range(number + 1)]
        for length, number in zip(ids.shape, numbers, strict=True)
    )
    # Each cell in 3×3 parts, the outer ones as wide as the gap: rows,columns,3,3,classes of numbers of pixels.
    down, across = (
        [*(place for start, end in pairwise(edges) for place in (start, start + gap, end - gap)), edges[-1]]
        for edges in (rows, columns)
    )
    parts = [ids[top:bottom, left:right] for top, bottom in pairwise(down) for left, right in pairwise(across)]
    counts = np.array([np.bincount(part.ravel(), minlength=256)[:IGNORED] for part in parts])
    counts = counts[:, counts.any(0)].reshape(numbers[0], 3, numbers[1], 3, -1).swapaxes(1, 2)
    usable = np.flatnonzero(counts.any((2, 3, 4)))
    if len(usable) < MIN_IMAGE_BLOCKS:
        return None
    num_val = min(max(1, round(len(usable) * val_fraction)), len(usable) - 1)
    total, rng = counts.sum((0, 1, 2, 3)), np.random.default_rng([seed, SPLIT_STREAM])
    tried: list[tuple[tuple[int, float], Pixels]] = []
    for _ in range(NUM_ARRANGEMENTS):
        is_val = np.zeros(numbers, np.bool_)
        is_val.flat[rng.permutation(usable)[:num_val]] = True
        top, bottom, left, right = ~_cut_sides(is_val)
        whole = np.ones_like(is_val)
        is_kept = np.stack([top, whole, bottom], -1)[..., None] & np.stack([left, whole, right], -1)[:, :, None]
        val, train = counts[is_val].sum((0, 1, 2)), counts[is_kept & ~is_val[..., None, None]].sum(0)
        difference = np.abs(val / max(1, val.sum()) - total / total.sum()).sum()
        tried.append(((int(((val == 0) | (train == 0)).sum()), round(float(difference), 9)), is_val))
    _, is_val = min(tried, key=lambda one: one[0])
    cut = _cut_sides(is_val)
    blocks: dict[Part, list[tuple[int, int, int, int]]] = {"train": [], "val": []}
    for row, column in zip(*np.unravel_index(usable, is_val.shape), strict=True):
        top, bottom, left, right = (gap * int(its[row, column]) for its in cut)
        box = rows[row] + top, columns[column] + left, rows[row + 1] - bottom, columns[column + 1] - right
        blocks["val" if is_val[row, column] else "train"].append(box)
    return blocks, size, gap


def _cut_sides(is_val: Pixels) -> Pixels:
    """4,rows,columns: whether a cell that trains is cut back at its top, bottom, left and right. Of one that touches a
    cell of val with a corner alone, the top or the bottom is."""
    around = np.pad(is_val, 1)
    above, here, below = around[:-2], around[1:-1], around[2:]
    left, right = here[:, :-2], here[:, 2:]
    top, bottom = (row[:, 1:-1] | (row[:, :-2] & ~left) | (row[:, 2:] & ~right) for row in (above, below))
    return np.stack([top, bottom, left, right]) & ~is_val


class Place(NamedTuple):
    """Where an image lies among its neighbours. Sorted, places are in the order in which the images were taken."""

    sequence: tuple[tuple[int, int | str], ...]  # sortable; equal for the images of one sequence
    number: int


def places_of(names: Sequence[str]) -> list[Place]:
    """The sequence and number of each name. Of several numbers in a name, the one that forms the longest runs
    counts."""
    stems = [PurePosixPath(name).name for name in names]
    by_template: dict[str, list[int]] = defaultdict(list)
    for index, stem in enumerate(stems):
        by_template[NUMBER.sub("#", stem)].append(index)
    places: dict[int, Place] = {}
    for members in by_template.values():
        position = _counter_position([NUMBER.findall(stems[index]) for index in members])
        for index in members:
            pieces, number = re.split(r"(\d+)", stems[index]), 0  # numbers at odd places
            if position is not None:
                number, pieces[2 * position + 1] = int(pieces[2 * position + 1]), "#"
            # In parts that sort as people count: 2 before 10.
            texts = (str(PurePosixPath(names[index]).parent), "/", "".join(pieces))
            parts = [part for text in texts for part in re.split(r"(\d+)", text) if part]
            places[index] = Place(tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts), number)
    return [places[index] for index in range(len(names))]


def _counter_position(numbers: Sequence[Sequence[str]]) -> int | None:
    """Which of the numbers counts: with the others fixed, it has runs of MIN_RUN or more; the last one if several are
    alike."""

    def num_in_runs(candidate: int) -> int:
        runs = Counter(tuple(map(int, (*found[:candidate], *found[candidate + 1 :]))) for found in numbers)
        return sum(count for count in runs.values() if count >= MIN_RUN)

    return max(reversed(range(len(numbers[0]))), key=num_in_runs, default=None)


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path, seconds: float = SECONDS) -> tuple[Pair, ...]:
    """The pairs with their groups: what the pattern matches in the path inside data_dir, or its first bracket if it has
    one.

    The pattern is the user's, and some take years for one name: it is matched in a child process, which can be killed.
    """
    paths, compiled = [pair.path_in(data_dir) for pair in pairs], re.compile(composed(pattern))

    def match(paths: Sequence[str], _: ReadStderr) -> list[str | None]:
        found = [compiled.search(path) for path in paths]
        return [None if match is None else match.group(1 if compiled.groups else 0) or None for match in found]

    ((_, groups),) = forked_map(match, [paths], 1, timeout=seconds)
    if isinstance(groups, Crash):
        why = "a repeat inside of a repeat, like (a+)+, takes for ever where nothing matches"
        what = f"group_pattern: {pattern!r} has not decided after {seconds:g} s about {first_few(paths, 2)}"
        raise DataError(f"{what}; {why}: use a simpler one, e.g. ^([^_]+)_")
    unmatched = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if unmatched:
        what = f"matches nothing in {len(unmatched)} of {len(pairs)} paths, such as {first_few(unmatched)}"
        raise DataError(f"group_pattern: {'the first bracket of ' * bool(compiled.groups)}{pattern!r} {what}")
    return tuple(replace(pair, group=group or "") for pair, group in zip(pairs, groups, strict=True))


def read_split_csv(
    path: Path, data_dir: Path, now: FoundPairs | None = None, converter: Converter | None = None
) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem.

    `now`: pairs that are there. Rows of the same name stand for those whose files were made from others, wherever they
    lie now. The `converter` cuts the blocks out of their images.
    """
    rows = _read_rows(path)
    there = (*now.pairs, *now.test) if now else ()
    made = {pair.name: pair for pair in there if pair.box is None and (pair.image_origin or pair.mask_origin)}
    stored = {file: file for pair in there for file in (pair.image, pair.mask)}  # of shards, those that can be read
    problems, pairs, test, unused = list[str](), list[Pair](), list[Pair](), list[Pair]()
    gone: Counter[Path] = Counter()  # folders, by the number of rows that have files there
    lines: dict[tuple[Path, str], int] = {}
    num_unusable = 0  # rows of test
    for number, row in rows:
        split, place = (row.get(column, "").strip() for column in ("split", BOX))
        part = PARTS.get(split.lower())
        image, mask = (_find_file(data_dir, row.get(column, "")) for column in ("image", "mask"))
        image, mask = stored.get(image, image), stored.get(mask, mask)
        has_name = bool(row.get("name", "").strip())
        name = row["name"] if has_name else path_in(data_dir, image).removesuffix(image.suffix)
        if (known := made.get(name)) is not None:
            image, mask = known.image, known.mask
        if split == UNUSED:
            unused.append(Pair(name, image, mask))
            continue
        is_box = re.fullmatch(r"[0-9]{1,9}( +[0-9]{1,9}){3}", place) is not None
        box, problem = Box(image, mask, *map(int, place.split())) if is_box else None, ""
        if part is None and split:
            problem = f"split {split!r}; need train, val or test"
        elif known is None and not all(row.get(column, "").strip() for column in ("image", "mask")):
            problem = "need an image and a mask"
        elif missing := [file for file in (image, mask) if not is_file(file)]:
            problem = f"no file {' and no file '.join(map(str, missing))}"
            folders = dict.fromkeys(_missing_folder(file, data_dir) for file in missing)
            if part != "test" and None not in folders:
                gone.update(filter(None, folders))
                continue
        elif place and (box is None or box.top >= box.bottom or box.left >= box.right):
            problem = f"{BOX} {place!r}; need top, left, bottom and right in pixels, such as 0 0 512 512"
        elif (first := lines.setdefault((image, place), number)) != number:
            problem = f"{image} is in line {first} too"
        if problem:
            num_unusable += part == "test"
            problems += [f"line {number}: {problem}"] if part != "test" else []
            continue
        group = row.get("group", "") if "name" in row else row.get("group", "").strip()
        origins = (known.image_origin, known.mask_origin) if known is not None else ("", "")
        content = row.get("content", "").strip()
        if box is None:
            pair = Pair(name, image, mask, part, group, *origins, content)
        else:
            pair = box.pair(name if has_name else box.name_in(name), part, group, content)
        (test if part == "test" else pairs).append(pair)
    if len({pair.part is None for pair in pairs}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    problems = [*(f"no folder {folder} ({counted(count, 'row')})" for folder, count in gone.items()), *problems]
    if problems:
        more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
        if not pairs and data_dir.is_dir() and any("no f" in problem for problem in problems):
            more.append("No row has its files: paths are as seen from data_dir, such as images/a.png")
        if any(UNDECODED.search(cell) for _, row in rows for cell in row.values()):
            more.append(NOT_UTF8)
        raise DataError("\n  ".join([f"split_file: {path}:", *problems[:NUM_NAMED], *more]))
    if not pairs:
        raise DataError(f"split_file: {path} has no row of train or val")
    left_out = f"{counted(num_unusable, 'row')} of test in {path.name} that cannot be used left out"
    notices = (left_out,) if num_unusable else ()
    if converter is not None and any(pair.box for pair in (*pairs, *test)):
        pairs, test = cut_blocks(converter, pairs), cut_blocks(converter, test)
    return FoundPairs(tuple(pairs), path.name, test=tuple(test), unused=tuple(unused), notices=notices)


def _find_file(data_dir: Path, cell: str) -> Path:
    """The file that a cell names: as it stands there, without spaces around it, in another form of Unicode, or as on
    Windows."""
    forms = [unicodedata.normalize(form, cell.strip()) for form in ("NFC", "NFD")]
    spellings = (cell, cell.strip(), *forms, *(text.replace("\\", "/") for text in forms))
    return next((path for text in spellings if is_file(path := data_dir / text)), data_dir / cell.strip())


def _missing_folder(file: Path, data_dir: Path) -> Path | None:
    """data_dir or the first folder on the way from it to the file that is not there."""
    folders = [folder for folder in reversed(file.parents) if folder.is_relative_to(data_dir)]
    return next((folder for folder in folders if not folder.exists()), None)


def listed_files(path: Path, data_dir: Path, part: Part) -> tuple[list[Path], set[str]]:
    """Of the rows of a part, the images as absolute paths, whether they are there or not; and digests of the pairs,
    where the table has them: the same files in another place have the same. Raises DataError."""
    rows = [row for _, row in _read_rows(path) if PARTS.get(row.get("split", "").strip().lower()) == part]
    contents = {content for row in rows if (content := row.get("content", "").strip())}
    return [resolved(_find_file(data_dir, row["image"])) for row in rows], contents


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each row that is not empty."""
    header, rows = read_table(path, f"split_file: {path}")
    unknown = sorted(set(header) - {*COLUMNS, BOX})
    if "image" not in header or "mask" not in header or unknown or len(set(header)) < len(header):
        columns = first_few((f"{cell:.60}" for cell in header), 10) or "none"
        encoding = f". {NOT_UTF8}" if UNDECODED.search("".join(header)) else ""
        need = "need image and mask, and optionally split and group"
        raise DataError(f"split_file: {path} has the columns {columns}; {need}{encoding}")
    return rows


def read_table(path: Path, name: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The header of a CSV file, and line number and cells of each row that is not empty; commas, semicolons or tabs
    between cells. Raises DataError."""
    try:
        text = read_text(path, MAX_BYTES, "utf-8-sig", "surrogateescape")
        separator = max(",;\t", key=text.split("\n", 1)[0].count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)  # a name may hold a \r
        header = [cell.strip().lower() for cell in next(reader, [])]
        while header and not header[-1]:  # as spreadsheets end lines where cells beside the table were once filled
            header.pop()
        filled = (cells for cells in reader if any(cell.strip() for cell in cells))
        return header, [(reader.line_num, dict(zip(header, cells, strict=False))) for cells in filled]
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except csv.Error as error:
        raise DataError(f"{name} is not a CSV file ({error})") from None


def describe_unread_tables(data_dir: Path, listing: Listing) -> list[str]:
    """What to set to use the CSV files with columns of images and masks, a line where there are some."""
    files = walk(data_dir, listing=listing, endings=(".csv", ".tsv"))
    tables, others = [], set[str]()
    for file in islice(files, MAX_TABLES):
        with contextlib.suppress(OSError), input_files.open_file(file) as content:
            header = content.read(MAX_HEADER).decode("utf-8-sig", "replace").partition("\n")[0]
            columns = {cell.strip(' "\r').lower() for cell in re.split("[,;\t]", header)} - {""}
            if {"image", "mask"} <= columns and ("split" in columns or columns <= {*COLUMNS, BOX}):
                tables.append(file)
                others |= columns - {*COLUMNS, BOX}
    if not tables:
        return []
    verb, value = ("is", path_in(data_dir, tables[0])) if len(tables) == 1 else ("are", "one of them, with all rows")
    without = f", without its columns {first_few(sorted(others))}" if others else ""
    use = f"to use the pairs and the split there, set split_file: {value}{without}"
    return [f"{first_few(tables)} {verb} not read; {use}"]


def split_csv_text(split: Split, data_dir: Path) -> str:
    """The text of a CSV file that read_split_csv reads back as the same pairs."""
    has_boxes = any(pair.box for pair in (*split.train, *split.val, *split.test))
    rows: list[tuple[str, ...]] = [(*COLUMNS, BOX) if has_boxes else COLUMNS]
    for part, pairs in (("train", split.train), ("val", split.val), ("test", split.test), (UNUSED, split.unused)):
        for pair in pairs:
            files = (path_in(data_dir, file) for file in pair.user_files)
            boxes = [" ".join(map(str, pair.box[2:])) if pair.box else ""] if has_boxes else []
            rows.append((*files, part, pair.group, pair.name, pair.content, *boxes))
    return "".join(csv_line(row) for row in rows)
