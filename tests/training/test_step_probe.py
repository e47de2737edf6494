"""The cost of a step: real ones, such as memory does not hold, and what is kept."""

import json
from types import SimpleNamespace

import pytest
import torch

from helpers.steps import CPU_FACTS, make_settings
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.training import step_probe
from unet_trainer.training.extension import CustomParts
from unet_trainer.training.step_probe import StepProbe, measure_step

DEEP = ImageSpec(5, "uint16", (9.0,) * 5, (2.0,) * 5, 0.0, 99.0)
COST = StepCost(0.5, 0.01, 7)


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(step_probe, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(step_probe, "MAX_STEPS", 2)


def config(**changes):
    return make_settings(**changes).taken


def probe(cache=None, **options):
    made = StepProbe(CPU_FACTS, cache, **options)
    made.image_spec = RGB_8BIT
    return made


def test_a_trial_changes_no_random_number_and_a_failure_is_tried_again(tmp_path):
    cache = tmp_path / "cache" / "step_costs.json"
    measure, state = probe(cache), torch.get_rng_state()
    cost = measure(config())
    assert min(cost.seconds, cost.eval_seconds) > 0
    assert (cost.memory, measure.failure) == (0, "")
    assert measure(config(architecture="pan", encoder="densenet121", decoder_channels=None)) is None
    assert measure.failure.startswith("ConfigError: architecture: pan does not go with encoder: densenet121")
    assert torch.equal(torch.get_rng_state(), state)
    assert len(json.loads(cache.read_text())) == 1


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


def test_the_cost_of_a_loss_of_the_callers_own_is_not_kept():
    measure = probe(seconds=9.0)
    measure.custom = CustomParts(loss=lambda logits, masks: logits.square().mean())
    assert measure(config(loss={"own": 1.0})).eval_seconds > 0
    assert not measure.knows(config(loss={"own": 1.0}))  # the next caller has another one


@pytest.mark.parametrize(
    ("error", "cost"), [(torch.OutOfMemoryError("a reason"), TOO_LARGE), (ValueError("a reason"), None)]
)
def test_a_step_that_memory_does_not_hold_is_told_from_one_that_fails(error, cost, monkeypatch, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setattr(step_probe, "measure_step", fail)
    measure = probe(tmp_path / "step_costs.json")
    assert measure(config()) == cost
    assert measure.failure.endswith("a reason")
    assert not measure.knows(config())
    assert not (tmp_path / "step_costs.json").exists()  # there may be more memory the next time


def test_why_no_step_is_tried_is_said_once():
    said, measure = [], probe(seconds=0.0)
    measure.console = SimpleNamespace(note=said.append)
    assert measure(config()) is None
    assert measure(config(batch_size=3)) is None
    assert said == ["the step could not be tried (time_budget is too short for one more trial); the plan is a guess"]


def test_a_cost_is_found_again_by_a_later_run(monkeypatch, tmp_path):
    cache, tried = tmp_path / "deep" / "step_costs.json", []
    monkeypatch.setattr(step_probe, "measure_step", lambda config, *_: tried.append(config) or COST)
    for was_known in (False, True):
        measure = probe(cache)
        assert measure.knows(config()) is was_known
        assert measure(config()) == COST
        assert len(tried) == 1
    assert probe(cache)(config(batch_size=4)) == COST
    assert len(tried) == 2
    assert len(json.loads(cache.read_text())) == 2
