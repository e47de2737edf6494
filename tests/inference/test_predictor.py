"""One image of any size, depth and number of channels."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.brightness_engine import BrightnessEngine
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import RGB_8BIT, ImageReader
from unet_trainer.inference.predictor import Predictor, all_ids, chosen_tile

RANDOM = np.random.default_rng(0)


def predictor(image=RGB_8BIT, fit="crop", **options):
    return Predictor(BrightnessEngine(make_spec(image, fit=fit, image_size=(32, 32))), **options)


@pytest.mark.parametrize(
    ("size", "seen"),
    [
        ((40, 60), (6, 32, 32)),  # rows 0 and 8, columns 0, 14 and 28
        ((32, 32), (1, 32, 32)),
        ((20, 9), (1, 32, 32)),  # mirrored, as training's crops are
        ((20, 60), (3, 32, 32)),
    ],
)
def test_an_image_is_cut_into_tiles_of_the_size_that_the_model_was_trained_on_however_small_it_is(size, seen):
    found = predictor()
    pixels = RANDOM.integers(0, 256, (*size, 3), np.uint8)
    np.testing.assert_array_equal(all_ids(found.predict_image(pixels)), pixels[:, :, 0] > 128)
    assert found.engine.shapes == [(*seen, 3)]


@pytest.mark.parametrize(
    ("size", "seen"), [((64, 96), (1, 64, 96)), ((40, 50), (1, 40, 50)), ((20, 50), (1, 32, 50)), ((70, 50), (2, 64, 50))]
)
def test_an_image_that_is_no_larger_than_the_tile_of_its_spec_is_seen_whole(size, seen):
    """The fast path: one call, and nothing is added up."""
    engine = BrightnessEngine(make_spec(fit="crop", image_size=(32, 32), tile=(64, 96)))
    pixels = RANDOM.integers(0, 256, (*size, 3), np.uint8)
    np.testing.assert_array_equal(all_ids(Predictor(engine).predict_image(pixels)), pixels[:, :, 0] > 128)
    assert engine.shapes == [(*seen, 3)]


def test_the_side_of_a_tile_is_checked():
    crop, resize = (make_spec(fit=fit, image_size=(32, 64)) for fit in ("crop", "resize"))
    assert chosen_tile(None, resize) is None
    assert chosen_tile("96", crop) == (96, 96)
    for wrong in ("100", "0", "big", "8224"):
        with pytest.raises(UserError, match=f"^tile: got {wrong}; need a multiple of 32 from 32 to 8192, e.g. 256$"):
            chosen_tile(wrong, crop, "tile")
    with pytest.raises(UserError, match=r"^--tile: got 64; the model sees whole images at 64×32 \(fit: resize\), not tiles; leave"):
        chosen_tile(64, resize)


def test_a_resizing_model_sees_its_own_size_and_gives_that_of_the_image():
    found = predictor(fit="resize")
    ids = all_ids(found.predict_image(np.repeat([[[200] * 3], [[10] * 3]], 50, 0).repeat(70, 1).astype(np.uint8)))
    assert found.engine.shapes == [(1, 32, 32, 3)]
    assert ids.shape == (100, 70)
    assert ids[:48].all()
    assert not ids[52:].any()


def test_wrong_images_are_refused_before_anything_is_computed():
    found = predictor(whole=1)
    with pytest.raises(DataError, match="16-bit values; the model was trained on 8-bit images"):
        found.predict_image(np.zeros((50, 50, 3), np.uint16))
    with pytest.raises(DataError, match="4 channels; the model was trained on images of 3"):
        found.predict_image(np.zeros((50, 50, 4), np.uint8))
    with pytest.raises(DataError, match=r"an array of shape \(50,\)"):
        found.predict_image(np.zeros(50, np.uint8))
    assert found.engine.shapes == []


def test_images_at_a_scale_far_from_trainings_are_counted_and_told():
    spec = make_spec(fit="resize", image_size=(32, 32), source_sides=(50.0, 100.0))
    found = Predictor(BrightnessEngine(spec))
    for height, width in ((400, 400), (13, 13), (100, 50)):  # four times as large, or a quarter, is not far
        found.predict_image(np.zeros((height, width, 3), np.uint8))
    assert found.take_scale_warning() is None
    found.predict_image(np.zeros((800, 200, 3), np.uint8))
    assert found.take_scale_warning() is None
    found.predict_large(ImageReader(np.zeros((1600, 800, 3), np.uint8)))
    found.predict_image(np.zeros((12, 12, 3), np.uint8))
    assert found.take_scale_warning() == (
        "2 images are seen at a scale far from training's: 800×1600 pixels become 32×32, scaled by 0.028; in training by 0.32 to "
        "0.64. Unless their objects fill as much of the image as in training, results are poor: give parts of them of about "
        "100×100 pixels, or train with fit=crop"
    )
    assert found.take_scale_warning() is None
