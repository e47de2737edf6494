"""What a resumed run is told, and what changed settings change in its state."""

from __future__ import annotations

import io

import pytest

from helpers.steps import make_settings, small_components
from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.runs.checkpoint_file import FORMAT
from unet_trainer.system.console import Console
from unet_trainer.training.resume_messages import adapt_to_changes, describe_position, longer, say_already_finished, say_resumed

BEFORE = make_settings().repeatable_dict()


@pytest.fixture
def state():
    """In its third epoch, after a rollback."""
    made = small_components().state
    made.epoch, made.batch = 2, 3
    made.learning_rate.factor, made.num_rollbacks = 0.1, 1
    return made


@pytest.fixture
def stream():
    return io.StringIO()


def test_a_position_is_an_epoch_or_a_batch_within_one(state):
    assert describe_position(state) == "batch 3 of epoch 3"
    state.restart_epoch()
    assert describe_position(state) == "epoch 2"
    state.epoch = 0
    assert describe_position(state) == "the start"


@pytest.mark.parametrize(
    ("change", "batch", "factor"),
    [
        ({}, 3, 0.1),
        ({"batch_size": 4}, 0, 0.1),
        ({"accumulation_steps": 2}, 0, 0.1),
        ({"crops_per_image": 3}, 0, 0.1),
        ({"learning_rate": 0.5}, 3, 1.0),
    ],
)
def test_other_batches_restart_the_epoch_and_another_rate_undoes_its_reduction(change, batch, factor, state, stream):
    adapt_to_changes(make_settings(**change).taken, BEFORE, state, Console(stream))
    assert (state.batch, state.learning_rate.factor, state.num_rollbacks) == (batch, factor, 0 if factor == 1 else 1)
    expected = "" if batch else f"Note: epoch 3 begins anew, because {next(iter(change))} changed\n"
    assert stream.getvalue() == expected


def test_an_epoch_that_has_not_begun_is_not_restarted(state, stream):
    state.restart_epoch()
    adapt_to_changes(make_settings(batch_size=4).taken, BEFORE, state, Console(stream))
    assert stream.getvalue() == ""


def test_two_changes_that_restart_the_epoch_are_both_named(state, stream):
    adapt_to_changes(make_settings(batch_size=4, accumulation_steps=2).taken, BEFORE, state, Console(stream))
    assert stream.getvalue() == "Note: epoch 3 begins anew, because batch_size and accumulation_steps changed\n"


def test_crops_that_an_earlier_version_left_open_have_not_changed(state, stream):
    adapt_to_changes(make_settings().taken, {**BEFORE, "crops_per_image": "auto"}, state, Console(stream))
    assert (state.batch, stream.getvalue()) == (3, "")


def test_the_position_the_changes_and_a_lowered_rate_are_told(state, stream):
    config = load_config({})
    say_resumed(config, as_dict(config), state, ["loss: dice → bce"], FORMAT, Console(stream))
    assert stream.getvalue() == (
        "Resuming after batch 3 of epoch 3\n"
        "Note: changed since then: loss: dice → bce\n"
        "Note: numbers were not finite earlier: the learning rate is 0.1 of what is planned\n"
    )


def test_the_best_epoch_so_far_is_told(state, stream):
    state.learning_rate.factor = 1.0
    state.early_stopping.update(0.625, 2)
    config = load_config({})
    say_resumed(config, as_dict(config), state, [], FORMAT, Console(stream))
    assert stream.getvalue() == "Resuming after batch 3 of epoch 3; best val_iou so far 0.6250 (epoch 2)\n"


@pytest.mark.parametrize(
    ("monitor", "checkpoint_format", "is_told"), [("val_loss", 2, True), ("val_loss", 3, False), ("val_iou", 2, False)]
)
def test_a_monitored_loss_that_earlier_versions_computed_otherwise_is_told(monitor, checkpoint_format, is_told, state, stream):
    config = load_config({"monitor": monitor})
    say_resumed(config, as_dict(config), state, [], checkpoint_format, Console(stream))
    assert ("val_loss was a mean over batches when this run began" in stream.getvalue()) == is_told


@pytest.mark.parametrize(("fit", "checkpoint_format", "is_told"), [("resize", 3, True), ("resize", 4, False), ("crop", 3, False)])
def test_an_iou_that_earlier_versions_measured_at_another_size_is_told(fit, checkpoint_format, is_told, state, stream):
    config = load_config({"fit": fit})
    say_resumed(config, as_dict(config), state, [], checkpoint_format, Console(stream))
    told = "Note: val_iou was measured at image_size when this run began and is at native resolution now; the two may differ\n"
    assert (told in stream.getvalue()) == is_told


@pytest.mark.parametrize(
    ("scheduler", "how"),
    [("cosine", "now spans 50 epochs instead of 20"), ("poly", "now spans 50 epochs instead of 20"), ("constant", "stays")],
)
def test_another_number_of_epochs_is_told_with_what_it_does_to_the_schedule(scheduler, how, stream):
    settings = make_settings(scheduler=scheduler, num_epochs=50, warmup_epochs=0)
    state = small_components(settings=settings).state
    say_resumed(settings.taken, {**BEFORE, "num_epochs": 20}, state, [], FORMAT, Console(stream))
    assert f"Note: the {scheduler} schedule {how}; the learning rate goes on at 1.00e-03\n" in stream.getvalue()


def test_a_run_that_is_finished_is_answered_with_the_way_to_train_on(state, stream):
    config = make_settings(num_epochs=2).taken
    say_already_finished(config, state, "python train_unet.py --resume a", Console(stream))
    assert stream.getvalue() == (
        "Note: this run had finished its 2 epochs; to train on: python train_unet.py --resume a num_epochs=4\n"
    )


def test_a_run_with_a_time_budget_trains_on_with_more_time():
    """num_epochs would contradict it."""
    config = make_settings(num_epochs="auto", time_budget="1h30m").taken
    assert longer(config) == "time_budget=180m"
    assert longer(make_settings(num_epochs=7).taken) == "num_epochs=14"


def test_a_run_that_stopped_early_is_answered_with_the_way_to_train_on(state, stream):
    say_already_finished(make_settings(num_epochs=9).taken, state, "python train_unet.py --resume a", Console(stream))
    assert stream.getvalue() == (
        "Note: this run had stopped early after epoch 2; to train on: "
        "python train_unet.py --resume a early_stopping_patience=null\n"
    )
