"""How the pixels of a file become those of a batch, and how the spec goes through a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.image_bytes import tiff_bytes
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec, extreme_value, find_missing


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float64])
def test_other_depths_become_float32_with_their_values(dtype):
    spec = ImageSpec(2, np.dtype(dtype).name, (0.0, 0.0), (1.0, 1.0), 0.0, 65535.0)
    pixels = spec.to_batch(np.array([[[65535, 1]]], dtype))
    assert (pixels.dtype, pixels.tolist()) == (np.float32, [[[65535.0, 1.0]]])


def test_a_spec_goes_through_a_checkpoint():
    for spec in (RGB_8BIT, ImageSpec(2, "float", (0.5, 1.5), (1.0, 2.0), -3.0, 4.0, (-9999.0,), True)):
        content = json.loads(json.dumps(spec.to_dict()))
        assert content["mean"] == list(spec.mean)
        assert ImageSpec.from_dict(content) == spec


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_missing_value_by_value(dtype):
    image = np.array([[[1, np.nan], [np.inf, 2], [-777, 0]]], dtype)
    assert find_missing(image, [-777.0]).tolist() == [[[False, True], [True, False], [True, False]]]
    assert find_missing(image[:, 2:]) is None
    assert (find_missing(np.full((2, 2, 1), np.finfo(dtype).max / 2, dtype)) is None) == (dtype == np.float16)


def test_whole_numbers_are_missing_where_all_channels_hold_the_mark():
    image = np.array([[[0, 0], [0, 7], [7, 7]]], np.uint8)
    assert find_missing(image, [0.0]).tolist() == [[[True, True], [False, False], [False, False]]]
    for no_mark in (-9999.0, 256.0, 0.5):  # of another depth
        assert find_missing(image, [no_mark]) is None
    assert find_missing(np.zeros((2, 2, 1), bool), [0.0]) is None


@pytest.mark.parametrize(
    ("mark", "others", "is_extreme"),
    [
        (-9999, (0, 3000), True),  # a map of heights
        (-9999, (-8000, 8000), True),  # with the sea
        (-9999, (-9990, 8000), False),
        (-999, (0, 1), True),
        (-999, (5, 5), True),  # beside nothing but sea level
        (-5, (0, 1), False),  # any other: ten times their range
        (-50, (0, 1), True),
        (1e20, (-300, 300), True),
        (4095, (0, 600), False),  # saturated
        (0, (1e6, 1e6 + 1), False),
        (7, (5, 5), False),
    ],
)
def test_a_value_far_from_all_others_may_be_a_mark(mark, others, is_extreme):
    image = np.linspace(*others, 100).reshape(10, 10, 1).astype(np.float32)
    image[:3, :3] = mark
    assert extreme_value(image) == (np.float32(mark) if is_extreme else None)
    holed = image.copy()
    holed[9, 9] = np.nan
    assert extreme_value(holed, find_missing(holed)) == extreme_value(image)


def test_the_tag_of_a_file_marks_floats_always_and_whole_numbers_if_it_did_in_training():
    for dtype, nodata, is_filled in ((np.float32, (), True), (np.int16, (), False), (np.int16, (-5.0,), True)):
        data = tiff_bytes(np.array([[3, -5]], dtype), extratags=[(42113, "s", 0, "-5", True)])
        spec = ImageSpec(1, "float" if dtype == np.float32 else "int16", (2.6,), (1.0,), 0.0, 9.0, nodata)
        found = spec.decode(data)
        mean = 2.6 if dtype == np.float32 else 3
        assert found.pixels[:, :, 0].tolist() == [[3, pytest.approx(mean if is_filled else -5)]]
        assert (None if found.is_missing is None else found.is_missing.tolist()) == ([[False, True]] if is_filled else None)
        assert found.pixels.dtype == dtype


def test_grey_among_colour_is_filled_with_the_mean_of_all_channels():
    spec = ImageSpec(3, "float", (1.0, 2.0, 6.0), (1.0, 1.0, 1.0), 0.0, 9.0)
    assert spec.fill(np.array([[[np.nan], [4.0]]])).tolist() == [[[3.0], [4.0]]]
