"""The data of the charts: lines, marks, and that long runs and many classes stay small."""

from __future__ import annotations

import json

from helpers.report_runs import epoch_event, write_run
from unet_trainer.reports.curve_section import MAX_CLASSES, MAX_POINTS, curve_section, marks, shown_classes, thinned
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.run_summary import EpochRecord, read_run_summary

IDS = ("sky", "road", "cow")


def charts(summary):
    """By key: what the page's script draws."""
    from html import unescape
    from re import findall

    found = findall(r'data-chart="([^"]*)" data-key="([^"]*)"', curve_section(summary))
    return {key: json.loads(unescape(data)) for data, key in found}


def test_every_curve_has_its_lines(tmp_path):
    found = charts(read_run_summary(write_run(tmp_path / "run", IDS)))
    assert list(found) == ["iou", "classes-curve", "loss", "rate", "speed"]
    (view,) = found["iou"]["views"]
    assert [(line["name"], line["ys"]) for line in view["lines"]] == [("val", [0.4, 0.6, 0.5]), ("train", [0.45, 0.65, 0.55])]
    assert found["iou"]["xs"] == [1, 2, 3]
    views = found["classes-curve"]["views"]
    assert [view["name"] for view in views] == ["IoU", "Dice", "Precision", "Recall"]
    assert [line["name"] for line in views[0]["lines"]] == list(IDS)


def test_one_class_has_its_scores_beside_each_other(tmp_path):
    found = charts(read_run_summary(write_run(tmp_path / "run")))
    (view,) = found["classes-curve"]["views"]
    assert [line["name"] for line in view["lines"]] == ["Dice", "Precision", "Recall"]


def test_figures_have_words_and_a_table(tmp_path):
    made = curve_section(read_run_summary(write_run(tmp_path / "run")))
    assert "val 0.4000 → 0.5000; train 0.4500 → 0.5500; val is 0.6000 at the best epoch, 2" in made
    assert made.count("<table>") == made.count("<figure") == 5
    assert '<th scope="row">2</th><td class="number">0.6000</td>' in made


def test_the_best_epoch_interruptions_and_the_early_stop_are_marked(tmp_path):
    folder = write_run(tmp_path / "run", end="interrupted")
    log = EventLog()
    log.open(folder, resumed_after={"epoch": 3, "batch": 0})
    log.add("rollback", epoch=3, batch=0, text="NaN")
    log.add("epoch", **epoch_event(4, ["background", "foreground"], 0.5))
    log.add("end", how="stopped early")
    found = [(mark["kind"], mark["x"], mark["text"]) for mark in marks(read_run_summary(folder))]
    assert found == [
        ("best", 2, "best epoch: 2"),
        ("interrupted", 3.5, "interrupted after epoch 3"),
        ("rollback", 3.5, "went back to a saved state after epoch 3"),
        ("stopped", 4, "stopped early after epoch 4"),
    ]


def test_a_long_run_is_thinned_and_keeps_its_best_epoch():
    epochs = [EpochRecord(number, {}) for number in range(1, 3000)]
    kept = thinned(epochs, epochs[1234])
    assert len(kept) <= MAX_POINTS + 3
    assert {1, 1235, 2999} <= {epoch.number for epoch in kept}


def test_of_very_many_classes_the_worst_have_curves(tmp_path):
    ids = tuple(f"class {index}" for index in range(40))
    folder = write_run(tmp_path / "run", ids, ious=(), images=())
    log = EventLog()
    log.open(folder, resumed_after=None, model={"ids": list(ids)})
    log.add("epoch", **epoch_event(1, list(ids), 0.5, {name: index / 40 for index, name in enumerate(ids)}))
    names, note = shown_classes(read_run_summary(folder))
    assert (names, note) == (list(ids[:MAX_CLASSES]), ", the worst of 40")


def test_before_the_first_epoch_there_are_no_curves(tmp_path):
    assert curve_section(read_run_summary(write_run(tmp_path / "run", ious=()))) is None
