"""Runs beside each other: what is compared, and what is not; scores of a set from the counts of its images, by hand."""

import json
import re
from html import unescape

import numpy as np

from helpers.report_runs import ATTACK, FOUR_IMAGES, scores_of, write_run
from unet_trainer.inference.evaluate import EvaluatedSet
from unet_trainer.inference.scores import summarise
from unet_trainer.reports.comparison import compare_runs, iou_intervals, render_comparison, same_images
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import worst_first

SCORES = scores_of(FOUR_IMAGES)
WHOLE = 46 / (60 + 52 - 46)  # hits 2 + 8 + 16 + 20 = 46, truth 60, prediction 52


def summaries(*folders):
    return [read_run_summary(folder) for folder in folders]


def test_what_cannot_be_compared_is_said(tmp_path):
    first, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", images=FOUR_IMAGES[:3])
    none = write_run(tmp_path / "x/b", images=(), ious=())
    found = compare_runs(summaries(first, other, none))
    assert [run.name for run in found.runs] == ["a", f"{tmp_path.name}/b", "x/b"]
    assert [run.difference for run in found.runs] == [None] * 3
    assert f"Not validated on the same images as a, so not comparable: {tmp_path.name}/b." in found.note
    assert "No scores of single images, so no interval: x/b." in found.note
    assert "No run has a score yet." in render_comparison(summaries(none, none))


def test_a_damaged_table_without_classes_is_reported_and_not_compared(tmp_path):
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for folder in folders:
        (folder / "val_scores.csv").write_text("image,mask,wrong_pixels,counted_pixels\na,b,0,4\nc,d,1,4\n")
    runs = summaries(*folders)
    found = compare_runs(runs)
    assert [(run.interval, run.difference) for run in found.runs] == [(None, None)] * 2
    assert found.note == "No scores of single images, so no interval: a, b."
    assert all("val_scores.csv" in problem for run in runs for problem in run.problems)
    assert "no class has counts of pixels" in runs[0].problems[0]


def test_the_page_lays_runs_over_each_other_by_epoch_and_by_time(tmp_path):
    ids = ("sky", "road", "cow")
    folders = write_run(tmp_path / "a", ids), write_run(tmp_path / "b", ids, ious=(0.3, 0.7))
    page = render_comparison(summaries(*folders))
    data = [json.loads(unescape(found)) for found in re.findall(r'data-chart="([^"]*)"', page)]
    by_epoch, by_time = data[0]["views"]
    lines = [(line["name"], line["xs"], line["ys"]) for line in by_epoch["lines"]]
    assert lines == [("a", [1, 2, 3], [0.4, 0.6, 0.5]), ("b", [1, 2], [0.3, 0.7])]
    assert by_time["lines"][1]["xs"] == [0.1667, 0.3333]
    for part in ("The highest IoU: b, 0.700.", "no clear difference", "IoU of each class"):
        assert part in page
    assert "href=" not in page.partition("<main")[2]
    assert "IoU of each class" not in render_comparison(summaries(folders[0], write_run(tmp_path / "c")))


def test_hostile_names_are_text(tmp_path):
    folders = write_run(tmp_path / "a", encoder=ATTACK), write_run(tmp_path / "<b>", encoder="x")
    page = render_comparison(summaries(*folders))
    assert "<img src=x" not in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_the_score_of_a_set_lies_in_its_interval():
    found, of_classes = iou_intervals(SCORES)
    assert 0.2 <= found[0] < WHOLE < found[1] <= 1.0
    assert of_classes["foreground"] == found
    images = [[[4, 8, 4], [2, 2, 6], [0, 0, 0]], [[4, 4, 4], [2, 2, 2], [0, 0, 0]]]
    assert iou_intervals(scores_of(images, ("sky", "road", "cow")))[1]["cow"] is None
    assert iou_intervals(SCORES[:1]) == (None, {"foreground": None})
    assert iou_intervals([]) == (None, {})


def test_a_report_and_an_evaluation_of_the_same_images_give_one_interval():
    """The table of a run lists its images worst first and without boundaries; an evaluation has them in the order of the files."""
    hits = np.random.default_rng(0).integers(0, 100, 10).tolist()
    scores = worst_first(scores_of([[[0, 900, 900], [number, 100, 100]] for number in hits]))
    counts = np.zeros((10, 1, 5), np.int64)
    counts[..., :3] = [[[number, 100, 100]] for number in hits]
    evaluated = EvaluatedSet(counts, np.zeros((2, 2), np.int64), np.zeros(10, np.int64), np.zeros(10, np.int64), [])
    summary = summarise(evaluated, ["foreground"], ["background", "foreground"])
    assert summary["mean"]["dataset"]["iou"]["interval"] == iou_intervals(scores)[0]


def test_other_images_other_masks_and_other_classes_are_not_the_same():
    assert same_images(SCORES, SCORES[::-1])
    other_masks = [*FOUR_IMAGES[:3], [[80, 80, 80], [20, 21, 20]]]
    others = scores_of(FOUR_IMAGES, prefix="elsewhere/"), scores_of(FOUR_IMAGES, ("cell",)), scores_of(other_masks)
    assert not any(same_images(SCORES, each) for each in (SCORES[:3], *others))
    assert not same_images([], [])
