"""Reads every file once before the first step, so that a bad one costs seconds at the start and not a run at night.

What a file holds is remembered by its path, size and time: the next start reads only what is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import cv2
import numpy as np

from unet_trainer.atomic import write_text_atomically
from unet_trainer.images import (
    JPEG_START,
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
from unet_trainer.masks import MaskCoding, show_value
from unet_trainer.pairs import Pair

MAX_WEIGHT = 10.0  # of a class against the middle one: beyond it, a few pixels would rule the loss
MEMORY_FORMAT = 1
MISSING = 1e30  # larger numbers mark pixels without data, and would swamp the statistics
MAX_REMEMBERED = 4096  # values of one mask; a mask with more is read again
# What libjpeg prints about a picture whose data are wrong; bytes before the end marker are a camera's habit and harmless.
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


@dataclass(frozen=True)
class PairFacts:
    """The facts of both files, or the reason why one cannot be read."""

    image: ImageFacts | str
    mask: MaskFacts | str


class ScanMemory:
    """Facts of earlier scans, in one JSON file; a file whose size or time differs is not in it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        self.is_changed = False
        # A lost memory costs a scan, no more.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            content = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
            if content.get("format") == MEMORY_FORMAT:
                self.known = dict(content["files"])

    def find(self, kind: str, path: Path) -> dict[str, Any] | None:
        entry = self.known.get(f"{kind}:{path.absolute()}")
        return entry[1] if entry is not None and entry[0] == file_stamp(path) else None

    def add(self, kind: str, path: Path, stamp: list[int] | None, facts: Mapping[str, Any]) -> None:
        if stamp is not None:
            self.known[f"{kind}:{path.absolute()}"] = [stamp, dict(facts)]
            self.is_changed = True

    def save(self) -> None:
        if self.path is None or not self.is_changed:
            return
        with contextlib.suppress(OSError):  # as above
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path, json.dumps({"format": MEMORY_FORMAT, "files": self.known}))


def count_cores() -> int:
    """Cores this process may use, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of(data_dir: Path, checkpoint_dir: Path) -> ScanMemory:
    """Where the facts about the files of data_dir are kept."""
    name = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
    return ScanMemory(checkpoint_dir / ".scan" / f"{name}.json")


def scan_pairs(
    pairs: Sequence[Pair], num_threads: int, tick: Callable[[], object] = lambda: None, memory: ScanMemory | None = None
) -> list[PairFacts]:
    """Decodes every file that the memory does not know, in the order of the pairs."""
    memory = memory or ScanMemory(None)
    facts = []
    # Threads, as decoding releases the GIL.
    with warnings.catch_warnings(), _hearing_decoders() as heard, ThreadPoolExecutor(num_threads) as pool:
        warnings.simplefilter("ignore")  # PIL's about broken headers; the errors say it with the file's name
        for found in pool.map(lambda pair: _scan_pair(pair, memory), pairs):
            facts.append(found)
            tick()
        damaged = _find_damaged(pairs, facts) if JPEG_DAMAGE.search(_text(heard)) else {}
    facts = [_with_damage(pair, found, damaged) for pair, found in zip(pairs, facts, strict=True)]
    for pair, found in zip(pairs, facts, strict=True):
        for kind, path in (("image", pair.image), ("mask", pair.mask)):
            if isinstance(getattr(found, kind), str):
                memory.known.pop(f"{kind}:{path.absolute()}", None)
    memory.save()
    return facts


def _scan_pair(pair: Pair, memory: ScanMemory) -> PairFacts:
    image = _scan_image(pair.image, memory)
    return PairFacts(image, _scan_mask(pair.mask, None if isinstance(image, str) else image.size, memory))


def _scan_image(path: Path, memory: ScanMemory) -> ImageFacts | str:
    known = memory.find("image", path)
    if known is not None:
        return ImageFacts(**{**known, "mean": tuple(known["mean"]), "std": tuple(known["std"])})
    stamp = file_stamp(path)
    try:
        data = read_bytes(path)
        refuse_bomb(data)
        image = decode_image(data)
        mean, std, low, high = _measure(image)
    except ReadError as error:
        return str(error)
    height, width, channels = image.shape
    facts = ImageFacts(
        height, width, channels, str(image.dtype), mean, std, low, high, drops_alpha(data), is_turned(data), _digest(data)
    )
    memory.add("image", path, stamp, asdict(facts))
    return facts


def _scan_mask(path: Path, image_size: tuple[int, int] | None, memory: ScanMemory) -> MaskFacts | str:
    known = memory.find("mask", path)
    if known is not None:
        return MaskFacts(**{**known, "counts": {int(value): count for value, count in known["counts"].items()}})
    stamp = file_stamp(path)
    try:
        data = read_bytes(path)
        refuse_bomb(data, image_size)  # a large mask with little in it is one, if its image is as large
        mask = decode_mask(data)
    except ReadError as error:
        return str(error)
    height, width = mask.shape
    facts = MaskFacts(height, width, _count_values(mask), _digest(data), is_16bit(data))
    if len(facts.counts) <= MAX_REMEMBERED:
        memory.add("mask", path, stamp, asdict(facts))
    return facts


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


def file_stamp(path: Path) -> list[int] | None:
    """Differs when the file does. Its own time is not enough: files out of an archive, exchanged by renaming, can have the same."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _with_damage(pair: Pair, facts: PairFacts, damaged: Mapping[Path, str]) -> PairFacts:
    return PairFacts(damaged.get(pair.image, facts.image), damaged.get(pair.mask, facts.mask))


