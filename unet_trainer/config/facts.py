"""Facts about the hardware, the dataset and the cost of a step: what `resolve` decides from. Plain values, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unet_trainer.config.parsers import MaskClass, MaskValues

NumberFormat = Literal["float32", "bfloat16", "float16"]
TOLD_SHARE = 0.85  # a transform that can be told from the original in so many images changes what the data look like
TOLD_CHANCE = 0.02  # unless that so many are told by chance is likelier than this


@dataclass(frozen=True)
class HardwareFacts:
    """What the hardware can do. `device` is torch's name for it; ROCm GPUs are `cuda` to torch."""

    device: str
    name: str
    has_bfloat16: bool
    has_float16: bool
    num_cores: int
    free_memory: int = 0  # bytes of the device that are free; on a CPU, of the host
    host_memory: int = 0  # bytes of the host that are free
    disk: int = 0  # bytes free where runs are written
    has_slow_bfloat16: bool = False  # it computes bfloat16 in software
    num_processes: int = 1  # of the torchrun job, each with a device
    num_local_processes: int = 1  # of them, on this machine

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class Measurements:
    """What was measured in the training images and masks. Lengths are in pixels of the files."""

    num_pairs: int  # that were measured
    structure: float  # of the largest kind: a typical object's side, or four times its thickness if that is less
    relative_structure: float  # the same, relative to its image's side
    thickness: float  # of the thinnest class
    size_spread: float  # 90th / 10th percentile of object sizes
    brightness: float  # mean of the images' mean brightness, as a share of the range of values
    brightness_spread: float  # its standard deviation
    has_colour: bool  # the channels of an RGB image differ
    told: Mapping[str, float]  # transform → share of images in which the whole image can be told from its transform
    told_in_views: Mapping[str, float]  # the same of crops
    has_sides: bool  # two classes are mirror images of each other, as left and right are
    chance: Mapping[str, float]  # transform → probability that so many are told although the transform changes nothing
    chance_in_views: Mapping[str, float]

    def share_told(self, transform: str, in_views: bool) -> float:
        return (self.told_in_views if in_views else self.told)[transform]

    def keeps_labels(self, transform: str, in_views: bool) -> bool:
        """Whether images still look like this dataset's after a transform (of the whole image, or of crops)."""
        chance = (self.chance_in_views if in_views else self.chance)[transform]
        return self.share_told(transform, in_views) < TOLD_SHARE or chance > TOLD_CHANCE


@dataclass(frozen=True)
class DatasetFacts:
    """What the scan found in the dataset, and what was measured in it where a setting depends on that."""

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    statistics_reason: str
    mask_values: MaskValues
    ignore_value: MaskClass | None
    mask_reason: str
    class_shares: Sequence[float]  # by class id, of the pixels that count
    train_sizes: Sequence[tuple[int, int]]  # height and width of each training image
    val_sizes: Sequence[tuple[int, int]] = ()
    bytes_per_value: int = 1  # of a channel of a pixel in a batch
    measurements: Measurements | None = None
    num_classes: int = 1
    num_classes_reason: str = ""
    class_names: tuple[str, ...] | None = None  # that a file beside the masks gives, for mask_reason
    mask_tolerance: int = 0
    are_blocks: bool = False  # the images are parts of a larger one
    has_val_classes: bool = True  # a validation mask has pixels of a class that is scored
    brightness_share: float = 0.0  # of the variance of pixel values, that lies between images and not within them


@dataclass(frozen=True)
class StepCost:
    """One optimizer step of a model at one batch size, measured on the device."""

    seconds: float  # infinite: memory does not hold the step
    eval_seconds: float  # of one image in validation
    memory: int  # bytes, peak

    @property
    def is_possible(self) -> bool:
        return math.isfinite(self.seconds)


TOO_LARGE = StepCost(math.inf, math.inf, 0)
