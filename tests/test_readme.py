"""The README is true: its commands run, its tree is the tree, its table has every key."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from helpers.project import ROOT, TINY_MODEL
from train_unet import main
from unet_trainer.commands import bench
from unet_trainer.config.schema import FIELDS

README = (ROOT / "README.md").read_text()
SMALL = [f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in TINY_MODEL.items()]
SMALL += ["image_size=32", "batch_size=4", "num_epochs=2", "warmup_epochs=0", "early_stopping_patience=null", "num_workers=0"]
SMALL += ["compile_model=false", "use_amp=false"]


def code_blocks():
    return re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands():
    return [line for block in code_blocks() for line in block.splitlines() if line.startswith("python ")]


def test_the_demo_command_reaches_the_promised_iou_in_the_promised_time(tmp_path):
    """Word for word but for the install, which made the environment that runs this."""
    command = "python -m pip install -r requirements.txt && python train_unet.py"
    assert command in commands()
    started = time.perf_counter()
    done = subprocess.run([sys.executable, str(ROOT / "train_unet.py")], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads((tmp_path / "checkpoints/demo/result.json").read_text())
    assert result["best_val_iou"] >= 0.90
    assert len(list((tmp_path / "data/demo/images").iterdir())) == len(list((tmp_path / "data/demo/masks").iterdir())) >= 200
    assert seconds < 120


def test_every_training_command_runs(tiny_data, tmp_path, monkeypatch, capsys):
    """In the order of the page, made small; a run that one command makes is there for the next."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine").symlink_to(tiny_data)
    found = [line for line in commands() if line.startswith("python train_unet.py ")]
    assert len(found) >= 8
    monkeypatch.setattr(bench, "choose_trials", lambda *given, choose=bench.choose_trials: choose(*given)[:1])  # a row is enough
    for line in found:
        words = shlex.split(line)[2:]
        small = [word for word in SMALL if not (word.startswith("encoder=") and "--resume" in words)]
        assert main([*words, *small]) == 0, (line, capsys.readouterr().err)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        ".scan",
        "bench",
        "check",
        "fast",
        "production",
        "production-2",
    ]


def test_the_python_example_runs(tiny_data, tmp_path, monkeypatch, capsys):
    example = next(block for block in code_blocks() if "from train_unet import train" in block)
    small = {**TINY_MODEL, "image_size": 32, "batch_size": 4, "num_workers": 0, "device": "cpu", "checkpoint_dir": str(tmp_path)}
    example = example.replace('"num_epochs": 20', '"num_epochs": 1').replace('"data/mine"', repr(str(tiny_data)))
    example = example.replace('{"data_dir"', f'{{**{small!r}, "data_dir"')
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert str(tmp_path / "run") in capsys.readouterr().out


def test_the_example_of_an_error_message_is_what_the_program_says(capsys):
    shown = next(block for block in code_blocks() if block.startswith("Error: 3 problems"))
    assert main(["lr=1", "amp_dtype=bf16", "warmup_epochs=8"]) == 2
    assert capsys.readouterr().err == shown


def test_the_tree_follows_the_code():
    tree = next(block for block in code_blocks() if block.startswith("train_unet.py"))
    listed = set(re.findall(r"^  (\w+\.py)", tree, re.MULTILINE))
    rooms = {path.name for path in (ROOT / "unet_trainer").glob("*.py")} - {"__init__.py"}
    assert listed == rooms


def test_every_key_and_every_preset_is_in_its_table():
    tables = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    assert [name for name in FIELDS if f"`{name}`" not in tables] == []
    assert [path.name for path in sorted((ROOT / "configs").glob("*.yaml")) if f"`{path.name}`" not in tables] == []


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_every_link_leads_somewhere(target):
    assert (ROOT / target).exists()
