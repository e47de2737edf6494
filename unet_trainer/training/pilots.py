"""The learning rate is tried before the first epoch, and lowered where a run does not learn.

One that is too high for the data shows within a few hundred steps.

The rate that was decided and a third of it train from the same weights on the same batches, flipped and no more. The
lower one is taken if it has learned clearly more, and is then tried against a third of itself, as it is where neither
has learned anything; at such a rate a run needs more steps. It begins with the weights that it would have begun with if
that rate had been set."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unet_trainer.config.choices import MAX_PILOTS, PILOT_SHARE, describe_seconds, flips_of, num_pilot_steps
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import id_names
from unet_trainer.loading.augmentation import build_augmentation
from unet_trainer.loading.dataset import PILOT_EPOCH, Batch
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.model.random_state import seed_generators
from unet_trainer.system.console import Bar, counted, silent_console
from unet_trainer.training.build import build_components
from unet_trainer.training.compilation import restoring
from unet_trainer.training.history import Row, column
from unet_trainer.training.run import Run
from unet_trainer.training.time_budget import change_epochs, fit_into_budget

FACTOR = 1 / 3
WARMUP_SHARE = 0.2  # of a pilot
JUDGED_SHARE = 1 / 3  # of a pilot, its last part
CLEARLY_MORE = 1.25  # times the IoU of the higher rate
NUM_WARM_UP, NUM_TIMED = 1, 4  # steps: the first ones wait for the workers, the others tell the time of the next ones
MOST_SHARE = 1.3 * PILOT_SHARE  # of a time budget: the plan may be a guess, and the machine busy
LEAST_IOU = 0.05  # more: below, neither has learned anything yet
LONGER = 2  # times the epochs, at a lower rate


class TooSlow(Exception):
    """The time budget is too short for pilots; with the seconds that a batch takes."""


@dataclass(frozen=True)
class Pilot:
    learning_rate: float
    iou: float  # of training, in its last part


def is_open(settings: Settings) -> bool:
    """Whether the rate is one that was decided, and not by pilots: a value that is set is never tried against
    others."""
    decision = settings.decisions["learning_rate"]
    return decision.source == "decided" and not decision.reason.startswith("pilots")


def try_learning_rates(run: Run) -> None:
    """Before the first step of a run; does nothing later."""
    state, config = run.state, run.config
    num_steps = num_pilot_steps(state.learning_rate.num_steps)
    if state.epoch or state.batch or state.num_restarts or not is_open(run.settings) or not num_steps:
        return
    pilots: list[Pilot] = []
    chosen, one_has_learned = None, False
    run.components.set_training_mode(0)
    run.connect()  # memory may have run out since the start
    with run.console.bar(
        "Trying learning rates:", MAX_PILOTS * num_steps * config.accumulation_steps, keep=False
    ) as bar:
        for number in range(MAX_PILOTS):
            rate = float(f"{config.learning_rate * FACTOR**number:.2g}")
            try:
                iou, has_learned = _train(run, rate, num_steps, bar)
                pilots.append(Pilot(rate, iou))
                one_has_learned |= has_learned
            except TooSlow as slow:
                (batch_seconds,) = slow.args
                took = describe_seconds(batch_seconds * MAX_PILOTS * num_steps * config.accumulation_steps)
                budget = f"time_budget: {run.settings.asked.time_budget}"
                run.console.note(f"learning rates are not tried on: they would take up to {took} of {budget}")
                if run.settings.replans():
                    fit_into_budget(run, run.processes.broadcast(batch_seconds))
                break
            if chosen is None or is_better(pilots[-1], chosen):
                chosen = pilots[-1]
            elif one_has_learned:
                break
    if len(pilots) < 2 or chosen is None:
        return
    run.console.say(f"Learning rates, tried for {num_steps} steps each from the same weights:")
    for one in pilots:
        run.console.say(f"  {one.learning_rate:<8g} train IoU {one.iou:.4f}{'  ← taken' if one is chosen else ''}")
    ious = ", ".join(f"{one.iou:.2f} at {one.learning_rate:g}" for one in pilots)
    run.settings.change(f"pilots of {num_steps} steps: train IoU {ious}", learning_rate=chosen.learning_rate)
    state.learning_rate.peak = _peak(run, chosen.learning_rate)
    if chosen is not pilots[0] and has_time(run.settings):
        reason = f"{LONGER} times {config.num_epochs}: the lower learning rate needs more steps"
        change_epochs(run, LONGER * config.num_epochs, reason)
        run.console.say(f"  num_epochs {run.config.num_epochs}: {reason}")
    tried = [{**dataclasses.asdict(one), "steps": num_steps, "is_chosen": one is chosen} for one in pilots]
    run.events.add("pilots", pilots=tried)
    run.checkpointer.attempt(run.checkpointer.write_config)


def has_time(settings: Settings) -> bool:
    """On a GPU, where neither the time nor the number of epochs is set. On a CPU a run is planned for an hour."""
    taken = settings.taken
    return settings.was_open("num_epochs") and taken.time_budget is None and not taken.device.startswith("cpu")


def is_better(lower: Pilot, higher: Pilot) -> bool:
    """Else the higher rate learns nearly as fast, and is taken."""
    return lower.iou > CLEARLY_MORE * higher.iou and lower.iou > higher.iou + LEAST_IOU


def _train(run: Run, rate: float, num_steps: int, bar: Bar) -> tuple[float, bool]:
    """The training IoU that the rate comes to, and whether that is more than one class everywhere gives. Changes
    nothing."""
    step, metrics, size = run.components.train_step, run.state.metrics, run.config.accumulation_steps
    num_warmup, first_judged = max(1, int(WARMUP_SHARE * num_steps)), int((1 - JUDGED_SHARE) * num_steps)
    most_seconds = MOST_SHARE * run.budget.seconds
    with restoring(run.components), contextlib.closing(_batches(run)) as batches:
        run.components.set_training_mode(0)
        began = time.perf_counter()
        for number in range(num_steps):
            if number == first_judged:
                metrics.reset()
            for index, batch in enumerate(itertools.islice(batches, size)):
                if index == 0:
                    if run.processes.is_alone:
                        run.raise_if_ending()
                    now = time.perf_counter()
                    if number <= NUM_WARM_UP:
                        started = now
                    num_timed = number - NUM_WARM_UP
                    batch_seconds = (
                        (now - started) / (num_timed * size) if num_timed > 0 else (now - began) / max(1, number * size)
                    )
                    is_slow = MAX_PILOTS * num_steps * size * batch_seconds > most_seconds
                    is_told = num_timed >= NUM_TIMED or (number > 0 and now - began > most_seconds)
                    if run.processes.any_rank(is_slow and is_told):
                        raise TooSlow(batch_seconds)
                    if step.sync is not None:
                        step.sync.begin_step()
                    step.begin_group(size, 0)
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
        yield from run.loaders.train.epoch(epoch, 0, run.signals.is_stopping)
        run.raise_if_ending()


# A run that does not learn begins again, once, with a gentler recipe; if that does not learn either, it ends.
#
# Training does not learn if its IoU stays below that of a constant prediction (all foreground, or the most frequent
# class) and its
# loss hardly falls: where most pixels are foreground, a model that does learn is below the constant one for a while. A
# learning rate that is too high for the data and augmentation that is too strong both look like this, and nothing in
# the data tells beforehand. Only values that were decided are changed: what the user has set stays.

TRIED_SHARE = 0.1  # of the epochs, after which a run should have begun to learn
LATEST_SHARE = 0.5  # of the epochs, after which it does not begin again
GIVEN_UP_SHARE = 0.4  # of the epochs of the second attempt: one of tiles at 64² began to learn after a quarter of them
STUCK_EPOCHS = 3  # in a row: a single one may be an accident
STUCK_STEPS = 300  # a good run of tiles with defects had passed the baseline by then
# of the first epoch's loss, below which training learns: 0.85 to 0.89 on those tiles, 0.71 at a rate that learns
LOSS_SHARE = 0.8
NOTHING_SHARE = (
    0.25  # of the baseline's IoU: background everywhere has a lower loss than random weights, and is not learning
)
RATE_FACTOR = 0.25  # the rate that fails there learns when divided by 4 (docs/quality.md)


def begin_again_if_stuck(run: Run) -> None:
    """After an epoch. Sets `has_given_up` on a run that has had its second chance."""
    state, num_epochs = run.state, run.config.num_epochs
    baseline = best_baseline(state.confusion, run.config.num_classes, id_names(run.config))
    if (
        baseline is None
        or state.epoch * state.learning_rate.steps_per_epoch < STUCK_STEPS
        or not is_stuck(state.history, baseline)
    ):
        return
    if state.num_restarts:
        run.has_given_up = state.epoch >= GIVEN_UP_SHARE * num_epochs
        if run.has_given_up and state.epoch < num_epochs:
            run.console.warn(
                f"training does not learn with the gentler recipe either: it ends after epoch {state.epoch}"
            )
    elif run.config.init_from is None and TRIED_SHARE * num_epochs <= state.epoch <= LATEST_SHARE * num_epochs:
        changes = gentler(run.settings, can_change_samples=run.processes.is_alone)
        if changes:
            begin_again(run, changes, baseline)


def is_stuck(history: Sequence[Row], baseline: Baseline) -> bool:
    ious, losses = column(history, "train_iou"), column(history, "train_loss")
    return (
        len(history) >= STUCK_EPOCHS
        and max(ious[-STUCK_EPOCHS:]) < baseline.iou
        and (
            min(losses[-STUCK_EPOCHS:]) >= LOSS_SHARE * losses[0]
            or max(ious[-STUCK_EPOCHS:]) < NOTHING_SHARE * baseline.iou
        )
    )


def gentler(settings: Settings, can_change_samples: bool = True) -> dict[str, Any]:
    """The settings to begin again with."""
    taken, decided = settings.taken, {name for name, one in settings.decisions.items() if one.source == "decided"}
    changes: dict[str, Any] = {}
    if "learning_rate" in decided:
        changes["learning_rate"] = float(f"{RATE_FACTOR * taken.learning_rate:.2g}")
    # Workers of a job must not be forked again: NCCL is not fork-safe.
    flips = flips_of(taken.augmentation) or "none"
    if "augmentation" in decided and can_change_samples and flips != taken.augmentation:
        changes["augmentation"] = flips
    return changes


def begin_again(run: Run, changes: dict[str, Any], baseline: Baseline) -> None:
    """From the initial weights, which follow from the seed, as if the run had begun with these settings. Raises
    UserError, with nothing changed, for pretrained weights that cannot be loaded again."""
    settings, state, loaders = run.settings, run.state, run.loaders
    if settings.replans():
        changes = {**changes, "num_epochs": max(1, run.config.num_epochs - state.epoch)}  # what is left of the time
    seed_generators(run.config.seed, run.components.numerics.device)  # the model below seeds that of its own device
    # On the CPU, where a second model finds room; SyncBatchNorm is for GPUs only.
    device = run.components.numerics.device if run.config.sync_batchnorm else torch.device("cpu")
    fresh = build_components(
        dataclasses.replace(run.config, **changes),
        state.segmenter.spec,
        device,
        len(loaders.train),
        silent_console(),
        resumes=not run.processes.is_main,
        launch=run.processes.launch,
        custom=run.custom,
    ).state
    best = max(column(state.history, "train_iou")[-STUCK_EPOCHS:])
    seen = (
        f"train IoU {best:.4f} after {counted(state.epoch, 'epoch')}, {baseline.prediction} everywhere gives "
        f"{baseline.iou:.4f}"
    )
    reason = f"training did not learn with {_describe(settings.taken, changes)}: {seen}"
    settings.change(reason, **changes)
    seconds, state.learning_rate = state.seconds, fresh.learning_rate
    state.load_state_dict({**fresh.state_dict(), "num_restarts": 1})
    state.broadcast(run.processes)
    state.seconds = seconds
    run.components.train_step.launcher.clear()  # recorded kernels hold the optimizer state of before
    if "augmentation" in changes:
        dataset = loaders.train.dataset
        dataset.augmentation = build_augmentation(run.config.augmentation, run.config.shape, dataset.image_spec)
        if loaders.pool is not None:
            loaders.pool.close()  # its workers have the augmentation of before
    run.events.add("rollback", epoch=0, batch=0, text=reason)
    run.console.warn(f"{reason}. Beginning again with {_describe(settings.taken, changes)}")
    state.gather_ranks(run.processes)
    run.checkpointer.save_state()


def _describe(taken: ResolvedConfig, changes: dict[str, Any]) -> str:
    parts = [f"learning_rate {taken.learning_rate:g}"] if "learning_rate" in changes else []
    if "augmentation" in changes:
        names = [next(iter(one)) for one in taken.augmentation if isinstance(one, dict)]
        parts.append(f"augmentation {', '.join(names) or taken.augmentation}")
    return " and ".join(parts)
