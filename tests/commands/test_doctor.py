"""`python train_unet.py doctor`: its page, its files and its exit codes; and what it finds out about a doctor."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from helpers.runs import words
from helpers.steps import make_settings
from train_unet import main
from unet_trainer.commands import doctor
from unet_trainer.commands.doctor import Page, forecast_findings
from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console, Finding
from unet_trainer.training import settings, step_probe
from unet_trainer.training.time_budget import Forecast, SampleCost

GIB = 2**30
COST = StepCost(seconds=0.5, eval_seconds=0.01, memory=0)


class FakeProbe:
    """In place of trials in a child process."""

    cost, failure, known, asked, seconds_left = COST, "", True, [], 100.0

    def __init__(self, *arguments):
        pass

    def close(self):
        pass

    def __call__(self, config):
        FakeProbe.asked.append(config)
        return self.cost

    def knows(self, config):
        return self.known


@pytest.fixture
def tried(monkeypatch):
    """A machine without a GPU, and a step of half a second; the folders that were looked at."""
    tried = []
    cpu = [Finding("ok", "GPU", "none")]
    monkeypatch.setattr(doctor, "machine_findings", lambda folder, wants_gpu: tried.append(folder) or cpu)
    monkeypatch.setattr(settings, "StepProbe", FakeProbe)
    monkeypatch.setattr(FakeProbe, "asked", [])
    return tried


def run(*arguments):
    return main(["doctor", *map(str, arguments)])


def test_the_page_of_a_tiny_dataset_and_the_config_that_it_writes(tiny_config, tmp_path, capsys, monkeypatch):
    """The machine and the data are real; the trial of the step has tests of its own."""
    monkeypatch.setattr(step_probe.StepProbe, "__call__", lambda probe, config: COST)
    small = words({**tiny_config, "num_epochs": 5000, "cache": "ram"})
    file = tmp_path / "mine.yaml"
    assert run(*small, "--fast", "--write", file, "--json", tmp_path / "all.json") == 0
    out = capsys.readouterr().out
    for heading in ("Machine", f"Data: {tiny_config['data_dir']}", "Time and memory", "Your settings"):
        assert f"\n{heading}\n" in out
    for title in ("GPU", "Cores", "Memory", "Disk", "Versions", "Time"):
        assert f" {title:<11} " in out
    assert "Data:       " in out
    assert "✗" not in out
    assert "✓ Settings    nothing in them is wasteful or risky here\n" in out
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["ok"]
    assert {"machine", "findings", "settings", "config", "forecast"} <= content.keys()
    assert content["forecast"]["seconds"] == pytest.approx(5000 * content["forecast"]["seconds_per_epoch"], rel=0.1)
    assert file.read_text().startswith(
        f"# python train_unet.py {file}\n# Written by doctor for {tiny_config['data_dir']}; edit"
    )
    assert load_config(file).num_epochs == 5000


def test_a_file_is_not_overwritten_and_is_checked_before_anything_is_measured(tried, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 7\n")
    assert run("--write", file) == 2
    assert capsys.readouterr().err == f"Error: --write: {file} exists; name another file, or remove it\n"
    for option in ("--write", "--json"):
        assert run(option, tmp_path / "no/where") == 2
        assert capsys.readouterr().err == f"Error: {option}: there is no folder {tmp_path / 'no'}\n"
    assert (tried, file.read_text()) == ([], "seed: 7\n")


def test_data_that_cannot_be_trained_on_is_a_problem_with_the_message_of_check(tried, tiny_config, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tiny_config["data_dir"], data)
    cv2.imwrite(str(min((data / "masks").iterdir())), np.zeros((10, 64), np.uint8))
    assert run(*words({**tiny_config, "data_dir": str(data)})) == 2
    out = capsys.readouterr().out
    assert "✗ data        1 mask of another size than the image:" in out
    assert "Your settings" not in out


def test_absent_classes_are_warnings_and_the_config_is_reviewed(tried, tiny_config, capsys):
    values = {
        **tiny_config,
        "num_classes": 3,
        "mask_values": [0, 255, 7],
        "num_epochs": 5000,
        "cache": "ram",
        "num_workers": 50,
    }
    assert run(*words(values)) == 0
    out = capsys.readouterr().out
    assert "Warning: no pixel of class 2 in any mask" in out
    assert "⚠ num_workers  50: more processes than cores" in out
    assert "Ready to train, 2 warnings.\n" in out
    page = Page(Console())
    page.console.note("no trouble")
    assert page.levels() == ["ok"]  # and not counted


@pytest.mark.parametrize("answer", [None, TOO_LARGE])
def test_a_step_that_cannot_be_taken_is_a_problem_and_has_no_forecast(answer, tried, tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(FakeProbe, "cost", answer)
    monkeypatch.setattr(FakeProbe, "failure", "OutOfMemoryError: no")
    assert run(*words(tiny_config)) == 2
    out = capsys.readouterr().out
    assert "✗ batch_size  a step of 4 could not be taken (OutOfMemoryError: no)" in out
    assert "Time and memory" not in out


def test_a_budget_decides_the_number_of_epochs_whatever_the_file_says(tried, tiny_config, tmp_path, capsys):
    file, written = tmp_path / "mine.yaml", tmp_path / "new.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in tiny_config.items()))
    assert run(file, "--budget", "2m", "--write", written) == 0
    config = load_config(written)
    assert (config.time_budget, config.num_epochs) == ("2m", "auto")
    out = " ".join(capsys.readouterr().out.split())
    assert "✓ Time about 2 min, with as many epochs of " in out
    assert len(set(re.findall(r"(\d+) epochs|num_epochs: (\d+)", out))) == 1
    assert run("--budget", "soon") == 2
    assert "time_budget: got 'soon'" in capsys.readouterr().err


def test_time_and_memory_of_a_run_on_a_gpu():
    gpu = HardwareFacts("cuda", "NVIDIA A100", True, True, 8, free_memory=40 * GIB)
    settings = make_settings(batch_size=4, num_workers=2, early_stopping_patience=5, num_epochs=10)
    found = Forecast(seconds=7200.0, seconds_per_epoch=3.25, pilot_seconds=90.0, num_epochs=10, memory=6 * GIB)
    time, memory, loading = forecast_findings(found, settings, gpu, COST, SampleCost(0.4, 0.1, 0.0), is_estimate=True)
    assert time.detail.startswith(
        "about 2.0 h: 10 epochs of 3.2 s, 8.0 images/s in the model; up to 90 s of it try learning rates; an estimate"
    )
    assert memory.detail == "6.0 GiB of the 40.0 GiB that are free on the GPU"
    assert loading.detail == "the GPU would wait: reading 400 ms and augmenting 100 ms an image, 2 workers"
    settings.asked = dataclasses.replace(settings.asked, num_epochs="auto")
    settings.taken = dataclasses.replace(settings.taken, device="cuda")
    time, *_ = forecast_findings(found, settings, gpu, COST, SampleCost(0.4, 0.1, 0.0), is_estimate=True)
    assert "try learning rates; a lower one gets twice the epochs; an estimate" in time.detail
    settings.asked = dataclasses.replace(settings.asked, time_budget="1h")
    (late, *_) = forecast_findings(found, settings, gpu, COST, SampleCost(0.0, 0.0, 0.0), is_estimate=False)
    assert (late.level, "more than time_budget" in late.detail) == ("warning", True)


# The machine


def raises(message, kind=RuntimeError):
    def call(*arguments, **named):
        raise kind(message)

    return call


def fake_torch(cuda="13.0", hip=None, has_mps=False, **calls):
    """A torch with one A100; `calls` replace functions of torch.cuda, and `ones`."""
    working = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda index: (8, 0),
        "get_device_name": lambda index: "NVIDIA A100",
        "mem_get_info": lambda index: (39 * GIB, 40 * GIB),
        "init": lambda: None,
    }
    ones = calls.pop("ones", lambda size, device: SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 8.0)))
    return SimpleNamespace(
        __version__="2.12.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(**{**working, **calls}),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: has_mps)),
        ones=ones,
    )


def details(torch):
    return {finding.title: finding.detail for finding in doctor.device_findings(torch, "problem")}


def test_gpus_and_who_else_uses_them():
    gpu = "NVIDIA A100, compute capability 8.0; 40.0 GiB, 39.0 GiB free; torch 2.12.0 for CUDA 13.0"
    assert details(fake_torch()) == {"GPU": gpu}
    assert details(fake_torch(cuda=None, hip="7.1"))["GPU"].endswith("torch 2.12.0 for ROCm 7.1")
    assert "about 9.3 GiB" in details(fake_torch(mem_get_info=lambda index: (30 * GIB, 40 * GIB)))["GPU in use"]
    assert details(fake_torch(is_available=lambda: False, has_mps=True)) == {"GPU": "Apple GPU (mps), torch 2.12.0"}


@pytest.mark.parametrize("broken", ["is_available", "ones"])
def test_a_call_of_torch_that_raises_is_a_finding_and_not_a_crash(broken, monkeypatch):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    (found,) = doctor.device_findings(fake_torch(**{broken: raises("CUDA error: unknown")}), "problem")
    assert (found.level, found.title) == ("problem", "GPU")
    assert "CUDA error: unknown" in found.detail
    assert found.fix


@pytest.mark.parametrize(
    ("cuda", "seen", "hidden", "level", "detail", "fix"),
    [
        (None, True, "", "problem", "torch 2.12.0 is built without CUDA", "install a torch with CUDA"),
        ("13.0", True, "", "problem", "(CUDA 13.0) cannot use it (unknown error)", "restart, or install the driver"),
        ("13.0", True, "-1", "warning", "hidden by CUDA_VISIBLE_DEVICES='-1'", "unset CUDA_VISIBLE_DEVICES"),
        ("13.0", False, "", "ok", "none: training runs on the CPU", ""),
    ],
)
def test_a_gpu_that_torch_does_not_find_is_explained_with_what_to_do(
    cuda, seen, hidden, level, detail, fix, monkeypatch
):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor.no_gpu_finding("torch 2.12.0", cuda, "unknown error", "problem")
    assert found.level == level
    assert detail in found.detail
    assert fix in found.fix


def test_an_nvidia_gpu_is_seen_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not doctor.has_nvidia_gpu(tmp_path)
    for path, text in {"vendor": "0x10de\n", "class": "0x030200\n"}.items():
        (tmp_path / "sys/bus/pci/devices/0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/bus/pci/devices/0" / path).write_text(text)
    assert doctor.has_nvidia_gpu(tmp_path)


def test_the_disk_is_tried_and_nothing_is_left(tmp_path, monkeypatch):
    found = doctor.disk_finding(tmp_path / "a" / "b")
    assert found.detail.startswith(f"{tmp_path / 'a' / 'b'}: ")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert doctor.disk_finding(tmp_path / "file").level == "problem"
    for free, level in ((GIB // 4, "problem"), (GIB, "warning")):
        monkeypatch.setattr(doctor, "free_disk", lambda folder, free=free: free)
        assert doctor.disk_finding(tmp_path).level == level
