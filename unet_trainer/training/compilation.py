"""Compiles the steps of a run (compile_model: true)."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch._functorch import config as functorch_config

from unet_trainer.model.fast_layers import use_fast_layers
from unet_trainer.system.console import cause_line
from unet_trainer.training.async_device import CudaGraphCache, DirectLauncher
from unet_trainer.training.build import Components
from unet_trainer.training.memory import is_out_of_memory, release_device_memory

KEEPS = ("autograd_cache_allow_custom_autograd_functions",)  # of earlier compiling, on the disk
# the latter computes what is independent in one launch: the casts of the weights
OPTIONS = {"triton.cudagraphs", "combo_kernels"}
Result = TypeVar("Result")


def compile_steps(
    components: Components, take_steps: Callable[[int], object], with_eval: bool = True
) -> tuple[str | None, Callable[[], None]]:
    """Compiles the forward pass and the loss of training, and evaluation's `with_eval`. `take_steps` takes each step so
    many times. Returns why it failed, with all as it was before, or None; and what makes it so.

    On CUDA the layers get their faster forms, cuDNN searches for the fastest kernels (5 % for some seconds), and the
    compiled functions are replayed as CUDA graphs: below batch 16 the step is bound by kernel launches.
    """
    train_step, eval_step = components.train_step, components.eval_step
    eager = train_step.forward, train_step.criterion, eval_step.forward
    on_cuda = train_step.device.type == "cuda"
    options = dict.fromkeys(OPTIONS & set(torch._inductor.list_options()), True) if on_cuda else None
    compiled = partial(torch.compile, dynamic=False, options=options)
    compiled_steps = (train_step, eval_step) if with_eval else (train_step,)
    restores = [use_fast_layers(step.segmenter.network) for step in compiled_steps] if on_cuda else []
    train_step.launcher = DirectLauncher()

    def undo() -> None:
        train_step.forward, train_step.criterion, eval_step.forward = eager
        train_step.launcher = DirectLauncher()
        torch.backends.cudnn.benchmark = False
        for restore in reversed(restores):
            restore()

    try:
        torch.compiler.reset()  # else a fifth run in one process finds the cache of compiled code full and stays eager
        train_step.is_trial = True
        if train_step.sync is not None:
            train_step.sync.prepare_compiler()
        train_step.forward = _replayed(compiled(train_step.forward))
        train_step.criterion = compiled(train_step.criterion)
        if with_eval:
            eval_step.forward = _replayed(compiled(eval_step.forward))
        # Layers with a gradient of their own are traced, so that what is kept of them is found again by what they
        # compute.
        keeps = {name: True for name in KEEPS if hasattr(functorch_config, name)}
        with (
            components.restoring(),
            warnings.catch_warnings(),
            _without_garbage_collection(),
            functorch_config.patch(keeps),
        ):
            warnings.simplefilter("ignore")  # advice to compiler developers
            torch.backends.cudnn.benchmark = on_cuda and not torch.backends.cudnn.deterministic
            # here and not in a graph, which would keep the memory that kernels are tried with
            if torch.backends.cudnn.benchmark:
                with contextlib.suppress(torch.OutOfMemoryError), torch.compiler.set_stance("force_eager"):
                    take_steps(1)
                release_device_memory(train_step.device, is_compiled=False)
            take_steps(3)  # CUDA graphs: run, record, replay
    except Exception as error:  # a compiler may raise anything, and the eager steps still work
        undo()
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {cause_line(error)[:200]}", undo
    finally:
        train_step.is_trial = False
    train_step.launcher = CudaGraphCache() if on_cuda else DirectLauncher()
    return None, undo


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


def _replayed(compiled: Callable[..., Result]) -> Callable[..., Result]:
    def forward(*arguments: Any) -> Result:
        torch.compiler.cudagraph_mark_step_begin()  # from here on the outputs of the last replay may be overwritten
        return compiled(*arguments)

    return forward
