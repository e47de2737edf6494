"""Images that show the same: copies that were re-encoded, resized, flipped or turned, and series of one object.

Both are compared by thumbnails, which the scan makes: this module opens no file. What the thumbnails of a dataset have
in common (borders, light, the place of objects) is taken out first, so that images of one kind are no copies.
"""

import base64
import re
from collections import Counter
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
# WAVES @ thumbnail @ WAVES.T is its DCT.
WAVES: Floats = np.asarray(cv2.dct(np.eye(SIDE, dtype=np.float32), flags=cv2.DCT_ROWS).T, np.float32)
OVERSAMPLING = 4  # pixels each way that make one of it: this keeps fractions of a grey level of dark images
MIDDLE, CONTRAST = 128, 32  # mean and standard deviation of a thumbnail's pixels
MIN_CELLS = 5  # pixels that stand out: images with one bright spot each are no copies,
MAX_WAVES, NUM_WAVES = 0.95, 4  # nor are gradients: share of the variance in the strongest waves
MAX_SAMPLE = 2000  # images that show what all have in common
NOISE = 0.1  # of the mean variance: what differs less between the images counts no more than so much
# Of thumbnails of length 1. JPEG of quality 50, 256 pixels, grey, 20 levels more: at most 0.4. Other images of nuclei,
# horses and vessels: at least 0.7. Of images in which fewer than MANY_CELLS stand out, more are alike by chance.
MAX_DISTANCE, MIN_DISTANCE, MANY_CELLS = 0.5, 0.2, 40
CHUNK, NUM_NEAREST = 128, 16  # images compared at a time, and those with the nearest hashes that are followed up

MIN_IMAGES = 16  # of fewer, chance makes series
MEAN_SIZES = 2, 16  # images in a series: more are a video
NUM_NUMBERS = 3  # of a name, from its end, that may count the photographs
CHANCE = 0.02  # of images with distant numbers, so many count as alike
MIN_AGREEMENT = 0.6  # share of the neighbours alike that are of one series, less that of the other neighbours


class Views(NamedTuple):
    """Thumbnails to compare, N,SIDE*SIDE, of length 1; 0 for images without one."""

    plain: Floats
    whitened: Floats  # what all have in common counts no more than what one has


class Series(NamedTuple):
    """Images with near numbers in their names that show the same object."""

    groups: list[str]  # of each image: the name of the first one of its series
    measured: str  # how many neighbours are alike within a series and beyond


def thumbnail_of(image: Pixels) -> str:
    """Encode an H,W,C image of any depth as a small grey one; empty if it is of one value."""
    image = np.ascontiguousarray(image[:, :, :3])
    if image.dtype not in (np.uint8, np.uint16, np.float32):  # others OpenCV cannot average
        image = image.astype(np.float32)
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
        strongest = np.sort(_transform(plain).reshape(plain.shape) ** 2)[:, -NUM_WAVES:].sum(1)
        plain[(_count_cells(plain) < MIN_CELLS) | (strongest > MAX_WAVES)] = 0
    is_held = np.asarray(plain.any(1))
    if not is_held.any():
        return Views(plain, plain)
    sample = plain[is_held][:: -(-is_held.sum() // MAX_SAMPLE)]
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
    sizes = np.abs(_transform(views.whitened[held]))
    rows, columns = np.triu_indices(SIDE)
    weights = np.where(rows == columns, 0.5, 0.5**0.5).astype(np.float32)
    hashes = (sizes + sizes.transpose(0, 2, 1))[:, rows, columns] * weights
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
        if gaps.max() > 1 and within - beyond >= MIN_AGREEMENT:
            series = np.append(0, np.cumsum(steps > distance))  # the number of each image's
            firsts = [names[order[first]] for first in np.unique(series, return_index=True)[1]]
            near, far = is_alike[is_near].mean(), is_alike[~is_near].mean()
            measured = f"{near:.0%} of those up to {distance:.0f} apart are alike, {far:.0%} of others"
            return Series([firsts[series[place]] for place in np.argsort(order)], measured)
    return None


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
    grouped = [*zip(series.groups, names, parts, strict=True)]
    shown = Counter(series.groups)
    effect = f"{len(shown)} groups stay on one side, unless group_pattern or split_file sets others"
    if is_divided:
        in_train = {group for group, _, part in grouped if part == "train"}
        across = [group for group, _, part in grouped if part == "val" and group in in_train]
        in_both = {*across}
        shown = Counter(group for group in series.groups if group in in_both)
        share = f"{len(across)} of {parts.count('val')} validation images"
        effect = f"{share} have such a one in train, and val_iou is too good"
    if not shown:
        return ""
    middle = sorted(shown, key=shown.__getitem__)[len(shown) // 2]
    example = ", ".join([name for group, name, _ in grouped if group == middle][:3])
    return f"images with near numbers are of one object ({example}): {series.measured}; {effect}"


def _scale_to_unit(vectors: Floats) -> Floats:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def _count_cells(vectors: Floats) -> Floats:
    """Of thumbnails of length 1, how many pixels stand out."""
    return np.asarray(1 / np.maximum((vectors**4).sum(1), 1e-9), np.float32)


def _transform(vectors: Floats) -> Floats:
    """N,SIDE,SIDE: the waves (DCT) of each thumbnail."""
    return np.asarray(WAVES @ vectors.reshape(-1, SIDE, SIDE) @ WAVES.T, np.float32)


def _flip_and_turn(vectors: Floats) -> Floats:
    """8,N,SIDE*SIDE: every flip and quarter turn of each."""
    maps = vectors.reshape(-1, SIDE, SIDE)
    turned = np.stack([np.rot90(maps, turns, (1, 2)) for turns in range(4)])
    return np.concatenate([turned, turned[..., ::-1]]).reshape(8, -1, SIDE**2)
