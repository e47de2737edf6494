"""What may change between two starts of a run, what must not, and what is told."""

from dataclasses import replace

import pytest

from helpers.small_runs import make_run, said
from helpers.steps import make_settings, small_components
from train_unet import train_one_epoch
from unet_trainer.config.errors import CheckpointError
from unet_trainer.config.load import load_config
from unet_trainer.config.resolved_config import Setting
from unet_trainer.config.schema import as_dict
from unet_trainer.training.resume import (
    adapt_to_changes,
    compare_configs,
    compare_splits,
    keep_reasons,
    longer,
    say_resumed,
)
from unet_trainer.training.step import TrainStep


def compare(before, now):
    """Two starts with settings that leave nothing open."""
    before, now = as_dict(load_config(before)), as_dict(load_config(now))
    return compare_configs(before, now, now)


@pytest.mark.parametrize("change", [{"loss": "dice"}, {"class_weights": [2.0]}])
def test_another_loss_is_refused_only_where_the_loss_is_monitored(change):
    (name,) = change
    assert [line.partition(":")[0] for line in compare({}, change)] == [name]
    with pytest.raises(CheckpointError, match=rf"{name}: .* in the checkpoint, "):
        compare({"monitor": "val_loss"}, {"monitor": "val_loss", **change})


@pytest.mark.parametrize(
    ("budget", "setting"), [("10m", "time_budget=20m"), ("31s", "time_budget=2m"), (None, "num_epochs=8")]
)
def test_twice_as_long_is_twice_the_time_in_whole_minutes_or_twice_the_epochs(budget, setting):
    assert longer(replace(make_settings(num_epochs=4).taken, time_budget=budget)) == setting


def test_changes_that_make_the_result_meaningless_are_refused_all_at_once():
    before = {"num_classes": 1, "mask_values": [0, 1], "ignore_value": 255, "encoder": "resnet34"}
    now = {
        "num_classes": 3,
        "mask_values": [0, 1, 2],
        "ignore_value": None,
        "encoder": "resnet18",
        "learning_rate": 0.5,
    }
    now |= {"unknown_values": "ignore", "mask_tolerance": 40}
    with pytest.raises(CheckpointError) as caught:
        compare(before, now)
    title, *lines, todo = str(caught.value).splitlines()
    assert title == "cannot go on with other settings than the run began with:"
    assert todo == "  Keep them, or start a new run"
    assert "  num_classes: 1 in the checkpoint, 3 now" in lines
    keys = {line.split(":")[0].strip() for line in lines}
    assert keys == {"num_classes", "mask_values", "ignore_value", "unknown_values", "mask_tolerance", "encoder"}


def test_harmless_changes_are_told_and_those_that_do_not_affect_the_result_are_not():
    changes = {"learning_rate": 0.5, "num_workers": 3, "checkpoint_dir": "elsewhere", "on_oom": "shrink"}
    assert compare({"learning_rate": 0.001}, changes) == ["learning_rate: 0.001 → 0.5"]


def test_a_value_that_was_decided_then_and_is_decided_again_has_not_changed():
    before, now = make_settings(), make_settings()
    assert before.requested.in_channels == "auto"
    assert compare_configs(before.repeatable_dict(), now.repeatable_dict(), as_dict(now.requested)) == []


# What is open at the resume as well


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"train": ["a", "c"], "val": ["b"]}, "images of val differ: 2, e.g. b"),
        ({"train": ["a", "b"], "val": ["c", "d"]}, "images of val differ: 1, e.g. d"),
        ({"train": ["a", "b", "e"], "val": ["c"]}, "images of train differ: 1, e.g. e"),
    ],
)
def test_another_split_is_refused_by_example(now, problem):
    message = rf"cannot go on with another data split: {problem} \(data_dir, val_fraction"
    with pytest.raises(CheckpointError, match=message):
        compare_splits({"train": ["a", "b"], "val": ["c"]}, now)


def test_a_setting_that_is_as_the_run_began_keeps_its_source_and_reason():
    """A run is resumed with its own config.yaml: all of it would else come from a file."""
    began = make_settings(num_epochs=50, seed=7)
    began.change("what memory has room for", batch_size=4)
    resumed = make_settings(batch_size=4, num_epochs=60, seed=7)
    decisions = began.sources_and_reasons() | {"of_another_version": ["file", ""]}
    keep_reasons(resumed, began.repeatable_dict(), decisions)
    assert resumed["batch_size"] == Setting(4, "decided", "what memory has room for")
    assert resumed["num_epochs"].source == "config"  # another value: the source of this start
    assert "of_another_version" not in resumed.explained()
    assert "# decided: what memory has room for" in resumed.to_yaml("")


BEFORE = make_settings().repeatable_dict()


@pytest.fixture
def state():
    """In its third epoch."""
    made = small_components().state
    made.epoch, made.batch = 2, 3
    return made


@pytest.mark.parametrize(
    ("name", "value", "batch"),
    [("batch_size", 4, 0), ("accumulation_steps", 2, 0), ("crops_per_image", 3, 0), ("learning_rate", 0.5, 3)],
)
def test_other_batches_restart_the_epoch(name, value, batch, state, console):
    adapt_to_changes(make_settings(**{name: value}).taken, BEFORE, state, console)
    assert state.batch == batch
    expected = "" if batch else f"Note: epoch 3 begins anew, because {name} changed\n"
    assert console.stream.getvalue() == expected


@pytest.mark.parametrize(("scheduler", "how"), [("cosine", "now spans 50 epochs instead of 20"), ("constant", "stays")])
def test_another_number_of_epochs_is_told_with_what_it_does_to_the_schedule(scheduler, how, console):
    settings = make_settings(scheduler=scheduler, num_epochs=50, warmup_epochs=0)
    state = small_components(settings=settings).state
    say_resumed(settings.taken, {**BEFORE, "num_epochs": 20}, state, [], console)
    said = console.stream.getvalue()
    assert f"Note: the {scheduler} schedule {how}; the learning rate continues at 1.00e-03\n" in said


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_rate_that_a_resume_within_the_warm_up_prints_is_the_one_it_trains_with(
    accumulation_steps, tiny_data, tmp_path, monkeypatch
):
    """5 batches an epoch, 2 epochs of warm-up; 2 batches are done."""
    run = make_run(tiny_data, tmp_path / "run", num_epochs=4, warmup_epochs=2, accumulation_steps=accumulation_steps)
    run.state.batch = 2
    before = {**run.settings.repeatable_dict(), "num_epochs": 3}
    say_resumed(run.config, before, run.state, [], run.console)
    rates = []
    take = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda self, *of: rates.append(of[1]) or take(self, *of))
    train_one_epoch(run)
    used = rates[0]
    num_done, num_warmup_steps = 2 // accumulation_steps, 2 * -(-5 // accumulation_steps)
    assert used == pytest.approx(run.config.learning_rate * (num_done + 1) / num_warmup_steps)
    assert f"; the learning rate continues at {used:.2e}\n" in said(run)
