"""Tables that fit and say which reduction they show."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.commands.evaluation_tables import comparison_lines, confusion_lines, summary_lines, verdict
from unet_trainer.inference.scores import EvaluatedSet, compare, summarise


def evaluated(num_images, num_classes, seed=0, columns=9, absent=()):
    random = np.random.default_rng(seed)
    counts = np.zeros((num_images, num_classes, columns), np.int64)
    counts[..., 1] = random.integers(50, 100, (num_images, num_classes))
    counts[..., 2] = random.integers(50, 100, (num_images, num_classes))
    counts[..., 0] = random.integers(10, 50, (num_images, num_classes))
    counts[..., 3:5] = [30, 60]
    if columns > 5:
        counts[..., 5:] = [40, 30, 40, 20]
    counts[:, list(absent)] = 0
    confusion = random.integers(0, 100, (max(2, num_classes),) * 2)
    return EvaluatedSet(counts, confusion, np.zeros(num_images, int), np.ones(num_images, int), [])


@pytest.mark.parametrize("num_classes", [1, 7, 41])
def test_no_line_is_longer_than_100_columns(num_classes):
    names = [f"a class with a very long name {number}" for number in range(num_classes)]
    found = evaluated(20, num_classes)
    summary = summarise(found, names, names if num_classes > 1 else ["background", *names])
    lines = summary_lines(summary) + comparison_lines(compare(found, evaluated(20, num_classes, 1), names), 20, "x")
    assert max(len(line) for line in lines) <= 100
    assert any("clDice" in line for line in lines)


def test_up_to_40_classes_have_a_row_and_the_mean_is_last():
    names = [f"class {number}" for number in range(41)]
    lines = summary_lines(summarise(evaluated(3, 41), names, names))
    table = lines[2 : lines.index("")]
    assert [line.split("  ")[1] for line in table[:3]] == ["class 0", "class 1", "class 2"]
    assert len(table) == 42
    assert table[-2].strip() == "… 1 more"
    assert table[-1].split()[0] == "mean"
    assert "more" not in "\n".join(summary_lines(summarise(evaluated(3, 40), names[:40], names[:40])))


def test_of_many_classes_the_largest_confusions_are_named():
    confusion = np.eye(10, dtype=np.int64) * 100
    confusion[3, 7], confusion[2, 1] = 300, 25
    lines = confusion_lines(confusion, [f"c{number}" for number in range(10)])
    assert lines == ["Most confused:", "  c3 taken for c7: 75.0% of its pixels", "  c2 taken for c1: 20.0% of its pixels"]
    assert confusion_lines(np.eye(10, dtype=np.int64), ["c"] * 10) == ["Most confused:", "  nothing"]


def test_a_comparison_says_how_sure_it_is():
    this, other = evaluated(50, 1), evaluated(50, 1)
    other.counts[..., 0] //= 2
    lines = comparison_lines(compare(this, other, ["cell"]), 50, "runs/b/best.pt")
    assert lines[0] == "Whole set against runs/b/best.pt, on the same 50 images (paired bootstrap):"
    assert [line[2:20].strip() for line in lines[2:8]] == [
        "cell: IoU", "cell: Dice", "cell: precision", "cell: recall", "cell: boundary IoU", "cell: clDice",
    ]  # fmt: skip
    assert lines[2].split()[-1] == "100.0%"
    assert lines[2].split()[4].startswith("+")
    assert lines[-1].startswith("  This model is better by 0.")
    same = comparison_lines(compare(this, this, ["cell"]), 50, "itself")
    assert same[-1] == "  The interval holds 0: these images do not tell which model has the better IoU."


def test_the_verdict_follows_the_interval():
    assert "holds 0" in verdict(0.01, [0.0, 0.03])
    assert verdict(-0.02, [-0.03, -0.01]) == "  The other model is better by 0.0200 IoU; the interval does not hold 0."
    assert "nothing can be said" in verdict(0.1, None)
