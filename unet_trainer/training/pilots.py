"""Tries the learning rate before the first epoch.

The rate that was decided and a third of it train from the same weights on the same batches, flipped and no more. The
lower one is taken if it has learned clearly more, and is then tried against a third of itself, as it is where neither
has learned anything. The run begins with the weights that it would have begun with if that rate had been set."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator

from unet_trainer.config.auto_training import MAX_PILOTS, num_pilot_steps
from unet_trainer.config.resolved_config import Settings
from unet_trainer.config.schema import id_names
from unet_trainer.loading.dataset import PILOT_EPOCH, Batch
from unet_trainer.model.baselines import best_baseline
from unet_trainer.runs.record import Trial
from unet_trainer.system.console import Bar
from unet_trainer.training.run import Run
from unet_trainer.training.schedule import change_epochs
from unet_trainer.training.step import Group

FACTOR = 1 / 3
WARMUP_SHARE = 0.2  # of a trial
JUDGED_SHARE = 1 / 3  # of a trial, its last part
CLEARLY_MORE = 1.25  # times the IoU of the higher rate
LEAST_IOU = 0.05  # more: below, neither has learned anything yet
LONGER = 2  # times the epochs, at a lower rate


def is_open(settings: Settings) -> bool:
    """Whether the rate is one that was decided, and not by trials; one that is set is never tried against others."""
    return settings["learning_rate"].source == "decided"


def try_learning_rates(run: Run, check: Callable[[], object]) -> None:
    """Before the first step of a run; does nothing later. `check` is called before each step."""
    state, config = run.state, run.config
    num_steps = num_pilot_steps(state.learning_rate.num_steps)
    if state.epoch or state.batch or not is_open(run.settings) or not num_steps:
        return
    trials, chosen, one_has_learned = list[Trial](), 0, False
    num_batches = MAX_PILOTS * num_steps * config.accumulation_steps
    with run.console.bar("Trying learning rates:", num_batches, keep=False) as bar:
        for number in range(MAX_PILOTS):
            rate = float(f"{config.learning_rate * FACTOR**number:.2g}")
            iou, has_learned = _train(run, rate, num_steps, bar, check)
            trials.append(Trial(rate, iou, num_steps, is_chosen=False))
            one_has_learned |= has_learned
            if number and is_better(trials[-1], trials[chosen]):
                chosen = number
            elif number and one_has_learned:
                break
    trials[chosen] = dataclasses.replace(trials[chosen], is_chosen=True)
    run.console.say(f"Learning rates, tried for {num_steps} steps each from the same weights:")
    for one in trials:
        run.console.say(f"  {one.learning_rate:<8g} train IoU {one.iou:.4f}{'  ← taken' if one.is_chosen else ''}")
    ious = ", ".join(f"{one.iou:.2f} at {one.learning_rate:g}" for one in trials)
    rate = trials[chosen].learning_rate
    run.settings.change(f"pilots of {num_steps} steps: train IoU {ious}", "trials", learning_rate=rate)
    state.learning_rate.peak = _peak(run, rate)
    if chosen and has_time(run.settings):
        reason = f"{LONGER} times {config.num_epochs}: the lower learning rate needs more steps"
        change_epochs(run, LONGER * config.num_epochs, reason)
        run.console.say(f"  num_epochs {run.config.num_epochs}: {reason}")
    run.reporter.record.update(trials=trials)
    run.checkpointer.attempt(run.checkpointer.write_config)


def has_time(settings: Settings) -> bool:
    """On a GPU, where neither the time nor the number of epochs is set. On a CPU a run is planned for an hour."""
    taken = settings.taken
    return settings.was_open("num_epochs") and taken.time_budget is None and not taken.device.startswith("cpu")


def is_better(lower: Trial, higher: Trial) -> bool:
    """Else the higher rate learns nearly as fast, and is taken."""
    return lower.iou > CLEARLY_MORE * higher.iou and lower.iou > higher.iou + LEAST_IOU


def _train(run: Run, rate: float, num_steps: int, bar: Bar, check: Callable[[], object]) -> tuple[float, bool]:
    """The training IoU that the rate comes to, and whether one class everywhere gives less. Changes nothing."""
    step, metrics, size = run.components.train_step, run.state.metrics, run.config.accumulation_steps
    num_warmup, first_judged = max(1, int(WARMUP_SHARE * num_steps)), int((1 - JUDGED_SHARE) * num_steps)
    with run.components.restoring(), contextlib.closing(_batches(run)) as batches:
        run.components.set_training_mode(0)
        for number in range(num_steps):
            if number == first_judged:
                metrics.reset()
            check()
            warm_up = min(1.0, (number + 1) / num_warmup)
            step(Group(itertools.islice(batches, size), size, 0), _peak(run, rate) * warm_up, metrics)
            bar.tick(size)
        seen = metrics.summed(run.processes.all_gather)
        iou = seen.scores().iou
        if math.isnan(iou):  # no step was finite
            return 0.0, False
        baseline = best_baseline(seen.matrix.tolist(), run.config.num_classes, id_names(run.config))
        return iou, baseline is None or iou > baseline.iou


def _peak(run: Run, rate: float) -> float:
    return rate * (run.processes.launch.world_size if run.config.scale_lr else 1)


def _batches(run: Run) -> Generator[Batch, None, None]:
    """The same for each rate."""
    for epoch in itertools.count(PILOT_EPOCH):
        yield from run.loaders.train.epoch(epoch)
