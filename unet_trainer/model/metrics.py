"""IoU and Dice of a whole dataset, from one confusion matrix that is summed on the device.

Averages of per-batch IoUs are not IoU. A class that occurs neither in truth nor in prediction has no IoU and is left out of
the mean; counting it as 1.0 would raise the mean of rare classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

MAX_COUNTERS = 2**16  # over several copies of the matrix, so that atomic additions seldom collide


def predicted_ids(class_logits: torch.Tensor) -> torch.Tensor:
    """N,K,H,W → N,H,W class ids."""
    return class_logits.argmax(1)


def confusion_matrix(predicted: torch.Tensor, truth: torch.Tensor, num_ids: int) -> torch.Tensor:
    """N,H,W ids → num_ids,num_ids int64: rows truth, columns prediction. Truth outside 0..num_ids-1 is ignored.

    Shapes depend on no value and nothing waits for the device, unlike bincount.
    """
    if num_ids == 2:  # four sums, which a compiled step computes in one pass
        is_one = predicted == 1
        rows = [((truth == 0) & ~is_one), ((truth == 0) & is_one), ((truth == 1) & ~is_one), ((truth == 1) & is_one)]
        return torch.stack([row.sum() for row in rows]).view(2, 2)
    truth = truth.reshape(-1).long()
    cells = truth * num_ids + predicted.reshape(-1)
    num_cells = num_ids * num_ids
    cells = torch.where(truth < num_ids, cells, num_cells)  # ignored pixels are counted in one more cell, which is dropped
    num_lanes = max(1, min(256, MAX_COUNTERS // num_cells))
    lanes = torch.arange(cells.numel(), device=cells.device) % num_lanes
    counts = torch.zeros(num_lanes * (num_cells + 1), dtype=torch.int64, device=cells.device)
    counts = counts.scatter_add(0, lanes * (num_cells + 1) + cells, torch.ones_like(cells))
    return counts.view(num_lanes, num_cells + 1).sum(0)[:num_cells].view(num_ids, num_ids)


@dataclass(frozen=True)
class Scores:
    """IoU and Dice of each class that is reported, None for a class that does not occur, and their means."""

    per_class_iou: list[float | None]
    per_class_dice: list[float | None]
    confusion: list[list[int]] = field(default_factory=list)  # that they were computed from: rows truth, columns prediction

    @property
    def iou(self) -> float:
        return _mean(self.per_class_iou)

    @property
    def dice(self) -> float:
        return _mean(self.per_class_dice)


def compute_scores(matrix: torch.Tensor, num_classes: int) -> Scores:
    """From a summed confusion matrix. With one class the foreground alone is reported."""
    on_host = matrix.cpu()
    counts = on_host.to(torch.float64)
    hits = counts.diagonal()
    in_truth, in_prediction = counts.sum(1), counts.sum(0)
    union = in_truth + in_prediction - hits
    first = 1 if num_classes == 1 else 0
    iou = [float(h / u) if u > 0 else None for h, u in zip(hits, union, strict=True)]
    dice = [float(2 * h / (t + p)) if t + p > 0 else None for h, t, p in zip(hits, in_truth, in_prediction, strict=True)]
    return Scores(iou[first:], dice[first:], on_host.tolist())


def _mean(values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else math.nan
