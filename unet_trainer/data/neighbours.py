"""Whether images are like their neighbours (frames of a video, slices of a stack, tiles that overlap, both eyes of a
person), so that a random split would put almost the same image into train and val.

Names suggest groups and sequences, the thumbnails of the scan decide: measured is how much likelier than by chance the
most similar image is of the same group, or next in the numbering. Most similar are tiles that hold the same pixels.
"""

import re
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.near_duplicates import CONTRAST, MIDDLE, decode_thumbnails
from unet_trainer.data.pairs import Pair, first_few, setting_lines
from unet_trainer.data.scan import ImageFacts, read_each
from unet_trainer.data.splits import places_of
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.system.console import Console, counted

MIN_PAIRS = 16  # among fewer images a neighbour is often the most similar one by chance
STRETCH, NUM_STRETCHES = 20, 12  # images in a row that are compared, and how many times, spread over all
NUM_ACROSS = 80  # validation images, and other training images, that are compared of a split of the data itself
NEAR = 2  # images before and after one that count as its neighbours
MIN_AGREEMENT = 0.4  # Cohen's kappa: 0 is chance, 1 is always. Unrelated photographs have 0.02, videos 0.7 to 1
MIN_DEVIATIONS = 5  # standard deviations above chance
MIN_SHARE = 0.6  # of the images that are in a group with another one, or share pixels with one
MAX_MEAN_SIZE = 16  # larger groups may be alike by the place, the camera or the kind of object
VAL_SHARES = 0.4, 2.5  # times the images that are to validate: what groups of uneven sizes may make of them
MAX_TILE = 2048  # side of images whose rows and columns are compared

VERSION = r"([^/]+)\.rf\.[0-9A-Za-z]{16,}\.[^./]+$"  # of one image, as Roboflow names them: a_jpg.rf.0f3c...jpg
LEFT_AND_RIGHT = r"(?i)([^/]*\d)[-_. ]?(?:L|R|left|right|OD|OS)\.[^./]+$"  # eyes of a person: 21_L, Image_01R
# By what stands before the last underscore, the last number, the first, second and third separator, the second number.
NAME_PATTERNS = (
    r"([^/]+)_[^/_]+$",
    r"([^/]*[^/\d])\d+\.[^./]+$",
    r"(?:^|/)([^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^-_. /]+[-_. ][^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)((?:[^-_. /]+[-_. ]){2}[^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^/\d]*\d+)[^/\d][^/]*$",
)

Note = tuple[str, dict[str, Any]]  # what the user should know, and settings that keep neighbours apart
NOTHING: Note = "", {}


class Similarity(NamedTuple):
    """How much likelier than by chance the most similar image is related to one: Cohen's kappa, 0 if not clearly."""

    kappa: float
    measured: str


