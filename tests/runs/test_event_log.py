"""events.jsonl: every line that was said to be written is there after a kill, and a restored state undoes later epochs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import pytest

from helpers.project import ROOT
from unet_trainer.runs import event_log
from unet_trainer.runs.event_log import EventLog, current_epochs, finite, read_events
from unet_trainer.runs.run_folder import EVENTS

ADD_AND_DIE = """
import os, signal, sys; from pathlib import Path; from unet_trainer.runs.event_log import EventLog
log = EventLog(); log.open(Path(sys.argv[1]))
for number in range(100):
    log.add("epoch", epoch=number + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def log(tmp_path):
    log = EventLog()
    log.open(tmp_path, machine={"device": "cpu"})
    return log


def kinds(folder):
    return [event["kind"] for event in read_events(folder)]


def epoch_event(number, **facts):
    return {"kind": "epoch", "epoch": number, **facts}


def test_lines_are_json_with_kind_and_time_in_utc(log, tmp_path):
    log.add("warning", text="ein Gerät\nin two lines")
    start, warning = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (start["kind"], start["machine"]) == ("start", {"device": "cpu"})
    assert (warning["kind"], warning["text"]) == ("warning", "ein Gerät\nin two lines")
    assert warning["time"].endswith("+00:00")


def test_what_happened_before_the_folder_was_there_comes_after_the_start(tmp_path):
    log = EventLog()
    log.add("warning", text="early")
    assert list(tmp_path.iterdir()) == []
    log.open(tmp_path)
    log.add("note", text="late")
    assert kinds(tmp_path) == ["start", "warning", "note"]


def test_a_killed_process_loses_no_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", ADD_AND_DIE, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [event["epoch"] for event in current_epochs(read_events(tmp_path))] == list(range(1, 101))


@pytest.mark.parametrize("cut", [b'{"kind": "epoch", "epo', b"\xff\xfe\x00", b"[1, 2]\n", b'{"epoch": 3}\n', b"\n\n"])
def test_a_line_that_is_cut_off_or_not_ours_is_left_out_and_the_next_one_is_whole(cut, log, tmp_path):
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(cut)
    assert kinds(tmp_path) == ["start"]
    EventLog().open(tmp_path, resumed_after={"epoch": 0, "batch": 1})
    assert kinds(tmp_path) == ["start", "start"]


def test_lines_that_a_full_disk_refused_come_with_the_next_one(log, tmp_path, monkeypatch):
    real = event_log.open_to_append
    monkeypatch.setattr(event_log, "open_to_append", lambda *arguments, **options: (_ for _ in ()).throw(OSError(28, "full")))
    log.add("epoch", epoch=1)
    log.sync()
    monkeypatch.setattr(event_log, "open_to_append", real)
    assert kinds(tmp_path) == ["start"]
    log.add("epoch", epoch=2)
    assert [event.get("epoch") for event in read_events(tmp_path)] == [None, 1, 2]


def test_a_line_that_was_written_in_part_is_written_again_as_a_whole(log, tmp_path, monkeypatch):
    real = os.fdopen

    class HalfWritten:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            raise OSError(28, "full")

    monkeypatch.setattr(event_log.os, "fdopen", lambda handle, mode: HalfWritten(real(handle, mode)))
    log.add("epoch", epoch=1)
    monkeypatch.setattr(event_log.os, "fdopen", real)
    log.add("epoch", epoch=2)
    assert [event.get("epoch") for event in read_events(tmp_path)] == [None, 1, 2]


def test_nothing_is_written_through_a_link_or_into_another_folder_of_that_name(log, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / EVENTS).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        EventLog().open(tmp_path / "other")
    moved = EventLog()
    (tmp_path / "run").mkdir()
    moved.open(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "run").mkdir()
    moved.add("epoch", epoch=1)
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "target").exists()


def test_numbers_that_are_not_finite_are_null(log, tmp_path):
    log.add("epoch", epoch=1, val_iou=math.nan, classes={"a": {"iou": math.inf}}, values=(1.0, -math.inf))
    event = read_events(tmp_path)[-1]
    assert (event["val_iou"], event["classes"], event["values"]) == (None, {"a": {"iou": None}}, [1.0, None])
    assert finite({"a": [1.5, math.nan]}) == {"a": [1.5, None]}


def test_syncing_waits_for_the_disk(log, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log.sync()
    EventLog().sync()  # no folder yet
    assert len(synced) == 1


def test_a_folder_without_the_file_has_no_events(tmp_path):
    assert read_events(tmp_path) == []
    assert read_events(tmp_path / "missing") == []


def test_epochs_come_in_their_order():
    events = [{"kind": "start"}, epoch_event(1), {"kind": "warning"}, epoch_event(2)]
    assert [event["epoch"] for event in current_epochs(events)] == [1, 2]


@pytest.mark.parametrize(
    "undoing",
    [
        {"kind": "rollback", "epoch": 2},
        {"kind": "shrink", "epoch": 2},
        {"kind": "start", "resumed_after": {"epoch": 2, "batch": 7}},
    ],
)
def test_a_restored_state_undoes_the_epochs_after_it(undoing):
    events = [*(epoch_event(number, was="before") for number in (1, 2, 3, 4)), undoing]
    assert [event["epoch"] for event in current_epochs(events)] == [1, 2]
    events.append(epoch_event(3, was="again"))
    assert [(event["epoch"], event["was"]) for event in current_epochs(events)] == [(1, "before"), (2, "before"), (3, "again")]


def test_a_run_that_began_anew_in_the_same_folder_has_no_epochs_of_the_one_before():
    """resume: auto keeps the name, and a run that was killed before its first save starts over."""
    assert current_epochs([{"kind": "start"}, epoch_event(1), {"kind": "start", "resumed_after": None}]) == []


def test_an_epoch_without_a_number_is_left_out():
    assert current_epochs([{"kind": "epoch"}, epoch_event("1"), epoch_event(2)]) == [epoch_event(2)]
