"""Scores by hand, and against other libraries where they are installed."""

from __future__ import annotations

import math
import re

import cv2
import numpy as np
import pytest

from helpers.project import ROOT
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.inference.image_scores import (
    Count,
    boundary_region,
    boundary_width,
    confusion_matrix,
    count_image,
    mean_over,
    scores_from_counts,
)
from unet_trainer.model import metrics


def ids(*rows):
    """Digits are class ids, x is ignored."""
    return np.array([[IGNORED if letter == "x" else int(letter) for letter in row] for row in rows], np.uint8)


def binary_scores(truth, predicted, **options):
    """Of the foreground."""
    found = count_image(truth, predicted, 2, first_id=1, **options)
    return {name: float(values[0]) for name, values in scores_from_counts(found.counts).items()}


TRUTH = ids("1100", "1100", "0000")
PREDICTED = ids("0110", "0110", "0000")  # 2 of 4 right, 2 missed, 2 false


def test_overlap_scores_by_hand():
    scores = binary_scores(TRUTH, PREDICTED)
    assert scores["iou"] == 2 / 6
    assert scores["dice"] == 4 / 8
    assert scores["precision"] == 2 / 4
    assert scores["recall"] == 2 / 4
    more = binary_scores(TRUTH, ids("1111", "1100", "0000"))
    assert (more["precision"], more["recall"]) == (4 / 6, 1.0)


def test_a_confusion_matrix_has_truth_in_rows_and_leaves_ignored_pixels_out():
    truth, predicted = ids("001", "12x"), ids("011", "102")
    assert confusion_matrix(truth, predicted, 3).tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 0]]


def test_a_confusion_matrix_is_that_of_training():
    random = np.random.default_rng(0)
    truth = random.choice([0, 1, 2, 3, IGNORED], (2, 40, 50)).astype(np.uint8)
    predicted = random.integers(0, 4, (2, 40, 50)).astype(np.uint8)
    ours = sum(confusion_matrix(*pair, 4) for pair in zip(truth, predicted, strict=True))
    torch = pytest.importorskip("torch")
    theirs = metrics.confusion_matrix(torch.from_numpy(predicted.astype(np.int64)), torch.from_numpy(truth), 4)
    assert ours.tolist() == theirs.tolist()
    counts = count_image(truth.reshape(80, 50), predicted.reshape(80, 50), 4).counts
    assert scores_from_counts(counts)["iou"].tolist() == pytest.approx(metrics.compute_scores(theirs, 4).per_class_iou, abs=0)


def test_a_class_in_neither_truth_nor_prediction_has_no_score():
    counts = count_image(ids("01"), ids("01"), 3).counts
    for name, values in scores_from_counts(counts).items():
        assert math.isnan(values[2]), name
        assert values[:2].tolist() == [1.0, 1.0], name


@pytest.mark.parametrize(
    ("truth", "predicted", "precision", "recall"),
    [(ids("11", "00"), ids("00", "00"), math.nan, 0.0), (ids("00", "00"), ids("11", "00"), 0.0, math.nan)],
    ids=["nothing found", "nothing there"],
)
def test_what_is_missed_or_made_up_wholly_scores_0_and_not_undefined(truth, predicted, precision, recall):
    scores = binary_scores(truth, predicted, with_lines=True)
    assert [scores[name] for name in ("iou", "dice", "boundary_iou", "cldice")] == [0.0] * 4
    assert scores["precision"] == pytest.approx(precision, nan_ok=True)
    assert scores["recall"] == pytest.approx(recall, nan_ok=True)


def test_ignored_pixels_count_nowhere():
    truth, predicted = ids("11xx", "00xx"), ids("1111", "0111")
    found = count_image(truth, predicted, 2, first_id=1, with_lines=True)
    alone = count_image(truth[:, :2], predicted[:, :2], 2, first_id=1, with_lines=True)
    assert found.confusion.tolist() == alone.confusion.tolist() == [[1, 1], [0, 2]]
    assert found.counts.tolist() == alone.counts.tolist()  # boundaries and centre lines too: both end where the ignored begins


def test_an_image_with_nothing_but_ignored_pixels_has_no_score():
    assert all(math.isnan(value) for value in binary_scores(ids("xx"), ids("01"), with_lines=True).values())


def test_scores_of_a_set_come_from_summed_counts_and_differ_from_the_mean_over_images():
    small = count_image(ids("1000"), ids("1000"), 2, 1).counts  # IoU 1 of 1 pixel
    large = count_image(ids("1111", "1111"), ids("1100", "0000"), 2, 1).counts  # IoU 2 / 8
    counts = np.stack([small, large])
    assert scores_from_counts(counts.sum(0))["iou"].tolist() == [3 / 9]
    assert mean_over(scores_from_counts(counts)["iou"], axis=0).tolist() == [(1 + 1 / 4) / 2]


def test_a_mean_leaves_out_what_is_undefined():
    values = np.array([[1.0, math.nan], [0.5, math.nan], [math.nan, math.nan]])
    assert mean_over(values, axis=0)[0] == 0.75
    assert math.isnan(mean_over(values, axis=0)[1])


def test_the_boundary_is_2_percent_of_the_diagonal_wide_and_never_nothing():
    assert boundary_width((300, 400)) == 10
    assert boundary_width((10, 10)) == 1


def test_a_boundary_region_by_hand():
    square = ids("0000000", "0111110", "0111110", "0111110", "0111110", "0111110", "0000000")
    assert (
        boundary_region(square, 1).tolist()
        == ids("0000000", "0111110", "0100010", "0100010", "0100010", "0111110", "0000000").tolist()
    )
    assert boundary_region(square, 2).sum() == 24
    assert boundary_region(square, 3).tolist() == square.tolist()


