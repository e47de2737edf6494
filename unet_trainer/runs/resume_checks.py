"""What may change between two starts of a run, and what must not. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unet_trainer.config.resolved_config import Decision, Settings
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.datasets.splits import Split
from unet_trainer.images.mask_coding import given_coding
from unet_trainer.runs.errors import CheckpointError

# Changing these between two starts would make the result meaningless; the text says what they decide.
MUST_STAY = {
    "num_classes": "the classes",
    "mask_values": "the classes",
    "ignore_value": "the classes",
    "unknown_values": "the classes",
    "mask_tolerance": "the classes",
    "architecture": "the model",
    "encoder": "the model",
    "decoder_channels": "the model",
    "decoder_attention": "the model",
    "deep_supervision": "the model in training",
    "optimizer": "the optimizer's state",
    "seed": "the order of the images",
    "monitor": "which epoch was best",
    "image_size": "what the model sees",
    "num_folds": "which images validate",
    "fold": "which images validate",
    "repeats": "how many steps an epoch has",
    "fit": "what the model sees",
    "in_channels": "the model",
    "image_mean": "what the model sees",
    "image_std": "what the model sees",
}
# And these with monitor: val_loss, or values of two different losses would be compared.
MUST_STAY_FOR_VAL_LOSS = {"loss": "which epoch was best", "class_weights": "which epoch was best"}
# Changing these does not affect the result.
MAY_CHANGE_SILENTLY = frozenset(
    [
        "resume",
        "num_workers",
        "checkpoint_dir",
        "run_name",
        "checkpoint_minutes",
        "on_save_error",
        "on_nan",
        "on_oom",
        "worker_timeout",
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "process_timeout",
    ]
)


# What is open at the resume as well keeps the value of the checkpoint, but for these: they change no bits.
MAY_BE_CHOSEN_AGAIN = ("device", "num_workers", "cache", "resume", "num_epochs")
# What settings meant before they existed.
BEFORE_THEY_EXISTED: Mapping[str, Any] = {
    "repeats": 1,
    "mask_tolerance": 0,
    "encoder_lr_factor": 1.0,
    "decoder_attention": "none",
    "deep_supervision": 0.0,
    "cutmix": 0.0,
}


def keep_decided(config: Config, before: Mapping[str, Any]) -> Config:
    """The config of a resumed run: what it leaves open is as the run began. Raises CheckpointError for another number of classes,
    which no mask value would fit."""
    number = before.get("num_classes", config.num_classes)
    if config.num_classes not in ("auto", number):
        raise _refusal([f"num_classes: {number} in the checkpoint, {config.num_classes} now; it decides the classes"])
    kept = {}
    for name in FIELDS:
        if name in MAY_BE_CHOSEN_AGAIN and not (name == "num_epochs" and config.time_budget is None):
            continue
        if getattr(config, name) == "auto" and (value := {**BEFORE_THEY_EXISTED, **before}.get(name, "auto")) != "auto":
            kept[name] = FIELDS[name].metadata["parse"](value)
    together = [("encoder", "decoder_channels"), ("mask_values", "ignore_value"), ("mask_values", "class_names")]
    for name, other in together:  # null stands for what was chosen along with it
        if getattr(config, name) == "auto" and getattr(config, other) is None:
            kept[other] = FIELDS[other].metadata["parse"](before.get(other))
    return replace(config, **kept)


def keep_reasons(settings: Settings, before: Mapping[str, Any], decisions: Mapping[str, Sequence[str]]) -> None:
    """A setting that is as the run began keeps the source and the reason that it had then.

    A run is resumed with its own config.yaml, which would else be the source of all of them.
    """
    now = settings.repeatable_dict()
    for name, (source, reason) in decisions.items():
        is_as_before = name in now and name in before and now[name] == before[name]
        if is_as_before and settings.decisions[name].source != "decided":
            settings.decisions[name] = Decision(source, reason)


def split_names(split: Split) -> dict[str, list[str]]:
    return {"train": [pair.name for pair in split.train], "val": [pair.name for pair in split.val]}


def compare_configs(before: Mapping[str, Any], now: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What changed from the checkpoint's config to that of this start, a line for each key; raises for what must not change.

    `asked` is the config of this start before anything was decided: what is `auto` in both has not changed.
    """
    changed = [
        name
        for name in FIELDS
        if name in before
        and name not in MAY_CHANGE_SILENTLY
        and _meaning(name, before[name]) not in (_meaning(name, now[name]), _meaning(name, asked[name]))
    ]
    fixed = MUST_STAY | (MUST_STAY_FOR_VAL_LOSS if now["monitor"] == "val_loss" else {})
    refused = [
        f"{name}: {before[name]} in the checkpoint, {now[name]} now; it decides {fixed[name]}" for name in changed if name in fixed
    ]
    if refused:
        raise _refusal(refused)
    return [f"{name}: {before[name]} → {now[name]}" for name in changed]


def _refusal(lines: Sequence[str]) -> CheckpointError:
    heading = "cannot go on with other settings than the run began with:"
    return CheckpointError("\n  ".join([heading, *lines, "Keep them, or start a new run"]))


def _meaning(name: str, value: Any) -> Any:
    """What a value of the config says, however it is written: a grey colour is its brightness."""
    if name == "ignore_value" and value is not None:
        return set(given_coding("nonzero", FIELDS[name].metadata["parse"](value)).ignored)
    if name == "mask_values" and not isinstance(value, str):
        coding = given_coding(FIELDS[name].metadata["parse"](value))
        return [set(coding.values_of(class_id)) for class_id in range(coding.num_ids)]
    return value


def compare_splits(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]], table: Path | None = None) -> None:
    """Raises if the split differs, by names: training images must not validate, and scores must stay comparable.

    `table` is the file that decides the split of this start, if it is not decided anew.
    """
    if all(set(before[part]) == set(now[part]) for part in ("train", "val")):
        return
    leaked = sorted(set(before["train"]) & set(now["val"]))
    val_changed = sorted(set(before["val"]) ^ set(now["val"]))
    train_changed = sorted(set(before["train"]) ^ set(now["train"]))
    problems = []
    if leaked:
        problems.append(f"{len(leaked)} images trained on would now validate, e.g. {leaked[0]}")
    elif val_changed:
        problems.append(f"{len(val_changed)} validation images differ, e.g. {val_changed[0]}")
    elif train_changed:
        problems.append(f"{len(train_changed)} training images differ, e.g. {train_changed[0]}")
    if problems:
        decides = "data_dir, val_fraction and seed decide it" if table is None else f"{table} decides it, and is not the run's own"
        raise CheckpointError(f"cannot go on with another data split: {problems[0]} ({decides}); put it back, or start a new run")
