"""Reads every pair once before the first step, so that a bad file costs seconds at the start and not a run at night."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np

from unet_trainer.images import DataError, Pixels, ReadError, read_image, read_mask
from unet_trainer.masks import UNKNOWN, MaskCoding, show_value
from unet_trainer.pairs import Pair

NUM_NAMED = 20  # problems shown before "and N more"
MAX_WEIGHT = 10.0  # of a class against the middle one: beyond it, a few pixels would rule the loss


@dataclass(frozen=True)
class Scan:
    """What the files hold: mask pixels of each value, per pair, and how often each size occurs."""

    counts_by_pair: list[dict[int, int]]  # mask value → number of pixels
    sizes: Counter[tuple[int, int]]  # (height, width) → number of images

    @property
    def counts(self) -> Counter[int]:
        """Pixels of each value in all masks."""
        total: Counter[int] = Counter()
        for counts in self.counts_by_pair:
            total.update(counts)
        return total


def scan_pairs(pairs: Sequence[Pair], num_threads: int, tick: Callable[[], object] = lambda: None) -> Scan:
    """Decodes every file; raises DataError that names all that cannot be read or whose sizes differ."""
    with ThreadPoolExecutor(num_threads) as pool:  # decoding releases the GIL
        results = []
        for result in pool.map(_scan_pair, pairs):
            results.append(result)
            tick()
    problems = [problem for result in results if isinstance(result, list) for problem in result]
    if problems:
        raise DataError(_listed("files that cannot be used", problems))
    good = [result for result in results if not isinstance(result, list)]
    return Scan([counts for _, counts in good], Counter(size for size, _ in good))


def refuse_misfits(pairs: Sequence[Pair], scan: Scan, coding: MaskCoding) -> None:
    """Raises DataError that names each mask holding a value that is no class."""
    problems = []
    for pair, counts in zip(pairs, scan.counts_by_pair, strict=True):
        values = np.array(sorted(counts))
        misfits = values[coding.encode(values) == UNKNOWN].tolist()
        if misfits:
            total = sum(counts.values())
            shares = ", ".join(f"{show_value(value)} ({counts[value] / total:.1%} of pixels)" for value in misfits[:6])
            problems.append(f"{pair.mask}: {shares}")
    if problems:
        classes = ", ".join(show_value(value) for value in coding.values or ())
        raise DataError(_listed(f"mask values that are no class (classes have {classes})", problems))


def where_values_are(pairs: Sequence[Pair], scan: Scan) -> str:
    """The rarest values with a mask that holds them: a stray value is found there."""
    found = []
    for value, _ in reversed(scan.counts.most_common()[-3:]):
        masks = [pair.mask for pair, counts in zip(pairs, scan.counts_by_pair, strict=True) if value in counts]
        found.append(f"{show_value(value)} in {len(masks)} of {len(pairs)} masks, e.g. {masks[0]}")
    return "Rarest: " + "; ".join(found)


def class_shares(scan: Scan, coding: MaskCoding, num_ids: int) -> list[float]:
    """Share of each class id among the pixels that count."""
    counts = scan.counts
    values = np.array(sorted(counts))
    ids = coding.encode(values)
    per_class = [sum(counts[value] for value in values[ids == class_id].tolist()) for class_id in range(num_ids)]
    return [pixels / max(1, sum(per_class)) for pixels in per_class]


def balanced_weights(shares: Sequence[float]) -> tuple[float, ...]:
    """Median share / share of each class, within a factor of MAX_WEIGHT; 1 for a class that does not occur."""
    present = [share for share in shares if share > 0]
    middle = float(np.median(present)) if present else 1.0
    return tuple(round(min(max(middle / share, 1 / MAX_WEIGHT), MAX_WEIGHT), 4) if share > 0 else 1.0 for share in shares)


def _scan_pair(pair: Pair) -> tuple[tuple[int, int], dict[int, int]] | list[str]:
    """Size and mask values, or the problems, a line each."""
    problems = []
    try:
        height, width = read_image(pair.image).shape[:2]
    except ReadError as error:
        problems.append(f"{pair.image}: {error}")
    try:
        mask = read_mask(pair.mask)
    except ReadError as error:
        problems.append(f"{pair.mask}: {error}")
    if problems:
        return problems
    if mask.shape != (height, width):
        sizes = f"{mask.shape[1]}×{mask.shape[0]}, its image {pair.image} is {width}×{height}"
        return [f"{pair.mask}: {sizes}; sizes in a pair must agree"]
    return (height, width), _count_values(mask)


def _count_values(mask: Pixels) -> dict[int, int]:
    if mask.dtype == np.uint8:
        histogram = cv2.calcHist([mask], [0], None, [256], [0, 256]).ravel()  # ten times faster than unique
        return {int(value): int(histogram[value]) for value in np.flatnonzero(histogram)}
    values, counts = np.unique(mask, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _listed(what: str, problems: list[str]) -> str:
    more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
    return f"{len(problems)} {what}:\n  " + "\n  ".join(problems[:NUM_NAMED] + more)
