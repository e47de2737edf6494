"""Config → device and settings; and what the user is told of the choices."""

import dataclasses
import io

import pytest

from helpers.resolving import AMPERE, DATASET, FREE, MEASURED, TURING
from helpers.steps import CPU_FACTS
from unet_trainer.config import choices
from unet_trainer.config.facts import StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolved_config import resolve
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset
from unet_trainer.training.settings import build_hardware, build_settings, review


def test_a_precision_that_was_not_asked_for_is_told_with_its_reason(config, console):
    dataset = build_dataset(config, Console(io.StringIO()), None)
    build_settings(dataclasses.replace(config, use_amp=True), TURING, dataset, console)
    reason = "Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; float16 with loss scaling instead"
    lines = [f"Warning: {reason}", "Mixed Precision Training: float16", f"✓ AMP enabled with float16: {reason}"]
    assert console.stream.getvalue().partition("  Data:")[0].splitlines() == lines


def test_decisions_are_told(config, console, monkeypatch):
    monkeypatch.setattr(choices, "RARE_CLASS", 1.0)  # so that classes are weighted
    config = dataclasses.replace(
        config, num_workers="auto", num_classes=2, class_names=("field", "road"), class_weights="auto"
    )
    dataset = build_dataset(config, console, None)
    settings = build_settings(config, CPU_FACTS, dataset, console)
    assert settings.taken.num_workers == 1
    field, road = settings.taken.class_weights
    assert (
        "  Loader:     1 worker beside the training process (num_workers: auto, 2 cores)\n" in console.stream.getvalue()
    )
    assert f"  Weights:    field {field:g}, road {road:g}\n" in console.stream.getvalue()
    assert "10 train, 2 val" in console.stream.getvalue()
    # What was decided and does nothing (one crop, no attention) is in config.yaml, not here.
    lines = console.stream.getvalue().partition("Decided from the data and this machine")[2].splitlines()[1:]
    assert [line for line in lines if line.endswith(")") and ": " in line] == [
        "  repeats: 1  (num_epochs is set)",
        lines[-2],
    ]
    assert lines[-2].startswith("  Loader:")
    assert settings.decisions["crops_per_image"].source == "decided"


def test_settings_that_do_nothing_are_told(config, console):
    dataset = build_dataset(config, console, None)
    build_settings(dataclasses.replace(config, crops_per_image=3), CPU_FACTS, dataset, console)
    assert (
        "Note: crops_per_image: for fit: crop alone; with fit: resize there are no crops\n" in console.stream.getvalue()
    )


GIB = 2**30
A100 = dataclasses.replace(AMPERE, free_memory=40 * GIB, host_memory=64 * GIB)
CPU = dataclasses.replace(CPU_FACTS, free_memory=8 * GIB, host_memory=8 * GIB)
DATA = dataclasses.replace(
    DATASET,
    channels=3,
    mean=(1.0, 2.0, 3.0),
    std=(4.0, 5.0, 6.0),
    train_sizes=[(512, 512)] * 800,
    val_sizes=[(512, 512)] * 200,
    measurements=dataclasses.replace(MEASURED, structure=40, thickness=8.0, told=FREE),
)
COST = StepCost(seconds=0.1, eval_seconds=0.001, memory=4 * GIB)
LONG = {"num_epochs": 100, "batch_size": 16, "image_size": 512, "fit": "resize"}  # 5,000 steps


def found(hardware=A100, cost=COST, failure="", **values):
    settings = resolve(load_config({"data_dir": "data/mine", **values}), hardware, DATA, lambda config: cost)
    return review(settings, hardware, DATA, cost, failure, "")


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
        (
            {"cost": StepCost(0.1, 0.001, 39 * GIB)},
            ("batch_size", "batch_size: 8 with accumulation_steps: 2, or batch_parts: 2"),
        ),
    ],
    ids=lambda case: str(case) if isinstance(case, dict) else "",
)
def test_a_bad_value_has_one_finding_with_the_line_to_change(values, fix):
    assert [(finding.title, finding.fix) for finding in found(**{**LONG, **values})] == [fix]


def test_a_step_that_could_not_be_taken_is_a_problem():
    (finding,) = found(cost=None, failure="OutOfMemoryError: CUDA out of memory", **LONG)
    assert finding.level == "problem"
    assert finding.detail == "a step of 16 could not be taken (OutOfMemoryError: CUDA out of memory)"


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
