"""What may change between two starts of a run, what must not, and how the loaded state is adapted to the changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unet_trainer.config.errors import CheckpointError
from unet_trainer.config.resolved_config import ResolvedConfig, Setting, Settings
from unet_trainer.config.schema import FIELDS, Config, parse_value
from unet_trainer.data.splits import Split
from unet_trainer.images.image_spec import depth_name
from unet_trainer.runs.findings import longer
from unet_trainer.runs.folder import resume_command
from unet_trainer.system.console import Console, counted
from unet_trainer.system.launch import Launch
from unet_trainer.training.state import TrainState

# Changing these between two starts would make the result meaningless: classes, model, optimizer's state, order of the
# images, which images validate, which epoch was best, what the model sees.
MUST_STAY = {
    "num_classes", "mask_values", "ignore_value", "unknown_values", "mask_tolerance", "architecture", "encoder",
    "decoder_channels", "decoder_attention", "in_channels", "optimizer", "seed", "num_folds", "fold", "monitor",
    "image_size", "fit", "image_mean", "image_std", "normalize", "init_from", "repeats",
}  # fmt: skip
COMPARED_LOSS = {"loss", "class_weights"}  # must stay with monitor: val_loss
MAY_CHANGE_SILENTLY = {  # without an effect on the result
    "resume", "num_workers", "checkpoint_dir", "run_name", "checkpoint_minutes", "on_oom",
    "worker_timeout", "tensorboard", "wandb", "trackio", "mlflow",
}  # fmt: skip
# What is open at the resume as well keeps the value of the checkpoint, but for these: they change no bits.
MAY_BE_CHOSEN_AGAIN = ("device", "num_workers", "cache", "resume")
# null stands for what was chosen along with another setting.
CHOSEN_WITH = {"decoder_channels": "encoder", "ignore_value": "mask_values", "class_names": "mask_values"}
# They decide which batches and steps an epoch has.
BATCHING_KEYS = ("batch_size", "accumulation_steps", "crops_per_image", "repeats")


def keep_decided(config: Config, before: Mapping[str, Any]) -> Config:
    """The config of a resumed run: what it leaves open is as the run began. Raises CheckpointError for another number
    of classes, which no mask value would fit."""
    if config.num_classes not in ("auto", before.get("num_classes", config.num_classes)):
        raise _refusal([f"num_classes: {before['num_classes']} in the checkpoint, {config.num_classes} now"])
    chosen_again = MAY_BE_CHOSEN_AGAIN if config.time_budget is None else (*MAY_BE_CHOSEN_AGAIN, "num_epochs")
    names = [name for name in FIELDS if getattr(config, name) == "auto" and name not in chosen_again]
    names += [name for name, other in CHOSEN_WITH.items() if other in names and getattr(config, name) is None]
    names += ["init_from"] if config.init_from is None else []
    kept = {name: parse_value(name, before[name]) for name in names if before.get(name, "auto") != "auto"}
    return replace(config, **kept)


def keep_reasons(settings: Settings, before: Mapping[str, Any], decisions: Mapping[str, Sequence[str]]) -> None:
    """A setting that is as the run began keeps the source and the reason of then: a run is resumed with its own
    config.yaml, which would else be the source of all of them."""
    now = settings.repeatable_dict()
    for name in decisions.keys() & now.keys() & before.keys():
        if now[name] == before[name] and not settings[name].is_decided:
            settings[name] = Setting(settings[name].value, *decisions[name])


def split_names(split: Split) -> dict[str, list[str]]:
    return {"train": [pair.name for pair in split.train], "val": [pair.name for pair in split.val]}


def compare_configs(before: Mapping[str, Any], now: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """What changed from the checkpoint's config to that of this start, a line for each key; raises for what must not
    change. `requested`: the config before anything was decided; what is `auto` in both has not changed."""
    names = [name for name in FIELDS if name in before and name not in MAY_CHANGE_SILENTLY]
    changed = [name for name in names if before[name] not in (now[name], requested[name])]
    fixed = MUST_STAY | (COMPARED_LOSS if now["monitor"] == "val_loss" else set())
    if refused := [name for name in changed if name in fixed]:
        raise _refusal(f"{name}: {before[name]} in the checkpoint, {now[name]} now" for name in refused)
    return [f"{name}: {before[name]} → {now[name]}" for name in changed]


def _refusal(lines: Iterable[str]) -> CheckpointError:
    heading = "cannot go on with other settings than the run began with:"
    return CheckpointError("\n  ".join([heading, *lines, "Keep them, or start a new run"]))


def compare_splits(
    before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]], table: Path | None = None
) -> None:
    """Raises if the split differs, by names: training images must not validate, and scores must stay comparable.
    `table`: the file that decides the split of this start, if it is not decided anew."""
    decides = f"{table} decides it, and is not the run's own" if table else "data_dir, val_fraction and seed decide it"
    for part in ("val", "train"):
        if names := set(before[part]) ^ set(now[part]):
            what = f"images of {part} differ: {len(names)}, e.g. {min(names)} ({decides})"
            raise CheckpointError(f"cannot go on with another data split: {what}; put it back, or start a new run")


def compare_depths(before: str, now: str) -> None:
    """Raises if the values of the images have other units than those that image_mean and image_std were measured in."""
    if now != before:
        what = f"they hold {depth_name(now)} values, those that the run began with {depth_name(before)} ones"
        raise CheckpointError(f"cannot go on with these images: {what}; put them back, or start a new run")


def adapt_to_changes(config: ResolvedConfig, before: Mapping[str, Any], state: TrainState, console: Console) -> None:
    """Other batches restart the current epoch."""
    others = [name for name in BATCHING_KEYS if name in before and before[name] not in ("auto", getattr(config, name))]
    if state.batch and others:
        state.restart_epoch()
        console.note(f"epoch {state.epoch + 1} begins anew, because {' and '.join(others)} changed")


def adapt_to_world_size(
    config: ResolvedConfig, before: int, launch: Launch, state: TrainState, console: Console
) -> None:
    """Finds the place in the epoch with another number of processes than the checkpoint's, and says what changes."""
    now, size = launch.world_size, config.batch_size * config.accumulation_steps
    if before == now:
        return
    rate = ", and so is the learning rate (scale_lr)" if config.scale_lr else "; learning_rate stays"
    what = f"{counted(before, 'process', 'processes')} → {now}. The effective batch is {size * now} instead of"
    console.note(f"changed since then: {what} {size * before}{rate}. Sums are taken in another order: the bits differ")
    num_samples = state.batch * config.batch_size * before
    state.batch, left = divmod(num_samples, config.batch_size * now)
    if left or state.batch % config.accumulation_steps:
        state.restart_epoch()
        within = f"its {num_samples} samples so far end within a step of today's size"
        console.note(f"epoch {state.epoch + 1} begins anew: {within}")


