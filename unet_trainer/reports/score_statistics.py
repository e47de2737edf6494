"""How certain the scores of a run are, from the counts of its validation images. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unet_trainer.inference.scores import Floats, interval, mean_over, resampled_sums, scores_from_counts
from unet_trainer.training.val_scores import ImageScore

Interval = tuple[float, float]


@dataclass(frozen=True)
class SetScores:
    """IoU of a set of images, from the counts of all of them together; intervals of 95 %. None: undefined."""

    num_images: int
    iou: float | None
    interval: Interval | None
    class_intervals: dict[str, Interval | None]


@dataclass(frozen=True)
class Difference:
    """IoU of one run minus that of another on the same images, paired."""

    iou: float
    interval: Interval | None

    @property
    def verdict(self) -> str:
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "no clear difference"
        return "better" if self.iou > 0 else "worse"

    def __str__(self) -> str:
        ends = "" if self.interval is None else f" ({self.interval[0]:+.3f} to {self.interval[1]:+.3f})"
        return f"{self.iou:+.4f}{ends}"


def _count_array(scores: Sequence[ImageScore]) -> NDArray[np.int64]:
    """N,K,3: pixels in both, in truth, in prediction of each class that is reported."""
    rows = [[(one.hits, one.truth, one.predicted) for one in image.classes.values()] for image in scores]
    return np.array(rows, np.int64).reshape(len(rows), -1, 3)


def set_scores(scores: Sequence[ImageScore]) -> SetScores | None:
    """None without images. An interval needs two of them."""
    if not scores:
        return None
    names = list(scores[0].classes)
    counts = _count_array(scores)
    ends: Floats = np.full((2, len(names) + 1), np.nan)
    if len(scores) > 1:
        drawn = scores_from_counts(resampled_sums([counts])[0])["iou"]
        ends = interval(np.concatenate([drawn, mean_over(drawn, axis=-1)[:, None]], axis=1))
    iou = float(mean_over(scores_from_counts(counts.sum(0))["iou"], axis=-1))
    intervals = {name: _ends(ends[:, index]) for index, name in enumerate(names)}
    return SetScores(len(scores), iou if math.isfinite(iou) else None, _ends(ends[:, -1]), intervals)


def paired_difference(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> Difference | None:
    """Of two runs that were scored on the same images; None if they were not."""
    if not same_images(this, other):
        return None
    mine, theirs = (_count_array(sorted(scores, key=lambda score: score.image)) for scores in (this, other))
    first, second, *draws = (
        mean_over(scores_from_counts(one)["iou"], axis=-1) for one in (mine.sum(0), theirs.sum(0), *resampled_sums([mine, theirs]))
    )
    if not (np.isfinite(first) and np.isfinite(second)):
        return None
    return Difference(float(first - second), _ends(interval(draws[0] - draws[1])) if len(mine) > 1 else None)


def same_images(this: Sequence[ImageScore], other: Sequence[ImageScore]) -> bool:
    """Whether two runs validated on the same files with the same classes, and counted the same pixels of them.

    Files of one name in two folders with other masks have other counts in the truth.
    """

    def facts(scores: Sequence[ImageScore]) -> dict[tuple[str, str], list[tuple[str, int]]]:
        return {(score.image, score.mask): [(name, counts.truth) for name, counts in score.classes.items()] for score in scores}

    return bool(this) and facts(this) == facts(other)


def _ends(values: Floats) -> Interval | None:
    low, high = (float(value) for value in values)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
