"""`python train_unet.py doctor`: what it prints, the config that it writes, and what it finds out about a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.runs import words
from train_unet import main
from unet_trainer.commands import doctor
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.training.trials import StepProbe

COST = StepCost(seconds=0.5, eval_seconds=0.01, memory=0)


@pytest.fixture(autouse=True)
def _step_of_half_a_second(monkeypatch):
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: COST)


def run(*arguments):
    return main(["doctor", *map(str, arguments)])


def test_the_page_of_a_tiny_dataset_and_the_config_that_it_writes(tiny_config, tmp_path, capsys):
    """The machine and the data are real; the trial of the step has tests of its own."""
    file = tmp_path / "mine.yaml"
    assert run(*words({**tiny_config, "num_epochs": 5000}), "--write", file) == 0
    out = f"\n{capsys.readouterr().out}"
    for label in ("Device", "Precision", "Cores", "Memory", "Disk", "Versions", "Data", "Time", "Step"):
        assert f"\n  {label + ':':<11} " in out
    assert ": 5000 epochs of " in out
    assert "500 ms, 8 images/s in the model\n" in out  # four images in half a second
    assert file.read_text().startswith(
        f"# python train_unet.py {file}\n# Written by doctor for {tiny_config['data_dir']}; edit"
    )
    assert load_config(file).num_epochs == 5000


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--write", "mine.yaml"], "--write: {here}/mine.yaml exists; name another file, or remove it"),
        (["--write", "no/where"], "--write: there is no folder {here}/no"),
        (["--json", "2h"], "doctor --json was removed: doctor prints plain lines; --write FILE writes its config, "),
        (["--budget", "2h"], "--budget: unknown option; settings are given as time_budget=VALUE"),
    ],
)
def test_a_wrong_option_is_answered_before_anything_is_measured(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("seed: 7\n")
    assert run(*words) == 2
    out, said = capsys.readouterr()
    assert (out, said.startswith(f"Error: {error.format(here=tmp_path)}"), said.count("\n")) == ("", True, 1)
    assert Path("mine.yaml").read_text() == "seed: 7\n"


def test_a_step_that_cannot_be_compiled_is_timed_uncompiled_and_one_that_cannot_be_taken_is_an_error(
    tiny_config, monkeypatch, capsys
):
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: None if config.compile_model else COST)
    assert run(*words({**tiny_config, "compile_model": True})) == 0
    out = capsys.readouterr().out
    assert "Warning: compile_model: the step cannot be compiled here (" in out
    assert "500 ms, 8 images/s in the model\n" in out
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: TOO_LARGE)
    assert run(*words(tiny_config)) == 2
    assert "Error: batch_size: a step of 4 could not be taken (" in capsys.readouterr().err


def test_with_a_time_budget_the_number_of_epochs_stays_open(tiny_config, tmp_path, capsys):
    file, written = tmp_path / "mine.yaml", tmp_path / "new.yaml"
    del tiny_config["num_epochs"]
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in tiny_config.items()))
    assert run(file, "time_budget=2m", "--write", written) == 0
    config = load_config(written)
    assert (config.time_budget, config.num_epochs) == ("2m", "auto")
    assert "about 2 min: as many epochs as fit of " in capsys.readouterr().out


# A GPU that torch does not use


def fake_torch(cuda="13.0", is_available=False):
    def init():
        raise RuntimeError("unknown error")

    gpu = SimpleNamespace(is_available=lambda: is_available, init=init)
    return SimpleNamespace(__version__="2.12.0", version=SimpleNamespace(cuda=cuda), cuda=gpu)


@pytest.mark.parametrize(
    ("cuda", "hidden", "answer"),
    [
        (None, "", "(unknown error); install one that is built with CUDA"),
        ("13.0", "", "cannot use the NVIDIA GPU of this machine (unknown error); check that nvidia-smi lists it"),
        ("13.0", "-1", "CUDA_VISIBLE_DEVICES='-1' hides the NVIDIA GPU; unset it"),
    ],
    ids=["built without CUDA", "old driver", "hidden"],
)
def test_a_gpu_that_torch_cannot_use_is_explained_with_what_to_do(cuda, hidden, answer, monkeypatch):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert answer in doctor.unusable_gpu(fake_torch(cuda))
    assert doctor.unusable_gpu(fake_torch(is_available=True)) == ""


def test_an_nvidia_gpu_is_seen_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not doctor.has_nvidia_gpu(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0").mkdir(parents=True)
    for path, text in {"vendor": "0x10de\n", "class": "0x030200\n"}.items():
        (tmp_path / "sys/bus/pci/devices/0" / path).write_text(text)
    assert doctor.has_nvidia_gpu(tmp_path)
