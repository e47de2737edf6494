"""A run that does not learn begins again, once, with a gentler recipe; if that does not learn either, it ends.

Training does not learn if its IoU stays below that of a constant prediction (all foreground, or the most frequent class) and its
loss hardly falls: where most pixels are foreground, a model that does learn is below the constant one for a while. A learning rate
that is too high for the data and augmentation that is too strong both look like this, and nothing in the data tells beforehand.
Only values that were decided are changed: what the user has set stays.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import torch

from unet_trainer.config.choices import flips_of
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import id_names
from unet_trainer.loading.augmentation import build_augmentation
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.system.console import Console, counted
from unet_trainer.training.build import build_components
from unet_trainer.training.history import Row, column
from unet_trainer.training.run import Run

TRIED_SHARE = 0.1  # of the epochs, after which a run should have begun to learn
LATEST_SHARE = 0.5  # of the epochs, after which it does not begin again
GIVEN_UP_SHARE = 0.4  # of the epochs of the second attempt: one of tiles at 64² began to learn after a quarter of them
NUM_EPOCHS = 3  # in a row: a single one may be an accident
MIN_STEPS = 300  # a good run of tiles with defects had passed the baseline by then
LOSS_SHARE = 0.8  # of the first epoch's loss, below which training learns: 0.85 to 0.89 on those tiles, 0.71 at a rate that learns
RATE_FACTOR = 0.25  # the rate that fails there learns when divided by 4 (docs/quality.md)


def begin_again_if_stuck(run: Run) -> None:
    """After an epoch. Sets `has_given_up` on a run that has had its second chance."""
    state, num_epochs = run.state, run.config.num_epochs
    baseline = best_baseline(state.confusion, run.config.num_classes, id_names(run.config))
    if baseline is None or state.epoch * state.learning_rate.steps_per_epoch < MIN_STEPS or not is_stuck(state.history, baseline):
        return
    if state.num_restarts:
        run.has_given_up = state.epoch >= GIVEN_UP_SHARE * num_epochs
        if run.has_given_up and state.epoch < num_epochs:
            run.console.warn(f"training does not learn with the gentler recipe either: it ends after epoch {state.epoch}")
    elif TRIED_SHARE * num_epochs <= state.epoch <= LATEST_SHARE * num_epochs:
        changes = gentler(run.settings, can_change_samples=run.processes.is_alone)
        if changes:
            begin_again(run, changes, baseline)


def is_stuck(history: Sequence[Row], baseline: Baseline) -> bool:
    ious, losses = column(history, "train_iou"), column(history, "train_loss")
    return (
        len(history) >= NUM_EPOCHS
        and max(ious[-NUM_EPOCHS:]) < baseline.iou
        and min(losses[-NUM_EPOCHS:]) >= LOSS_SHARE * losses[0]
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
    """From the initial weights, which follow from the seed, as if the run had begun with these settings. Raises UserError, with
    nothing changed, for pretrained weights that cannot be loaded again."""
    settings, state, loaders = run.settings, run.state, run.loaders
    if settings.replans():
        changes = {**changes, "num_epochs": max(1, run.config.num_epochs - state.epoch)}  # what is left of the time
    # On the CPU, where a second model finds room; SyncBatchNorm is for GPUs only.
    device = run.components.numerics.device if run.config.sync_batchnorm else torch.device("cpu")
    fresh = build_components(
        dataclasses.replace(run.config, **changes),
        state.segmenter.spec,
        device,
        len(loaders.train),
        Console(io.StringIO()),
        resumes=not run.processes.is_main,
        launch=run.processes.launch,
    ).state
    best = max(column(state.history, "train_iou")[-NUM_EPOCHS:])
    seen = f"train IoU {best:.4f} after {counted(state.epoch, 'epoch')}, {baseline.prediction} everywhere gives {baseline.iou:.4f}"
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
