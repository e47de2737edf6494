"""`python train_unet.py doctor`: what it prints, the config that it writes, and what it finds out about a GPU."""

import json
import shutil
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from helpers.runs import words
from train_unet import main
from unet_trainer.commands import doctor
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.training.step_probe import StepProbe

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
    out = capsys.readouterr().out
    for label in ("Device", "Precision", "Cores", "Memory", "Disk", "Versions", "Data", "Time", "Step"):
        assert f"\n  {label + ':':<11} " in out
    assert ": 5000 epochs of " in out
    assert "500 ms, 8 images/s in the model\n" in out  # four images in half a second
    assert file.read_text().startswith(
        f"# python train_unet.py {file}\n# Written by doctor for {tiny_config['data_dir']}; edit"
    )
    assert load_config(file).num_epochs == 5000


def test_a_file_is_not_overwritten_and_is_checked_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 7\n")
    assert run("--write", file) == 2
    assert capsys.readouterr() == ("", f"Error: --write: {file} exists; name another file, or remove it\n")
    assert run("--write", tmp_path / "no/where") == 2
    assert capsys.readouterr() == ("", f"Error: --write: there is no folder {tmp_path / 'no'}\n")
    assert file.read_text() == "seed: 7\n"


def test_removed_options_are_answered_with_what_there_is(capsys):
    for option, answer in (
        ("--json", "need --help, --write, or a setting as key=VALUE"),
        ("--budget", "settings are given as time_budget=VALUE"),
    ):
        assert run(option, "2h") == 2
        assert f"{option}: unknown option; {answer}" in capsys.readouterr().err


def test_data_that_cannot_be_trained_on_has_the_message_of_training(tiny_config, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tiny_config["data_dir"], data)
    cv2.imwrite(str(min((data / "masks").iterdir())), np.zeros((10, 64), np.uint8))
    assert run(*words({**tiny_config, "data_dir": str(data)}), "--write", tmp_path / "mine.yaml") == 2
    assert "1 mask of another size than the image:" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("answer", [None, TOO_LARGE])
def test_a_step_that_cannot_be_taken_is_an_error(answer, tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: answer)
    assert run(*words(tiny_config)) == 2
    assert "Error: batch_size: a step of 4 could not be taken (" in capsys.readouterr().err


def test_a_step_that_cannot_be_compiled_is_timed_uncompiled(tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(StepProbe, "__call__", lambda probe, config: None if config.compile_model else COST)
    assert run(*words({**tiny_config, "compile_model": True})) == 0
    out = capsys.readouterr().out
    assert "Warning: compile_model: the step cannot be compiled here (" in out
    assert "500 ms, 8 images/s in the model\n" in out


def test_with_a_time_budget_the_number_of_epochs_stays_open(tiny_config, tmp_path, capsys):
    file, written = tmp_path / "mine.yaml", tmp_path / "new.yaml"
    del tiny_config["num_epochs"]
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in tiny_config.items()))
    assert run(file, "time_budget=2m", "--write", written) == 0
    config = load_config(written)
    assert (config.time_budget, config.num_epochs) == ("2m", "auto")
    assert "about 2 min: as many epochs as fit of " in capsys.readouterr().out


# A GPU that torch does not use


def fake_torch(cuda="13.0", is_available=lambda: False):
    def init():
        raise RuntimeError("unknown error")

    return SimpleNamespace(
        __version__="2.12.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=is_available, init=init),
    )


def broken_driver():
    raise OSError("CUDA error: unknown error")


@pytest.mark.parametrize(
    ("torch", "hidden", "answer"),
    [
        (fake_torch(cuda=None), "", "(unknown error); install one that is built with CUDA"),
        (fake_torch(), "", "cannot use the NVIDIA GPU of this machine (unknown error); check that nvidia-smi lists it"),
        (fake_torch(is_available=broken_driver), "", "(CUDA error: unknown error); check that nvidia-smi lists it"),
        (fake_torch(), "-1", "CUDA_VISIBLE_DEVICES='-1' hides the NVIDIA GPU; unset it"),
    ],
    ids=["built without CUDA", "old driver", "broken driver", "hidden"],
)
def test_a_gpu_that_torch_cannot_use_is_explained_with_what_to_do(torch, hidden, answer, monkeypatch):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert answer in doctor.unusable_gpu(torch)


def test_nothing_is_wrong_with_a_gpu_that_works_or_is_not_there(monkeypatch):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: False)
    assert doctor.unusable_gpu(fake_torch()) == doctor.unusable_gpu(fake_torch(is_available=lambda: True)) == ""


def test_an_nvidia_gpu_is_seen_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not doctor.has_nvidia_gpu(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0").mkdir(parents=True)
    for path, text in {"vendor": "0x10de\n", "class": "0x030200\n"}.items():
        (tmp_path / "sys/bus/pci/devices/0" / path).write_text(text)
    assert doctor.has_nvidia_gpu(tmp_path)
