"""python train_unet.py report, and the reports that runs write themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.project import ROOT, TINY_MODEL
from helpers.report_runs import write_run
from helpers.runs import stop_after, words
from train_unet import main, train
from unet_trainer.reports import run_report


@pytest.fixture(scope="module")
def place(tiny_data, tmp_path_factory):
    """A folder with checkpoints/tiny, a real run that ended by itself with its pictures."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    (folder / "data/tiny").symlink_to(tiny_data)
    settings = {**TINY_MODEL, "data_dir": "data/tiny", "image_size": 32, "batch_size": 4, "num_epochs": 1, "num_workers": 0}
    command = [sys.executable, str(ROOT / "train_unet.py"), *words({**settings, "device": "cpu", "run_name": "tiny"})]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout)
    return folder


def test_a_run_ends_with_its_report_and_names_it(place):
    page = (place / "checkpoints/tiny/report.html").read_text()
    assert page.count('class="photo"') == 2
    assert '<span class="pill finished">Finished</span>' in page
    assert "| report: checkpoints/tiny/report.html |" in (place / "said.txt").read_text()


def test_the_command_writes_the_report_of_the_newest_run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["report", "--out", "mine.html", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Report: mine.html (0.")
    assert Path("mine.html").read_text().count('class="photo"') == 2
    assert main(["report", "tiny", "--out", "plain.html", "--no-pictures"]) == 0
    assert 'class="photo"' not in Path("plain.html").read_text()


def test_data_that_have_moved_are_told_and_can_be_named(place, monkeypatch, tiny_data, tmp_path):
    monkeypatch.chdir(place)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("best.pt", "split.csv", "events.jsonl", "val_scores.csv"):
        (run / name).write_bytes(Path(f"checkpoints/tiny/{name}").read_bytes())
    config = Path("checkpoints/tiny/config.yaml").read_text().replace("data/tiny", "data/gone")
    (run / "config.yaml").write_text(config)
    assert main(["report", str(run)]) == 0
    assert "There are no pictures: data_dir: data/gone does not exist here" in (run / "report.html").read_text()
    assert main(["report", str(run), f"data_dir={tiny_data}"]) == 0
    assert (run / "report.html").read_text().count('class="photo"') == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "Error: no run nobody; checkpoints holds tiny"),
        (["tiny", "tiny"], "Error: got 2 runs (tiny, tiny); need one. python train_unet.py compare takes several"),
        (["tiny", "lr=1"], "Error: lr=1: report takes checkpoint_dir=FOLDER and data_dir=FOLDER and no other setting"),
        (["tiny", "--no-pictures", "--out", "nowhere/x.html"], "Error: "),
        (["tiny", "--device", "gpu"], "Error: 1 problem in the config:\n  device: got 'gpu'"),
    ],
)
def test_what_cannot_be_done_is_one_message(place, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(place)
    assert main(["report", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


# Runs that write it themselves


def test_an_interrupted_run_has_a_report_without_predicting(tiny_config, small_network, monkeypatch):
    monkeypatch.setattr(run_report, "make_gallery", lambda *_: pytest.fail("predicted after an interruption"))
    with pytest.raises(KeyboardInterrupt):
        train({**tiny_config, "run_name": "run"}, on_epoch=stop_after(1))
    page = (Path(tiny_config["checkpoint_dir"]) / "run/report.html").read_text()
    assert '<span class="pill interrupted">Interrupted</span>' in page
    assert "go on where the state was saved" in page
    assert "Samples of epoch 1" in page


def test_a_report_that_cannot_be_written_is_one_warning(tiny_config, small_network, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("a bug\nin the report")

    monkeypatch.setattr("unet_trainer.training.run.write_report", fail)
    result = train(tiny_config)
    assert result.epochs == 2
    assert capsys.readouterr().out.count("Warning: report.html could not be written: ValueError: a bug\n") == 1


def test_a_signal_while_the_report_is_written_leaves_a_finished_run(tiny_config, small_network, monkeypatch):
    def interrupt(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr("unet_trainer.training.run.write_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train({**tiny_config, "run_name": "run"})
    folder = Path(tiny_config["checkpoint_dir"]) / "run"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["how"] for event in events if event["kind"] == "end"] == ["finished"]
    assert json.loads((folder / "result.json").read_text())["epochs"] == 2
    with contextlib.suppress(FileNotFoundError):
        assert re.search("pill", (folder / "report.html").read_text())


def test_a_folder_without_checkpoints_has_a_report(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "the run has no best.pt" in (tmp_path / "run/report.html").read_text()
