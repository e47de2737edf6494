"""How the pixels of a file become those of a batch, and how the spec goes through a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest

from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT, ImageSpec, depth_name


def test_8_bit_pixels_stay_uint8_and_grey_is_repeated():
    grey = np.array([[[7], [9]]], np.uint8)
    pixels = RGB_8BIT.to_batch(grey)
    assert (pixels.dtype, pixels.tolist()) == (np.uint8, [[[7, 7, 7], [9, 9, 9]]])
    colour = np.array([[[1, 2, 3]]], np.uint8)
    assert RGB_8BIT.to_batch(colour) is colour


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float64])
def test_other_depths_become_float32_with_their_values(dtype):
    spec = ImageSpec(2, np.dtype(dtype).name, (0.0, 0.0), (1.0, 1.0), 0.0, 65535.0)
    pixels = spec.to_batch(np.array([[[65535, 1]]], dtype))
    assert (pixels.dtype, pixels.tolist()) == (np.float32, [[[65535.0, 1.0]]])


def test_only_uint8_is_8_bit():
    assert RGB_8BIT.is_8bit
    assert not ImageSpec(3, "uint16", IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0).is_8bit


def test_a_spec_goes_through_a_checkpoint():
    for spec in (RGB_8BIT, ImageSpec(2, "float", (0.5, 1.5), (1.0, 2.0), -3.0, 4.0)):
        content = json.loads(json.dumps(spec.to_dict()))
        assert content["mean"] == list(spec.mean)
        assert ImageSpec.from_dict(content) == spec


def test_imagenets_statistics_are_those_of_8_bit_rgb():
    assert [round(value / 255, 3) for value in IMAGENET_MEAN] == [0.485, 0.456, 0.406]
    assert [round(value / 255, 3) for value in IMAGENET_STD] == [0.229, 0.224, 0.225]
    assert ImageSpec(3, "uint8", IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0) == RGB_8BIT


@pytest.mark.parametrize(
    ("depth", "name"),
    [("uint8", "8-bit"), ("uint16", "16-bit"), ("int16", "signed 16-bit"), ("float", "float"), ("uint32", "uint32")],
)
def test_a_depth_is_named_as_users_call_it(depth, name):
    assert depth_name(depth) == name
