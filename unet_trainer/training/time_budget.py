"""The time that a run may take, counted from its command on, and what steps, epochs and trials take of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import mean

from unet_trainer.config.auto_training import MAX_PILOTS, MIN_PART, num_pilot_steps, wanted_views
from unet_trainer.config.facts import StepCost
from unet_trainer.config.parsers import describe_seconds, seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.system.resources import count_cores

END_SHARE = 0.1  # of the budget, that the end of a run may take: the last files and the report
END_SECONDS = 3.0  # that it takes at least, without the pictures of the report
NUM_PICTURES, MAX_REPORT_SECONDS = 21, 60.0  # of the report, at most
NUM_SAMPLES, SAMPLE_SECONDS = 8, 0.5  # of training and of validation, that are prepared to time the loader


class TimeBudget:
    """`text` as in the config; None: no limit. `started`: when the command began, by the clock."""

    def __init__(
        self, text: str | None = None, started: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = math.inf if text is None else seconds_of(text)
        self.clock = clock
        self.started = clock() if started is None else started
        self.last_seconds = max(END_SECONDS, clock() - self.started)  # where importing took long, ending does
        self.seconds_before = 0.0  # of training in earlier starts of the run
        self.val_seconds = 0.0  # that the last validation took, or that one will take
        self.planned_end: int | None = None  # step at which the time ends the last epoch, as planned between epochs
        self.num_cut = 0  # batches of epochs that the time has ended

    def spent(self) -> float:
        return self.seconds_before + self.clock() - self.started

    def left(self) -> float:
        return self.seconds - self.spent()

    def picture_seconds(self) -> float:
        """That are left for the report's pictures: its page is written and the process ended after them."""
        return self.left() - min(self.last_seconds, END_SHARE * self.seconds / 2)

    def end_seconds(self, num_val_images: int) -> float:
        """Of the end of the run, where pictures are predicted as in validation."""
        picture_seconds = NUM_PICTURES * self.val_seconds / max(1, num_val_images)
        return min(END_SHARE * self.seconds, self.last_seconds + picture_seconds)

    def lost_to_training(self) -> float:
        """What is spent, and what the end of the run may take."""
        return self.spent() + END_SHARE * self.seconds


def time_samples(train: SegmentationDataset, val: SegmentationDataset) -> tuple[float, float]:
    """Seconds that one core takes to prepare a sample of training, and one of validation. Raises what reading does."""

    def mean_seconds(dataset: SegmentationDataset, indices: range) -> float:
        dataset, times, started = dataset.clone_for_worker(), [], time.perf_counter()
        for index in indices[:NUM_SAMPLES]:
            times.append(sum(dataset.timed_sample((0, index))[2:]))
            if time.perf_counter() - started > SAMPLE_SECONDS:
                break
        return mean(times[1:] or times)  # the first one loads code

    spread = range(0, len(train), max(1, len(train) // NUM_SAMPLES))
    return mean_seconds(train, spread), mean_seconds(val, range(len(val)))  # an image's tiles in turn


def step_seconds(
    config: ResolvedConfig, cost: StepCost, loading: tuple[float, float], num_processes: int = 1
) -> tuple[float, float]:
    """Of a training batch and of a validation image, with `loading`: the seconds that one core needs to prepare a
    sample. Workers do so beside a GPU; on a CPU the model computes on the same cores. `num_processes` share these."""
    num_cores, on_cpu = max(1, count_cores() // num_processes), config.device.startswith("cpu")
    num_workers = max(1, config.num_workers // num_processes)

    def with_loading(seconds: float, loading: float) -> float:
        if config.num_workers == 0:
            return seconds + loading
        return max(seconds + loading / num_cores * on_cpu, loading / num_workers)

    return with_loading(cost.seconds, config.batch_size * loading[0]), with_loading(cost.eval_seconds, loading[1])


def pilot_seconds(num_steps: int, seconds: float) -> float:
    """That learning-rate trials take at most, in a run of so many steps, each of so many seconds."""
    return MAX_PILOTS * num_pilot_steps(num_steps) * seconds


def describe_run(seconds: float, epochs: str, trial_seconds: float, config: ResolvedConfig) -> str:
    """`epochs`: their number and time."""
    text = f"about {describe_seconds(seconds)}: {epochs}"
    text += f"; up to {describe_seconds(trial_seconds)} of it try learning rates" if trial_seconds else ""
    return text + ("; early stopping may end it sooner" if config.early_stopping_patience is not None else "")


def epochs_in(seconds: float, epoch_seconds: float, val_seconds: float, may_be_cut: bool) -> float:
    """Epochs that so many seconds have time for, the last of which may be a part of one."""
    whole, rest = divmod(max(0.0, seconds), epoch_seconds)
    part = (rest - val_seconds) / (epoch_seconds - val_seconds) if may_be_cut and rest > val_seconds else 0.0
    return whole + (part if part >= MIN_PART else 0.0)


def most_epochs(config: ResolvedConfig, num_samples: int) -> int:
    """More of them gain nothing, whatever the time. `num_samples`: of the training set."""
    return math.ceil(wanted_views(num_samples // config.whole_repeats) * config.epoch_parts / num_samples)
