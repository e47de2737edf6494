"""The bench: rows that suit the hardware, each a run in a separate process, and a table of their figures."""

import json
import re

import pytest

from helpers.project import TINY_MODEL
from helpers.runs import words
from train_unet import main
from unet_trainer.commands import bench as module
from unet_trainer.commands.bench import bench, choose_rows
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
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
(folder / "run.json").write_text(json.dumps({"result": result}))
(folder / "config.yaml").write_text(yaml.safe_dump({**settings, **plan.get("config", {})}))
columns = "epoch,seconds,images_per_second,peak_memory_gib,val_iou"
(folder / "metrics.csv").write_text(f"{columns}\\n1,9.0,2.0,1.5,0.4\\n2,3.0,{plan.get('rate', 8.0)},1.0,0.5\\n")
"""
PLAIN = {"use_amp": False, "compile_model": False}


@pytest.mark.parametrize(
    ("on_gpu", "has_bfloat16", "others"),
    [
        (True, True, ["AMP", "AMP + larger batch", "AMP + compiled"]),
        (False, True, ["AMP", "AMP + compiled"]),
        (False, False, ["float32 + compiled"]),
    ],
)
def test_rows_follow_the_hardware(on_gpu, has_bfloat16, others):
    assert list(choose_rows(8, on_gpu, has_bfloat16)) == ["float32", *others]
    turing = choose_rows(8, True, False)["AMP + larger batch"]
    assert turing == {"use_amp": True, "amp_dtype": "float16", "compile_model": False, "batch_size": 32}


def test_each_row_is_a_run_of_the_script(tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "NUM_EPOCHS", 2)
    config = load_config({**tiny_config, "warmup_epochs": 1, "early_stopping_patience": 1})
    bench(config, {"plain": PLAIN}, Console())
    assert re.search(r"\nplain +[\d.]+ +\d+ +1\.00× +– +[\d.]+\n", capsys.readouterr().out)
    folder = tmp_path / "checkpoints" / "bench"
    assert len((folder / "plain" / "metrics.csv").read_text().splitlines()) == 3  # a header and two epochs
    assert "Epoch 2/2" in (folder / "plain.log").read_text()


def test_the_table_has_the_epochs_after_the_first_and_no_row_that_failed_or_ran_with_other_settings(
    tiny_config, tmp_path, monkeypatch, capsys
):
    error = "batch_size: 4000 is more than the 10 training images; need at most 10"
    warnings = ["Warning: another", "Warning: compile_model: it failed (why)"]
    plan = {
        "fast": {"rate": 20.0},
        "too_large": {"lines": ["Device: cpu", f"Error: {error}", "bye"], "code": 2},
        "compiled": {"lines": warnings, "result": {"is_compiled": False}},
        "parts": {"config": {"batch_parts": 2}},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(module, "SCRIPT", tmp_path / "stub.py")
    rows = {"too large": PLAIN, "slow": PLAIN, "fast": PLAIN, "compiled": {"compile_model": True}, "parts": PLAIN}
    bench(load_config(tiny_config), rows, Console())
    header, slow, fast, *failures = capsys.readouterr().out.splitlines()[-6:]
    assert header.split() == ["s/epoch", "images/s", "speed-up", "memory", "GiB", "val", "IoU"]
    assert slow.split() == ["slow", "3.00", "8", "1.00×", "1.50", "0.5000"]
    assert fast.split() == ["fast", "3.00", "20", "2.50×", "1.50", "0.5000"]
    other = "parts: it did not run with the batch_parts of its row"
    assert failures == [f"too large: {error}", "compiled: compile_model: it failed (why)", other]


def test_missing_data_and_removed_options_are_reported_before_anything_is_trained(tmp_path, capsys):
    assert main(["bench", f"data_dir={tmp_path / 'none'}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 2
    assert f"Error: data_dir: {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert main(["bench", "--quick"]) == 2
    assert "bench --quick was removed: bench has at most four rows" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_step_of_a_config_is_timed_without_its_data_and_out_of_memory_is_one_message(monkeypatch, capsys):
    settings = {"device": "cpu", "image_size": [32, 64], "batch_size": 3, "data_dir": "no/such/folder"}
    command = ["bench", "--step", *words({**TINY_MODEL, **settings})]
    monkeypatch.setattr("unet_trainer.training.trials.MAX_STEPS", 2)
    assert main(command) == 0
    assert re.search(r"The step alone: \d+ images/s at batch 3 \([\d.]+ ms\)\n$", capsys.readouterr().out)

    def fail(self, *arguments, **options):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(TrainStep, "__call__", fail)
    assert main(command) == 3
    assert "the step could not be taken (cannot allocate). Try a smaller batch_size" in capsys.readouterr().err
