"""The bench: rows that suit the hardware, each a run of its own, and a table that says what came of them."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest

from helpers.killed_runs import words
from helpers.project import ROOT
from train_unet import main
from unet_trainer.commands import bench as bench_room
from unet_trainer.commands.bench import Outcome, Trial, bench, choose_trials, choose_winner, table_lines
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console

SCRIPT = ROOT / "train_unet.py"


def names(*arguments):
    return [trial.name for trial in choose_trials(*arguments)]


def outcome(name, rate, iou, **changes):
    return Outcome(Trial(name, {"use_amp": True}), 2.0, rate, 1.5, 2.5, 0.1, iou, 10.0, **changes)


def test_rows_follow_the_hardware():
    assert names(8, True, True, False) == [
        "Baseline (float32)",
        "AMP",
        "AMP + large batch",
        "AMP + compiled",
        "AMP float16 + compiled",
    ]
    assert names(8, True, False, False) == ["Baseline (float32)", "AMP", "AMP + large batch", "AMP + compiled"]
    assert names(8, False, False, False) == ["Baseline (float32)", "float32 + compiled"]
    assert names(8, False, True, False) == ["Baseline (float32)", "float32 + compiled", "AMP"]
    assert names(8, True, True, True) == ["Baseline (float32)", "AMP", "AMP + compiled"]


def test_mixed_precision_takes_the_format_that_the_gpu_has():
    formats = {trial.settings.get("amp_dtype") for trial in choose_trials(8, True, False, False)}
    assert formats == {None, "float16"}
    large = next(trial for trial in choose_trials(8, True, True, False) if "large" in trial.name)
    assert large.settings["batch_size"] == 32
    assert choose_trials(8, True, True, False)[0].settings == {"use_amp": False, "compile_model": False, "channels_last": False}


def test_the_winner_is_fast_at_the_same_iou():
    slow, fast, wrong = outcome("slow", 100, 0.80), outcome("fast", 300, 0.795), outcome("wrong", 900, 0.70)
    assert choose_winner([slow, fast, wrong]) is fast
    assert choose_winner([slow, wrong]) is slow


def test_the_table_has_a_row_each_and_says_why_one_is_empty():
    lines = table_lines([outcome("a", 100, 0.8), outcome("b", 250, 0.81), Outcome(Trial("c", {}), failure="out of memory")])
    assert lines[0].split() == ["s/epoch", "images/s", "speed-up", "memory", "GiB", "reserved", "data", "wait", "val", "IoU"]
    assert lines[1].split() == ["a", "2.00", "100", "1.00×", "1.50", "2.50", "10%", "0.8000"]
    assert lines[2].split() == ["b", "2.00", "250", "2.50×", "1.50", "2.50", "10%", "0.8100"]
    assert lines[3].split() == ["c"] + ["–"] * 7
    assert lines[4] == "c: out of memory"
    assert len({len(line) for line in lines[:4]}) == 1


def test_each_row_is_a_run_and_a_failure_does_not_end_the_others(tiny_config, tmp_path, capsys):
    config = load_config({**tiny_config, "warmup_epochs": 1, "early_stopping_patience": 1})
    trials = [Trial("plain", {"use_amp": False}), Trial("too large", {"batch_size": 4000})]
    outcomes = bench(config, trials, ROOT / "train_unet.py", True, Console())
    said = capsys.readouterr().out
    folder = tmp_path / "checkpoints" / "bench"
    assert [bool(each.failure) for each in outcomes] == [False, True]
    assert outcomes[1].failure == "batch_size: 4000 is more than the 10 training images; need at most 10"
    assert outcomes[0].images_per_second > 0
    assert "Fastest at the same IoU: plain. Its lines for your config:\n  use_amp: false\n" in said
    report = json.loads((folder / "bench.json").read_text())
    assert report["winner"] == "plain"
    assert report["rows"][0]["val_iou"] == pytest.approx(outcomes[0].val_iou)
    assert report["rows"][1]["failure"] == outcomes[1].failure
    assert cv2.imread(str(folder / "bench.png")).shape[1] == 720
    assert len((folder / "plain" / "metrics.csv").read_text().splitlines()) == 3  # a header and two epochs
    assert "Epoch 2/2" in (folder / "plain.log").read_text()


def test_a_bench_in_which_nothing_runs_is_an_error_with_the_reason(tiny_config, capsys):
    config = load_config(tiny_config)
    with pytest.raises(UserError, match=r"no run of the bench came to an end; .*batch_size: 4000 is more than"):
        bench(config, [Trial("too large", {"batch_size": 4000})], ROOT / "train_unet.py", True, Console())


def test_the_command_hands_config_and_overrides_on(tiny_config, tmp_path, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(
        "unet_trainer.commands.bench.bench", lambda *given: seen.update(config=given[0], trials=given[1], quick=given[3])
    )
    words = [f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in tiny_config.items()]
    assert main(["bench", "--quick", *words]) == 0
    assert seen["quick"]
    assert seen["config"].image_size == 32
    assert seen["trials"][0].name == "Baseline (float32)"
    assert main(["bench", "nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_row_that_ran_otherwise_than_it_says_is_none():
    asked = load_config({"use_amp": True, "compile_model": True})
    assert bench_room._not_as_asked(asked, asked) == []
    for change in ({"compile_model": False}, {"use_amp": False}, {"amp_dtype": "float16"}, {"batch_parts": 2}):
        taken = dataclasses.replace(asked, **change)
        assert bench_room._not_as_asked(asked, taken) == list(change)


NO_COMPILER = """
import sys, yaml; from pathlib import Path
settings = yaml.safe_load(Path(sys.argv[1]).read_text())
folder = Path(settings["checkpoint_dir"]) / settings["run_name"]
folder.mkdir()
print("Warning: another matter")
if settings["compile_model"]:
    print("Warning: compile_model: compiling failed, training goes on uncompiled (no compiler)")
    settings["compile_model"] = False
