"""The state of a run on disk: what is saved, how it is verified, and what may change between two starts.

A checkpoint holds tensors and primitives only, is written whole or not at all, carries a digest of its every byte, and is
loaded with weights_only=True after a look at what its pickle asks for.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickletools
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unet_trainer.atomic import write_atomically
from unet_trainer.config import FIELDS
from unet_trainer.guard import NonFinite
from unet_trainer.history import Row
from unet_trainer.host_copy import tensors_in
from unet_trainer.model import Ema
from unet_trainer.progress import Progress
from unet_trainer.runs import DAMAGED, LAST, PREVIOUS, CheckpointError
from unet_trainer.schedule import LearningRate, fill_momentum
from unet_trainer.splits import Split
from unet_trainer.step import Totals

FORMAT = 2  # 1: epochs' ends only, no digest

DIGEST = b"sha256:"  # opens the zip's comment, which holds the digest of all bytes before it
NUM_DIGEST_BYTES = len(DIGEST) + 64
ZIP_START = b"PK\x03\x04"
# What a pickle of tensors and primitives may name. torch's own list is longer, and was got round twice.
PLAIN_GLOBALS = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(f"torch {kind}Storage" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Char", "Bool")),
}
# Ways of pickle to name or build things that torch.save does not use for those.
OTHER_WAYS = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "BUILD", "PERSID"}

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
    "num_folds": "which images validate",
    "fold": "which images validate",
    "fit": "which epoch was best, since IoU is measured at that size",
    "in_channels": "the model",
    "image_mean": "what the model sees",
    "image_std": "what the model sees",
}
# And of these where the loss is what is monitored: it would be compared with that of another loss.
MUST_STAY_FOR_VAL_LOSS = {"loss": "which epoch was best", "class_weights": "which epoch was best"}
# A change of these says nothing about the result.
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
    ]
)


class SaveError(OSError):
    """A checkpoint could not be written. The file that it was to replace is as it was."""

    def __init__(self, path: Path, num_bytes: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{path} could not be written ({reason}): {_amount(num_bytes)} are needed{_free(path.parent)}")
        self.errno = error.errno


class NewerFormat(CheckpointError):
    """A checkpoint of a later version: whole, but not for this one."""


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _free(folder: Path) -> str:
    try:
        return f", {_amount(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return ""


@dataclass
class TrainState:
    """Everything that a run needs to go on, at the next epoch or within one, as if it had never stopped."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    learning_rate: LearningRate
    progress: Progress
    ema: Ema | None
    totals: Totals  # of the epoch at hand
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the epoch at hand that the weights have in them: whole accumulation windows
    history: list[Row] = field(default_factory=list)
    per_class_iou: list[float | None] = field(default_factory=list)  # of the best epoch
    seconds: float = 0.0  # spent in finished epochs
    train_seconds: float = 0.0  # spent in training in the epoch at hand
    wait_seconds: float = 0.0  # and those of them spent in waiting for data
    num_rollbacks: int = 0  # times that bad numbers sent the run back

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.begin_epoch_anew()

    def begin_epoch_anew(self) -> None:
        self.batch = 0
        self.train_seconds = self.wait_seconds = 0.0
        self.totals.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": bare_names(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "progress": self.progress.state_dict(),
            "ema": None
            if self.ema is None
            else {"model": bare_names(self.ema.model.state_dict()), "num_updates": self.ema.num_updates},
            "totals": self.totals.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "history": self.history,
            "per_class_iou": self.per_class_iou,
            "seconds": self.seconds,
            "train_seconds": self.train_seconds,
            "wait_seconds": self.wait_seconds,
            "num_rollbacks": self.num_rollbacks,
            # The generators that a run draws from: samples have their own, made from (seed, epoch, index).
            "random_state": torch.get_rng_state(),
            "cuda_random_state": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _load_bare(self.model, state["model"])
        # The settings are those of this start and this device, not those that were saved. Before the load, because a fused
        # optimizer needs its step counts on the device.
        groups = [
            {**group, "params": saved["params"]}
            for group, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if isinstance(self.optimizer, torch.optim.SGD):
            fill_momentum(self.optimizer)
        if state["scaler"] and self.scaler.is_enabled():  # empty when the run had none
            found = {name: state["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})
        self.learning_rate.load_state_dict(state["learning_rate"])
        self.progress.load_state_dict(state["progress"])
        if self.ema is not None:
            saved = state["ema"] or {"model": state["model"], "num_updates": 0}
            _load_bare(self.ema.model, saved["model"])
            self.ema.num_updates.copy_(torch.as_tensor(saved["num_updates"]))
        self.totals.load_state_dict(state["totals"])
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.history = [dict(row) for row in state["history"]]
        self.per_class_iou = list(state["per_class_iou"])
        self.seconds = state["seconds"]
        self.train_seconds = state["train_seconds"]
        self.wait_seconds = state["wait_seconds"]
        self.num_rollbacks = state["num_rollbacks"]
        torch.set_rng_state(state["random_state"])
        if state["cuda_random_state"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random_state"], self.device)


def bare_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what compiled and distributed models put before and into their names."""
    return {_bare(name): tensor for name, tensor in tensors.items()}


def _bare(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _load_bare(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    own = {_bare(name): name for name in model.state_dict()}
    model.load_state_dict({own.get(name, name): tensor for name, tensor in tensors.items()})


def last_content(state: TrainState, config: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Everything, to go on from."""
    return {"config": dict(config), "split": split_names(split), **state.state_dict()}


def best_content(model: torch.nn.Module, config: Mapping[str, Any], epoch: int, metrics: Row) -> dict[str, Any]:
    """The weights that were evaluated, and what is needed to use them."""
    return {"config": dict(config), "epoch": epoch, "metrics": dict(metrics), "model": bare_names(model.state_dict())}


def write_checkpoint(path: Path, content: Mapping[str, Any], previous: Path | None = None) -> None:
    """Written, read back, and only then given its name; `previous` gets what had it. Raises SaveError, or NonFinite for
    weights that nobody could go on from. Tensors are stored as of the CPU, so that the file loads on any machine."""
    stored = _on_cpu({"format": FORMAT, **content})
    bad = _first_non_finite(stored)
    if bad is not None:
        raise NonFinite(f"the weights ({bad}) are not finite and were not saved as {path}")
    num_bytes = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_bytes
        signed = SignedFile(file)
        torch.save(stored, signed)  # type: ignore[arg-type] # all of a file that it asks for
        num_bytes = signed.num_bytes
        signed.finish()

    try:
        write_atomically(path, write, verify=_verify, previous=previous)
    except OSError as error:
        needed = num_bytes or sum(tensor.nbytes for tensor in tensors_in(stored))
        raise SaveError(path, needed, error) from None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Tensors of a host copy pass untouched: this runs beside the training loop, and each call to torch is a fight for the GIL.
        return value if value.device.type == "cpu" and not value.requires_grad else value.detach().to("cpu")
    if isinstance(value, dict):
        return {name: _on_cpu(item) for name, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def _first_non_finite(content: Mapping[str, Any]) -> str | None:
    for weights in (content.get("model"), (content.get("ema") or {}).get("model")):
        floats = {name: tensor for name, tensor in (weights or {}).items() if tensor.is_floating_point() and tensor.numel()}
        if not floats:
            continue
        largest = torch._foreach_norm(list(floats.values()), torch.inf)  # one call for all, as above
        if not all(math.isfinite(value) for value in torch.tensor(largest).tolist()):
            return next(name for name, tensor in floats.items() if not tensor.isfinite().all())
    return None


class SignedFile:
    """What torch.save writes a zip to. Ends it with a comment: the digest of every byte before it, since the checksums inside
    leave its headers out. An error waits until torch.save is done, which would hide the reason; all bytes are counted."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.total = hashlib.sha256()
        self.num_bytes = NUM_DIGEST_BYTES
        self.held = b""  # the last two bytes so far: at the end, the length of the comment
        self.error: OSError | None = None

    def write(self, part: bytes | memoryview) -> int:
        part = memoryview(part)
        self.num_bytes += len(part)
        if len(part) < 2:
            joined = self.held + bytes(part)
            self._pass_on(joined[:-2])
            self.held = joined[-2:]
        else:
            self._pass_on(self.held)
            self._pass_on(part[:-2])
            self.held = bytes(part[-2:])
        return len(part)

    def _pass_on(self, part: bytes | memoryview) -> None:
        self.total.update(part)
        if self.error is None:
            try:
                self.file.write(part)
            except OSError as error:
                self.error = error

    def flush(self) -> None:
        """torch.save asks for it; the file is flushed when it is whole."""

    def finish(self) -> None:
        self._pass_on(NUM_DIGEST_BYTES.to_bytes(2, "little"))
        if self.error is not None:
            raise self.error
        self.file.write(DIGEST + self.total.hexdigest().encode())


def _verify(path: Path) -> bool:
    """Whether the file carries a digest; raises CheckpointError if it does not match."""
    num_bytes = path.stat().st_size - NUM_DIGEST_BYTES
    if num_bytes <= 0:
        return False
    total = hashlib.sha256()
    with path.open("rb") as file:
        while num_bytes and (chunk := file.read(min(num_bytes, 1 << 20))):
            total.update(chunk)
            num_bytes -= len(chunk)
        comment = file.read()
    if not comment.startswith(DIGEST):
        return False
    if comment != DIGEST + total.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its bytes do not match its digest")
    return True


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of ours, every byte verified; raises CheckpointError."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file")
    try:
        is_signed = _verify(path)
        _look_inside(path, is_signed)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a file made to do harm can make a loader fail in every way there is
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(f"{path} is no checkpoint that can be read ({reason})") from None
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int or "config" not in content:
        raise CheckpointError(f"{path} is no checkpoint of this trainer (format {FORMAT})")
    if number > FORMAT:
        raise NewerFormat(f"{path} was written by a newer version (format {number}); this one reads up to {FORMAT}")
    if number == FORMAT and not is_signed:
        raise CheckpointError(f"{path} is damaged: its digest is missing")
    return _from_format_1(content) if number == 1 else content


def _look_inside(path: Path, is_signed: bool) -> None:
    """Raises unless it is a plain archive of plain things: nothing packed, nothing twice, nothing named that runs."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:  # torch would take it for its old format
            raise zipfile.BadZipFile("File is not a zip file")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > num_bytes:
            raise CheckpointError(f"{path} is no checkpoint: it unpacks to more than it is")
        if len({entry.filename for entry in entries}) != len(entries):
            raise CheckpointError(f"{path} is no checkpoint: it holds two entries of one name")
        damaged = None if is_signed else archive.testzip()  # torch.load does not look at the checksums
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: {damaged} does not match its checksum")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                _refuse_what_is_not_plain(path, archive.read(entry))


def _refuse_what_is_not_plain(path: Path, pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in OTHER_WAYS or (opcode.name == "GLOBAL" and argument not in PLAIN_GLOBALS):
            named = argument if opcode.name == "GLOBAL" else opcode.name
            raise CheckpointError(f"{path} is no checkpoint that can be read: it holds more than tensors and primitives ({named})")


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """The end of an epoch, as the first version saved it."""
    if "optimizer" not in content:
        return content
    matrix = torch.zeros(2 * (max(2, content["config"]["num_classes"]),), dtype=torch.int64)
    zeros = {name: torch.zeros((), dtype=torch.int64) for name in ("num_skipped", "num_nan", "num_bad", "first_bad")}
    totals = {"loss_sum": torch.zeros((), dtype=torch.float64), "matrix": matrix, **zeros, "num_images": 0}
    nothing_yet = {"batch": 0, "totals": totals, "train_seconds": 0.0, "wait_seconds": 0.0, "num_rollbacks": 0}
    rate = {"factor": 1.0, **content["learning_rate"]}
    history = [{"nan_steps": 0, "peak_reserved_gb": 0.0, **row} for row in content["history"]]
    return {**nothing_yet, **content, "learning_rate": rate, "history": history}


def read_last(path: Path) -> dict[str, Any]:
    content = read_checkpoint(path)
    if "optimizer" not in content:
        raise CheckpointError(f"{path} holds weights alone and cannot be gone on from; use {LAST} of the same run")
    return content


def read_run(where: Path, tell: Callable[[str], object]) -> dict[str, Any]:
    """The state of a run: of the .pt file that was named, that one or none; of a folder, the newest that is whole."""
    if not where.is_dir():
        return read_last(where)
    try:
        return read_last(where / LAST)
    except NewerFormat:
        raise
    except CheckpointError as error:
        if not (where / PREVIOUS).is_file():
            raise
        reason = str(error)
    try:
        content = read_last(where / PREVIOUS)
    except CheckpointError as error:
        raise CheckpointError(f"{reason}; {error}") from None
    tell(f"{reason}; going on from {where / PREVIOUS}, which was saved before it{_set_aside(where)}")
    return content


def _set_aside(folder: Path) -> str:
    """The good state takes the name of the bad one. Else the next save would give the bad one the name of the good one, and
    a kill in that moment would leave nothing to go on from."""
    kept = ""
    with contextlib.suppress(OSError):  # told when the run opens its folder
        if os.path.lexists(folder / LAST):
            (folder / LAST).replace(folder / DAMAGED)
            kept = f" (the other is kept as {DAMAGED})"
        (folder / PREVIOUS).replace(folder / LAST)
    return kept


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
