"""Settings say what was asked for, what is taken and why; config.yaml repeats the run elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.resolving import AMPERE, CPU, DATASET, STEP, TURING, found_weights, open_settings, settings_of
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import resolve
from unet_trainer.config.resolved_config import KEPT_AS_CHOSEN, MACHINE_KEYS
from unet_trainer.config.schema import Config, as_dict, explanations


def test_the_repeatable_config_has_what_was_taken_but_of_the_machine_what_was_asked_for():
    settings = settings_of(TURING, use_amp=True, amp_dtype="bfloat16", compile_model=True, batch_size=8)
    settings.change("compiling failed", compile_model=False)
    settings.change("out of memory", batch_parts=2)
    repeatable = settings.repeatable()
    assert type(repeatable) is Config
    asked = ("auto", "auto", True, "bfloat16", True, "none")
    assert tuple(getattr(repeatable, name) for name in MACHINE_KEYS) == asked
    assert tuple(getattr(settings.taken, name) for name in MACHINE_KEYS) == ("cuda:1", 7, True, "float16", False, "none")
    assert (repeatable.batch_parts, repeatable.in_channels, repeatable.mask_values) == (2, 4, (0, 255))
    assert settings.repeatable_dict() == as_dict(repeatable)
    assert load_config(settings.repeatable_dict()) == repeatable


def test_what_changes_the_numbers_is_written_as_it_was_chosen():
    """Elsewhere auto may choose otherwise, and a resumed run would not have the same bits."""
    gpu = dataclasses.replace(AMPERE, host_memory=2**34)
    for hardware, chosen in ((gpu, True), (dataclasses.replace(CPU, host_memory=2**34), False)):
        settings = open_settings(hardware, measure_step=lambda config: STEP)
        repeatable = settings.repeatable()
        assert {name: getattr(repeatable, name) for name in KEPT_AS_CHOSEN} == {"use_amp": chosen, "compile_model": chosen}
        assert (settings.taken.cache, repeatable.cache) == ("ram", "auto")  # it changes no numbers
        assert f"use_amp: {str(chosen).lower()}  # here {str(chosen).lower()}: " in settings.to_yaml("")
    settings.change("compiling failed", compile_model=False)
    assert settings.repeatable().compile_model is False


def test_with_a_time_budget_the_number_of_epochs_stays_open():
    settings = open_settings(measure_step=lambda config: STEP, time_budget="30m")
    repeatable = settings.repeatable()
    assert (repeatable.num_epochs, repeatable.time_budget) == ("auto", "30m")
    assert load_config(settings.repeatable_dict()) == repeatable
    (line,) = [line for line in settings.to_yaml("").splitlines() if line.startswith("num_epochs:")]
    assert line.startswith(f"num_epochs: auto  # here {settings.taken.num_epochs}: ")
    assert "30 min allow" in line
    faster = resolve(repeatable, CPU, DATASET, lambda config: dataclasses.replace(STEP, seconds=0.25), found_weights)
    assert faster.taken.num_epochs == pytest.approx(2 * settings.taken.num_epochs, rel=0.05)
    assert faster.taken.repeats == settings.taken.repeats


def test_config_yaml_keeps_what_was_asked_of_the_machine_and_says_what_was_taken():
    settings = settings_of(CPU, use_amp=True, amp_dtype="float16")
    settings.change("out of memory", batch_parts=2)
    text = settings.to_yaml("Settings of this run", run_name="mine", resume=None)
    assert text.startswith("# Settings of this run\n")
    lines = text.splitlines()
    assert "use_amp: true  # here false: float16 is far slower than float32 on a CPU; float32 instead" in lines
    assert "num_workers: auto  # here 4: 8 cores" in lines
    assert "device: auto  # here cpu: x86_64" in lines
    assert "batch_parts: 2  # decided: out of memory" in lines
    assert "mask_values: [0, 255]  # decided: all masks hold 0 and 255" in lines
    assert f"seed: 42  # {explanations()['seed']}" in lines
    assert f"run_name: mine  # {explanations()['run_name']}" in lines
