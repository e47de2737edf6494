"""What the headline, the classes and the confusion matrix say of a run."""

from __future__ import annotations

import json
import re

import pytest

from helpers.report_runs import FOUR_IMAGES, epoch_event, write_run
from unet_trainer.model.baselines import Baseline
from unet_trainer.reports.score_sections import (
    MAX_MATRIX,
    baseline_of,
    class_section,
    confusion_section,
    distribution_figure,
    headline,
    images_per_second,
)
from unet_trainer.reports.score_statistics import set_scores
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.run_summary import read_run_summary

IDS = ("sky", "road", "cow")


def words(markup):
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


def shown(folder, part):
    summary = read_run_summary(folder)
    return words(part(summary, set_scores(summary.image_scores)))


def test_the_headline_has_score_interval_baseline_epoch_time_and_speed(tmp_path):
    said = shown(write_run(tmp_path / "run"), headline)
    assert "IoU on the validation images 0.6000" in said
    assert re.search(
        r"95 % interval 0\.\d{3} – (0\.\d{3}|1\.000) \(bootstrap over 4 images; so few images make it a rough one\)", said
    )
    assert "all foreground would give 0.5000" in said  # 10 of 20 pixels in the matrix
    assert "Best epoch 2 3 of 3 epochs done" in said
    assert "Time 30 s in epochs; start-up 1.5 s" in said
    assert "Images/s 102 in training" in said
    assert images_per_second(read_run_summary(tmp_path / "run")) == pytest.approx(3 / (1 / 101 + 1 / 102 + 1 / 103))


def test_a_useless_score_shows_as_such(tmp_path):
    good, useless = write_run(tmp_path / "good", images=(), ious=(0.9,)), write_run(tmp_path / "bad", images=(), ious=(0.45,))
    assert "not clearly better than no model" not in shown(good, headline)
    assert "The model is not clearly better than no model: predicting all foreground gives IoU 0.5000." in shown(useless, headline)


def test_a_score_whose_interval_reaches_the_baseline_is_doubted(tmp_path):
    weak = [[[80, 88, 88], [2, 6, 6]], [[80, 88, 88], [5, 6, 6]]]
    assert "not clearly better than no model" in shown(write_run(tmp_path / "run", images=weak, ious=(0.6,)), headline)


def test_warnings_of_the_verdict_and_the_error_that_ended_a_run_stand_at_the_top(tmp_path):
    folder = write_run(tmp_path / "run", end=None)
    (folder / "result.json").write_text(json.dumps({"warnings": ["too few steps\n  - train longer"], "baseline_iou": 0.2}))
    log = EventLog()
    log.open(folder, resumed_after={"epoch": 3, "batch": 0})
    log.add("end", how="failed", text="the disk is full")
    said = shown(folder, headline)
    assert "too few steps - train longer" in said
    assert "The run ended with an error: the disk is full" in said


def test_without_an_epoch_or_scores_of_images_the_headline_says_so(tmp_path):
    assert "No epoch has ended yet." in shown(write_run(tmp_path / "none", ious=(), images=()), headline)
    assert "No interval: the run kept no scores of its images." in shown(write_run(tmp_path / "old", images=()), headline)


def test_the_baseline_comes_from_the_best_epoch_or_from_the_result(tmp_path):
    assert baseline_of(read_run_summary(write_run(tmp_path / "run", IDS))) == Baseline("all sky", pytest.approx(1 / 3 / 3))
    old = tmp_path / "old"
    old.mkdir()
    (old / "result.json").write_text('{"baseline_iou": 0.25}')
    assert baseline_of(read_run_summary(old)) == Baseline("one class everywhere", 0.25)
    (old / "result.json").write_text("{}")
    assert baseline_of(read_run_summary(old)) is None


def test_classes_have_scores_intervals_and_shares(tmp_path):
    folder = write_run(tmp_path / "run", IDS, ious=(0.4,), images=())
    log = EventLog()
    log.open(
        folder,
        resumed_after={"epoch": 1, "batch": 0},
        data={"classes": [{"name": "cow", "share": 0.125}]},
        model={"ids": list(IDS)},
    )
    log.add("epoch", **epoch_event(2, list(IDS), 0.5, {"cow": None}))
    said = shown(folder, class_section)
    assert "At the best epoch, 2." in said
    assert "sky 0.5000 – 0.5000 0.5000 0.5000 – 33.3 %" in said
    assert said.endswith("cow – – – – – 12.5 % 33.3 %")


def test_the_matrix_has_shares_of_truth_and_prediction_and_pixels(tmp_path):
    made = confusion_section(read_run_summary(write_run(tmp_path / "run", IDS)))
    assert "The largest confusion: 20.0 % of cow is predicted as sky." in words(made)
    assert '<span class="by-truth">80.0 %</span><span class="by-prediction">80.0 %</span><span class="by-pixels">8</span>' in made
    assert "heat h8 p8 diagonal" in made


def test_a_matrix_of_very_many_classes_shows_those_with_the_most_errors(tmp_path):
    ids = [f"class {index}" for index in range(60)]
    confusion = [[0] * 60 for _ in ids]
    for index in range(60):
        confusion[index][index] = 1000
        confusion[index][(index + 1) % 60] = index
    folder = write_run(tmp_path / "run", tuple(ids), ious=(), images=())
    log = EventLog()
    log.open(folder, resumed_after=None, model={"ids": ids})
    log.add("epoch", **epoch_event(1, ids, 0.5, confusion=confusion))
    made = confusion_section(read_run_summary(folder))
    assert f"The {MAX_MATRIX} of 60 classes with the most wrong pixels are shown." in made
    assert made.count("diagonal") == MAX_MATRIX
    assert ">class 45</th>" in made
    assert ">class 10</th>" not in made


def test_the_distribution_counts_images_and_those_without_a_score(tmp_path):
    empty = [[[5, 5, 5], [0, 0, 0]]]
    made = distribution_figure(read_run_summary(write_run(tmp_path / "run", images=[*FOUR_IMAGES, *empty])))
    assert "4 images: median 0.650, mean 0.625, worst 0.200, best 1.000; 1 image without an IoU" in words(made)
    assert distribution_figure(read_run_summary(write_run(tmp_path / "none", images=()))) is None
