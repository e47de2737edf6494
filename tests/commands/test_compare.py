"""python train_unet.py compare: a table, a chart, what differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.report_runs import FOUR_IMAGES, write_run
from train_unet import main

PERFECT = [[row[0], [row[1][1]] * 3] for row in FOUR_IMAGES]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("checkpoints/a"), learning_rate=0.1)
    write_run(Path("checkpoints/b"), ious=(0.9,), images=PERFECT, learning_rate=0.2)
    write_run(Path("checkpoints/other"), images=FOUR_IMAGES[:2])


def test_runs_are_compared_with_the_first(runs, capsys):
    assert main(["compare", "a", "b", "--html", "page.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["Run", "val", "IoU"]
    assert lines[1].split()[:2] == ["a", "0.6000"]
    assert lines[2].split()[:2] == ["b", "0.9000"]
    assert "+0.3030 (" in lines[2]  # 1 - 46 / 66
    assert "better" in lines[2]
    assert [line[0] for line in lines if "●" in line] == ["a", "b"]
    assert "Differences are to a, paired image by image." in lines
    assert any(line.split() == ["learning_rate", "0.1", "0.2"] for line in lines)
    assert lines[-1] == "Page: page.html"
    assert "2 runs compared" in Path("page.html").read_text()


def test_another_split_is_said(runs, capsys):
    assert main(["compare", "a", "other"]) == 0
    assert "other was not validated on the same images as a: their scores cannot be compared." in capsys.readouterr().out


def test_runs_without_scores_are_compared(runs, capsys):
    for name in ("x", "y"):
        write_run(Path(f"checkpoints/{name}"), ious=(), images=())
    assert main(["compare", "x", "y"]) == 0
    assert "No run has a score yet." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Error: compare takes two or more runs, got none"),
        (["a"], "Error: compare takes two or more runs, got a"),
        (["a", "a"], "Error: compare takes two or more runs, got a, a"),
        (["a", "nobody"], "Error: no run nobody; checkpoints holds"),
        (["a", "b", "--html", f"nowhere{os.sep}x.html"], "Error: --html nowhere/x.html: cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_one_message(runs, capsys, arguments, message):
    assert main(["compare", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
