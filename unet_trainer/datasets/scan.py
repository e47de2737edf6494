"""Reads every file once before the first step, so that a bad file is reported at the start and not in the middle of a run.

Facts about a file are cached by its path, size and times: the next start reads only new and changed files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import DataError, ReadError, Stamp, content_digest, file_stamp, read_bytes
from unet_trainer.images.image_files import NO_MEMORY, Pixels, decode_image, decode_mask_or_alpha, refuse_bomb
from unet_trainer.images.image_headers import has_alpha, is_lossy, is_turned, palette_colours
from unet_trainer.images.image_spec import refuse_missing_mark
from unet_trainer.images.mask_structure import MaskStructure, measure_structure
from unet_trainer.shards.shard_store import find_member
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.forked_map import Crash, ReadStderr, forked_map
from unet_trainer.system.plain_content import from_plain

CACHE_FORMAT = 2
PART_VALUES = 2**22  # that are measured at a time
MAX_CACHED_VALUES = 4096  # of one mask; a mask with more values is read at every start
# What libjpeg prints about wrong data. Some cameras write extra bytes before the end marker: these are harmless.
JPEG_DAMAGE = re.compile(r"Corrupt JPEG data: (?!\d+ extraneous bytes before marker 0xd9)(.*)|Premature end of JPEG")


@dataclass(frozen=True)
class ImageFacts:
    """What an image file holds."""

    height: int
    width: int
    channels: int
    dtype: str
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]
    low: float
    high: float
    has_alpha: bool
    is_turned: bool  # rotated or mirrored because of its EXIF orientation
    digest: str  # of the file's bytes
    stamp: tuple[int, ...] = field(default=(), compare=False)  # when it was read

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    def is_consistent(self) -> bool:
        return min(self.size) > 0 and len(self.mean) == len(self.std) == self.channels > 0


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
    stamp: tuple[int, ...] = field(default=(), compare=False)

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    def is_consistent(self) -> bool:
        return min(self.size) > 0 and sum(self.counts.values()) == self.height * self.width


Facts = TypeVar("Facts", ImageFacts, MaskFacts)


@dataclass(frozen=True)
class PairFacts:
    """The facts of each file, or the reason why it cannot be used."""

    image: ImageFacts | str
    mask: MaskFacts | str

    def stamped(self, stamps: tuple[Stamp | None, Stamp | None]) -> PairFacts:
        image, mask = (tuple(stamp or ()) for stamp in stamps)
        return PairFacts(
            self.image if isinstance(self.image, str) else replace(self.image, stamp=image),
            self.mask if isinstance(self.mask, str) else replace(self.mask, stamp=mask),
        )


class ScanCache:
    """Facts from earlier scans, in one JSON file. Facts of a file whose size or times have changed are not found."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        self.is_changed = False
        # Without its cache a scan takes longer, nothing else.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            content = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
            if content.get("format") == CACHE_FORMAT:
                self.known = dict(content["files"])

    def find_image(self, path: Path, stamp: Stamp | None) -> ImageFacts | None:
        return self._find("image", ImageFacts, path, stamp)

    def find_mask(self, path: Path, stamp: Stamp | None) -> MaskFacts | None:
        return self._find("mask", MaskFacts, path, stamp)

    def _find(self, role: str, kind: type[Facts], path: Path, stamp: Stamp | None) -> Facts | None:
        """A damaged entry is as good as none: the file is read anew. The index of shards may have the facts too."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            stored = find_member(path)
            in_index = None if stored is None else stored.facts
            known_stamp, known = (stamp, in_index) if in_index is not None else self.known[_cache_key(role, path)]
            if stamp is not None and known_stamp == stamp:
                facts = from_plain(kind, {**known, "stamp": stamp})
                return facts if facts.is_consistent() else None
        return None

    def add_pair(self, pair: Pair, facts: PairFacts, stamps: tuple[Stamp | None, Stamp | None]) -> None:
        for role, path, found, stamp in (("image", pair.image, facts.image, stamps[0]), ("mask", pair.mask, facts.mask, stamps[1])):
            if isinstance(found, str) or stamp is None:
                self.known.pop(_cache_key(role, path), None)
            elif isinstance(found, ImageFacts) or len(found.counts) <= MAX_CACHED_VALUES:
                self.known[_cache_key(role, path)] = [stamp, plain_facts(found)]
            self.is_changed = True

    def save(self) -> None:
        if self.path is None or not self.is_changed:
            return
        with contextlib.suppress(OSError):  # as above
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path, json.dumps({"format": CACHE_FORMAT, "files": self.known}))


def plain_facts(facts: ImageFacts | MaskFacts) -> dict[str, Any]:
    """As they are remembered in a JSON file: without the stamp, which tells whether they still hold."""
    return {name: value for name, value in asdict(facts).items() if name != "stamp"}


def _cache_key(role: str, path: Path) -> str:
    return f"{role}:{path.absolute()}"


def open_scan_cache(data_dir: Path, checkpoint_dir: Path) -> ScanCache:
    """The cache for the files of data_dir; each data_dir has its own."""
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return ScanCache(checkpoint_dir / ".scan" / f"{name}.json")


@dataclass(frozen=True)
class _Task:
    """A pair to scan, the stamps of its files before they are read, and the facts that the cache has of them."""

    index: int
    pair: Pair
    stamps: tuple[Stamp | None, Stamp | None]
    image: ImageFacts | None
    mask: MaskFacts | None


def scan_pairs(
    pairs: Sequence[Pair],
    num_workers: int,
    tick: Callable[[], object] = lambda: None,
    cache: ScanCache | None = None,
    timeout: float | None = None,
) -> list[PairFacts]:
    """The facts of all pairs, in their order; `tick` is called after each. Decodes the files that the cache does not know.

    `timeout`: seconds after which the files of a pair count as never read. Raises DataError then: a disk that does not answer would
    take as long for every other pair.
    """
    cache = cache or ScanCache(None)
    facts: dict[int, PairFacts] = {}
    tasks: list[_Task] = []
    for index, pair in enumerate(pairs):
        stamps = file_stamp(pair.image), file_stamp(pair.mask)
        image, mask = cache.find_image(pair.image, stamps[0]), cache.find_mask(pair.mask, stamps[1])
        if image is None or mask is None:
            tasks.append(_Task(index, pair, stamps, image, mask))
        else:
            facts[index] = PairFacts(image, mask)
            tick()
    outcomes = forked_map(_scan_pair, tasks, num_workers, _use_one_thread, timeout)
    with warnings.catch_warnings(), contextlib.closing(outcomes):
        warnings.simplefilter("ignore")  # PIL's about broken headers, which name no file
        for position, outcome in outcomes:
            task = tasks[position]
            if isinstance(outcome, Crash) and outcome.is_timeout:
                files = f"{task.pair.shown_image} and {task.pair.shown_mask}"
                raise DataError(
                    f"{files}: {outcome.reason} (worker_timeout); is the disk there? Else one of them hangs its decoder"
                )
            found = _scan_separately(task) if isinstance(outcome, Crash) else outcome
            facts[task.index] = found.stamped(task.stamps)
            cache.add_pair(task.pair, found, task.stamps)
            tick()
    cache.save()
    return [facts[index] for index in range(len(pairs))]


def _use_one_thread() -> None:
    """OpenCV's own threads would be too many with several children, and do not survive a fork."""
    cv2.setNumThreads(0)


