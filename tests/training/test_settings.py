"""Config → device and settings; and what the user is told of the choices."""

import dataclasses

import pytest

from helpers.resolving import TURING
from helpers.steps import CPU_FACTS, silent_console
from unet_trainer.training.build import build_dataset
from unet_trainer.training.settings import build_settings


def test_a_precision_that_was_not_asked_for_is_told_with_its_reason(config, console):
    dataset = build_dataset(config, silent_console(), None)
    build_settings(dataclasses.replace(config, use_amp=True), TURING, dataset, console)
    first, *others = console.stream.getvalue().partition("  Data:")[0].splitlines()
    assert first.startswith("Warning: Tesla T4 has no fast bfloat16, which needs Ampere or newer; ")
    reason = first.removeprefix("Warning: ")
    assert others == ["Mixed Precision Training: float16", f"✓ AMP enabled with float16: {reason}"]


def test_decisions_are_told(config, console, monkeypatch):
    monkeypatch.setattr("unet_trainer.config.auto_training.RARE_CLASS", 1.0)  # so that classes are weighted
    config = dataclasses.replace(
        config, num_workers="auto", num_classes=2, class_names=("field", "road"), class_weights="auto"
    )
    dataset = build_dataset(config, console, None)
    settings = build_settings(config, CPU_FACTS, dataset, console)
    assert settings.taken.num_workers == 1
    said = console.stream.getvalue()
    assert "10 train, 2 val" in said
    # What was decided and does nothing (one crop, no attention) is in config.yaml, not here.
    lines = said.partition("Decided from the data and this machine")[2].splitlines()[1:]
    decided = [line.partition(": ")[0] for line in lines if line.endswith(")") and ": " in line]
    assert decided == ["  repeats", "  num_workers", "  class_weights"]
    assert settings["crops_per_image"].source == "decided"


@pytest.mark.parametrize(("resumes", "why"), [(False, "as given"), (True, "as the run began")])
def test_statistics_that_a_run_began_with_are_not_told_as_given(resumes, why, config, console):
    config = dataclasses.replace(config, image_mean=(1.0, 2.0, 3.0), image_std=(4.0, 5.0, 6.0))
    build_settings(config, CPU_FACTS, build_dataset(config, console, None), console, resumes)
    assert f"normalised with mean 1, 2, 3, std 4, 5, 6 ({why})\n" in console.stream.getvalue()
