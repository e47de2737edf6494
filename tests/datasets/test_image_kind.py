"""Channels, depth and statistics that the images of a dataset share, and images that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.scan import ImageFacts, ImageKind, build_image_spec, mismatch, pooled_statistics


def facts(image):
    """Of H,W,C pixels, by numpy alone."""
    values = image.astype(np.float64)
    return ImageFacts(
        *image.shape,
        str(image.dtype),
        tuple(values.mean((0, 1)).tolist()),
        tuple(values.std((0, 1)).tolist()),
        float(values.min()),
        float(values.max()),
        None,
        False,
        "",
    )


def plain(dtype="uint8", channels=3, low=0.0, high=255.0):
    return ImageFacts(4, 5, channels, dtype, (100.0,) * channels, (10.0,) * channels, low, high, None, False, "")


def test_a_mismatch_is_described_with_the_kind_of_the_others():
    kind = ImageKind(3, "uint8")
    assert mismatch(plain(), kind) is None
    assert mismatch(plain(channels=1), kind) is None  # grey gets three equal channels
    assert mismatch(plain("uint16"), kind) == "16-bit, the others are 8-bit"
    assert mismatch(plain("float64", 9), kind) == "float, the others are 8-bit"
    assert mismatch(plain("uint32"), kind) == "uint32, the others are 8-bit"
    assert mismatch(plain(channels=4), kind) == "4 channels, need 3"
    assert mismatch(plain(channels=3), ImageKind(1, "uint8")) == "3 channels, need 1"


# Statistics


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pooled_statistics_are_those_of_all_pixels_together(dtype):
    rng = np.random.default_rng(0)
    images = [
        (rng.normal(40 * index, 5 + index, (10 + index, 20 - 3 * index, 5)).clip(0, 255) * [1, 1, 0.5, 0.1, 1]).astype(dtype)
        for index in range(4)
    ]
    pixels = np.concatenate([image.reshape(-1, 5) for image in images]).astype(np.float64)
    mean, std = pooled_statistics([facts(image) for image in images], 5)
    assert mean == pytest.approx(pixels.mean(0), rel=1e-5)
    assert std == pytest.approx(pixels.std(0), rel=1e-5)


# The spec


def test_statistics_for_another_number_of_channels_are_refused_both_at_once():
    with pytest.raises(ConfigError) as raised:
        build_image_spec(ImageKind(5, "uint16"), [plain("uint16", 5)], [1.0, 2.0, 3.0], [4.0])
    assert str(raised.value).splitlines() == [
        "image_mean: got 3 values; the images have 5 channels",
        "image_std: got 1 values; the images have 5 channels",
    ]
