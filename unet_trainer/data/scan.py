"""Reads every file once before the first step, so that a bad file is reported at the start, and decides from what they
hold what all images share: channels, depth, what marks missing data, and statistics."""

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.schema import Config
from unet_trainer.data.file_facts import (
    MAX_CACHED_VALUES,
    Facts,
    ImageFacts,
    Kind,
    MaskFacts,
    PairFacts,
    ScanCache,
    thumbnail_of,
)
from unet_trainer.data.pairs import Pair
from unet_trainer.images.file_bytes import (
    DataError,
    ReadError,
    ShardError,
    Stamp,
    StoredFile,
    content_digest,
    file_stamp,
    read_bytes,
)
from unet_trainer.images.image_decoding import EncodedImage, Pixels, mask_values_of, read_image
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, ImageSpec, depth_name, find_missing
from unet_trainer.images.mask_decoding import decode_mask_or_alpha
from unet_trainer.images.mask_shapes import measure_structure
from unet_trainer.images.tiff_files import NO_MEMORY
from unet_trainer.system.concurrency import HANG_SECONDS, Crash, ReadStderr, forked_map
from unet_trainer.system.console import Console
from unet_trainer.system.resources import count_cores

KINDS: tuple[Kind, Kind] = ("image", "mask")
CV_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "float32", "float64")  # that OpenCV measures
# An alpha channel with so many values, none of which but 0 has this share of the pixels, is a band.
MANY_OPACITIES, MAX_FREQUENT = 16, 0.5
# Of a photograph in place of a mask, the most frequent colours are kept, and groups of the others: all would fill the
# memory.
PIXELS_PER_COLOUR, NUM_KEPT = 16, 512
# What libjpeg prints about wrong data. Some cameras write extra bytes before the end marker: these are harmless.
JPEG_DAMAGE = re.compile(r"Corrupt JPEG data: (?!\d+ extraneous bytes before marker 0xd9)(.*)|Premature end of JPEG")
MAX_MARKS = 8
IMAGENET_REASON = "ImageNet's, for 8-bit RGB"

Task = tuple[Kind, Pair]  # a file of a pair
Work = Callable[[Any, ReadStderr], Any]


def open_scan_cache(data_dir: Path, checkpoint_dir: Path, nodata: float | str) -> ScanCache:
    """The cache for the files of data_dir; each data_dir has its own."""
    name = content_digest(os.fsencode(data_dir.resolve()))
    return ScanCache(checkpoint_dir / ".scan" / f"{name}.sqlite", nodata)


def scan_pairs(
    pairs: Sequence[Pair], console: Console, cache: ScanCache | None = None, timeout: float | None = None
) -> list[PairFacts]:
    """The facts of all pairs, in their order; files that the cache does not know are decoded, each once.

    Raises DataError where a file takes `timeout` seconds: a disk that does not answer takes as long for every other.
    """
    cache, found = cache or ScanCache(None), dict[Kind, list[Any]]()
    unknown = defaultdict[tuple[Kind, Path], list[int]](list)  # files that are to be read: the numbers of their pairs
    for kind in KINDS:
        paths = [getattr(pair, kind) for pair in pairs]
        found[kind] = [*cache.find(kind, paths)]
        for index, facts in enumerate(found[kind]):
            if facts is None:
                unknown[kind, paths[index]].append(index)
    tasks = [(kind, pairs[indices[0]]) for (kind, _), indices in unknown.items()]
    scan = partial(_scan_file, nodata=cache.nodata)
    try:
        with closing(_in_children(scan, tasks, console, "Reading every file once:", timeout)) as outcomes:
            for (kind, pair), outcome in outcomes:
                path = getattr(pair, kind)
                if isinstance(outcome, Crash) and outcome.is_timeout:
                    why = f"{outcome.reason} (worker_timeout); is the disk there? Else this file hangs its decoder"
                    raise DataError(f"{getattr(pair, f'shown_{kind}')}: {why}")
                crashed = isinstance(outcome, Crash)
                facts, stamp = (f"decoding it crashed ({outcome.reason})", None) if crashed else outcome
                if stamp is not None and not isinstance(facts, str):
                    cache.add(kind, path, facts, stamp)
                for index in unknown[kind, path]:
                    found[kind][index] = facts
    finally:
        cache.save()
    return [PairFacts(*both) for both in zip(found["image"], found["mask"], strict=True)]


