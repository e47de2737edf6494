"""The time that a run may take, counted from its command on, and the plan that fits into it; and what a run will
take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from unet_trainer.config.choices import (
    MAX_PILOTS,
    choose_ema_decay,
    choose_patience,
    choose_warmup,
    num_pilot_steps,
    wanted_views,
)
from unet_trainer.config.facts import StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.system.console import counted
from unet_trainer.training.history import column

if TYPE_CHECKING:
    from unet_trainer.training.run import Run

END_SHARE = 0.1  # of the budget, that the end of a run may take: the last files and the report
END_SECONDS = 3.0  # that it takes at least, without the pictures of the report
TRIAL_SHARE = 0.15  # that a trial of the step may take
MIN_TRIAL_SECONDS = 10.0  # with fewer there is none: most of them would go into starting its process
NUM_RECENT = 5  # epochs whose time tells that of the next ones
REPLAN_SHARE = 0.03  # a plan that is off by less stays as it is, until its last epochs
NOTED_SHARE = 0.2  # one that is off by more is told
EVAL_SHARE = 0.3  # of the time of a training sample, that a validation sample takes, where neither was tried
MIN_BATCHES = 5  # that tell the time of the next ones: the first ones wait for the workers
MIN_PART = 0.2  # of an epoch, that is worth a validation
NUM_PICTURES, MAX_REPORT_SECONDS = 21, 60.0  # of the report, at most


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
        self.eval_share = EVAL_SHARE
        self.val_seconds: float | None = None  # that the last validation took
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

    def trial_seconds(self) -> float:
        seconds = TRIAL_SHARE * self.seconds
        return seconds if seconds >= MIN_TRIAL_SECONDS else 0.0


def fit_into_budget(run: Run, batch_seconds: float | None = None) -> None:
    """Plans the number of epochs again from the time that epochs take, so that the schedule ends with the time budget;
    the last one may be a part of an epoch. `batch_seconds`: of a training batch, before the first epoch."""
    state, planned = run.state, run.config.num_epochs
    if batch_seconds is None:
        seconds = mean(column(state.history[1:][-NUM_RECENT:] or state.history, "seconds"))
    else:
        run.budget.eval_share = run.processes.broadcast(run.budget.eval_share)
        run.budget.val_seconds = _first_val_seconds(run, batch_seconds)
        seconds = batch_seconds * len(run.loaders.train) + run.budget.val_seconds
    val_seconds = seconds if run.budget.val_seconds is None else run.budget.val_seconds
    left = run.processes.broadcast(run.budget.left() - _end_seconds(run, run.budget.val_seconds or 0.0))
    whole, rest = divmod(max(0.0, left), seconds)
    part = (rest - val_seconds) / (seconds - val_seconds) if rest > val_seconds and run.processes.is_alone else 0.0
    most = most_epochs(run.config, len(run.loaders.train.dataset))
    possible = max(state.epoch, 1, min(most, state.epoch + int(whole) + (part >= MIN_PART)))
    is_near = abs(possible - planned) <= REPLAN_SHARE * planned and planned - state.epoch > 2
    if is_near and state.epoch > 1 and possible != planned:
        return
    if part >= MIN_PART and possible < most:
        run.budget.planned_end = state.learning_rate.end = int(
            (possible - 1 + part) * state.learning_rate.steps_per_epoch
        )
    if possible == planned:
        return
    if abs(possible - planned) > NOTED_SHARE * planned:
        run.console.note(f"time_budget: there is time for {counted(possible, 'epoch')} ({planned} were planned)")
    change_epochs(run, possible, f"as many as {run.settings.asked.time_budget} have time for")
    run.checkpointer.attempt(run.checkpointer.write_config)


def _first_val_seconds(run: Run, batch_seconds: float) -> float:
    dataset = run.loaders.val.dataset
    num_like_training = len(dataset) * math.prod(dataset.tiling.size) / math.prod(run.config.shape)
    return run.budget.eval_share * batch_seconds / run.config.batch_size * num_like_training


def most_epochs(config: ResolvedConfig, num_samples: int) -> int:
    """More of them gain nothing, whatever the time. `num_samples`: of the training set."""
    return math.ceil(wanted_views(num_samples // config.whole_repeats) * config.epoch_parts / num_samples)


def is_out_of_time(run: Run) -> bool:
    """After a step: whether the rest of the time budget is needed for validation and the report. The learning rate
    falls within the
    time that there is: in a part of the epoch, or over more epochs than were planned. The processes of a job train
    whole epochs."""
    state, num_batches = run.state, len(run.loaders.train)
    if not (run.settings.replans() and run.processes.is_alone) or state.batch == num_batches:
        return False
    seconds, is_early = state.train_seconds / state.batch, state.batch < MIN_BATCHES
    val_seconds = run.budget.val_seconds
    if val_seconds is None:
        val_seconds = 0.0 if is_early else _first_val_seconds(run, seconds)
    left = run.budget.left() - val_seconds - _end_seconds(run, val_seconds)
    if is_early and left > 0:
        return False
    possible = state.batch + max(0, int(left / seconds))
    rate = state.learning_rate
    if possible < num_batches:
        rate.end = state.epoch * rate.steps_per_epoch + -(-possible // run.config.accumulation_steps)
    elif state.epoch + 1 < run.config.num_epochs:
        rate.end = run.budget.planned_end
    else:  # there may be time for more epochs than were planned
        rest = left - (num_batches - state.batch) * seconds
        most = most_epochs(run.config, len(run.loaders.train.dataset))
        more = min(int(rest / (num_batches * seconds + val_seconds)), most - run.config.num_epochs)
        rate.end = (run.config.num_epochs + more) * rate.steps_per_epoch if more > 0 else None
    if left > 0:
        return False
    run.budget.num_cut += num_batches - state.batch
    about = f"the rest of the time is for validation (about {val_seconds:.0f} s) and the report"
    run.console.note(f"time_budget: epoch {state.epoch + 1} ends after {state.batch} of {num_batches} batches; {about}")
    return True


def _end_seconds(run: Run, val_seconds: float) -> float:
    """Of the end of the run, where pictures are predicted as in validation."""
    picture_seconds = NUM_PICTURES * val_seconds / max(1, len(run.loaders.val.dataset.pairs))
    return min(END_SHARE * run.budget.seconds, run.budget.last_seconds + picture_seconds)


def change_epochs(run: Run, num_epochs: int, reason: str) -> None:
    """Another number than was planned; if it is quite another, warm-up, patience and average follow where they were
    left open."""
    state, settings, planned = run.state, run.settings, run.config.num_epochs
    settings.change(reason, num_epochs=num_epochs)
    state.learning_rate.num_epochs = num_epochs
    if abs(num_epochs - planned) <= NOTED_SHARE * planned:
        return
    if settings.was_open("early_stopping_patience"):
        patience, reason = choose_patience(num_epochs)
        settings.change(reason, early_stopping_patience=patience)
    if settings.was_open("warmup_epochs"):
        warmup, reason = choose_warmup(num_epochs)
        settings.change(reason, warmup_epochs=warmup)
        state.learning_rate.num_warmup_steps = round(warmup * state.learning_rate.steps_per_epoch)
    if settings.was_open("ema_decay") and state.ema is not None:
        decay, reason = choose_ema_decay(state.learning_rate.num_steps)
        settings.change(reason, ema_decay=decay)
        state.ema.decay = decay
        run.components.train_step.launcher.clear()  # a recorded graph holds the old one


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
    pilot_seconds: float  # at most
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
    has_pilots: bool = False,
) -> Forecast:
    """Sample counts are those of the datasets. `start_seconds` come once: compiling, filling a cache. `has_pilots`:
    learning rates will be tried.

    With a time budget, the epochs are those that the run will find to have time for; the last one may end early, with
    validation."""
    is_cached = config.cache != "none"
    train_seconds = sample.augment_seconds + (0.0 if is_cached else sample.read_seconds)
    val_seconds = 0.0 if is_cached else sample.val_seconds
    num_batches = num_train_samples // config.epoch_parts // config.batch_size
    per_step = with_loading(cost.seconds, config.batch_size * train_seconds, config, num_cores)
    per_val_sample = with_loading(cost.eval_seconds, val_seconds, config, num_cores)
    per_epoch = num_batches * per_step + num_val_samples * per_val_sample
    num_epochs = config.num_epochs
    pilot_steps = num_pilot_steps(num_epochs * -(-num_batches // config.accumulation_steps)) if has_pilots else 0
    pilot_seconds = MAX_PILOTS * pilot_steps * config.accumulation_steps * per_step
    start_seconds += pilot_seconds
    seconds = start_seconds + num_epochs * per_epoch
    if config.time_budget is not None:
        budget = seconds_of(config.time_budget)
        num_epochs = max(1, min(most_epochs(config, num_train_samples), int((budget - start_seconds) / per_epoch)))
        least = start_seconds + per_step + num_val_samples * per_val_sample
        seconds = max(least, min(budget, start_seconds + num_epochs * per_epoch))
    return Forecast(seconds, per_epoch, pilot_seconds, num_epochs, cost.memory)


def with_loading(seconds: float, loading: float, config: ResolvedConfig, num_cores: int) -> float:
    """Seconds on the device, together with those that one core needs to prepare the samples.

    Workers prepare them beside a GPU, which waits where they are slower. On a CPU the model computes on the same cores,
    and the two add up.
    """
    if config.num_workers == 0:
        return seconds + loading
    if config.device.startswith("cpu"):
        return max(seconds + loading / num_cores, loading / config.num_workers)
    return max(seconds, loading / config.num_workers)
