"""Reads every file once before the first step, so that a bad file is reported at the start.

Facts are cached by path, size and times: the next start reads only new and changed files. What the images of a
dataset share (channels, depth and statistics) follows from the facts."""

import hashlib
import io
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.schema import Config
from unet_trainer.data.near_duplicates import is_thumbnail, thumbnail_of
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
from unet_trainer.images.mask_shapes import MaskStructure, measure_structure
from unet_trainer.images.tiff_files import NO_MEMORY
from unet_trainer.system.concurrency import HANG_SECONDS, Crash, Item, ReadStderr, forked_map
from unet_trainer.system.console import Console, counted
from unet_trainer.system.input_files import parse_json
from unet_trainer.system.json_cache import from_plain, read_cache_bytes, write_cache_bytes
from unet_trainer.system.resources import count_cores

CACHE_HEAD = b"scan 8\n"  # another number whenever facts mean something else
KEY_BYTES, MAX_CACHE_BYTES = 32, 2**34
PART_VALUES = 2**22  # that are measured at a time
# An alpha channel with so many values, none of which but 0 has this share of the pixels, is a band.
MANY_OPACITIES, MAX_FREQUENT = 16, 0.5
# Of a photograph in place of a mask, the most frequent colours are kept, and groups of the others: all would fill the
# memory.
PIXELS_PER_COLOUR, NUM_KEPT = 16, 512
MAX_CACHED_VALUES = 4096  # of one mask; a mask with more values is read at every start
# What libjpeg prints about wrong data. Some cameras write extra bytes before the end marker: these are harmless.
JPEG_DAMAGE = re.compile(r"Corrupt JPEG data: (?!\d+ extraneous bytes before marker 0xd9)(.*)|Premature end of JPEG")
FLOATS = ("float16", "float32", "float64")
MAX_MARKS = 8
IMAGENET_REASON = "ImageNet's, for 8-bit RGB"


@dataclass(frozen=True)
class AlphaFacts:
    """What an alpha channel holds."""

    mean: float
    std: float
    low: float
    high: float
    is_band: bool  # many values, none of them frequent: no opacity


@dataclass(frozen=True)
class ImageFacts:
    """What an image file holds, without its alpha channel."""

    height: int
    width: int
    channels: int
    dtype: str
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]
    low: float
    high: float
    alpha: AlphaFacts | None
    is_turned: bool  # rotated or mirrored because of its EXIF orientation
    digest: str  # of the file's bytes
    pixels: str  # digest of the values without opacity, of one channel if all are equal
    missing: tuple[int, ...] = ()  # values of each channel that are no data, as find_missing tells; empty: none
    marks: tuple[str, ...] = ()  # what these hold
    tag: float | None = None  # of GDAL, if whole numbers are missing by it
    nodata: float | str = "fill"  # the setting that this was measured with; ignore is measured as fill
    thumbnail: str = ""  # empty: nothing to see, or missing values
    stamp: tuple[int, ...] = field(default=(), compare=False)  # when it was read

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def content(self) -> str:
        """The same for images that are identical, however they were saved."""
        return f"{self.size} {self.dtype} {self.pixels}"

    def is_consistent(self) -> bool:
        has_channels = len(self.mean) == len(self.std) == self.channels > 0 and len(self.missing) in (0, self.channels)
        return min(self.size) > 0 and has_channels and is_thumbnail(self.thumbnail)

    @property
    def is_grey(self) -> bool:
        """Whether there is one channel, or three that are equal, by their statistics."""
        return self.channels in (1, 3) and len(set(self.mean)) == len(set(self.std)) == 1

    def as_read(self, channels: int) -> "ImageFacts":
        """As a model of so many channels takes it: with alpha if it is one of them."""
        alpha = self.alpha
        if alpha is None or channels != self.channels + 1:
            return self
        mean, std = (*self.mean, alpha.mean), (*self.std, alpha.std)
        missing = (*self.missing, *[0] * bool(self.missing))
        low, high = min(self.low, alpha.low), max(self.high, alpha.high)
        return replace(self, channels=channels, mean=mean, std=std, missing=missing, low=low, high=high, alpha=None)


