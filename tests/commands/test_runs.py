"""Commands that show runs: `runs`, `compare`, and which run a word means."""

import json
import os
import re
from pathlib import Path

import pytest

from helpers.report_runs import FOUR_IMAGES, write_run
from train_unet import main
from unet_trainer.inference.engine import find_model
from unet_trainer.runs.folder import find_shown_run, newest_run
from unet_trainer.system.locks import FolderLock

PERFECT = [[row[0], [row[1][1]] * 3] for row in FOUR_IMAGES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of each kind: finished, better, killed, failed before its first epoch."""
    monkeypatch.chdir(tmp_path)
    folder = Path("checkpoints")
    write_run(folder / "cells", learning_rate=0.1)
    write_run(folder / "better", ious=(0.9,), images=PERFECT, learning_rate=0.2)
    write_run(folder / "killed", ious=(0.25,), end=None, images=FOUR_IMAGES[:2], num_epochs=3)
    write_run(folder / "broken", ious=(), end="failed", images=(), num_epochs=3)
    return folder


def table_of(text):
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in text.splitlines()) if len(cells) > 4}


def test_every_run_has_its_state_best_iou_epochs_and_date(folder, capsys):
    with FolderLock() as lock:
        lock.acquire(folder / "killed", pytest.fail)
        assert main(["runs"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "4 runs under checkpoints, 1 running"
    assert main(["runs", str(folder)]) == 0
    text = capsys.readouterr().out
    found = table_of(text)
    assert found.pop("run") == ["state", "best IoU", "epochs", "last written"]
    assert {name: cells[:3] for name, cells in found.items()} == {
        "cells": ["finished", "0.6000", "3/3"],
        "better": ["finished", "0.9000", "1/1"],
        "killed": ["interrupted", "0.2500", "1/3"],
        "broken": ["failed", "–", "0/3"],
    }
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cells[3]) for cells in found.values())
    assert "\033" not in text
    assert main(["runs", f"checkpoint_dir={folder}", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    cells = [entries["cells"][key] for key in ("state", "best_val_iou", "best_epoch", "epochs")]
    assert cells == ["finished", 0.6, 2, 3]
    assert entries["broken"]["best_val_iou"] is None


def test_a_damaged_run_has_a_row_that_says_so_and_the_others_have_theirs(folder, capsys):
    text = (folder / "cells/run.json").read_text()
    (folder / "cells/run.json").write_text(text.replace('"val_iou": 0.6', '"val_iou": [1]'))
    (folder / "better/run.json").write_text("[" * 200_000)
    assert main(["runs", str(folder)]) == 0
    told = capsys.readouterr().out
    found = table_of(told)
    assert [found[name][0] for name in ("cells", "better", "killed")] == ["damaged", "damaged", "interrupted"]
    assert f"Warning: {folder / 'cells'} is damaged; left out: run.json: epochs.1.row.val_iou: " in told
    assert f"Warning: {folder / 'better'} is damaged; left out: run.json: it is nested too deeply\n" in told
    assert main(["compare", "cells", "better", "--html", "page.html"]) == 0
    assert "checkpoints/cells is damaged; left out: run.json: epochs.1.row.val_iou: " in capsys.readouterr().out
    assert "Damaged" in Path("page.html").read_text()


def test_runs_are_compared_with_the_first(folder, capsys):
    for _ in range(2):  # a page replaces a page
        assert main(["compare", "cells", "better", "--html", "page.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["Run", "val", "IoU"]
    assert lines[1].split()[:2] == ["cells", "0.6000"]
    assert "+0.303 (" in lines[2]  # 1 - 46 / 66
    assert "better" in lines[2]
    assert "Differences are to cells, paired image by image." in lines
    assert any(line.split() == ["learning_rate", "0.1", "0.2"] for line in lines)
    assert lines[-1] == "Page: page.html"
    assert "2 runs compared" in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "missing"], "checkpoint_dir: missing is no folder"),
        (["runs", "lr=1"], "lr=1: of settings runs takes checkpoint_dir alone, once each"),
        (["compare", "cells", "checkpoints/cells"], "cells and checkpoints/cells are the same run; name another"),
        (["compare", "cells", "better", "--html", "nowhere/x.html"], "--html: there is no folder "),
        (["report", "checkpoint_dir=none"], "checkpoint_dir: none holds no runs; python train_unet.py starts one"),
    ],
)
def test_what_cannot_be_done_is_one_message(folder, capsys, arguments, message):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"Error: {message}")


def test_runs_and_compare_count_epochs_alike(folder, capsys):
    write_run(folder / "early", ious=(0.2, 0.3, 0.4, 0.5, 0.45), end="stopped early", num_epochs=6)
    assert main(["runs", str(folder)]) == 0
    assert table_of(capsys.readouterr().out)["early"][2] == "5/6"
    assert main(["compare", "cells", "early", "--html", "page.html"]) == 0
    found = table_of(capsys.readouterr().out)
    columns = dict(zip(found["Run"], found["early"], strict=True))
    assert (columns["Best epoch"], columns["Epochs"]) == ("4", "5/6")
    assert '4<br><span class="muted small">5/6 done</span>' in Path("page.html").read_text()


def test_the_newest_run_is_the_one_that_was_saved_last_whatever_asks(folder, capsys):
    """Another one was written to later (its report, an event)."""
    for time, name in enumerate(("cells", "killed"), start=100):
        for file in ("last.pt", "best.pt"):
            (folder / name / file).write_bytes(b"")
            os.utime(folder / name / file, (time, time))
    os.utime(folder / "cells/run.json", (2**32, 2**32))
    assert find_shown_run(None, folder) == newest_run(folder) == find_model(None, folder).parent == folder / "killed"
    for name in ("cells", str(folder / "cells"), str(folder / "cells/run.json")):
        assert find_shown_run(name, folder) == folder / "cells"
    assert main(["report", "--no-pictures"]) == 0
    said = capsys.readouterr().out
    assert f"Report: {folder / 'killed/report.html'} " in said


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["report", "cells", "--no-pictures", "--out"], "checkpoints/cells/best.pt"),
        (["compare", "cells", "better", "--html"], "checkpoints/cells/best.pt"),
        (["check", "--json"], "checkpoints/cells/run.json"),
        (["doctor", "--write"], "checkpoints/cells/run.json"),
    ],
)
def test_a_page_or_report_never_replaces_a_file_of_another_kind_also_through_a_link(folder, capsys, words, file):
    Path(file).write_bytes(b"PK\x03\x04 of a run")
    Path("link.html").symlink_to(file)
    for name in (file, "link.html"):
        assert main([*words, name]) == 2
        assert re.match(rf"Error: {words[-1]}: \S*{file} (is there and is no|exists; name)", capsys.readouterr().err)
    assert Path(file).read_bytes() == b"PK\x03\x04 of a run"


def test_a_link_in_a_runs_folder_is_refused(folder, capsys):
    (folder / "cells/report.html").symlink_to("../../page.html")
    assert main(["report", "cells", "--no-pictures"]) == 2
    assert capsys.readouterr().err.startswith("Error: report: checkpoints/cells/report.html is a link to ../../page")
