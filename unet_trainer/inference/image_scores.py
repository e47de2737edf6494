"""Scores of segmentations from counts of pixels; docs/metrics.md defines them.

Counts add up and scores are ratios of counts. So one function gives the scores of an image, of a set (from the sum over its
images) and of a resampled set (from a weighted sum). What is undefined is NaN. Knows no files and no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.thinning import thin

Floats = NDArray[np.float64]
BOUNDARY_RATIO = 0.02  # width of the boundary region, of the image's diagonal


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


class ImageCounts(NamedTuple):
    confusion: NDArray[np.int64]  # K,K of all ids: rows truth, columns prediction
    counts: NDArray[np.int64]  # classes that are reported × columns of Count


def count_image(truth: Pixels, predicted: Pixels, num_ids: int, first_id: int = 0, with_lines: bool = False) -> ImageCounts:
    """H,W ids of one image, truth with IGNORED. Classes are reported from `first_id` on; `with_lines`: what clDice needs.

    Ignored pixels count nowhere: for boundaries and centre lines they belong to no class, in truth and in prediction.
    """
    confusion = confusion_matrix(truth, predicted, num_ids)
    counts = np.zeros((num_ids - first_id, len(Count) if with_lines else Count.TRUTH_LINE), np.int64)
    counts[:, Count.HITS] = confusion.diagonal()[first_id:]
    counts[:, Count.TRUTH] = confusion.sum(1)[first_id:]
    counts[:, Count.PREDICTION] = confusion.sum(0)[first_id:]
    width = boundary_width(truth.shape)
    is_counted = (truth != IGNORED).view(np.uint8)
    for class_id, row in enumerate(counts, first_id):
        if not row[Count.TRUTH] and not row[Count.PREDICTION]:
            continue
        masks: list[Pixels] = [(truth == class_id).view(np.uint8), (predicted == class_id).view(np.uint8) & is_counted]
        left, top, columns, rows = cv2.boundingRect(cv2.bitwise_or(*masks))  # outside of it both are empty: the counts are the same
        in_truth, in_prediction = (np.ascontiguousarray(mask[top : top + rows, left : left + columns]) for mask in masks)
        boundaries = boundary_region(in_truth, width), boundary_region(in_prediction, width)
        row[Count.BOUNDARY_HITS] = cv2.countNonZero(cv2.bitwise_and(*boundaries))
        row[Count.BOUNDARY_UNION] = cv2.countNonZero(cv2.bitwise_or(*boundaries))
        if with_lines:
            truth_line, prediction_line = thin(in_truth), thin(in_prediction)
            row[Count.TRUTH_LINE] = cv2.countNonZero(truth_line)
            row[Count.TRUTH_LINE_HITS] = cv2.countNonZero(cv2.bitwise_and(truth_line, in_prediction))
            row[Count.PREDICTION_LINE] = cv2.countNonZero(prediction_line)
            row[Count.PREDICTION_LINE_HITS] = cv2.countNonZero(cv2.bitwise_and(prediction_line, in_truth))
    return ImageCounts(confusion, counts)


def confusion_matrix(truth: Pixels, predicted: Pixels, num_ids: int) -> NDArray[np.int64]:
    """H,W ids → num_ids,num_ids: rows truth, columns prediction. Truth beyond the ids is ignored."""
    known = truth < num_ids
    cells = truth[known].astype(np.int32) * num_ids + predicted[known]
    return np.bincount(cells, minlength=num_ids**2).reshape(num_ids, num_ids).astype(np.int64, copy=False)


def boundary_width(size: Sequence[int]) -> int:
    """In pixels, for an image of this height and width."""
    return max(1, round(BOUNDARY_RATIO * math.hypot(*size)))


def boundary_region(mask: Pixels, width: int) -> Pixels:
    """The pixels of a mask (uint8, 0 and 1) that are at most `width` steps, also diagonal ones, from a pixel outside of it.

    What lies beyond the border of the array is outside.
    """
    padded = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    return mask - cv2.erode(padded, np.ones((3, 3), np.uint8), iterations=width)[1:-1, 1:-1]


def scores_from_counts(counts: NDArray[Any]) -> dict[str, Floats]:
    """...,K,columns → ...,K for each score; NaN where it is undefined."""
    columns = [counts[..., index].astype(np.float64) for index in range(counts.shape[-1])]
    hits, truth, prediction = columns[Count.HITS], columns[Count.TRUTH], columns[Count.PREDICTION]
    scores = {
        "iou": _ratio(hits, truth + prediction - hits),
        "dice": _ratio(2 * hits, truth + prediction),
        "precision": _ratio(hits, prediction),
        "recall": _ratio(hits, truth),
    }
    if counts.shape[-1] > Count.BOUNDARY_UNION:
        scores["boundary_iou"] = _ratio(columns[Count.BOUNDARY_HITS], columns[Count.BOUNDARY_UNION])
    if counts.shape[-1] > Count.TRUTH_LINE:
        # With one of the lines empty the other's share is 0, and so is the score.
        on_truth = np.nan_to_num(_ratio(columns[Count.PREDICTION_LINE_HITS], columns[Count.PREDICTION_LINE]))
        found = np.nan_to_num(_ratio(columns[Count.TRUTH_LINE_HITS], columns[Count.TRUTH_LINE]))
        has_line = columns[Count.PREDICTION_LINE] + columns[Count.TRUTH_LINE] > 0
        scores["cldice"] = np.where(has_line, np.nan_to_num(_ratio(2 * on_truth * found, on_truth + found)), np.nan)
    return scores


def mean_over(values: Floats, axis: int) -> Floats:
    """The mean of what is defined; NaN where nothing is."""
    is_defined = np.isfinite(values)
    return _ratio(np.where(is_defined, values, 0.0).sum(axis), is_defined.sum(axis).astype(np.float64))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
