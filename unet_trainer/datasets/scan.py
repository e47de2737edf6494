"""Reads every file once before the first step, so that a bad file costs seconds at the start and not a run at night.

What a file holds is remembered by its path, size and times: the next start reads only what is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.image_files import (
    Pixels,
    ReadError,
    decode_image,
    decode_mask,
    drops_alpha,
    is_16bit,
    is_turned,
    read_bytes,
    refuse_bomb,
)
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.forked_map import Crash, ReadStderr, forked_map

MEMORY_FORMAT = 1
MISSING = 1e30  # larger numbers mark pixels without data, and would swamp the statistics
MAX_REMEMBERED = 4096  # values of one mask; a mask with more is read again
# What libjpeg prints about a picture whose data are wrong; bytes before the end marker are a camera's habit and harmless.
JPEG_DAMAGE = re.compile(r"Corrupt JPEG data: (?!\d+ extraneous bytes before marker 0xd9)(.*)|Premature end of JPEG")

Stamp = list[int]  # size and times; a list, because JSON gives lists back


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
    is_turned: bool  # as its EXIF orientation says
    digest: str  # of the bytes

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


@dataclass(frozen=True)
class MaskFacts:
    """What a mask file holds."""

    height: int
    width: int
    counts: dict[int, int]  # value → number of pixels
    digest: str
    is_16bit: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


Facts = TypeVar("Facts", ImageFacts, MaskFacts)


@dataclass(frozen=True)
class PairFacts:
    """The facts of both files, or the reason why one cannot be read."""

    image: ImageFacts | str
    mask: MaskFacts | str


class ScanMemory:
    """Facts of earlier scans, in one JSON file. A file whose size or time has changed is not found in it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        self.is_changed = False
        # A lost memory costs a scan, no more.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            content = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
            if content.get("format") == MEMORY_FORMAT:
                self.known = dict(content["files"])

    def find_pair(self, pair: Pair) -> PairFacts | None:
        """The facts of both files, or None if either is unknown."""
        image, mask = self._find("image", pair.image), self._find("mask", pair.mask)
        if image is None or mask is None:
            return None
        return PairFacts(
            ImageFacts(**{**image, "mean": tuple(image["mean"]), "std": tuple(image["std"])}),
            MaskFacts(**{**mask, "counts": {int(value): count for value, count in mask["counts"].items()}}),
        )

    def add_pair(self, pair: Pair, facts: PairFacts, stamps: tuple[Stamp | None, Stamp | None]) -> None:
        for kind, path, found, stamp in (("image", pair.image, facts.image, stamps[0]), ("mask", pair.mask, facts.mask, stamps[1])):
            if isinstance(found, str) or stamp is None:
                self.known.pop(_memory_key(kind, path), None)
            elif isinstance(found, ImageFacts) or len(found.counts) <= MAX_REMEMBERED:
                self.known[_memory_key(kind, path)] = [stamp, asdict(found)]
            self.is_changed = True

    def _find(self, kind: str, path: Path) -> dict[str, Any] | None:
        entry = self.known.get(_memory_key(kind, path))
        return entry[1] if entry is not None and entry[0] == file_stamp(path) else None

    def save(self) -> None:
        if self.path is None or not self.is_changed:
            return
        with contextlib.suppress(OSError):  # as above
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path, json.dumps({"format": MEMORY_FORMAT, "files": self.known}))


def _memory_key(kind: str, path: Path) -> str:
    return f"{kind}:{path.absolute()}"


def memory_of(data_dir: Path, checkpoint_dir: Path) -> ScanMemory:
    """Where the facts about the files of data_dir are kept."""
    name = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
    return ScanMemory(checkpoint_dir / ".scan" / f"{name}.json")


