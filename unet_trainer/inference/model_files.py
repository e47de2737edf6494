"""The file of a trained model: finds it from what a user names, and reads card and weights. Nothing in it is run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unet_trainer.datasets.split_csv import read_split_csv
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import read_image
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT, ImageSpec
from unet_trainer.images.mask_coding import given_coding
from unet_trainer.images.overlays import class_colours
from unet_trainer.inference.model_card import ModelCard, symmetries_of
from unet_trainer.model.segmenter import AUXILIARY, SegmenterSpec, without_wrappers
from unet_trainer.runs.checkpoint_file import read_checkpoint
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.runs.run_folder import BEST, LAST, SPLIT_CSV, find_run, has_checkpoint, newest_run
from unet_trainer.system.console import first_line

ONNX_SUFFIX = ".onnx"
OTHER_EXPORTS = (".pt2", ".torchscript")
SMP_CARD = "unet_trainer.json"  # in the folder of an export for segmentation-models-pytorch
FOR_OTHERS = f"is an export for other programs; name its run, or export that as {ONNX_SUFFIX}"
BEFORE_VERSIONS = "0.9 or earlier"  # in place of the version, in checkpoints that do not name it
# What content of other types or keys than a run saves raises.
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


def find_model(where: str | Path | None, checkpoint_dir: Path = Path("checkpoints"), raw: bool = False) -> Path:
    """What RUN|FILE means: a .pt or .onnx file, or the folder or name of a run, whose best.pt is taken.

    Without a name, the run that was saved last. With `raw`, last.pt: best.pt holds averaged weights alone where
    ema_decay is set.
    """
    found = newest_run(checkpoint_dir) if where is None else _find(str(where), checkpoint_dir)
    if found.suffix in OTHER_EXPORTS:
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
            raise CheckpointError(f"{folder} is no run's folder (no {BEST}); name one, or a .pt or {ONNX_SUFFIX} file")
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
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no checkpoint that can be used ({reason})") from None
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
    spec, config = content.get("spec"), content["config"]
    metrics = content.get("metrics") or {}
    history = content.get("history") or []
    if not metrics and history:
        metrics = history[-1]
    return ModelCard(
        spec=_spec_of_early_format(path, config) if spec is None else SegmenterSpec.from_dict(spec),
        symmetries=symmetries_of(config.get("augmentation")),
        run_name=path.absolute().parent.name or path.stem,
        epoch=content.get("epoch"),
        val_iou=_finite(metrics.get("val_iou")),
        version=content.get("version", BEFORE_VERSIONS),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _spec_of_early_format(path: Path, config: Mapping[str, Any]) -> SegmenterSpec:
    """Formats 1 and 2 hold no spec. Their config says all of it but the depth of the images.

    The first versions read 8-bit RGB alone and had no settings for images. Later ones took ImageNet's statistics for 8-bit RGB
    alone; for other statistics the depth is that of the images that the run was trained with, if they are still there.
    """
    num_classes, size, values = config["num_classes"], config["image_size"], config["mask_values"]
    names = config.get("class_names") or (["foreground"] if num_classes == 1 else [f"class {i}" for i in range(num_classes)])
    names = ["background", *names] if num_classes == 1 else names
    if values == "auto":
        raise ValueError("its config does not say what mask values mean")
    values = values if isinstance(values, str) else [value if isinstance(value, int) else tuple(value) for value in values]
    return SegmenterSpec.from_dict(
        {
            "image": _image_spec_of_early_format(path, config).to_dict(),
            "coding": given_coding(values, config.get("ignore_value")).to_dict(),
            "num_classes": num_classes,
            "id_names": names,
            "id_colours": [list(colour) for colour in class_colours(len(names))],
            "image_size": [size, size] if isinstance(size, int) else size,
            "fit": config.get("fit", "resize"),
            "architecture": config.get("architecture", "unet"),
            "encoder": config["encoder"],
            "decoder_channels": config.get("decoder_channels"),
        }
    )


def _image_spec_of_early_format(path: Path, config: Mapping[str, Any]) -> ImageSpec:
    mean, std = config.get("image_mean"), config.get("image_std")
    if mean is None or std is None or (tuple(mean), tuple(std)) == (IMAGENET_MEAN, IMAGENET_STD):
        return RGB_8BIT
    try:
        pairs = read_split_csv(path.parent / SPLIT_CSV, Path(config["data_dir"])).pairs
        image = read_image(pairs[0].image)
    except (DataError, OSError) as error:
        raise CheckpointError(
            f"{path} was written by an early version and does not say which depth its images have, and those that it was "
            f"trained with cannot be read ({first_line(error)}); put them back, or train again"
        ) from None
    depth = "float" if image.dtype.kind == "f" else str(image.dtype)
    return ImageSpec(config["in_channels"], depth, tuple(mean), tuple(std), float(image.min()), float(image.max()))
