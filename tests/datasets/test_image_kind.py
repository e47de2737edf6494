"""What images have in common: channels, depth, and the statistics that normalise them."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.errors import ConfigError
from unet_trainer.datasets.image_kind import build_image_spec, choose_kind, mismatch, pooled_statistics, show_kind
from unet_trainer.datasets.layouts import Kind
from unet_trainer.datasets.scan import ImageFacts
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT, ImageSpec


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


def test_most_images_say_what_the_kind_is():
    assert choose_kind([plain("uint16", 5)] * 3 + [plain("uint8", 3)] * 2, "auto") == Kind(5, "uint16")


def test_grey_beside_colour_counts_as_colour():
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=3)], "auto") == Kind(3, "uint8")
    assert choose_kind([plain(channels=1)] * 9, "auto") == Kind(1, "uint8")
    assert choose_kind([plain(channels=1)] * 9 + [plain(channels=4)], "auto") == Kind(1, "uint8")


def test_in_channels_decides_where_it_is_given():
    assert choose_kind([plain(channels=1)] * 9, 3) == Kind(3, "uint8")


def test_floats_of_any_width_are_one_kind():
    images = [plain(dtype) for dtype in ("float16", "float32", "float64")]
    kind = choose_kind(images, "auto")
    assert kind == Kind(3, "float")
    assert [mismatch(image, kind) for image in images] == [None] * 3


def test_a_misfit_is_told_with_what_the_others_are():
    kind = Kind(3, "uint8")
    assert mismatch(plain(), kind) is None
    assert mismatch(plain(channels=1), kind) is None  # grey gets three equal channels
    assert mismatch(plain("uint16"), kind) == "16-bit, the others are 8-bit"
    assert mismatch(plain("float64", 9), kind) == "float, the others are 8-bit"
    assert mismatch(plain("uint32"), kind) == "uint32, the others are 8-bit"
    assert mismatch(plain(channels=4), kind) == "4 channels, need 3"
    assert mismatch(plain(channels=3), Kind(1, "uint8")) == "3 channels, need 1"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind(3, "uint8"), "8-bit RGB_8BIT"),
        (Kind(1, "uint16"), "16-bit grey"),
        (Kind(5, "float"), "float 5 channels"),
        (Kind(2, "int16"), "signed 16-bit 2 channels"),
        (Kind(1, "uint32"), "uint32 grey"),
    ],
)
def test_a_kind_is_shown_in_words(kind, words):
    assert show_kind(kind) == words


# BufferSnapshot


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
def test_a_channel_without_spread_is_divided_by_1(value):
    """0.1 is no binary number: its computed spread is tiny and not 0, and would be divided by."""
    images = [facts(np.full((7, 9, 1), value)), facts(np.full((11, 3, 1), value))]
    mean, std = pooled_statistics(images, 1)
    assert mean == pytest.approx((value,))
    assert std == (1.0,)


def test_a_small_spread_is_kept():
    noise = np.random.default_rng(0).normal(0, 1e-6, (50, 50, 1))
    assert pooled_statistics([facts(noise)], 1)[1][0] == pytest.approx(1e-6, rel=0.05)


# The form


def test_8_bit_rgb_is_normalised_as_imagenet_is():
    form, reason = build_image_spec(Kind(3, "uint8"), [plain()], "auto", "auto")
    assert form == RGB_8BIT == ImageSpec(3, True, IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0)
    assert reason == "ImageNet's, for 8-bit RGB_8BIT"


def test_imagenets_numbers_are_those_of_8_bit():
    assert [round(value / 255, 3) for value in IMAGENET_MEAN] == [0.485, 0.456, 0.406]
    assert [round(value / 255, 3) for value in IMAGENET_STD] == [0.229, 0.224, 0.225]


@pytest.mark.parametrize(("dtype", "channels", "is_8bit"), [("uint8", 1, True), ("uint8", 5, True), ("uint16", 3, False)])
def test_all_else_is_normalised_by_the_training_images(dtype, channels, is_8bit):
    image = plain(dtype, channels, 7.0, 250.0)
    form, reason = build_image_spec(Kind(channels, dtype), [image], "auto", "auto")
    low, high = (0.0, 255.0) if is_8bit else (7.0, 250.0)
    assert form == ImageSpec(channels, is_8bit, (100.0,) * channels, (10.0,) * channels, low, high)
    assert reason == "of the training images"


def test_the_range_is_that_of_all_images_and_never_empty():
    kind = Kind(1, "float")
    form, _ = build_image_spec(kind, [plain("float32", 1, -4.0, 2.0), plain("float32", 1, 1.0, 9.0)], "auto", "auto")
    assert (form.low, form.high) == (-4.0, 9.0)
    flat, _ = build_image_spec(kind, [plain("float32", 1, 3.0, 3.0)], "auto", "auto")
    assert (flat.low, flat.high) == (3.0, 4.0)


def test_given_numbers_are_taken_as_they_are():
    form, reason = build_image_spec(Kind(3, "uint8"), [plain()], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert (form.mean, form.std, reason) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "as given")


def test_one_of_the_two_may_be_given():
    form, reason = build_image_spec(Kind(1, "uint16"), [plain("uint16", 1)], "auto", [4.0])
    assert (form.mean, form.std, reason) == ((100.0,), (4.0,), "of the training images")


def test_numbers_for_another_count_of_channels_are_refused_all_at_once():
    with pytest.raises(ConfigError) as raised:
        build_image_spec(Kind(5, "uint16"), [plain("uint16", 5)], [1.0, 2.0, 3.0], [4.0])
    assert str(raised.value).splitlines() == [
        "image_mean: got 3 values; the images have 5 channels",
        "image_std: got 1 values; the images have 5 channels",
    ]


def test_pixels_take_the_form_of_the_batch():
    grey = np.array([[[7], [9]]], np.uint8)
    shaped = RGB_8BIT.shape(grey)
    assert (shaped.dtype, shaped.tolist()) == (np.uint8, [[[7, 7, 7], [9, 9, 9]]])
    form = ImageSpec(2, False, (0.0, 0.0), (1.0, 1.0))
    deep = form.shape(np.array([[[65535, 1]]], np.uint16))
    assert (deep.dtype, deep.tolist()) == (np.float32, [[[65535.0, 1.0]]])
