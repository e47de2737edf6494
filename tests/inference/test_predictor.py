"""One image of any size, depth and number of channels."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.image_bytes import tiff_bytes
from helpers.predicting import BrightnessEngine
from helpers.steps import make_spec
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_readers import ArrayReader, open_reader
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.inference.logits import WholeLogits, all_ids
from unet_trainer.inference.predictor import Predictor, check_image
from unet_trainer.inference.tiled import TiledLogits

GREY_16BIT = ImageSpec(1, "uint16", (100.0,), (50.0,), 0.0, 1000.0)
RANDOM = np.random.default_rng(0)


def predictor(image=RGB_8BIT, fit="crop", **options):
    return Predictor(BrightnessEngine(make_spec(image, fit=fit, image_size=(32, 32))), **options)


def test_an_image_goes_through_the_network_at_its_own_size():
    found = predictor()
    pixels = RANDOM.integers(0, 256, (40, 60, 3), np.uint8)
    np.testing.assert_array_equal(all_ids(found.predict_image(pixels)), pixels[:, :, 0] > 128)
    assert found.engine.shapes == [(1, 40, 60, 3)]


def test_a_resizing_model_sees_its_own_size_and_gives_that_of_the_image():
    found = predictor(fit="resize")
    ids = all_ids(found.predict_image(np.repeat([[[200] * 3], [[10] * 3]], 50, 0).repeat(70, 1).astype(np.uint8)))
    assert found.engine.shapes == [(1, 32, 32, 3)]
    assert ids.shape == (100, 70)
    assert ids[:48].all()
    assert not ids[52:].any()


def test_a_large_image_is_tiled():
    found = predictor(tile=64, whole=100 * 100)
    pixels = RANDOM.integers(0, 256, (120, 130, 3), np.uint8)
    logits = found.predict_image(pixels)
    assert isinstance(logits, TiledLogits)
    np.testing.assert_array_equal(all_ids(logits), pixels[:, :, 0] > 128)
    assert isinstance(found.predict_image(pixels[:100, :100]), WholeLogits)


def test_a_large_image_of_other_depths_is_tiled_too():
    found = predictor(GREY_16BIT, tile=64, whole=1)
    pixels = RANDOM.integers(0, 300, (120, 130), np.uint16)
    np.testing.assert_array_equal(all_ids(found.predict_image(pixels)), pixels > 128)


def test_wrong_images_are_refused_before_anything_is_computed():
    found = predictor(whole=1)
    with pytest.raises(DataError, match="16-bit values; the model was trained on 8-bit images"):
        found.predict_image(np.zeros((50, 50, 3), np.uint16))
    with pytest.raises(DataError, match="4 channels; the model was trained on images of 3"):
        found.predict_image(np.zeros((50, 50, 4), np.uint8))
    with pytest.raises(DataError, match=r"an array of shape \(50,\)"):
        found.predict_image(np.zeros(50, np.uint8))
    assert found.engine.shapes == []


def test_a_file_is_predicted_by_blocks(tmp_path):
    path = tmp_path / "a.tif"
    pixels = RANDOM.integers(0, 256, (120, 130, 3), np.uint8)
    path.write_bytes(tiff_bytes(pixels, tile=(32, 32)))
    with open_reader(path) as reader:
        np.testing.assert_array_equal(all_ids(predictor(tile=64).predict_large(reader)), pixels[:, :, 0] > 128)


def test_a_resizing_model_reads_a_large_file_at_its_own_size():
    found = predictor(fit="resize")
    logits = found.predict_large(ArrayReader(np.full((200, 100, 3), 200, np.uint8)))
    assert logits.size == (200, 100)
    assert found.engine.shapes == [(1, 32, 32, 3)]
    assert all_ids(logits).all()


def test_images_of_one_shape_are_one_batch():
    found = predictor(fit="resize")
    inputs = [found.prepare(np.full((20 + index, 30, 3), 200 * index, np.uint8)) for index in range(2)]
    ids = [all_ids(logits) for logits in found.predict(inputs)]
    assert found.engine.shapes == [(2, 32, 32, 3)]
    assert [one.shape for one in ids] == [(20, 30), (21, 30)]
    assert [int(one.max()) for one in ids] == [0, 1]


def test_a_jpeg_may_be_decoded_small_for_a_resizing_model_only():
    assert predictor(fit="resize").min_side == 64
    assert predictor().min_side is None


def test_a_grey_image_is_repeated_for_a_colour_model():
    assert check_image(np.zeros((4, 5), np.uint8), RGB_8BIT).shape == (4, 5, 3)


def test_other_depths_become_float32():
    assert check_image(np.zeros((4, 5), np.uint16), GREY_16BIT).dtype == np.float32
