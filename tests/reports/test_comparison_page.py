"""The page of several runs."""

from __future__ import annotations

import json
import re
from html import unescape

from helpers.report_runs import ATTACK, write_run
from unet_trainer.reports.comparison_page import difference_text, render_comparison, verdict
from unet_trainer.reports.score_statistics import Difference
from unet_trainer.runs.run_summary import read_run_summary


def page_of(*folders, **options):
    return render_comparison([read_run_summary(folder) for folder in folders], **options)


def test_runs_lie_over_each_other_by_epoch_and_by_time(tmp_path):
    page = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", ious=(0.3, 0.7)))
    data = [json.loads(unescape(found)) for found in re.findall(r'data-chart="([^"]*)"', page)]
    by_epoch, by_time = data[0]["views"]
    assert [(line["name"], line["xs"], line["ys"]) for line in by_epoch["lines"]] == [
        ("a", [1, 2, 3], [0.4, 0.6, 0.5]),
        ("b", [1, 2], [0.3, 0.7]),
    ]
    assert by_time["lines"][1]["xs"] == [0.1667, 0.3333]
    assert "The highest IoU: b, 0.7000." in page
    assert "no clear difference" in page


def test_a_live_page_leads_to_each_run_and_a_file_does_not(tmp_path):
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert 'href="run/1/"' in page_of(*folders, live="v", links=True)
    assert "href=" not in page_of(*folders).partition("<main")[2]


def test_classes_stand_beside_each_other_where_they_are_the_same(tmp_path):
    ids = ("sky", "road", "cow")
    first, second, other = write_run(tmp_path / "a", ids), write_run(tmp_path / "b", ids), write_run(tmp_path / "c")
    assert "IoU of each class" in page_of(first, second)
    assert "IoU of each class" not in page_of(first, other)


def test_hostile_names_are_text(tmp_path):
    page = page_of(write_run(tmp_path / "a", encoder=ATTACK), write_run(tmp_path / "<b>", encoder="x"))
    assert "<img src=x" not in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_differences_are_told_with_their_interval_and_in_words():
    assert difference_text(Difference(0.01234, (-0.002, 0.025), 0.9, 40)) == "+0.0123 (-0.002 to +0.025)"
    assert verdict(Difference(0.01, (-0.002, 0.025), 0.9, 40)) == "no clear difference"
    assert (verdict(Difference(0.1, (0.05, 0.2), 1.0, 9)), verdict(Difference(-0.1, (-0.2, -0.05), 0.0, 9))) == ("better", "worse")
    assert (difference_text(None), verdict(None)) == ("–", "")
