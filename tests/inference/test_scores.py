"""Scores by hand, their intervals, and differences between two models."""

import math
import re

import cv2
import numpy as np
import pytest
import torch

from helpers.project import ROOT
from unet_trainer.commands.evaluate import summary_lines
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.inference.evaluate import count_image
from unet_trainer.inference.scores import (
    Count,
    EvaluatedSet,
    compare,
    image_scores,
    intervals,
    resampled_sums,
    scores_from_counts,
    summarise,
)
from unet_trainer.model import metrics
from unet_trainer.reports.comparison import iou_intervals, paired_difference
from unet_trainer.runs.tables import image_score


def ids(*rows):
    """Digits are class ids, x is ignored."""
    return np.array([[IGNORED if letter == "x" else int(letter) for letter in row] for row in rows], np.uint8)


def binary_scores(truth, predicted, **options):
    """Of the foreground."""
    _, counts = count_image(truth, predicted, 2, first_id=1, **options)
    return {name: float(values[0]) for name, values in scores_from_counts(counts).items()}


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
    assert found[0].tolist() == alone[0].tolist() == [[1, 1], [0, 2]]
    # Boundaries and centre lines too: both end where the ignored begins.
    assert found[1].tolist() == alone[1].tolist()


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


def test_boundary_counts_are_those_of_the_definition():
    """Step by step over the whole image; the code looks at the box around the class only."""
    random = np.random.default_rng(0)
    smooth = [cv2.GaussianBlur(random.random((70, 90)).astype(np.float32), (0, 0), 4) for _ in range(2)]
    truth, predicted = ((field > np.median(field)).astype(np.uint8) for field in smooth)
    truth[:, :20] = predicted[:, :15] = 0
    _, counts = count_image(truth, predicted, 2)
    for class_id in (0, 1):
        first, second = reference_boundary(truth == class_id), reference_boundary(predicted == class_id)
        assert counts[class_id, Count.BOUNDARY_HITS] == (first & second).sum()
        assert counts[class_id, Count.BOUNDARY_UNION] == (first | second).sum()


def test_cldice_by_hand():
    """A bar of 3×11 and its left part: the truth's line has 9 pixels, the prediction's 4."""
    truth, predicted = np.zeros((7, 15), np.uint8), np.zeros((7, 15), np.uint8)
    truth[2:5, 2:13] = 1
    predicted[2:5, 2:8] = 1
    found = count_image(truth, predicted, 2, 1, with_lines=True)[1][0]
    # truth's line: columns 3 to 11, of which 3 to 7 are in the prediction
    assert found[Count.TRUTH_LINE :].tolist() == [9, 5, 4, 4]
    precision, sensitivity = 4 / 4, 5 / 9
    expected = 2 * precision * sensitivity / (precision + sensitivity)
    assert binary_scores(truth, predicted, with_lines=True)["cldice"] == pytest.approx(expected)


def test_the_example_in_the_docs_is_what_the_code_says():
    page = (ROOT / "docs/metrics.md").read_text()
    images = re.findall(r"^image \d +truth +([#. ]+?) +prediction +([#. ]+)$", page, re.MULTILINE)
    counts = np.stack([count_image(*map(drawn, pair), 2, 1)[1] for pair in images])
    of_images, of_set = scores_from_counts(counts), scores_from_counts(counts.sum(0))
    text = " ".join(page.partition("## Example")[2].partition("\n## ")[0].split())
    (iou,), (dice,) = of_images["iou"][0], of_images["dice"][0]
    assert f"IoU 2/6 = {iou:.4f}, Dice 4/8 = {dice:.4f}. Image 2: IoU {of_images['iou'][1, 0]:.0f}." in text
    mean, whole = of_images["iou"].mean(), of_set["iou"][0]
    assert f"Mean over images: IoU {mean:.4f}. Whole set: 3 hits, union 7: IoU {whole:.4f}." in text
    assert f"at a boundary): {of_set['boundary_iou'][0]:.4f} as well." in text


def drawn(rows):
    return np.array([[letter == "#" for letter in row] for row in rows.split()], np.uint8)


def evaluated(rows):
    """Rows: for each image, (hits, truth, prediction) of each class. No boundaries."""
    counts = np.zeros((len(rows), len(rows[0]), 5), np.int64)
    counts[:, :, :3] = rows
    none = np.zeros(len(rows), np.int64)
    return EvaluatedSet(counts, np.eye(2, dtype=np.int64), none, none + 1, [])


# Two classes in three images; the second is in the first image only, and was not found in it.
TWO_CLASSES = [[(5, 10, 5), (0, 4, 0)], [(10, 10, 10), (0, 0, 0)], [(0, 0, 5), (0, 0, 0)]]


def values(row):
    return {score: found["value"] for score, found in row["dataset"].items()}


def test_scores_of_the_whole_set_by_hand():
    summary = summarise(evaluated(TWO_CLASSES), ["road", "tree"], ["road", "tree"])
    road, tree, mean = *summary["classes"], summary["mean"]
    assert [row["name"] for row in (road, tree, mean)] == ["road", "tree", "mean"]
    assert [values(row)["iou"] for row in (road, tree, mean)] == [15 / 25, 0.0, 0.3]
    # The mean is of the classes that have one.
    assert [values(row)["precision"] for row in (road, tree, mean)] == [15 / 20, None, 15 / 20]
    assert summary["num_images"] == 3
    columns = ("images_with_a_score", "empty_truths", "empty_predictions")
    assert [[row[name] for name in columns] for row in (road, tree)] == [[3, 1, 0], [1, 2, 3]]


