"""What all images of a dataset share: channels, depth, value range and the statistics that normalise them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_files import Pixels, to_channels

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of 8-bit RGB
IMAGENET_STD = (58.395, 57.12, 57.375)
MISSING = 1e30  # larger numbers mark pixels without data
DEPTH_NAMES = {"uint8": "8-bit", "uint16": "16-bit", "int16": "signed 16-bit", "float": "float"}


@dataclass(frozen=True)
class ImageSpec:
    """How images enter a batch: their channels, uint8 or float32, and the statistics that the device normalises them with."""

    channels: int
    depth: str  # a key of DEPTH_NAMES, or another dtype
    mean: tuple[float, ...]  # of each channel, in the files' own units
    std: tuple[float, ...]
    low: float  # lowest and highest value that occur; augmentations from a list see this range as 0 to 1
    high: float

    @property
    def is_8bit(self) -> bool:
        return self.depth == "uint8"

    def to_batch(self, image: Pixels) -> Pixels:
        """H,W,C pixels of a file → H,W,C as in the batch, uint8 or float32."""
        image = to_channels(image, self.channels)
        return image if self.is_8bit else image.astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> ImageSpec:
        return ImageSpec(**{**content, "mean": tuple(content["mean"]), "std": tuple(content["std"])})


RGB_8BIT = ImageSpec(3, "uint8", IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0)


def refuse_missing_mark(low: float, high: float) -> None:
    """Of the values of an image, lowest and highest; raises ReadError. Neither statistics nor a network survive such a number."""
    if max(-low, high) > MISSING:
        raise ReadError(f"values from {low:.3g} to {high:.3g}; a mark for missing data? replace it by an ordinary number")


def depth_name(depth: str) -> str:
    return DEPTH_NAMES.get(depth, depth)
