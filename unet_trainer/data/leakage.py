"""Leaks from train into val: copies of an image and series of one object, by the thumbnails of the scan, and images
that are like their neighbours (frames of a video, slices, tiles that overlap, both eyes of a person). For these, names
suggest groups and sequences, and measured is how much likelier than by chance the most similar image is of the same
group, or next in the numbering. dataset_report decides what follows, dataset_notices says it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.dataset_notices import Finding
from unet_trainer.data.file_facts import CONTRAST, MIDDLE, SIDE, ImageFacts, decode_thumbnails
from unet_trainer.data.pairs import Pair
from unet_trainer.data.scan import read_each
from unet_trainer.data.splits import places_of
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.system.console import Console

MIN_IMAGES = 16  # among fewer, chance makes series and neighbours
MEAN_SIZES = 2, 16  # images in a group: larger ones are videos, or of one place, camera or kind of object

WAVES = cv2.dct(np.eye(SIDE, dtype=np.float32), flags=cv2.DCT_ROWS).T  # WAVES @ thumbnail @ WAVES.T: its DCT
MIN_CELLS = 5  # pixels that stand out: images with one bright spot each are no copies,
MAX_WAVES, NUM_WAVES = 0.95, 4  # nor are gradients: share of the variance in the strongest waves
MAX_SAMPLE, NOISE = 2000, 0.1  # of the mean variance: what differs less between images counts no more than so much
# Of thumbnails of length 1. JPEG of quality 50, 256 pixels, grey, 20 levels more: at most 0.4. Other images of nuclei,
# horses and vessels: at least 0.7. Of images in which fewer than MANY_CELLS stand out, more are alike by chance.
MAX_DISTANCE, MIN_DISTANCE, MANY_CELLS = 0.5, 0.2, 40
CHUNK, NUM_NEAREST = 128, 16  # images compared at a time, and those with the nearest hashes that are followed up
NUM_NUMBERS = 3  # of a name, from its end, that may count the photographs
CHANCE, MIN_DIFFERENCE = 0.02, 0.6  # images with distant numbers that count as alike; shares of neighbours in series

STRETCH, NUM_STRETCHES = 20, 12  # images in a row that are compared, and how many times, spread over all
NUM_ACROSS = 80  # validation images, and other training images, that are compared of a split of the data itself
NEAR = 2  # images before and after one that count as its neighbours
# Cohen's kappa (0: chance, 1: always) and standard deviations above chance. Unrelated photographs have a kappa of 0.02.
MIN_AGREEMENT, MIN_DEVIATIONS = 0.4, 5
MIN_SHARE = 0.6  # of the images that are in a group with another one, or share pixels with one
VAL_SHARES = 0.4, 2.5  # times the images that are to validate: what groups of uneven sizes may make of them
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
NOTHING = Finding("alike", "")


class Views(NamedTuple):
    """Thumbnails to compare, N,SIDE*SIDE, of length 1; 0 for images without one."""

    plain: Pixels
    whitened: Pixels  # what all have in common counts no more than what one has


class Series(NamedTuple):
    """Images with near numbers in their names that show the same object."""

    groups: list[str]  # of each image: the name of the first one of its series
    distance: int  # of the numbers of two neighbours in a series, at most
    alike_within: float  # share of the neighbours in a series that are alike
    alike_beyond: float


def build_views(thumbnails: Sequence[str], are_masks: bool = False) -> Views:
    """Take out of the thumbnails what they have in common (whitening). Images that show too little count as none."""
    plain = decode_thumbnails(thumbnails)
    plain = _scale_to_unit(plain - plain.mean(1, keepdims=True))
    if not are_masks:
        waves = WAVES @ plain.reshape(-1, SIDE, SIDE) @ WAVES.T
        strongest = np.sort(waves.reshape(plain.shape) ** 2)[:, -NUM_WAVES:].sum(1)
        plain[(_count_cells(plain) < MIN_CELLS) | (strongest > MAX_WAVES)] = 0
    is_held = np.asarray(plain.any(1))
    if not is_held.any():
        return Views(plain, plain)
    sample = plain[is_held][:: -(-is_held.sum() // MAX_SAMPLE)]  # show what all have in common
    turned = _flip_and_turn(sample).reshape(-1, SIDE**2).astype(np.float64)
    plain[is_held] -= turned.mean(0).astype(np.float32)
    plain = _scale_to_unit(plain)
    variances, patterns = np.linalg.eigh(np.cov(turned, rowvar=False))
    scale = (variances.clip(0) + NOISE * variances.mean() + 1e-12) ** -0.5
    return Views(plain, _scale_to_unit(plain @ ((patterns * scale) @ patterns.T).astype(np.float32)))


def find_near_duplicates(views: Views) -> list[tuple[int, int]]:
    """Pairs of images that are the same but for encoding, size, colour, a little light, flips and quarter turns.

    The perceptual hash is the size of each wave (DCT), with that of the wave across the diagonal: flips and turns leave
    it as it is. Images with the nearest hashes are compared by their thumbnails, flipped and turned in every way."""
    held = np.flatnonzero(views.plain.any(1))
    sizes = np.abs(WAVES @ views.whitened[held].reshape(-1, SIDE, SIDE) @ WAVES.T)
    hashes = ((sizes + sizes.transpose(0, 2, 1)) / 2).reshape(len(held), SIDE**2)
    squares = (hashes**2).sum(1)
    limits = (MAX_DISTANCE * _count_cells(views.plain) / MANY_CELLS).clip(MIN_DISTANCE, MAX_DISTANCE)
    pairs = set[tuple[int, int]]()
    for start in range(0, len(held), CHUNK):
        distances = squares[start : start + CHUNK, None] + squares - 2 * hashes[start : start + CHUNK] @ hashes.T
        nearest = np.argpartition(distances, min(NUM_NEAREST, len(held) - 1), axis=1)[:, : NUM_NEAREST + 1]
        row, place = np.nonzero(np.take_along_axis(distances, nearest, 1) < MAX_DISTANCE**2)
        ones, others = held[start + row], held[nearest[row, place]]
        similarity = np.einsum("nv,snv->sn", views.whitened[ones], _flip_and_turn(views.whitened[others])).max(0)
        is_same = (similarity >= 1 - np.minimum(limits[ones], limits[others]) ** 2 / 2) & (ones != others)
        pairs |= {(min(pair), max(pair)) for pair in np.stack([ones, others], 1)[is_same].tolist()}
    return sorted(pairs)


def find_series(names: Sequence[str], views: Sequence[Views]) -> Series | None:
    """The series of one object, if images with near numbers in their names are alike and others are not. `views`: of
    images and of masks; images are alike if one of both is."""
    kinds = [re.sub(r"\d+", "#", name) for name in names]
    numbers = [[0] * NUM_NUMBERS + [int(number) for number in re.findall(r"\d+", name)] for name in names]
    for position in range(1, 1 + NUM_NUMBERS if len(names) >= MIN_IMAGES else 0):
        places = [(kind, its[-position]) for kind, its in zip(kinds, numbers, strict=True)]
        order = sorted(range(len(names)), key=places.__getitem__)
        ordered = pairwise(places[index] for index in order)
        steps = np.array([b[1] - a[1] if a[0] == b[0] else np.inf for a, b in ordered], np.float64)
        is_alike = np.zeros(len(steps), np.bool_)
        for vectors in (each.whitened[order] for each in views):
            distant = (vectors * np.roll(vectors, len(names) // 2, axis=0)).sum(1)
            is_alike |= (vectors[:-1] * vectors[1:]).sum(1) > np.quantile(distant, 1 - CHANCE)
        # Series end at the widest gap between one step and the next larger one that makes them of a likely size.
        sizes = np.sort(steps)
        gaps = (np.append(sizes[1:], np.inf) + 1) / (sizes.clip(max=1e300) + 1)
        mean_sizes = len(names) / np.arange(len(steps), 0, -1)
        gaps[(mean_sizes < MEAN_SIZES[0]) | (mean_sizes > MEAN_SIZES[1]) | np.isinf(sizes)] = 0
        distance = sizes[gaps.argmax()]
        is_near = steps <= distance
        within, beyond = (is_near[each].sum() / max(1, each.sum()) for each in (is_alike, ~is_alike))
        if gaps.max() > 1 and within - beyond >= MIN_DIFFERENCE:
            series = np.append(0, np.cumsum(steps > distance))  # the number of each image's
            firsts = [names[order[first]] for first in np.unique(series, return_index=True)[1]]
            groups = [firsts[series[place]] for place in np.argsort(order)]
            return Series(groups, int(distance), is_alike[is_near].mean(), is_alike[~is_near].mean())
    return None


def find_neighbours(config: Config, pairs: Sequence[Pair], images: Sequence[ImageFacts], console: Console) -> Finding:
    """Images that are like their neighbours, if groups or split: blocks keep them apart."""
    paths = [pair.path_in(Path(config.data_dir)) for pair in pairs]
    for way, pattern in (("original", VERSION), ("number", LEFT_AND_RIGHT)):
        if groups := _group_by(pattern, paths):
            return _advise_groups(config, paths, {pattern: groups}, way)
    folders = ["^" + "[^/]+/" * level + "([^/]+)/" for level in range(min(path.count("/") for path in paths))]
    groupings = {pattern: groups for pattern in (*folders, *NAME_PATTERNS) if (groups := _group_by(pattern, paths))}
    places = places_of(paths)
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    if len(order) < MIN_IMAGES or (2 * len({place.sequence for place in places}) > len(places) and not groupings):
        return NOTHING
    starts = np.linspace(0, max(0, len(order) - STRETCH), NUM_STRETCHES).round().astype(int)
    sampled = np.unique((starts[:, None] + np.arange(STRETCH)).clip(max=len(order) - 1))
    chosen = [order[position] for position in sampled]
    is_compared = ~np.eye(len(chosen), dtype=np.bool_)
    nearest, overlapping = _find_nearest(pairs, images, chosen, is_compared, console)
    is_near = (np.abs(sampled[:, None] - sampled) <= NEAR) & _are_same([places[index].sequence for index in chosen])
    kappa, *measured = _measure(nearest, is_near, is_compared)
    is_tiled, ranked = overlapping >= MIN_SHARE, []
    for pattern, groups in groupings.items():
        similarity, *shares = _measure(nearest, _are_same([groups[index] for index in chosen]), is_compared)
        # Without a sequence or tiles, groups have to be patients or scenes, not kinds: many of few images.
        if similarity and (kappa or is_tiled or MEAN_SIZES[1] * len({*groups}) >= len(paths)):
            ranked.append((round(similarity, 1), len({*groups}), shares, pattern))
    ranked.sort(key=lambda each: each[:2], reverse=True)  # the clearest; of those as clear, with most groups
    way = "overlap" if is_tiled else "name" if ranked and not kappa else "numbering"
    measured = [overlapping] if way == "overlap" else ranked[0][2] if way == "name" else measured
    found = _advise_groups(config, paths, {pattern: groupings[pattern] for *_, pattern in ranked}, way, *measured)
    if not found and kappa:
        examples = [paths[index] for index in order[len(order) // 2 :]]
        return Finding("alike", way, examples[:3], measured, [], {"split": "blocks"})
    return found


def _advise_groups(
    config: Config, paths: Sequence[str], groupings: Mapping[str, list[str]], way: str, *measured: float
) -> Finding:
    """By the first pattern by which about as many images as wanted can validate."""
    wanted = len(paths) * (1 / config.num_folds if config.num_folds else config.val_fraction)
    for pattern, groups in groupings.items():
        (largest, most), *_, (_, least) = counts = Counter(groups).most_common()
        has_room = least <= VAL_SHARES[1] * wanted and len(paths) - most >= VAL_SHARES[0] * wanted
        if has_room and len(counts) >= (config.num_folds or 2):
            examples = [path for path, group in zip(paths, groups, strict=True) if group == largest]
            return Finding("alike", way, examples[:3], measured, [*dict(counts).values()], {"group_pattern": pattern})
    return NOTHING


def find_neighbours_across(
    train: Sequence[Pair], val: Sequence[Pair], images: Sequence[ImageFacts], console: Console
) -> Finding:
    """Whether validation images are like training images that are next in the numbering, of a split of the data itself.
    `images`: of train, then of val."""
    pairs, num_train = [*train, *val], len(train)
    versions = [{match[1] for pair in side if (match := re.search(VERSION, pair.image.name))} for side in (train, val)]
    if shared := sorted(versions[0] & versions[1]):
        return Finding("versions across", shared)
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = sorted((index for index, image in enumerate(images) if image.thumbnail), key=places.__getitem__)
    beside = defaultdict[int, set[int]](set)  # of validation images: training images before and after
    for direction in (order, order[::-1]):
        last = None
        for index in direction:
            if index < num_train:
                last = index
            elif last is not None and places[last].sequence == places[index].sequence:
                beside[index].add(last)
    if len(order) < MIN_IMAGES or 2 * len(beside) < len(val):
        return NOTHING
    sides = [index for index in order if index < num_train], [index for index in order if index in beside]
    spread = [np.linspace(0, len(its) - 1, min(len(its), NUM_ACROSS)).round().astype(int) for its in sides]
    training, validating = ([its[place] for place in where] for its, where in zip(sides, spread, strict=True))
    chosen = [*{*training}.union(*(beside[index] for index in validating)), *validating]
    is_compared = np.array([[index >= num_train > other for other in chosen] for index in chosen])
    nearest, overlapping = _find_nearest(pairs, images, chosen, is_compared, console)
    if overlapping >= MIN_SHARE:
        return Finding("tiles across", overlapping)
    is_beside = np.array([[other in beside.get(index, ()) for other in chosen] for index in chosen])
    kappa, *measured = _measure(nearest, is_beside, is_compared)
    return Finding("neighbours across", measured) if kappa else NOTHING


def _are_same(keys: Sequence[object]) -> Pixels:
    """N,N: whether two are of the same sequence or group."""
    first = np.array([keys.index(key) for key in keys])
    return first[:, None] == first


def _measure(nearest: Pixels, is_related: Pixels, is_compared: Pixels) -> tuple[float, float, float]:
    """How much likelier than by chance the most similar image is related to one (Cohen's kappa, 0 if not clearly), how
    often it is, and how often by chance. `is_related`, `is_compared`: of each to each other, N,N."""
    rows = np.flatnonzero(is_compared.any(1))
    share, chance = float(is_related[rows, nearest[rows]].mean()), float(is_related[is_compared].mean())
    kappa = (share - chance) / max(1e-9, 1 - chance)
    is_clear = kappa >= MIN_AGREEMENT and share - chance >= MIN_DEVIATIONS * (chance * (1 - chance) / len(rows)) ** 0.5
    return (kappa if is_clear else 0.0), share, chance


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
    rows, columns = ([hash(line.tobytes()) for line in side] for side in (image, image.swapaxes(0, 1)))
    counts = Counter(rows + columns)
    edges, inside = (rows[0], rows[-1], columns[0], columns[-1]), [*rows[1:-1], *columns[1:-1]]
    return {line for line in edges if counts[line] == 1}, {line for line in inside if counts[line] == 1}


def _group_by(pattern: str, paths: Sequence[str]) -> list[str]:
    """What the first bracket matches in each path; empty unless enough are in one of several groups with another."""
    matches = [re.search(pattern, path) for path in paths]
    groups = [match[1] for match in matches if match is not None and match[1]]
    are_enough = sum(count for count in Counter(groups).values() if count > 1) > MIN_SHARE * len(paths)
    return groups if len(groups) == len(paths) and len({*groups}) > 1 and are_enough else []


def _scale_to_unit(vectors: Pixels) -> Pixels:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def _count_cells(vectors: Pixels) -> Pixels:
    """Of thumbnails of length 1, how many pixels stand out."""
    return np.asarray(1 / np.maximum((vectors**4).sum(1), 1e-9))


def _flip_and_turn(vectors: Pixels) -> Pixels:
    """8,N,SIDE*SIDE: every flip and quarter turn of each."""
    maps = vectors.reshape(-1, SIDE, SIDE)
    turned = np.stack([np.rot90(maps, turns, (1, 2)) for turns in range(4)])
    return np.concatenate([turned, turned[..., ::-1]]).reshape(8, -1, SIDE**2)
