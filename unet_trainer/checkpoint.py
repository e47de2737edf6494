"""The state of a run on disk: what is saved, how it is found again, and what may change between two starts.

A checkpoint holds tensors and primitives only, is written whole or not at all, and is loaded with weights_only=True.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unet_trainer.atomic import write_atomically
from unet_trainer.config import FIELDS
from unet_trainer.history import Row
from unet_trainer.model import Ema
from unet_trainer.progress import Progress
from unet_trainer.runs import LAST, CheckpointError
from unet_trainer.schedule import LearningRate
from unet_trainer.splits import Split

FORMAT = 1

# A change of these between two starts would make the result meaningless.
MUST_STAY = {
    "num_classes": "the classes",
    "mask_values": "the classes",
    "ignore_value": "the classes",
    "architecture": "the model",
    "encoder": "the model",
    "decoder_channels": "the model",
    "optimizer": "the optimizer's state",
    "seed": "the order of the images",
    "monitor": "which epoch was best",
    "image_size": "which epoch was best, since IoU is measured at that size",
    "fit": "which epoch was best, since IoU is measured at that size",
    "in_channels": "the model",
    "image_mean": "what the model sees",
    "image_std": "what the model sees",
}
# And of these where the loss is what is monitored: it would be compared with that of another loss.
MUST_STAY_FOR_VAL_LOSS = {"loss": "which epoch was best", "class_weights": "which epoch was best"}
# A change of these says nothing about the result.
MAY_CHANGE_SILENTLY = frozenset(["resume", "num_workers", "checkpoint_dir", "run_name"])


@dataclass
class TrainState:
    """Everything that a run needs to go on at the next epoch as if it had never stopped."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    learning_rate: LearningRate
    progress: Progress
    ema: Ema | None
    epoch: int = 0  # epochs finished
    history: list[Row] = field(default_factory=list)
    per_class_iou: list[float | None] = field(default_factory=list)  # of the best epoch
    seconds: float = 0.0  # spent in finished epochs

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "progress": self.progress.state_dict(),
            "ema": None if self.ema is None else {"model": self.ema.model.state_dict(), "num_updates": self.ema.num_updates},
            "epoch": self.epoch,
            "history": self.history,
            "per_class_iou": self.per_class_iou,
            "seconds": self.seconds,
            "random_state": torch.get_rng_state(),
            "cuda_random_state": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        # The settings are those of this start and this device, not those that were saved. Before the load, because a fused
        # optimizer needs its step counts on the device.
        groups = [
            {**group, "params": saved["params"]}
            for group, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if state["scaler"] and self.scaler.is_enabled():  # empty when the run had none
            found = {name: state["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})
        self.learning_rate.load_state_dict(state["learning_rate"])
        self.progress.load_state_dict(state["progress"])
        if self.ema is not None:
            saved = state["ema"] or {"model": state["model"], "num_updates": 0}
            self.ema.model.load_state_dict(saved["model"])
            self.ema.num_updates = saved["num_updates"]
        self.epoch = state["epoch"]
        self.history = list(state["history"])
        self.per_class_iou = list(state["per_class_iou"])
        self.seconds = state["seconds"]
        torch.set_rng_state(state["random_state"])
        if state["cuda_random_state"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random_state"], self.device)


def save_last(path: Path, state: TrainState, config: Mapping[str, Any], split: Split) -> None:
    """Everything, to go on from."""
    write_checkpoint(path, {"config": dict(config), "split": split_names(split), **state.state_dict()})


def save_best(path: Path, model: torch.nn.Module, config: Mapping[str, Any], epoch: int, metrics: Row) -> None:
    """The weights that were evaluated, and what is needed to use them."""
    write_checkpoint(path, {"config": dict(config), "epoch": epoch, "metrics": dict(metrics), "model": model.state_dict()})


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Tensors are stored as of the CPU, so that the file loads on any machine."""
    stored = _on_cpu({"format": FORMAT, **content})
    content_bytes = io.BytesIO()
    torch.save(stored, content_bytes)  # in memory first: on a full disk torch.save itself hides the reason
    write_atomically(path, lambda file: file.write(content_bytes.getbuffer()))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu")
    if isinstance(value, dict):
        return {name: _on_cpu(item) for name, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of ours, every byte verified; raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: {damaged} does not match its checksum")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}") from None
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is no checkpoint that can be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or "config" not in content:
        raise CheckpointError(f"{path} is no checkpoint of this trainer (format {FORMAT})")
    return content


def read_last(path: Path) -> dict[str, Any]:
    content = read_checkpoint(path)
    if "optimizer" not in content:
        raise CheckpointError(f"{path} holds weights alone and cannot be gone on from; use {LAST} of the same run")
    return content


def split_names(split: Split) -> dict[str, list[str]]:
    return {"train": [pair.name for pair in split.train], "val": [pair.name for pair in split.val]}


def compare_configs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between the checkpoint's config and the one at hand, a line each; raises for what must not."""
    changed = [name for name in FIELDS if name in before and before[name] != now[name] and name not in MAY_CHANGE_SILENTLY]
    fixed = MUST_STAY | (MUST_STAY_FOR_VAL_LOSS if now["monitor"] == "val_loss" else {})
    refused = [
        f"{name}: {before[name]} in the checkpoint, {now[name]} now; it decides {fixed[name]}" for name in changed if name in fixed
    ]
    if refused:
        raise CheckpointError(
            "cannot go on with other settings than the run began with:\n  "
            + "\n  ".join(refused)
            + "\n  Keep them, or start a new run"
        )
    return [f"{name}: {before[name]} → {now[name]}" for name in changed]


def compare_splits(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> None:
    """Refuses another split by name: images that trained may not validate, and the score must stay comparable."""
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
        raise CheckpointError(
            f"cannot go on with another data split: {problems[0]} (data_dir, val_fraction and seed decide it); start a new run"
        )
