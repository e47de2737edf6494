"""Which epoch was best, which epochs count against the patience, when it runs out, and that NaN is never better."""

from __future__ import annotations

import math

import pytest

from unet_trainer.model.optimizer import LearningRate
from unet_trainer.training.early_stopping import EarlyStopping, counts_against_patience

NAN = math.nan


def follow(stopping, values):
    """Feeds an epoch's value at a time; returns which were the best so far."""
    return [stopping.update(value, epoch) for epoch, value in enumerate(values, start=1)]


def test_a_higher_iou_is_better():
    stopping = EarlyStopping(higher_is_better=True)
    assert follow(stopping, [0.5, 0.4, 0.6, 0.6]) == [True, False, True, False]
    assert (stopping.best_value, stopping.best_epoch, stopping.epochs_since_best) == (0.6, 3, 1)


def test_a_lower_loss_is_better():
    stopping = EarlyStopping(higher_is_better=False)
    assert follow(stopping, [0.5, 0.6, 0.4, 0.4]) == [True, False, True, False]
    assert (stopping.best_value, stopping.best_epoch) == (0.4, 3)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_nan_is_never_better(higher_is_better):
    stopping = EarlyStopping(higher_is_better)
    assert follow(stopping, [0.5, NAN, NAN]) == [True, False, False]
    assert (stopping.best_value, stopping.best_epoch, stopping.epochs_since_best) == (0.5, 1, 2)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_nan_as_the_first_value_is_not_best_and_the_next_number_is(higher_is_better):
    stopping = EarlyStopping(higher_is_better)
    assert follow(stopping, [NAN]) == [False]
    assert stopping.best_epoch == 0
    assert stopping.epochs_since_best == 1
    assert stopping.update(0.1, 2)
    assert (stopping.best_value, stopping.best_epoch, stopping.epochs_since_best) == (0.1, 2, 0)


def test_an_iou_of_0_is_better_than_none():
    assert follow(EarlyStopping(higher_is_better=True), [0.0]) == [True]


def test_nan_alone_runs_out_of_patience():
    stopping = EarlyStopping(higher_is_better=True)
    follow(stopping, [NAN, NAN, NAN])
    assert stopping.is_out_of_patience(3)
    assert stopping.best_epoch == 0


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_ends_after_exactly_that_many_epochs_without_improvement(patience):
    stopping = EarlyStopping(higher_is_better=True)
    stopping.update(0.5, 1)
    stopping.update(0.7, 2)
    stopped = [epoch for epoch in range(3, 10) if not stopping.update(0.6, epoch) and stopping.is_out_of_patience(patience)]
    assert stopped[0] == 2 + patience


def test_without_a_patience_training_never_stops_early():
    stopping = EarlyStopping(higher_is_better=True)
    follow(stopping, [0.5] + [0.1] * 1000)
    assert not stopping.is_out_of_patience(None)


def test_patience_is_not_over_before_the_first_epoch():
    assert not EarlyStopping(higher_is_better=True).is_out_of_patience(1)


def test_a_small_improvement_is_kept_as_best_but_does_not_reset_the_patience():
    stopping = EarlyStopping(higher_is_better=True, min_delta=0.25)
    assert follow(stopping, [0.5, 0.5625, 0.625]) == [True, True, True]
    assert (stopping.best_value, stopping.best_epoch) == (0.625, 3)
    assert stopping.epochs_since_best == 2


def test_small_improvements_add_up_to_one_that_counts():
    """The next value must beat the one that last counted, or a slow climb would be taken for a standstill."""
    stopping = EarlyStopping(higher_is_better=True, min_delta=0.25)
    follow(stopping, [0.5, 0.625, 0.75])  # 0.75 is min_delta above 0.5
    assert stopping.epochs_since_best == 0


def test_min_delta_counts_downwards_for_a_loss():
    stopping = EarlyStopping(higher_is_better=False, min_delta=0.25)
    assert follow(stopping, [1.0, 0.875, 0.75, 0.625]) == [True, True, True, True]
    assert (stopping.best_value, stopping.epochs_since_best) == (0.625, 1)


