"""The state of training: all of it is restored, on one process and on several; the metrics of an epoch; early stopping."""

import copy
import functools
import math
import operator

import pytest
import torch

from helpers.small_runs import ROW
from helpers.steps import CPU, make_batch, same, small_components, take_step
from unet_trainer.model.optimizer_and_schedule import LearningRate
from unet_trainer.training.checkpoint_file import ILL_FORMED, read_last, write_checkpoint
from unet_trainer.training.state import EarlyStopping, EpochMetrics, counts_against_patience


def step(components, seed):
    take_step(components.train_step, make_batch(2, seed, side=32), metrics=components.state.metrics)


@pytest.fixture
def components():
    """After two steps and an epoch."""
    made = small_components(ema_decay=0.9)
    for seed in range(2):
        step(made, seed)
    state = made.state
    state.epoch, state.batch, state.history = 1, 2, [dict(ROW)]
    state.seconds, state.train_seconds, state.wait_seconds = 10.0, 5.0, 1.0
    state.learning_rate.num_drops, state.per_class_iou = 1, [0.25]
    state.confusion = [[5, 2**40], [1, 2]]  # more pixels than 32 bits count
    state.early_stopping.update(0.5, 1)
    return made


def through_a_file(state, folder, **more):
    write_checkpoint(
        folder / "last.pt",
        {"config": {}, "decisions": {}, "split": {"train": [], "val": []}, **state.state_dict(), **more},
    )
    return read_last(folder / "last.pt")


def test_ema_switched_on_at_resume_begins_with_the_weights(tmp_path):
    components, other = small_components(), small_components(ema_decay=0.9)
    step(components, seed=0)
    other.state.load_state_dict(through_a_file(components.state, tmp_path))
    assert same(other.state.ema.segmenter.state_dict().values(), components.state.segmenter.state_dict().values())
    assert other.state.ema.num_updates == 0


def test_the_scale_of_the_scaler_is_restored_and_its_settings_are_those_of_this_start(tmp_path):
    state = small_components().state
    state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    state.scaler.scale(torch.ones(()))
    content = through_a_file(state, tmp_path)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=100, backoff_factor=0.25)
    state.load_state_dict(content)
    assert (state.scaler.get_scale(), state.scaler.get_growth_interval(), state.scaler.get_backoff_factor()) == (
        128.0,
        100,
        0.25,
    )


def test_one_bad_loss_does_not_spoil_the_mean_of_the_epoch():
    metrics = EpochMetrics(1, CPU)
    for loss, num_images in ((2.0, 4), (math.inf, 4), (math.nan, 2), (5.0, 2)):
        counts = [[5, 1], [1, 2]] if math.isfinite(loss) else [[0, 9], [9, 0]]
        metrics.add(torch.tensor(loss), torch.tensor(counts), num_images)
        metrics.num_images += num_images
    assert metrics.matrix.tolist() == [[10, 2], [2, 4]]
    assert metrics.loss() == pytest.approx((2.0 * 4 + 5.0 * 2) / 6)


# A file whose digest is right may still hold something else.


@pytest.fixture(scope="module")
def content():
    """A state as a run saves it, after an epoch."""
    state = small_components(ema_decay=0.9).state
    state.epoch, state.history, state.per_class_iou, state.confusion = 1, [dict(ROW)], [0.5], [[1, 2], [3, 4]]
    state.early_stopping.update(0.5, 1)
    return copy.deepcopy(state.state_dict())