def _find_damaged(pairs: Sequence[Pair], facts: Sequence[PairFacts]) -> dict[Path, str]:
    """JPEG files that decode with a complaint, which OpenCV passes on to standard error alone: one by one, to tell which."""
    damaged = {}
    with _hearing_decoders() as heard:
        for pair, found in zip(pairs, facts, strict=True):
            for path, its_facts in ((pair.image, found.image), (pair.mask, found.mask)):
                if isinstance(its_facts, str):
                    continue
                heard.seek(0)
                heard.truncate()
                try:
                    data = read_bytes(path)
                    if data.startswith(JPEG_START):
                        decode_image(data)
                except ReadError as error:  # it has changed since a moment ago
                    damaged[path] = str(error)
                    continue
                if complaint := JPEG_DAMAGE.search(_text(heard)):
                    damaged[path] = f"the file is damaged ({complaint.group(1) or 'it ends too early'})"
    return damaged


@contextlib.contextmanager
def _hearing_decoders() -> Iterator[IO[bytes]]:
    """Standard error goes into a file: the decoders' messages there name no file."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as heard:
        kept = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield heard
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _text(heard: IO[bytes]) -> str:
    heard.seek(0)
    return heard.read().decode(errors="replace")


def total_counts(masks: Sequence[MaskFacts]) -> Counter[int]:
    """Pixels of each value in all masks."""
    total: Counter[int] = Counter()
    for mask in masks:
        total.update(mask.counts)
    return total


def class_ids(mask: MaskFacts, coding: MaskCoding) -> dict[int, int]:
    """Class id → number of pixels; IGNORED and UNKNOWN included."""
    values = np.array(sorted(mask.counts))
    pixels: Counter[int] = Counter()
    for value, class_id in zip(values.tolist(), coding.encode(values).tolist(), strict=True):
        pixels[class_id] += mask.counts[value]
    return dict(pixels)


def where_values_are(pairs: Sequence[Pair], masks: Sequence[MaskFacts]) -> str:
    """The rarest values with a mask that holds them: a stray value is found there."""
    found = []
    for value, _ in reversed(total_counts(masks).most_common()[-3:]):
        holders = [pair.mask for pair, mask in zip(pairs, masks, strict=True) if value in mask.counts]
        found.append(f"{show_value(value)} in {len(holders)} of {len(pairs)} masks, e.g. {holders[0]}")
    return "Rarest: " + "; ".join(found)


def class_shares(masks: Sequence[MaskFacts], coding: MaskCoding, num_ids: int) -> list[float]:
    """Share of each class id among the pixels that count."""
    total: Counter[int] = Counter()
    for mask in masks:
        total.update(class_ids(mask, coding))
    per_class = [total[class_id] for class_id in range(num_ids)]
    return [pixels / max(1, sum(per_class)) for pixels in per_class]


def balanced_weights(shares: Sequence[float]) -> tuple[float, ...]:
    """Median share / share of each class, within a factor of MAX_WEIGHT; 1 for a class that does not occur."""
    present = [share for share in shares if share > 0]
    middle = float(np.median(present)) if present else 1.0
    return tuple(round(min(max(middle / share, 1 / MAX_WEIGHT), MAX_WEIGHT), 4) if share > 0 else 1.0 for share in shares)
