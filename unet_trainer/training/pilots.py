"""Tries the learning rate before the first epoch, and warns where a run does not learn.

The rate that was decided and a third of it train from the same weights on the same batches, flipped and no more. The
lower one is taken if it has learned clearly more, and is then tried against a third of itself, as it is where neither
has learned anything. The run begins with the weights that it would have begun with if that rate had been set."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Generator, Sequence

from unet_trainer.config.auto_training import MAX_PILOTS, num_pilot_steps
from unet_trainer.config.resolved_config import Settings
from unet_trainer.config.schema import id_names
from unet_trainer.loading.dataset import PILOT_EPOCH, Batch
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.runs.record import Trial
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.console import Bar, counted
from unet_trainer.training.compilation import restoring
from unet_trainer.training.run import Run
from unet_trainer.training.schedule import change_epochs

FACTOR = 1 / 3
WARMUP_SHARE = 0.2  # of a trial
JUDGED_SHARE = 1 / 3  # of a trial, its last part
CLEARLY_MORE = 1.25  # times the IoU of the higher rate
LEAST_IOU = 0.05  # more: below, neither has learned anything yet
LONGER = 2  # times the epochs, at a lower rate


def is_open(settings: Settings) -> bool:
    """Whether the rate is one that was decided, and not by trials; one that is set is never tried against others."""
    return settings["learning_rate"].source == "decided"


def try_learning_rates(run: Run) -> None:
    """Before the first step of a run; does nothing later."""
    state, config = run.state, run.config
    num_steps = num_pilot_steps(state.learning_rate.num_steps)
    if state.epoch or state.batch or not is_open(run.settings) or not num_steps:
        return
    trials, chosen, one_has_learned = list[Trial](), 0, False
    run.components.set_training_mode(0)
    run.connect()  # memory may have run out since the start
    num_batches = MAX_PILOTS * num_steps * config.accumulation_steps
    with run.console.bar("Trying learning rates:", num_batches, keep=False) as bar:
        for number in range(MAX_PILOTS):
            rate = float(f"{config.learning_rate * FACTOR**number:.2g}")
            iou, has_learned = _train(run, rate, num_steps, bar)
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
    run.record.update(trials=trials)
    run.checkpointer.attempt(run.checkpointer.write_config)


def has_time(settings: Settings) -> bool:
    """On a GPU, where neither the time nor the number of epochs is set. On a CPU a run is planned for an hour."""
    taken = settings.taken
    return settings.was_open("num_epochs") and taken.time_budget is None and not taken.device.startswith("cpu")


def is_better(lower: Trial, higher: Trial) -> bool:
    """Else the higher rate learns nearly as fast, and is taken."""
    return lower.iou > CLEARLY_MORE * higher.iou and lower.iou > higher.iou + LEAST_IOU


def _train(run: Run, rate: float, num_steps: int, bar: Bar) -> tuple[float, bool]:
    """The training IoU that the rate comes to, and whether one class everywhere gives less. Changes nothing."""
    step, metrics, size = run.components.train_step, run.state.metrics, run.config.accumulation_steps
    num_warmup, first_judged = max(1, int(WARMUP_SHARE * num_steps)), int((1 - JUDGED_SHARE) * num_steps)
    with restoring(run.components), contextlib.closing(_batches(run)) as batches:
        run.components.set_training_mode(0)
        for number in range(num_steps):
            if number == first_judged:
                metrics.reset()
            run.check_signals()
            step.begin_group(size, 0)
            for batch in itertools.islice(batches, size):
                step(batch, metrics)
                bar.tick()
            step.optimizer_step(metrics, _peak(run, rate) * min(1.0, (number + 1) / num_warmup))
        seen = metrics.summed(run.processes)
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


# Training does not learn if its IoU stays below that of a constant prediction (all foreground, or the most frequent
# class) and its loss hardly falls: where most pixels are foreground, a model that does learn is below the constant one
# for a while. A learning rate that is too high for the data and augmentation that is too strong both look like this.
TRIED_SHARE = 0.1  # of the epochs, after which a run should have begun to learn
STUCK_EPOCHS = 3  # in a row: a single one may be an accident
STUCK_STEPS = 300  # a good run of tiles with defects had passed the baseline by then
LOSS_SHARE = 0.8  # of the first epoch's loss: 0.85 to 0.89 on those tiles, 0.71 at a rate that learns
NOTHING_SHARE = 0.25  # of the baseline's IoU: background everywhere has a lower loss than random weights


def warn_if_not_learning(run: Run) -> None:
    """After an epoch; once."""
    state, config = run.state, run.config
    num_steps, first = state.epoch * state.learning_rate.steps_per_epoch, TRIED_SHARE * config.num_epochs
    baseline = best_baseline(state.confusion, config.num_classes, id_names(config))
    if run.was_warned or baseline is None or num_steps < STUCK_STEPS or state.epoch < first:
        return
    run.was_warned = is_stuck(state.history, baseline)
    if run.was_warned:
        best = max(column(state.history, "train_iou")[-STUCK_EPOCHS:])
        constant = f"{baseline.prediction} everywhere gives {baseline.iou:.4f}"
        fixes = f"Try learning_rate={config.learning_rate / 4:.2g}; see in the samples whether the masks fit the images"
        after = f"train IoU {best:.4f} after {counted(state.epoch, 'epoch')}"
        run.console.warn(f"training does not learn: {after}, {constant}. {fixes}; try augmentation=none")


def is_stuck(history: Sequence[Row], baseline: Baseline) -> bool:
    ious, losses = column(history, "train_iou"), column(history, "train_loss")
    if len(history) < STUCK_EPOCHS:
        return False
    best, has_fallen = max(ious[-STUCK_EPOCHS:]), min(losses[-STUCK_EPOCHS:]) < LOSS_SHARE * losses[0]
    return best < baseline.iou * (NOTHING_SHARE if has_fallen else 1)
