"""The tables that `evaluate` prints, at most 100 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from unet_trainer.inference.scores import Comparison, Floats, Summary
from unet_trainer.system.console import counted

WIDTH = 100
MAX_CLASSES = 40  # rows of a table; evaluation.json has all
MAX_NAME, MAX_LONG_NAME = 22, 36
MAX_CONFUSION = 7  # class ids in a confusion matrix that is printed
NUM_CONFUSED = 5
TITLES = {
    "iou": "IoU", "dice": "Dice", "precision": "precision", "recall": "recall", "boundary_iou": "boundary IoU", "cldice": "clDice",
}  # fmt: skip


def summary_lines(summary: Summary, id_names: Sequence[str]) -> list[str]:
    """All tables of an evaluation. `id_names`: of all class ids, those that are not reported too."""
    names = summary.row_names
    intervals = [_interval(summary.intervals["iou"][:, index]) for index in range(len(names))]
    others = [name for name in summary.dataset if name != "iou"]
    dataset: list[Sequence[str]] = [["", TITLES["iou"], "95 % interval", *(TITLES[name] for name in others)]]
    means: list[Sequence[str]] = [["", *(TITLES[name] for name in summary.image_means), "images", "no truth", "no pred."]]
    for index, name in enumerate(names):
        scores = [_score(summary.dataset[score][index]) for score in others]
        dataset.append([name, _score(summary.dataset["iou"][index]), intervals[index], *scores])
        columns = (summary.num_scored, summary.empty_truths, summary.empty_predictions)
        counts = [str(column[index]) if index < len(summary.class_names) else "" for column in columns]
        means.append([name, *(_score(values[index]) for values in summary.image_means.values()), *counts])
    return [
        f"Whole set ({counted(summary.num_images, 'image')} as one, from one confusion matrix):",
        *_table(dataset),
        "",
        "Mean over images (each scored by itself; images: those with the class in truth or prediction):",
        *_table(means),
        "",
        *confusion_lines(summary.confusion, id_names),
    ]


def confusion_lines(confusion: NDArray[np.int64], names: Sequence[str]) -> list[str]:
    """Shares of the truth of each class: as a matrix, or of many classes the largest confusions alone."""
    in_truth = confusion.sum(1, keepdims=True)
    shares = np.divide(confusion, in_truth, out=np.full(confusion.shape, np.nan), where=in_truth > 0)
    if len(names) <= MAX_CONFUSION:
        header = ["truth ↓  predicted →", *(_cut(name, (WIDTH - MAX_NAME) // len(names) - 3) for name in names)]
        rows = [[name, *(_share(value) for value in row)] for name, row in zip(names, shares, strict=True)]
        return ["Confusion (of the pixels of a class, the share predicted as each):", *_table([header, *rows])]
    wrong = np.where(np.eye(len(names), dtype=bool), 0, confusion)
    largest = [np.unravel_index(place, wrong.shape) for place in np.argsort(wrong, axis=None)[::-1][:NUM_CONFUSED]]
    lines = [
        f"  {_cut(names[truth], MAX_NAME)} taken for {_cut(names[found], MAX_NAME)}: {_share(shares[truth, found])} of its pixels"
        for truth, found in largest
        if wrong[truth, found]
    ]
    return ["Most confused:", *(lines or ["  nothing"])]


def comparison_lines(comparison: Comparison, summary: Summary, other: str) -> list[str]:
    """This model against another on the same images: IoU by class, every score in the mean, and what follows."""
    header = ["", "this", "other", "difference", "95 % interval", "draws above 0"]
    *classes, overall = summary.row_names  # with one class, it alone
    by_class = [_comparison_row(name, comparison, summary, "iou", index) for index, name in enumerate(classes[:MAX_CLASSES])]
    by_score = [_comparison_row(overall, comparison, summary, score, -1) for score in summary.dataset]
    return [
        f"Whole set against {other}, on the same {counted(summary.num_images, 'image')} (paired bootstrap):",
        *_table([header, *by_class, *by_score], MAX_LONG_NAME, len(by_class) + len(by_score)),
        verdict(float(comparison.differences["iou"][-1]), comparison.intervals["iou"][:, -1], TITLES["iou"]),
    ]


def _comparison_row(name: str, comparison: Comparison, summary: Summary, score: str, index: int) -> list[str]:
    values = summary.dataset[score][index], comparison.others[score][index]
    low, high = comparison.intervals[score][:, index]
    difference, is_known = comparison.differences[score][index], not math.isnan(low)
    return [
        f"{name}: {TITLES[score]}",
        *map(_score, values),
        "–" if math.isnan(difference) else f"{difference:+.4f}",
        f"{low:+.4f} to {high:+.4f}" if is_known else "–",
        _share(comparison.shares_above[score][index]) if is_known else "–",
    ]


def verdict(difference: float, ends: Floats, title: str) -> str:
    """What the interval of a difference says, in a sentence."""
    if math.isnan(ends[0]):
        return f"  One image, or no {title}: nothing can be said of other images."
    if ends[0] <= 0 <= ends[1]:
        return f"  The interval holds 0: these images do not tell which model has the better {title}."
    better = "This model is better" if difference > 0 else "The other model is better"
    return f"  {better} by {abs(difference):.4f} {title}; the interval does not hold 0."


def _table(rows: Sequence[Sequence[str]], max_name: int = MAX_NAME, most: int = MAX_CLASSES) -> list[str]:
    """Rows below a header: the first column to the left, the others to the right. Of many classes, the first and the mean."""
    header, *others = rows
    left_out = len(others) - 1 - most
    if left_out > 0:
        others = [*others[:most], [f"… {left_out} more", *([""] * (len(header) - 1))], others[-1]]
    shown = [header, *others]
    widths = [max(len(cell) for cell in column) for column in list(zip(*shown, strict=True))[1:]]
    room = min(max_name, WIDTH - 2 - sum(2 + width for width in widths))
    names = [_cut(row[0], room) for row in shown]
    longest = max(len(name) for name in names)
    return [f"  {name:<{longest}}{_right(row[1:], widths)}".rstrip() for name, row in zip(names, shown, strict=True)]


def _right(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _score(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _interval(ends: Floats) -> str:
    return "–" if math.isnan(ends[0]) else f"{ends[0]:.4f} to {ends[1]:.4f}"
