"""What IoU, Dice, precision and recall are, and what a prediction that needs no model scores. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Confusion = Sequence[Sequence[int]]  # rows truth, columns prediction; empty: not known


def overlap_ratios(hits: Any, truth: Any, predicted: Any) -> dict[str, tuple[Any, Any]]:
    """Numerator and denominator of each score, from pixels of a class in both, in truth and in prediction: numbers, or
    arrays of them. A score whose denominator is 0 is undefined."""
    return {
        "iou": (hits, truth + predicted - hits),
        "dice": (2 * hits, truth + predicted),
        "precision": (hits, predicted),
        "recall": (hits, truth),
    }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


@dataclass(frozen=True)
class Baseline:
    """The IoU of a prediction that needs no model."""

    prediction: str
    iou: float


def best_baseline(confusion: Confusion, num_classes: int, names: Sequence[str]) -> Baseline | None:
    """Of predicting one class everywhere: with one class the foreground, else the most frequent one. None without a
    class to score. `names`: one for each class id."""
    in_truth = [sum(row) for row in confusion]
    num_pixels = sum(in_truth)
    if not any(in_truth[1:] if num_classes == 1 else in_truth):
        return None
    if num_classes == 1:
        return Baseline(f"all {names[1]}", in_truth[1] / num_pixels)
    most = max(in_truth)
    num_present = sum(count > 0 for count in in_truth)
    return Baseline(f"all {names[in_truth.index(most)]}", most / num_pixels / num_present)
