"""Config → device and settings; and what the user is told of the choices."""

from __future__ import annotations

import dataclasses
import io

import pytest

from helpers.steps import CPU_FACTS
from unet_trainer.config import training_choices
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.system.console import Console
from unet_trainer.training.build import (
    build_dataset,
)
from unet_trainer.training.settings import build_hardware, build_settings

A100 = HardwareFacts("cuda:0", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8)
TESLA_T4 = dataclasses.replace(A100, name="Tesla T4", has_bfloat16=False)
TESLA_K80 = dataclasses.replace(TESLA_T4, name="Tesla K80", has_float16=False)


def said(console):
    return console.stream.getvalue()


def test_the_device_is_told(config, console):
    hardware = build_hardware(config, console)
    assert (hardware.device, hardware.kind) == ("cpu", "cpu")
    assert hardware.free_memory == hardware.host_memory > 0
    assert said(console).startswith(f"  Device:     cpu ({hardware.name}, {hardware.num_cores} core")


@pytest.mark.parametrize(
    ("hardware", "changes", "expected"),
    [
        (
            A100,
            {"use_amp": True},
            "Mixed Precision Training: bfloat16\n✓ AMP enabled with bfloat16: NVIDIA A100 takes it; no loss scaling needed\n",
        ),
        (
            TESLA_T4,
            {"use_amp": True},
            "Warning: Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; float16 with loss scaling "
            "instead\nMixed Precision Training: float16\n✓ AMP enabled with float16: Tesla T4 has no bfloat16, which needs compute "
            "capability 8.0 (Ampere) or newer; float16 with loss scaling instead\n",
        ),
        (
            TESLA_K80,
            {"use_amp": True},
            "Warning: Tesla K80 has no bfloat16 arithmetic; float32 instead\n"
            "Mixed Precision Training: off, float32 with TF32 matrix products (Tesla K80 has no bfloat16 arithmetic; "
            "float32 instead)\n",
        ),
        (
            A100,
            {"allow_tf32": False},
            "Mixed Precision Training: off, float32 (use_amp is false)\n",
        ),
        (CPU_FACTS, {}, "Mixed Precision Training: off, float32 (use_amp is false)\n"),
        (
            A100,
            {"use_amp": "auto"},
            "Mixed Precision Training: bfloat16\n✓ AMP enabled with bfloat16: NVIDIA A100 takes it; no loss scaling needed\n",
        ),
        (
            TESLA_K80,
            {"use_amp": "auto"},
            "Mixed Precision Training: off, float32 with TF32 matrix products (Tesla K80 has no 16-bit arithmetic)\n",
        ),
        (
            CPU_FACTS,
            {"use_amp": "auto"},
            "Mixed Precision Training: off, float32 (float32 is the fastest on most CPUs)\n",
        ),
    ],
    ids=["bfloat16", "no bfloat16", "neither", "float32 on a GPU", "CPU", "auto", "auto with neither", "auto on a CPU"],
)
def test_a_precision_that_was_not_asked_for_is_told_with_its_reason(hardware, changes, expected, config, console):
    dataset = build_dataset(config, Console(io.StringIO()), None)
    build_settings(dataclasses.replace(config, **changes), hardware, dataset, console)
    assert said(console).partition("  Data:")[0] == expected


def test_decisions_are_told(config, console, monkeypatch):
    monkeypatch.setattr(training_choices, "RARE_CLASS", 1.0)  # so that classes are weighted
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


def test_where_everything_is_set_nothing_is_decided(config, console):
    config = dataclasses.replace(config, num_classes=1, crops_per_image=1, repeats=1, encoder_lr_factor=1.0)
    build_settings(config, CPU_FACTS, build_dataset(config, console, None), console)
    assert "Decided" not in said(console)
    assert "Trying the step" not in said(console)


def test_a_long_value_is_cut_where_decisions_are_told(config, console):
    config = dataclasses.replace(config, augmentation="auto")
    settings = build_settings(config, CPU_FACTS, build_dataset(config, console, None), console)
    (line,) = [line for line in said(console).splitlines() if line.startswith("  augmentation: ")]
    assert line.startswith("  augmentation: [{HorizontalFlip: {p: 0.5}}, ")
    assert line.index("…") == len("  augmentation: ") + 60
    assert line.endswith(f"({settings.decisions['augmentation'].reason})")
    assert "  Found: " not in said(console)


def test_what_was_measured_is_told_where_the_augmentation_is_set(config, console):
    config = dataclasses.replace(config, fit="auto", augmentation="none")
    build_settings(config, CPU_FACTS, build_dataset(config, console, None), console)
    assert "  Found:      images " in said(console)


def test_settings_that_do_nothing_are_told(config, console):
    dataset = build_dataset(config, console, None)
    build_settings(dataclasses.replace(config, crops_per_image=3), CPU_FACTS, dataset, console)
    assert "Note: crops_per_image is for fit: crop; with fit: resize there are no crops\n" in said(console)
    build_settings(dataclasses.replace(config, crops_per_image=3, rare_class_crops=0.9), CPU_FACTS, dataset, console)
    assert "Note: crops_per_image and rare_class_crops are for fit: crop; " in said(console)


def test_weights_of_auto_are_looked_for_once_and_told_where_there_are_none(config, console, monkeypatch):
    asked = []
    answers = [("imagenet", "on this machine"), (None, "no network: random weights")]
    monkeypatch.setattr(
        "unet_trainer.training.settings.choose_encoder_weights",
        lambda encoder, say, limit: asked.append((encoder, limit)) or answers[len(asked) - 1],
    )
    auto = dataclasses.replace(config, encoder_weights="auto")
    dataset = build_dataset(config, Console(io.StringIO()), None)

    def found_by(config):
        settings = build_settings(config, CPU_FACTS, dataset, console)
        return settings.taken.encoder_weights, settings.decisions["encoder_weights"].reason

    assert found_by(config) == (None, "")
    assert asked == []
    assert found_by(auto) == ("imagenet", "on this machine")
    assert "Note: encoder_weights" not in said(console)
    assert found_by(dataclasses.replace(auto, num_epochs="auto", time_budget="2m")) == (None, "no network: random weights")
    assert "  encoder_weights: null  (no network: random weights)\n" in said(console)
    assert asked == [(config.encoder, 60.0), (config.encoder, 12.0)]  # a tenth of the time
