"""Whether images are like their neighbours (frames of a video, slices of a stack, both eyes of a person), so that a random split
would put almost the same image into train and val.

Names suggest it, the images decide: measured is how often the most similar image is a neighbour by name. Reads some hundred files
where the names form sequences or groups; what was measured is cached. A note says why the split is too easy, with the settings that
mend it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import setting_lines
from unet_trainer.datasets.splits import MIN_RUN, Place, add_groups, in_order, places_of, split_pairs
from unet_trainer.images.drawing import to_display
from unet_trainer.images.file_bytes import DataError, ShardReadError, file_stamp
from unet_trainer.images.image_files import Pixels, read_image, read_mask
from unet_trainer.images.mask_coding import IGNORED, MaskCoding
from unet_trainer.system.concurrency import ReadStderr, forked_map
from unet_trainer.system.json_cache import read_known, write_known

MIN_PAIRS = 16  # among fewer images a neighbour is often the most similar one by chance
MIN_IN_RUNS = 0.5  # share of the names that form sequences
STRETCH, NUM_STRETCHES = 20, 12  # images in a row that are read, and how many times, spread over all
NUM_ACROSS = 80  # validation images, and other training images, that are read of a split that is given
NEAR = 2  # images before and after one that count as its neighbours
SIDE, MASK_SIDE = 16, 64  # of the thumbnails that are compared
MIN_AGREEMENT = 0.4  # Cohen's kappa: 0 is chance, 1 is always. Unrelated photographs have 0.02, videos 0.7 to 1
MIN_DEVIATIONS = 5  # standard deviations above chance
MIN_GROUPS, MAX_MEAN_SIZE = 5, 16  # fewer or larger groups may be alike because of the place, the camera or the kind of object
FINE_SHARE = 0.9  # of several patterns, the one with most groups that keeps so many of the similar images together
CACHE_FORMAT = 1
VAL_SHARES = (0.4, 2.5)  # times val_fraction: what a pattern with few groups may make of it

MIN_SHARE = 0.6  # of the images that a pattern must put together with another one
MAX_GROUP = 0.8  # of the images may be in one group: the others have to train or validate
# By what stands before the last underscore, the last number, the first, second and third separator, the second number.
NAME_PATTERNS = (
    r"([^/]+)_[^/_]+$",
    r"([^/]+)[-_. ]\d+\.[^./]+$",
    r"([^/]*[^/\d])\d+\.[^./]+$",
    r"(?:^|/)([^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^-_. /]+[-_. ][^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)((?:[^-_. /]+[-_. ]){2}[^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^/\d]*\d+)[^/\d][^/]*$",
)
LEFT_AND_RIGHT = r"(?i)([^/]*\d)[-_. ]?(?:L|R|left|right|OD|OS)\.[^./]+$"
LEFT_OR_RIGHT = r"(?i)(L|R|left|right|OD|OS)\.[^./]+$"

Floats = NDArray[np.floating[Any]]
Groupings = dict[str, list[str]]  # group_pattern → the group that it gives to each path
ShowBar = Callable[[int], AbstractContextManager[Callable[[], object]]]  # number of steps → what to call after each


@dataclass(frozen=True)
class Likeness:
    """How often the most similar image is a neighbour: in the numbering, and in the same group of each pattern."""

    num_images: int
    by_number: tuple[float, float]  # share, and share by chance
    by_group: dict[str, tuple[float, float]] = field(default_factory=dict)
    neighbour_iou: float | None = None  # of masks and those of the next images
    other_iou: float | None = None  # of masks and those of images far away

    def is_alike(self, share_and_chance: tuple[float, float]) -> bool:
        share, chance = share_and_chance
        agreement = (share - chance) / max(1e-9, 1 - chance)
        deviation = math.sqrt(chance * (1 - chance) / max(1, self.num_images))
        return agreement >= MIN_AGREEMENT and share >= chance + MIN_DEVIATIONS * deviation


class Reader(NamedTuple):
    """How files are read: in so many processes, with a progress bar, and only if the cache does not know what they gave."""

    num_workers: int = 1
    show_bar: ShowBar = lambda total: contextlib.nullcontext(lambda: None)
    cache_folder: Path | None = None


class Note(NamedTuple):
    text: str
    settings: dict[str, Any]  # that keep neighbours apart


def find_neighbours(
    pairs: Sequence[Pair], data_dir: Path, coding: MaskCoding | None, reader: Reader, val_fraction: float, num_folds: int | None
) -> Note | None:
    """The note on images that are like their neighbours, if some are and a setting keeps them apart: the pattern with most groups
    that can be split, or split: blocks for a sequence."""
    if len(pairs) < MIN_PAIRS:
        return None
    paths = [pair.path_in(data_dir) for pair in pairs]
    places, likeness, is_sequence = places_of(paths), None, False
    alike = find_left_and_right(paths)
    if not alike:
        groupings = find_groupings(paths)
        if share_in_runs(places) < MIN_IN_RUNS and not groupings:
            return None
        likeness = _measure(pairs, places, groupings, coding, reader)
        if likeness is None:
            return None
        is_sequence = likeness.is_alike(likeness.by_number)
        alike = _choose_groupings(groupings, likeness, is_sequence)
    for pattern, groups in sorted(alike.items(), key=lambda item: -len(set(item[1]))):
        if _can_be_split(pairs, pattern, data_dir, val_fraction, num_folds):
            counts = Counter(groups)
            smallest, largest = min(counts.values()), max(counts.values())
            sizes = f"of {smallest} images" if smallest == largest else f"of {smallest} to {largest} images"
            example = counts.most_common(1)[0][0]
            names = [path for path, group in zip(paths, groups, strict=True) if group == example]
            fix = f"{len(counts)} groups {sizes} can stay together"
            return _note(likeness, is_sequence, names[:3], fix, {"group_pattern": pattern})
    if not is_sequence:
        return None
    middle = in_order(places)[len(places) // 2 :][:3]
    fix = "blocks of the sequence can validate, with a gap"
    return _note(likeness, is_sequence, [paths[index] for index in middle], fix, {"split": "blocks"})


def _choose_groupings(groupings: Groupings, likeness: Likeness, is_sequence: bool) -> Groupings:
    """Those whose groups hold images that are alike."""
    alike = {pattern: groups for pattern, groups in groupings.items() if likeness.is_alike(likeness.by_group[pattern])}
    if not is_sequence:  # patients or scenes, and not kinds of objects, are many groups of few images each
        alike = {
            pattern: groups for pattern, groups in alike.items() if MIN_GROUPS <= len(set(groups)) >= len(groups) / MAX_MEAN_SIZE
        }
    most = max((likeness.by_group[pattern][0] for pattern in alike), default=0.0)
    return {pattern: groups for pattern, groups in alike.items() if likeness.by_group[pattern][0] >= FINE_SHARE * most}


def _can_be_split(pairs: Sequence[Pair], pattern: str, data_dir: Path, val_fraction: float, num_folds: int | None) -> bool:
    """Whether the pattern, set in the config, gives a split with about as many validation images as asked for."""
    nothing: list[str] = [""] * len(pairs)
    try:
        found = FoundPairs(add_groups([replace(pair, group="") for pair in pairs], pattern, data_dir), "")
        split = split_pairs(found, nothing, nothing, val_fraction=val_fraction, seed=0, num_folds=num_folds)
    except DataError:
        return False
    wanted = 1 / num_folds if num_folds else val_fraction
    return VAL_SHARES[0] * wanted <= len(split.val) / len(pairs) <= VAL_SHARES[1] * wanted


def _note(likeness: Likeness | None, is_sequence: bool, alike: Sequence[str], fix: str, settings: dict[str, Any]) -> Note:
    names = ", ".join(Path(path).stem for path in alike)
    if likeness is None:
        why = f"images of one number are of the same subject by their names ({names})"
    else:
        share, chance = likeness.by_number if is_sequence else likeness.by_group[settings["group_pattern"]]
        shares = f"the most similar image is a neighbour in {share:.0%} of cases (chance: {chance:.0%})"
        why = f"images are like their neighbours {'in the numbering' if is_sequence else 'by name'} ({names}): {shares}"
        if likeness.neighbour_iou is not None and likeness.other_iou is not None and is_sequence:
            why += f", and copying a neighbour's mask scores IoU {likeness.neighbour_iou:.2f} (another's {likeness.other_iou:.2f})"
    lines = "\n".join(f"  {line}" for line in setting_lines(settings))
    return Note(f"{why}. A random split puts them into train and val, and val_iou is too good; {fix}:\n{lines}", settings)


def find_neighbours_across(train: Sequence[Pair], val: Sequence[Pair], reader: Reader) -> str | None:
    """The note on a split that is given, if the training image that is most like a validation image is its neighbour in the
    numbering more often than by chance."""
    pairs = [*train, *val]
    if len(pairs) < MIN_PAIRS:
        return None
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = in_order(places)
    nearest: dict[int, set[int]] = defaultdict(set)  # of validation images: training images before and after, by position
    for positions in (range(len(order)), reversed(range(len(order)))):
        last = None  # training image
        for position in positions:
            if order[position] < len(train):
                last = position
            elif last is not None and places[order[last]].sequence == places[order[position]].sequence:
                nearest[position].add(last)
    if 2 * len(nearest) < len(val):
        return None
    chosen = [sorted(nearest)[index] for index in _spread(len(nearest), NUM_ACROSS)]
    training = [position for position, index in enumerate(order) if index < len(train)]
    spread = {training[index] for index in _spread(len(training), NUM_ACROSS)}
    others = sorted(spread.union(*(nearest[position] for position in chosen)))

    def compare(images: Floats, _: Pixels | None) -> Likeness:
        best = _distances(images[: len(chosen)], images[len(chosen) :]).argmin(1)
        share = np.mean([others[index] in nearest[position] for position, index in zip(chosen, best, strict=True)])
        chance = np.mean([len(nearest[position]) / len(others) for position in chosen])
        return Likeness(len(chosen), (float(share), float(chance)))

    likeness = _read_and_compare([pairs[order[position]] for position in (*chosen, *others)], None, "across", compare, reader)
    if likeness is None or not likeness.is_alike(likeness.by_number):
        return None
    share, chance = likeness.by_number
    return (
        "validation images are like their neighbours in train: the most similar training image is the one before or after in the "
        f"numbering in {share:.0%} of cases (chance: {chance:.0%}); val_iou shows how well the model knows these sequences, not "
        "new ones"
    )


def _measure(
    pairs: Sequence[Pair], places: Sequence[Place], groupings: Groupings, coding: MaskCoding | None, reader: Reader
) -> Likeness | None:
    order, sampled = in_order(places), np.arange(len(places))
    if len(order) > STRETCH * NUM_STRETCHES:  # runs of images, spread over all
        starts = np.linspace(0, len(order) - STRETCH, NUM_STRETCHES).round().astype(int)
        sampled = np.unique(starts[:, None] + np.arange(STRETCH))
    chosen = [order[position] for position in sampled]
    is_near = (np.abs(sampled[:, None] - sampled) <= NEAR) & _are_same([places[index].sequence for index in chosen])
    groups = {pattern: [its[index] for index in chosen] for pattern, its in groupings.items()}

    def compare(images: Floats, ids: Pixels | None) -> Likeness:
        most_similar = _distances(images, images).argmin(1)
        numbers = np.arange(len(images))
        followed = numbers[:-1][is_near[numbers[:-1], numbers[1:]]]
        return Likeness(
            len(images),
            _share(is_near, most_similar),
            {pattern: _share(_are_same(its), most_similar) for pattern, its in groups.items()},
            None if ids is None else _mask_iou(ids[followed], ids[followed + 1]),
            None if ids is None else _mask_iou(ids, np.roll(ids, -(len(ids) // 2), axis=0)),
        )

    return _read_and_compare([pairs[index] for index in chosen], coding, f"within {sorted(groups)}", compare, reader)


def _are_same(keys: Sequence[object]) -> Pixels:
    """N,N: whether two are of the same sequence or group."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    codes = np.array([numbers[key] for key in keys])
    return codes[:, None] == codes


