"""Reads every pair once before the first step, so that a bad file costs seconds at the start and not a run at night."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images import DataError, ReadError, read_image, read_mask
from unet_trainer.pairs import Pair

NUM_NAMED = 20  # problems shown before "and N more"


@dataclass(frozen=True)
class Scan:
    """What the files hold: mask pixels of each value, per pair and in all, and how often each size occurs."""

    values_by_pair: NDArray[np.int64]  # num_pairs, 256
    sizes: Counter[tuple[int, int]]  # (height, width) → number of images

    @property
    def values_seen(self) -> list[int]:
        return [int(value) for value in np.flatnonzero(self.values_by_pair.sum(0))]


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
    return Scan(np.stack([counts for _, counts in good]), Counter(size for size, _ in good))


def refuse_misfits(pairs: Sequence[Pair], scan: Scan, mask_values: Sequence[int], ignore_value: int | None) -> None:
    """Raises DataError that names each mask holding a value that is no class."""
    allowed = np.zeros(256, bool)
    allowed[[*mask_values, *([] if ignore_value is None else [ignore_value])]] = True
    problems = []
    for pair, counts in zip(pairs, scan.values_by_pair, strict=True):
        misfits = np.flatnonzero((counts > 0) & ~allowed)
        if len(misfits):
            shares = ", ".join(f"{value} ({counts[value] / counts.sum():.1%} of pixels)" for value in misfits[:6])
            problems.append(f"{pair.mask}: {shares}")
    if problems:
        raise DataError(_listed(f"mask values that are no class (classes have {', '.join(map(str, mask_values))})", problems))


def class_shares(scan: Scan, lookup: NDArray[np.uint8], num_ids: int) -> list[float]:
    """Share of each class id among the pixels that count."""
    totals = scan.values_by_pair.sum(0)
    per_class = [int(totals[lookup == class_id].sum()) for class_id in range(num_ids)]
    return [pixels / max(1, sum(per_class)) for pixels in per_class]


def _scan_pair(pair: Pair) -> tuple[tuple[int, int], NDArray[np.int64]] | list[str]:
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
    histogram = cv2.calcHist([mask], [0], None, [256], [0, 256])
    return (height, width), histogram.ravel().astype(np.int64)


def _listed(what: str, problems: list[str]) -> str:
    more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
    return f"{len(problems)} {what}:\n  " + "\n  ".join(problems[:NUM_NAMED] + more)
