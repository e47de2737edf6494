"""run.json: what a run writes into it as it goes, is killed and goes on; and what is read back, whatever the file holds."""

import errno
import json
import threading

import pytest

from helpers.no_files import needs_pipes, replace_by
from unet_trainer.runs import record as module
from unet_trainer.runs.record import RunRecord, read_run_summary
from unet_trainer.system.locks import FolderLock

MATRIX = [[3, 1], [0, 0]]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "run"
    folder.mkdir(parents=True)
    return folder


def started(folder, resumed_after=None):
    record = RunRecord()
    record.add("warning", "early")  # before there is a folder
    record.open(
        folder,
        resumed_after,
        model={"ids": ["sky", "car"], "classes": ["sky", "car"]},
        machine={"device": "cpu", "unknown": None},
    )
    return record


@pytest.fixture
def record(folder):
    return started(folder)


def add_epochs(record, *ious, first=1, **row):
    for number, iou in enumerate(ious, start=first):
        classes = {"sky": {"iou": 0.5}, "car": {"iou": None}}
        record.add_epoch({"epoch": number, "val_iou": iou, **row}, classes, MATRIX, {"val_seconds": 1.0})
    record.save()


def happened(folder):
    return [(event.kind, event.epoch) for event in read_run_summary(folder).events]


def test_a_run_that_was_killed_goes_on_after_its_last_state_and_one_that_begins_anew_forgets_it(record, folder):
    add_epochs(record, 0.5, 0.6, 0.7)
    assert (read_run_summary(folder).state, happened(folder)) == ("interrupted", [("warning", 0), ("start", 0)])
    again = started(folder, {"epoch": 2, "batch": 7})
    assert happened(folder)[2:] == [("killed", 3), ("warning", 2), ("resumed", 2)]
    add_epochs(again, 0.65, 0.4, first=3)
    again.add("shrink", "out of memory", epoch=3, batch=1)  # the state was restored
    add_epochs(again, 0.3, first=4)
    again.end("stopped early")
    again.end("failed", "while the report was written")
    summary = read_run_summary(folder)
    assert (summary.state, happened(folder)[5:]) == ("stopped early", [("shrink", 3), ("stopped early", 4)])
    assert summary.column("val_iou") == {1: 0.5, 2: 0.6, 3: 0.65, 4: 0.3}
    assert [epoch.confusion for epoch in summary.epochs] == [None, None, MATRIX, None]
    started(folder)
    assert (read_run_summary(folder).epochs, happened(folder)) == ([], [("warning", 0), ("start", 0)])


def test_a_record_that_is_damaged_is_named_by_the_run_that_goes_on_with_its_state(folder):
    (folder / "run.json").write_text("[" * 200_000)
    started(folder, {"epoch": 5, "batch": 7})
    event = read_run_summary(folder).events[-1]
    assert (event.kind, event.epoch, event.batch) == ("resumed", 5, 7)
    assert event.text == "what the run recorded before is lost (run.json: it is nested too deeply)"


def test_values_that_no_reader_takes_are_left_out_and_names_that_are_not_utf_8_come_back(record, folder):
    add_epochs(record, float("nan"), 0.5, train_loss=1e200)
    record.update(settings={"data_dir": {"value": "a\udce4"}, "seed": {"value": float("inf")}})
    summary = read_run_summary(folder)
    assert [epoch.row for epoch in summary.epochs] == [{}, {"val_iou": 0.5}]
    assert (summary.value("data_dir"), summary.value("seed", 1), summary.problems) == ("a\udce4", None, [])


def test_events_of_any_thread_are_written_with_the_next_save_and_nothing_else_is_left(record, folder):
    threads = [threading.Thread(target=record.add, args=("note",)) for _ in range(9)]
    for step in (threading.Thread.start, threading.Thread.join):
        list(map(step, threads))
    assert len(happened(folder)) == 2
    record.end("finished")
    assert len(happened(folder)) == 12
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_full_disk_ends_nothing_and_a_link_is_not_written_through(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "run.json").symlink_to(folder / "target")
    record = started(folder)
    assert not (folder / "target").exists()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_bytes_atomically", refuse)
        record.add("note", "kept")
        record.save()
    assert len(happened(folder)) == 2
    record.save()
    assert len(happened(folder)) == 3


def test_the_best_epoch_follows_the_monitored_metric_and_is_the_first_of_equals(record, folder):
    for number, (iou, loss) in enumerate([(0.5, 0.3), (0.7, 0.2), (0.7, 0.2), (float("nan"), 0.1)], start=1):
        add_epochs(record, iou, first=number, val_loss=loss)
    assert read_run_summary(folder).best.number == 2
    record.update(settings={"monitor": {"value": "val_loss"}})
    assert read_run_summary(folder).best.number == 4


def test_a_run_that_holds_its_folder_is_running(record, folder):
    with FolderLock() as lock:
        lock.acquire(folder, pytest.fail)
        assert read_run_summary(folder).state == "running"
        record.end("failed")  # the lock is released after it
        assert read_run_summary(folder).state == "failed"


NO_NUMBER = "epochs.1.row.val_iou: Input should be a valid number"


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("epochs 1 row val_iou", [1], NO_NUMBER),
        ("epochs 1 row val_iou", 10**400, NO_NUMBER),
        ("epochs 1 row val_iou", float("nan"), "epochs.1.row.val_iou: Input should be a finite number"),
        ("epochs 1 number", 1, "epoch 1 comes after epoch 1"),
        ("epochs 1 classes", {"tree": {}}, "epoch 2 has other classes than the run"),
        ("model classes", ["tree"], "the classes of the run are not those of its ids"),
        ("epochs 1 confusion", [[1, 2], [3]], "epoch 2 has other classes than the run"),
        ("epochs 1 confusion", [[1, -2]], "epochs.1.confusion.0.1: Input should be greater than or equal to 0"),
        ("data classes", [3], "data.classes.0: Input should be a valid dictionary"),
        ("result warnings", "none", "result.warnings: Input should be a valid list"),
        ("settings seed", {"value": 10**30}, "settings.seed.value: Input should be a plain value"),
        ("format", 2, "format: Input should be 1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_no_run_has_written_is_one_sentence(place, value, problem, record, folder):
    add_epochs(record, 0.5, 0.6)
    part = content = json.loads((folder / "run.json").read_text())
    *keys, last = [int(key) if key.isdigit() else key for key in place.split()]
    for key in keys:
        part = part[key]
    part[last] = value
    (folder / "run.json").write_text(json.dumps(content))
    summary = read_run_summary(folder)
    (sentence,) = summary.problems
    assert sentence.startswith(f"run.json: {problem}")
    assert (summary.state, summary.epochs, len(sentence) < 200) == ("damaged", [], True)


@needs_pipes
def test_what_is_no_json_or_no_file_is_damage_too_and_is_not_waited_for(folder):
    for content in (b"[" * 200_000, b"\0\xff", b"[]", b""):
        (folder / "run.json").write_bytes(content)
        assert len(read_run_summary(folder).problems) == 1
    (folder / "run.json").unlink()
    replace_by("pipe", folder / "run.json")
    (folder / "val_scores.csv").write_text("image,mask\na,b\n")
    summary = read_run_summary(folder)
    assert summary.image_scores == []
    pipe, table = summary.problems
    assert pipe.startswith("run.json: a pipe")
    assert table == "val_scores.csv: no class has counts of pixels"
