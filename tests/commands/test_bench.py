"""The bench: rows that suit the hardware, each a run in its own process, and a table of their results."""

import io
import json
import os
import re
import signal
import threading

import cv2
import pytest

from helpers.killed_runs import is_running, wait_until
from helpers.project import ROOT, TINY_MODEL
from helpers.runs import words
from train_unet import main
from unet_trainer.commands import bench as module
from unet_trainer.commands.bench import bench, choose_trials, table_lines
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.training.step import TrainStep

# Stands in for train_unet.py: leaves what a run of two epochs leaves. `plan` says by the run's name what it does otherwise.
STUB = """
import json, sys; from pathlib import Path; import yaml
settings = yaml.safe_load(Path(sys.argv[1]).read_text())
plan = json.loads(Path(__file__).with_name("plan.json").read_text()).get(settings["run_name"], {})
for line in plan.get("lines", []): print(line)
if "code" in plan: sys.exit(plan["code"])
folder = Path(settings["checkpoint_dir"]) / settings["run_name"]
folder.mkdir()
number_format = settings["amp_dtype"] if settings["use_amp"] else "float32"
result = {"number_format": number_format, "is_compiled": settings["compile_model"], **plan.get("result", {})}
(folder / "result.json").write_text(json.dumps(result))
(folder / "config.yaml").write_text(yaml.safe_dump({**settings, **plan.get("config", {})}))
columns = "epoch,seconds,images_per_second,peak_memory_gib,peak_reserved_gib,data_wait,val_iou"
for epoch in (1, 2): print(f"Epoch {epoch}/2  train loss ...", flush=True)
(folder / "metrics.csv").write_text(f"{columns}\\n1,9.0,2.0,1.5,2.0,0.5,0.4\\n2,3.0,{plan.get('rate', 8.0)},1.0,2.5,0.1,0.5\\n")
"""
FIGURES = (
    "seconds_per_epoch", "images_per_second", "allocated_gib", "reserved_gib", "data_wait", "val_iou", "seconds_in_all",
)  # fmt: skip
SLEEP = """
import os, sys, time; from pathlib import Path
Path(sys.argv[1]).with_suffix(".pid").write_text(str(os.getpid())); time.sleep(60)
"""


@pytest.fixture
def stub(tmp_path):
    """The script of the rows, with a plan for some of them."""

    def write(**plan):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        (tmp_path / "stub.py").write_text(STUB)
        return tmp_path / "stub.py"

    return write


def row(name, rate, iou, failure=""):
    figures = {} if failure else dict(zip(FIGURES, (2.0, rate, 1.5, 2.5, 0.1, iou, 10.0), strict=True))
    return {"trial": name, **figures, "failure": failure, "settings": {}}


@pytest.mark.parametrize(
    ("on_gpu", "has_bfloat16", "quick", "others"),
    [
        (True, True, False, ["AMP", "AMP + large batch", "AMP + compiled", "AMP float16 + compiled"]),
        (True, False, False, ["AMP", "AMP + large batch", "AMP + compiled"]),
        (True, True, True, ["AMP", "AMP + compiled"]),
        (False, True, False, ["float32 + compiled", "AMP"]),
        (False, False, False, ["float32 + compiled"]),
    ],
)
def test_rows_follow_the_hardware(on_gpu, has_bfloat16, quick, others):
    assert list(choose_trials(8, on_gpu, has_bfloat16, quick)) == ["Baseline (float32)", *others]


def test_the_table_has_a_row_per_trial_and_the_reason_of_an_empty_one():
    lines = table_lines([row("a", 100, 0.8), row("b", 250, 0.81), row("c", 0, 0, "out of memory")])
    assert lines[0].split() == [
        "s/epoch",
        "images/s",
        "speed-up",
        "memory",
        "GiB",
        "reserved",
        "data",
        "wait",
        "val",
        "IoU",
    ]
    assert lines[1].split() == ["a", "2.00", "100", "1.00×", "1.50", "2.50", "10%", "0.8000"]
    assert lines[2].split() == ["b", "2.00", "250", "2.50×", "1.50", "2.50", "10%", "0.8100"]
    assert lines[3].split() == ["c"] + ["–"] * 7
    assert lines[4] == "c: out of memory"
    assert len({len(line) for line in lines[:4]}) == 1