def scan_pairs(
    pairs: Sequence[Pair], num_workers: int, tick: Callable[[], object] = lambda: None, memory: ScanMemory | None = None
) -> list[PairFacts]:
    """Decodes every file that the memory does not know; the facts come in the order of the pairs."""
    memory = memory or ScanMemory(None)
    facts: list[PairFacts | None] = [memory.find_pair(pair) for pair in pairs]
    unknown = [index for index, found in enumerate(facts) if found is None]
    for _ in range(len(pairs) - len(unknown)):
        tick()
    # OpenCV's own threads would be too many beside the children, and do not survive a fork.
    one_thread = partial(cv2.setNumThreads, 0)
    for position, outcome in forked_map(_scan_pair, [pairs[index] for index in unknown], num_workers, one_thread):
        index = unknown[position]
        if isinstance(outcome, Crash):
            reason = f"decoding it crashed ({outcome.reason})"
            facts[index] = PairFacts(reason, reason)
        else:
            facts[index], stamps = outcome
            memory.add_pair(pairs[index], outcome[0], stamps)
        tick()
    memory.save()
    return [found for found in facts if found is not None]


def _scan_pair(pair: Pair, read_stderr: ReadStderr) -> tuple[PairFacts, tuple[Stamp | None, Stamp | None]]:
    """The facts and the stamps of both files, taken before they were read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's about broken headers; the errors say it with the file's name
        stamps = file_stamp(pair.image), file_stamp(pair.mask)
        image = _unless_damaged(_scan_image(pair.image), read_stderr())
        mask = _unless_damaged(_scan_mask(pair.mask, None if isinstance(image, str) else image.size), read_stderr())
    return PairFacts(image, mask), stamps


def _unless_damaged(facts: Facts | str, said: str) -> Facts | str:
    """OpenCV decodes a damaged JPEG and only prints a complaint of libjpeg to standard error."""
    complaint = JPEG_DAMAGE.search(said)
    if complaint is None or isinstance(facts, str):
        return facts
    return f"the file is damaged ({complaint.group(1) or 'it ends too early'})"


def _scan_image(path: Path) -> ImageFacts | str:
    try:
        data = read_bytes(path)
        refuse_bomb(data)
        image = decode_image(data)
        mean, std, low, high = _measure(image)
    except ReadError as error:
        return str(error)
    height, width, channels = image.shape
    return ImageFacts(
        height, width, channels, str(image.dtype), mean, std, low, high, drops_alpha(data), is_turned(data), _digest(data)
    )


def _scan_mask(path: Path, image_size: tuple[int, int] | None) -> MaskFacts | str:
    try:
        data = read_bytes(path)
        refuse_bomb(data, image_size)  # a mask may be large and nearly empty, if its image is as large
        mask = decode_mask(data)
    except ReadError as error:
        return str(error)
    height, width = mask.shape
    return MaskFacts(height, width, _count_values(mask), _digest(data), is_16bit(data))


def _measure(image: Pixels) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """Mean and spread of each channel, the lowest and the highest value; raises ReadError for values that are no numbers."""
    if image.dtype == np.uint8 and image.shape[2] <= 4:
        mean, std = cv2.meanStdDev(image)
        return tuple(mean.ravel().tolist()), tuple(std.ravel().tolist()), float(image.min()), float(image.max())
    values = image.astype(np.float64)
    with np.errstate(over="ignore"):  # float64 may hold numbers that are infinite in a batch
        bad = values.size - int(np.isfinite(values.astype(np.float32)).sum())
    if bad:
        raise ReadError(f"{bad} of {values.size} values are NaN or infinite")
    low, high = float(values.min()), float(values.max())
    if max(-low, high) > MISSING:
        raise ReadError(f"values from {low:.3g} to {high:.3g}; a mark for missing data? put an ordinary number in its place")
    return (
        tuple(values.mean((0, 1)).tolist()),
        tuple(values.std((0, 1)).tolist()),
        low,
        high,
    )


def _count_values(mask: Pixels) -> dict[int, int]:
    if mask.dtype == np.uint8:
        if mask.size < 2**24:
            histogram = cv2.calcHist([mask], [0], None, [256], [0, 256]).ravel()  # ten times faster than unique; float32
        else:
            histogram = np.bincount(mask.ravel(), minlength=256)
        return {int(value): int(histogram[value]) for value in np.flatnonzero(histogram)}
    values, counts = np.unique(mask, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_stamp(path: Path) -> Stamp | None:
    """Size and times of a file. The modification time is not enough: files out of an archive, swapped by renaming, share it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