def _scan_pair(task: _Task, read_stderr: ReadStderr) -> PairFacts:
    image = task.image or _unless_damaged(_scan_image(task.pair.image), read_stderr())
    return PairFacts(image, task.mask or _unless_damaged(_scan_mask(task.pair.mask, _size_of(image)), read_stderr()))


def _scan_separately(task: _Task) -> PairFacts:
    """As _scan_pair, with a child process for each file, to find the file that crashes the decoder."""
    image = task.image or _scan_alone(_scan_image, task.pair.image)
    return PairFacts(image, task.mask or _scan_alone(partial(_scan_mask, image_size=_size_of(image)), task.pair.mask))


def _scan_alone(scan: Callable[[Path], Facts | str], path: Path) -> Facts | str:
    def scan_in_child(path: Path, read_stderr: ReadStderr) -> Facts | str:
        return _unless_damaged(scan(path), read_stderr())

    ((_, outcome),) = forked_map(scan_in_child, [path], 1, _use_one_thread)
    return f"decoding it crashed ({outcome.reason})" if isinstance(outcome, Crash) else outcome


def _unless_damaged(facts: Facts | str, printed: str) -> Facts | str:
    """A reason in place of the facts of a damaged JPEG: OpenCV decodes it, and libjpeg prints a message to standard error."""
    damage = JPEG_DAMAGE.search(printed)
    if damage is None or isinstance(facts, str):
        return facts
    return f"the file is damaged ({damage.group(1) or 'it ends too early'})"