def read_each(read: Callable[[int, Pair], Any], pairs: Sequence[Pair], console: Console, label: str) -> list[Any]:
    """What `read` makes of each pair and its number, in child processes; None of one that cannot be read."""

    def attempt(item: tuple[int, Pair], _: ReadStderr) -> Any:
        try:
            return read(*item)
        except ShardError as error:
            return DataError(f"{item[1].shown_image}: {error}")
        except DataError:
            return None

    with closing(_in_children(attempt, [*enumerate(pairs)], console, label)) as outcomes:
        found = {index: None if isinstance(outcome, Crash) else outcome for (index, _), outcome in outcomes}
    return [found[index] for index in range(len(pairs))]


def _in_children(
    work: Work, items: Sequence[Any], console: Console, label: str, timeout: float | None = HANG_SECONDS
) -> Generator[tuple[Any, Any], None, None]:
    """Each item and its outcome, as of forked_map; to be closed. Raises the first DataError that is an outcome."""
    with (
        console.bar(label, len(items), keep=False) as bar,
        warnings.catch_warnings(action="ignore"),  # PIL's about broken headers, which name no file
        closing(forked_map(work, items, count_cores(), timeout=timeout)) as outcomes,
    ):
        for index, outcome in outcomes:
            if isinstance(outcome, DataError):
                raise outcome
            yield items[index], outcome
            bar.tick()


def _scan_file(
    task: Task, read_stderr: ReadStderr, nodata: float | str
) -> tuple[Facts | str, Stamp | None] | DataError:
    """The facts of a file or why it cannot be used, and its stamp; the error of a remote shard that cannot be read."""
    kind, pair = task
    path: Path = getattr(pair, kind)
    stamp = file_stamp(path)
    facts: Facts | str
    try:
        facts = _scan_image(path, nodata) if kind == "image" else _scan_mask(pair)
    except ReadError as error:
        if isinstance(error, ShardError) and isinstance(path, StoredFile) and path.store.is_remote:
            return DataError(f"{getattr(pair, f'shown_{kind}')}: {error}")
        facts = str(error)
    except MemoryError:
        facts = NO_MEMORY
    if damage := JPEG_DAMAGE.search(read_stderr()):  # OpenCV decodes such a file, and libjpeg prints a message
        facts = f"the file is damaged ({damage.group(1) or 'it ends too early'})"
    return facts, stamp


def _scan_image(path: Path, nodata: float | str) -> ImageFacts:
    file = EncodedImage(read_bytes(path))
    whole, alpha = file.decode(channels=file.channels_with_alpha or None), ""
    if file.channels_with_alpha == whole.shape[2]:
        alpha = "band" if _is_band(whole[:, :, -1]) else "opacity"
    image = np.ascontiguousarray(whole[:, :, :-1]) if alpha else whole
    is_float = whole.dtype.kind == "f"
    tag = file.nodata if is_float or nodata == "fill" else None
    is_missing = find_missing(whole if is_float else image, [mark for mark in (tag, nodata) if isinstance(mark, float)])
    if is_missing is not None and is_missing.shape != whole.shape:  # an opacity of whole numbers is there everywhere
        is_missing = np.dstack([is_missing, np.zeros(whole.shape[:2], bool)])
    seen = whole if alpha == "band" else image
    held = seen if is_missing is None else seen[~is_missing[:, :, : seen.shape[2]]]
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    seen = seen[:, :, :1] if (seen == seen[:, :, :1]).all() else seen  # grey, in one channel or in three
    digests = content_digest(file.data), content_digest(np.ascontiguousarray(seen).ravel().data)
    statistics = whole.dtype.name, *_measure(whole, is_missing), low, high, alpha, file.is_turned
    if is_missing is None:
        return ImageFacts._make((*image.shape, *statistics, *digests, (), (), None, nodata, thumbnail_of(image)))
    missing = tuple(np.count_nonzero(is_missing, axis=(0, 1)).tolist())
    values = np.unique(whole[is_missing])[:3].tolist()
    marks = tuple(sorted({f"{value:.6g}".replace("nan", "NaN") for value in values}))
    rest = missing, marks, None if is_float else tag, nodata, ""
    return ImageFacts._make((*image.shape, *statistics, *digests, *rest))


