"""auto → value and reason, for every setting that the user left open, from facts about the hardware and the dataset.

`resolve` is called once per run. `Settings` owns the outcome: what was asked for, what is taken, and why. Imports no torch and
reads no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from unet_trainer.config.dump import as_dict, to_yaml, value_text
from unet_trainer.config.schema import FIELDS, Config, image_shape

NumberFormat = Literal["float32", "bfloat16", "float16"]

# config.yaml keeps what was asked for, so that the run can be repeated or resumed on another machine.
MACHINE_KEYS = ("device", "num_workers", "use_amp", "amp_dtype", "compile_model")
MAX_CLASS_WEIGHT = 10.0  # relative to the median class: above it, a few pixels would dominate the loss
MAX_CROPS = 16  # of an image in an epoch
MAX_CPU_WORKERS, MAX_GPU_WORKERS = 4, 16


@dataclass(frozen=True)
class HardwareFacts:
    """What the hardware can do. `device` is torch's name for it; ROCm GPUs are `cuda` to torch."""

    device: str
    name: str
    has_bfloat16: bool
    has_float16: bool
    num_cores: int

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class DatasetFacts:
    """What the scan found in the dataset."""

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    statistics_reason: str
    mask_values: str | tuple[int | tuple[int, int, int], ...]
    ignore_value: int | None
    mask_reason: str
    class_shares: Sequence[float]  # by class id, of the pixels that count
    train_sizes: Sequence[tuple[int, int]]  # height and width of each training image


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A Config in which nothing is left open."""

    in_channels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    crops_per_image: int
    num_workers: int
    class_weights: tuple[float, ...] | None

    @property
    def number_format(self) -> NumberFormat:
        """Of the forward pass. Weights, optimizer state and the loss are float32 in each case."""
        return self.amp_dtype if self.use_amp else "float32"


@dataclass(frozen=True)
class Decision:
    """Where a value came from (default, file, config, command line, argument, or decided) and, if decided, why."""

    source: str
    reason: str = ""


class Settings:
    """The settings of a run. A setting that has to change during the run is changed here and nowhere else."""

    def __init__(self, asked: Config, taken: ResolvedConfig, decisions: Mapping[str, Decision]) -> None:
        self.asked = asked
        self.taken = taken
        self.decisions = dict(decisions)

    def change(self, reason: str, **values: Any) -> None:
        """Replaces the values that are taken."""
        self.taken = dataclasses.replace(self.taken, **values)
        self.decisions |= {name: Decision("decided", reason) for name in values}

    def repeatable(self) -> Config:
        """The config that repeats the run: the values taken, but for MACHINE_KEYS those asked for."""
        asked = {name: getattr(self.asked, name) for name in MACHINE_KEYS}
        return Config(**{name: getattr(self.taken, name) for name in FIELDS} | asked)

    def repeatable_dict(self) -> dict[str, Any]:
        return as_dict(self.repeatable())

    def reasons(self) -> dict[str, str]:
        """A comment for each value that was decided."""
        taken = as_dict(self.taken)
        found = {}
        for name, decision in self.decisions.items():
            if decision.source == "decided":
                here = f"here {value_text(taken[name])}: " if name in MACHINE_KEYS else "decided: "
                found[name] = here + decision.reason
        return found

    def to_yaml(self, header: str, **values: Any) -> str:
        """config.yaml of the run; `values` replace settings that belong to one start only."""
        return to_yaml(dataclasses.replace(self.repeatable(), **values), header, self.reasons())

    def decisions_dict(self) -> dict[str, list[str]]:
        return {name: [decision.source, decision.reason] for name, decision in self.decisions.items()}


def resolve(config: Config, hardware: HardwareFacts, dataset: DatasetFacts) -> Settings:
    """Decides all that `config` leaves open; values that it sets are kept."""
    decided: dict[str, tuple[Any, str]] = {}
    decided |= _resolve_machine(config, hardware)
    decided |= _resolve_data(config, dataset)
    taken = ResolvedConfig(
        **{
            **{name: getattr(config, name) for name in FIELDS},
            **{name: value for name, (value, _) in decided.items()},
        },
        sources=config.sources,
    )
    decisions = {name: Decision(config.sources.get(name, "default")) for name in FIELDS}
    decisions |= {name: Decision("decided", reason) for name, (_, reason) in decided.items()}
    return Settings(config, taken, decisions)


def _resolve_machine(config: Config, hardware: HardwareFacts) -> dict[str, tuple[Any, str]]:
    decided: dict[str, tuple[Any, str]] = {"device": (hardware.device, hardware.name)}
    if config.use_amp:
        number_format, reason = choose_number_format(config.amp_dtype, hardware)
        if number_format == "float32":
            decided["use_amp"] = False, reason
        elif number_format != config.amp_dtype:
            decided["amp_dtype"] = number_format, reason
    if config.num_workers == "auto":
        num_workers = choose_num_workers(hardware.num_cores, on_cpu=hardware.kind == "cpu")
        decided["num_workers"] = num_workers, "1 core" if hardware.num_cores == 1 else f"{hardware.num_cores} cores"
    return decided


def choose_number_format(amp_dtype: Literal["bfloat16", "float16"], hardware: HardwareFacts) -> tuple[NumberFormat, str]:
    """The format of mixed precision: what was asked for if the hardware has it, else the next best; and why."""
    if amp_dtype == "bfloat16" and hardware.has_bfloat16:
        return "bfloat16", f"{hardware.name} takes it; no loss scaling needed"
    if amp_dtype == "bfloat16" and hardware.has_float16:
        needs = "needs compute capability 8.0 (Ampere) or newer" if hardware.kind == "cuda" else "needs macOS 14 or newer"
        return "float16", f"{hardware.name} has no bfloat16, which {needs}; float16 with loss scaling instead"
    if hardware.has_float16:
        return "float16", f"{hardware.name} computes in it, with loss scaling against underflow"
    if hardware.kind == "cpu":
        return "float32", "float16 is far slower than float32 on a CPU; float32 instead"
    return "float32", f"{hardware.name} has no {amp_dtype} arithmetic; float32 instead"


def choose_num_workers(num_cores: int, on_cpu: bool) -> int:
    """All cores but one beside a GPU; half of them where the model itself needs the cores."""
    return min(num_cores // 2, MAX_CPU_WORKERS) if on_cpu else max(1, min(num_cores - 1, MAX_GPU_WORKERS))


def _resolve_data(config: Config, dataset: DatasetFacts) -> dict[str, tuple[Any, str]]:
    decided: dict[str, tuple[Any, str]] = {}
    if config.mask_values == "auto":
        decided["mask_values"] = dataset.mask_values, dataset.mask_reason
        if config.ignore_value is None and dataset.ignore_value is not None:
            decided["ignore_value"] = dataset.ignore_value, dataset.mask_reason
    if config.in_channels == "auto":
        decided["in_channels"] = dataset.channels, "as the images have"
    if config.image_mean == "auto":
        decided["image_mean"] = dataset.mean, dataset.statistics_reason
    if config.image_std == "auto":
        decided["image_std"] = dataset.std, dataset.statistics_reason
    if config.crops_per_image == "auto":
        crops = choose_crops_per_image(dataset.train_sizes, image_shape(config)) if config.fit == "crop" else 1
        reason = "as many as fit side by side into an image of median area" if config.fit == "crop" else "fit: resize has no crops"
        decided["crops_per_image"] = crops, reason
    if config.class_weights == "auto":
        decided["class_weights"] = class_weights(dataset.class_shares, config.num_classes), "rare classes weigh more"
    return decided


def choose_crops_per_image(image_sizes: Sequence[tuple[int, int]], size: tuple[int, int]) -> int:
    """As many crops as fit side by side into an image of median area."""
    area = median(height * width for height, width in image_sizes)
    return int(min(max(1, round(area / (size[0] * size[1]))), MAX_CROPS))


def class_weights(class_shares: Sequence[float], num_classes: int) -> tuple[float, ...]:
    """Median share / share of each class, at most MAX_CLASS_WEIGHT and at least its inverse; 1 for a class that does not occur.

    With num_classes 1: one weight, of foreground against background.
    """
    present = [share for share in class_shares if share > 0]
    middle = median(present) if present else 1.0
    low, high = 1 / MAX_CLASS_WEIGHT, MAX_CLASS_WEIGHT
    weights = [round(min(max(middle / share, low), high), 4) if share > 0 else 1.0 for share in class_shares]
    return (round(min(weights[1] / weights[0], high), 4),) if num_classes == 1 else tuple(weights)
