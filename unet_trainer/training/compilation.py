"""Tries the steps of a run before it begins, and compiles them."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from unet_trainer.loading.dataset import Batch
from unet_trainer.model.fast_layers import use_fast_layers
from unet_trainer.model.optimizer import fill_momentum
from unet_trainer.system.console import cause_line
from unet_trainer.training.cuda_graphs import CudaGraphCache, DirectLauncher
from unet_trainer.training.evaluation import EvalForward, EvalStep
from unet_trainer.training.out_of_memory import is_out_of_memory
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import TrainForward, TrainStep


@contextlib.contextmanager
def restoring_model(step: TrainStep) -> Iterator[None]:
    """Steps taken inside change neither weights, statistics, gradients, optimizer, scaler nor random state.

    The optimizer may step inside only if it has no state yet: its state is cleared afterwards, since a copy would take memory.
    """
    network = step.segmenter.network
    groups = [{name: value for name, value in group.items() if name != "params"} for group in step.optimizer.param_groups]
    saved = {name: value.clone() for name, value in network.state_dict().items()}
    average = None if step.ema is None else {name: value.clone() for name, value in step.ema.segmenter.state_dict().items()}
    num_updates = None if step.ema is None else step.ema.num_updates.clone()
    scaler = copy.deepcopy(step.scaler.state_dict())
    has_stepped_before = has_state(step.optimizer)
    devices = [step.device] if step.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        network.load_state_dict(saved)
        if step.ema is not None and average is not None and num_updates is not None:
            step.ema.segmenter.load_state_dict(average)
            step.ema.num_updates.copy_(num_updates)
        step.abandon_group()
        if step.scaler.is_enabled():
            step.scaler.load_state_dict(scaler)
        for group, values in zip(step.optimizer.param_groups, groups, strict=True):
            group.update(values)  # the learning rate
        if not has_stepped_before:
            step.optimizer.state.clear()
            if isinstance(step.optimizer, torch.optim.SGD):
                fill_momentum(step.optimizer)


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has stepped. SGD's momentum is there from the start."""
    return any("step" in state or bool(state["momentum_buffer"].any()) for state in optimizer.state.values())


def try_steps(
    train_step: TrainStep,
    eval_step: EvalStep,
    batch: Batch,
    eval_batch: Batch,
    begin_phases: Sequence[Callable[[], object]],
    num_times: int = 1,
) -> None:
    """Takes the steps that the run will take, inside restoring_model: training in each phase, then evaluation.

    A phase is a mode of the model: encoder frozen, or not. The optimizer steps too, if it never has, so that its memory is tried.
    """
    metrics = EpochMetrics(train_step.segmenter.spec.num_classes, train_step.device)
    with_optimizer = not has_state(train_step.optimizer)
    for begin_phase in begin_phases:
        begin_phase()
        for _ in range(num_times):
            train_step.begin_group(1, 0)
            train_step(batch, metrics)
        if with_optimizer:
            train_step.optimizer_step(metrics, learning_rate=0.0)
    eval_metrics = eval_step.new_metrics()
    eval_step.segmenter.eval()
    for _ in range(num_times):
        eval_step(eval_batch, eval_metrics)
    metrics.loss()  # waits for the device


class Compilation(NamedTuple):
    """What came of compiling. `failure`: why it failed, with all as it was before. `undo` makes it so."""

    failure: str | None
    undo: Callable[[], None] = lambda: None


def compile_steps(
    train_step: TrainStep,
    eval_step: EvalStep,
    batch: Batch,
    eval_batch: Batch,
    begin_phases: Sequence[Callable[[], object]],
) -> Compilation:
    """Compiles both forward passes and tries them on a batch each.

    On CUDA the layers get their faster forms, and the compiled functions are replayed as CUDA graphs: below batch 16 the step is
    bound by kernel launches.
    """
    eager = train_step.forward, eval_step.forward
    on_cuda = train_step.device.type == "cuda"
    mode = "reduce-overhead" if on_cuda else "default"
    networks = (train_step.segmenter.network, eval_step.segmenter.network) if gains_from_fast_layers(train_step.device) else ()
    restores = [use_fast_layers(network) for network in networks]
    train_step.launcher = DirectLauncher()

    def undo() -> None:
        train_step.forward, eval_step.forward = eager
        train_step.launcher = DirectLauncher()
        for restore in reversed(restores):
            restore()

    try:
        torch.compiler.reset()  # else a fifth run in one process finds the cache of compiled code full and stays eager
        train_step.forward = _replayed_train(torch.compile(train_step.forward, mode=mode, dynamic=False))
        eval_step.forward = _replayed_eval(torch.compile(eval_step.forward, mode=mode, dynamic=False))
        with restoring_model(train_step), warnings.catch_warnings(), _without_garbage_collection():
            warnings.simplefilter("ignore")  # advice to compiler developers
            try_steps(train_step, eval_step, batch, eval_batch, begin_phases, num_times=3)  # CUDA graphs: run, record, replay
    except Exception as error:  # a compiler may raise anything, and the eager steps still work
        undo()
        if is_out_of_memory(error):
            raise
        return Compilation(f"{type(error).__name__}: {cause_line(error)[:200]}")
    train_step.launcher = CudaGraphCache() if on_cuda else DirectLauncher()
    return Compilation(None, undo)


def gains_from_fast_layers(device: torch.device) -> bool:
    """CUDA alone: they suit its kernels."""
    return device.type == "cuda"


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A compiler makes millions of objects that stay; collecting again and again takes seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _replayed_train(compiled: TrainForward) -> TrainForward:
    def forward(images: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # from here on the outputs of the last replay may be overwritten
        return compiled(images, masks, batch_masks)

    return forward


def _replayed_eval(compiled: EvalForward) -> EvalForward:
    def forward(images: torch.Tensor, masks: torch.Tensor, with_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(images, masks, with_logits)

    return forward
