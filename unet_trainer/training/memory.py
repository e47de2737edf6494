"""Memory that runs out: found in every form in which it is told, and answered with smaller parts of a batch."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from unet_trainer.config.errors import TrainingFailed
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.model.losses import TERMS
from unet_trainer.system.console import Console, counted, first_line
from unet_trainer.training.build import Components
from unet_trainer.training.parallel import ALONE, Job

# Parts of a RuntimeError's text, in lower case.
MESSAGES = ("out of memory", "not enough memory", "defaultcpuallocator", "cublas_status_alloc", "cudnn_status_alloc")
# cuDNN: no algorithm gets the memory that it asks for, or there is none for such a layer
NO_ENGINE = "unable to find an engine"
SHORT_MEMORY = 0.1  # share of a GPU's memory that is left
PIXEL_MEANS = frozenset(name for name, term in TERMS.items() if term.is_pixel_mean)
Result = TypeVar("Result")


@dataclass(frozen=True)
class OutOfMemory:
    """Why memory did not hold some work."""

    reason: str


def unless_out_of_memory(work: Callable[[], Result]) -> Result | OutOfMemory:
    """What the work returns; or why memory did not hold it, with all that it had taken given back."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, WorkerError | TrainingFailed):
            raise
        failed: BaseException | None = error
        while failed is not None:  # the local variables of what failed hold its memory
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__context__
        return OutOfMemory(first_line(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Allocators, drivers, cuBLAS, cuDNN and compilers each have their own message for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(message in text for message in MESSAGES) or (NO_ENGINE in text and _memory_is_short())


def _memory_is_short() -> bool:
    """While an error is handled, which holds the memory of the failed step."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < SHORT_MEMORY * total


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Allocated and reserved since the start of the run; (0, 0) without a GPU. A CUDA graph takes its memory when it is
    recorded and shows nothing when it is replayed, so a peak of one epoch would be too low."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30


def describe(reason: str, device: torch.device) -> str:
    if device.type != "cuda":
        return f"out of memory ({reason})"
    peak, _ = peak_memory_gib(device)
    there_is = torch.cuda.get_device_properties(device).total_memory / 2**30
    said = "" if reason.startswith("CUDA out of memory") else f" ({reason})"
    return f"out of memory on {device}{said}: {peak:.1f} GiB were in use at the peak, {there_is:.1f} GiB are there"


def out_of_memory_message(config: ResolvedConfig, reason: str, device: torch.device) -> str:
    """With what to try."""
    smaller = f"batch_size={max(1, config.batch_size // 2)} accumulation_steps={2 * config.accumulation_steps}"
    other = f"batch_parts={2 * config.batch_parts}" if can_shrink(config) else "a smaller encoder"
    ideas = [smaller, "on_oom=shrink" if config.on_oom == "stop" else other]
    ideas.append("a smaller image_size" if config.use_amp else "use_amp=true")
    return f"{describe(reason, device)}. Try {', or '.join(ideas)}"


def release_device_memory(device: torch.device, is_compiled: bool) -> None:
    """Returns cached memory to the device: it would be fragmented for the next try. CUDA graphs never give back the
    memory of the batches that they were recorded with, so compiled steps are dropped and compiled again for smaller
    ones."""
    if is_compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def can_shrink(config: ResolvedConfig) -> bool:
    """Whether on_oom allows smaller parts of a batch, and there are any."""
    return config.on_oom == "shrink" and config.batch_parts < config.batch_size


def shrink(settings: Settings, components: Components, reason: str, console: Console) -> None:
    """Doubles batch_parts."""
    config, device = settings.taken, components.numerics.device
    num_parts = min(2 * config.batch_parts, config.batch_size)
    # Means over pixels are exact, statistics and overlaps are those of a part.
    overlaps = [name for name in config.loss if name not in PIXEL_MEANS]
    what = " and ".join(["batch norm statistics", *([", ".join(overlaps)] if overlaps else [])])
    console.warn(
        f"{describe(reason, device)}. From here on a batch of {config.batch_size} goes through the model in "
        f"{num_parts} parts (batch_parts): {what} are computed over "
        f"{counted(-(-config.batch_size // num_parts), 'image')} at a time, all else over the whole batch"
    )
    settings.change("memory ran out (on_oom: shrink)", batch_parts=num_parts)
    components.set_num_parts(num_parts)
    release_device_memory(device, config.compile_model)


def fit_into_memory(
    attempt: Callable[[], Result],
    settings: Settings,
    components: Components,
    console: Console,
    saved: str,
    processes: Job = ALONE,
) -> Result:
    """What the attempt returns; repeats it with smaller parts of a batch while memory runs out, of any process, and
    on_oom allows it. `saved`: what there is to go on from."""
    while True:
        with components.unsynchronized():
            result = unless_out_of_memory(attempt)
        reasons = processes.all_gather(result.reason if isinstance(result, OutOfMemory) else None)
        reason = next((one for one in reasons if one is not None), None)
        if reason is None:
            assert not isinstance(result, OutOfMemory)
            return result
        if not can_shrink(settings.taken):
            device = components.numerics.device
            raise TrainingFailed(f"{out_of_memory_message(settings.taken, reason, device)}; {saved}")
        shrink(settings, components, reason, console)
