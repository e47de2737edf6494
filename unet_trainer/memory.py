"""Memory that runs out: what it looks like, what to tell, and how a batch is made to fit."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import torch

from unet_trainer.config import Config
from unet_trainer.console import Console
from unet_trainer.runs import TrainingFailed

SIGNS = (  # in the text of a RuntimeError, in small letters
    "out of memory",
    "not enough memory",
    "defaultcpuallocator",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "unable to find an engine",  # cuDNN, when no algorithm gets the memory that it asks for
)


def is_out_of_memory(error: BaseException) -> bool:
    """Allocators, drivers, cuBLAS, cuDNN and a compiler around them all say it in ways of their own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


def out_of_memory_message(reason: str, device: torch.device) -> str:
    if device.type != "cuda":
        return f"out of memory ({reason})"
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    there_is = torch.cuda.get_device_properties(device).total_memory / 2**30
    said = "" if reason.startswith("CUDA out of memory") else f" ({reason})"
    return f"out of memory on {device}{said}: {peak:.1f} GiB were in use at the peak, {there_is:.1f} GiB are there"


def free_memory(device: torch.device, has_graphs: bool) -> None:
    """Gives back what is no longer used, or it would lie in pieces too small for the next try. Recorded CUDA graphs hold
    the memory of batches of their size for good: steps that were compiled are compiled again, for the smaller ones."""
    if has_graphs:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shrink(
    config: Config, reason: str, device: torch.device, split_batches: Callable[[int], None], console: Console, kept: str
) -> Config:
    """After memory ran out: twice as many parts of a batch, or TrainingFailed, as on_oom says. `kept`: what is saved."""
    message = out_of_memory_message(reason, device)
    num_parts = min(2 * config.batch_parts, config.batch_size)
    if config.on_oom == "stop" or num_parts == config.batch_parts:
        smaller = f"batch_size={max(1, config.batch_size // 2)} accumulation_steps={2 * config.accumulation_steps}"
        ideas = [smaller, "on_oom=shrink" if config.on_oom == "stop" else "a smaller encoder"]
        ideas.append("a smaller image_size" if config.use_amp else "use_amp=true")
        raise TrainingFailed(f"{message}. Try {', or '.join(ideas)}; {kept}")
    split_batches(num_parts)
    free_memory(device, config.compile_model)
    console.warn(
        f"{message}. From here on a batch of {config.batch_size} goes through the model in {num_parts} parts (batch_parts)"
    )
    return dataclasses.replace(config, batch_parts=num_parts)
