"""curves.png: of what the folder holds, with what happened marked, and whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.images.image_files import read_image
from unet_trainer.runs import curves
from unet_trainer.runs.curves import BEST_COLOUR, INTERRUPTED_COLOUR, ROLLBACK_COLOUR, STOPPED_COLOUR, write_curves
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.history import write_metrics


@pytest.fixture
def log(tmp_path):
    log = EventLog()
    log.open(tmp_path, resumed_after=None)
    return log


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn, as numbers."""
    pictures = []
    draw = curves.draw_charts
    monkeypatch.setattr(curves, "draw_charts", lambda picture: (pictures.append(picture), draw(picture))[1])
    return pictures


def add_epochs(log, *ious, first=1, names=("a", "b")):
    for number, iou in enumerate(ious, start=first):
        classes = {name: {"iou": iou / (1 + index)} for index, name in enumerate(names)}
        row = {"train_loss": 1 / number, "val_loss": 2 / number, "train_iou": iou, "val_iou": iou}
        log.add("epoch", epoch=number, **row, learning_rate=1e-3, images_per_second=10.0, classes=classes)


def chart_lines(picture, title):
    return {line.name: list(line.points) for chart in picture.charts if chart.title == title for line in chart.lines}


def test_a_run_without_an_epoch_has_no_picture(log, tmp_path):
    write_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_the_picture_shows_loss_iou_of_each_class_learning_rate_and_throughput(log, tmp_path, drawn):
    add_epochs(log, 0.2, 0.4)
    write_curves(tmp_path)
    assert read_image(tmp_path / "curves.png").shape[2] == 3
    (picture,) = drawn
    assert [chart.title for chart in picture.charts] == ["Loss", "IoU", "Learning rate", "Images per second, in training"]
    assert chart_lines(picture, "Loss") == {"val": [(1, 2.0), (2, 1.0)], "train": [(1, 1.0), (2, 0.5)]}
    assert chart_lines(picture, "IoU")["b"] == [(1, 0.1), (2, 0.2)]
    assert set(chart_lines(picture, "IoU")) == {"a", "b", "val", "train"}


def test_what_happened_is_marked_and_explained(log, tmp_path, drawn):
    add_epochs(log, 0.2, 0.6, 0.5)
    log.add("rollback", epoch=3, text="NaN")
    add_epochs(log, 0.4, first=4)
    again = EventLog()
    again.open(tmp_path, resumed_after={"epoch": 4, "batch": 0})
    add_epochs(again, 0.3, first=5)
    again.add("end", how="stopped early")
    write_curves(tmp_path)
    (picture,) = drawn
    marks = {mark.colour: mark.x for mark in picture.marks}
    assert marks == {BEST_COLOUR: 2, ROLLBACK_COLOUR: 3.5, INTERRUPTED_COLOUR: 4.5, STOPPED_COLOUR: 5}
    assert [text for text, _ in picture.meanings] == [
        "best epoch: 2 (val_iou 0.6000)",
        "interrupted",
        "went back to a saved state",
        "stopped early after epoch 5",
    ]
    assert picture.charts[1].circled == (2, 0.6)
    pixels = read_image(tmp_path / "curves.png").reshape(-1, 3)
    for colour in (BEST_COLOUR, ROLLBACK_COLOUR, INTERRUPTED_COLOUR, STOPPED_COLOUR):
        assert (pixels == colour).all(-1).any()


def test_of_many_classes_the_worst_are_shown(log, tmp_path, drawn):
    names = [f"class {number}" for number in range(20)]
    add_epochs(log, 0.8, 0.9, names=names)
    write_curves(tmp_path)
    assert set(chart_lines(drawn[0], "IoU")) == {*names[-curves.MAX_CLASSES :], "val", "train"}
    assert drawn[0].charts[1].note == "val IoU of the 6 worst of 20 classes"


def test_one_class_has_no_line_beside_the_mean(log, tmp_path, drawn):
    add_epochs(log, 0.8, names=["foreground"])
    write_curves(tmp_path)
    assert set(chart_lines(drawn[0], "IoU")) == {"val", "train"}


def test_a_run_of_an_earlier_version_is_drawn_from_its_table(tmp_path, drawn):
    write_metrics(tmp_path / "metrics.csv", [{"epoch": 1, "val_iou": 0.5}, {"epoch": 2, "val_iou": float("nan"), "val_loss": -0.5}])
    write_curves(tmp_path)
    assert chart_lines(drawn[0], "IoU")["val"] == [(1, 0.5)]


def test_a_picture_that_cannot_be_written_leaves_the_one_before(log, tmp_path, monkeypatch):
    add_epochs(log, 0.2)
    write_curves(tmp_path)
    before = (tmp_path / "curves.png").read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    add_epochs(log, 0.4, first=2)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_curves(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "curves.png").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "events.jsonl"]
    write_curves(tmp_path)
    assert not np.array_equal(np.frombuffer(before, np.uint8), np.frombuffer((tmp_path / "curves.png").read_bytes(), np.uint8))
