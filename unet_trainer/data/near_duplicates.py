"""Images that show the same: copies that were re-encoded, resized, flipped or turned, and series of one object.

Both are compared by thumbnails, which the scan makes: this module opens no file. What the thumbnails of a dataset have
in common (borders, light, the place of objects) is taken out first, so that images of one kind are no copies.
"""

import base64
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.data.pairs import first_few
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system.console import counted

Floats = NDArray[np.float32]

SIDE = 16  # of a thumbnail
BASIS = cv2.dct(np.eye(SIDE, dtype=np.float32), flags=cv2.DCT_ROWS).T  # of its waves
OVERSAMPLING = 4  # pixels each way that make one of it: this keeps fractions of a grey level of dark images
MIDDLE, CONTRAST = 128, 32  # mean and standard deviation of a thumbnail's pixels
CV_DTYPES = "uint8", "uint16", "float32"  # that OpenCV averages
MIN_CELLS = 5  # of a thumbnail that stand out: images with one bright spot each are no copies,
MIN_REST, NUM_WAVES = 0.05, 4  # nor are gradients: share of the variance that is not of the strongest waves
MIN_DEVIATION = 0.1  # from the mean of all thumbnails, of length 1: less is noise
NUM_COMPARED = 2000  # images that show what all have in common
FLOOR = 0.1  # of the mean variance: patterns with less are noise
# Of thumbnails of length 1. JPEG of quality 50, 256 pixels, grey, 20 levels more: at most 0.4. Other images of nuclei,
# horses and vessels: at least 0.7.
MAX_DISTANCE, MIN_DISTANCE = 0.5, 0.2
MANY_CELLS = 40  # that stand out, for MAX_DISTANCE: the fewer there are, the more images have them by chance
CHUNK, NUM_NEAREST = 128, 16  # images compared at a time, and those with the nearest hashes that are followed up

MIN_IMAGES, MIN_SERIES = 16, 5  # of which chance makes no series
MAX_MEAN_SIZE, MAX_SHARE = 16, 0.25  # of the images of a series; longer ones are videos
NUM_NUMBERS = 3  # of a name, from its end, that may count the photographs
CHANCE = 0.02  # of images with distant numbers, so many count as alike
MIN_AGREEMENT = 0.6  # share of the neighbours that are alike within a distance, less that of the others
NEARLY_BEST = 0.95  # of the agreement: of all distances that have it, the one before the widest gap


class Views(NamedTuple):
    """Thumbnails to compare, N,SIDE*SIDE, of length 1; 0 for images without one."""

    plain: Floats
    whitened: Floats  # what all have in common counts no more than what one has


class Series(NamedTuple):
    """Images with near numbers in their names that show the same object."""

    groups: list[str]  # of each image: the name of the first one of its series
    distance: int  # at most, from one number of a series to the next
    near_share: float  # of neighbours at this distance or less, those that are alike
    far_share: float


