"""How sure a score is: images are drawn again and again from those that there are, and the scores of each draw computed anew.

Percentile bootstrap over images. Draws are seeded, do not depend on the order of the images, and are the same for every model that
is scored on the same images, so that a score has one interval wherever it is shown and differences between two models are paired.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unet_trainer.inference.image_scores import Floats

MIN_DRAWS, NUM_DRAWS = 200, 2000
MAX_DRAWN = 20_000_000  # images in all draws together: a second or less
SEED = 0
LEVEL = 0.95
TAILS = (2.5, 97.5)  # percentiles that enclose it
MAX_WEIGHTS = 2**22  # that are in memory at a time


def resampled_sums(counts: Sequence[NDArray[Any]], num_draws: int | None = None, seed: int = SEED) -> list[Floats]:
    """N,K,columns counts of the same N images, of one model or of several → draws,K,columns sums over N images drawn with
    replacement. The first columns are hits, truth and prediction."""
    num_images = len(counts[0])
    if num_draws is None:
        num_draws = min(NUM_DRAWS, max(MIN_DRAWS, MAX_DRAWN // num_images))
    order, truth = _sorted_images(counts)
    generator = np.random.default_rng([seed, zlib.crc32(truth.tobytes())])  # one seed for all sets would err alike in all
    flat = [one[order].reshape(num_images, -1).astype(np.float64) for one in counts]
    sums: list[list[Floats]] = [[] for _ in counts]
    num_at_once = max(1, MAX_WEIGHTS // num_images)
    for start in range(0, num_draws, num_at_once):
        weights = _draw_weights(generator, min(num_at_once, num_draws - start), num_images)
        for parts, one in zip(sums, flat, strict=True):
            parts.append(weights @ one)
    return [np.concatenate(parts).reshape(num_draws, *one.shape[1:]) for parts, one in zip(sums, counts, strict=True)]


def _sorted_images(counts: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], Floats]:
    """An order of the images that only their counts decide, and their truth in it, which is that of all models."""
    truth = counts[0][..., 1].astype(np.float64)
    others = sum(one[..., [0, 2]].reshape(len(truth), -1).astype(np.float64) for one in counts)
    order = np.lexsort(np.column_stack([truth, others]).T[::-1])
    return order, truth[order]


def _draw_weights(generator: np.random.Generator, num_draws: int, num_images: int) -> Floats:
    """draws,N: how often each image comes in a draw; rows are multinomial."""
    drawn = generator.integers(num_images, size=(num_draws, num_images))
    drawn += np.arange(num_draws)[:, None] * num_images
    return np.bincount(drawn.ravel(), minlength=num_draws * num_images).reshape(num_draws, num_images).astype(np.float64)


def interval(draws: Floats) -> Floats:
    """draws,... → 2,...: the ends of the central 95 %. Draws in which the score is undefined are left out; NaN if it is in all."""
    is_defined = np.isfinite(draws).any(0)
    ends = np.nanpercentile(np.where(is_defined, draws, 0.0), TAILS, axis=0)
    return np.where(is_defined, ends, np.nan)


def share_above_zero(draws: Floats) -> Floats:
    """draws,... → ...: of the draws in which the difference is defined; NaN if it is in none."""
    is_defined = np.isfinite(draws)
    num_defined = is_defined.sum(0).astype(np.float64)
    num_above = (np.where(is_defined, draws, 0.0) > 0).sum(0).astype(np.float64)
    return np.divide(num_above, num_defined, out=np.full_like(num_above, np.nan), where=num_defined > 0)
