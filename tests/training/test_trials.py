"""The cost of a step: real ones, and such as memory does not hold."""

from unittest.mock import Mock

import pytest
import torch

from helpers.steps import make_settings, silent_console
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.training import trials
from unet_trainer.training.extension import CustomParts
from unet_trainer.training.trials import StepProbe, measure_step

DEEP = ImageSpec(5, "uint16", (9.0,) * 5, (2.0,) * 5, 0.0, 99.0)


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(trials, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(trials, "MAX_STEPS", 2)


def config(**changes):
    return make_settings(**changes).taken


def probe(**options):
    return StepProbe(RGB_8BIT, silent_console(), **options)


def test_a_trial_changes_no_random_number_and_a_failure_says_why():
    measure, state = probe(), torch.get_rng_state()
    cost = measure(config())
    assert min(cost.seconds, cost.eval_seconds) > 0
    assert (cost.memory, measure.failure) == (0, "")
    assert measure(config(architecture="pan", encoder="densenet121", decoder_channels=None)) is None
    assert measure.failure.startswith("ConfigError: architecture: pan does not go with encoder: densenet121")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("image", "changes"),
    [
        (RGB_8BIT, {"decoder_attention": "scse", "ema_decay": 0.9, "decoder_channels": [16] * 5}),
        (DEEP, {"num_classes": 3, "batch_size": 4, "batch_parts": 2}),
        (RGB_8BIT, {"freeze_encoder_epochs": 1, "accumulation_steps": 4, "grad_clip": 1.0}),
    ],
    ids=["attention and average", "deep images in parts", "frozen at first"],
)
def test_every_kind_of_step_can_be_measured(image, changes):
    cost = measure_step(make_settings(image, **changes).taken, image)
    assert cost.seconds > 0
    assert cost.eval_seconds > 0


def test_a_step_with_a_loss_of_the_callers_own_can_be_measured():
    measure = probe(seconds=9.0, custom=CustomParts(loss=lambda logits, masks: logits.square().mean()))
    assert measure(config(loss={"own": 1.0})).eval_seconds > 0


@pytest.mark.parametrize(
    ("error", "cost"), [(torch.OutOfMemoryError("a reason"), TOO_LARGE), (ValueError("a reason"), None)]
)
def test_a_step_that_memory_does_not_hold_is_told_from_one_that_fails(error, cost, monkeypatch):
    monkeypatch.setattr(trials, "build_spec", Mock(side_effect=error))
    measure = probe()
    assert measure(config()) == cost
    assert measure.failure.endswith("a reason")


def test_why_no_step_is_tried_is_said_once(console):
    measure = StepProbe(RGB_8BIT, console, seconds=0.0)
    assert measure(config()) is None
    assert measure(config(batch_size=3)) is None
    why = "time_budget is too short for one more trial"
    assert console.stream.getvalue() == f"Note: the step could not be tried ({why}); the plan is a guess\n"


def test_each_size_is_tried_once(monkeypatch):
    monkeypatch.setattr(trials, "measure_step", Mock(return_value=StepCost(0.5, 0.01, 7)))
    measure = probe()
    for size in (2, 2, 4):
        assert measure(config(batch_size=size)).memory == 7
    assert trials.measure_step.call_count == 2