def test_each_row_is_a_run_of_the_script(tiny_config, tmp_path, capsys):
    config = load_config({**tiny_config, "warmup_epochs": 1, "early_stopping_patience": 1})
    (found,) = bench(config, {"plain": {"use_amp": False}}, ROOT / "train_unet.py", True, Console())
    folder = tmp_path / "checkpoints" / "bench"
    assert (found["failure"], found["images_per_second"] > 0) == ("", True)
    assert "Fastest at the same IoU: plain. Its lines for your config:\n  use_amp: false\n" in capsys.readouterr().out
    report = json.loads((folder / "bench.json").read_text())
    assert report["winner"] == "plain"
    assert report["rows"] == [found]
    assert cv2.imread(str(folder / "bench.png")).shape[1] == 720
    assert len((folder / "plain" / "metrics.csv").read_text().splitlines()) == 3  # a header and two epochs
    assert "Epoch 2/2" in (folder / "plain.log").read_text()


def test_data_that_are_not_there_are_told_before_a_row_is_tried(tmp_path, capsys):
    assert main(["bench", "--quick", f"data_dir={tmp_path / 'none'}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 2
    assert f"Error: data_dir: {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_figures_are_those_of_the_epochs_after_the_first_and_a_failure_does_not_end_the_others(
    tiny_config, stub, tmp_path, capsys
):
    error = "batch_size: 4000 is more than the 10 training images; need at most 10"
    script = stub(too_large={"lines": ["Device: cpu", f"Error: {error}", "bye"], "code": 2})
    trials = {"too large": {"batch_size": 4000}, "plain": {"use_amp": False}}
    rows = bench(load_config(tiny_config), trials, script, True, Console())
    figures = dict(zip(FIGURES, (3.0, 8.0, 1.5, 2.5, 0.1, 0.5, 12.0), strict=True))
    assert rows == [
        {"trial": "too large", "failure": error, "settings": trials["too large"]},
        {"trial": "plain", **figures, "failure": "", "settings": trials["plain"]},
    ]
    assert json.loads((tmp_path / "checkpoints/bench/bench.json").read_text())["rows"] == rows
    assert f"too large: {error}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"result": {"is_compiled": False}}, "it did not run with the compile_model of its row"),
        (
            {
                "result": {"is_compiled": False},
                "lines": ["Warning: another matter", "Warning: compile_model: it failed (why)"],
            },
            "compile_model: it failed (why)",
        ),
        ({"config": {"batch_size": 2, "batch_parts": 2}}, "it did not run with the batch_size, batch_parts of its row"),
    ],
)
def test_a_row_that_did_not_run_as_asked_has_no_figures(change, failure, tiny_config, stub, capsys):
    trials = {"baseline": {}, "fast": {"use_amp": True, "amp_dtype": "bfloat16", "compile_model": True}}
    rows = bench(load_config(tiny_config), trials, stub(fast={"rate": 99.0, **change}), True, Console())
    assert [(found["failure"], found.get("images_per_second")) for found in rows] == [("", 8.0), (failure, None)]
    assert "Fastest at the same IoU: baseline." in capsys.readouterr().out


def test_a_bench_that_is_interrupted_ends_its_run(tiny_config, tmp_path):
    (tmp_path / "sleep.py").write_text(SLEEP)
    pid_file = tmp_path / "checkpoints/bench/plain.pid"

    def interrupt():
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted), Signals():
        bench(load_config(tiny_config), {"plain": {}}, tmp_path / "sleep.py", True, Console())
    assert not is_running(int(pid_file.read_text()))


def test_whole_steps_of_the_config_are_timed_without_its_data(monkeypatch):
    monkeypatch.setattr(module, "ROUND_SECONDS", 0)
    console = Console(io.StringIO())
    settings = {
        "device": "cpu",
        "image_size": [32, 64],
        "batch_size": 3,
        "class_weights": "auto",
        "data_dir": "no/such/folder",
    }
    components, batch = module.build_step(load_config({**TINY_MODEL, **settings}), console)
    assert batch.images.shape == (3, 32, 64, 3)
    before = components.state.segmenter.state_dict()["network.segmentation_head.0.bias"].clone()
    module.time_step(components, batch, console)
    assert not before.equal(components.state.segmenter.state_dict()["network.segmentation_head.0.bias"])
    assert re.search(
        r"The step alone: \d+ images/s at batch 3 \(.* ms; \d+ to \d+ in 5 rounds\)\n$", console.stream.getvalue()
    )


def test_out_of_memory_is_one_message_and_quick_does_not_go_with_step(monkeypatch, capsys):
    def fail(self, *arguments, **options):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(TrainStep, "__call__", fail)
    assert main(["bench", "--step", *words({**TINY_MODEL, "device": "cpu", "image_size": 32})]) == 3
    assert "out of memory (cannot allocate). Try a smaller batch_size" in capsys.readouterr().err
    assert main(["bench", "--step", "--quick"]) == 2
    assert "not allowed with" in capsys.readouterr().err
