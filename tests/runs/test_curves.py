"""curves.png: of what the folder holds, with what happened marked, and whole or not at all."""

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unet_trainer.images.image_decoding import read_image
from unet_trainer.runs import curves
from unet_trainer.runs.curves import INK, INTERRUPTED, ROLLBACK, STOPPED, PacedWriter, write_curves
from unet_trainer.runs.record import RunRecord

pytestmark = pytest.mark.real_pictures


@pytest.fixture
def record(tmp_path):
    record = RunRecord()
    record.open(tmp_path, model={"ids": ["a", "b"], "classes": ["a", "b"]})
    return record


def add_epochs(record, *ious, first=1):
    for number, iou in enumerate(ious, start=first):
        classes = {name: {"iou": iou / (1 + index)} for index, name in enumerate(record.content.class_names)}
        row = {"epoch": number, "train_loss": 1 / number, "val_loss": 2 / number, "train_iou": iou, "val_iou": iou}
        record.add_epoch({**row, "learning_rate": 1e-3, "images_per_second": 10.0}, classes, None, {})
    record.save()


def test_the_picture_shows_loss_iou_of_each_class_learning_rate_and_throughput(record, tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: figures.append(figure) or save(figure, *a, **b))
    write_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()  # no epoch has ended
    # Neither a formula nor hidden; without the letter that the font lacks.
    record.update(model={"ids": ["a", "_b $ 汉\n"], "classes": ["a", "_b $ 汉\n"]})
    add_epochs(record, 0.2, 0.4)
    write_curves(tmp_path)
    assert read_image(tmp_path / "curves.png").shape == (830, 1320, 3)
    charts = {
        axes.get_title("left"): {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
        for axes in figures[0].axes
    }
    assert list(charts) == ["Loss", "IoU", "Learning rate", "Images per second, in training"]
    assert charts["Loss"]["val"] == [(1, 2.0), (2, 1.0)]
    assert {"val", "train", "a", " _b \\$ \ufffd\ufffd"} <= set(charts["IoU"])
    assert charts["IoU"]["a"] == [(1, 0.2), (2, 0.4)]


def test_what_happened_is_marked_and_explained(record, tmp_path, monkeypatch):
    add_epochs(record, 0.2, 0.6, 0.5)
    record.add("shrink", "out of memory", epoch=3)
    add_epochs(record, 0.4, first=4)
    again = RunRecord()
    again.open(tmp_path, {"epoch": 4, "batch": 0})
    add_epochs(again, 0.3, first=5)
    again.end("stopped early")
    marks, mark = {}, Axes.axvline
    monkeypatch.setattr(
        Axes, "axvline", lambda axes, x, **style: marks.update({style["color"]: x}) or mark(axes, x, **style)
    )
    write_curves(tmp_path)
    assert marks == {INK: 2, INTERRUPTED: 4.5, ROLLBACK: 3.5, STOPPED: 5}


@pytest.mark.parametrize(
    ("min_seconds", "moments", "drawn"),
    [
        (0, (1000.0, 1499.0, 1501.0), [1000.0, 1501.0]),  # five seconds of a core at a share of 1 % are 500 seconds
        (600, (1000.0, 1599.0, 1601.0, 2102.0, 2202.0), [1601.0, 2202.0]),  # nor before so long after the start
    ],
)
def test_drawing_takes_no_more_than_its_share_of_the_time(monkeypatch, min_seconds, moments, drawn):
    now, calls = [1000.0], []
    monkeypatch.setattr(curves.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(curves.time, "thread_time", lambda: 5.0 * len(calls))
    writer = PacedWriter(lambda: calls.append(now[0]), 0.01, min_seconds)
    for now[0] in moments:
        writer.write()
    assert calls == drawn
    writer.write(is_last=True)
    assert (len(calls), writer.error) == (len(drawn) + 1, None)
    writer.stop()
    now[0] = 1e9
    writer.write()
    assert len(calls) == len(drawn) + 1


def test_an_error_of_drawing_is_kept_and_ends_nothing():
    writer = PacedWriter(lambda: 1 / 0, 0.01)
    writer.write()
    assert isinstance(writer.error, ZeroDivisionError)