def test_the_border_of_the_image_counts_as_boundary():
    assert boundary_region(np.ones((5, 5), np.uint8), 1).sum() == 16


def test_boundary_iou_by_hand():
    """Two squares of 5×5, one shifted by one column; 7×8 pixels: the boundary is 1 pixel wide."""
    truth, predicted = np.zeros((7, 8), np.uint8), np.zeros((7, 8), np.uint8)
    truth[1:6, 1:6] = 1
    predicted[1:6, 2:7] = 1
    # Rings of 16 pixels each. In common: rows 1 and 5, columns 2 to 5 (8 pixels); between them no column is an edge of both.
    scores = binary_scores(truth, predicted)
    assert scores["boundary_iou"] == 8 / 24
    assert scores["iou"] == 20 / 30


def reference_boundary(mask, ratio=0.02):
    """As Cheng et al. describe it: what a mask loses when it is eroded, in an image with a frame of zeros around it."""
    height, width = mask.shape
    steps = max(1, round(ratio * math.sqrt(height**2 + width**2)))
    padded = np.pad(mask, 1)
    for _ in range(steps):
        eroded = padded.copy()
        for shift in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            eroded &= np.roll(padded, shift, (0, 1))
        padded = eroded
    return mask & ~padded[1:-1, 1:-1]


@pytest.mark.parametrize("seed", range(4))
def test_boundary_counts_are_those_of_the_definition(seed):
    """Step by step over the whole image; the code looks at the box around the class only."""
    random = np.random.default_rng(seed)
    smooth = [cv2.GaussianBlur(random.random((70, 90)).astype(np.float32), (0, 0), 4) for _ in range(2)]
    truth, predicted = ((field > np.median(field)).astype(np.uint8) for field in smooth)
    truth[:, :20] = predicted[:, :15] = 0
    found = count_image(truth, predicted, 2)
    for class_id in (0, 1):
        first, second = reference_boundary(truth == class_id), reference_boundary(predicted == class_id)
        assert found.counts[class_id, Count.BOUNDARY_HITS] == (first & second).sum()
        assert found.counts[class_id, Count.BOUNDARY_UNION] == (first | second).sum()


def test_cldice_by_hand():
    """A bar of 3×11 and its left part: the truth's line has 9 pixels, the prediction's 4."""
    truth, predicted = np.zeros((7, 15), np.uint8), np.zeros((7, 15), np.uint8)
    truth[2:5, 2:13] = 1
    predicted[2:5, 2:8] = 1
    found = count_image(truth, predicted, 2, 1, with_lines=True).counts[0]
    assert found[Count.TRUTH_LINE :].tolist() == [
        9,
        5,
        4,
        4,
    ]  # truth's line: columns 3 to 11, of which 3 to 7 are in the prediction
    precision, sensitivity = 4 / 4, 5 / 9
    expected = 2 * precision * sensitivity / (precision + sensitivity)
    assert binary_scores(truth, predicted, with_lines=True)["cldice"] == pytest.approx(expected)


def test_cldice_does_not_depend_on_the_thickness_of_what_is_found():
    thin_line, thick_line = np.zeros((15, 40), np.uint8), np.zeros((15, 40), np.uint8)
    thin_line[7, 5:35] = 1
    thick_line[5:10, 3:37] = 1
    scores = binary_scores(thick_line, thin_line, with_lines=True)
    assert scores["cldice"] == 1.0
    assert scores["dice"] < 0.4


def test_lines_are_counted_only_when_asked_for():
    assert "cldice" not in binary_scores(TRUTH, PREDICTED)


def test_the_example_in_the_docs_is_what_the_code_says():
    page = (ROOT / "docs/metrics.md").read_text()
    images = re.findall(r"^image \d +truth +([#. ]+?) +prediction +([#. ]+)$", page, re.MULTILINE)
    counts = np.stack([count_image(*map(drawn, pair), 2, 1).counts for pair in images])
    of_images, of_set = scores_from_counts(counts), scores_from_counts(counts.sum(0))
    text = page.partition("## Example")[2].partition("\n## ")[0]
    (iou,), (dice,) = of_images["iou"][0], of_images["dice"][0]
    assert f"IoU 2/6 = {iou:.4f}, Dice 4/8 = {dice:.4f}. Image 2: IoU {of_images['iou'][1, 0]:.0f}." in text
    assert f"Mean over images: IoU {of_images['iou'].mean():.4f}. Whole set: 3 hits, union 7: IoU {of_set['iou'][0]:.4f}." in text
    assert f"at a boundary): {of_set['boundary_iou'][0]:.4f} as well." in text


def drawn(rows):
    return np.array([[letter == "#" for letter in row] for row in rows.split()], np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(seed):
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: it is the reference here")
    random = np.random.default_rng(seed)
    truth, predicted = random.integers(0, 4, (30, 40)).astype(np.uint8), random.integers(0, 4, (30, 40)).astype(np.uint8)
    scores = scores_from_counts(count_image(truth, predicted, 4).counts)
    flat = truth.ravel(), predicted.ravel()
    assert scores["iou"] == pytest.approx(sklearn.jaccard_score(*flat, average=None))
    assert scores["dice"] == pytest.approx(sklearn.f1_score(*flat, average=None))
    assert scores["precision"] == pytest.approx(sklearn.precision_score(*flat, average=None))
    assert scores["recall"] == pytest.approx(sklearn.recall_score(*flat, average=None))
