"""Resumed runs: adapts the loaded state to changed settings, and tells the user where the run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unet_trainer.config.parsers import doubled
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.runs.checkpoint_file import FIRST_FORMAT_WITH_NATIVE_IOU, FIRST_FORMAT_WITH_SET_LOSS
from unet_trainer.system.console import Console, counted
from unet_trainer.training.state import TrainState

# They decide which batches and steps an epoch has.
BATCHING_KEYS = ("batch_size", "accumulation_steps", "crops_per_image", "repeats")


def adapt_to_changes(config: ResolvedConfig, before: Mapping[str, Any], state: TrainState, console: Console) -> None:
    """Other batches restart the current epoch; another learning rate undoes the reduction after a rollback."""
    others = [name for name in BATCHING_KEYS if name in before and before[name] not in ("auto", getattr(config, name))]
    if state.batch and others:
        state.restart_epoch()
        console.note(f"epoch {state.epoch + 1} begins anew, because {' and '.join(others)} changed")
    if before["learning_rate"] != config.learning_rate:  # the user has chosen another
        state.learning_rate.factor, state.num_rollbacks = 1.0, 0


def describe_position(state: TrainState) -> str:
    """The last epoch or batch that is done."""
    if state.batch == 0:
        return f"epoch {state.epoch}" if state.epoch else "the start"
    return f"batch {state.batch} of epoch {state.epoch + 1}"


def say_resumed(
    config: ResolvedConfig,
    before: Mapping[str, Any],
    state: TrainState,
    changes: Sequence[str],
    checkpoint_format: int,
    console: Console,
) -> None:
    """`before` is the config and `checkpoint_format` the format of the checkpoint."""
    best = f"; best {config.monitor} so far {state.early_stopping.best_value:.4f} (epoch {state.early_stopping.best_epoch})"
    console.say(f"Resuming after {describe_position(state)}{best if state.early_stopping.best_epoch else ''}")
    for change in changes:
        console.note(f"changed since then: {change}")
    if state.learning_rate.factor != 1:
        console.note(f"numbers were not finite earlier: the learning rate is {state.learning_rate.factor:g} of what is planned")
    if config.monitor == "val_loss" and checkpoint_format < FIRST_FORMAT_WITH_SET_LOSS:
        console.note("val_loss was a mean over batches when this run began and is that of the whole set now; the two may differ")
    if config.fit == "resize" and checkpoint_format < FIRST_FORMAT_WITH_NATIVE_IOU:
        console.note("val_iou was measured at image_size when this run began and is at native resolution now; the two may differ")
    horizon = before["num_epochs"]
    if horizon not in ("auto", config.num_epochs) and state.epoch < config.num_epochs:
        rate = state.learning_rate.at(state.epoch * state.learning_rate.steps_per_epoch)
        how = (
            "stays" if config.scheduler in ("constant", "plateau") else f"now spans {config.num_epochs} epochs instead of {horizon}"
        )
        console.note(f"the {config.scheduler} schedule {how}; the learning rate goes on at {rate:.2e}")


def longer(config: ResolvedConfig) -> str:
    """The setting with which a run trains for twice as long."""
    if config.time_budget is not None:
        return f"time_budget={doubled(config.time_budget)}"
    return f"num_epochs={2 * config.num_epochs}"


def say_already_finished(config: ResolvedConfig, state: TrainState, command: str, console: Console) -> None:
    if state.epoch >= config.num_epochs:
        console.note(f"this run had finished its {counted(config.num_epochs, 'epoch')}; to train on: {command} {longer(config)}")
    else:
        console.note(f"this run had stopped early after epoch {state.epoch}; to train on: {command} early_stopping_patience=null")
