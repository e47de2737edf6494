"""How long a run is: planned before the first epoch from the seconds that a step takes, and fitted to the time budget
afterwards, between epochs and between steps."""

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from unet_trainer.config.auto_training import choose_ema_decay, choose_patience, choose_warmup
from unet_trainer.config.facts import StepCost
from unet_trainer.config.parsers import describe_seconds
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.concurrency import call_with_timeout
from unet_trainer.system.console import counted
from unet_trainer.training.run import Run
from unet_trainer.training.time_budget import (
    NUM_SAMPLES,
    SAMPLE_SECONDS,
    describe_run,
    epochs_in,
    most_epochs,
    pilot_seconds,
    step_seconds,
    time_samples,
)

NUM_RECENT = 5  # epochs whose time tells that of the next ones
OTHER_SHARE = 0.2  # of the epochs: where the plan is off by more, what depends on their number is decided anew
MIN_BATCHES = 5  # that tell the time of the next ones: the first ones wait for the workers


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


def fit_into_budget(run: Run, epoch_seconds: float | None = None, other_seconds: float = 0.0) -> None:
    """Plans the number of epochs again from the time that epochs take, so that the schedule ends with the time budget;
    the last one may be a part of an epoch. `epoch_seconds`: before the first epoch; `other_seconds`: what else comes
    first."""
    state, budget, rate = run.state, run.budget, run.state.learning_rate
    seconds = epoch_seconds or recent_epoch_seconds(state.history)
    left = run.processes.broadcast(budget.left() - _end_seconds(run) - other_seconds)
    epochs = epochs_in(left, seconds, budget.val_seconds, may_be_cut=run.processes.is_alone)
    most = most_epochs(run.config, len(run.loaders.train.dataset))
    possible = max(state.epoch, 1, min(most, state.epoch + math.ceil(epochs)))
    if epochs > int(epochs) and possible < most:
        budget.planned_end = rate.end = int((state.epoch + epochs) * rate.steps_per_epoch)
    change_epochs(run, possible, f"as many as {run.settings.requested.time_budget} have time for")


def recent_epoch_seconds(history: Sequence[Row]) -> float:
    """Without those of the first epoch, which starts the workers."""
    return mean(column(history[1:][-NUM_RECENT:] or history, "seconds"))


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
        more = epochs_in(rest, num_batches * seconds + budget.val_seconds, budget.val_seconds, may_be_cut=True)
        more = min(more, most_epochs(run.config, len(run.loaders.train.dataset)) - run.config.num_epochs)
        rate.end = int((run.config.num_epochs + more) * rate.steps_per_epoch) if more > 0 else None
    return left <= 0


def _end_seconds(run: Run) -> float:
    return run.budget.end_seconds(len(run.loaders.val.dataset.pairs))


def change_epochs(run: Run, num_epochs: int, reason: str) -> None:
    """Before the first epoch, warm-up, patience and average follow where they were left open."""
    state, settings, rate, planned = run.state, run.settings, run.state.learning_rate, run.config.num_epochs
    settings.change(reason, num_epochs=num_epochs)
    rate.num_epochs = num_epochs
    if state.epoch or abs(num_epochs - planned) <= OTHER_SHARE * planned:
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