def _size_of(image: ImageFacts | str) -> tuple[int, int] | None:
    return None if isinstance(image, str) else image.size


def _scan_image(path: Path) -> ImageFacts | str:
    try:
        data = read_bytes(path)
        image = decode_image(data)
        mean, std, low, high = _measure(image)
    except ReadError as error:
        return str(error)
    except MemoryError:
        return NO_MEMORY
    height, width, channels = image.shape
    return ImageFacts(
        height, width, channels, str(image.dtype), mean, std, low, high, has_alpha(data), is_turned(data), content_digest(data)
    )


def _scan_mask(path: Path, image_size: tuple[int, int] | None) -> MaskFacts | str:
    try:
        data = read_bytes(path)
        refuse_bomb(data, image_size)  # a mask may be large and nearly empty if its image is as large
        mask, is_alpha = decode_mask_or_alpha(data)
        height, width = mask.shape
        counts = _count_values(mask)
        structure = measure_structure(mask, max(counts, key=counts.__getitem__)) if len(counts) > 2 else None
    except ReadError as error:
        return str(error)
    except MemoryError:
        return NO_MEMORY
    colours = palette_colours(data)
    return MaskFacts(
        height,
        width,
        counts,
        content_digest(data),
        is_lossy(data),
        is_alpha,
        structure,
        {value: _as_hex(colours[value]) for value in counts if value < len(colours)} if colours else None,
    )


def _as_hex(colour: tuple[int, int, int]) -> int:
    red, green, blue = colour
    return (red << 16) + (green << 8) + blue


def _measure(image: Pixels) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """Mean and standard deviation of each channel, lowest and highest value; raises ReadError for values that are not finite."""
    if image.dtype == np.uint8 and image.shape[2] <= 4:
        mean, std = cv2.meanStdDev(image)
        return tuple(mean.ravel().tolist()), tuple(std.ravel().tolist()), float(image.min()), float(image.max())
    bad, low, high = 0, np.inf, -np.inf
    for part in _row_parts(image):
        with np.errstate(over="ignore"):  # a float64 may be infinite as the float32 of a batch
            bad += part.size - int(np.isfinite(part.astype(np.float32)).sum())
        low, high = min(low, float(part.min())), max(high, float(part.max()))
    if bad:
        raise ReadError(f"{bad} of {image.size} values are NaN or infinite")
    refuse_missing_mark(low, high)
    num_pixels = image.shape[0] * image.shape[1]
    mean = np.sum([part.sum((0, 1)) for part in _row_parts(image)], axis=0) / num_pixels
    variance = np.sum([((part - mean) ** 2).sum((0, 1)) for part in _row_parts(image)], axis=0) / num_pixels
    return tuple(mean.tolist()), tuple(np.sqrt(variance).tolist()), low, high


def _row_parts(image: Pixels) -> Iterator[Pixels]:
    """Some rows at a time as float64: the whole would take up to eight times the image's memory."""
    num_rows = max(1, PART_VALUES // (image.shape[1] * image.shape[2]))
    for top in range(0, len(image), num_rows):
        yield image[top : top + num_rows].astype(np.float64)


def _count_values(mask: Pixels) -> dict[int, int]:
    if mask.dtype == np.uint8:
        if mask.size < 2**24:
            histogram = cv2.calcHist([mask], [0], None, [256], [0, 256]).ravel()  # ten times faster than unique; float32
        else:
            histogram = np.bincount(mask.ravel(), minlength=256)
        return {int(value): int(histogram[value]) for value in np.flatnonzero(histogram)}
    values, counts = np.unique(mask, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
