"""A step whose numbers are not finite, wherever they went bad, changes nothing and is counted."""

from __future__ import annotations

import math

import pytest
import torch
from test_step import CPU, make_batch, make_step, plain_model, tiny_machine, weights

from unet_trainer.runs.errors import NonFinite
from unet_trainer.training.finite_guard import MAX_BAD_STEPS, FiniteGuard
from unet_trainer.training.state import EpochMetrics

PRECISIONS = {"float32": {"use_amp": False}, "bfloat16": {"use_amp": True}}
ONE = torch.ones(())


def everything(machine):
    """All that a step may change: weights, statistics, the optimizer's state, the average and its count."""
    state = machine.state
    tensors = [*state.model.state_dict().values(), *state.ema.model.state_dict().values(), state.ema.num_updates]
    tensors += [value for entry in state.optimizer.state.values() for value in entry.values()]
    return [tensor.clone() for tensor in tensors]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def take_step(machine, batch, totals=None, window=1, closes=True):
    machine.train_step(batch, totals or EpochMetrics(1, CPU), window=window, closes_window=closes, learning_rate=1e-2)


def spoil_input(machine, batch, value):
    images = batch.images.float()
    images[0, 3, 4, 1] = value
    return batch._replace(images=images)


def spoil_loss(machine, batch, value):
    forward = machine.train_step.forward

    def spoiled(images, masks):
        machine.train_step.forward = forward
        loss, counts = forward(images, masks)
        return loss * value, counts

    machine.train_step.forward = spoiled
    return batch


def spoil_gradient(machine, batch, value):
    parameter = machine.train_step.parameters[-1]
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * value)[1])
    return batch


def spoil_statistics(machine, batch, value):
    norm = next(module for module in machine.state.model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    handle = norm.register_forward_hook(lambda module, *_: (handle.remove(), module.running_var.data.fill_(value), None)[2])
    return batch


PHASES = {"input": spoil_input, "loss": spoil_loss, "gradient": spoil_gradient, "statistics": spoil_statistics}


@pytest.mark.parametrize(
    ("phase", "value"), [*((phase, math.nan) for phase in PHASES), ("input", math.inf), ("gradient", math.inf)]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bad_step_changes_nothing_wherever_the_number_went_bad(precision, phase, value):
    machine = tiny_machine(ema_decay=0.9, grad_clip=1.0, **PRECISIONS[precision])
    totals = EpochMetrics(1, CPU)
    take_step(machine, make_batch(2, side=32), totals)
    before = everything(machine)
    take_step(machine, PHASES[phase](machine, make_batch(2, seed=1, side=32), value), totals)
    assert same(before, everything(machine))
    assert (int(totals.num_skipped), int(totals.num_nan)) == (1, 1)
    take_step(machine, make_batch(2, seed=2, side=32), totals)
    assert not same(before, everything(machine))
    assert (int(totals.num_skipped), int(totals.num_nan)) == (1, 1)
    assert math.isfinite(totals.loss())


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_after_a_bad_step_each_optimizer_goes_on_as_if_it_had_not_been(optimizer):
    """The first step of all is bad, when an optimizer has no state yet; and a later one."""
    machine, untouched = (tiny_machine(ema_decay=0.9, optimizer=optimizer) for _ in range(2))
    for seed in range(2):
        take_step(machine, spoil_loss(machine, make_batch(2, seed=9, side=32), math.nan))
        take_step(machine, make_batch(2, seed=seed, side=32))
        take_step(untouched, make_batch(2, seed=seed, side=32))
    assert same(everything(machine), everything(untouched))


def test_one_bad_batch_spoils_its_whole_accumulation_window_and_no_other():
    machine = tiny_machine(ema_decay=0.9)
    take_step(machine, make_batch(2, side=32))
    before = everything(machine)
    take_step(machine, spoil_loss(machine, make_batch(2, seed=1, side=32), math.nan), window=2, closes=False)
    take_step(machine, make_batch(2, seed=2, side=32), window=2, closes=True)
    assert same(before, everything(machine))
    take_step(machine, make_batch(2, seed=1, side=32), window=2, closes=False)
    take_step(machine, make_batch(2, seed=2, side=32), window=2, closes=True)
    assert not same(before, everything(machine))


@pytest.mark.parametrize(
    ("scale", "loss_weight", "num_nan"),
    [(2.0**127, 1e6, 0), (1.0, math.inf, 1), (1024.0, math.inf, 1)],
    ids=["gradients overflow", "nothing left to scale down", "the loss itself is infinite"],
)
def test_overflows_that_a_lower_loss_scale_cures_are_counted_apart(scale, loss_weight, num_nan):
    model = plain_model()
    before = weights(model)
    totals = EpochMetrics(1, CPU)
    step = make_step(model, scaler=torch.amp.GradScaler("cpu", init_scale=scale), loss_weight=loss_weight)
    step(make_batch(4), totals, window=1, closes_window=True, learning_rate=1.0)
    assert torch.equal(weights(model), before)
    assert (int(totals.num_skipped), int(totals.num_nan)) == (1, num_nan)


def judge(guard, verdicts):
    """Steps that are good (1) or bad (0), one batch each."""
    for number, verdict in enumerate(verdicts):
        guard.batch_number = number
        guard.open_window()
        guard.judge(torch.tensor(1.0 if verdict else math.nan), ONE)


def test_bad_steps_in_a_row_are_trouble_from_the_first_of_them_on():
    guard = FiniteGuard(plain_model(), CPU, max_bad_steps=3)
    judge(guard, [1, 0, 0, 1, 0, 0])
    guard.check()
    judge(guard, [1, 0, 0, 0, 1, 1, 0])  # found out late, when all seems well again
    with pytest.raises(NonFinite, match="3 steps in a row were not finite") as caught:
        guard.check()
    assert caught.value.batch_number == 1
    guard.reset()
    guard.check()


def test_trouble_is_seen_without_asking_the_device_to_wait(monkeypatch):
    monkeypatch.setattr("unet_trainer.training.async_reader.PEEK_SECONDS", 0.0)
    guard = FiniteGuard(plain_model(), CPU, max_bad_steps=1)
    judge(guard, [1, 0])
    guard.look()  # the copy begins
    with pytest.raises(NonFinite, match="a step was not finite"):
        guard.look()


def test_some_bad_steps_are_borne():
    guard = FiniteGuard(plain_model(), CPU)
    judge(guard, [0] * (MAX_BAD_STEPS - 1))
    guard.check()
    judge(guard, [0])
    with pytest.raises(NonFinite):
        guard.check()


def test_after_a_step_that_broke_off_a_window_can_be_begun_anew(monkeypatch):
    """Memory may run out in the optimizer, when the gradients are unscaled already."""
    model = plain_model()
    step = make_step(model, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    def fail(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(type(step.optimizer), "step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(make_batch(4), EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=0.1)
    monkeypatch.undo()
    step.abandon_window()
    before = weights(model)
    step(make_batch(4), EpochMetrics(1, CPU), window=1, closes_window=True, learning_rate=0.1)
    assert not torch.equal(weights(model), before)