def thumbnail_of(image: Pixels) -> str:
    """Encode an H,W,C image of any depth as a small grey one; empty if it is of one value."""
    image = np.ascontiguousarray(image[:, :, :3])
    image = image if image.dtype.name in CV_DTYPES else image.astype(np.float32)
    image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.shape[2] == 3 else image[:, :, 0]
    pixels = cv2.resize(image, (SIDE * OVERSAMPLING, SIDE * OVERSAMPLING), interpolation=cv2.INTER_AREA)
    small = pixels.astype(np.float64).reshape(SIDE, OVERSAMPLING, SIDE, OVERSAMPLING).mean((1, 3))
    mean, spread = small.mean(), small.std()
    if not spread > 1e-3 * abs(mean):  # NaN too
        return ""
    scaled = MIDDLE + CONTRAST * (small - mean) / spread
    return base64.b64encode(scaled.round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def is_thumbnail(text: str) -> bool:
    return len(base64.b64decode(text)) in (0, SIDE**2)


def decode_thumbnails(thumbnails: Sequence[str]) -> Floats:
    """N,SIDE*SIDE; 0 where there is nothing to see."""
    pixels = b"".join(base64.b64decode(text) or bytes(SIDE**2) for text in thumbnails)
    return np.frombuffer(pixels, np.uint8).reshape(-1, SIDE**2).astype(np.float32)


def build_views(thumbnails: Sequence[str], are_masks: bool = False) -> Views:
    """Take out of the thumbnails what they have in common (whitening). Images that show too little count as none."""
    plain = decode_thumbnails(thumbnails)
    plain = _scale_to_unit(plain - plain.mean(1, keepdims=True))
    if not are_masks:
        strongest = np.sort((BASIS @ plain.reshape(-1, SIDE, SIDE) @ BASIS.T).reshape(plain.shape) ** 2)[:, -NUM_WAVES:]
        plain[((plain**4).sum(1) * MIN_CELLS > 1) | (strongest.sum(1) > 1 - MIN_REST)] = 0
    is_held = np.asarray(plain.any(1))
    sample = plain[is_held][:: math.ceil(is_held.sum() / NUM_COMPARED) or 1]
    if not len(sample):
        return Views(plain, plain)
    turned = _flip_and_turn(sample).reshape(-1, SIDE**2).astype(np.float64)
    deviations = (plain - turned.mean(0).astype(np.float32)) * is_held[:, None]
    plain = _scale_to_unit(deviations * (np.linalg.norm(deviations, axis=1, keepdims=True) > MIN_DEVIATION))
    variances, patterns = np.linalg.eigh(np.cov(turned, rowvar=False))
    scale = (variances.clip(0) + FLOOR * variances.mean() + 1e-12) ** -0.5
    return Views(plain, _scale_to_unit(plain @ ((patterns * scale) @ patterns.T).astype(np.float32)))


def find_near_duplicates(views: Views) -> list[tuple[int, int]]:
    """Pairs of images that are the same but for encoding, size, colour, a little light, flips and quarter turns.

    The sizes of the waves (DCT) of a thumbnail, added across the diagonal, are a hash that flips and turns leave as it
    is. Those with the nearest hashes are compared by their thumbnails."""
    held = np.flatnonzero(views.plain.any(1))
    hashes, pairs = _hash_waves(views.whitened[held]), set[tuple[int, int]]()
    squares = (hashes**2).sum(1)
    num_cells = 1 / np.maximum((views.plain**4).sum(1), 1e-9)
    limits = (MAX_DISTANCE * num_cells / MANY_CELLS).clip(MIN_DISTANCE, MAX_DISTANCE)
    for start in range(0, len(held), CHUNK):
        rows = slice(start, start + CHUNK)
        distances = squares[rows, None] + squares - 2 * hashes[rows] @ hashes.T
        nearest = np.argpartition(distances, min(NUM_NEAREST, len(held) - 1), axis=1)[:, : NUM_NEAREST + 1]
        row, place = np.nonzero(np.take_along_axis(distances, nearest, 1) < MAX_DISTANCE**2)
        ones, others = held[start + row], held[nearest[row, place]]
        turned = _flip_and_turn(views.whitened[others])
        similarity = np.einsum("nv,snv->sn", views.whitened[ones], turned).max(0)
        is_same = (similarity >= 1 - np.minimum(limits[ones], limits[others]) ** 2 / 2) & (ones != others)
        pairs.update(
            (min(pair), max(pair)) for pair in zip(ones[is_same].tolist(), others[is_same].tolist(), strict=True)
        )
    return sorted(pairs)


def find_series(names: Sequence[str], views: Sequence[Views]) -> Series | None:
    """The series of one object, if images with near numbers in their names are alike and others are not. `views`: of
    images and of masks; images are alike if one of both is."""
    for position in range(NUM_NUMBERS if len(names) >= MIN_IMAGES else 0):
        numbers = [re.findall(r"\d+", name)[::-1][position : position + 1] for name in names]
        kinds = [re.sub(r"\d+", "#", name) if its else name for name, its in zip(names, numbers, strict=True)]
        places = [(kind, int(its[0][-15:]) if its else 0) for kind, its in zip(kinds, numbers, strict=True)]
        order = sorted(range(len(names)), key=places.__getitem__)
        ordered = [places[index] for index in order]
        steps = np.array([b[1] - a[1] if a[0] == b[0] else np.inf for a, b in pairwise(ordered)])
        is_alike = np.zeros(len(steps), np.bool_)
        for vectors in (each.whitened[order] for each in views):
            distant = (vectors * np.roll(vectors, len(names) // 2, axis=0)).sum(1)
            is_alike |= (vectors[:-1] * vectors[1:]).sum(1) > np.quantile(distant, 1 - CHANCE)
        if (distance := _longest_step(steps, is_alike)) is None:
            continue
        series = np.append(0, np.cumsum(steps > distance))  # the number of each one's
        counts = np.bincount(series)
        if len(counts) >= MIN_SERIES and counts.mean() <= MAX_MEAN_SIZE and counts.max() <= MAX_SHARE * len(names):
            groups = [""] * len(names)
            for index, first in zip(order, (np.cumsum(counts) - counts)[series], strict=True):
                groups[index] = names[order[first]]
            near, far = is_alike[steps <= distance], is_alike[steps > distance]
            return Series(groups, int(distance), float(near.mean()), float(far.mean()))
    return None


def _longest_step(steps: NDArray[np.float64], is_alike: Pixels) -> float | None:
    """The distance that tells images that are alike from others best, if it does."""
    order = np.argsort(steps, kind="stable")
    sizes, alike = steps[order], np.cumsum(is_alike[order])
    following, others = np.append(sizes[1:], np.inf), np.arange(1, len(steps) + 1) - alike
    agreement = alike / max(1, alike[-1]) - others / max(1, others[-1])
    agreement[(sizes == following) | np.isinf(sizes)] = 0  # a distance counts with all its steps
    good = np.flatnonzero(agreement >= max(MIN_AGREEMENT, NEARLY_BEST * agreement.max()))
    gaps = (following[good] + 1) / (sizes[good] + 1)
    return float(sizes[good[gaps.argmax()]]) if len(good) else None


def describe_near_duplicates(
    pairs: Sequence[tuple[int, int]], names: Sequence[str], parts: Sequence[str], is_divided: bool
) -> str:
    """Those in train and in val, or else how many stay on one side. `parts`: of each image, train or val."""
    across = [(a, b) if parts[a] == "val" else (b, a) for a, b in pairs if {parts[a], parts[b]} == {"train", "val"}]
    shown = first_few((f"{names[one]} ≈ {names[other]}" for one, other in across or pairs), 3)
    kinds = "(re-encoded, resized, flipped or turned)"
    if across:
        share = f"{len({one for one, _ in across})} of {counted(parts.count('val'), 'validation image')}"
        return f"{share} nearly the same as training images {kinds}: {shown}; val_iou is too good"
    if is_divided or not pairs:
        return ""
    num_images = len({*chain(*pairs)})
    return f"{num_images} images are nearly the same as another one {kinds}; they stay on one side: {shown}"


def describe_series(series: Series, names: Sequence[str], parts: Sequence[str], is_divided: bool) -> str:
    """What was measured, with an example; of data that is divided, if a series is in train and in val."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(series.groups):
        members[group].append(index)
    shown, effect = [*members.values()], "groups stay on one side, unless group_pattern or split_file sets others"
    effect = f"{len(members)} {effect}"
    if is_divided:
        shown = [its for its in shown if {parts[index] for index in its} == {"train", "val"}]
        share = f"{sum(parts[index] == 'val' for index in chain(*shown))} of {parts.count('val')} validation images"
        effect = f"{share} have such a one in train, and val_iou is too good"
    if not shown:
        return ""
    example = ", ".join(names[index] for index in sorted(shown, key=len)[len(shown) // 2][:3])
    near, far = f"{series.near_share:.0%} of those up to {series.distance} apart", f"{series.far_share:.0%} of others"
    return f"images with near numbers are of one object ({example}): {near} are alike, {far}; {effect}"


def _scale_to_unit(vectors: Floats) -> Floats:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def _flip_and_turn(vectors: Floats) -> Floats:
    """8,N,SIDE*SIDE: every flip and quarter turn of each."""
    maps = vectors.reshape(-1, SIDE, SIDE)
    turned = np.stack([np.rot90(maps, turns, (1, 2)) for turns in range(4)])
    return np.concatenate([turned, turned[..., ::-1]]).reshape(8, -1, SIDE**2)


def _hash_waves(vectors: Floats) -> Floats:
    """The sizes of the waves of each thumbnail; of a wave and the one across the diagonal together."""
    sizes = np.abs(BASIS @ vectors.reshape(-1, SIDE, SIDE) @ BASIS.T)
    sums, (rows, columns) = sizes + sizes.transpose(0, 2, 1), np.triu_indices(SIDE)
    return sums[:, rows, columns] * np.where(rows == columns, 0.5, 0.5**0.5).astype(np.float32)