@dataclass(frozen=True)
class MaskFacts:
    """What a mask file holds."""

    height: int
    width: int
    counts: dict[int, int]  # value → number of pixels
    digest: str
    is_lossy: bool = False  # compressed in a way that changes values, as JPEG does
    is_alpha: bool = False  # the values are those of the alpha channel
    structure: MaskStructure | None = None  # None: fewer than three values
    palette: dict[int, int] | None = None  # of a mask with a palette, value → 0xRRGGBB, of the values that occur
    thumbnail: str = ""  # of where it differs from its most frequent value
    stamp: tuple[int, ...] = field(default=(), compare=False)

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    def is_consistent(self) -> bool:
        is_counted = sum(self.counts.values()) == self.height * self.width
        return min(self.size) > 0 and is_counted and is_thumbnail(self.thumbnail)


class PairFacts(NamedTuple):
    """The facts of each file, or the reason why it cannot be used."""

    image: ImageFacts | str
    mask: MaskFacts | str


Facts = ImageFacts | MaskFacts
FACTS: dict[str, type[Any]] = {"image": ImageFacts, "mask": MaskFacts}  # by the names of a pair's files


class ScanCache:
    """Facts from earlier scans, a line for each file: a digest of its path, its stamp and its facts as JSON. Not found
    are those of a file that has changed, or of an image measured with another `nodata`."""

    def __init__(self, path: Path | None, nodata: float | str = "fill") -> None:
        self.path, self.nodata = path, "fill" if nodata == "ignore" else nodata
        lines = io.BytesIO(read_cache_bytes(path, MAX_CACHE_BYTES))
        is_known = next(lines, b"") == CACHE_HEAD
        self.known = {line[:KEY_BYTES]: line[KEY_BYTES:] for line in lines} if is_known else {}

    def find(self, kind: str, path: Path, stamp: Stamp | None) -> Any:
        """A damaged entry is as good as none: the file is read anew. The index of shards may have the facts too."""
        with suppress(ValueError, LookupError, TypeError):
            if isinstance(path, StoredFile) and path.facts is not None:
                known_stamp, known = stamp, {"thumbnail": "", **path.facts}
            else:
                known_stamp, known = parse_json(self.known[_key(kind, path)])
            if stamp is not None and known_stamp == stamp:
                facts = from_plain(FACTS[kind], {**known, "stamp": stamp})
                if facts.is_consistent() and getattr(facts, "nodata", self.nodata) == self.nodata:
                    return facts
        return None

    def add(self, kind: str, path: Path, found: Facts | str, stamp: Stamp | None) -> Facts | str:
        """Returns the facts with their stamp."""
        self.known.pop(_key(kind, path), None)
        if isinstance(found, str) or stamp is None:
            return found
        if isinstance(found, ImageFacts) or len(found.counts) <= MAX_CACHED_VALUES:
            self.known[_key(kind, path)] = json.dumps([stamp, plain_facts(found)]).encode() + b"\n"
        return replace(found, stamp=tuple(stamp))

    def save(self) -> None:
        write_cache_bytes(self.path, chain([CACHE_HEAD], chain.from_iterable(self.known.items())))


