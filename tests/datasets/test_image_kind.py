"""Channels, depth and statistics that the images of a dataset share, and images that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.image_kind import ImageKind, build_image_spec, choose_kind, mismatch, pooled_statistics
from unet_trainer.datasets.scan import ImageFacts
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec


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
        False,
        False,
        "",
    )


def plain(dtype="uint8", channels=3, low=0.0, high=255.0):
    return ImageFacts(4, 5, channels, dtype, (100.0,) * channels, (10.0,) * channels, low, high, False, False, "")


def test_the_kind_is_that_of_most_images():
    assert choose_kind([plain("uint16", 5)] * 3 + [plain("uint8", 3)] * 2, "auto") == ImageKind(5, "uint16")


def test_grey_among_colour_counts_as_colour():
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=3)], "auto") == ImageKind(3, "uint8")
    assert choose_kind([plain(channels=1)] * 9, "auto") == ImageKind(1, "uint8")
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=4)], "auto") == ImageKind(1, "uint8")


def test_in_channels_decides_where_it_is_given():
    assert choose_kind([plain(channels=1)] * 9, 3) == ImageKind(3, "uint8")


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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ImageKind(3, "uint8"), "8-bit RGB"),
        (ImageKind(1, "uint16"), "16-bit grey"),
        (ImageKind(5, "float"), "float 5 channels"),
        (ImageKind(2, "int16"), "signed 16-bit 2 channels"),
        (ImageKind(1, "uint32"), "uint32 grey"),
    ],
)
def test_a_kind_is_shown_in_words(kind, words):
    assert str(kind) == words


# Statistics


def test_pooled_statistics_of_two_images_by_hand():
    """Four pixels of 10 and twelve of 30: mean 25, variance (4 × 15² + 12 × 5²) / 16 = 75."""
    small, large = np.full((2, 2, 1), 10, np.uint16), np.full((3, 4, 1), 30, np.uint16)
    assert pooled_statistics([facts(small), facts(large)], 1) == ((25.0,), (8.66025,))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
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


def test_a_grey_image_counts_in_every_channel():
    grey, colour = np.full((2, 2, 1), 10.0), np.dstack([np.full((2, 2), value) for value in (10.0, 20.0, 50.0)])
    assert pooled_statistics([facts(grey), facts(colour)], 3) == ((10.0, 15.0, 30.0), (1.0, 5.0, 20.0))


@pytest.mark.parametrize("value", [0.0, 0.1, 33000.0, -7.3])
def test_a_constant_channel_has_a_standard_deviation_of_1(value):
    """0.1 is no binary number: its computed deviation is tiny but not 0."""
    images = [facts(np.full((7, 9, 1), value)), facts(np.full((11, 3, 1), value))]
    mean, std = pooled_statistics(images, 1)
    assert mean == pytest.approx((value,))
    assert std == (1.0,)


def test_a_small_deviation_is_kept():
    noise = np.random.default_rng(0).normal(0, 1e-6, (50, 50, 1))
    assert pooled_statistics([facts(noise)], 1)[1][0] == pytest.approx(1e-6, rel=0.05)


# The spec


def test_8_bit_rgb_has_imagenets_statistics():
    spec, reason = build_image_spec(ImageKind(3, "uint8"), [plain()], "auto", "auto")
    assert spec == RGB_8BIT
    assert reason == "ImageNet's, for 8-bit RGB"


@pytest.mark.parametrize(("dtype", "channels", "is_8bit"), [("uint8", 1, True), ("uint8", 5, True), ("uint16", 3, False)])
def test_any_other_kind_has_the_statistics_of_the_training_images(dtype, channels, is_8bit):
    image = plain(dtype, channels, 7.0, 250.0)
    spec, reason = build_image_spec(ImageKind(channels, dtype), [image], "auto", "auto")
    low, high = (0.0, 255.0) if is_8bit else (7.0, 250.0)
    assert spec == ImageSpec(channels, dtype, (100.0,) * channels, (10.0,) * channels, low, high)
    assert reason == "of the training images"


def test_the_value_range_is_that_of_all_images_and_never_empty():
    kind = ImageKind(1, "float")
    spec, _ = build_image_spec(kind, [plain("float32", 1, -4.0, 2.0), plain("float32", 1, 1.0, 9.0)], "auto", "auto")
    assert (spec.low, spec.high) == (-4.0, 9.0)
    flat, _ = build_image_spec(kind, [plain("float32", 1, 3.0, 3.0)], "auto", "auto")
    assert (flat.low, flat.high) == (3.0, 4.0)


def test_given_statistics_are_used():
    spec, reason = build_image_spec(ImageKind(3, "uint8"), [plain()], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert (spec.mean, spec.std, reason) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "as given")


def test_mean_or_std_may_be_given_alone():
    spec, reason = build_image_spec(ImageKind(1, "uint16"), [plain("uint16", 1)], "auto", [4.0])
    assert (spec.mean, spec.std, reason) == ((100.0,), (4.0,), "of the training images")


def test_statistics_for_another_number_of_channels_are_refused_both_at_once():
    with pytest.raises(ConfigError) as raised:
        build_image_spec(ImageKind(5, "uint16"), [plain("uint16", 5)], [1.0, 2.0, 3.0], [4.0])
    assert str(raised.value).splitlines() == [
        "image_mean: got 3 values; the images have 5 channels",
        "image_std: got 1 values; the images have 5 channels",
    ]
