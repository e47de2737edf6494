"""The file of a trained model: finds it from what a user names, and reads card and weights. Nothing in it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT
from unet_trainer.images.mask_coding import build_coding
from unet_trainer.images.overlays import class_colours
from unet_trainer.inference.model_card import ModelCard, symmetries_of
from unet_trainer.model.segmenter import AUXILIARY, SegmenterSpec
from unet_trainer.runs.checkpoint_file import read_checkpoint
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.runs.run_folder import BEST, LAST, find_run, newest_run

ONNX_SUFFIX = ".onnx"


def find_model(where: str | Path | None, checkpoint_dir: Path = Path("checkpoints"), raw: bool = False) -> Path:
    """What RUN|FILE means: a .pt or .onnx file, or the folder or name of a run, whose best.pt is taken.

    Without a name, the run that was saved last. With `raw`, last.pt: best.pt holds averaged weights alone where
    ema_decay is set.
    """
    found = newest_run(checkpoint_dir) if where is None else _find(str(where), checkpoint_dir)
    if found.is_file():
        return found
    if raw:
        return found / LAST
    if not (found / BEST).is_file():
        raise CheckpointError(f"{found} has no {BEST} yet; name {found / LAST} to use the last state")
    return found / BEST


def _find(name: str, checkpoint_dir: Path) -> Path:
    for candidate in (Path(name), checkpoint_dir / name):
        if (candidate / BEST).is_file():  # of a run that is deployed alone, without last.pt
            return candidate
    return find_run(name, checkpoint_dir)


def read_model(path: Path, raw: bool = False) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    """Card and weights of a checkpoint: averaged weights where there are some, unless `raw`. Raises CheckpointError."""
    content = read_checkpoint(path)
    try:
        weights = _weights(path, content, raw)
        card = _card(path, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no checkpoint that can be used ({type(error).__name__}: {error})") from None
    return card, {name: tensor for name, tensor in weights.items() if not name.startswith(f"{AUXILIARY}.")}


def _weights(path: Path, content: Mapping[str, Any], raw: bool) -> Mapping[str, torch.Tensor]:
    averaged = (content.get("ema") or {}).get("model")
    if raw and "optimizer" not in content and content["config"].get("ema_decay") is not None:
        raise CheckpointError(f"{path} holds averaged weights alone; the raw ones are in {LAST} of the same run")
    weights = content["model"] if raw or averaged is None else averaged
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise CheckpointError(f"{path} is no checkpoint that can be used: its weights are no tensors")
    return weights


def _card(path: Path, content: Mapping[str, Any]) -> ModelCard:
    spec = content.get("spec")
    metrics = content.get("metrics") or {}
    history = content.get("history") or []
    if not metrics and history:
        metrics = history[-1]
    return ModelCard(
        _spec_of_early_format(path, content["config"]) if spec is None else SegmenterSpec.from_dict(spec),
        symmetries_of(content["config"].get("augmentation")),
        path.parent.name or path.stem,
        content.get("epoch"),
        metrics.get("val_iou"),
        str(content.get("version", "0")),
    )


def _spec_of_early_format(path: Path, config: Mapping[str, Any]) -> SegmenterSpec:
    """Formats 1 and 2 hold no spec. Of 8-bit RGB images with ImageNet's statistics the config says all that is needed."""
    advice = f"resume its run once with this version (python train_unet.py --resume {path.parent}), which writes what is missing"
    mean, std = config.get("image_mean", "auto"), config.get("image_std", "auto")
    is_imagenet = [tuple(value) for value in (mean, std) if isinstance(value, list)] == [IMAGENET_MEAN, IMAGENET_STD]
    if not is_imagenet or config.get("in_channels", 3) != 3 or config.get("mask_values", "auto") == "auto":
        raise CheckpointError(f"{path} was written by an early version and does not say what its images were; {advice}")
    num_classes, size = config["num_classes"], config["image_size"]
    names = config.get("class_names") or (["foreground"] if num_classes == 1 else [f"class {i}" for i in range(num_classes)])
    names = ["background", *names] if num_classes == 1 else names
    values = config["mask_values"]
    values = values if isinstance(values, str) else [value if isinstance(value, int) else tuple(value) for value in values]
    channels = config.get("decoder_channels")
    return SegmenterSpec(
        image=RGB_8BIT,
        coding=build_coding(values, num_classes, config.get("ignore_value"), {}),
        num_classes=num_classes,
        id_names=tuple(names),
        id_colours=class_colours(len(names)),
        image_size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        fit=config.get("fit", "resize"),
        architecture=config.get("architecture", "unet"),
        encoder=config["encoder"],
        decoder_channels=None if channels is None else tuple(channels),
    )
