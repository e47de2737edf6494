"""python train_unet.py bench --step: the training step alone, on a batch that lies on the device. What the loader is up against."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from unet_trainer.console import Console
from unet_trainer.dataset import Batch
from unet_trainer.machine import Machine
from unet_trainer.memory import is_out_of_memory, one_line, out_of_memory_message
from unet_trainer.runs import TrainingFailed
from unet_trainer.step import Totals

NUM_ROUNDS = 5
ROUND_SECONDS = 0.3
NUM_WARM_UP = 10  # on a GPU: kernels are searched for, memory finds its place, the optimizer is recorded


class StepTime(NamedTuple):
    """Of one step, the median of some rounds; and the fastest and slowest of them."""

    seconds: float
    fastest: float
    slowest: float
    peak_gb: float  # 0 on a CPU


def time_step(machine: Machine, batch: Batch, console: Console) -> StepTime:
    """Forward, loss, IoU counts, backward, check for finite numbers, optimizer."""
    device = machine.numerics.device
    batch = batch._replace(images=batch.images.to(device), masks=batch.masks.to(device))
    machine.set_training(0)
    totals = Totals(machine.num_classes, device)

    def take_steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            machine.train_step(batch, totals, window=1, closes_window=True, learning_rate=1e-4)
        totals.loss()  # waits for the device
        return (time.perf_counter() - started) / count

    on_gpu = device.type == "cuda"
    try:
        times = rounds(take_steps, NUM_WARM_UP if on_gpu else 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailed(f"{out_of_memory_message(one_line(error), device)}. Try a smaller batch_size") from None
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
    result = StepTime(median(times), min(times), max(times), peak)
    size = batch.num_images
    console.say(
        f"The step alone: {size / result.seconds:.0f} images/s at batch {size} ({1000 * result.seconds:.2f} ms; "
        f"{size / result.slowest:.0f} to {size / result.fastest:.0f} in {NUM_ROUNDS} rounds)"
        + (f", {peak:.2f} GiB at the peak" if on_gpu else "")
    )
    return result


def rounds(take_steps: Callable[[int], float], num_warm_up: int) -> list[float]:
    """Seconds of a step in each of some rounds, which are long enough to be measured."""
    take_steps(num_warm_up)
    count = max(1, round(ROUND_SECONDS / take_steps(1)))
    return [take_steps(count) for _ in range(NUM_ROUNDS)]
