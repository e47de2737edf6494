"""Whether images are like their neighbours (frames of a video, slices of a stack, tiles that overlap, both eyes of a
person), so that a random split would put almost the same image into train and val.

Names suggest groups and sequences, the thumbnails of the scan decide: measured is how much likelier than by chance the
most similar image is of the same group, or next in the numbering. Most similar are tiles that hold the same pixels.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.near_duplicates import CONTRAST, MIDDLE, decode_thumbnails
from unet_trainer.data.pairs import FoundPairs, Pair, setting_lines
from unet_trainer.data.scan import ImageFacts, read_each
from unet_trainer.data.splits import MIN_RUN, build_split, places_of
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.system.console import Console, counted

MIN_PAIRS = 16  # among fewer images a neighbour is often the most similar one by chance
STRETCH, NUM_STRETCHES = 20, 12  # images in a row that are compared, and how many times, spread over all
NUM_ACROSS = 80  # validation images, and other training images, that are compared of a split of the data itself
NEAR = 2  # images before and after one that count as its neighbours
MAX_TILE, MIN_SIDE = 2048, 64  # of images whose rows and columns are compared; to which JPEG is decoded for it
MIN_AGREEMENT = 0.4  # Cohen's kappa: 0 is chance, 1 is always. Unrelated photographs have 0.02, videos 0.7 to 1
MIN_DEVIATIONS = 5  # standard deviations above chance
MIN_GROUPS, MAX_MEAN_SIZE = 5, 16  # fewer or larger groups may be alike by the place, the camera or the kind of object
FINE_SHARE = 0.9  # of several patterns, the one with most groups that keeps so many of the similar images together
VAL_SHARES = 0.4, 2.5  # times val_fraction: what a pattern with few groups may make of it
MIN_SHARE, MAX_GROUP = 0.6, 0.8  # of the images that are with another one; in one group: the others train or validate
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
# 21_L and 21_R, Image_01L and Image_01R: the eyes of a person.
LEFT_AND_RIGHT = r"(?i)([^/]*\d)[-_. ]?(?:L|R|left|right|OD|OS)\.[^./]+$"
VERSION = r"([^/]+)\.rf\.[0-9A-Za-z]{16,}\.[^./]+$"  # of one image, as Roboflow names them: a_jpg.rf.0f3c...jpg

Groupings = dict[str, list[str]]  # group_pattern → the group of each path
Note = tuple[str, dict[str, Any]]  # what the user should know, and settings that keep neighbours apart
NOTHING: Note = "", {}


class Similarity(NamedTuple):
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


def find_neighbours(config: Config, pairs: Sequence[Pair], images: Sequence[ImageFacts], console: Console) -> Note:
    """The note on images that are like their neighbours, if groups or split: blocks keep them apart."""
    paths = [pair.path_in(Path(config.data_dir)) for pair in pairs]
    for subject, pattern, min_share in (("original", VERSION, 0.0), ("number", LEFT_AND_RIGHT, MIN_SHARE)):
        groups = _groups_by(pattern, paths)
        if 1 < len({*groups}) < len(groups) and _share_together(groups) >= min_share:
            reason = f"images of one {subject} are of the same subject by their names ({{}})"
            return _advise_groups(config, pairs, paths, {pattern: groups}, {pattern: reason}) or NOTHING
    places, groupings = places_of(paths), _find_groupings(paths)
    lengths = Counter(place.sequence for place in places)
    num_in_runs = sum(length for length in lengths.values() if length >= MIN_RUN)
    if 2 * num_in_runs < len(places) and not groupings:
        return NOTHING
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    sampled = np.arange(len(order))
    if len(order) > STRETCH * NUM_STRETCHES:  # runs of images, spread over all
        starts = np.linspace(0, len(order) - STRETCH, NUM_STRETCHES).round().astype(int)
        sampled = np.unique(starts[:, None] + np.arange(STRETCH))
    if len(sampled) < MIN_PAIRS:
        return NOTHING
    chosen = [order[position] for position in sampled]
    overlaps = _find_overlaps([pairs[index] for index in chosen], [], console)
    nearest = _find_nearest([images[index] for index in chosen], [], overlaps)
    is_near = (np.abs(sampled[:, None] - sampled) <= NEAR) & _are_same([places[index].sequence for index in chosen])
    by_number, overlapping = _measure(is_near, nearest), overlaps.any(1).mean()
    is_tiled = overlapping >= MIN_SHARE
    similar = {key: _measure(_are_same([its[i] for i in chosen]), nearest) for key, its in groupings.items()}
    # Without a sequence or tiles, groups have to be patients or scenes, not kinds: many of few images.
    is_known, num_groups = by_number.is_high or is_tiled, {key: len({*its}) for key, its in groupings.items()}
    are_many = {key for key, num in num_groups.items() if num >= max(MIN_GROUPS, len(paths) / MAX_MEAN_SIZE)}
    alike = [key for key in groupings if similar[key].is_high and (is_known or key in are_many)]
    most = max((similar[key].share for key in alike), default=0.0)
    alike = [key for key in alike if similar[key].share >= FINE_SHARE * most]
    where = "in the numbering" if by_number.is_high else "by name"
    like = f"images are like their neighbours {where} ({{}}): the most similar image is a neighbour"
    tiled = f"images are tiles that overlap ({{}}): {overlapping:.0%} share pixels with another one"
    reasons = {key: tiled if is_tiled else f"{like} {by_number if is_known else similar[key]}" for key in alike}
    note = _advise_groups(config, pairs, paths, {key: groupings[key] for key in alike}, reasons)
    if note is not None or not by_number.is_high:
        return note or NOTHING
    middle = [paths[index] for index in order[len(order) // 2 :]]
    fix = "blocks of the sequence can validate, with a gap"
    return _note(tiled if is_tiled else f"{like} {by_number}", middle, fix, {"split": "blocks"})


def _advise_groups(
    config: Config, pairs: Sequence[Pair], paths: Sequence[str], groupings: Groupings, reasons: dict[str, str]
) -> Note | None:
    """The note on the pattern with most groups that gives a split with about as many validation images as wanted."""
    wanted = 1 / config.num_folds if config.num_folds else config.val_fraction
    labels, digests = [set[int]()] * len(pairs), [""] * len(pairs)
    for pattern, groups in sorted(groupings.items(), key=lambda item: -len({*item[1]})):
        found = FoundPairs(tuple(replace(pair, group=group) for pair, group in zip(pairs, groups, strict=True)), "")
        try:
            split = build_split(replace(config, seed=0, fold=0), found, labels, digests)
        except DataError:
            continue
        if VAL_SHARES[0] * wanted <= len(split.val) / len(pairs) <= VAL_SHARES[1] * wanted:
            counts = Counter(groups)
            sizes = " to ".join(map(str, sorted({min(counts.values()), max(counts.values())})))
            example, _ = counts.most_common(1)[0]
            alike = [path for path, group in zip(paths, groups, strict=True) if group == example]
            fix = f"{len(counts)} groups of {sizes} images can stay together"
            return _note(reasons[pattern], alike, fix, {"group_pattern": pattern})
    return None


def _note(reason: str, alike: Sequence[str], fix: str, settings: dict[str, Any]) -> Note:
    why = reason.format(", ".join(Path(path).stem for path in alike[:3]))
    lines = "\n".join(f"  {line}" for line in setting_lines(settings))
    return f"{why}. A random split puts them into train and val, and val_iou is too good; {fix}:\n{lines}", settings


def find_neighbours_across(
    train: Sequence[Pair], val: Sequence[Pair], images: Sequence[ImageFacts], console: Console
) -> Note:
    """The note on a split of the data itself, if the training image most like a validation image is its neighbour in
    the numbering. `images`: of train, then of val."""
    pairs = [*train, *val]
    ours, theirs = (
        {match[1]: pair for pair in side if (match := re.search(VERSION, pair.image.name))} for side in (val, train)
    )
    if shared := [name for name in ours if name in theirs]:
        what = f"{counted(len(shared), 'image')} with versions in train and in val by their names, such as"
        return f"{what} {ours[shared[0]].shown_image} and {theirs[shared[0]].shown_image}: val_iou is too good", {}
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    around: dict[int, set[int]] = defaultdict(set)  # of validation images: training images before and after
    for indices in (order, order[::-1]):
        last = None  # training image
        for index in indices:
            if index < len(train):
                last = index
            elif last is not None and places[last].sequence == places[index].sequence:
                around[index].add(last)
    if len(order) < MIN_PAIRS or 2 * len(around) < len(val):
        return NOTHING
    chosen = _spread([index for index in order if index in around])
    training = {*_spread([index for index in order if index < len(train)])}.union(*(around[index] for index in chosen))
    others = [index for index in order if index in training]
    overlaps = _find_overlaps([pairs[index] for index in chosen], [pairs[index] for index in others], console)
    if (overlapping := overlaps.any(1).mean()) >= MIN_SHARE:
        what = f"{overlapping:.0%} of the validation images are tiles that share pixels with training images"
        return f"{what}: val_iou is too good", {}
    nearest = _find_nearest([images[index] for index in chosen], [images[index] for index in others], overlaps)
    similarity = _measure(np.array([[other in around[index] for other in others] for index in chosen]), nearest)
    what = "validation images are like their neighbours in train: the most similar training image is the one before"
    effect = "val_iou shows how well the model knows these sequences, not new ones"
    return (f"{what} or after in the numbering {similarity}; {effect}", {}) if similarity.is_high else NOTHING


def _spread(indices: Sequence[int]) -> list[int]:
    """At most NUM_ACROSS of them, from all along."""
    places = np.linspace(0, len(indices) - 1, min(len(indices), NUM_ACROSS)).round().astype(int)
    return [indices[place] for place in places]


def _are_same(keys: Sequence[object]) -> Pixels:
    """N,N: whether two are of the same sequence or group."""
    first = np.array([keys.index(key) for key in keys])
    return first[:, None] == first


def _measure(is_related: Pixels, most_similar: Sequence[int]) -> Similarity:
    """`is_related`: of each image to each other one, N,N with itself or N,M."""
    num_images, num_others = is_related.shape
    if num_images == num_others and is_related.diagonal().all():  # images among themselves
        is_related, num_others = is_related & ~np.eye(num_images, dtype=np.bool_), num_others - 1
    share = is_related[np.arange(num_images), most_similar].mean()
    return Similarity(float(share), float(is_related.sum() / (num_images * num_others)), num_images)


def _find_nearest(images: Sequence[ImageFacts], others: Sequence[ImageFacts], overlaps: Pixels) -> list[int]:
    """Of each image the one among the others (without others: among the same) that is most like it."""
    ours = _colour_thumbnails(images)
    theirs = _colour_thumbnails(others) if others else ours
    distances = (ours**2).sum(1)[:, None] + (theirs**2).sum(1) - 2 * ours @ theirs.T
    distances[overlaps] -= distances.max()
    if not others:
        np.fill_diagonal(distances, np.inf)
    nearest: list[int] = distances.argmin(1).tolist()
    return nearest


def _find_overlaps(pairs: Sequence[Pair], others: Sequence[Pair], console: Console) -> Pixels:
    """N,M, without others N,N: whether an outermost row or column of one image lies inside of the other."""
    read = read_each(_unique_lines, [*pairs, *others], console, "Comparing neighbours by name:")
    lines: list[tuple[set[int], set[int]]] = [each or (set(), set()) for each in read]
    theirs = lines[len(pairs) :] if others else lines
    rows = [
        [not (edges.isdisjoint(its_inside) and its_edges.isdisjoint(inside)) for its_edges, its_inside in theirs]
        for edges, inside in lines[: len(pairs)]
    ]
    return np.array(rows)


def _unique_lines(_: int, pair: Pair) -> tuple[set[int], set[int]]:
    """Hashes of the outermost rows and columns of an image, and of those inside, without those that it has twice, such
    as padding, bars and gradients, which others may have by chance."""
    image = read_image(pair.image, min_side=MIN_SIDE)
    if max(image.shape[:2]) > MAX_TILE:
        return set(), set()
    rows, columns = ([hash(line.tobytes()) for line in side] for side in (image, image.swapaxes(0, 1)))
    counts = Counter(rows + columns)
    edges, inside = (rows[0], rows[-1], columns[0], columns[-1]), [*rows[1:-1], *columns[1:-1]]
    return {line for line in edges if counts[line] == 1}, {line for line in inside if counts[line] == 1}


def _colour_thumbnails(images: Sequence[ImageFacts]) -> Pixels:
    """N,C*SIDE*SIDE: about those in colour, by the grey ones and the statistics of the channels."""
    mean, std = (np.array([np.resize(getattr(image, name), 3) for image in images]) for name in ("mean", "std"))
    grey = (decode_thumbnails([image.thumbnail for image in images])[:, None] - MIDDLE) / CONTRAST
    return (grey * std[:, :, None] + mean[:, :, None]).reshape(len(images), -1)


def _find_groupings(paths: Sequence[str]) -> Groupings:
    """The patterns that put most of the paths into groups of several, each way of grouping once; and the groups."""
    depth = min(path.count("/") for path in paths)
    folders = [rf"^(?:[^/]+/){{{level}}}([^/]+)/" if level else r"^([^/]+)/" for level in range(depth)]
    found: dict[tuple[int, ...], tuple[str, list[str]]] = {}
    for pattern in (*folders, *NAME_PATTERNS):
        groups = _groups_by(pattern, paths)
        counts = Counter(groups)
        is_small = max(counts.values(), default=0) <= MAX_GROUP * len(groups)
        if len(counts) > 1 and is_small and _share_together(groups) >= MIN_SHARE:
            numbers = {group: number for number, group in enumerate(counts)}
            found.setdefault(tuple(numbers[group] for group in groups), (pattern, groups))
    return dict(found.values())


def _share_together(groups: Sequence[str]) -> float:
    """The share of the images that are in a group with another one."""
    return sum(count for count in Counter(groups).values() if count > 1) / max(1, len(groups))


def _groups_by(pattern: str, paths: Sequence[str]) -> list[str]:
    """What the first bracket matches in each path; empty if it matches nothing in one of them."""
    matches = [re.search(pattern, path) for path in paths]
    groups = [match.group(1) for match in matches if match is not None and match.group(1)]
    return groups if len(groups) == len(paths) else []
