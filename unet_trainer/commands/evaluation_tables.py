"""The tables that `evaluate` prints of what evaluation.json holds, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unet_trainer.system.console import counted

WIDTH = 100
MAX_CLASSES = 40  # rows of a table; evaluation.json has all
MAX_NAME, MAX_LONG_NAME = 22, 36
MAX_CONFUSION = 7  # class ids in a confusion matrix that is printed
NUM_CONFUSED = 5
TITLES = {
    "iou": "IoU", "dice": "Dice", "precision": "precision", "recall": "recall", "boundary_iou": "boundary IoU", "cldice": "clDice",
}  # fmt: skip
COUNTS = {"images_with_a_score": "images", "empty_truths": "no truth", "empty_predictions": "no pred."}


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the classes and of their mean, which with one class is the class itself."""
    return [*content["classes"], content["mean"]] if len(content["classes"]) > 1 else content["classes"]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """All tables of an evaluation, as `summarise` gives it."""
    others = [name for name in summary["mean"]["dataset"] if name != "iou"]
    dataset: list[Sequence[str]] = [["", TITLES["iou"], "95 % interval", *(TITLES[name] for name in others)]]
    means: list[Sequence[str]] = [["", *(TITLES[name] for name in summary["mean"]["mean_over_images"]), *COUNTS.values()]]
    for row in _rows(summary):
        scores = row["dataset"]
        ends = scores["iou"]["interval"]
        interval = "–" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}"
        dataset.append([row["name"], _score(scores["iou"]["value"]), interval, *(_score(scores[name]["value"]) for name in others)])
        means.append([row["name"], *map(_score, row["mean_over_images"].values()), *(str(row.get(name, "")) for name in COUNTS)])
    return [
        f"Whole set ({counted(summary['num_images'], 'image')} as one, from one confusion matrix):",
        *_table(dataset),
        "",
        "Mean over images (each scored by itself; images: those with the class in truth or prediction):",
        *_table(means),
        "",
        *confusion_lines(summary["confusion"]["rows_are_truth"], summary["confusion"]["ids"]),
    ]


def confusion_lines(rows: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Shares of the truth of each class: as a matrix, or of many classes the largest confusions alone."""
    confusion = np.array(rows)
    shares = [[_share(count / row.sum() if row.any() else None) for count in row] for row in confusion]
    if len(names) <= MAX_CONFUSION:
        header = ["truth ↓  predicted →", *(_cut(name, (WIDTH - MAX_NAME) // len(names) - 3) for name in names)]
        table = _table([header, *([name, *row] for name, row in zip(names, shares, strict=True))])
        return ["Confusion (of the pixels of a class, the share predicted as each):", *table]
    wrong = np.where(np.eye(len(names), dtype=bool), 0, confusion)
    largest = [np.unravel_index(place, wrong.shape) for place in np.argsort(wrong, axis=None)[::-1][:NUM_CONFUSED]]
    lines = [
        f"  {_cut(names[truth], MAX_NAME)} taken for {_cut(names[found], MAX_NAME)}: {shares[truth][found]} of its pixels"
        for truth, found in largest
        if wrong[truth, found]
    ]
    return ["Most confused:", *(lines or ["  nothing"])]


def comparison_lines(comparison: dict[str, Any], num_images: int, other: str) -> list[str]:
    """This model against another on the same images: IoU by class, every score in the mean, and what follows."""
    header = ["", "this", "other", "difference", "95 % interval", "draws above 0"]
    *classes, overall = _rows(comparison)  # with one class, it alone
    rows = [_comparison_row(row, "iou") for row in classes[:MAX_CLASSES]]
    rows += [_comparison_row(overall, score) for score in overall["dataset"]]
    return [
        f"Whole set against {other}, on the same {counted(num_images, 'image')} (paired bootstrap):",
        *_table([header, *rows], MAX_LONG_NAME, len(rows)),
        verdict(overall["dataset"]["iou"]["difference"], overall["dataset"]["iou"]["interval"]),
    ]


def _comparison_row(row: dict[str, Any], score: str) -> list[str]:
    found = row["dataset"][score]
    difference, ends = found["difference"], found["interval"]
    return [
        f"{row['name']}: {TITLES[score]}",
        _score(found["this"]),
        _score(found["other"]),
        "–" if difference is None else f"{difference:+.4f}",
        "–" if ends is None else f"{ends[0]:+.4f} to {ends[1]:+.4f}",
        "–" if ends is None else _share(found["share_of_draws_above_0"]),
    ]


def verdict(difference: float | None, ends: Sequence[float] | None) -> str:
    """What the interval of a difference says, in a sentence."""
    if difference is None or ends is None:
        return "  One image, or no IoU: nothing can be said of other images."
    if ends[0] <= 0 <= ends[1]:
        return "  The interval holds 0: these images do not tell which model has the better IoU."
    better = "This model is better" if difference > 0 else "The other model is better"
    return f"  {better} by {abs(difference):.4f} IoU; the interval does not hold 0."


def _table(rows: Sequence[Sequence[str]], max_name: int = MAX_NAME, most: int = MAX_CLASSES) -> list[str]:
    """Rows below a header: the first column to the left, the others to the right. Of many classes, the first and the mean."""
    header, *others = rows
    left_out = len(others) - 1 - most
    if left_out > 0:
        others = [*others[:most], [f"… {left_out} more", *([""] * (len(header) - 1))], others[-1]]
    shown = [header, *others]
    widths = [max(map(len, column)) for column in list(zip(*shown, strict=True))[1:]]
    names = [_cut(row[0], min(max_name, WIDTH - 2 - sum(2 + width for width in widths))) for row in shown]
    longest = max(map(len, names))
    return [f"  {name:<{longest}}{_right(row[1:], widths)}".rstrip() for name, row in zip(names, shown, strict=True)]


def _right(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
