"""Measures a sample of the training pairs, to decide how to train: structures, symmetry, spread of light, colour."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.config.facts import Measurements
from unet_trainer.data.pairs import Pair
from unet_trainer.data.scan import read_each
from unet_trainer.images.drawing import to_display
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.images.mask_decoding import MaskCoding, read_mask
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.console import Console

Floats = NDArray[np.floating[Any]]

MAX_PAIRS = 200  # that are measured: enough for every number here, and a few seconds
MAX_PIXELS = 2_000_000  # of a mask; a larger one is measured at a fraction
GRID = 8  # cells along each side of the maps that symmetry is judged by
VIEW, NUM_VIEWS = 256, 6  # side and number of the crops that symmetry is judged by too, as models that see crops would
NUM_TURNS = 4  # after which each transform is back at the original
NUM_SHUFFLES = 400  # random transforms of the set that a share is compared with

# Each is applied to the last two axes of a map.
TRANSFORMS: dict[str, Callable[[Floats], Floats]] = {
    "horizontal_flip": lambda maps: maps[..., ::-1],
    "vertical_flip": lambda maps: maps[..., ::-1, :],
    "quarter_turn": lambda maps: np.rot90(maps, 1, (-2, -1)),
}


class _Measured(NamedTuple):
    """Of one pair."""

    structures: dict[int, tuple[float, float, float]]  # class id → structure, relative structure, thickness
    object_sizes: list[float]
    brightness: float
    has_colour: bool
    maps: list[Floats]  # num_ids or 3,GRID,GRID: of mask and image; of crops of mask and image


def measure_dataset(
    pairs: Sequence[Pair], coding: MaskCoding, num_ids: int, common_id: int, console: Console
) -> Measurements:
    """Measures up to MAX_PAIRS pairs, spread over all. `common_id` is the class that is taken for background."""
    chosen = [pairs[index] for index in np.unique(np.linspace(0, len(pairs) - 1, MAX_PAIRS).round().astype(int))]
    measure = partial(_measure_pair, coding=coding, num_ids=num_ids, common_id=common_id)
    read = read_each(measure, chosen, console, "Measuring structures and symmetry:")
    found: list[_Measured] = [each for each in read if each is not None]
    by_class: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for class_id, numbers in chain(*(each.structures.items() for each in found)):
        by_class[class_id].append(numbers)
    medians = [np.median(numbers, axis=0) for numbers in by_class.values()] or [np.zeros(3)]
    structure, relative_structure, _ = max(medians, key=lambda numbers: numbers[1])
    sizes = [*chain(*(each.object_sizes for each in found))] or [1.0]
    brightness = [each.brightness for each in found] or [0.5]
    masks, images, mask_views, image_views = ([each.maps[kind] for each in found] for kind in range(4))
    told, chance = _compare_transforms(masks, images)
    told_in_views, chance_in_views = _compare_transforms(mask_views, image_views)
    return Measurements(
        num_pairs=len(found),
        structure=float(structure),
        relative_structure=float(relative_structure),
        thickness=float(min(numbers[2] for numbers in medians)),
        size_spread=float(np.percentile(sizes, 90) / max(np.percentile(sizes, 10), 1.0)),
        brightness=float(np.mean(brightness)),
        brightness_spread=float(np.std(brightness)),
        has_colour=sum(each.has_colour for each in found) > len(found) / 2,
        told=told,
        told_in_views=told_in_views,
        has_sides=_has_sides(masks),
        chance=chance,
        chance_in_views=chance_in_views,
    )


def _measure_pair(seed: int, pair: Pair, coding: MaskCoding, num_ids: int, common_id: int) -> _Measured:
    image, ids = to_display(read_image(pair.image)), coding.encode(read_mask(pair.mask))
    ids = resize_mask(ids, image.shape[:2])
    factor = math.ceil(math.sqrt(ids.size / MAX_PIXELS))
    structures, sizes = _measure_structures(np.ascontiguousarray(ids[::factor, ::factor]), num_ids, common_id, factor)
    rng, side = np.random.default_rng(seed), min(VIEW, *ids.shape)
    corners = [[int(rng.integers(length - side + 1)) for length in ids.shape] for _ in range(NUM_VIEWS)]
    views = [np.s_[top : top + side, left : left + side] for top, left in corners]
    class_views = np.mean([_class_map(ids[view], num_ids) for view in views], axis=0)
    image_views = np.mean([_image_map(image[view]) for view in views], axis=0)
    channels = image.reshape(-1, 3)[:: max(1, image.shape[0] * image.shape[1] // 10_000)].astype(np.int16)
    has_colour, brightness = bool(np.ptp(channels, axis=1).mean() > 2), float(image.mean()) / 255
    maps = [_class_map(ids, num_ids), _image_map(image), class_views, image_views]
    return _Measured(structures, sizes, brightness, has_colour, maps)


def _measure_structures(
    ids: Pixels, num_ids: int, common_id: int, factor: int
) -> tuple[dict[int, tuple[float, float, float]], list[float]]:
    """Structure, relative structure and thickness of each class but the common one; and the sizes of all objects.
    `factor`: by which the ids were made smaller."""
    found, sizes = {}, []
    for class_id in {*np.unique(ids).tolist()} & {*range(num_ids)} - {common_id}:
        is_class = (ids == class_id).astype(np.uint8)
        thickness = float(max(ids.shape))  # at most; without an edge, OpenCV's distances are undefined
        if not is_class.all():
            # The mean distance to the edge is a quarter of a stripe's width. Beyond the image's edge the class goes on.
            beyond = cv2.copyMakeBorder(is_class, 1, 1, 1, 1, cv2.BORDER_REPLICATE)
            distances = cv2.distanceTransform(beyond, cv2.DIST_L2, 3)
            thickness = min(thickness, 4 * float(distances[1:-1, 1:-1][is_class > 0].mean()))
        _, _, statistics, _ = cv2.connectedComponentsWithStats(is_class, connectivity=8)
        areas = statistics[1:, cv2.CC_STAT_AREA].astype(np.float64)
        typical = math.sqrt(np.average(areas, weights=areas))  # weighted by area: specks do not count
        structure = min(typical, 4 * thickness)  # a network of vessels is one object, but its structure is fine
        found[class_id] = structure * factor, structure / math.sqrt(ids.size), thickness * factor
        sizes += (np.sqrt(areas[areas >= 0.05 * typical**2])[:100] * factor).tolist()
    return found, sizes


def _class_map(ids: Pixels, num_ids: int) -> Floats:
    """num_ids,GRID,GRID: share of each class in each cell."""
    small = cv2.resize(np.ascontiguousarray(ids), (16 * GRID, 16 * GRID), interpolation=cv2.INTER_NEAREST_EXACT)
    return np.stack([_shrink((small == class_id).astype(np.float32)) for class_id in range(num_ids)])


def _image_map(image: Pixels) -> Floats:
    """3,GRID,GRID: two of colour, one of texture. Ratios: uneven light over the image changes none."""
    pixels = cv2.resize(image, (32 * GRID, 32 * GRID), interpolation=cv2.INTER_AREA).astype(np.float32)
    red, green, blue = (pixels[:, :, channel] for channel in range(3))
    total = red + green + blue + 15
    means, squares = _shrink(total / 3), _shrink((total / 3) ** 2)
    texture = np.log(np.sqrt(np.maximum(squares - means**2, 0)) / means + 1e-2)
    return np.stack([_shrink((red - green) / total), _shrink((blue - green) / total), texture])


def _shrink(values: Floats) -> Floats:
    return np.asarray(cv2.resize(values, (GRID, GRID), interpolation=cv2.INTER_AREA), np.float32)


def _compare_transforms(masks: Sequence[Floats], images: Sequence[Floats]) -> tuple[dict[str, float], dict[str, float]]:
    """Share of images distinguishable from their transform by mask or image, and the chance of that in two trials."""
    trials = {
        name: max((_distinguishable_share(maps, transform) for maps in (masks, images)), key=lambda trial: trial[0])
        for name, transform in TRANSFORMS.items()
    }
    return {name: its[0] for name, its in trials.items()}, {name: min(1.0, 2 * its[1]) for name, its in trials.items()}


def _distinguishable_share(maps: Sequence[Floats], transform: Callable[[Floats], Floats]) -> tuple[float, float]:
    """Share of the images that can be distinguished from their transform by what the other images look like; and the
    chance of a share at least as large when each image is transformed at random, which then changes nothing.

    Each map minus its transform is compared with the sum of that difference over all other maps: where the transform
    leaves the distribution as it is, half of the images agree with it."""
    if len(maps) < 2:
        return 0.5, 1.0
    scale = np.std(maps, axis=0) + 1e-3
    # Every image turned no, one, two and three times (a flip twice is none): the differences that it may show.
    turned = [np.stack(maps) / scale]
    for _ in range(NUM_TURNS):
        turned.append(transform(turned[-1] * scale) / scale)
    differences = np.stack([(now - later).reshape(len(maps), -1) for now, later in pairwise(turned)])  # turns,N,values
    rng, every, shares = np.random.default_rng(0), np.arange(len(maps)), []
    for shuffle in range(1 + NUM_SHUFFLES):  # first as they are
        shown = differences[rng.integers(0, NUM_TURNS, len(maps)) if shuffle else 0, every]
        agreement = (shown * (shown.sum(axis=0) - shown)).sum(axis=1)
        shares.append(float(np.mean(np.where(agreement == 0, 0.5, agreement > 0))))
    return shares[0], sum(share >= shares[0] for share in shares) / len(shares)


def _has_sides(masks: Sequence[Floats]) -> bool:
    """Whether a class, mirrored, lies where another one lies and not where it lies itself: left lung and right lung."""

    def cosine(one: Floats, other: Floats) -> float:
        return float((one * other).sum() / (np.linalg.norm(one) * np.linalg.norm(other)))

    for one, other in combinations(np.mean(masks, axis=0) if masks else (), 2):
        mirrored, (smaller, larger) = one[:, ::-1], sorted((one.sum(), other.sum()))
        if smaller >= 0.3 * larger > 0 and cosine(mirrored, other) > 0.9 and cosine(mirrored, one) < 0.5:
            return True
    return False
