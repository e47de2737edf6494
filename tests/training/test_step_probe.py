"""The cost of a step, measured in a process of its own: real ones, children that die, hang or talk nonsense, and what is kept."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import time

import pytest
import torch

from helpers.steps import CPU_FACTS, make_settings
from unet_trainer.config.dump import as_dict
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.training import step_probe
from unet_trainer.training.step_probe import COST_KEYS, StepProbe, measure_step

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
            started.append(popen([sys.executable, "-c", script], **options))
            return started[-1]

        monkeypatch.setattr(step_probe.subprocess, "Popen", start)
        return started

    return replace_by


def probe(cache=None):
    return StepProbe(RGB_8BIT, CPU_FACTS, cache)


# Real steps


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
        (RGB_8BIT, {"deep_supervision": 0.5, "decoder_attention": "scse", "ema_decay": 0.9, "decoder_channels": [16] * 5}),
        (ImageSpec(5, "uint16", (9.0,) * 5, (2.0,) * 5, low=0.0, high=99.0), {"num_classes": 3, "batch_size": 4, "batch_parts": 2}),
        (RGB_8BIT, {"freeze_encoder_epochs": 1, "accumulation_steps": 4, "grad_clip": 1.0}),
    ],
    ids=["heads and average", "deep images in parts", "frozen at first"],
)
def test_every_kind_of_step_can_be_measured(image, changes):
    cost = measure_step(make_settings(image, **changes).taken, image)
    assert cost.seconds > 0
    assert cost.eval_seconds > 0


def test_weights_are_neither_fetched_nor_loaded_for_a_trial(monkeypatch):
    monkeypatch.setattr("unet_trainer.model.network.offline", lambda: pytest.fail("loaded weights"))
    assert measure_step(config(encoder_weights="imagenet"), RGB_8BIT).seconds > 0


def test_a_step_that_fails_raises_for_the_child_to_tell(monkeypatch):
    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("unet_trainer.training.step.TrainStep.__call__", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        measure_step(config(), RGB_8BIT)


# Children that fail


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("raise SystemExit(1)", "the process of the trial ended"),
        ("import os, sys; sys.stdin.readline(); os._exit(9)", "the process of the trial ended"),
        ("import os, sys; sys.stdin.readline(); os.write(1, b'{\"seconds\"'); os._exit(9)", "the process of the trial ended"),
        ("import sys; sys.stdin.readline(); print('what?', flush=True)", "Expecting value"),
        ("import sys; sys.stdin.readline(); print('[1, 2]', flush=True)", "no answer"),
        ("import sys; sys.stdin.readline(); print('{}', flush=True)", "no answer"),
        ("import sys; sys.stdin.readline(); print('{\"hello\": 1}', flush=True)", "no answer"),
        (ANSWER.replace("0.5", "'soon'"), "no answer"),
        (ANSWER.replace("0.5", "float('nan')"), "no answer"),
        (ANSWER.replace("0.5", "0"), "no answer"),
        (ANSWER.replace("0.01", "-1"), "no answer"),
        ('import sys; sys.stdin.readline(); print(\'{"failure": "out of memory"}\', flush=True)', "out of memory"),
    ],
    ids=[
        *(
            "ends at once",
            "dies",
            "dies within its answer",
            "no JSON",
            "a list",
            "nothing",
            "another answer",
            "text",
            "NaN",
            "no time",
        ),
        *("less than no time", "a failure"),
    ],
)
def test_a_child_that_does_not_answer_costs_the_figure_alone(script, failure, child, tmp_path):
    child(script)
    cache = tmp_path / "step_costs.json"
    with probe(cache) as measure:
        assert measure(config()) is None
        assert measure.failure.startswith(failure) or "Broken pipe" in measure.failure
        assert not measure.knows(config())
    assert not cache.exists()


def test_a_step_that_memory_does_not_hold_is_told_from_one_that_fails(child, tmp_path):
    cache = tmp_path / "step_costs.json"
    answer = {"failure": "OutOfMemoryError: CUDA out of memory", "out_of_memory": True}
    child(f"import json, sys\nfor line in sys.stdin: print(json.dumps({answer!r}), flush=True)")
    with probe(cache) as measure:
        assert measure(config()) == TOO_LARGE
        assert measure.failure == "OutOfMemoryError: CUDA out of memory"
    assert not cache.exists()  # there may be more memory the next time


def test_the_child_tells_memory_from_other_failures(monkeypatch, capfd):
    errors = [torch.OutOfMemoryError("CUDA out of memory\nand more"), ValueError("shapes do not match")]

    def fail(*arguments):
        raise errors.pop(0)

    monkeypatch.setattr(step_probe, "measure_step", fail)
    request = json.dumps({"config": as_dict(config()), "image": RGB_8BIT.to_dict()}) + "\n"
    monkeypatch.setattr(step_probe.sys, "stdin", io.StringIO(request * 2))
    monkeypatch.setattr(step_probe.os, "dup2", lambda *descriptors: None)  # the output of this process stays as it is
    step_probe.main()
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert answers == [
        {"failure": "OutOfMemoryError: CUDA out of memory", "out_of_memory": True},
        {"failure": "ValueError: shapes do not match", "out_of_memory": False},
    ]


def test_a_child_that_hangs_is_ended(child, monkeypatch):
    monkeypatch.setattr(step_probe, "ANSWER_SECONDS", 0.2)
    started = child("import time; time.sleep(1000)")
    with probe() as measure:
        assert measure(config()) is None
        assert measure.failure == "it took too long"
        assert started[0].returncode is not None


def test_a_step_that_is_compiled_has_more_time(child, monkeypatch):
    monkeypatch.setattr(step_probe, "ANSWER_SECONDS", -1.0)  # no time at all
    child(ANSWER)
    with probe() as measure:
        assert measure(config()) is None
        assert measure(config(compile_model=True)) == StepCost(**COST)


def test_all_trials_together_take_no_more_than_their_time(child):
    started = child(ANSWER)
    with StepProbe(RGB_8BIT, CPU_FACTS, seconds=1000.0) as measure:
        assert measure(config()) == StepCost(**COST)
        assert 0.0 < measure.seconds_left < 1000.0
        measure.seconds_left = -1.0
        assert measure(config(batch_size=4)) is None
        assert measure.failure == "time_budget is too short for a trial"
        assert measure(config()) == StepCost(**COST)  # known
    with StepProbe(RGB_8BIT, CPU_FACTS, seconds=0.0) as measure:
        assert measure(config()) is None
    assert len(started) == 1


def test_a_trial_that_takes_longer_than_there_is_time_for_is_ended(child):
    started = child("import time; time.sleep(1000)")
    with StepProbe(RGB_8BIT, CPU_FACTS, seconds=0.2) as measure:
        assert measure(config()) is None
        assert measure.failure == "it took too long"
        assert started[0].returncode is not None
        assert measure(config()) is None
        assert measure.failure == "time_budget is too short for a trial"
    assert len(started) == 1


def test_after_a_child_that_died_another_one_is_started(child):
    started = child("import sys; sys.stdin.readline()")
    with probe() as measure:
        assert measure(config()) is None
        child(ANSWER)
        assert measure(config()) == StepCost(**COST)
    assert len(started) == 2


def test_a_child_that_cannot_be_started_costs_the_figure_alone(monkeypatch):
    def fail(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(step_probe.subprocess, "Popen", fail)
    with probe() as measure:
        assert measure(config()) is None
        assert "Cannot allocate memory" in measure.failure


def test_the_child_ends_with_the_probe_and_after_an_error_too(child):
    started = child(ANSWER)

    def interrupted():
        with probe() as measure:
            measure(config())
            assert started[0].poll() is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].poll() is not None


def test_without_a_question_no_child_is_started(child):
    started = child(ANSWER)
    with probe():
        pass
    assert started == []


def test_one_child_answers_several_questions(child):
    started = child(ANSWER)
    with probe() as measure:
        for batch_size in (1, 2, 3):
            assert measure(config(batch_size=batch_size)) == StepCost(**COST)
    assert len(started) == 1


# What is kept


def test_a_cost_is_found_again_by_a_later_run(child, tmp_path):
    cache = tmp_path / "deep" / "step_costs.json"
    started = child(ANSWER)
    with probe(cache) as measure:
        assert not measure.knows(config())
        assert measure(config()) == StepCost(**COST)
    with probe(cache) as measure:
        assert measure.knows(config())
        assert measure(config()) == StepCost(**COST)
        assert measure(config(batch_size=4)) == StepCost(**COST)
    assert len(started) == 2
    assert len(json.loads(cache.read_text())) == 2


def test_a_cost_is_that_of_one_step_on_one_machine(child, tmp_path):
    cache = tmp_path / "step_costs.json"
    child(ANSWER)
    with probe(cache) as measure:
        measure(config())
        known = [config(learning_rate=0.5), config(num_epochs=3), config(data_dir="elsewhere"), config(seed=7)]
        assert all(measure.knows(same) for same in known)
        others = [{"batch_size": 4}, {"image_size": 64}, {"num_classes": 3}, {"encoder": "resnet18"}, {"optimizer": "sgd"}]
        others += [{"use_amp": True}, {"deep_supervision": 0.5}, {"decoder_channels": [16] * 5}, {"ema_decay": 0.9}]
        assert not any(measure.knows(config(**changes)) for changes in others)
    for change in ({"name": "another CPU"}, {"num_cores": 3}, {"device": "cuda:0"}):
        assert not StepProbe(RGB_8BIT, dataclasses.replace(CPU_FACTS, **change), cache).knows(config())
    deep = ImageSpec(3, "uint16", (1.0,) * 3, (1.0,) * 3, low=0.0, high=9.0)
    assert not StepProbe(deep, CPU_FACTS, cache).knows(config())


def test_every_setting_that_a_cost_depends_on_exists():
    assert set(COST_KEYS) <= {field.name for field in dataclasses.fields(config())}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-10],
        lambda text: "[1]",
        lambda text: "\x00\ud7ff",
        lambda text: text.replace("0.5", '"soon"'),
        lambda text: text.replace("0.5", "NaN"),
        lambda text: text.replace("eval_seconds", "eval"),
        lambda text: json.dumps(dict.fromkeys(json.loads(text), 3)),
    ],
    ids=["empty", "cut", "a list", "no JSON", "text", "NaN", "other names", "numbers"],
)
def test_a_damaged_file_of_costs_is_ignored_and_written_anew(damage, child, tmp_path):
    cache = tmp_path / "step_costs.json"
    child(ANSWER)
    with probe(cache) as measure:
        measure(config())
    written = cache.read_text()
    cache.write_text(damage(written), encoding="utf-8")
    with probe(cache) as measure:
        assert not measure.knows(config())
        assert measure(config()) == StepCost(**COST)
    assert json.loads(cache.read_text()).keys() == json.loads(written).keys()


def test_a_cost_is_measured_again_a_day_after_it_was_measured(child, tmp_path, monkeypatch):
    """The machine may have been busy. What other runs measure meanwhile does not renew it."""
    cache, now = tmp_path / "step_costs.json", time.time()
    child(ANSWER)
    for hours, batch_size in ((0, 2), (12, 4), (23, 6)):
        monkeypatch.setattr(step_probe.time, "time", lambda hours=hours: now + 3600 * hours)
        with probe(cache) as measure:
            assert measure(config(batch_size=batch_size)) == StepCost(**COST)
            assert measure.knows(config(batch_size=2))
    monkeypatch.setattr(step_probe.time, "time", lambda: now + 3600 * 25)
    assert [probe(cache).knows(config(batch_size=size)) for size in (2, 4, 6)] == [False, True, True]
    monkeypatch.setattr(step_probe.time, "time", lambda: now - 3600 * 25)  # the clock was wrong before
    assert not any(probe(cache).knows(config(batch_size=size)) for size in (2, 4, 6))


def test_a_file_of_costs_that_is_not_text_is_ignored(tmp_path):
    cache = tmp_path / "step_costs.json"
    cache.write_bytes(b"\xff\xfe")
    assert not probe(cache).knows(config())
    assert not probe(tmp_path).knows(config())  # a folder
    assert not probe(None).knows(config())


def test_a_folder_that_cannot_be_written_to_costs_the_file_alone(child, tmp_path):
    (tmp_path / "file").write_text("in the way")
    child(ANSWER)
    with probe(tmp_path / "file" / "step_costs.json") as measure:
        assert measure(config()) == StepCost(**COST)
        assert measure.knows(config())
