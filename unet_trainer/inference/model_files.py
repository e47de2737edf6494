"""The file of a trained model: finds it from what a user names, and reads card and weights. Nothing in it is run.

The card is what is known of a model besides its weights. Exported files carry it as JSON; from a checkpoint it is read.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import torch

from unet_trainer import __version__
from unet_trainer.model.segmenter import AUXILIARY, SegmenterSpec, without_wrappers
from unet_trainer.training.checkpoint_file import read_checkpoint
from unet_trainer.training.errors import CheckpointError
from unet_trainer.training.run_folder import BEST, LAST, find_run, has_checkpoint, newest_run

Symmetry = Literal["horizontal_flip", "vertical_flip", "quarter_turn"]
SYMMETRIES: tuple[Symmetry, ...] = get_args(Symmetry)

ONNX_SUFFIX = ".onnx"
PT2_SUFFIX = ".pt2"
SMP_CARD = "unet_trainer.json"  # in the folder of an export for segmentation-models-pytorch
FOR_OTHERS = f"is an export for other programs; name its run, or export that as {ONNX_SUFFIX}"
# What content of other types or keys than a run saves raises.
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
CARD_FORMAT = 1
# Transforms of albumentations → the symmetries that a model trained with them has seen. `default` and `strong` are stored by name
# only where images have no up.
TRANSFORM_SYMMETRIES: Mapping[str, tuple[Symmetry, ...]] = {
    "HorizontalFlip": ("horizontal_flip",),
    "VerticalFlip": ("vertical_flip",),
    "RandomRotate90": ("quarter_turn",),
    "D4": SYMMETRIES,
    "SquareSymmetry": SYMMETRIES,
    "default": ("horizontal_flip", "vertical_flip"),
    "strong": ("horizontal_flip", "vertical_flip"),
}


def reason_of(error: Exception) -> str:
    """Of one of these: a ValueError has a sentence."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ModelCard:
    spec: SegmenterSpec
    symmetries: tuple[Symmetry, ...]  # of training's augmentation
    run_name: str
    epoch: int | None  # that the weights are of
    val_iou: float | None  # of that epoch
    version: str = __version__  # of the trainer that wrote it

    def __post_init__(self) -> None:
        """Raises ValueError for values that no run can have: a card may come from anywhere."""
        kinds = {"run_name": (str,), "epoch": (int, NoneType), "val_iou": (int, float, NoneType), "version": (str,)}
        wrong = [name for name, allowed in kinds.items() if type(getattr(self, name)) not in allowed]
        if wrong or not set(self.symmetries) <= set(SYMMETRIES):
            raise ValueError(f"{', '.join(wrong) or 'symmetries'} cannot be right")

    def describe(self) -> str:
        """ ", epoch 3, val IoU 0.5000", as far as it is known."""
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return epoch + ("" if self.val_iou is None else f", val IoU {self.val_iou:.4f}")

    def to_json(self) -> str:
        content = {"format": CARD_FORMAT, **vars(self), "spec": self.spec.to_dict()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ModelCard:
        """Raises ValueError, KeyError, TypeError or RecursionError for text that is no card."""
        content = json.loads(text)
        if type(content["format"]) is not int or content["format"] < 1:
            raise ValueError("no format number")
        if content["format"] > CARD_FORMAT:
            raise ValueError(f"written by a newer version (format {content['format']}); this one reads up to {CARD_FORMAT}")
        found = {field.name: content[field.name] for field in fields(ModelCard)}
        spec, symmetries = SegmenterSpec.from_dict(found["spec"]), tuple(found["symmetries"])
        return ModelCard(**{**found, "spec": spec, "symmetries": symmetries})


def symmetries_of(augmentation: Any) -> tuple[Symmetry, ...]:
    """The symmetries that training with this augmentation, as the config has it, taught: a name or a list of transforms."""
    entries = augmentation if isinstance(augmentation, list | tuple) else [augmentation]
    names = [next(iter(entry), "") if isinstance(entry, Mapping) else entry for entry in entries]
    found = {symmetry for name in names for symmetry in TRANSFORM_SYMMETRIES.get(str(name), ())}
    return tuple(symmetry for symmetry in SYMMETRIES if symmetry in found)


def find_model(where: str | Path | None, checkpoint_dir: Path = Path("checkpoints"), raw: bool = False) -> Path:
    """What RUN|FILE means: a .pt or .onnx file, or the folder or name of a run, whose best.pt is taken.

    Without a name, the run that was saved last. With `raw`, last.pt: best.pt holds averaged weights alone where
    ema_decay is set.
    """
    found = newest_run(checkpoint_dir) if where is None else _find(str(where), checkpoint_dir)
    if found.suffix == PT2_SUFFIX:
        raise CheckpointError(f"{found} {FOR_OTHERS}")
    if found.is_file():
        return found
    if raw:
        return found / LAST
    if not (found / BEST).is_file():
        raise CheckpointError(f"{found} has no {BEST} yet; name {found / LAST} to use the last state")
    return found / BEST


def _find(name: str, checkpoint_dir: Path) -> Path:
    if (Path(name) / SMP_CARD).is_file():
        raise CheckpointError(f"{name} {FOR_OTHERS}")
    candidates = (Path(name), checkpoint_dir / name)
    for candidate in candidates:
        if (candidate / BEST).is_file():  # of a run that is deployed alone, without last.pt
            return candidate
    folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
    with contextlib.suppress(OSError):  # told by find_run
        if folder is not None and not any(map(has_checkpoint, candidates)):
            raise CheckpointError(f"{folder} is not a run folder (no {BEST}); name one, or a .pt or {ONNX_SUFFIX} file")
    return find_run(name, checkpoint_dir)


def read_model(path: Path, raw: bool = False) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    """Card and weights of a checkpoint: averaged weights where there are some, unless `raw`. Raises CheckpointError."""
    content = read_checkpoint(path)
    try:
        weights = _weights(path, content, raw)
        card = _card(path, content)
    except CheckpointError:
        raise
    except ILL_FORMED as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be used ({reason_of(error)})") from None
    bare = {without_wrappers(name): tensor for name, tensor in weights.items()}
    return card, {name: tensor for name, tensor in bare.items() if not name.startswith(f"{AUXILIARY}.")}


def _weights(path: Path, content: Mapping[str, Any], raw: bool) -> Mapping[str, torch.Tensor]:
    averaged = (content.get("ema") or {}).get("model")
    if raw and "optimizer" not in content and content["config"].get("ema_decay") is not None:
        raise CheckpointError(f"{path} holds averaged weights alone; the raw ones are in {LAST} of the same run")
    weights = content["model"] if raw or averaged is None else averaged
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise ValueError("its weights are no tensors by name")
    bad = next((name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{bad} is not finite")
    return weights


def _card(path: Path, content: Mapping[str, Any]) -> ModelCard:
    history = content.get("history") or [{}]
    val_iou = (content.get("metrics") or history[-1]).get("val_iou")
    return ModelCard(
        spec=SegmenterSpec.from_dict(content["spec"]),
        symmetries=symmetries_of(content["config"].get("augmentation")),
        run_name=path.absolute().parent.name or path.stem,
        epoch=content.get("epoch"),
        val_iou=val_iou if val_iou is not None and math.isfinite(val_iou) else None,
        version=content.get("version", "unknown"),
    )