def _key(kind: str, path: Path) -> bytes:
    name = os.fsencode(f"{kind}:{path.absolute()}")
    return hashlib.blake2b(name, digest_size=KEY_BYTES // 2).hexdigest().encode()


def plain_facts(facts: Facts) -> dict[str, Any]:
    """As they are remembered in a JSON file: without the stamp, which tells whether they still hold."""
    return {name: value for name, value in asdict(facts).items() if name != "stamp"}


def open_scan_cache(data_dir: Path, checkpoint_dir: Path, nodata: float | str) -> ScanCache:
    """The cache for the files of data_dir; each data_dir has its own."""
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return ScanCache(checkpoint_dir / ".scan" / f"{name}.jsonl", nodata)


File = tuple[str, Path]  # "image" or "mask", and where it is
Task = tuple[Pair, list[File]]  # a pair, and those of its files that are to be read


def scan_pairs(
    pairs: Sequence[Pair], console: Console, cache: ScanCache | None = None, timeout: float | None = None
) -> list[PairFacts]:
    """The facts of all pairs, in their order; files that the cache does not know are decoded, each once.

    Raises DataError where a pair takes `timeout` seconds: a disk that does not answer takes as long for every other.
    """
    cache = cache or ScanCache(None)
    facts: dict[File, Any] = {}
    tasks: list[Task] = []
    stamps = {path: file_stamp(path) for pair in pairs for path in (pair.image, pair.mask)}
    for pair in pairs:
        new = [file for file in (("image", pair.image), ("mask", pair.mask)) if file not in facts]
        facts |= {(kind, path): cache.find(kind, path, stamps[path]) for kind, path in new}
        if unknown := [file for file in new if facts[file] is None]:
            tasks.append((pair, unknown))
    has_new_facts, scan = bool(tasks), partial(_scan_files, nodata=cache.nodata)
    while tasks:
        alone: list[Task] = []
        with closing(_in_children(scan, tasks, console, "Reading every pair once:", timeout)) as outcomes:
            for (pair, files), outcome in outcomes:
                if isinstance(outcome, Crash):
                    if outcome.is_timeout:
                        why = (
                            f"{outcome.reason} (worker_timeout); is the disk there? Else one of them hangs its decoder"
                        )
                        raise DataError(f"{pair.shown_image} and {pair.shown_mask}: {why}")
                    if len(files) > 1:  # a child process for each tells which of them crashes the decoder
                        alone += [(pair, [file]) for file in files]
                        continue
                    outcome = [f"decoding it crashed ({outcome.reason})"]
                for (kind, path), found in zip(files, outcome, strict=True):
                    facts[kind, path] = cache.add(kind, path, found, stamps[path])
        tasks = alone
    if has_new_facts:
        cache.save()
    return [PairFacts(facts["image", pair.image], facts["mask", pair.mask]) for pair in pairs]


def read_each(read: Callable[[int, Pair], Any], pairs: Sequence[Pair], console: Console, label: str) -> list[Any]:
    """What `read` makes of each pair and its number, in child processes; None of one that cannot be read."""

    def attempt(item: tuple[int, Pair], _: ReadStderr) -> Any:
        try:
            return read(*item)
        except ShardError as error:
            return DataError(f"{item[1].shown_image}: {error}")
        except DataError:
            return None

    found: list[Any] = [None] * len(pairs)
    with closing(_in_children(attempt, list(enumerate(pairs)), console, label)) as outcomes:
        for (index, _), outcome in outcomes:
            found[index] = None if isinstance(outcome, Crash) else outcome
    return found


def _in_children(
    work: Callable[[Item, ReadStderr], Any],
    items: Sequence[Item],
    console: Console,
    label: str,
    timeout: float | None = HANG_SECONDS,
) -> Generator[tuple[Item, Any], None, None]:
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


def _scan_files(task: Task, read_stderr: ReadStderr, nodata: float | str) -> list[Facts | str] | DataError:
    """The facts of each file, or why it cannot be used; the error of a remote shard that cannot be read."""
    pair, files = task
    found: list[Facts | str] = []
    for kind, path in files:
        facts: Facts | str
        try:
            facts = _scan_image(path, nodata) if kind == "image" else _scan_mask(pair)
        except ReadError as error:
            if isinstance(error, ShardError) and isinstance(path, StoredFile) and path.store.is_remote:
                return DataError(f"{pair.shown_image}: {error}")
            facts = str(error)
        except MemoryError:
            facts = NO_MEMORY
        damage = JPEG_DAMAGE.search(read_stderr())  # OpenCV decodes such a file, and libjpeg prints a message
        found.append(facts if damage is None else f"the file is damaged ({damage.group(1) or 'it ends too early'})")
    return found


def _scan_image(path: Path, nodata: float | str) -> ImageFacts:
    file = EncodedImage(read_bytes(path))
    num_with_alpha = file.channels_with_alpha
    whole, alpha = file.decode(channels=num_with_alpha or None), None
    image = whole
    if num_with_alpha and whole.shape[2] == num_with_alpha:
        image, alpha = np.ascontiguousarray(whole[:, :, :-1]), _measure_alpha(np.ascontiguousarray(whole[:, :, -1:]))
    is_float = image.dtype.kind == "f"
    tag = file.nodata if is_float or nodata == "fill" else None
    is_missing = find_missing(image, [value for value in (tag, nodata) if isinstance(value, float)])
    mean, std, low, high, missing = _measure(image, is_missing)
    values = [] if is_missing is None else np.unique(image[is_missing])[:3].tolist()
    marks = tuple(sorted({f"{value:.6g}".replace("nan", "NaN") for value in values}))
    seen = whole if alpha is not None and alpha.is_band else image
    if (seen == seen[:, :, :1]).all():  # grey, in one channel or in three
        seen = seen[:, :, :1]
    pixels = content_digest(np.ascontiguousarray(seen).ravel().data)
    source = alpha, file.is_turned, content_digest(file.data), pixels
    without_data = missing, marks, tag if marks and not is_float else None, nodata
    thumbnail = "" if any(missing) else thumbnail_of(image)
    height, width, channels = image.shape
    return ImageFacts(
        height, width, channels, str(image.dtype), mean, std, low, high, *source, *without_data, thumbnail
    )


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
    common = max(counts, key=counts.__getitem__)
    structure = measure_structure(mask) if len(counts) >= min_values else None
    thumbnail = thumbnail_of((mask != common).astype(np.uint8)[:, :, None] * 255)
    if file.palette:
        shown = zip(mask_values_of(file.palette), file.palette, strict=True)
        palette = {value: (red << 16) + (green << 8) + blue for value, (red, green, blue) in shown if value in counts}
    others = file.is_lossy, is_alpha, structure, palette, thumbnail
    height, width = mask.shape
    return MaskFacts(height, width, counts, content_digest(file.data), *others)


def _measure_alpha(alpha: Pixels) -> AlphaFacts:
    """H,W,1. The visible pixels of a picture have one opacity, or nearly all of them."""
    (mean,), (std,), low, high, _ = _measure(alpha, find_missing(alpha))
    values, counts = np.unique(alpha[(alpha != 0) & (alpha == alpha)], return_counts=True)
    is_band = len(values) >= MANY_OPACITIES and counts.max() < MAX_FREQUENT * counts.sum()
    return AlphaFacts(mean, std, low, high, bool(is_band))


def _measure(
    image: Pixels, is_missing: Pixels | None
) -> tuple[tuple[float, ...], tuple[float, ...], float, float, tuple[int, ...]]:
    """Mean, standard deviation, lowest and highest of the values that are not missing; and how many are, by channel."""
    num_pixels = image.shape[0] * image.shape[1]
    counts = num_pixels - (0 if is_missing is None else np.count_nonzero(is_missing, axis=(0, 1)))
    if image.dtype == np.uint8 and image.shape[2] <= 4 and is_missing is None:
        mean, std = (found.ravel() for found in cv2.meanStdDev(image))
    else:
        mean = np.sum([part.sum((0, 1)) for part, _ in _row_parts(image, is_missing)], axis=0) / np.maximum(1, counts)
        squares = [((part - mean) ** 2 * is_held).sum((0, 1)) for part, is_held in _row_parts(image, is_missing)]
        std = np.sqrt(np.sum(squares, axis=0) / np.maximum(1, counts))
    held = image if is_missing is None else image[~is_missing]
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    missing = () if is_missing is None else tuple((num_pixels - counts).tolist())
    return tuple(mean.tolist()), tuple(std.tolist()), low, high, missing


def _row_parts(image: Pixels, is_missing: Pixels | None) -> Iterator[tuple[Pixels, Pixels | int]]:
    """Some rows at a time, to save memory, as float64: 0 where values are missing, and where they are not."""
    num_rows = max(1, PART_VALUES // (image.shape[1] * image.shape[2]))
    for top in range(0, len(image), num_rows):
        is_held = 1 if is_missing is None else ~is_missing[top : top + num_rows]
        yield np.where(is_held, image[top : top + num_rows].astype(np.float64), 0), is_held


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
    bands = [image.alpha is not None and image.alpha.is_band for image in images]
    keeps_alpha = 2 * sum(bands) > len(images)
    counts = Counter(image.channels + (keeps_alpha and is_band) for image, is_band in zip(images, bands, strict=True))
    return ImageKind(3 if set(counts) == {1, 3} else counts.most_common(1)[0][0], depth)


def depth_of(image: ImageFacts) -> str:
    return "float" if image.dtype in FLOATS else image.dtype


def choose_nodata(images: Sequence[ImageFacts], nodata: float | str) -> tuple[float, ...]:
    """The values that mark missing data, besides the tags of float files: the one that is set, or tags of GDAL."""
    tags = Counter(image.tag for image in images if image.tag is not None)
    return (nodata,) if isinstance(nodata, float) else tuple(sorted(tag for tag, _ in tags.most_common(MAX_MARKS)))


def describe_reading(
    images: Sequence[ImageFacts], channels: int, tags: Sequence[float], nodata: float | str, can_be_set: bool = True
) -> list[str]:
    """What is done with alpha channels and with missing data, a line each, and the settings for other ways."""
    total, lines = counted(len(images), "image"), []
    alpha = [image for image in images if image.alpha is not None]
    kept = [image for image in alpha if image.channels + 1 == channels]
    if kept:
        drop = f" (in_channels: {channels - 1} drops it)" if can_be_set else ""
        lines.append(f"the last channel of {len(kept)} of {total}, tagged as alpha, is kept as a band{drop}")
    if len(kept) < len(alpha):
        keep = f" (in_channels: {alpha[0].channels + 1} keeps it)" if can_be_set else ""
        lines.append(f"the alpha channel of {len(alpha) - len(kept)} of {total} is dropped{keep}")
    missing = [read for image in images if sum((read := image.as_read(channels)).missing)]
    if missing:
        num_values = sum(image.height * image.width * image.channels for image in missing)
        share = sum(sum(image.missing) for image in missing) / num_values
        values = [f"{value:g}" for value in tags]
        marks = ", ".join(dict.fromkeys(mark for image in missing for mark in image.marks))
        ways = ["these pixels are ignored"] if nodata == "ignore" else []
        if can_be_set and isinstance(nodata, str):
            ways += [] if ways else ["nodata: ignore ignores these pixels"]
            ways += [f"nodata: keep takes {', '.join(values)} as any other value"] if values else []
        verb, whose = ("has", "its") if len(missing) == 1 else ("have", "their")
        what = f"{len(missing)} of {total} {verb} no data in {share:.2%} of {whose} values ({marks})"
        lines.append("; ".join([f"{what}: left out of the statistics, and filled with the mean", *ways]))
    return lines


def mismatch(image: ImageFacts, kind: ImageKind) -> str | None:
    """Why an image cannot be in one batch with the others; None if it can. Of an image as it is read."""
    if depth_of(image) != kind.depth:
        return f"{depth_name(depth_of(image))}, the others are {depth_name(kind.depth)}"
    if image.channels not in (1, kind.channels):
        alpha = " and alpha" if image.alpha is not None else ""
        return f"{image.channels} channels{alpha}, need {kind.channels}"
    return None


def build_image_spec(
    config: Config, kind: ImageKind, images: Sequence[ImageFacts], nodata: tuple[float, ...]
) -> tuple[ImageSpec, str]:
    """The spec, and the source of its statistics: as given, ImageNet's for 8-bit RGB, or the training images."""
    given = {"image_mean": config.image_mean, "image_std": config.image_std}
    as_set = {name: tuple(value) for name, value in given.items() if not isinstance(value, str)}
    what = f"values; the images have {kind.channels} channels"
    if wrong := [f"{name}: got {len(its)} {what}" for name, its in as_set.items() if len(its) != kind.channels]:
        raise ConfigError("\n".join(wrong))
    is_8bit = kind.depth == "uint8"
    is_photo = is_8bit and kind.channels == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if is_photo else pooled_statistics(images, kind.channels)
    mean, std = as_set.get("image_mean", mean), as_set.get("image_std", std)
    reason = "as given" if len(as_set) == 2 else IMAGENET_REASON if is_photo else "of the training images"
    held = [image for image in images if sum(image.missing) < image.height * image.width * image.channels] or images
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
