"""How sure the scores of a run are, from the counts of its validation images. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unet_trainer.inference.bootstrap import interval, resampled_sums, share_above_zero
from unet_trainer.inference.image_scores import Floats, mean_over, scores_from_counts
from unet_trainer.runs.val_scores import ImageScore

NUM_BINS = 20
Interval = tuple[float, float]


@dataclass(frozen=True)
class SetScores:
    """IoU of a set of images, from the counts of all of them together; intervals of 95 %. None: undefined."""

    num_images: int
    iou: float | None
    interval: Interval | None
    classes: dict[str, float | None]
    class_intervals: dict[str, Interval | None]


@dataclass(frozen=True)
class Difference:
    """IoU of one run minus that of another on the same images, paired."""

    iou: float
    interval: Interval | None
    share_above: float | None  # of the draws in which the first is better
    num_images: int

    @property
    def is_open(self) -> bool:
        """Whether the interval leaves open which is better."""
        return self.interval is None or self.interval[0] <= 0 <= self.interval[1]


def count_array(scores: Sequence[ImageScore]) -> NDArray[np.int64]:
    """N,K,3: pixels in both, in truth, in prediction of each class that is reported."""
    rows = [[(one.hits, one.truth, one.predicted) for one in image.classes.values()] for image in scores]
    return np.array(rows, np.int64).reshape(len(rows), -1, 3)


def set_scores(scores: Sequence[ImageScore]) -> SetScores | None:
    """None without images. An interval needs two of them."""
    if not scores:
        return None
    names = list(scores[0].classes)
    counts = count_array(scores)
    per_class = scores_from_counts(counts.sum(0))["iou"]
    ends: Floats = np.full((2, len(names) + 1), np.nan)
    if len(scores) > 1:
        drawn = scores_from_counts(resampled_sums([counts])[0])["iou"]
        ends = interval(np.concatenate([drawn, mean_over(drawn, axis=-1)[:, None]], axis=1))
    return SetScores(
        len(scores),
        _defined(float(mean_over(per_class, axis=-1))),
        _ends(ends[:, -1]),
        {name: _defined(float(value)) for name, value in zip(names, per_class, strict=True)},
        {name: _ends(ends[:, index]) for index, name in enumerate(names)},
    )


def paired_difference(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> Difference | None:
    """Of two runs that were scored on the same images; None if they were not."""
    if not same_images(this, other):
        return None
    mine, theirs = (count_array(sorted(scores, key=lambda score: score.image)) for scores in (this, other))
    first, second, *draws = (
        mean_over(scores_from_counts(one)["iou"], axis=-1) for one in (mine.sum(0), theirs.sum(0), *resampled_sums([mine, theirs]))
    )
    if not (np.isfinite(first) and np.isfinite(second)):
        return None
    drawn = draws[0] - draws[1]
    ends = interval(drawn) if len(mine) > 1 else np.full(2, np.nan)
    share = share_above_zero(drawn) if len(mine) > 1 else np.float64(np.nan)
    return Difference(float(first - second), _ends(ends), _defined(float(share)), len(mine))


def same_images(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> bool:
    """Whether two runs validated on the same files with the same classes, and counted the same pixels of them.

    Files of one name in two folders with other masks have other counts in the truth.
    """

    def facts(scores: Sequence[ImageScore]) -> dict[tuple[str, str], tuple[tuple[str, int], ...]]:
        return {
            (score.image, score.mask): tuple((name, counts.truth) for name, counts in score.classes.items()) for score in scores
        }

    return bool(this) and facts(this) == facts(other)


def histogram(scores: Sequence[ImageScore]) -> tuple[list[int], int]:
    """Images by their IoU in NUM_BINS bins from 0 to 1; and how many have no IoU."""
    values = [score.iou for score in scores if score.iou is not None]
    counts, _ = np.histogram(values, bins=NUM_BINS, range=(0.0, 1.0))
    return [int(number) for number in counts], len(scores) - len(values)


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends(values: Floats) -> Interval | None:
    low, high = (float(value) for value in values)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