def test_an_equal_value_is_no_improvement_even_without_a_min_delta():
    stopping = EarlyStopping(higher_is_better=True)
    follow(stopping, [0.5, 0.5])
    assert (stopping.best_epoch, stopping.epochs_since_best) == (1, 1)


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_early_stopping_goes_on_from_its_state_as_if_never_stopped(cut):
    values = [NAN, 0.5, 0.55, 0.4, 0.8, 0.7, 0.9]
    whole = EarlyStopping(higher_is_better=True, min_delta=0.1)
    expected = follow(whole, values)
    first, second = (EarlyStopping(higher_is_better=True, min_delta=0.1) for _ in range(2))
    seen = [first.update(value, epoch) for epoch, value in enumerate(values[:cut], start=1)]
    second.load_state_dict(first.state_dict())
    seen += [second.update(value, epoch) for epoch, value in enumerate(values[cut:], start=cut + 1)]
    assert seen == expected
    assert second == whole


def test_the_state_holds_primitives_and_no_settings():
    """A resumed run takes min_delta and the direction from its config."""
    state = EarlyStopping(higher_is_better=True, min_delta=0.1).state_dict()
    assert set(state) == {"best_value", "best_epoch", "reference", "epochs_since_best", "patience_used"}
    assert all(isinstance(value, int | float) for value in state.values())


def test_epochs_that_do_not_count_leave_the_patience_as_it_is():
    stopping = EarlyStopping(higher_is_better=True)
    for epoch, (value, counts) in enumerate([(0.5, True), (0.4, False), (0.4, True), (0.4, False), (0.4, True)], start=1):
        stopping.update(value, epoch, counts)
    assert (stopping.epochs_since_best, stopping.patience_used) == (4, 2)
    assert stopping.is_out_of_patience(2)
    assert not stopping.is_out_of_patience(3)
    stopping.update(0.6, 6)
    assert (stopping.epochs_since_best, stopping.patience_used) == (0, 0)


def test_in_a_state_of_an_earlier_version_every_epoch_counted():
    stopping = EarlyStopping(higher_is_better=True)
    stopping.load_state_dict({"best_value": 0.5, "best_epoch": 1, "reference": 0.5, "epochs_since_best": 3})
    assert stopping.is_out_of_patience(3)
    assert not stopping.is_out_of_patience(4)


# Which epochs count

FALLING = [1 / (1 + index) for index in range(50)]
FLAT = [1.0] * 50


def counting_epochs(train_losses, scheduler, num_epochs=10, warmup_epochs=0.0, freeze_encoder_epochs=0):
    """From epoch 2 on: the first is an improvement."""
    rate = LearningRate(0.1, scheduler, num_epochs, steps_per_epoch=10, warmup_epochs=warmup_epochs)
    return [
        epoch
        for epoch in range(2, num_epochs + 1)
        if counts_against_patience(epoch, rate, freeze_encoder_epochs, train_losses[:epoch])
    ]


@pytest.mark.parametrize("scheduler", ["constant", "plateau", "cosine", "poly"])
@pytest.mark.parametrize(("warmup", "frozen", "first"), [(0, 0, 2), (2, 0, 3), (1.5, 0, 3), (0, 4, 5), (1, 3, 4), (3, 1, 4)])
def test_epochs_count_once_the_warm_up_is_over_and_the_encoder_trains(scheduler, warmup, frozen, first):
    found = counting_epochs(FLAT, scheduler, warmup_epochs=warmup, freeze_encoder_epochs=frozen)
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


def test_the_half_of_the_peak_is_reached_later_with_a_warm_up():
    assert counting_epochs(FALLING, "cosine", warmup_epochs=4)[0] == 8  # half of the 60 steps after it are over with epoch 7


def test_a_rate_that_was_lowered_after_a_rollback_is_still_high_by_plan():
    rate = LearningRate(0.1, "cosine", num_epochs=10, steps_per_epoch=10)
    rate.factor = 0.01
    assert not counts_against_patience(2, rate, 0, [1.0, 0.9])


def test_a_few_noisy_epochs_do_not_mean_that_training_has_stopped_improving():
    losses = [1.0, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.7, 0.9]
    assert counting_epochs(losses, "cosine", num_epochs=10)[0] == 6  # by the rate
    # The low of epoch 2 is one of the last five until epoch 6; that of epoch 9 counts again.
    assert [epoch for epoch in counting_epochs(losses, "cosine", num_epochs=50) if epoch <= 10] == [7, 8]


def test_losses_that_stay_as_they_are_are_no_improvement():
    assert counting_epochs([0.5, 0.5, 0.5], "cosine", num_epochs=3) == [2, 3]