def test_a_difference_is_this_model_minus_the_other_and_paired():
    """The other finds one pixel less of each image: images differ much, the difference hardly."""
    this = evaluated([[(hits, 40, 40)] for hits in range(5, 40, 3)])
    other = evaluated([[(hits - 1, 40, 40)] for hits in range(5, 40, 3)])
    recall = compare(this, other, ["cell"])["mean"]["dataset"]["recall"]
    assert recall["difference"] == pytest.approx(1 / 40) == recall["this"] - recall["other"]
    assert recall["interval"] == pytest.approx([1 / 40] * 2)
    assert recall["share_of_draws_above_0"] == 1.0
    back = compare(other, this, ["cell"])["mean"]["dataset"]["recall"]
    assert (back["difference"], back["share_of_draws_above_0"]) == (pytest.approx(-1 / 40), 0.0)


# Classes that are not in the truth. Of four, the masks have three; "tram" is in none of them.

STREETS = ["sky", "road", "tree", "tram"]


def street_masks():
    """20 masks of 40×50 px; a tree is in the first two of them."""
    masks = np.zeros((20, 40, 50), np.uint8)
    for number, mask in enumerate(masks):
        mask[20 + number // 2 :] = 1
        mask[5:15, 5:15] = 2 if number < 2 else 0
    return masks


def with_errors(masks, share, seed):
    """Predictions: this share of the pixels is of another of the three classes."""
    random = np.random.default_rng(seed)
    shifted = (masks + random.integers(1, 3, masks.shape)) % 3
    return np.where(random.random(masks.shape) < share, shifted, masks).astype(np.uint8)


def evaluated_masks(masks, predicted):
    found = [count_image(*pair, 4) for pair in zip(masks, predicted, strict=True)]
    confusion = sum(one for one, _ in found)
    wrong, counted = ((masks != predicted).sum((1, 2)), np.full(len(masks), masks[0].size))
    return EvaluatedSet(np.stack([counts for _, counts in found]), confusion, wrong, counted, [])


def table_of(evaluated):
    """Its images as a run's table has them."""
    return [
        image_score(str(number), "", counts[:, :3].tolist(), STREETS) for number, counts in enumerate(evaluated.counts)
    ]


def reference_ious(masks, predicted):
    """Of the classes in the masks, pixel by pixel."""
    kinds = np.unique(masks)
    return [((masks == k) & (predicted == k)).sum() / ((masks == k) | (predicted == k)).sum() for k in kinds]


def test_a_class_that_no_mask_has_is_in_no_mean_wherever_scores_are_taken():
    """In training, in an evaluation and from the table of a run; against numpy, with 12 stray pixels of 40,000."""
    masks = street_masks()
    predicted = with_errors(masks, 0.05, seed=0)
    predicted[3, 0, :12] = 3
    expected = reference_ious(masks, predicted)
    found = evaluated_masks(masks, predicted)
    summary = summarise(found, STREETS, STREETS)
    assert [values(row)["iou"] for row in summary["classes"]] == [*map(pytest.approx, expected), None]
    assert set(values(summary["classes"][3]).values()) == {None}
    assert values(summary["mean"])["iou"] == pytest.approx(np.mean(expected))
    in_training = metrics.compute_scores(torch.from_numpy(found.confusion), 4)
    assert in_training.iou == pytest.approx(np.mean(expected))
    rows = table_of(found)
    assert rows[3].iou == pytest.approx(np.mean(reference_ious(masks[3], predicted[3])))
    assert rows[3].iou == image_scores(found.counts)["iou"][3]

    # Another bootstrap, of the draws whose truth has every class.
    low, high = summary["mean"]["dataset"]["iou"]["interval"]
    draws = np.random.default_rng(5).integers(20, size=(600, 20))
    means = [np.mean(reference_ious(masks[drawn], predicted[drawn])) for drawn in draws if (drawn < 2).any()]
    assert (low, high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.01)
    assert iou_intervals(rows)[0] == pytest.approx((low, high))
    assert iou_intervals(rows)[1]["tram"] is None


def test_the_row_of_a_class_that_no_mask_has_shows_the_pixels_that_are_predicted_as_it():
    masks = street_masks()
    predicted = masks.copy()
    predicted[3, 0, :12] = 3
    lines = summary_lines(summarise(evaluated_masks(masks, predicted), STREETS, STREETS))
    assert re.split(r"  +", lines[5].strip()) == ["tram", "–", "12 px predicted", "–", "–", "–", "–"]
    of_images = lines.index("") + 6
    assert re.split(r"  +", lines[of_images].strip()) == ["tram", *"–––––", "0", "20", "19"]


def test_a_comparison_is_that_of_the_tables_of_two_runs():
    masks = street_masks()
    predicted = with_errors(masks, 0.05, seed=0), with_errors(masks, 0.2, seed=1)
    this, other = (evaluated_masks(masks, each) for each in predicted)
    mean = compare(this, other, STREETS)["mean"]["dataset"]["iou"]
    difference = paired_difference(table_of(this), table_of(other))
    assert (difference.iou, difference.verdict) == (pytest.approx(mean["difference"]), "better")
    assert difference.interval == pytest.approx(mean["interval"])


def test_an_interval_covers_the_true_score_about_95_times_of_100(monkeypatch):
    """200 sets of 60 images from one population, whose recall is 0.7."""
    monkeypatch.setattr("unet_trainer.inference.scores.NUM_DRAWS", 300)
    random = np.random.default_rng(1)
    num_covered = 0
    for _ in range(200):
        counts = np.zeros((60, 1, 5), np.int64)
        counts[:, 0, :3] = 1000
        counts[:, 0, Count.HITS] = (1000 * random.beta(7, 3, 60)).round()  # of each image: 0.7 in the mean
        ((low, high),) = intervals(scores_from_counts(resampled_sums([counts])[0])["recall"], 60)
        num_covered += low <= 0.7 <= high
    assert 180 <= num_covered <= 200
