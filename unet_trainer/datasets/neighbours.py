"""Whether images are like their neighbours (frames of a video, slices of a stack, tiles that overlap, both eyes of a
person), so that a random split would put almost the same image into train and val.

Names suggest it, the images decide: measured is how often the most similar image is a neighbour by name. Most similar
are tiles
that hold the same pixels: the outermost row or column of one lies inside of the other. Reads some hundred files
where the names form sequences or groups; what was measured is cached. A note says why the split is too easy, with the
settings that mend it.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.datasets.pairs import FoundPairs, Pair, setting_lines
from unet_trainer.datasets.scan import read_each
from unet_trainer.datasets.splits import MIN_RUN, add_groups, build_split, places_of
from unet_trainer.images.drawing import to_display
from unet_trainer.images.file_bytes import DataError, file_stamp
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.system.console import Console, counted
from unet_trainer.system.json_cache import read_cache, write_cache

MIN_PAIRS = 16  # among fewer images a neighbour is often the most similar one by chance
MIN_IN_RUNS = 0.5  # share of the names that form sequences
STRETCH, NUM_STRETCHES = 20, 12  # images in a row that are read, and how many times, spread over all
NUM_ACROSS = 80  # validation images, and other training images, that are read of a split that is given
NEAR = 2  # images before and after one that count as its neighbours
SIDE = 16  # of the thumbnails that are compared
MAX_TILE = 2048  # side of images whose rows and columns are compared
MIN_AGREEMENT = 0.4  # Cohen's kappa: 0 is chance, 1 is always. Unrelated photographs have 0.02, videos 0.7 to 1
MIN_DEVIATIONS = 5  # standard deviations above chance
MIN_GROUPS, MAX_MEAN_SIZE = (
    5,
    16,
)  # fewer or larger groups may be alike because of the place, the camera or the kind of object
FINE_SHARE = 0.9  # of several patterns, the one with most groups that keeps so many of the similar images together
CACHE_FORMAT = 6
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
# augmented versions of one image, as Roboflow names them: a_jpg.rf.0f3c...jpg
VERSION = r"([^/]+)\.rf\.[0-9A-Za-z]{16,}\.[^./]+$"
LEFT_OR_RIGHT = r"(?i)(L|R|left|right|OD|OS)\.[^./]+$"

Groupings = dict[str, list[str]]  # group_pattern → the group that it gives to each path


class Likeness(NamedTuple):
    """How often the most similar image is related to one, and how often by chance."""

    share: float
    chance: float
    num_images: int

    @property
    def is_high(self) -> bool:
        agreement = (self.share - self.chance) / max(1e-9, 1 - self.chance)
        deviation = math.sqrt(self.chance * (1 - self.chance) / max(1, self.num_images))
        return agreement >= MIN_AGREEMENT and self.share >= self.chance + MIN_DEVIATIONS * deviation

    def __str__(self) -> str:
        return f"in {self.share:.0%} of cases (chance: {self.chance:.0%})"


Note = tuple[str, dict[str, Any]]  # what the user should know, and settings that keep neighbours apart
NOTHING: Note = "", {}


def find_neighbours(config: Config, pairs: Sequence[Pair], console: Console) -> Note:
    """The note on images that are like their neighbours, if some are and a setting keeps them apart: the pattern with
    most groups
    that can be split, or split: blocks for a sequence. What was measured is kept under checkpoint_dir."""
    paths = [pair.path_in(Path(config.data_dir)) for pair in pairs]
    of_originals = _groups_by(VERSION, paths)
    versions = {VERSION: of_originals} if 1 < len(set(of_originals)) < len(of_originals) else {}
    if len(pairs) < MIN_PAIRS and not versions:
        return NOTHING
    places = places_of(paths)
    order = sorted(range(len(places)), key=places.__getitem__)
    groupings, is_sequence, by_number = versions or find_left_and_right(paths), False, Likeness(0, 0, 0)
    overlapping = 0.0
    found: dict[str, Likeness] = {}

    def note(alike: Sequence[str], likeness: Likeness | None, fix: str, settings: dict[str, Any]) -> Note:
        names = ", ".join(Path(path).stem for path in alike[:3])
        why = f"images of one {'original' if versions else 'number'} are of the same subject by their names ({names})"
        if likeness is not None:
            where = "in the numbering" if is_sequence else "by name"
            why = (
                f"images are like their neighbours {where} ({names}): the most similar image is a neighbour {likeness}"
            )
        if overlapping >= MIN_SHARE:
            why = f"images are tiles that overlap ({names}): {overlapping:.0%} share pixels with another one"
        lines = "\n".join(f"  {line}" for line in setting_lines(settings))
        return f"{why}. A random split puts them into train and val, and val_iou is too good; {fix}:\n{lines}", settings

    if not groupings:
        groupings = find_groupings(paths)
        lengths = Counter(place.sequence for place in places)
        num_in_runs = sum(length for length in lengths.values() if length >= MIN_RUN)
        if num_in_runs < MIN_IN_RUNS * len(places) and not groupings:
            return NOTHING
        sampled = np.arange(len(order))
        if len(order) > STRETCH * NUM_STRETCHES:  # runs of images, spread over all
            starts = np.linspace(0, len(order) - STRETCH, NUM_STRETCHES).round().astype(int)
            sampled = np.unique(starts[:, None] + np.arange(STRETCH))
        chosen = [order[position] for position in sampled]
        found_nearest = _most_similar(config, [pairs[index] for index in chosen], [], console)
        if found_nearest is None:
            return NOTHING
        nearest, overlapping = found_nearest
        is_near = (np.abs(sampled[:, None] - sampled) <= NEAR) & _are_same([places[index].sequence for index in chosen])
        by_number = _likeness(is_near, nearest)
        is_sequence = by_number.is_high
        found = {
            pattern: _likeness(_are_same([its[index] for index in chosen]), nearest)
            for pattern, its in groupings.items()
        }
        groupings = _choose_groupings(groupings, found, is_sequence or overlapping >= MIN_SHARE)
    for pattern, groups in sorted(groupings.items(), key=lambda item: -len(set(item[1]))):
        if _can_be_split(config, pairs, pattern):
            counts = Counter(groups)
            smallest, largest = min(counts.values()), max(counts.values())
            sizes = f"of {smallest} images" if smallest == largest else f"of {smallest} to {largest} images"
            example = counts.most_common(1)[0][0]
            alike = [path for path, group in zip(paths, groups, strict=True) if group == example]
            likeness = by_number if is_sequence else found.get(pattern)
            return note(alike, likeness, f"{len(counts)} groups {sizes} can stay together", {"group_pattern": pattern})
    if not is_sequence:
        return NOTHING
    alike = [paths[index] for index in order[len(order) // 2 :]]
    return note(alike, by_number, "blocks of the sequence can validate, with a gap", {"split": "blocks"})


def _choose_groupings(groupings: Groupings, found: dict[str, Likeness], are_neighbours: bool) -> Groupings:
    """Those whose groups hold images that are alike."""
    alike = {pattern: groups for pattern, groups in groupings.items() if found[pattern].is_high}
    if not are_neighbours:  # patients or scenes, and not kinds of objects, are many groups of few images each
        counts = {pattern: len(set(groups)) for pattern, groups in alike.items()}
        alike = {
            key: groups for key, groups in alike.items() if MIN_GROUPS <= counts[key] >= len(groups) / MAX_MEAN_SIZE
        }
    most = max((found[pattern].share for pattern in alike), default=0.0)
    return {pattern: groups for pattern, groups in alike.items() if found[pattern].share >= FINE_SHARE * most}


def _can_be_split(config: Config, pairs: Sequence[Pair], pattern: str) -> bool:
    """Whether the pattern, set in the config, gives a split with about as many validation images as asked for."""
    try:
        found = FoundPairs(add_groups([replace(pair, group="") for pair in pairs], pattern, Path(config.data_dir)), "")
        split = build_split(replace(config, seed=0, fold=0), found, [()] * len(pairs), [""] * len(pairs))
    except DataError:
        return False
    wanted = 1 / config.num_folds if config.num_folds else config.val_fraction
    return VAL_SHARES[0] * wanted <= len(split.val) / len(pairs) <= VAL_SHARES[1] * wanted


def find_neighbours_across(config: Config, train: Sequence[Pair], val: Sequence[Pair], console: Console) -> Note:
    """The note on a split that is given, if the training image that is most like a validation image is its neighbour in
    the numbering more often than by chance. No setting mends it."""
    pairs = [*train, *val]
    ours, theirs = (
        {match[1]: pair for pair in side if (match := re.search(VERSION, pair.image.name))} for side in (val, train)
    )
    if shared := [name for name in ours if name in theirs]:
        what = f"{counted(len(shared), 'image')} with versions in train and in val by their names, such as"
        return f"{what} {ours[shared[0]].shown_image} and {theirs[shared[0]].shown_image}: val_iou is too good", {}
    if len(pairs) < MIN_PAIRS:
        return NOTHING
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = sorted(range(len(places)), key=places.__getitem__)
    nearest: dict[int, set[int]] = defaultdict(set)  # of validation images: training images before and after
    for indices in (order, order[::-1]):
        last = None  # training image
        for index in indices:
            if index < len(train):
                last = index
            elif last is not None and places[last].sequence == places[index].sequence:
                nearest[index].add(last)
    if 2 * len(nearest) < len(val):
        return NOTHING
    chosen = _spread([index for index in order if index in nearest])
    training = {*_spread([index for index in order if index < len(train)])}.union(*(nearest[index] for index in chosen))
    others = [index for index in order if index in training]
    found = _most_similar(config, [pairs[index] for index in chosen], [pairs[index] for index in others], console)
    if found is None:
        return NOTHING
    similar, overlapping = found
    if overlapping >= MIN_SHARE:
        text = (
            f"{overlapping:.0%} of the validation images are tiles that share pixels with training images: "
            "val_iou is too good"
        )
        return text, {}
    share = np.mean([others[place] in nearest[index] for index, place in zip(chosen, similar, strict=True)])
    chance = np.mean([len(nearest[index]) / len(others) for index in chosen])
    likeness = Likeness(float(share), float(chance), len(chosen))
    text = (
        "validation images are like their neighbours in train: the most similar training image is the one before "
        "or after in the "
        f"numbering {likeness}; val_iou shows how well the model knows these sequences, not new ones"
    )
    return (text, {}) if likeness.is_high else NOTHING


def _spread(indices: Sequence[int]) -> list[int]:
    """At most NUM_ACROSS of them, from all along."""
    return [
        indices[place] for place in np.linspace(0, len(indices) - 1, min(len(indices), NUM_ACROSS)).round().astype(int)
    ]


def _are_same(keys: Sequence[object]) -> Pixels:
    """N,N: whether two are of the same sequence or group."""
    first = np.array([keys.index(key) for key in keys])
    return first[:, None] == first


def _likeness(is_related: Pixels, most_similar: Sequence[int]) -> Likeness:
    count = len(most_similar)
    others = is_related & ~np.eye(count, dtype=np.bool_)
    return Likeness(
        float(others[np.arange(count), most_similar].mean()), float(others.sum() / (count * (count - 1))), count
    )


def _most_similar(
    config: Config, pairs: Sequence[Pair], others: Sequence[Pair], console: Console
) -> tuple[list[int], float] | None:
    """Of each image, the place of the one among the others that is most like it (without others: among the same, but
    for itself), and the share that have pixels of it; from the files or the cache. None if one of them cannot be
    read."""
    every = [*pairs, *others]
    files = [(str(pair.image.absolute()), file_stamp(pair.image)) for pair in every]
    content = json.dumps([CACHE_FORMAT, len(pairs), files])
    cache = Path(config.checkpoint_dir) / f".cache/neighbours-{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    known, overlapping = (read_cache(cache).get(key) for key in ("places", "overlapping"))
    places = range(len(others or pairs))
    if (
        isinstance(known, list)
        and len(known) == len(pairs)
        and all(type(place) is int and place in places for place in known)
    ):
        return known, overlapping if isinstance(overlapping, float) else 0.0

    def view(_: int, pair: Pair) -> tuple[Pixels, list[int]]:
        image = read_image(pair.image, min_side=4 * SIDE)
        thumbnail = cv2.resize(to_display(image), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        return thumbnail.astype(np.float64).ravel(), _lines(image)

    views = read_each(view, every, console, "Comparing neighbours by name:")
    if any(one is None for one in views):
        return None
    images, overlaps = np.stack([thumbnail for thumbnail, _ in views]), _overlaps([lines for _, lines in views])
    mine, yours = slice(len(pairs)), slice(len(pairs) if others else 0, None)
    ours, theirs = images[mine], images[yours]
    distances = (ours**2).sum(1)[:, None] + (theirs**2).sum(1) - 2 * ours @ theirs.T
    distances[overlaps[mine, yours]] -= distances.max()
    if not others:
        np.fill_diagonal(distances, np.inf)
    nearest: list[int] = distances.argmin(1).tolist()
    share = float(overlaps[mine, yours][range(len(nearest)), nearest].mean())
    write_cache(cache, {"places": nearest, "overlapping": share})
    return nearest, share


def _lines(image: Pixels) -> list[int]:
    """Hashes of the rows and columns of an image, 0 for those that it has twice, such as padding, bars and gradients,
    which others may have by chance. The outermost four come first."""
    if max(image.shape[:2]) > MAX_TILE:
        return []
    rows, columns = ([hash(line.tobytes()) for line in side] for side in (image, image.swapaxes(0, 1)))
    counts = Counter(rows + columns)
    rows, columns = ([line if counts[line] == 1 else 0 for line in side] for side in (rows, columns))
    return [rows[0], rows[-1], columns[0], columns[-1], *rows[1:-1], *columns[1:-1]]


def _overlaps(lines: Sequence[Sequence[int]]) -> Pixels:
    """N,N: whether an outermost line of one image lies inside of the other."""
    outermost: dict[int, set[int]] = defaultdict(set)
    for index, its in enumerate(lines):
        for line in filter(None, its[:4]):
            outermost[line].add(index)
    overlaps = np.zeros((len(lines), len(lines)), np.bool_)
    for index, its in enumerate(lines):
        found = list(set().union(*(outermost[line] for line in its[4:] if line in outermost)))
        overlaps[index, found] = overlaps[found, index] = True
    return overlaps


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
    """The left and the right one of each number, such as the eyes of a person: 21_L and 21_R, Image_01L and
    Image_01R."""
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