def _share(is_related: Pixels, most_similar: Pixels) -> tuple[float, float]:
    """Share of the images whose most similar one is related to them, and the same by chance."""
    count = len(most_similar)
    others = is_related & ~np.eye(count, dtype=np.bool_)
    return float(others[np.arange(count), most_similar].mean()), float(others.sum() / (count * (count - 1)))


def _spread(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _read_and_compare(
    pairs: Sequence[Pair],
    coding: MaskCoding | None,
    what: str,
    compare: Callable[[Floats, Pixels | None], Likeness],
    reader: Reader,
) -> Likeness | None:
    """What `compare` gives for the thumbnails of the pairs (N,SIDE*SIDE*3, and N,MASK_SIDE,MASK_SIDE class ids), or the cache has
    of them; None if one of them cannot be read."""
    files = [(str(path.absolute()), file_stamp(path)) for pair in pairs for path in (pair.image, pair.mask)]
    content = json.dumps([CACHE_FORMAT, what, None if coding is None else coding.to_dict(), files])
    name = f"neighbours-{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    cache = None if reader.cache_folder is None else reader.cache_folder / name
    if (known := read_known(Likeness, cache, CACHE_FORMAT)) is not None:
        return known

    def view(pair: Pair, _: ReadStderr) -> tuple[Floats, Pixels | None] | str | None:
        """None: the pair has changed since the scan, and training says so. A text: why it cannot be read, and others neither."""
        try:
            image = to_display(read_image(pair.image, min_side=4 * SIDE))
            ids = None if coding is None else np.ascontiguousarray(coding.encode(read_mask(pair.mask)))
        except ShardReadError as error:
            return f"{pair.shown_image}: {error}"
        except DataError:
            return None
        small = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
        size = (MASK_SIDE, MASK_SIDE)
        return small.ravel(), None if ids is None else cv2.resize(ids, size, interpolation=cv2.INTER_NEAREST_EXACT)

    views: dict[int, tuple[Floats, Pixels | None]] = {}
    with (
        reader.show_bar(len(pairs)) as tick,
        contextlib.closing(forked_map(view, pairs, reader.num_workers, lambda: cv2.setNumThreads(0))) as outcomes,
    ):
        for index, outcome in outcomes:
            if isinstance(outcome, str):
                raise DataError(outcome)
            if isinstance(outcome, tuple):
                views[index] = outcome
            tick()
    if len(views) < len(pairs):
        return None
    images = np.stack([views[index][0] for index in range(len(pairs))])
    masks = [ids for index in range(len(pairs)) if (ids := views[index][1]) is not None]
    likeness = compare(images, np.stack(masks) if masks else None)
    write_known(likeness, cache, CACHE_FORMAT)
    return likeness


def _distances(images: Floats, others: Floats) -> Floats:
    """Squared distances between the thumbnails; infinite between an image and itself."""
    one, other = images.astype(np.float64), others.astype(np.float64)
    distances = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    if images is others:
        np.fill_diagonal(distances, np.inf)
    return distances


def _mask_iou(ids: Pixels, others: Pixels) -> float | None:
    """The IoU that masks have with others: of the foreground, or the mean over several classes."""
    classes = sorted(set(np.unique(ids).tolist()) - {IGNORED})
    scores = []
    for class_id in [1] if classes == [0, 1] else classes:
        one, other = ids == class_id, others == class_id
        if either := int((one | other).sum()):
            scores.append(int((one & other).sum()) / either)
    return float(np.mean(scores)) if scores else None


# What names say


def share_in_runs(places: Sequence[Place]) -> float:
    """Share of the images in sequences of MIN_RUN or more."""
    counts = Counter(place.sequence for place in places)
    return sum(count for count in counts.values() if count >= MIN_RUN) / max(1, len(places))


def find_groupings(paths: Sequence[str]) -> Groupings:
    """The patterns that put most of the paths into groups of several, each way of grouping once; and the groups."""
    depth = min(path.count("/") for path in paths)
    patterns = [r"^([^/]+)/", *(rf"^(?:[^/]+/){{{level}}}([^/]+)/" for level in range(1, depth))] if depth else []
    found: dict[tuple[int, ...], tuple[str, list[str]]] = {}
    for pattern in (*patterns, *NAME_PATTERNS):
        groups = _groups_by(pattern, paths)
        counts = Counter(groups)
        together = sum(count for count in counts.values() if count > 1)
        if len(counts) > 1 and together >= MIN_SHARE * len(groups) and max(counts.values()) <= MAX_GROUP * len(groups):
            numbers = {group: number for number, group in enumerate(counts)}
            found.setdefault(tuple(numbers[group] for group in groups), (pattern, groups))
    return dict(found.values())


def find_left_and_right(paths: Sequence[str]) -> Groupings:
    """The left and the right one of each number, such as the eyes of a person: 21_L and 21_R, Image_01L and Image_01R."""
    groups, ends = _groups_by(LEFT_AND_RIGHT, paths), _groups_by(LEFT_OR_RIGHT, paths)
    sides: dict[str, set[str]] = defaultdict(set)
    for group, end in zip(groups, ends, strict=False):
        sides[group].add(end.lower())
    num_paired = sum(len(sides[group]) == 2 for group in groups)
    return {LEFT_AND_RIGHT: groups} if len(sides) > 1 and num_paired >= MIN_SHARE * len(paths) else {}


def _groups_by(pattern: str, paths: Sequence[str]) -> list[str]:
    """What the first bracket matches in each path; empty if it matches nothing in one of them."""
    matches = [re.search(pattern, path) for path in paths]
    groups = [match.group(1) for match in matches if match is not None and match.group(1)]
    return groups if len(groups) == len(paths) else []
