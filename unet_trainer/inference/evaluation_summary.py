"""Scores of a set of images, their intervals, and the difference between two models on the same images; from counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unet_trainer.inference.bootstrap import interval, resampled_sums, share_above_zero
from unet_trainer.inference.evaluate import EvaluatedSet
from unet_trainer.inference.image_scores import Count, Floats, mean_over, scores_from_counts

MEAN = "mean"  # the row after those of the classes


@dataclass(frozen=True)
class Summary:
    """Scores by name, each with a value for every class and, after them, their mean. NaN: undefined."""

    class_names: Sequence[str]
    dataset: dict[str, Floats]  # K+1, from the counts of all images together
    intervals: dict[str, Floats]  # 2,K+1 of `dataset`; NaN with a single image
    image_means: dict[str, Floats]  # K+1: scores of each image, then the mean over those that have one
    num_images: int
    num_scored: NDArray[np.int64]  # K: images with the class in truth or prediction, whose IoU is in the mean over images
    empty_truths: NDArray[np.int64]  # K: images without the class in truth
    empty_predictions: NDArray[np.int64]
    confusion: NDArray[np.int64]

    @property
    def row_names(self) -> list[str]:
        """Of the rows to show: with one class, its mean is itself."""
        return list(self.class_names) if len(self.class_names) == 1 else [*self.class_names, MEAN]


@dataclass(frozen=True)
class Comparison:
    """Dataset-level scores of this model minus those of another, on the same images; rows as in Summary."""

    others: dict[str, Floats]  # K+1, the other model's scores
    differences: dict[str, Floats]  # K+1
    intervals: dict[str, Floats]  # 2,K+1, paired bootstrap
    shares_above: dict[str, Floats]  # K+1, of the draws in which this model is the better one

    def holds_zero(self, score: str) -> bool:
        """Whether the interval of the mean's difference leaves open which model is better."""
        low, high = self.intervals[score][:, -1]
        return not (low > 0 or high < 0)


def summarise(evaluated: EvaluatedSet, class_names: Sequence[str]) -> Summary:
    counts = evaluated.counts
    per_image = scores_from_counts(counts)
    draws = scores_from_counts(resampled_sums([counts])[0])
    has_interval = len(counts) > 1
    return Summary(
        class_names,
        {name: _with_mean(values) for name, values in scores_from_counts(counts.sum(0)).items()},
        {name: interval(_with_mean(values)) * (1.0 if has_interval else np.nan) for name, values in draws.items()},
        {name: _with_mean(mean_over(values, axis=0)) for name, values in per_image.items()},
        len(counts),
        np.isfinite(per_image["iou"]).sum(0),
        (counts[..., Count.TRUTH] == 0).sum(0),
        (counts[..., Count.PREDICTION] == 0).sum(0),
        evaluated.confusion,
    )


def compare(this: EvaluatedSet, other: EvaluatedSet) -> Comparison:
    """Of two models that were evaluated on the same images, in the same order."""
    sums = resampled_sums([this.counts, other.counts])
    mine, theirs = (_all_with_mean(scores_from_counts(evaluated.counts.sum(0))) for evaluated in (this, other))
    my_draws, their_draws = (_all_with_mean(scores_from_counts(drawn)) for drawn in sums)
    draws = {name: my_draws[name] - their_draws[name] for name in my_draws}
    has_interval = len(this.counts) > 1
    return Comparison(
        theirs,
        {name: mine[name] - theirs[name] for name in mine},
        {name: interval(values) * (1.0 if has_interval else np.nan) for name, values in draws.items()},
        {name: share_above_zero(values) for name, values in draws.items()},
    )


def _all_with_mean(scores: dict[str, Floats]) -> dict[str, Floats]:
    return {name: _with_mean(values) for name, values in scores.items()}


def _with_mean(values: Floats) -> Floats:
    """...,K → ...,K+1: the mean over the classes that have a value comes last."""
    return np.concatenate([values, mean_over(values, axis=-1)[..., None]], axis=-1)
