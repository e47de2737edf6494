"""run.json: what a run writes into it as it goes, is killed and goes on; and what is read back, whatever the file holds."""

import errno
import json
import os
import threading

import pytest

from helpers.no_files import needs_pipes, replace_by
from unet_trainer.system.locks import FolderLock
from unet_trainer.training import record as module
from unet_trainer.training.record import MAX_SAVES, RunRecord, find_runs, is_run, read_run_summary

MODEL = {"ids": ["sky", "car"]}
SKY = {"sky": {"iou": 0.5}, "car": {"iou": None}}
MATRIX = [[3, 1], [0, 0]]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def record(folder):
    record = RunRecord()
    record.add("warning", "early")  # before there is a folder
    record.open(folder, model=MODEL, machine={"device": "cpu", "free_device_memory_gib": None})
    return record


def add_epochs(record, *ious, first=1, matrix=MATRIX, **row):
    for number, iou in enumerate(ious, start=first):
        record.add_epoch({"epoch": number, "val_iou": iou, **row}, SKY, matrix, {"val_seconds": 1.0})


def resumed(folder, after):
    again = RunRecord()
    again.open(folder, {"epoch": after, "batch": 7}, model=MODEL)
    return again


def happened(folder):
    return [(event.kind, event.epoch) for event in read_run_summary(folder).events]


def matrices(folder):
    return {epoch.number: epoch.confusion for epoch in read_run_summary(folder).epochs}


def test_a_run_that_was_killed_goes_on_after_its_last_state_and_one_that_begins_anew_forgets_it(record, folder):
    add_epochs(record, 0.5, 0.6, 0.7)
    record.save()
    assert (read_run_summary(folder).state, happened(folder)) == ("interrupted", [("warning", 0), ("start", 0)])
    again = resumed(folder, 2)
    assert happened(folder)[2:] == [("killed", 3), ("resumed", 2)]
    assert matrices(folder) == {1: None, 2: None}  # that of epoch 3 is gone
    add_epochs(again, 0.65, 0.4, first=3)
    again.end("stopped early")
    again.end("failed", "while the report was written")
    assert (read_run_summary(folder).state, happened(folder)[4:]) == ("stopped early", [("stopped early", 4)])
    assert matrices(folder) == {1: None, 2: None, 3: MATRIX, 4: None}
    RunRecord().open(folder)
    assert (read_run_summary(folder).epochs, happened(folder)) == ([], [("start", 0)])


def test_a_state_that_is_restored_within_a_run_takes_later_epochs_back(record, folder):
    add_epochs(record, 0.5, 0.6, 0.7)
    record.add("shrink", "out of memory", epoch=2, batch=3)
    add_epochs(record, 0.1, first=3)
    record.save()
    assert read_run_summary(folder).column("val_iou") == {1: 0.5, 2: 0.6, 3: 0.1}
    assert happened(folder)[-1] == ("shrink", 2)


def test_a_record_that_is_damaged_is_named_by_the_run_that_goes_on_with_its_state(record, folder):
    (folder / "run.json").write_text("[" * 200_000)
    resumed(folder, 5)
    (event,) = read_run_summary(folder).events
    assert (event.kind, event.epoch, event.batch) == ("resumed", 5, 7)
    assert event.text == "what the run recorded before is lost (run.json: it is nested too deeply)"


def test_values_that_no_reader_takes_are_left_out_and_names_that_are_not_utf_8_come_back(record, folder):
    add_epochs(record, float("nan"), 0.5, train_loss=1e200)
    record.update(settings={"data_dir": {"value": "a\udce4"}, "seed": {"value": float("inf")}})
    summary = read_run_summary(folder)
    assert [epoch.row for epoch in summary.epochs] == [{}, {"val_iou": 0.5}]
    assert (summary.value("data_dir"), summary.value("seed", 1), summary.problems) == ("a\udce4", None, [])


def test_the_file_is_written_a_few_times_an_epoch_and_for_every_end(record, folder, monkeypatch):
    saves, write = [], module.write_bytes_atomically
    monkeypatch.setattr(module, "write_bytes_atomically", lambda *given: saves.append(write(*given)))
    add_epochs(record, 0.5)
    for number in range(10):
        record.add("note", f"{number}")
    assert len(saves) == MAX_SAVES
    record.end("finished")
    assert len(saves) == MAX_SAVES + 1
    assert len(read_run_summary(folder).events) == 13


