"""python train_unet.py report, and the reports that runs write themselves."""

import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from helpers.runs import stop_after
from train_unet import main, train
from unet_trainer.reports import run_report
from unet_trainer.runs.record import ENDS, read_run_summary
from unet_trainer.training import setup


@pytest.fixture
def place(trained_run, tmp_path, monkeypatch):
    """A folder with checkpoints/tiny, a real run that ended by itself with its pictures."""
    shutil.copytree(trained_run, tmp_path / "checkpoints/tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_ends_with_its_report_and_names_it(trained_run):
    page = (trained_run / "report.html").read_text()
    assert page.count('class="photo"') == 2
    assert '<span class="pill useless">Finished, of no use</span>' in page  # one step: background alone
    said = (trained_run / "train.log").read_text()
    assert f"| report: {trained_run / 'report.html'} |" in said
    assert said.index("\nMaking the report ...\n") < said.index("\nBest epoch: ")
    assert said.endswith("(trains on)\n")


@pytest.mark.real_pictures
def test_the_command_writes_the_report_of_the_newest_run(place, capsys):
    assert main(["report", "--out", "mine.html", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Report: mine.html (0.")
    assert Path("mine.html").read_text().count('class="photo"') == 2
    assert main(["report", "tiny", "--out", "plain.html", "--no-pictures"]) == 0
    assert 'class="photo"' not in Path("plain.html").read_text()


@pytest.mark.real_pictures
def test_data_that_have_moved_are_told_and_can_be_named(place, tiny_data):
    run = place / "checkpoints/tiny"
    for name in ("config.yaml", "run.json"):
        (run / name).write_text((run / name).read_text().replace(str(tiny_data), "data/gone"))
    assert main(["report", str(run)]) == 0
    assert "There are no pictures: data_dir: data/gone does not exist here" in (run / "report.html").read_text()
    assert main(["report", str(run), f"data_dir={tiny_data}"]) == 0
    assert (run / "report.html").read_text().count('class="photo"') == 2


# Runs that write it themselves


def test_the_report_is_rewritten_while_the_run_goes_on_and_reloads_itself(tiny_config, small_network, monkeypatch):
    """But for the last one: of a run that failed, and of that run finished."""
    monkeypatch.setattr(setup, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(setup, "MAX_REPORT_SHARE", math.inf)
    page, seen = Path(tiny_config["checkpoint_dir"]) / "run/report.html", []
    settings = {**tiny_config, "run_name": "run", "resume": "auto"}

    def look(row):
        text = page.read_text()
        assert '<span class="pill running">Running</span>' in text
        assert "data-reload-until=" in text
        assert f"{row['epoch']}/2 epochs done" in text
        seen.append(row["epoch"])
        if seen == [1]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(settings, on_epoch=look)
    assert '<span class="pill failed">Failed</span>' in page.read_text()
    assert "data-reload-until=" not in page.read_text()
    train(settings, on_epoch=look)
    assert seen == [1, 2]
    assert "data-reload-until=" not in page.read_text()
    assert '<span class="pill running">' not in page.read_text()


def test_an_interrupted_run_has_a_report_without_predicting(tiny_config, small_network, monkeypatch):
    monkeypatch.setattr(run_report, "make_gallery", lambda *_, **__: pytest.fail("predicted after an interruption"))
    with pytest.raises(KeyboardInterrupt):
        train({**tiny_config, "run_name": "run"}, on_epoch=stop_after(1))
    page = (Path(tiny_config["checkpoint_dir"]) / "run/report.html").read_text()
    assert '<span class="pill interrupted">Interrupted</span>' in page
    assert "data-reload-until=" not in page
    assert "go on where the state was saved" in page
    assert "Samples of epoch 1" in page


def test_a_report_that_cannot_be_written_is_one_warning(tiny_config, small_network, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("a bug\nin the report")

    monkeypatch.setattr(run_report, "render_report", fail)
    result = train(tiny_config)
    assert result.epochs == 2
    assert capsys.readouterr().out.count("Warning: report.html could not be written: ValueError: a bug\n") == 1


def test_a_signal_while_the_report_is_written_leaves_a_finished_run(tiny_config, small_network, monkeypatch, capsys):
    def interrupt(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(run_report, "render_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train({**tiny_config, "run_name": "run"})
    folder = Path(tiny_config["checkpoint_dir"]) / "run"
    run = read_run_summary(folder)
    assert [event.kind for event in run.events if event.kind in ENDS] == ["finished"]
    said = capsys.readouterr().out
    assert f"Next: python train_unet.py evaluate {folder} " in said
    end = f"the run is finished; python train_unet.py report {folder} makes its report\n"
    assert said.endswith(f"\nInterrupted by SIGINT; {end}")
    assert run.result["epochs"] == 2
