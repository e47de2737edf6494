"""Channels, depth and statistics that the images of a dataset share, and images that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.scan import ImageFacts, ImageKind, build_image_spec, choose_kind, mismatch, pooled_statistics


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


def test_grey_among_colour_counts_as_colour():
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=3)], "auto") == ImageKind(3, "uint8")
    assert choose_kind([plain(channels=1)] * 9, "auto") == ImageKind(1, "uint8")
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=4)], "auto") == ImageKind(1, "uint8")


def test_floats_of_any_width_are_one_kind():
    images = [plain(dtype) for dtype in ("float16", "float32", "float64")]
    kind = choose_kind(images, "auto")
    assert kind == ImageKind(3, "float")
    assert [mismatch(image, kind) for image in images] == [None] * 3


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


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_constant_channel_has_a_standard_deviation_of_1(value):
    """0.1 is no binary number: its computed deviation is tiny but not 0."""
    images = [facts(np.full((7, 9, 1), value)), facts(np.full((11, 3, 1), value))]
    mean, std = pooled_statistics(images, 1)
    assert mean == pytest.approx((value,))
    assert std == (1.0,)


# The spec


def test_the_value_range_is_that_of_all_images_and_never_empty():
    kind = ImageKind(1, "float")
    spec, _ = build_image_spec(kind, [plain("float32", 1, -4.0, 2.0), plain("float32", 1, 1.0, 9.0)], "auto", "auto")
    assert (spec.low, spec.high) == (-4.0, 9.0)
    flat, _ = build_image_spec(kind, [plain("float32", 1, 3.0, 3.0)], "auto", "auto")
    assert (flat.low, flat.high) == (3.0, 4.0)


def test_statistics_for_another_number_of_channels_are_refused_both_at_once():
    with pytest.raises(ConfigError) as raised:
        build_image_spec(ImageKind(5, "uint16"), [plain("uint16", 5)], [1.0, 2.0, 3.0], [4.0])
    assert str(raised.value).splitlines() == [
        "image_mean: got 3 values; the images have 5 channels",
        "image_std: got 1 values; the images have 5 channels",
    ]