def test_neither_a_full_disk_nor_another_folder_of_the_name_ends_or_gets_the_record(record, folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_bytes_atomically", refuse)
        record.add("note", "kept")
    assert happened(folder) == [("warning", 0), ("start", 0)]
    record.save()
    assert happened(folder) == [("warning", 0), ("start", 0), ("note", 0)]
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    record.save()
    assert list(folder.iterdir()) == []


def test_two_threads_may_add_and_save(record, folder):
    def work():
        for _ in range(20):
            record.add("note")
            record.save()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_run_summary(folder).events) == 42
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_nothing_is_written_through_a_link(folder):
    (folder / "run.json").symlink_to(folder / "target")
    RunRecord().open(folder)
    assert not (folder / "target").exists()


def test_the_best_epoch_follows_the_monitored_metric_and_is_the_first_of_equals(record, folder):
    for number, (iou, loss) in enumerate([(0.5, 0.3), (0.7, 0.2), (0.7, 0.2), (float("nan"), 0.1)], start=1):
        add_epochs(record, iou, first=number, val_loss=loss)
    record.save()
    assert read_run_summary(folder).best.number == 2
    record.update(settings={"monitor": {"value": "val_loss"}})
    assert read_run_summary(folder).best.number == 4


def test_a_run_that_holds_its_folder_is_running(record, folder):
    with FolderLock() as lock:
        lock.acquire(folder, pytest.fail)
        assert read_run_summary(folder).state == "running"
        record.end("failed")  # the lock is released after it
        assert read_run_summary(folder).state == "failed"
    assert read_run_summary(folder).state == "failed"


def test_runs_are_the_folders_that_hold_something_of_one_newest_first(tmp_path, record, folder):
    old = folder.parent / "old"
    for name in ("old", "empty", ".cache"):
        (folder.parent / name).mkdir()
    (old / "last.pt").touch()
    (folder.parent / ".cache/last.pt").touch()
    for seconds, order in ((2**32, [old, folder]), (0, [folder, old])):
        os.utime(old / "last.pt", (seconds, seconds))
        assert find_runs(folder.parent) == order
    assert read_run_summary(old).state == "interrupted"
    assert find_runs(tmp_path / "missing") == []
    assert (is_run(folder), is_run(folder.parent / "empty"), is_run(tmp_path / "missing")) == (True, False, False)


DAMAGED = [
    (("epochs", 1, "row", "val_iou"), [1], "epochs.1.row.val_iou: Input should be a valid number"),
    (("epochs", 1, "row", "val_iou"), 10**400, "epochs.1.row.val_iou: Input should be a valid number"),
    (("epochs", 1, "row", "val_iou"), float("nan"), "epochs.1.row.val_iou: Input should be a finite number"),
    (("epochs", 1, "number"), 1, "epoch 1 comes after epoch 1"),
    (("epochs", 1, "classes"), {"sky": 3}, "epochs.1.classes.sky: Input should be a valid dictionary"),
    (("epochs", 1, "classes"), {"tree": {}}, "epoch 1 has other classes than the run"),
    (("epochs", 1, "confusion"), [[1, 2], [3]], "epoch 2 has other classes than the run"),
    (
        ("epochs", 1, "confusion"),
        [[1, 2], [3, -1]],
        "epochs.1.confusion.1.1: Input should be greater than or equal to 0",
    ),
    (("data", "classes"), [3], "data.classes.0: Input should be a valid dictionary"),
    (("result", "warnings"), "none", "result.warnings: Input should be a valid list"),
    (("settings", "seed"), 3, "settings.seed: Input should be a dictionary"),
    (("settings", "seed"), {"value": 10**30}, "settings.seed.value: Input should be a plain value"),
    (("format",), 2, "format: Input should be 1"),
]


@pytest.mark.parametrize(("place", "value", "problem"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_file_that_no_run_has_written_is_one_sentence(place, value, problem, record, folder):
    add_epochs(record, 0.5, 0.6)
    record.save()
    content = json.loads((folder / "run.json").read_text())
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (folder / "run.json").write_text(json.dumps(content))
    summary = read_run_summary(folder)
    (sentence,) = summary.problems
    assert sentence.startswith(f"run.json: {problem}")
    assert (summary.state, summary.epochs, len(sentence) < 200) == ("damaged", [], True)


@needs_pipes
def test_what_is_no_json_or_no_file_is_damage_too_and_is_not_waited_for(record, folder):
    for content in (b"[" * 200_000, b"\0\xff", b"[]", b""):
        (folder / "run.json").write_bytes(content)
        assert len(read_run_summary(folder).problems) == 1
    (folder / "run.json").unlink()
    replace_by("pipe", folder / "run.json")
    assert read_run_summary(folder).problems[0].startswith("run.json: a pipe")
    (folder / "run.json").unlink()
    (folder / "val_scores.csv").write_text("image,mask\na,b\n")
    summary = read_run_summary(folder)
    assert (summary.image_scores, summary.problems) == ([], ["val_scores.csv: no table of scores ('wrong_pixels')"])