def _is_band(alpha: Pixels) -> bool:
    """H,W. The visible pixels of a picture have one opacity, or nearly all of them."""
    values, counts = np.unique(alpha[(alpha != 0) & (alpha == alpha)], return_counts=True)
    return len(values) >= MANY_OPACITIES and bool(counts.max() < MAX_FREQUENT * counts.sum())


def _measure(image: Pixels, is_missing: Pixels | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of what is not missing."""
    image = image if image.dtype.name in CV_DTYPES else image.astype(np.float64)
    channels = np.ascontiguousarray(np.moveaxis(image, 2, 0))
    held = [None] * len(channels) if is_missing is None else (~np.moveaxis(is_missing, 2, 0)).astype(np.uint8, "C")
    moments = [cv2.meanStdDev(channel, mask=mask) for channel, mask in zip(channels, held, strict=True)]
    mean, std = np.array(moments)[:, :, 0, 0].T.tolist()
    return tuple(mean), tuple(std)


def scan_as_mask(_: int, pair: Pair) -> MaskFacts:
    """What the image holds if it is read as a mask; raises DataError."""
    return _scan_mask(replace(pair, mask=pair.image), min_values=1)


def _scan_mask(pair: Pair, min_values: int = 3) -> MaskFacts:
    """`min_values`: with fewer, the structure is not measured."""
    file = EncodedImage(read_bytes(pair.mask))
    try:
        file.refuse_bomb()
    except ReadError:  # a mask may be large and nearly empty if its image is as large
        file.refuse_bomb(read_image(pair.image).shape[:2])
    mask, is_alpha = decode_mask_or_alpha(file)
    counts, palette = _count_values(mask), None
    if file.palette:
        shown = zip(mask_values_of(file.palette), file.palette, strict=True)
        palette = {value: (red << 16) + (green << 8) + blue for value, (red, green, blue) in shown if value in counts}
    structure = measure_structure(mask) if len(counts) >= min_values else None
    common = max(counts, key=counts.__getitem__)
    thumbnail = thumbnail_of((mask != common).astype(np.uint8)[:, :, None] * 255)
    height, width = mask.shape
    digest = content_digest(file.data)
    return MaskFacts(height, width, counts, digest, file.is_lossy, is_alpha, structure, palette, thumbnail)


def _count_values(mask: Pixels) -> dict[int, int]:
    if mask.dtype == np.uint8:
        histogram = np.bincount(mask.ravel(), minlength=256)  # several times faster than unique
        return {int(value): int(histogram[value]) for value in np.flatnonzero(histogram)}
    values, counts = np.unique(mask, return_counts=True)
    if mask.dtype == np.int32 and len(values) > max(MAX_CACHED_VALUES, min(mask.size // PIXELS_PER_COLOUR, 2**16)):
        is_kept = np.zeros(len(values), bool)
        is_kept[np.argsort(-counts, kind="stable")[:NUM_KEPT]] = True
        # neighbours in their order
        groups = np.linspace(0, np.count_nonzero(~is_kept), NUM_KEPT, endpoint=False).astype(int)
        values = np.append(values[is_kept], values[~is_kept][groups])
        counts = np.append(counts[is_kept], np.add.reduceat(counts[~is_kept], groups))
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


# What the images of a dataset share


@dataclass(frozen=True)
class ImageKind:
    """Channels and depth that the images of one dataset share."""

    channels: int
    depth: str  # a key of DEPTH_NAMES, or another dtype

    def __str__(self) -> str:
        channels = {1: "grey", 3: "RGB"}.get(self.channels, f"{self.channels} channels")
        return f"{depth_name(self.depth)} {channels}"


def choose_kind(images: Sequence[ImageFacts], in_channels: int | str) -> ImageKind:
    """The kind of most images; grey ones among colour count as colour, alpha where it is a band in most."""
    depth = Counter(depth_of(image) for image in images).most_common(1)[0][0]
    if in_channels != "auto":
        return ImageKind(int(in_channels), depth)
    keeps_alpha = 2 * sum(image.alpha == "band" for image in images) > len(images)
    counts = Counter(image.channels + (keeps_alpha and image.alpha == "band") for image in images)
    return ImageKind(3 if set(counts) == {1, 3} else counts.most_common(1)[0][0], depth)


def depth_of(image: ImageFacts) -> str:
    return "float" if image.dtype.startswith("float") else image.dtype


def choose_nodata(images: Sequence[ImageFacts], nodata: float | str) -> tuple[float, ...]:
    """The values that mark missing data, besides the tags of float files: the one that is set, or tags of GDAL."""
    tags = {image.tag for image in images if image.tag is not None}
    return (nodata,) if isinstance(nodata, float) else tuple(sorted(tags)[:MAX_MARKS])


def mismatch(image: ImageFacts, kind: ImageKind) -> str | None:
    """Why an image cannot be in one batch with the others; None if it can. Of an image as it is read."""
    if depth_of(image) != kind.depth:
        return f"{depth_name(depth_of(image))}, the others are {depth_name(kind.depth)}"
    if image.channels not in (1, kind.channels):
        return f"{image.channels} channels, need {kind.channels}"
    return None


def build_image_spec(
    config: Config, kind: ImageKind, images: Sequence[ImageFacts], nodata: tuple[float, ...]
) -> tuple[ImageSpec, str]:
    """The spec, and the source of its statistics: as given, ImageNet's for 8-bit RGB, or the training images."""
    keys = "image_mean", "image_std"
    given = {key: tuple(getattr(config, key)) for key in keys if not isinstance(getattr(config, key), str)}
    what = f"values; the images have {kind.channels} channels"
    if wrong := [f"{name}: got {len(its)} {what}" for name, its in given.items() if len(its) != kind.channels]:
        raise ConfigError("\n".join(wrong))
    is_8bit = kind.depth == "uint8"
    is_photo = is_8bit and kind.channels == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if is_photo else pooled_statistics(images, kind.channels)
    mean, std = given.get("image_mean", mean), given.get("image_std", std)
    reason = "as given" if len(given) == 2 else IMAGENET_REASON if is_photo else "of the training images"
    held = [image for image in images if sum(image.missing) < image.num_values] or images
    low, high = (0.0, 255.0) if is_8bit else (min(image.low for image in held), max(image.high for image in held))
    high = high if high > low else low + 1.0
    how = config.nodata == "ignore", isinstance(config.nodata, float)
    return ImageSpec(kind.channels, kind.depth, mean, std, low, high, nodata, *how), reason


def pooled_statistics(images: Sequence[ImageFacts], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all values that are data; std 1 without any spread."""
    mean, within, between, has_spread = _moments(images, channels)
    std = np.where(has_spread, np.sqrt(within + between), 1.0)
    return tuple(float(f"{value:.6g}") for value in mean), tuple(float(f"{value:.6g}") for value in std)


def brightness_share(images: Sequence[ImageFacts], channels: int) -> float:
    """Share of the variance of pixel values that lies between images; 0 where values are missing."""
    _, within, between, has_spread = _moments(images, channels)
    if not has_spread.any() or any(sum(image.missing) for image in images):
        return 0.0
    return float(np.mean((between / np.where(has_spread, within + between, 1.0))[has_spread]))


def _moments(images: Sequence[ImageFacts], channels: int) -> tuple[Any, Any, Any, Any]:
    """Of each channel: mean, variance within images and between them, and whether there is more than rounding."""
    columns = zip(*((image.mean, image.std, image.missing or 0) for image in images), strict=True)
    means, stds, missing = (np.array([np.broadcast_to(its, channels) for its in column]) for column in columns)
    weights = np.array([[image.height * image.width] for image in images], np.float64) - missing
    weights /= np.maximum(1, weights.sum(axis=0))
    mean = (weights * means).sum(axis=0)
    within, between = (weights * stds**2).sum(axis=0), (weights * (means - mean) ** 2).sum(axis=0)
    return mean, within, between, np.sqrt(within + between) > np.finfo(np.float32).eps * np.abs(mean)
