"""Config → device and settings; and what the user is told of the choices."""

from __future__ import annotations

import dataclasses
import io

import pytest

from helpers.steps import CPU_FACTS
from unet_trainer.config import choices
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import resolve
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset
from unet_trainer.training.settings import build_hardware, build_settings, review

GPU = HardwareFacts("cuda:0", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8)
TESLA_T4 = dataclasses.replace(GPU, name="Tesla T4", has_bfloat16=False)


def said(console):
    return console.stream.getvalue()


def test_a_precision_that_was_not_asked_for_is_told_with_its_reason(config, console):
    dataset = build_dataset(config, Console(io.StringIO()), None)
    build_settings(dataclasses.replace(config, use_amp=True), TESLA_T4, dataset, console)
    reason = "Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; float16 with loss scaling instead"
    lines = [f"Warning: {reason}", "Mixed Precision Training: float16", f"✓ AMP enabled with float16: {reason}"]
    assert said(console).partition("  Data:")[0].splitlines() == lines


def test_decisions_are_told(config, console, monkeypatch):
    monkeypatch.setattr(choices, "RARE_CLASS", 1.0)  # so that classes are weighted
    config = dataclasses.replace(config, num_workers="auto", num_classes=2, class_names=("field", "road"), class_weights="auto")
    dataset = build_dataset(config, console, None)
    settings = build_settings(config, CPU_FACTS, dataset, console)
    assert settings.taken.num_workers == 1
    field, road = settings.taken.class_weights
    assert "  Loader:     1 worker beside the training process (num_workers: auto, 2 cores)\n" in said(console)
    assert f"  Weights:    field {field:g}, road {road:g}\n" in said(console)
    assert "10 train, 2 val" in said(console)
    # What was decided and does nothing (one crop, no attention) is in config.yaml, not here.
    lines = said(console).partition("Decided from the data and this machine")[2].splitlines()[1:]
    assert [line for line in lines if line.endswith(")") and ": " in line] == ["  repeats: 1  (num_epochs is set)", lines[-2]]
    assert lines[-2].startswith("  Loader:")
    assert settings.decisions["crops_per_image"].source == "decided"


def test_settings_that_do_nothing_are_told(config, console):
    dataset = build_dataset(config, console, None)
    build_settings(dataclasses.replace(config, crops_per_image=3), CPU_FACTS, dataset, console)
    assert "Note: crops_per_image: for fit: crop alone; with fit: resize there are no crops\n" in said(console)


GIB = 2**30
A100 = HardwareFacts(
    "cuda", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8, free_memory=40 * GIB, host_memory=64 * GIB
)
CPU = HardwareFacts("cpu", "a CPU", has_bfloat16=True, has_float16=False, num_cores=2, free_memory=8 * GIB, host_memory=8 * GIB)
SYMMETRIC = Measurements(
    num_pairs=100,
    structure=40,
    relative_structure=0.1,
    thickness=8.0,
    size_spread=2.0,
    brightness_spread=0.1,
    has_colour=True,
    told={"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5},
    told_in_views={"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5},
    has_sides=False,
    chance=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
    chance_in_views=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
)
DATA = DatasetFacts(
    channels=3,
    mean=(1.0, 2.0, 3.0),
    std=(4.0, 5.0, 6.0),
    statistics_reason="of the training images",
    mask_values=(0, 255),
    ignore_value=None,
    mask_reason="all masks hold 0 and 255",
    class_shares=[0.8, 0.2],
    train_sizes=[(512, 512)] * 800,
    val_sizes=[(512, 512)] * 200,
    measurements=SYMMETRIC,
)
COST = StepCost(seconds=0.1, eval_seconds=0.001, memory=4 * GIB)
LONG = {"num_epochs": 100, "batch_size": 16, "image_size": 512, "fit": "resize"}  # 5,000 steps


def found(hardware=A100, facts=DATA, cost=COST, failure="", compile_failure="", **values):
    settings = resolve(load_config({"data_dir": "data/mine", **values}), hardware, facts, lambda config: cost)
    return review(settings, hardware, facts, cost, failure, compile_failure)


def fixes(*arguments, **values):
    return [(finding.title, finding.fix) for finding in found(*arguments, **values)]


@pytest.mark.parametrize("hardware", [A100, CPU], ids=["GPU", "CPU"])
def test_a_config_that_leaves_things_open_has_no_findings(hardware):
    assert found(hardware) == []
    assert found(hardware, time_budget="10m", seed=7, learning_rate=1e-3, encoder="resnet18") == []


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"use_amp": False}, ("use_amp", "use_amp: auto")),
        ({"compile_model": False}, ("compile_model", "compile_model: auto")),  # saves 0.5 × 0.1 s × 5,000 steps
        ({"compile_model": True, "cost": StepCost(0.01, 0.001, GIB)}, ("compile_model", "compile_model: auto")),
        ({"num_workers": 9}, ("num_workers", "num_workers: auto")),
        ({"image_size": 1024}, ("image_size", "image_size: auto, fit: auto")),
        ({"image_size": 128}, ("image_size", "image_size: auto, fit: auto")),  # 8 pixels thin become 2
        ({"num_epochs": 19}, ("num_epochs", "num_epochs: auto")),  # 950 steps
        ({"cost": StepCost(0.1, 0.001, 39 * GIB)}, ("batch_size", "batch_size: 8 with accumulation_steps: 2, or batch_parts: 2")),
    ],
    ids=lambda case: str(case) if isinstance(case, dict) else "",
)
def test_a_bad_value_has_one_finding_with_the_line_to_change(values, fix):
    assert fixes(**{**LONG, **values}) == [fix]


def test_a_step_that_could_not_be_taken_is_a_problem():
    (finding,) = found(cost=None, failure="OutOfMemoryError: CUDA out of memory", **LONG)
    assert finding.level == "problem"
    assert finding.detail == "a step of 16 could not be taken (OutOfMemoryError: CUDA out of memory)"


# In training


def lines_of(config, resumes=False):
    console = Console(io.StringIO())
    hardware = build_hardware(config, console)
    build_settings(config, hardware, build_dataset(config, console, None), console, resumes)
    return console.stream.getvalue().splitlines()


def notes_of(config, resumes=False):
    return [line for line in lines_of(config, resumes) if line.startswith("Note: ")]


def test_statistics_that_a_run_began_with_are_not_told_as_given(tiny_config):
    config = load_config({**tiny_config, "image_mean": [1, 2, 3], "image_std": [4, 5, 6]})
    for resumes, why in ((False, "as given"), (True, "as the run began")):
        (line,) = (line for line in lines_of(config, resumes) if "normalised" in line)
        assert line.endswith(f"normalised with mean 1, 2, 3, std 4, 5, 6 ({why})")


def test_training_says_the_hints_that_are_worth_most(tiny_config):
    notes = notes_of(load_config({**tiny_config, "image_size": 256, "num_epochs": 20}))
    assert [note.split()[1] for note in notes] == ["image_size:", "num_epochs:"]
    assert notes[1].startswith("Note: num_epochs: 20: too few optimizer steps to learn much; auto takes ")
    assert notes[1].endswith(" → num_epochs: auto")


def test_training_says_nothing_of_a_config_without_bad_values_or_of_a_run_that_goes_on(tiny_config):
    assert notes_of(load_config({**tiny_config, "num_epochs": 5000, "cache": "ram"})) == []
    assert notes_of(load_config(tiny_config), resumes=True) == []
