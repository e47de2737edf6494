"""Whether images are like their neighbours (frames of a video, slices of a stack, both eyes of a person), so that a random split
would put almost the same image into train and val.

Names suggest it, the images decide: measured is how often the most similar image is a neighbour by name. Reads some hundred files
where the names form sequences or groups; what was measured is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.datasets.name_patterns import (
    Grouping,
    Place,
    find_groupings,
    find_left_and_right,
    in_order,
    places_of,
    share_in_runs,
)
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import DataError, file_stamp
from unet_trainer.images.image_files import Pixels, read_image, read_mask
from unet_trainer.images.mask_coding import IGNORED, MaskCoding
from unet_trainer.images.overlays import to_display
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.forked_map import Crash, ReadStderr, forked_map
from unet_trainer.system.plain_content import from_plain

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

Floats = NDArray[np.floating[Any]]
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


class Neighbours(NamedTuple):
    """Patterns that keep similar images together, the one with most groups first; and what was measured, if that was needed."""

    groupings: tuple[Grouping, ...]
    likeness: Likeness | None
    is_sequence: bool  # images are like those before and after them in the numbering


class Reader(NamedTuple):
    """How files are read: in so many processes, with a progress bar, and only if the cache does not know what they gave."""

    num_workers: int = 1
    show_bar: ShowBar = lambda total: contextlib.nullcontext(lambda: None)
    cache_folder: Path | None = None


def find_neighbours(pairs: Sequence[Pair], data_dir: Path, coding: MaskCoding | None, reader: Reader) -> Neighbours | None:
    """The neighbours that are alike; None if there are none."""
    if len(pairs) < MIN_PAIRS:
        return None
    paths = [pair.path_in(data_dir) for pair in pairs]
    left_and_right = find_left_and_right(paths)
    if left_and_right is not None:
        return Neighbours((left_and_right,), None, False)
    places, groupings = places_of(paths), find_groupings(paths)
    if share_in_runs(places) < MIN_IN_RUNS and not groupings:
        return None
    likeness = _measure(pairs, places, groupings, coding, reader)
    if likeness is None:
        return None
    is_sequence = likeness.is_alike(likeness.by_number)
    alike = [
        grouping
        for grouping in groupings
        if likeness.is_alike(likeness.by_group[grouping.pattern]) and (is_sequence or _are_subjects(grouping))
    ]
    if not alike and not is_sequence:
        return None
    most = max((likeness.by_group[grouping.pattern][0] for grouping in alike), default=0.0)
    alike = [grouping for grouping in alike if likeness.by_group[grouping.pattern][0] >= FINE_SHARE * most]
    return Neighbours(tuple(sorted(alike, key=lambda grouping: -len(set(grouping.groups)))), likeness, is_sequence)


def _are_subjects(grouping: Grouping) -> bool:
    """Whether groups that are alike are patients or scenes, and not kinds of objects: there are many, of few images each."""
    num_groups = len(set(grouping.groups))
    return num_groups >= MIN_GROUPS and len(grouping.groups) / num_groups <= MAX_MEAN_SIZE


def find_neighbours_across(train: Sequence[Pair], val: Sequence[Pair], reader: Reader) -> Likeness | None:
    """Of a split that is given: how often the training image that is most like a validation image is its neighbour in the
    numbering. None if that is about as often as by chance."""
    pairs = [*train, *val]
    if len(pairs) < MIN_PAIRS:
        return None
    places = places_of([pair.image.stem for pair in pairs])  # parts lie in folders of their own
    order = in_order(places)
    is_val = np.array([index >= len(train) for index in order])
    nearest = {
        int(position): {
            near for step in (-1, 1) if (near := _next_in_train(order, places, is_val, int(position), step)) is not None
        }
        for position in np.flatnonzero(is_val)
    }
    neighboured = [position for position, near in nearest.items() if near]
    if 2 * len(neighboured) < len(val):
        return None
    chosen = [neighboured[index] for index in _spread(len(neighboured), NUM_ACROSS)]
    others = np.flatnonzero(~is_val)[_spread(len(train), NUM_ACROSS)].tolist()
    sampled = sorted({*chosen, *others, *(near for position in chosen for near in nearest[position])})
    at = {position: index for index, position in enumerate(sampled)}
    in_train = [at[position] for position in sampled if not is_val[position]]

    def compare(views: Sequence[_View]) -> Likeness:
        distances = _distances(views)
        best = [in_train[int(np.argmin(distances[at[position], in_train]))] for position in chosen]
        share = np.mean([sampled[index] in nearest[position] for position, index in zip(chosen, best, strict=True)])
        chance = np.mean([len(nearest[position]) / len(in_train) for position in chosen])
        return Likeness(len(chosen), (float(share), float(chance)))

    likeness = _read_and_compare([pairs[order[position]] for position in sampled], None, "across", compare, reader)
    return likeness if likeness is not None and likeness.is_alike(likeness.by_number) else None


def _next_in_train(order: Sequence[int], places: Sequence[Place], is_val: Pixels, position: int, step: int) -> int | None:
    """The nearest training image before or after a position, in the same sequence."""
    near = position + step
    while 0 <= near < len(order) and places[order[near]].sequence == places[order[position]].sequence:
        if not is_val[near]:
            return near
        near += step
    return None


def _measure(
    pairs: Sequence[Pair], places: Sequence[Place], groupings: Sequence[Grouping], coding: MaskCoding | None, reader: Reader
) -> Likeness | None:
    order = in_order(places)
    sampled = _stretches(len(order))
    sequences = [places[order[position]].sequence for position in sampled]
    groups = {grouping.pattern: [grouping.groups[order[position]] for position in sampled] for grouping in groupings}
    positions = np.array(sampled)
    is_same = np.array([[one == other for other in sequences] for one in sequences])
    is_near = (np.abs(positions[:, None] - positions) <= NEAR) & is_same
    np.fill_diagonal(is_near, False)

    def compare(views: Sequence[_View]) -> Likeness:
        most_similar = _distances(views).argmin(1)
        together = {pattern: np.array([[one == other for other in its] for one in its]) for pattern, its in groups.items()}
        for pattern in together:
            np.fill_diagonal(together[pattern], False)
        after = [index + 1 if index + 1 < len(sampled) and is_near[index, index + 1] else None for index in range(len(sampled))]
        return Likeness(
            len(views),
            _share(is_near, most_similar),
            {pattern: _share(same, most_similar) for pattern, same in together.items()},
            _mask_iou(views, [(index, near) for index, near in enumerate(after) if near is not None]),
            _mask_iou(views, [(index, (index + len(views) // 2) % len(views)) for index in range(len(views))]),
        )

    chosen = [pairs[order[position]] for position in sampled]
    return _read_and_compare(chosen, coding, f"within {sorted(groups)}", compare, reader)


def _share(is_related: Pixels, most_similar: Pixels) -> tuple[float, float]:
    """Share of the images whose most similar one is related to them, and the same by chance."""
    count = len(most_similar)
    return float(is_related[np.arange(count), most_similar].mean()), float(is_related.sum() / (count * (count - 1)))


def _stretches(count: int) -> list[int]:
    """Positions of runs of STRETCH images, spread over all; every position if there are few."""
    if count <= STRETCH * NUM_STRETCHES:
        return list(range(count))
    starts = np.linspace(0, count - STRETCH, NUM_STRETCHES).round().astype(int)
    return sorted({int(start) + offset for start in starts for offset in range(STRETCH)})


def _spread(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


@dataclass(frozen=True)
class _View:
    """Thumbnails of a pair: SIDE,SIDE,3 and, if masks are compared, MASK_SIDE,MASK_SIDE class ids."""

    image: Floats
    ids: Pixels | None


class _Task(NamedTuple):
    pair: Pair
    coding: MaskCoding | None


def _view(task: _Task, read_stderr: ReadStderr) -> _View | None:
    try:
        image = to_display(read_image(task.pair.image, min_side=4 * SIDE))
        ids = None if task.coding is None else task.coding.encode(read_mask(task.pair.mask))
    except DataError:  # it has changed since the scan; training says so
        return None
    small = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    if ids is not None:
        ids = cv2.resize(np.ascontiguousarray(ids), (MASK_SIDE, MASK_SIDE), interpolation=cv2.INTER_NEAREST_EXACT)
    return _View(small, ids)


def _read_and_compare(
    pairs: Sequence[Pair], coding: MaskCoding | None, what: str, compare: Callable[[Sequence[_View]], Likeness], reader: Reader
) -> Likeness | None:
    """What `compare` gives for the thumbnails of the pairs, or the cache has of them; None if one of them cannot be read."""
    files = [(str(path.absolute()), file_stamp(path)) for pair in pairs for path in (pair.image, pair.mask)]
    content = json.dumps([CACHE_FORMAT, what, None if coding is None else coding.to_dict(), files])
    name = f"neighbours-{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    cache = None if reader.cache_folder is None else reader.cache_folder / name
    if (known := _read_cache(cache)) is not None:
        return known
    views: dict[int, _View] = {}
    tasks = [_Task(pair, coding) for pair in pairs]
    with (
        reader.show_bar(len(tasks)) as tick,
        contextlib.closing(forked_map(_view, tasks, reader.num_workers, lambda: cv2.setNumThreads(0))) as outcomes,
    ):
        for index, outcome in outcomes:
            if not isinstance(outcome, Crash) and outcome is not None:
                views[index] = outcome
            tick()
    if len(views) < len(pairs):
        return None
    likeness = compare([views[index] for index in range(len(pairs))])
    if cache is not None:
        with contextlib.suppress(OSError):  # a lost cache costs seconds
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(cache, json.dumps({"format": CACHE_FORMAT, **asdict(likeness)}))
    return likeness


def _distances(views: Sequence[_View]) -> Floats:
    """Squared distances between the thumbnails; infinite between an image and itself."""
    flat = np.stack([view.image.ravel() for view in views]).astype(np.float64)
    squares = (flat**2).sum(1)
    distances = squares[:, None] + squares - 2 * flat @ flat.T
    np.fill_diagonal(distances, np.inf)
    return distances


def _mask_iou(views: Sequence[_View], pairs: Sequence[tuple[int, int]]) -> float | None:
    """The IoU that the masks of some images have with those of others: of the foreground, or the mean over several classes."""
    masks = [view.ids for view in views if view.ids is not None]  # all of them, or none
    classes = sorted({int(value) for ids in masks for value in np.unique(ids)} - {IGNORED})
    classes = [1] if classes == [0, 1] else classes
    scores = []
    for class_id in classes:
        both = either = 0
        for one, other in pairs:
            first, second = masks[one] == class_id, masks[other] == class_id
            both += int((first & second).sum())
            either += int((first | second).sum())
        if either:
            scores.append(both / either)
    return float(np.mean(scores)) if scores else None


def _read_cache(path: Path | None) -> Likeness | None:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        if content.pop("format", None) == CACHE_FORMAT:
            return from_plain(Likeness, content)
    return None
