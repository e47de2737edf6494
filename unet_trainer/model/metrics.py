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
    """N,H,W ids → num_ids,num_ids int64: rows truth, columns prediction. Truth outside 0..num_ids-1 is ignored."""
    return confusion_matrices(predicted.reshape(1, -1), truth.reshape(1, -1), num_ids)[0]


def confusion_matrices(predicted: torch.Tensor, truth: torch.Tensor, num_ids: int) -> torch.Tensor:
    """N,... ids → N,num_ids,num_ids int64: one matrix for each image, as confusion_matrix has it.

    Shapes depend on no value and nothing waits for the device, unlike bincount.
    """
    num_images = len(truth)
    predicted, truth = predicted.flatten(1), truth.flatten(1)
    if num_ids == 2:  # four sums, which a compiled step computes in one pass
        is_one = predicted == 1
        cells = [((truth == 0) & ~is_one), ((truth == 0) & is_one), ((truth == 1) & ~is_one), ((truth == 1) & is_one)]
        return torch.stack([cell.sum(1) for cell in cells], 1).view(num_images, 2, 2)
    truth = truth.long()
    num_cells = num_ids * num_ids
    places = torch.where(truth < num_ids, truth * num_ids + predicted, num_cells)  # ignored: one more cell, which is dropped
    num_lanes = max(1, min(256, MAX_COUNTERS // (num_cells * max(1, num_images))))
    lanes = torch.arange(truth.shape[1], device=truth.device) % num_lanes
    lanes = lanes + torch.arange(num_images, device=truth.device).unsqueeze(1) * num_lanes
    counts = torch.zeros(num_images * num_lanes * (num_cells + 1), dtype=torch.int64, device=truth.device)
    places = (lanes * (num_cells + 1) + places).view(-1)
    counts = counts.scatter_add(0, places, torch.ones_like(places))
    return counts.view(num_images, num_lanes, num_cells + 1).sum(1)[:, :num_cells].view(num_images, num_ids, num_ids)


def class_counts(matrices: torch.Tensor) -> torch.Tensor:
    """N,K,K confusion matrices → N,K,3: pixels of each class in both, in truth, in prediction. Never waits for the device."""
    return torch.stack([matrices.diagonal(dim1=1, dim2=2), matrices.sum(2), matrices.sum(1)], 2)


@dataclass(frozen=True)
class Scores:
    """Scores of each class that is reported, None where a score is undefined, and the means of IoU and Dice."""

    per_class_iou: list[float | None]
    per_class_dice: list[float | None]
    confusion: list[list[int]] = field(default_factory=list)  # that they were computed from: rows truth, columns prediction
    per_class_precision: list[float | None] = field(default_factory=list)
    per_class_recall: list[float | None] = field(default_factory=list)

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
    hits, in_truth, in_prediction = (column.tolist() for column in class_counts(counts.unsqueeze(0))[0].T)
    first = 1 if num_classes == 1 else 0
    classes = list(zip(hits, in_truth, in_prediction, strict=True))[first:]
    return Scores(
        per_class_iou=[_ratio(h, t + p - h) for h, t, p in classes],
        per_class_dice=[_ratio(2 * h, t + p) for h, t, p in classes],
        confusion=on_host.tolist(),
        per_class_precision=[_ratio(h, p) for h, _, p in classes],
        per_class_recall=[_ratio(h, t) for h, t, _ in classes],
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else math.nan
