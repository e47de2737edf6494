"""What a run records of itself, as plain values: machine, versions, data, model; of an epoch the line of events.jsonl and, of the
best one, val_scores.csv."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer import __version__
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import class_names, id_names
from unet_trainer.datasets.dataset_report import CheckedDataset, describe_sizes
from unet_trainer.datasets.mask_evidence import class_table, ignored_share
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import EpochTimes
from unet_trainer.system.resources import total_host_memory
from unet_trainer.training.evaluation import Evaluation
from unet_trainer.training.history import Row
from unet_trainer.training.val_scores import image_score, val_scores_text

PACKAGES = ("segmentation-models-pytorch", "timm", "albumentations", "numpy", "opencv-python-headless")


def package_versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    found = {"unet_trainer": __version__, "torch": str(torch.__version__)}  # with its build; a plain text, that can be sent
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine_facts(hardware: HardwareFacts) -> dict[str, Any]:
    return {
        "device": hardware.device,
        "name": hardware.name,
        "cores": hardware.num_cores,
        "memory_gib": round(total_host_memory() / 2**30, 1),
        "free_device_memory_gib": round(hardware.free_memory / 2**30, 1) if hardware.kind == "cuda" else None,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": package_versions(),
    }


def data_facts(config: ResolvedConfig, dataset: CheckedDataset) -> dict[str, Any]:
    split = dataset.split
    table = class_table(dataset.masks, dataset.coding, id_names(config))
    return {
        "data_dir": config.data_dir,
        "num_train": len(split.train),
        "num_val": len(split.val),
        "num_test": len(split.test),
        "split": split.rule,
        "images": str(dataset.kind),
        "sizes": describe_sizes(dataset.images),
        "model_size": list(config.shape),
        "fit": config.fit,
        "classes": [{"name": row.name, "values": row.values, "share": row.share} for row in table],
        "ignored_share": ignored_share(dataset.masks, dataset.coding),
        "notices": list(dataset.notices),
    }


def model_facts(config: ResolvedConfig, network: torch.nn.Module) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "encoder": config.encoder,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "ids": id_names(config),
        "classes": class_names(config),
    }


def epoch_facts(row: Row, found: Evaluation, improved: bool, times: EpochTimes | None, config: ResolvedConfig) -> dict[str, Any]:
    """As the event has them: row, scores of each class, confusion matrix, seconds of each stage."""
    scores = found.scores
    columns = {kind: getattr(scores, f"per_class_{kind}") for kind in ("iou", "dice", "precision", "recall")}
    classes = {name: {kind: values[index] for kind, values in columns.items()} for index, name in enumerate(class_names(config))}
    stages = {"train_seconds": row["seconds"] - found.seconds, "val_seconds": found.seconds}
    if times is not None:
        stages |= {"read_seconds_per_image": times.read_seconds, "augment_seconds_per_image": times.augment_seconds}
    return {**row, "best": improved, "stages": stages, "classes": classes, "confusion": scores.confusion}


def val_scores_csv(dataset: SegmentationDataset, sample_counts: NDArray[np.int64], data_dir: Path, config: ResolvedConfig) -> str:
    """samples,K,3 counts of the dataset's samples → the table. Tiles of one image count together."""
    totals = np.zeros((len(dataset.pairs), *sample_counts.shape[1:]), np.int64)
    pairs = [dataset.tiling.pair_index(sample) for sample in range(len(sample_counts))]
    np.add.at(totals, pairs, sample_counts)
    names = class_names(config)
    return val_scores_text(
        [image_score(*pair.files_in(data_dir), counts, names) for pair, counts in zip(dataset.pairs, totals.tolist(), strict=True)]
    )