def places(value, path=()):
    """The path of every value in nested dicts and lists; of lists and dicts with many alike, the first two."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[
        : None if path in ((), ("progress",), ("learning_rate",), ("totals",), ("history", 0)) else 2
    ]:
        yield from places(item, (*path, key))


def changed(content, path, change):
    """With `change` applied to the container of the last key; containers on the way there are copies."""
    made = place = copy.copy(content)
    for key in path[:-1]:
        place[key] = copy.copy(place[key])
        place = place[key]
    change(place, path[-1])
    return made


def other_values(value):
    """Of other types, and numbers that no run comes to. A whole number may stand for a float."""
    others = [
        None,
        "text",
        [],
        {},
        -1,
        2**60,
        0.5,
        True,
        torch.zeros(3),
        torch.zeros(2, 2, dtype=torch.int64),
        [None],
        {"a": None},
    ]
    return [
        other
        for other in others
        if (type(other) is not type(value) and (type(value), type(other)) != (float, int))
        or (isinstance(value, dict | list) and value and not other)
    ]


def test_every_field_that_is_missing_or_of_another_kind_is_refused_or_does_no_harm(content):
    """What is accepted are numbers that could be, and settings that are not loaded."""
    components = small_components(ema_decay=0.9)
    components.state.load_state_dict(copy.deepcopy(content))
    num_refused = num_tried = 0
    accepted = set()
    for path in filter(None, places(content)):
        value = functools.reduce(operator.getitem, path, content)
        changes = [
            lambda place, key: place.pop(key),
            *(lambda place, key, other=other: place.__setitem__(key, other) for other in other_values(value)),
        ]
        for change in changes:
            num_tried += 1
            try:
                components.state.load_state_dict(changed(content, path, change))
            except ILL_FORMED:
                num_refused += 1
            else:
                accepted.add(path[0])
    assert num_tried > 500
    assert num_refused > 0.8 * num_tried, (num_refused, num_tried)
    assert not accepted & {"model", "epoch", "batch", "random_state", "totals"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("epoch",), -1, "^epoch is not what a run with these settings saves$"),
        (("epoch",), 2, r"history has 1 rows for 2 epochs"),
        (("history", 0, "val_iou"), None, r"^history\.val_iou is not what"),
        (("progress", "best_epoch"), 3, r"1 epochs, the best of which is 3"),
        (("model",), {}, "^model is not what a run with these settings saves; was timm or"),
        (("model", "encoder.0.bias"), torch.zeros(3), r"^model\.encoder\.0\.bias is not what"),
        (("confusion",), [[1]], "^confusion is not what"),
    ],
)
def test_what_does_not_fit_is_named(path, value, message, content):
    with pytest.raises(ValueError, match=message):
        small_components().state.load_state_dict(
            changed(content, path, lambda place, key: place.__setitem__(key, value))
        )


# Several ranks


# Early stopping


def follow(stopping, values):
    """Feeds an epoch's value at a time; returns which were the best so far."""
    return [stopping.update(value, epoch) for epoch, value in enumerate(values, start=1)]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_nan_is_never_better(higher_is_better):
    stopping = EarlyStopping(higher_is_better)
    assert follow(stopping, [0.5, math.nan, math.nan]) == [True, False, False]
    assert (stopping.best_value, stopping.best_epoch, stopping.epochs_since_best) == (0.5, 1, 2)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_ends_after_exactly_that_many_epochs_without_improvement(patience):
    stopping = EarlyStopping(higher_is_better=True)
    stopping.update(0.5, 1)
    stopping.update(0.7, 2)
    stopped = [
        epoch for epoch in range(3, 10) if not stopping.update(0.6, epoch) and stopping.patience_used >= patience
    ]
    assert stopped[0] == 2 + patience


def test_a_small_improvement_is_kept_as_best_but_does_not_reset_the_patience():
    stopping = EarlyStopping(higher_is_better=True, min_delta=0.25)
    assert follow(stopping, [0.5, 0.5625, 0.625]) == [True, True, True]
    assert (stopping.best_value, stopping.best_epoch) == (0.625, 3)
    assert stopping.epochs_since_best == 2


# Which epochs count

FALLING = [1 / (1 + index) for index in range(50)]
FLAT = [1.0] * 50


def counting_epochs(train_losses, scheduler, num_epochs=10, warmup_epochs=0.0, freeze_encoder_epochs=0):
    """From epoch 2 on: the first is an improvement."""
    rate = LearningRate(0.1, scheduler, num_epochs, steps_per_epoch=10, num_warmup_steps=round(10 * warmup_epochs))
    return [
        epoch
        for epoch in range(2, num_epochs + 1)
        if counts_against_patience(epoch, rate, freeze_encoder_epochs, train_losses[:epoch])
    ]


@pytest.mark.parametrize(("warmup", "frozen", "first"), [(0, 0, 2), (1.5, 0, 3), (0, 4, 5), (1, 3, 4), (3, 1, 4)])
def test_epochs_count_once_the_warm_up_is_over_and_the_encoder_trains(warmup, frozen, first):
    found = counting_epochs(FLAT, "cosine", warmup_epochs=warmup, freeze_encoder_epochs=frozen)
    assert found == list(range(first, 11))


@pytest.mark.parametrize(
    ("scheduler", "first"),
    [
        ("constant", 2),
        ("plateau", 2),
        ("cosine", 6),  # half of the peak after 50 of 100 steps; the last step of epoch 5 is step 49, counted from 0
        ("poly", 6),  # (1 - 0.49) ** 0.9 = 0.546 and (1 - 0.59) ** 0.9 = 0.448
    ],
)
def test_while_training_improves_epochs_count_once_the_planned_rate_is_below_half_of_its_peak(scheduler, first):
    assert counting_epochs(FALLING, scheduler) == list(range(first, 11))
