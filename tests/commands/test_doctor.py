"""`python train_unet.py doctor`: its page, its files and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from helpers.runs import words
from helpers.steps import make_settings
from train_unet import main
from unet_trainer.commands import doctor, machine_facts
from unet_trainer.commands.doctor import forecast_findings, setting_lines, shown_value
from unet_trainer.commands.machine_facts import CompileFacts, DiskFacts, MachineFacts, NvidiaFacts, TorchFacts
from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.training import step_probe
from unet_trainer.training.forecast import Forecast, SampleCost

GIB = 2**30
MACHINE = MachineFacts(
    torch=TorchFacts("2.12.0", None, None, ()),
    nvidia=NvidiaFacts(is_in_machine=False, has_driver=False, driver=None, smi_failure="", visible_devices=None),
    cpu_name="Some CPU",
    compiling=CompileFacts(True, "/usr/bin/g++"),
    num_cores=2,
    machine_cores=2,
    load=0.0,
    free_memory=8 * GIB,
    total_memory=8 * GIB,
    machine_memory=8 * GIB,
    shm=None,
    disk=DiskFacts(Path("checkpoints"), 100 * GIB, 500e6),
    python="3.12.1",
    versions={"torch": "2.12.0"},
)
COST = StepCost(seconds=0.5, eval_seconds=0.01, memory=0)


class FakeProbe:
    """In place of trials in a child process."""

    cost, failure, known, asked, seconds_left = COST, "", True, [], 100.0

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        pass

    def __call__(self, config):
        FakeProbe.asked.append(config)
        return self.cost

    def knows(self, config):
        return self.known


@pytest.fixture
def machine(monkeypatch):
    """A machine without a GPU, and a step of half a second."""
    tried = []
    monkeypatch.setattr(machine_facts, "inspect_machine", lambda folder, compiles_on, say: tried.append(compiles_on) or MACHINE)
    monkeypatch.setattr(step_probe, "StepProbe", FakeProbe)
    monkeypatch.setattr(FakeProbe, "asked", [])
    return tried


def run(*arguments):
    return main(["doctor", *map(str, arguments)])


def test_the_page_of_a_tiny_dataset_and_the_config_that_it_writes(tiny_config, tmp_path, capsys):
    """All of it is real: the machine, the data, the trial of the step."""
    small = words({**tiny_config, "num_epochs": 5000, "cache": "ram"})
    file = tmp_path / "mine.yaml"
    assert run(*small, "--fast", "--write", file, "--json", tmp_path / "all.json") == 0
    out = capsys.readouterr().out
    for heading in ("Machine", f"Data: {tiny_config['data_dir']}", "Time and memory", "Your settings", "As you set them"):
        assert f"\n{heading}\n" in out
    assert "✓ Pairs       10 to train, 2 to validate (images/ + masks/, same names; val_fraction 0.2, seed 42)" in out
    assert "✗" not in out
    assert "✓ Settings    nothing in them is wasteful or risky here\n" in out
    assert f"Written: {file}. It runs as it is: python train_unet.py {file}\n" in out
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["ok"]
    assert {"machine", "findings", "measurements", "settings", "config", "forecast"} <= content.keys()
    assert content["config"]["num_epochs"] == 5000
    assert content["forecast"]["seconds"] == pytest.approx(5000 * content["forecast"]["seconds_per_epoch"], rel=0.1)
    assert run(*small, "--fast", "--write", file) == 2  # it may have been edited since
    lines = file.read_text().splitlines()
    assert lines[:2] == [
        f"# python train_unet.py {file}",
        f"# Written by doctor for {tiny_config['data_dir']}; edit it as you like.",
    ]
    assert main([str(file), "num_epochs=1"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
    assert [note.split()[1] for note in notes] == ["num_epochs:"]  # the one that is bad


def test_a_file_that_is_not_doctors_is_not_overwritten(machine, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 7\n")
    assert run("--write", file) == 2
    assert capsys.readouterr().err == f"Error: --write: {file} exists; name another file, or remove it\n"
    assert file.read_text() == "seed: 7\n"
    assert run("--write", tmp_path) == 2
    assert machine == []  # answered before anything is measured


def test_a_pipe_or_a_link_is_no_file_that_could_be_lost(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "new.yaml")
    for name in ("pipe", "link"):
        doctor.check_may_write(tmp_path / name)
    (tmp_path / "new.yaml").touch()
    with pytest.raises(UserError, match=r"--write: .*link exists; name another file"):
        doctor.check_may_write(tmp_path / "link")


def test_a_file_that_cannot_be_written_is_one_message(machine, tiny_config, tmp_path, capsys):
    assert run(*words(tiny_config), "--write", tmp_path / "no/where") == 2
    assert capsys.readouterr().err == f"Error: --write: there is no folder {tmp_path / 'no'}\n"
    assert machine == []  # answered before anything is measured
    assert run(*words(tiny_config), "--json", tmp_path / "no/where") == 2
    assert capsys.readouterr().err == f"Error: --json: there is no folder {tmp_path / 'no'}\n"
    assert machine == []


def test_without_data_there_is_the_machine_alone(machine, tmp_path, capsys):
    assert run(f"data_dir={tmp_path / 'nowhere'}", "--fast") == 2
    out = capsys.readouterr().out
    assert "✓ GPU         none: training runs on the CPU (Some CPU, 2 cores)" in out
    assert f"✗ data_dir {tmp_path / 'nowhere'} does not exist, so that nothing" in " ".join(out.split())
    assert out.endswith("Not ready: 1 problem (✗) to solve first.\n")
    assert run(f"data_dir={tmp_path / 'nowhere'}", "--write", tmp_path / "a.yaml") == 2
    assert not (tmp_path / "a.yaml").exists()
    for setting in ("compile_model=true", "compile_model=false", "device=cpu"):
        run(f"data_dir={tmp_path / 'nowhere'}", setting)
    assert machine == [(), ("cuda",), ("cuda", "cpu"), (), ()]  # what a run would not compile is not tried, nor with --fast
    assert "minute" not in capsys.readouterr().out


def test_a_problem_of_the_machine_is_exit_code_2(machine, tmp_path, monkeypatch, capsys):
    full = dataclasses.replace(MACHINE, disk=DiskFacts(Path("runs"), GIB, None, "Permission denied"))
    monkeypatch.setattr(machine_facts, "inspect_machine", lambda *_: full)
    assert run(f"data_dir={tmp_path / 'nowhere'}", "--json", tmp_path / "a.json") == 2
    assert "✗ Disk        runs cannot be written to (Permission denied)" in capsys.readouterr().out
    assert not json.loads((tmp_path / "a.json").read_text())["ok"]


def test_data_that_cannot_be_trained_on_is_a_problem_with_the_message_of_check(machine, tiny_config, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tiny_config["data_dir"], data)
    first = sorted((data / "masks").iterdir())[0]
    cv2.imwrite(str(first), np.zeros((10, 64), np.uint8))
    assert run(*words({**tiny_config, "data_dir": str(data)})) == 2
    out = capsys.readouterr().out
    assert "✗ Files       1 mask of another size than its image:" in out
    assert "→ an image and its mask must have the same size" in out
    assert f"All of it: python train_unet.py check data_dir={data}" in out
    assert out.endswith("Not ready: 1 problem (✗) to solve first.\n")
    assert "Settings that a run would take" not in out
    (tmp_path / "empty").mkdir()
    assert run(*words({**tiny_config, "data_dir": str(tmp_path / "empty")})) == 2
    assert "✗ " in capsys.readouterr().out


def test_what_would_end_a_run_is_a_line_of_the_page(machine, tiny_config, capsys):
    assert run(*words({**tiny_config, "device": "cuda:77"})) == 2
    out = capsys.readouterr().out
    assert "✗ device      cuda:77 " in out
    assert run(*words({**tiny_config, "batch_size": 64})) == 2
    assert "✗ batch_size  64 is more than the 10 training images; need at most 10" in capsys.readouterr().out


def test_notices_and_absent_classes_are_warnings(machine, tiny_config, capsys):
    values = {**tiny_config, "num_classes": 3, "mask_values": [0, 255, 7], "num_epochs": 5000, "cache": "ram"}
    assert run(*words(values)) == 0
    out = capsys.readouterr().out
    assert "⚠ Classes     no pixel of class 2 in any mask" in out
    assert out.endswith("Ready to train, 1 warning.\n")


def test_the_config_is_reviewed(machine, tiny_config, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in {**tiny_config, "num_workers": 50}.items()))
    assert run(file) == 0
    assert "⚠ num_workers  50 processes share " in capsys.readouterr().out


def test_a_step_that_cannot_be_taken_is_a_problem(machine, tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(FakeProbe, "cost", None)
    monkeypatch.setattr(FakeProbe, "failure", "OutOfMemoryError: no")
    assert run(*words(tiny_config)) == 2
    out = capsys.readouterr().out
    assert "✗ batch_size  a step of 4 could not be taken (OutOfMemoryError: no)" in out
    assert "Time and memory" not in out


@pytest.mark.parametrize("answer", [None, TOO_LARGE])
def test_a_step_that_memory_does_not_hold_has_no_forecast(machine, tiny_config, monkeypatch, capsys, answer):
    monkeypatch.setattr(FakeProbe, "cost", answer)
    monkeypatch.setattr(FakeProbe, "failure", "OutOfMemoryError: no")
    assert run(*words(tiny_config)) == 2
    assert "Time and memory" not in capsys.readouterr().out


def test_where_the_step_cannot_be_compiled_the_forecast_is_that_of_the_uncompiled_one(machine, tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(FakeProbe, "__call__", lambda self, config: None if config.compile_model else COST)
    monkeypatch.setattr(FakeProbe, "failure", "RuntimeError: no compiler")
    assert run(*words({**tiny_config, "compile_model": True})) == 0
    out = capsys.readouterr().out
    assert "Time and memory" in out
    assert "⚠ compile_model  the step cannot be compiled here (RuntimeError: no compiler)" in out
    assert "batch_size  a step" not in out


def test_a_budget_decides_the_number_of_epochs_whatever_the_file_says(machine, tiny_config, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in tiny_config.items()))
    written = tmp_path / "new.yaml"
    assert run(file, "--budget", "2m", "--write", written) == 0
    config = load_config(written)
    assert (config.time_budget, config.num_epochs) == ("2m", "auto")
    assert "✓ Time        about 2 min" in capsys.readouterr().out
    assert run(file, "--budget", "2m", "num_epochs=3") == 2
    assert "time_budget: 2m decides the number of epochs" in capsys.readouterr().err
    assert run("--budget", "soon") == 2
    assert "time_budget: got 'soon'" in capsys.readouterr().err


@pytest.mark.parametrize(("is_fast", "seconds"), [(False, 0.5), (True, 0.25)])
def test_the_step_is_tried_as_it_will_be_taken_unless_that_takes_too_long(machine, is_fast, seconds):
    taken = dataclasses.replace(make_settings().taken, compile_model=True)
    trial = doctor._try_step(FakeProbe(), taken, is_fast)
    assert [config.compile_model for config in FakeProbe.asked] == [not is_fast]
    assert trial.cost.seconds == pytest.approx(seconds)  # half of it
    assert (trial.is_estimate, trial.compile_seconds) == (is_fast, 80.0)
    assert not doctor._try_step(FakeProbe(), make_settings().taken, is_fast).is_estimate


def test_time_and_memory_of_a_run_on_a_gpu():
    gpu = HardwareFacts("cuda", "NVIDIA A100", True, True, 8, free_memory=40 * GIB)
    settings = make_settings(batch_size=4, num_workers=2, early_stopping_patience=5, num_epochs=10)
    found = Forecast(seconds=7200.0, seconds_per_epoch=3.25, num_epochs=10, memory=6 * GIB)
    fast, slow = SampleCost(0.01, 0.01, 0.0), SampleCost(0.4, 0.1, 0.0)
    time, memory = forecast_findings(found, settings, gpu, COST, fast, is_estimate=True)
    assert time.detail == (
        "about 2.0 h: 10 epochs of 3.2 s, 8.0 images/s in the model; an estimate from the uncompiled step (--fast); "
        "early stopping may end it sooner"
    )
    assert memory.detail == "6.0 GiB of the 40.0 GiB that are free on the GPU"
    loading = forecast_findings(found, settings, gpu, COST, slow, is_estimate=False)[-1]
    assert (loading.level, loading.detail, loading.fix) == (
        "warning",
        "the GPU would wait: reading 400 ms and augmenting 100 ms an image, 2 workers",
        "more cores, or cache: ram",
    )


def test_a_budget_that_is_too_short_for_an_epoch_is_a_warning():
    cpu = HardwareFacts("cpu", "a CPU", True, False, 2)
    settings = make_settings()
    settings.asked = dataclasses.replace(settings.asked, time_budget="1m")
    settings.taken = dataclasses.replace(settings.taken, time_budget="1m")
    sample = SampleCost(0.0, 0.0, 0.0)
    for seconds, level in ((71.0, "ok"), (73.0, "warning")):
        (finding,) = forecast_findings(Forecast(seconds, seconds, 1, 0), settings, cpu, COST, sample, is_estimate=False)
        assert finding.level == level
    assert finding.detail.endswith("; more than time_budget: 1m, since a run starts up and validates once at least")


def test_settings_have_two_columns_and_long_values_their_own_line():
    rows = [
        ("fit", "crop", "small structures"),
        (
            "augmentation",
            shown_value("augmentation", "[{HorizontalFlip: {p: 0.5}}, VerticalFlip, {Affine: {rotate: [-5, 5]}}]"),
            "found",
        ),
        ("batch_size", "16", "measured"),
    ]
    assert setting_lines(rows, "found") == [
        "    fit: crop       small structures",
        "    augmentation: HorizontalFlip, VerticalFlip, Affine",
        "                    by the symmetry of the data, see above",
        "    batch_size: 16  measured",
    ]
    assert shown_value("augmentation", "default") == "default"