def find_neighbours(config: Config, pairs: Sequence[Pair], images: Sequence[ImageFacts], console: Console) -> Note:
    """The note on images that are like their neighbours, if groups or split: blocks keep them apart."""
    paths = [pair.path_in(Path(config.data_dir)) for pair in pairs]
    for subject, pattern, min_share in (("original", VERSION, 0.0), ("number", LEFT_AND_RIGHT, MIN_SHARE)):
        if groups := _group_by(pattern, paths, min_share):
            reason = f"images of one {subject} are of the same subject by their names ({{}})"
            return _advise_groups(config, paths, {pattern: groups}, reason) or NOTHING
    folders = ["^" + "[^/]+/" * level + "([^/]+)/" for level in range(min(path.count("/") for path in paths))]
    groupings = {pattern: groups for pattern in (*folders, *NAME_PATTERNS) if (groups := _group_by(pattern, paths))}
    places = places_of(paths)
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    are_alone = 2 * len({place.sequence for place in places}) > len(places)  # most are of no sequence
    if len(order) < MIN_PAIRS or (are_alone and not groupings):
        return NOTHING
    starts = np.linspace(0, max(0, len(order) - STRETCH), NUM_STRETCHES).round().astype(int)
    sampled = np.unique((starts[:, None] + np.arange(STRETCH)).clip(max=len(order) - 1))
    chosen = [order[position] for position in sampled]
    is_compared = ~np.eye(len(chosen), dtype=np.bool_)
    nearest, overlapping = _find_nearest(pairs, images, chosen, is_compared, console)
    is_near = (np.abs(sampled[:, None] - sampled) <= NEAR) & _are_same([places[index].sequence for index in chosen])
    by_number = _measure(nearest, is_near, is_compared)
    is_tiled = overlapping >= MIN_SHARE
    ranked = []
    for pattern, groups in groupings.items():
        similarity = _measure(nearest, _are_same([groups[index] for index in chosen]), is_compared)
        # Without a sequence or tiles, groups have to be patients or scenes, not kinds: many of few images.
        is_fine = by_number.kappa or is_tiled or MAX_MEAN_SIZE * len({*groups}) >= len(paths)
        if similarity.kappa and is_fine:
            ranked.append((round(similarity.kappa, 1), len({*groups}), similarity.measured, pattern))
    ranked.sort(key=lambda one: one[:2], reverse=True)  # the clearest; of those as clear, with most groups
    where, measured = "in the numbering", by_number.measured
    if not by_number.kappa and ranked:
        where, measured = "by name", ranked[0][2]
    reason = f"images are like their neighbours {where} ({{}}): the most similar image is a neighbour {measured}"
    if is_tiled:
        reason = f"images are tiles that overlap ({{}}): {overlapping:.0%} share pixels with another one"
    note = _advise_groups(config, paths, {pattern: groupings[pattern] for *_, pattern in ranked}, reason)
    if note is None and by_number.kappa:
        middle = [paths[index] for index in order[len(order) // 2 :]]
        note = _note(reason, middle, "blocks of the sequence can validate, with a gap", {"split": "blocks"})
    return note or NOTHING


def _advise_groups(config: Config, paths: Sequence[str], groupings: dict[str, list[str]], reason: str) -> Note | None:
    """The note on the first pattern by which about as many images as wanted can validate."""
    wanted = len(paths) * (1 / config.num_folds if config.num_folds else config.val_fraction)
    for pattern, groups in groupings.items():
        counts = Counter(groups)
        (example, most), *_, (_, least) = counts.most_common()
        has_room = least <= VAL_SHARES[1] * wanted and len(paths) - most >= VAL_SHARES[0] * wanted
        if has_room and len(counts) >= (config.num_folds or 2):
            sizes = f"{least} to {most}" if least < most else most
            alike = [path for path, group in zip(paths, groups, strict=True) if group == example]
            fix = f"{len(counts)} groups of {sizes} images can stay together"
            return _note(reason, alike, fix, {"group_pattern": pattern})
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
    pairs, num_train = [*train, *val], len(train)
    versions = [{match[1] for pair in side if (match := re.search(VERSION, pair.image.name))} for side in (train, val)]
    if shared := sorted(versions[0] & versions[1]):
        what = f"{counted(len(shared), 'image')} with versions in train and in val by their names"
        return f"{what}: {first_few(shared, 3)}; val_iou is too good", {}
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    training = [index for index in order if index < num_train]
    beside: dict[int, set[int]] = {}  # of validation images: training images before and after
    for index in (index for index in order if index >= num_train):
        cut = bisect(training, places[index], key=places.__getitem__)
        both = training[max(0, cut - 1) : cut + 1]
        if its := {other for other in both if places[other].sequence == places[index].sequence}:
            beside[index] = its
    if len(order) < MIN_PAIRS or 2 * len(beside) < len(val):
        return NOTHING
    validating = _spread([*beside])
    chosen = [*{*_spread(training)}.union(*(beside[index] for index in validating)), *validating]
    is_compared = np.array([[index >= num_train > other for other in chosen] for index in chosen])
    nearest, overlapping = _find_nearest(pairs, images, chosen, is_compared, console)
    if overlapping >= MIN_SHARE:
        what = f"{overlapping:.0%} of the validation images are tiles that share pixels with training images"
        return f"{what}: val_iou is too good", {}
    is_beside = np.array([[other in beside.get(index, ()) for other in chosen] for index in chosen])
    similarity = _measure(nearest, is_beside, is_compared)
    what = "validation images are like their neighbours in train: the most similar training image is the one before"
    effect = "val_iou shows how well the model knows these sequences, not new ones"
    return (f"{what} or after in the numbering {similarity.measured}; {effect}", {}) if similarity.kappa else NOTHING


def _spread(indices: Sequence[int]) -> list[int]:
    """At most NUM_ACROSS of them, from all along."""
    places = np.linspace(0, len(indices) - 1, min(len(indices), NUM_ACROSS)).round().astype(int)
    return [indices[place] for place in places]


def _are_same(keys: Sequence[object]) -> Pixels:
    """N,N: whether two are of the same sequence or group."""
    first = np.array([keys.index(key) for key in keys])
    return first[:, None] == first


def _measure(nearest: Pixels, is_related: Pixels, is_compared: Pixels) -> Similarity:
    """`nearest`: of each image; `is_related`, `is_compared`: of each to each other, N,N."""
    rows = np.flatnonzero(is_compared.any(1))
    share, chance = float(is_related[rows, nearest[rows]].mean()), float(is_related[is_compared].mean())
    deviation = (chance * (1 - chance) / len(rows)) ** 0.5
    kappa = (share - chance) / max(1e-9, 1 - chance)
    is_clear = kappa >= MIN_AGREEMENT and share >= chance + MIN_DEVIATIONS * deviation
    return Similarity(kappa if is_clear else 0.0, f"in {share:.0%} of cases (chance: {chance:.0%})")


def _find_nearest(
    pairs: Sequence[Pair], images: Sequence[ImageFacts], chosen: Sequence[int], is_compared: Pixels, console: Console
) -> tuple[Pixels, float]:
    """Of each chosen image the most similar one that it is compared with: one that shares pixels, or by thumbnails in
    about their colours; and how many share pixels: the outermost row or column of one lies inside of another."""
    read = read_each(_unique_lines, [pairs[index] for index in chosen], console, "Comparing neighbours by name:")
    lines: list[tuple[set[int], set[int]]] = [each or (set(), set()) for each in read]
    lies_inside = np.array([[not edges.isdisjoint(inside) for _, inside in lines] for edges, _ in lines])
    overlaps = (lies_inside | lies_inside.T) & is_compared
    facts = [images[index] for index in chosen]
    mean, std = (np.array([np.resize(getattr(image, name), 3) for image in facts]) for name in ("mean", "std"))
    grey = (decode_thumbnails([image.thumbnail for image in facts])[:, None] - MIDDLE) / CONTRAST
    colours = (grey * std[:, :, None] + mean[:, :, None]).reshape(len(facts), -1)
    squares = (colours**2).sum(1)
    distances = squares[:, None] + squares - 2 * colours @ colours.T
    distances[overlaps] -= distances.max()
    distances[~is_compared] = np.inf
    return distances.argmin(1), float(overlaps.any(1)[is_compared.any(1)].mean())


def _unique_lines(_: int, pair: Pair) -> tuple[set[int], set[int]]:
    """Hashes of the outermost rows and columns of an image, and of those inside, without those that it has twice, such
    as padding, bars and gradients, which others may have by chance."""
    image = read_image(pair.image, min_side=64)  # a JPEG of no more than that: its tiles do not share exact pixels
    if max(image.shape[:2]) > MAX_TILE:
        return set(), set()
    rows, columns = ([hash(line.tobytes()) for line in side] for side in (image, image.swapaxes(0, 1)))
    counts = Counter(rows + columns)
    edges, inside = (rows[0], rows[-1], columns[0], columns[-1]), [*rows[1:-1], *columns[1:-1]]
    return {line for line in edges if counts[line] == 1}, {line for line in inside if counts[line] == 1}


def _group_by(pattern: str, paths: Sequence[str], min_share: float = MIN_SHARE) -> list[str]:
    """What the first bracket matches in each path; empty unless enough are in one of several groups with another."""
    matches = [re.search(pattern, path) for path in paths]
    groups = [match[1] for match in matches if match is not None and match[1]]
    counts = Counter(groups)
    num_together = sum(count for count in counts.values() if count > 1)
    return groups if len(groups) == len(paths) and len(counts) > 1 and num_together > min_share * len(paths) else []
