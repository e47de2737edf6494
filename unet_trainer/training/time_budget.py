"""The time that a run may take, counted from its command on; the plan that fits into it; and what a run will take."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from unet_trainer.config.choices import (
    MAX_PILOTS,
    MIN_PART,
    choose_ema_decay,
    choose_patience,
    choose_warmup,
    describe_seconds,
    num_pilot_steps,
    wanted_views,
)
from unet_trainer.config.facts import StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.concurrency import call_with_timeout
from unet_trainer.system.console import counted
from unet_trainer.system.resources import count_cores

if TYPE_CHECKING:
    from unet_trainer.training.run import Run

END_SHARE = 0.1  # of the budget, that the end of a run may take: the last files and the report
END_SECONDS = 3.0  # that it takes at least, without the pictures of the report
NUM_RECENT = 5  # epochs whose time tells that of the next ones
OTHER_SHARE = 0.2  # of the epochs: where the plan is off by more, what depends on their number is decided anew
MIN_BATCHES = 5  # that tell the time of the next ones: the first ones wait for the workers
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

    def lost_to_training(self) -> float:
        """What is spent, and what the end of the run may take."""
        return self.spent() + END_SHARE * self.seconds


def plan_run(run: Run, cost: StepCost) -> None:
    """Before the first epoch of a start: says how long an epoch and the run will take. With a time budget the epochs
    of a new run are planned from that first."""
    config, state, budget, loaders, launch = run.config, run.state, run.budget, run.loaders, run.processes.launch
    rate, is_new, loading = state.learning_rate, state.epoch == state.batch == 0, (0.0, 0.0)
    with contextlib.suppress(Exception):  # whatever reading raises: training reads the files too, and says so
        read = partial(time_samples, loaders.train.dataset, loaders.val.dataset)
        loading = call_with_timeout(read, NUM_SAMPLES * SAMPLE_SECONDS)
    seconds = step_seconds(config, cost, loading, launch.local_world_size)
    batch_seconds, val_image_seconds = run.processes.broadcast(seconds)
    budget.val_seconds = len(loaders.val.batches.samples) * val_image_seconds
    epoch_seconds = len(loaders.train) * batch_seconds + budget.val_seconds

    def trial_seconds() -> float:
        may_try = is_new and run.settings["learning_rate"].source == "decided"
        return pilot_seconds(rate.num_steps, config.accumulation_steps * batch_seconds) if may_try else 0.0

    if run.settings.replans() and is_new:
        fit_into_budget(run, epoch_seconds, trial_seconds())
    num_epochs = run.config.num_epochs - state.epoch
    if state.history:
        epoch_seconds = recent_epoch_seconds(state.history)
    if rate.end is not None and num_epochs == 1:
        epoch_seconds = rate.num_steps * config.accumulation_steps * batch_seconds + budget.val_seconds
    text = f"{counted(num_epochs, 'epoch')} of {describe_seconds(epoch_seconds)}{'' if is_new else ' to go'}"
    text += "" if rate.end is None else f", {rate.num_steps:,} steps in all"
    total = max(0.0, num_epochs * epoch_seconds - state.train_seconds) + trial_seconds()
    if run.settings.replans():
        total = min(budget.spent() + total + _end_seconds(run), budget.seconds)
    run.console.fact("Time", describe_run(total, text, trial_seconds(), config))


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


def fit_into_budget(run: Run, epoch_seconds: float | None = None, other_seconds: float = 0.0) -> None:
    """Plans the number of epochs again from the time that epochs take, so that the schedule ends with the time budget;
    the last one may be a part of an epoch. `epoch_seconds`: before the first epoch; `other_seconds`: what else comes
    first."""
    state, budget, rate = run.state, run.budget, run.state.learning_rate
    seconds = epoch_seconds or recent_epoch_seconds(state.history)
    left = run.processes.broadcast(budget.left() - _end_seconds(run) - other_seconds)
    epochs = _epochs_in(left, seconds, budget.val_seconds, may_be_cut=run.processes.is_alone)
    most = most_epochs(run.config, len(run.loaders.train.dataset))
    possible = max(state.epoch, 1, min(most, state.epoch + math.ceil(epochs)))
    if epochs > int(epochs) and possible < most:
        budget.planned_end = rate.end = int((state.epoch + epochs) * rate.steps_per_epoch)
    change_epochs(run, possible, f"as many as {run.settings.requested.time_budget} have time for")


def recent_epoch_seconds(history: Sequence[Row]) -> float:
    """Without those of the first epoch, which starts the workers."""
    return mean(column(history[1:][-NUM_RECENT:] or history, "seconds"))


def _epochs_in(seconds: float, epoch_seconds: float, val_seconds: float, may_be_cut: bool) -> float:
    """Epochs that so many seconds have time for, the last of which may be a part of one."""
    whole, rest = divmod(max(0.0, seconds), epoch_seconds)
    part = (rest - val_seconds) / (epoch_seconds - val_seconds) if may_be_cut and rest > val_seconds else 0.0
    return whole + (part if part >= MIN_PART else 0.0)


def most_epochs(config: ResolvedConfig, num_samples: int) -> int:
    """More of them gain nothing, whatever the time. `num_samples`: of the training set."""
    return math.ceil(wanted_views(num_samples // config.whole_repeats) * config.epoch_parts / num_samples)


def is_out_of_time(run: Run) -> bool:
    """After a step: whether the rest of the time budget is needed for validation and the report. The learning rate
    falls within the time that there is: in a part of the epoch, or over more epochs than were planned. The processes of
    a job train whole epochs."""
    state, num_batches, budget, rate = run.state, len(run.loaders.train), run.budget, run.state.learning_rate
    if not (run.settings.replans() and run.processes.is_alone) or state.batch == num_batches:
        return False
    seconds, left = state.train_seconds / state.batch, budget.left() - budget.val_seconds - _end_seconds(run)
    if left <= 0:
        budget.num_cut += num_batches - state.batch
    elif state.batch < MIN_BATCHES:
        return False
    possible = state.batch + max(0, int(left / seconds))
    if possible < num_batches:
        rate.end = state.epoch * rate.steps_per_epoch + -(-possible // run.config.accumulation_steps)
    elif state.epoch + 1 < run.config.num_epochs:
        rate.end = budget.planned_end
    else:  # there may be time for more epochs than were planned
        rest = left - (num_batches - state.batch) * seconds
        more = _epochs_in(rest, num_batches * seconds + budget.val_seconds, budget.val_seconds, may_be_cut=True)
        more = min(more, most_epochs(run.config, len(run.loaders.train.dataset)) - run.config.num_epochs)
        rate.end = int((run.config.num_epochs + more) * rate.steps_per_epoch) if more > 0 else None
    return left <= 0


def _end_seconds(run: Run) -> float:
    """Of the end of the run, where pictures are predicted as in validation."""
    picture_seconds = NUM_PICTURES * run.budget.val_seconds / max(1, len(run.loaders.val.dataset.pairs))
    return min(END_SHARE * run.budget.seconds, run.budget.last_seconds + picture_seconds)


def change_epochs(run: Run, num_epochs: int, reason: str) -> None:
    """If the number is quite another, warm-up, patience and average follow where they were left open."""
    state, settings, rate, planned = run.state, run.settings, run.state.learning_rate, run.config.num_epochs
    settings.change(reason, num_epochs=num_epochs)
    rate.num_epochs = num_epochs
    if abs(num_epochs - planned) <= OTHER_SHARE * planned:
        return
    follow: dict[str, tuple[Any, str]] = {
        "early_stopping_patience": choose_patience(num_epochs),
        "warmup_epochs": choose_warmup(num_epochs),
        "ema_decay": choose_ema_decay(rate.num_steps),
    }
    for name in filter(settings.was_open, follow):
        value, reason = follow[name]
        settings.change(reason, **{name: value})
    rate.num_warmup_steps = round(run.config.warmup_epochs * rate.steps_per_epoch)
    if state.ema is not None and run.config.ema_decay is not None and run.config.ema_decay != state.ema.decay:
        state.ema.decay = run.config.ema_decay
        run.components.train_step.launcher.clear()  # a recorded graph holds the old one
