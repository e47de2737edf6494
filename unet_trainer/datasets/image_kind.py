"""Decides from the scan which channels, depth and statistics the images of a dataset share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.scan import ImageFacts
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, ImageSpec, depth_name

FLOATS = ("float16", "float32", "float64")
IMAGENET_REASON = "ImageNet's, for 8-bit RGB"


@dataclass(frozen=True)
class ImageKind:
    """Channels and depth that the images of one dataset share."""

    channels: int
    depth: str  # a key of DEPTH_NAMES, or another dtype

    def __str__(self) -> str:
        channels = {1: "grey", 3: "RGB"}.get(self.channels, f"{self.channels} channels")
        return f"{depth_name(self.depth)} {channels}"


def choose_kind(images: Sequence[ImageFacts], in_channels: int | str) -> ImageKind:
    """The kind of most images; grey images among colour images count as colour."""
    depth = Counter(depth_of(image) for image in images).most_common(1)[0][0]
    if in_channels != "auto":
        return ImageKind(int(in_channels), depth)
    counts = Counter(image.channels for image in images)
    if set(counts) == {1, 3}:
        return ImageKind(3, depth)
    return ImageKind(counts.most_common(1)[0][0], depth)


def depth_of(image: ImageFacts) -> str:
    return "float" if image.dtype in FLOATS else image.dtype


def mismatch(image: ImageFacts, kind: ImageKind) -> str | None:
    """Why an image cannot be in one batch with the others; None if it can."""
    if depth_of(image) != kind.depth:
        return f"{depth_name(depth_of(image))}, the others are {depth_name(kind.depth)}"
    if image.channels not in (1, kind.channels):
        return f"{image.channels} channels, need {kind.channels}"
    return None


def build_image_spec(
    kind: ImageKind,
    images: Sequence[ImageFacts],
    image_mean: Sequence[float] | str,
    image_std: Sequence[float] | str,
) -> tuple[ImageSpec, str]:
    """The spec, and the source of its statistics: as given, ImageNet's for 8-bit RGB, else those of the training images."""
    given = {"image_mean": image_mean, "image_std": image_std}
    wrong = [
        f"{name}: got {len(value)} values; the images have {kind.channels} channels"
        for name, value in given.items()
        if not isinstance(value, str) and len(value) != kind.channels
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    is_8bit = kind.depth == "uint8"
    mean, std = pooled_statistics(images, kind.channels)
    reason = "of the training images"
    if is_8bit and kind.channels == 3:
        mean, std, reason = IMAGENET_MEAN, IMAGENET_STD, IMAGENET_REASON
    if not isinstance(image_mean, str) and not isinstance(image_std, str):
        reason = "as given"
    low, high = (0.0, 255.0) if is_8bit else (min(image.low for image in images), max(image.high for image in images))
    return (
        ImageSpec(
            kind.channels,
            kind.depth,
            mean if isinstance(image_mean, str) else tuple(image_mean),
            std if isinstance(image_std, str) else tuple(image_std),
            low,
            high if high > low else low + 1.0,
        ),
        reason,
    )


def pooled_statistics(images: Sequence[ImageFacts], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the pixels of all images; a channel without any spread has std 1."""
    weights = np.array([image.height * image.width for image in images], np.float64)
    weights /= weights.sum()
    means = np.array([np.broadcast_to(image.mean, channels) for image in images])
    stds = np.array([np.broadcast_to(image.std, channels) for image in images])
    mean = weights @ means
    variance = weights @ (stds**2 + (means - mean) ** 2)
    std = np.sqrt(variance)
    has_spread = std > np.finfo(np.float32).eps * np.abs(mean)  # a constant has a tiny std from rounding
    return tuple(_rounded(value) for value in mean), tuple(_rounded(value) for value in np.where(has_spread, std, 1.0))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
