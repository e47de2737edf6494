"""The cost of a step, measured in a process of its own: real ones, children that die, hang or talk nonsense, and what is kept."""

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import pytest

from helpers.steps import CPU_FACTS, make_settings
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.training import step_probe
from unet_trainer.training.extension import CustomParts
from unet_trainer.training.step_probe import StepProbe, measure_step

DEEP = ImageSpec(5, "uint16", (9.0,) * 5, (2.0,) * 5, 0.0, 99.0)
COST = {"seconds": 0.5, "eval_seconds": 0.01, "memory": 7}
ANSWER = f"import json, sys\nfor line in sys.stdin: print(json.dumps({COST!r}), flush=True)"


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(step_probe, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(step_probe, "MAX_STEPS", 2)


def config(**changes):
    return make_settings(**changes).taken


@pytest.fixture
def child(monkeypatch):
    """Replaces the child by a script; returns the processes that were started."""
    started = []
    popen = step_probe.subprocess.Popen

    def replace_by(script):
        def start(command, **options):
            assert command[1:] == ["-m", "unet_trainer.training.step_probe"]
            assert options["env"]["UNET_TRAINER_PARENT"] == str(os.getpid())  # it ends with this process
            started.append(popen([sys.executable, "-c", script], **options))
            return started[-1]

        monkeypatch.setattr(step_probe.subprocess, "Popen", start)
        return started

    return replace_by


@contextlib.contextmanager
def probe(cache=None, **options):
    with contextlib.closing(StepProbe(CPU_FACTS, cache, **options)) as made:
        made.image_spec = RGB_8BIT
        yield made


def test_a_step_is_measured_in_a_process_of_its_own(tmp_path):
    cache = tmp_path / "cache" / "step_costs.json"
    with probe(cache) as measure:
        cost = measure(config())
        assert (measure.failure, measure._child.poll()) == ("", None)
        assert measure._child.pid != os.getpid()
        child = measure._child
        refused = measure(config(architecture="pan", encoder="densenet121", decoder_channels=None))
        assert refused is None
        assert measure.failure.startswith("ConfigError: architecture: pan does not go with encoder: densenet121")
        assert measure._child is child  # which goes on
    assert cost.seconds > 0
    assert cost.eval_seconds > 0
    assert cost.memory == 0
    assert child.poll() is not None
    assert len(json.loads(cache.read_text())) == 1  # a failure is tried again


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


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit(1)",
        "import os, sys; sys.stdin.readline(); os.write(1, b'{\"seconds\"'); os._exit(9)",
        "import sys; sys.stdin.readline(); print('what?', flush=True)",
    ],
    ids=["ends at once", "dies within its answer", "no JSON"],
)
def test_where_the_child_does_not_answer_this_process_takes_the_step(script, child):
    child(script)
    with probe() as measure:
        assert measure(config()).seconds > 0
        assert (measure.failure, measure.knows(config()), measure._child) == ("", True, None)


def test_in_a_short_time_and_with_a_loss_of_the_callers_own_this_process_takes_the_step(child):
    started = child(ANSWER)
    with probe(seconds=9.0) as measure:
        measure.start()
        assert measure(config()).seconds > 0
        measure.has_child = True
        measure.custom = CustomParts(loss=lambda logits, masks: logits.square().mean())
        assert measure(config(loss={"own": 1.0})).eval_seconds > 0
        assert not measure.knows(config(loss={"own": 1.0}))  # the next caller has another one
    assert started == []


@pytest.mark.parametrize(("out_of_memory", "cost"), [(True, TOO_LARGE), (False, None)])
def test_a_step_that_memory_does_not_hold_is_told_from_one_that_fails(out_of_memory, cost, child, tmp_path):
    cache, answer = tmp_path / "step_costs.json", {"failure": "a reason", "out_of_memory": out_of_memory}
    child(f"import json, sys\nfor line in sys.stdin: print(json.dumps({answer!r}), flush=True)")
    with probe(cache) as measure:
        assert measure(config()) == cost
        assert (measure.failure, measure.knows(config())) == ("a reason", False)
    assert not cache.exists()  # there may be more memory the next time


def test_why_no_step_is_tried_is_said_once():
    said = []
    with probe(seconds=0.0) as measure:
        measure.console = SimpleNamespace(note=said.append)
        assert measure(config()) is None
        assert measure(config(batch_size=3)) is None
    assert said == ["the step could not be tried (time_budget is too short for one more trial); the plan is a guess"]


def test_a_cost_is_found_again_by_a_later_run(child, tmp_path):
    cache = tmp_path / "deep" / "step_costs.json"
    started = child(ANSWER)
    for was_known in (False, True):
        with probe(cache) as measure:
            measure.start()  # ahead, where no cost is known
            assert measure.knows(config()) is was_known
            assert measure(config()) == StepCost(**COST)
            assert len(started) == 1
    with probe(cache) as measure:
        assert measure(config(batch_size=4)) == StepCost(**COST)
    assert len(started) == 2
    assert len(json.loads(cache.read_text())) == 2
