"""A run's folder read for display: while it goes on, after a kill, and from versions that wrote less."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.history import write_metrics, write_result
from unet_trainer.runs.run_summary import ClassScores, Setting, find_runs, is_run, read_run_summary
from unet_trainer.runs.val_scores import image_score, val_scores_text
from unet_trainer.system.folder_lock import FolderLock

CLASSES = ["sky", "car"]


def row(epoch, val_iou=0.5, **changes):
    return {"epoch": epoch, "train_loss": 1.0, "val_loss": 1.0, "val_iou": val_iou, "seconds": 2.0, **changes}


def epoch_facts(epoch, val_iou, car=None):
    classes = {
        "sky": {"iou": val_iou, "dice": 0.6, "precision": 0.7, "recall": 0.8},
        "car": dict.fromkeys(("iou", "dice", "precision", "recall"), car),
    }
    return {
        **row(epoch, val_iou),
        "best": True,
        "stages": {"val_seconds": 0.5},
        "classes": classes,
        "confusion": [[3, epoch], [0, 0]],
    }


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def log(folder):
    log = EventLog()
    start = {"machine": {"device": "cpu"}, "data": {"num_train": 10}, "model": {"ids": CLASSES}}
    log.open(folder, resumed_after=None, **start)
    log.add("ready", startup_seconds=1.5)
    return log


def resume(folder, epoch, batch=0):
    log = EventLog()
    log.open(folder, resumed_after={"epoch": epoch, "batch": batch}, machine={"device": "cuda:0"})
    return log


def happened(folder):
    return [(event.kind, event.epoch, event.text) for event in read_run_summary(folder).events]


def test_epochs_have_their_row_their_classes_and_their_confusion_matrix(log, folder):
    log.add("epoch", **epoch_facts(1, 0.25, car=0.5))
    log.add("epoch", **epoch_facts(2, 0.75))
    summary = read_run_summary(folder)
    first, second = summary.epochs
    assert (first.number, first.row["val_iou"], first.stages, first.confusion) == (1, 0.25, {"val_seconds": 0.5}, [[3, 1], [0, 0]])
    assert first.classes == {"sky": ClassScores(0.25, 0.6, 0.7, 0.8), "car": ClassScores(0.5, 0.5, 0.5, 0.5)}
    assert second.classes["car"] == ClassScores(None, None, None, None)
    assert second.time is not None
    assert summary.column("val_iou") == [(1, 0.25), (2, 0.75)]
    assert summary.column("peak_memory_gib") == []
    assert summary.class_column("car", "iou") == [(1, 0.5)]
    assert summary.class_column("tree", "iou") == []
    assert (summary.class_names, summary.id_names) == (CLASSES, CLASSES)
    assert summary.best is second
    assert summary.per_class_iou == {"sky": 0.75, "car": None}
    assert (summary.machine, summary.data, summary.startup_seconds) == ({"device": "cpu"}, {"num_train": 10}, 1.5)


def test_the_best_epoch_follows_the_monitored_metric_and_is_the_first_of_equals(log, folder):
    for number, (iou, loss) in enumerate([(0.5, 0.3), (0.7, 0.2), (0.7, 0.2), (None, None)], start=1):
        log.add("epoch", epoch=number, val_iou=iou, val_loss=loss)
    assert read_run_summary(folder).best.number == 2
    write_result(folder / "settings.json", {"monitor": {"value": "val_loss", "source": "file", "reason": ""}})
    assert read_run_summary(folder).best.number == 2
    log.add("epoch", epoch=5, val_iou=0.1, val_loss=0.1)
    assert read_run_summary(folder).best.number == 5


def test_a_run_without_a_finished_epoch_has_no_best(log, folder):
    summary = read_run_summary(folder)
    assert (summary.epochs, summary.best, summary.image_scores, summary.per_class_iou) == ([], None, [], {})


@pytest.mark.parametrize("how", ["finished", "stopped early", "interrupted", "failed"])
def test_the_state_is_how_the_run_ended(how, log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    log.add("end", how=how, text="SIGINT")
    log.add("warning", text="said at the end")
    assert read_run_summary(folder).state == how
    assert (how, 1, "SIGINT") in happened(folder)


def test_a_run_that_was_killed_counts_as_interrupted_and_its_resuming_tells_of_it(log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    log.add("epoch", **epoch_facts(2, 0.6))
    assert read_run_summary(folder).state == "interrupted"
    again = resume(folder, 1, batch=3)
    again.add("epoch", **epoch_facts(2, 0.7))
    again.add("end", how="finished")
    summary = read_run_summary(folder)
    assert [(event.kind, event.epoch, event.batch) for event in summary.events] == [
        ("start", 0, 0),
        ("killed", 2, 0),
        ("resumed", 1, 3),
        ("finished", 2, 0),
    ]
    assert [event.kind for event in summary.interruptions] == ["killed", "resumed"]
    assert [epoch.get("val_iou") for epoch in summary.epochs] == [0.5, 0.7]
    assert (summary.state, len(summary.starts), summary.machine) == ("finished", 2, {"device": "cuda:0"})


def test_rollbacks_and_warnings_are_kept_with_their_epoch_and_time(log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    log.add("warning", text="careful")
    log.add("epoch", **epoch_facts(2, 0.5))
    log.add("rollback", epoch=1, batch=2, text="NaN in epoch 3")
    log.add("note", text="a note")
    summary = read_run_summary(folder)
    assert happened(folder) == [
        ("start", 0, ""),
        ("warning", 1, "careful"),
        ("rollback", 1, "NaN in epoch 3"),
        ("note", 1, "a note"),
    ]
    assert [event.text for event in summary.warnings] == ["careful"]
    assert all(event.time.tzinfo is not None for event in summary.events)
    assert [epoch.number for epoch in summary.epochs] == [1]


def test_a_run_that_holds_its_folder_is_running(log, folder):
    with FolderLock() as lock:
        lock.acquire(folder, pytest.fail)
        assert read_run_summary(folder).state == "running"
        log.add("end", how="failed")  # the lock is released after it
        assert read_run_summary(folder).state == "failed"
    assert read_run_summary(folder).state == "failed"


def test_a_run_that_another_process_holds_is_running_although_it_had_ended(log, folder, monkeypatch):
    """It reads the data before it tells of its start."""
    log.add("end", how="interrupted")
    monkeypatch.setattr("unet_trainer.runs.run_summary.is_locked", lambda path: path == folder)
    assert read_run_summary(folder).state == "running"


def test_settings_have_value_source_and_reason(folder):
    write_result(folder / "settings.json", {"batch_size": {"value": 8, "source": "decided", "reason": "memory"}, "odd": 3})
    summary = read_run_summary(folder)
    assert summary.settings == {"batch_size": Setting(8, "decided", "memory")}
    assert (summary.value("batch_size"), summary.value("missing", 4)) == (8, 4)


def test_scores_of_images_are_read_the_worst_first(log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    scores = [image_score(name, name, [[8, 9, 9], [hits, 2, 2]], CLASSES) for name, hits in (("good", 2), ("bad", 0))]
    (folder / "val_scores.csv").write_text(val_scores_text(scores))
    assert [score.image for score in read_run_summary(folder).image_scores] == ["bad", "good"]


def test_a_run_of_an_earlier_version_shows_what_it_has(folder):
    """No events, no settings.json: metrics.csv, config.yaml, result.json and train.log."""
    write_metrics(folder / "metrics.csv", [row(1, 0.4), row(2, 0.6)])
    (folder / "config.yaml").write_text(
        "# Settings\nnum_classes: 1  # decided: two values: 0 and 255\nmonitor: val_iou  # the metric\nnum_epochs: 5  # passes\n"
    )
    assert read_run_summary(folder).state == "interrupted"
    write_result(folder / "result.json", {"epochs": 1, "stopped_early": True})
    assert read_run_summary(folder).state == "interrupted"  # resumed since
    write_result(folder / "result.json", {"epochs": 2, "stopped_early": True, "per_class_iou": {"foreground": 0.6}})
    (folder / "train.log").write_text("U-Net trainer\nWarning: this is old\n")
    summary = read_run_summary(folder)
    assert (summary.state, summary.num_epochs, summary.class_names) == ("stopped early", 5, ["foreground"])
    assert summary.id_names == ["background", "foreground"]
    assert summary.settings["num_classes"] == Setting(1, "decided", "two values: 0 and 255")
    assert summary.settings["monitor"] == Setting("val_iou")
    assert [(epoch.number, epoch.get("val_iou"), epoch.classes, epoch.confusion) for epoch in summary.epochs] == [
        (1, 0.4, {}, None),
        (2, 0.6, {}, None),
    ]
    assert summary.best.number == 2
    assert summary.per_class_iou == {"foreground": 0.6}
    assert [(event.kind, event.text) for event in summary.events] == [("warning", "this is old")]


def test_a_run_that_an_earlier_version_began_keeps_the_epochs_of_both(folder):
    write_metrics(folder / "metrics.csv", [row(1, 0.4), row(2, 0.6)])
    log = resume(folder, 2)
    assert [epoch.number for epoch in read_run_summary(folder).epochs] == [1, 2]
    log.add("epoch", **epoch_facts(3, 0.7))
    epochs = read_run_summary(folder).epochs
    assert [(epoch.number, bool(epoch.classes)) for epoch in epochs] == [(1, False), (2, False), (3, True)]


def test_a_table_that_is_ahead_of_a_state_that_was_restored_does_not_count(log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    log.add("epoch", **epoch_facts(2, 0.6))
    write_metrics(folder / "metrics.csv", [row(1), row(2)])
    log.add("rollback", epoch=1, batch=0, text="NaN")
    assert [epoch.number for epoch in read_run_summary(folder).epochs] == [1]


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.csv", "settings.json", "result.json", "config.yaml", "val_scores.csv"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00{", b"epoch\nx\n", b'{"kind": 3, "epoch": {}}\n', b'[{"kind": "epoch"}]'])
def test_a_damaged_file_never_keeps_a_run_from_being_shown(name, content, log, folder):
    log.add("epoch", **epoch_facts(1, 0.5))
    write_metrics(folder / "metrics.csv", [row(1)])
    (folder / name).write_bytes(content)
    summary = read_run_summary(folder)
    assert summary.name == "run"
    assert summary.image_scores == []
    assert [epoch.number for epoch in summary.epochs] == [1]


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


def test_events_of_a_later_version_are_passed_over(log, folder):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "hologram", "epoch": 7}) + "\n")
    assert happened(folder) == [("start", 0, "")]
