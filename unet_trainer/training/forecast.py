"""Time and memory that a run will take, from the measured cost of its step and of its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unet_trainer.config.facts import StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.training_choices import wanted_views


@dataclass(frozen=True)
class SampleCost:
    """Seconds that one core takes to prepare a sample."""

    read_seconds: float  # of a training sample; a cache spares it
    augment_seconds: float
    val_seconds: float  # of a validation sample, which a cache spares as well


@dataclass(frozen=True)
class Forecast:
    """Early stopping may end the run sooner."""

    seconds: float
    seconds_per_epoch: float
    num_epochs: int
    memory: int  # bytes of the GPU; 0: not measured


def forecast(
    config: ResolvedConfig,
    num_train_samples: int,
    num_val_samples: int,
    cost: StepCost,
    sample: SampleCost,
    num_cores: int,
    start_seconds: float = 0.0,
) -> Forecast:
    """Sample counts are those of the datasets. `start_seconds` come once: compiling, filling a cache.

    With a time budget, the epochs are those that the run will find to have time for; the last one may end early, with validation.
    """
    is_cached = config.cache != "none"
    train_seconds = sample.augment_seconds + (0.0 if is_cached else sample.read_seconds)
    val_seconds = 0.0 if is_cached else sample.val_seconds
    num_batches = num_train_samples // config.epoch_parts // config.batch_size
    per_step = with_loading(cost.seconds, config.batch_size * train_seconds, config, num_cores)
    per_val_sample = with_loading(cost.eval_seconds, val_seconds, config, num_cores)
    per_epoch = num_batches * per_step + num_val_samples * per_val_sample
    num_epochs = config.num_epochs
    seconds = start_seconds + num_epochs * per_epoch
    if config.time_budget is not None:
        once, budget = num_train_samples // config.whole_repeats, seconds_of(config.time_budget)
        most = math.ceil(wanted_views(once) * config.epoch_parts / num_train_samples)
        num_epochs = max(1, min(most, int((budget - start_seconds) / per_epoch)))
        least = start_seconds + per_step + num_val_samples * per_val_sample
        seconds = max(least, min(budget, start_seconds + num_epochs * per_epoch))
    return Forecast(seconds, per_epoch, num_epochs, cost.memory)


def with_loading(seconds: float, loading: float, config: ResolvedConfig, num_cores: int) -> float:
    """Seconds on the device, together with those that one core needs to prepare the samples.

    Workers prepare them beside a GPU, which waits where they are slower. On a CPU the model computes on the same cores, and the
    two add up.
    """
    if config.num_workers == 0:
        return seconds + loading
    if config.device.startswith("cpu"):
        return max(seconds + loading / num_cores, loading / config.num_workers)
    return max(seconds, loading / config.num_workers)