(folder / "config.yaml").write_text(yaml.safe_dump(settings))
(folder / "metrics.csv").write_text(
    "epoch,seconds,images_per_second,peak_memory_gib,peak_reserved_gib,data_wait,val_iou\\n1,2.0,9.0,0.0,0.0,0.1,0.5\\n"
)
"""


def test_a_row_whose_compiler_fails_has_no_figures(tiny_config, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(NO_COMPILER)
    trials = choose_trials(4, on_gpu=False, has_bfloat16=False, quick=True)
    outcomes = bench(load_config(tiny_config), trials, script, True, Console())
    assert [outcome.images_per_second for outcome in outcomes] == [9.0, 0.0]
    assert outcomes[1].failure.startswith("compile_model: compiling failed")
    assert "Fastest at the same IoU: Baseline (float32)" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_told(tiny_config, tmp_path):
    (tmp_path / "file").touch()
    config = load_config({**tiny_config, "checkpoint_dir": str(tmp_path / "file" / "runs")})
    with pytest.raises(UserError, match=r"checkpoint_dir: .* cannot be written \("):
        bench(config, choose_trials(4, on_gpu=False, has_bfloat16=False, quick=True), SCRIPT, True, Console())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_bench_that_is_interrupted_leaves_no_run_behind(number, code, tiny_config):
    command = [sys.executable, str(SCRIPT), "bench", *words({**tiny_config, "num_workers": 0})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        log = Path(tiny_config["checkpoint_dir"]) / "bench" / "baseline_float32.log"
        deadline = time.monotonic() + 60
        while not (log.exists() and list(Path(f"/proc/{child.pid}/task/{child.pid}").glob("children"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        runs = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (code, f"Error: interrupted by {number.name}\n")
    assert runs
    assert not [run for run in runs if Path(f"/proc/{run}").exists()]
