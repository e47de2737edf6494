"""Runs beside each other: what is compared, and what is not."""

from __future__ import annotations

import pytest

from helpers.report_runs import FOUR_IMAGES, write_run
from unet_trainer.reports.comparison import compare_runs, different_settings, shown_names
from unet_trainer.runs.run_summary import read_run_summary

PERFECT = [[row[0], [row[1][1]] * 3] for row in FOUR_IMAGES]  # all of the truth found


def summaries(*folders):
    return [read_run_summary(folder) for folder in folders]


def test_scores_are_paired_where_the_images_are_the_same(tmp_path):
    first, better = write_run(tmp_path / "a"), write_run(tmp_path / "b", ious=(0.9,), images=PERFECT)
    found = compare_runs(summaries(first, better))
    assert found.runs[0].difference is None
    assert found.runs[1].difference.iou == pytest.approx(1 - 46 / 66)
    assert found.note == "Differences are to a, paired image by image."
    assert found.best.name == "b"
    assert [(run.iou, run.seconds, run.memory_gib) for run in found.runs] == [(0.6, 30.0, 1.5), (0.9, 10.0, 1.5)]


def test_another_split_is_said(tmp_path):
    first, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", images=FOUR_IMAGES[:3])
    found = compare_runs(summaries(first, other))
    assert found.runs[1].difference is None
    assert found.note == "b was not validated on the same images as a: their scores cannot be compared."


def test_a_run_that_kept_no_scores_of_images_is_said(tmp_path):
    found = compare_runs(summaries(write_run(tmp_path / "a"), write_run(tmp_path / "b", images=())))
    assert found.runs[1].scores is None
    assert found.note == "b keeps no scores of single images, so there is no interval."


def test_settings_that_differ_are_found_and_names_of_runs_are_none(tmp_path):
    first = write_run(tmp_path / "a", learning_rate=0.1, run_name="a", encoder="x")
    other = write_run(tmp_path / "b", learning_rate=0.2, run_name="b", image_size=64)
    assert different_settings(summaries(first, other)) == [("learning_rate", [0.1, 0.2])]


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert shown_names(summaries(write_run(tmp_path / "x/run"), write_run(tmp_path / "y/run"))) == ["x/run", "y/run"]


def test_runs_without_an_epoch_can_be_compared(tmp_path):
    found = compare_runs(summaries(write_run(tmp_path / "a", ious=(), images=()), write_run(tmp_path / "b", ious=(), images=())))
    assert found.best is None
