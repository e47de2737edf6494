"""Trying and compiling the steps before a run: nothing is changed by it, and a compiler that fails costs nothing but speed."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch

from helpers.steps import (
    everything,
    make_batch,
    make_settings,
    same,
    silent_console,
    small_components,
    take_step,
    weights,
)
from unet_trainer.training.compilation import compile_steps
from unet_trainer.training.memory import is_out_of_memory, shrink
from unet_trainer.training.trials import take_steps

BATCH = make_batch(2, side=32)


def complete_state(components):
    """Copies of all that trying the steps could change."""
    state, step = components.state, components.train_step
    guard = step.guard
    counters = [guard.losses_are_finite, guard.num_in_a_row, guard.most_in_a_row, guard.first_bad]
    return {
        "tensors": everything(components),
        "optimizer": copy.deepcopy(state.optimizer.state_dict()),
        "scaler": (copy.deepcopy(state.scaler.state_dict()), dict(getattr(state.scaler, "_per_optimizer_states", {}))),
        "random": torch.get_rng_state(),
        "guard": [int(counter) for counter in counters],
        "gradients": [parameter.grad is None for parameter in step.parameters],
        "metrics": [tensor.clone() for tensor in state.metrics.tensors().values()],
        "group": step.is_whole,
    }


assert_same_state = partial(torch.testing.assert_close, rtol=0, atol=0)  # bit for bit, in nested dicts and lists


def with_scaler(components):
    """As on a GPU without bfloat16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    components.state.scaler = components.train_step.scaler = scaler
    scaler.scale(torch.ones(()))  # it is made at its first use
    return components


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_trial_before_a_run_leaves_everything_bit_for_bit_as_it_was(optimizer):
    components = with_scaler(small_components(ema_decay=0.9, optimizer=optimizer, freeze_encoder_epochs=1))
    untouched = with_scaler(small_components(ema_decay=0.9, optimizer=optimizer, freeze_encoder_epochs=1))
    before = complete_state(components)
    with components.restoring():
        torch.rand(5)  # as dropout does
        take_steps(components, BATCH, BATCH, 3)
        inside = complete_state(components)
        assert components.state.segmenter.network.encoder[1].running_mean.any()
    assert (int(components.state.ema.num_updates), inside["scaler"] == before["scaler"]) == (0, False)
    assert_same_state(before, complete_state(components))
    for made in (components, untouched):  # and the first steps of the run are the same
        made.set_training_mode(0)
        for seed in range(2):
            take_step(made.train_step, make_batch(2, seed, side=32))
    assert same(everything(components), everything(untouched))


def test_a_compiler_that_fails_leaves_the_steps_as_they_were(monkeypatch):
    fail = mock.Mock(side_effect=RuntimeError("\nno working C++ compiler\nand much more"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    components = small_components()
    train_step, eval_step = components.train_step, components.eval_step
    eager = train_step.forward, train_step.criterion, eval_step.forward
    before = complete_state(components)
    assert (
        compile_steps(components, partial(take_steps, components, BATCH, BATCH))[0]
        == "RuntimeError: no working C++ compiler"
    )
    assert (train_step.forward, train_step.criterion, eval_step.forward) == eager
    assert_same_state(before, complete_state(components))


@pytest.mark.soak
def test_compiled_and_eager_steps_agree():
    # Adam would enlarge rounding errors of zero gradients.
    eager, compiled = (small_components(optimizer="sgd") for _ in range(2))
    assert compile_steps(compiled, partial(take_steps, compiled, BATCH, BATCH))[0] is None
    for components in (eager, compiled):
        components.set_training_mode(0)
        for seed in range(3):
            batch, metrics = make_batch(2, seed, side=32), components.state.metrics
            take_step(components.train_step, batch, metrics=metrics, learning_rate=0.1)
    assert compiled.state.metrics.loss() == pytest.approx(eager.state.metrics.loss(), rel=1e-5)
    assert torch.equal(eager.state.metrics.matrix, compiled.state.metrics.matrix)
    assert torch.allclose(weights(eager.state.segmenter), weights(compiled.state.segmenter), atol=1e-6)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_every_form_of_it_is_recognised(error, is_one):
    assert is_out_of_memory(error) is is_one


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 6)])
def test_parts_double_until_each_is_one_image(before, after):
    settings, components = make_settings(batch_size=6, on_oom="shrink", batch_parts=before), small_components()
    shrink(settings, components, "why", silent_console())
    assert components.train_step.num_parts == settings.taken.batch_parts == after
    assert settings["batch_parts"].reason == "memory ran out (on_oom: shrink)"
