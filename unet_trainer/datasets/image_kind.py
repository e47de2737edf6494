"""Decides from the scan which channels, depth and statistics the images of a dataset share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.scan import ImageFacts
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, ImageSpec, depth_name
from unet_trainer.system.console import counted

FLOATS = ("float16", "float32", "float64")
MIN_REPEATS = 16  # values of all images together that hold a mark
MAX_MARKS = 8
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
    """The kind of most images; grey images among colour images count as colour, and alpha counts where it is a band in most."""
    depth = Counter(depth_of(image) for image in images).most_common(1)[0][0]
    if in_channels != "auto":
        return ImageKind(int(in_channels), depth)
    bands = [image.alpha is not None and image.alpha.is_band for image in images]
    keeps_alpha = 2 * sum(bands) > len(images)
    counts = Counter(image.channels + (keeps_alpha and is_band) for image, is_band in zip(images, bands, strict=True))
    if set(counts) == {1, 3}:
        return ImageKind(3, depth)
    return ImageKind(counts.most_common(1)[0][0], depth)


def depth_of(image: ImageFacts) -> str:
    return "float" if image.dtype in FLOATS else image.dtype


def choose_nodata(images: Sequence[ImageFacts], nodata: str) -> tuple[float, ...]:
    """The values that mark missing data: tags of GDAL, and what is far from all others and repeats."""
    if nodata == "keep":
        return ()
    repeats: Counter[float] = Counter()
    for image in images:
        if image.extreme is not None:
            by_tag = MIN_REPEATS if image.dtype not in FLOATS else 0
            repeats[image.extreme.value] += by_tag + sum(image.extreme.missing) - sum(image.missing)
    return tuple(sorted(value for value, count in repeats.most_common(MAX_MARKS) if count >= MIN_REPEATS))


def describe_reading(
    images: Sequence[ImageFacts], channels: int, nodata: Sequence[float], is_ignored: bool, can_be_set: bool = True
) -> list[str]:
    """What is done with alpha channels and with missing data, a line each, and the settings for other ways if there are any. Of
    images as they were scanned."""
    total, lines = counted(len(images), "image"), []
    alpha = [image for image in images if image.alpha is not None]
    kept = [image for image in alpha if image.channels + 1 == channels]
    if kept:
        drop = f" (in_channels: {channels - 1} drops it)" if can_be_set else ""
        lines.append(f"the last channel of {len(kept)} of {total}, tagged as alpha, is kept as a band{drop}")
    if len(kept) < len(alpha):
        keep = f" (in_channels: {alpha[0].channels + 1} keeps it)" if can_be_set else ""
        lines.append(f"the alpha channel of {len(alpha) - len(kept)} of {total} is dropped{keep}")
    missing = [read for image in images if sum((read := image.as_read(channels, nodata)).missing)]
    if missing:
        num_values = sum(image.height * image.width * image.channels for image in missing)
        share = sum(sum(image.missing) for image in missing) / num_values
        values = [f"{value:g}" for value in nodata]
        marks = ", ".join(dict.fromkeys([*values, *(mark for image in missing for mark in image.marks)]))
        ways = ["these pixels are ignored"] if is_ignored else []
        if can_be_set:
            ways += [] if is_ignored else ["nodata: ignore ignores these pixels"]
            ways += [f"nodata: keep takes {', '.join(values)} as any other value"] if values else []
        what = f"{len(missing)} of {total} have no data in {share:.2%} of their values ({marks})"
        lines.append("; ".join([f"{what}: left out of the statistics, and filled with the mean", *ways]))
    return lines


def mismatch(image: ImageFacts, kind: ImageKind) -> str | None:
    """Why an image cannot be in one batch with the others; None if it can. Of an image as it is read."""
    if depth_of(image) != kind.depth:
        return f"{depth_name(depth_of(image))}, the others are {depth_name(kind.depth)}"
    if image.channels not in (1, kind.channels):
        alpha = " and alpha" if image.alpha is not None else ""
        return f"{image.channels} channels{alpha}, need {kind.channels}"
    return None


def build_image_spec(
    kind: ImageKind,
    images: Sequence[ImageFacts],
    image_mean: Sequence[float] | str,
    image_std: Sequence[float] | str,
    nodata: tuple[float, ...] = (),
    ignores_nodata: bool = False,
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
    is_photo = is_8bit and kind.channels == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if is_photo else pooled_statistics(images, kind.channels)
    mean = mean if isinstance(image_mean, str) else tuple(image_mean)
    std = std if isinstance(image_std, str) else tuple(image_std)
    is_given = not any(isinstance(value, str) for value in given.values())
    reason = "as given" if is_given else IMAGENET_REASON if is_photo else "of the training images"
    held = [image for image in images if sum(image.missing) < image.height * image.width * image.channels] or images
    low, high = (0.0, 255.0) if is_8bit else (min(image.low for image in held), max(image.high for image in held))
    high = high if high > low else low + 1.0
    return ImageSpec(kind.channels, kind.depth, mean, std, low, high, nodata, ignores_nodata), reason


def pooled_statistics(images: Sequence[ImageFacts], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the values of all images that are data; a channel without any spread has
    std 1."""
    means, stds, missing = (
        np.array([np.broadcast_to(values, channels) for values in columns])
        for columns in zip(*((image.mean, image.std, image.missing or 0) for image in images), strict=True)
    )
    weights = np.array([[image.height * image.width] for image in images], np.float64) - missing
    weights /= np.maximum(1, weights.sum(axis=0))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stds**2 + (means - mean) ** 2)).sum(axis=0)
    std = np.sqrt(variance)
    has_spread = std > np.finfo(np.float32).eps * np.abs(mean)  # a constant has a tiny std from rounding
    rounded = [tuple(float(f"{value:.6g}") for value in values) for values in (mean, np.where(has_spread, std, 1.0))]
    return rounded[0], rounded[1]