def describe_position(state: TrainState) -> str:
    """The last epoch or batch that is done."""
    if state.batch == 0:
        return f"epoch {state.epoch}" if state.epoch else "the start"
    return f"batch {state.batch} of epoch {state.epoch + 1}"


def say_resumed(
    config: ResolvedConfig, before: Mapping[str, Any], state: TrainState, changes: Sequence[str], console: Console
) -> None:
    """`before` is the config of the checkpoint."""
    early, best = state.early_stopping, ""
    if early.best_epoch:
        best = f"; best {config.monitor} so far {early.best_value:.4f} (epoch {early.best_epoch})"
    console.say(f"Resuming after {describe_position(state)}{best}")
    for change in changes:
        console.note(f"changed since then: {change}")
    if before["num_epochs"] not in ("auto", config.num_epochs) and state.epoch < config.num_epochs:
        how = f"now spans {config.num_epochs} epochs instead of {before['num_epochs']}"
        how = "stays" if config.scheduler in ("constant", "plateau") else how
        rate = state.next_learning_rate(config.accumulation_steps)
        console.note(f"the {config.scheduler} schedule {how}; the learning rate continues at {rate:.2e}")


def say_already_finished(config: ResolvedConfig, state: TrainState, folder: Path, console: Console) -> None:
    ended, setting = f"stopped early after epoch {state.epoch}", "early_stopping_patience=null"
    if state.epoch >= config.num_epochs:
        ended, setting = f"finished its {counted(state.epoch, 'epoch')}", longer(config)
    console.note(f"this run had {ended}; to train on: {resume_command(folder, setting)}")
