"""What a run is trained on, as its events.jsonl has it: machine, versions, data, model. Plain values."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from unet_trainer import __version__
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import class_names, id_names
from unet_trainer.datasets.class_statistics import class_table, ignored_share
from unet_trainer.datasets.dataset_report import CheckedDataset, describe_sizes
from unet_trainer.system.resources import total_host_memory

PACKAGES = ("torch", "segmentation-models-pytorch", "timm", "albumentations", "numpy", "opencv-python-headless")


def package_versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    found = {"unet_trainer": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)  # with its build; a plain text, that can be sent
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
        "monitor": config.monitor,
        "num_epochs": config.num_epochs,
    }
