"""Scores of segmentations from counts of pixels, and how sure they are; docs/metrics.md defines them. Knows no files
and no model.

Counts add up and scores are ratios of counts: one function scores an image, a set (the sum over its images) and a
resampled set (a weighted sum). Undefined is NaN. A mean is over the classes in the truth of the set. Intervals are of a
percentile bootstrap over images; draws are seeded, independent of the images' order, and the same for every model
that is scored on the same images, so that differences between two models are paired.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.model.baselines import overlap_ratios

Floats = NDArray[np.float64]
Interval = tuple[float, float]
BOUNDARY_RATIO = 0.02  # width of the boundary region, of the image's diagonal
MIN_DRAWS, NUM_DRAWS = 200, 2000
MAX_DRAWN = 20_000_000  # images in all draws together: a second or less
SEED = 0
LEVEL = 0.95
TAILS = (2.5, 97.5)  # percentiles that enclose it
MAX_WEIGHTS = 2**22  # that are in memory at a time
MEAN = "mean"  # the row after those of the classes


class Count(IntEnum):
    """Columns of counts: pixels of one class in one image."""

    HITS = 0  # in truth and in prediction
    TRUTH = 1
    PREDICTION = 2
    BOUNDARY_HITS = 3  # in both boundary regions
    BOUNDARY_UNION = 4  # in one of them or both
    TRUTH_LINE = 5  # the centre line of the truth; this column and those after it are there if they were asked for
    TRUTH_LINE_HITS = 6  # of these, in the prediction
    PREDICTION_LINE = 7
    PREDICTION_LINE_HITS = 8  # of these, in the truth


def scores_from_counts(counts: NDArray[Any]) -> dict[str, Floats]:
    """...,K,columns → ...,K for each score; NaN where it is undefined."""
    columns = [counts[..., index].astype(np.float64) for index in range(counts.shape[-1])]
    ratios = overlap_ratios(columns[Count.HITS], columns[Count.TRUTH], columns[Count.PREDICTION])
    scores = {name: _ratio(*parts) for name, parts in ratios.items()}
    if counts.shape[-1] > Count.BOUNDARY_UNION:
        scores["boundary_iou"] = _ratio(columns[Count.BOUNDARY_HITS], columns[Count.BOUNDARY_UNION])
    if counts.shape[-1] > Count.TRUTH_LINE:
        # With one of the lines empty the other's share is 0, and so is the score.
        on_truth = np.nan_to_num(_ratio(columns[Count.PREDICTION_LINE_HITS], columns[Count.PREDICTION_LINE]))
        found = np.nan_to_num(_ratio(columns[Count.TRUTH_LINE_HITS], columns[Count.TRUTH_LINE]))
        has_line = columns[Count.PREDICTION_LINE] + columns[Count.TRUTH_LINE] > 0
        scores["cldice"] = np.where(has_line, np.nan_to_num(_ratio(2 * on_truth * found, on_truth + found)), np.nan)
    return scores


def image_scores(counts: NDArray[Any]) -> dict[str, Floats]:
    """N,K,columns counts → N for each score: the mean over the classes in the image's truth. Of one class its own
    score, which is 0 where it is predicted and not there."""
    scores = scores_from_counts(counts)
    if counts.shape[1] == 1:
        return {name: values[:, 0] for name, values in scores.items()}
    in_truth = counts[..., Count.TRUTH] > 0
    return {name: mean_over(np.where(in_truth, values, np.nan), axis=-1) for name, values in scores.items()}


def set_scores(counts: NDArray[Any]) -> dict[str, Floats]:
    """K,columns counts of a set → K+1 for each score: each class, then the mean. A class that is not in the truth has
    no score and no part in the mean, whatever is predicted."""
    return _with_mean(scores_from_counts(counts), counts[:, Count.TRUTH] > 0)


def drawn_scores(draws: NDArray[Any]) -> dict[str, Floats]:
    """draws,K,columns of `resampled_sums` → draws,K+1 for each score, as `set_scores` of the same classes."""
    # A draw whose truth lacks a class takes its counts from another: left out, it would move the mean to the others;
    # scored 0, it would be missed where it is not. The truth decides which, so that compared models take the same.
    draws, in_draw = draws.copy(), draws[..., Count.TRUTH] > 0
    in_truth: NDArray[np.bool_] = np.any(in_draw, axis=0)
    for class_index in np.flatnonzero(in_truth):
        (others,), (lacking,) = in_draw[:, class_index].nonzero(), (~in_draw[:, class_index]).nonzero()
        draws[lacking, class_index] = draws[np.resize(others, len(lacking)), class_index]
    return _with_mean(scores_from_counts(draws), in_truth)


def _with_mean(scores: dict[str, Floats], in_truth: NDArray[np.bool_]) -> dict[str, Floats]:
    scored = {name: np.where(in_truth, values, np.nan) for name, values in scores.items()}
    return {name: np.append(each, mean_over(each, axis=-1)[..., None], axis=-1) for name, each in scored.items()}


def mean_over(values: Floats, axis: int) -> Floats:
    """The mean of what is defined; NaN where nothing is."""
    return _ratio(np.nansum(values, axis), np.isfinite(values).sum(axis).astype(np.float64))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def num_draws_of(num_images: int) -> int:
    return min(NUM_DRAWS, max(MIN_DRAWS, MAX_DRAWN // num_images))


def resampled_sums(counts: Sequence[NDArray[Any]]) -> list[Floats]:
    """N,K,columns counts of the same N images, of each model → draws,K,columns sums over N images drawn with
    replacement."""
    num_images = len(counts[0])
    num_draws = num_draws_of(num_images)
    # An order that only the counts decide. The truth, which all models share, is in the seed: one seed would err alike.
    truth = counts[0][..., Count.TRUTH].astype(np.float64)
    others = sum(one[..., [Count.HITS, Count.PREDICTION]].reshape(num_images, -1).astype(np.float64) for one in counts)
    order = np.lexsort(np.column_stack([truth, others]).T[::-1])
    generator = np.random.default_rng([SEED, zlib.crc32(truth[order].tobytes())])
    flat = [one[order].reshape(num_images, -1).astype(np.float64) for one in counts]
    sums: list[list[Floats]] = [[] for _ in counts]
    num_at_once = max(1, MAX_WEIGHTS // num_images)
    for start in range(0, num_draws, num_at_once):
        num = min(num_at_once, num_draws - start)
        drawn = generator.integers(num_images, size=(num, num_images)) + np.arange(num)[:, None] * num_images
        weights = np.bincount(drawn.ravel(), minlength=num * num_images).reshape(num, num_images).astype(np.float64)
        for parts, one in zip(sums, flat, strict=True):
            parts.append(weights @ one)
    return [np.concatenate(parts).reshape(num_draws, *one.shape[1:]) for parts, one in zip(sums, counts, strict=True)]


def intervals(draws: Floats, num_images: int) -> list[Interval | None]:
    """draws,K → of each of K the ends of the central 95 %, without draws in which it is undefined. None: undefined in
    all draws, or a single image."""
    if num_images < 2:
        return [None] * draws.shape[1]
    is_defined = np.isfinite(draws).any(0)
    ends = np.where(is_defined, np.nanpercentile(np.where(is_defined, draws, 0.0), TAILS, axis=0), np.nan).tolist()
    return [None if math.isnan(low) else (low, high) for low, high in zip(*ends, strict=True)]


@dataclass(frozen=True)
class EvaluatedSet:
    """Counts of all images, in the order of the pairs."""

    counts: NDArray[np.int64]  # N, classes that are reported, columns of Count
    confusion: NDArray[np.int64]  # K,K of all ids, summed: rows truth, columns prediction
    num_wrong: NDArray[np.int64]  # pixels of each image that are predicted wrongly
    num_counted: NDArray[np.int64]  # pixels of each image that are not ignored
    worst: Sequence[tuple[int, Pixels]]  # indices of the worst images, the worst first, and H,W ids that were predicted


def summarise(evaluated: EvaluatedSet, class_names: Sequence[str], id_names: Sequence[str]) -> dict[str, Any]:
    """Scores as evaluation.json has them; None: undefined. `class_names`: of the reported classes, `id_names`: of all
    class ids."""
    counts = evaluated.counts
    totals, per_image = counts.sum(0), scores_from_counts(counts)
    in_truth = totals[:, Count.TRUTH] > 0
    image_means = _with_mean({name: mean_over(values, axis=0) for name, values in per_image.items()}, in_truth)
    dataset, draws = set_scores(totals), drawn_scores(resampled_sums([counts])[0])
    ends = {score: intervals(values, len(counts)) for score, values in draws.items()}

    def row(index: int, name: str) -> dict[str, Any]:
        whole = {score: {"value": number(one[index]), "interval": ends[score][index]} for score, one in dataset.items()}
        means = {score: number(each[index]) for score, each in image_means.items()}
        about: dict[str, Any] = {"name": name, "dataset": whole, "mean_over_images": means}
        if index < len(class_names):
            truth, prediction = counts[:, index, Count.TRUTH], counts[:, index, Count.PREDICTION]
            about["images_with_a_score"] = int(np.isfinite(per_image["iou"][:, index]).sum()) if in_truth[index] else 0
            about |= {"empty_truths": int((truth == 0).sum()), "empty_predictions": int((prediction == 0).sum())}
            about |= {"truth_pixels": int(truth.sum()), "predicted_pixels": int(prediction.sum())}
        return about

    *classes, mean = (row(index, name) for index, name in enumerate([*class_names, MEAN]))
    return {
        "num_images": len(counts),
        "boundary_width": f"{BOUNDARY_RATIO:g} of the diagonal",
        "bootstrap": {"over": "images", "level": LEVEL, "draws": num_draws_of(len(counts)), "seed": SEED},
        "classes": classes,
        "mean": mean,
        "confusion": {"ids": list(id_names), "rows_are_truth": evaluated.confusion.tolist()},
    }


def compare(this: EvaluatedSet, other: EvaluatedSet, class_names: Sequence[str]) -> dict[str, Any]:
    """Compare two models on the same images, in the same order; as evaluation.json has it."""
    mine, theirs = (set_scores(evaluated.counts.sum(0)) for evaluated in (this, other))
    my_draws, their_draws = map(drawn_scores, resampled_sums([this.counts, other.counts]))
    draws = {score: my_draws[score] - their_draws[score] for score in mine}
    ends = {score: intervals(values, len(this.counts)) for score, values in draws.items()}

    def row(index: int, name: str) -> dict[str, Any]:
        scores = {}
        for score in mine:
            its_draws, this_score, other_score = draws[score][:, index], mine[score][index], theirs[score][index]
            share = mean_over(np.where(np.isnan(its_draws), np.nan, its_draws > 0), axis=0)
            both = {"this": number(this_score), "other": number(other_score)}
            difference = {"difference": number(this_score - other_score), "interval": ends[score][index]}
            scores[score] = {**both, **difference, "share_of_draws_above_0": number(share)}
        return {"name": name, "dataset": scores}

    *classes, mean = (row(index, name) for index, name in enumerate([*class_names, MEAN]))
    return {"differences": "this model minus the other", "classes": classes, "mean": mean}


def number(value: float | Floats) -> float | None:
    return None if np.isnan(value) else float(value)
