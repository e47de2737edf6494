"""The files in configs/: each loads, begins with the command that runs it, and has the settings that its name promises."""

import re
import shlex

import pytest

import train_unet
from helpers.project import ROOT
from unet_trainer.config.load import load_config

FILES = sorted((ROOT / "configs").iterdir())
BFLOAT16 = {"use_amp": True, "amp_dtype": "bfloat16"}
FLOAT32 = {"use_amp": False}
PROMISES = {
    "fast": {"batch_size": 16, **BFLOAT16, "compile_model": True},
    "production": {**BFLOAT16, "grad_clip": 1.0, "on_oom": "shrink"},
    "max_batch": {"batch_size": 32, **BFLOAT16, "compile_model": True},
    "low_memory": {"batch_size": 4, **BFLOAT16, "accumulation_steps": 4},
    "older_gpu": {"use_amp": True, "amp_dtype": "float16", "grad_clip": 1.0},
    "stable": {**FLOAT32, "allow_tf32": False, "compile_model": False, "deterministic": True, "accumulation_steps": 1},
    "debug": {"batch_size": 2, "num_epochs": 5, **FLOAT32, "compile_model": False, "num_workers": 0},
}
DECIDED_FROM_THE_DATA = (
    "fit",
    "image_size",
    "augmentation",
    "num_epochs",
    "repeats",
    "learning_rate",
    "ema_decay",
    "loss",
)


def read(name):
    return (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")


def test_demo_yaml_is_what_the_script_trains():
    assert load_config(ROOT / "configs" / "demo.yaml") == train_unet.script_config()


@pytest.mark.parametrize("name", PROMISES)
def test_preset_has_the_settings_that_it_promises(name):
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert {key: getattr(config, key) for key in PROMISES[name]} == PROMISES[name]
    usual = (config.run_name, config.data_dir, config.device, config.resume, config.seed)
    assert usual == (name, "data/demo", "auto", None, 42)
    if name != "debug":
        assert {getattr(config, key) for key in DECIDED_FROM_THE_DATA} == {"auto"}


def test_no_preset_needs_the_internet():
    """auto looks for weights, and goes on without them."""
    assert all(load_config(file).encoder_weights in ("auto", None) for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_begins_with_the_command_that_runs_it(file):
    first_line = file.read_text(encoding="utf-8").splitlines()[0]
    python, script, path, *overrides = shlex.split(first_line.removeprefix("# "))
    assert (python, script, path) == ("python", "train_unet.py", f"configs/{file.name}")
    assert overrides == ([] if file.stem == "demo" else ["data_dir=data/mine"])
    load_config(file, overrides)


@pytest.mark.parametrize("name", ["fast", "production", "max_batch", "low_memory", "older_gpu", "stable"])
def test_a_preset_says_what_it_gave_as_the_page_on_quality_has_it(name):
    header = read(name).splitlines()[:4]
    said = next(
        match for line in header if (match := re.fullmatch(r"# On DRIVE: Dice (0\.\d+) after (\d+ of \d+) .*", line))
    )
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \| (0\.\d+) \| (\d+ of \d+)", page, re.MULTILINE)
    assert said.groups() == row.groups()
