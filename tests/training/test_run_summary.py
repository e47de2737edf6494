"""A run's folder read for display: while it goes on, after a kill, and from versions that wrote less."""

from datetime import UTC, datetime

import pytest

from helpers.no_files import needs_pipes, replace_by
from unet_trainer.system.locks import FolderLock
from unet_trainer.training.history import EventLog, write_result
from unet_trainer.training.run_summary import find_runs, is_run, read_run_summary


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def log(folder):
    log = EventLog()
    start = {"machine": {"device": "cpu"}, "data": {"num_train": 10}, "model": {"ids": ["sky", "car"]}}
    log.open(folder, resumed_after=None, **start)
    log.add("ready", startup_seconds=1.5)
    return log


def test_the_best_epoch_follows_the_monitored_metric_and_is_the_first_of_equals(log, folder):
    for number, (iou, loss) in enumerate([(0.5, 0.3), (0.7, 0.2), (0.7, 0.2), (None, None)], start=1):
        log.add("epoch", epoch=number, val_iou=iou, val_loss=loss)
    assert read_run_summary(folder).best.number == 2
    write_result(folder / "settings.json", {"monitor": {"value": "val_loss", "source": "file", "reason": ""}})
    assert read_run_summary(folder).best.number == 2
    log.add("epoch", epoch=5, val_iou=0.1, val_loss=0.1)
    assert read_run_summary(folder).best.number == 5


def test_a_run_that_holds_its_folder_is_running(log, folder):
    with FolderLock() as lock:
        lock.acquire(folder, pytest.fail)
        assert read_run_summary(folder).state == "running"
        log.add("end", how="failed")  # the lock is released after it
        assert read_run_summary(folder).state == "failed"
    assert read_run_summary(folder).state == "failed"


def test_runs_are_the_folders_that_hold_something_of_one_newest_first(tmp_path, log, folder):
    old = folder.parent / "old"
    for name in ("old", "empty", ".cache"):
        (folder.parent / name).mkdir()
    write_result(old / "result.json", {})
    write_result(folder.parent / ".cache" / "result.json", {})
    assert find_runs(folder.parent) == [old, folder]
    log.add("note", text="newer")
    assert find_runs(folder.parent) == [folder, old]
    assert read_run_summary(folder).updated <= datetime.now(UTC)
    assert find_runs(tmp_path / "missing") == []
    assert (is_run(folder), is_run(folder.parent / "empty"), is_run(tmp_path / "missing")) == (True, False, False)


def deep(depth):
    return "[" * depth + "]" * depth


START = '{"kind": "start", "model": {"ids": ["sky", "car"]}, "data": %s}'
EPOCH = '{"kind": "epoch", "epoch": 2, "val_iou": 0.5, "%s": %s}'
DAMAGED = [
    (
        "events.jsonl",
        EPOCH % ("val_loss", "[1]"),
        "events.jsonl, line 4: val_loss: [1]: Input should be a valid number",
    ),
    ("events.jsonl", EPOCH % ("seconds", deep(200_000)), "events.jsonl, line 4: it is nested too deeply"),
    (
        "events.jsonl",
        EPOCH % ("classes", '{"sky": 3}'),
        "events.jsonl, line 4: classes: 3: Input should be a valid dictionary",
    ),
    ("events.jsonl", EPOCH % ("confusion", "[[1, 2], [3]]"), "events.jsonl: epoch 2 has other classes than the run"),
    ("events.jsonl", EPOCH % ("classes", '{"tree": {}}'), "events.jsonl: epoch 1 has other classes than the run"),
    ("events.jsonl", START % '{"classes": [3]}', "events.jsonl, line 4: data: classes: "),
    ("result.json", '{"warnings": "none"}', "result.json: warnings: 'none': Input should be a valid list"),
    ("events.jsonl", EPOCH % ("skipped_steps", 10**30), "events.jsonl, line 4: skipped_steps: 1000"),
    ("result.json", deep(200_000), "result.json: it is nested too deeply"),
    ("settings.json", '{"seed": 3}', "settings.json, seed: 3: Input should be a valid dictionary"),
    ("val_scores.csv", "image,mask\na,b\n", "val_scores.csv: no table of scores ('wrong_pixels')"),
]


@pytest.mark.parametrize(("name", "content", "problem"), DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_damaged_is_left_out_and_told(name, content, problem, log, folder):
    classes = {"sky": {"iou": 0.5, "dice": 0.6, "precision": 0.7, "recall": 0.8}, "car": {"iou": None}}
    log.add("epoch", epoch=1, val_iou=0.5, classes=classes, confusion=[[3, 1], [0, 0]])
    with (folder / name).open("a" if name == "events.jsonl" else "w") as file:
        file.write(f"{content}\n")
    summary = read_run_summary(folder)
    assert summary.epochs[0].get("val_iou") == 0.5
    assert summary.image_scores == []
    (told,) = summary.problems
    assert told.startswith(problem)
    assert len(told) < 200
    assert summary.state == ("interrupted" if name == "val_scores.csv" else "damaged")


def test_a_file_without_any_event_is_damage_and_a_first_line_that_was_cut_off_is_not(folder):
    (folder / "events.jsonl").write_bytes(b'{"kind": "start", "ti')
    assert read_run_summary(folder).problems == []
    (folder / "events.jsonl").write_bytes(b"\0" * 50 + b"\n\xff\n")
    assert read_run_summary(folder).problems == ["events.jsonl: none of its lines is an event"]
    assert read_run_summary(folder).state == "damaged"


@needs_pipes
def test_what_is_no_file_is_told_and_not_waited_for(folder):
    replace_by("pipe", folder / "events.jsonl")
    (problem,) = read_run_summary(folder).problems
    assert problem.startswith("events.jsonl: a pipe")
