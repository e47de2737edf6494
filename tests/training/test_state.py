"""The state of training: all of it is restored, on one process and on several; the metrics of an epoch; early stopping."""

import copy
import math

import pytest
import torch

from helpers.small_runs import ROW
from helpers.steps import CPU, make_batch, same, small_components, take_step
from unet_trainer.model.optimizer_and_schedule import LearningRate
from unet_trainer.training.checkpoint import ILL_FORMED, read_last, write_checkpoint
from unet_trainer.training.state import EarlyStopping, EpochMetrics, counts_against_patience


def through_a_file(state, folder):
    about = {"config": {}, "decisions": {}, "split": {"train": [], "val": []}}
    write_checkpoint(folder / "last.pt", {**about, **state.state_dict()})
    return read_last(folder / "last.pt")


def test_ema_switched_on_at_resume_begins_with_the_weights(tmp_path):
    components, other = small_components(), small_components(ema_decay=0.9)
    take_step(components.train_step, make_batch(2, side=32))
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
    scaler = state.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_backoff_factor()) == (128.0, 100, 0.25)


def test_one_bad_loss_does_not_spoil_the_mean_of_the_epoch():
    metrics = EpochMetrics(1, CPU)
    for loss, num_images in ((2.0, 4), (math.inf, 4), (math.nan, 2), (5.0, 2)):
        counts = [[5, 1], [1, 2]] if math.isfinite(loss) else [[0, 9], [9, 0]]
        metrics.add(torch.tensor(loss), torch.tensor(counts), num_images)
        metrics.num_images += num_images
    assert metrics.matrix.tolist() == [[10, 2], [2, 4]]
    assert metrics.loss() == pytest.approx((2.0 * 4 + 5.0 * 2) / 6)


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("epoch",), 2, r"history has 1 rows for 2 epochs"),
        (("batch",), MISSING, "batch"),
        (("random_state",), torch.zeros(3), "RNG"),
        (("optimizer", "state"), [None], "items"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(3), "the optimizer's state is that of another model"),
        (("totals",), {"a": None}, "loss_sum"),
        (("learning_rate",), [None], "num_drops|indices"),
        (("ema", "model"), {}, "Missing key"),
        (("model",), {}, "Missing key.*; was timm or"),
        (("model", "encoder.0.bias"), torch.zeros(3), r"size mismatch for encoder\.0\.bias"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(path, value, message):
    """In a state as a run saves it after an epoch: a file that is whole may still hold something else."""
    components = small_components(ema_decay=0.9)
    take_step(components.train_step, make_batch(2, side=32))
    state = components.state
    state.epoch, state.history, state.per_class_iou, state.confusion = 1, [dict(ROW)], [0.5], [[1, 2], [3, 4]]
    state.early_stopping.update(0.5, 1)
    changed = place = copy.deepcopy(state.state_dict())
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ILL_FORMED, match=message):
        small_components(ema_decay=0.9).state.load_state_dict(changed)


@pytest.mark.parametrize(
    ("values", "is_best", "best", "epochs_since_best"),
    [
        ([0.5, math.nan, math.nan], [True, False, False], (0.5, 1), 2),
        ([0.5, 0.9, 0.8, 0.8], [True, True, False, False], (0.9, 2), 2),
        ([0.5, 0.5625, 0.625], [True, True, True], (0.625, 3), 2),  # kept as best, but too little to reset the patience
    ],
)
def test_patience_is_used_by_epochs_without_an_improvement_of_min_delta(values, is_best, best, epochs_since_best):
    for higher_is_better in (True, False):
        stopping, sign = EarlyStopping(higher_is_better, min_delta=0.25), 1 if higher_is_better else -1
        assert [stopping.update(sign * value, epoch) for epoch, value in enumerate(values, start=1)] == is_best
        assert (sign * stopping.best_value, stopping.best_epoch) == best
        assert stopping.epochs_since_best == stopping.patience_used == epochs_since_best


FALLING, FLAT = [1 / (1 + index) for index in range(50)], [1.0] * 50


@pytest.mark.parametrize(
    ("losses", "scheduler", "warmup_epochs", "frozen_epochs", "first"),
    [
        (FLAT, "cosine", 0, 0, 2),
        (FLAT, "cosine", 1.5, 0, 3),
        (FLAT, "cosine", 0, 4, 5),
        (FLAT, "cosine", 1, 3, 4),
        (FLAT, "cosine", 3, 1, 4),
        (FALLING, "constant", 0, 0, 2),
        (FALLING, "plateau", 0, 0, 2),
        # half of the peak after 50 of 100 steps; epoch 5 ends with step 49, counted from 0
        (FALLING, "cosine", 0, 0, 6),
        (FALLING, "poly", 0, 0, 6),  # (1 - 0.49) ** 0.9 = 0.546 and (1 - 0.59) ** 0.9 = 0.448
    ],
)
def test_epochs_count_against_the_patience_once_nothing_is_to_come_that_improves_them(
    losses, scheduler, warmup_epochs, frozen_epochs, first
):
    """The end of the warm-up, the training of the encoder; while training improves, a rate below half of its peak. From
    epoch 2 on: the first is an improvement."""
    rate = LearningRate(0.1, scheduler, num_epochs=10, steps_per_epoch=10, num_warmup_steps=round(10 * warmup_epochs))
    counts = [epoch for epoch in range(2, 11) if counts_against_patience(epoch, rate, frozen_epochs, losses[:epoch])]
    assert counts == list(range(first, 11))
