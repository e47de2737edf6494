"""What all images of a dataset have in common: channels, depth and statistics, so that a batch can be made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unet_trainer.config import ConfigError
from unet_trainer.images import Pixels, to_channels
from unet_trainer.scan import ImageFacts

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of 8-bit RGB
IMAGENET_STD = (58.395, 57.12, 57.375)
FLOATS = ("float16", "float32", "float64")
DEPTHS = {"uint8": "8-bit", "uint16": "16-bit", "int16": "signed 16-bit", "float": "float"}


@dataclass(frozen=True)
class ImageForm:
    """How images enter a batch: their channels, uint8 or float32, and what the device normalises them with."""

    channels: int
    is_8bit: bool
    mean: tuple[float, ...]  # of each channel, in the files' own units
    std: tuple[float, ...]
    low: float = 0.0  # the values that occur: augmentations from a list see them as 0 to 1
    high: float = 255.0

    def shape(self, image: Pixels) -> Pixels:
        """H,W,C of a file → the same pixels as the batch holds them."""
        image = to_channels(image, self.channels)
        return image if self.is_8bit else image.astype(np.float32)


RGB = ImageForm(3, True, IMAGENET_MEAN, IMAGENET_STD)


@dataclass(frozen=True)
class Kind:
    """Channels and depth that the images of one dataset share."""

    channels: int
    depth: str  # a key of DEPTHS, or another dtype


def choose_kind(images: Sequence[ImageFacts], in_channels: int | str) -> Kind:
    """What most images have; grey beside colour counts as colour."""
    depth = Counter(depth_of(image) for image in images).most_common(1)[0][0]
    if in_channels != "auto":
        return Kind(int(in_channels), depth)
    counts = Counter(image.channels for image in images)
    if set(counts) == {1, 3}:
        return Kind(3, depth)
    return Kind(counts.most_common(1)[0][0], depth)


def depth_of(image: ImageFacts) -> str:
    return "float" if image.dtype in FLOATS else image.dtype


def misfit(image: ImageFacts, kind: Kind) -> str | None:
    """Why an image does not go with the others, or None."""
    if depth_of(image) != kind.depth:
        return f"{show_depth(depth_of(image))}, the others are {show_depth(kind.depth)}"
    if image.channels not in (1, kind.channels):
        return f"{image.channels} channels, need {kind.channels}"
    return None


def show_depth(depth: str) -> str:
    return DEPTHS.get(depth, depth)


def show_kind(kind: Kind) -> str:
    channels = {1: "grey", 3: "RGB"}.get(kind.channels, f"{kind.channels} channels")
    return f"{show_depth(kind.depth)} {channels}"


def build_form(
    kind: Kind,
    images: Sequence[ImageFacts],
    image_mean: Sequence[float] | str,
    image_std: Sequence[float] | str,
) -> tuple[ImageForm, str]:
    """The form and the reason for its statistics: ImageNet's for 8-bit RGB, those of the training images for all else."""
    is_8bit = kind.depth == "uint8"
    given = {"image_mean": image_mean, "image_std": image_std}
    wrong = [
        f"{name}: got {len(value)} values; the images have {kind.channels} channels"
        for name, value in given.items()
        if not isinstance(value, str) and len(value) != kind.channels
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    reason = "of the training images"
    mean, std = pooled_statistics(images, kind.channels)
    if is_8bit and kind.channels == 3:
        mean, std, reason = IMAGENET_MEAN, IMAGENET_STD, "ImageNet's, for 8-bit RGB"
    if not isinstance(image_mean, str) and not isinstance(image_std, str):
        reason = "as given"
    low, high = (0.0, 255.0) if is_8bit else (min(image.low for image in images), max(image.high for image in images))
    return (
        ImageForm(
            kind.channels,
            is_8bit,
            mean if isinstance(image_mean, str) else tuple(image_mean),
            std if isinstance(image_std, str) else tuple(image_std),
            low,
            high if high > low else low + 1.0,
        ),
        reason,
    )


def pooled_statistics(images: Sequence[ImageFacts], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the pixels of all images; a channel without any spread has 1."""
    weights = np.array([image.height * image.width for image in images], np.float64)
    weights /= weights.sum()
    means = np.array([np.broadcast_to(image.mean, channels) for image in images])
    stds = np.array([np.broadcast_to(image.std, channels) for image in images])
    mean = weights @ means
    variance = weights @ (stds**2 + (means - mean) ** 2)
    std = np.sqrt(variance)
    has_spread = std > np.finfo(np.float32).eps * np.abs(mean)  # less is the rounding of a constant
    return tuple(_rounded(value) for value in mean), tuple(_rounded(value) for value in np.where(has_spread, std, 1.0))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
