"""The list of runs: what they are, and how far they came; on any terminal."""

from __future__ import annotations

import json
import re

import pytest

from train_unet import main
from unet_trainer.commands import runs
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.history import write_metrics, write_result
from unet_trainer.runs.run_summary import find_runs, read_run_summary
from unet_trainer.system.folder_lock import FolderLock


@pytest.fixture
def folder(tmp_path):
    """A run of each kind: finished, killed, failed before its first epoch, and one of an earlier version."""
    for name, ious, end in (("cells", (0.5, 0.75, 0.6), "finished"), ("killed", (0.25,), None), ("broken", (), "failed")):
        run = tmp_path / "checkpoints" / name
        run.mkdir(parents=True)
        log = EventLog()
        log.open(run)
        for number, iou in enumerate(ious, start=1):
            log.add("epoch", epoch=number, val_iou=iou)
        if end is not None:
            log.add("end", how=end)
        write_result(run / "settings.json", {"num_epochs": {"value": 3}})
    old = tmp_path / "checkpoints" / "old"
    old.mkdir()
    write_metrics(old / "metrics.csv", [{"epoch": 1, "val_iou": 0.125}])
    write_result(old / "result.json", {"epochs": 1, "stopped_early": True})
    return tmp_path / "checkpoints"


def lines_of(folder, capsys):
    assert main(["runs", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_run_has_its_state_best_iou_epochs_and_date(folder, capsys):
    header, *lines, last = lines_of(folder, capsys)
    assert re.split(r"  +", header) == ["run", "state", "best IoU", "epochs", "last written"]
    found = {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in lines)}
    assert {name: cells[:3] for name, cells in found.items()} == {
        "cells": ["finished", "0.7500", "3/3"],
        "killed": ["interrupted", "0.2500", "1/3"],
        "broken": ["failed", "–", "0/3"],
        "old": ["stopped early", "0.1250", "1"],
    }
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cells[3]) for cells in found.values())
    assert last == f"4 runs under {folder}"


def test_a_run_that_is_going_on_is_told(folder, capsys):
    with FolderLock() as lock:
        lock.acquire(folder / "killed", pytest.fail)
        lines = lines_of(folder, capsys)
    assert any(line.startswith("killed  running") for line in lines)
    assert lines[-1] == f"4 runs under {folder}, 1 running"


@pytest.mark.parametrize("columns", [20, 40, 60, 200])
def test_lines_fit_narrow_terminals(columns, folder):
    (folder / "cells").rename(folder / "a_very_long_name_of_a_run_that_somebody_chose")
    lines = runs.table([read_run_summary(run) for run in find_runs(folder)], columns)
    assert max(map(len, lines)) <= max(columns, runs.MIN_NAME + len("  stopped early  best IoU"))
    assert ("a_very_long_name_of_a_run_that_somebody_chose" in "\n".join(lines)) == (columns == 200)
    assert any("0.7500" in line for line in lines)


def test_states_have_their_colours_on_a_terminal_only(folder, monkeypatch, capsys):
    assert "\033" not in "\n".join(lines_of(folder, capsys))
    monkeypatch.setattr(runs, "painted", lambda text, colour, stream: f"<{colour}>{text}<>")
    lines = runs.table([read_run_summary(folder / "broken"), read_run_summary(folder / "cells")], 100)
    assert "<red>failed<>" in lines[1]
    assert "<green>finished<>" in lines[2]


def test_programs_get_json(folder, capsys):
    assert main(["runs", f"checkpoint_dir={folder}", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert len(entries) == 4
    cells = entries["cells"]
    assert (cells["state"], cells["best_val_iou"], cells["best_epoch"], cells["epochs"]) == ("finished", 0.75, 2, 3)
    assert entries["broken"]["best_val_iou"] is None


def test_a_folder_without_runs_says_how_to_start_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "No runs under checkpoints yet; python train_unet.py starts one\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "checkpoint_dir: missing is no folder"),
        (["a", "b"], "runs takes one folder, got a b"),
        (["lr=1"], "runs takes one folder, got lr=1"),
    ],
)
def test_what_is_no_folder_is_named(words, message, capsys):
    assert main(["runs", *words]) == 2
    assert message in capsys.readouterr().err
