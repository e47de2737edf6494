"""One image of any size, depth and number of channels."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.brightness_engine import BrightnessEngine
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.images.image_spec import ImageReader
from unet_trainer.inference.predictor import Predictor, TiledLogits, TileGrid, all_ids, chosen_tile, predicted_ids

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("tile", "size", "seen"),
    [
        (None, (40, 60), (6, 32, 32)),  # that of training: rows 0 and 8, columns 0, 14 and 28
        (None, (20, 9), (1, 32, 32)),  # mirrored, as training's crops are
        ((64, 96), (64, 96), (1, 64, 96)),  # no larger than the tile: seen whole, in one call
        ((64, 96), (20, 50), (1, 32, 50)),
        ((64, 96), (70, 50), (2, 64, 50)),
    ],
)
def test_an_image_of_any_size_is_cut_into_tiles_of_the_spec(tile, size, seen):
    engine = BrightnessEngine(make_spec(fit="crop", image_size=(32, 32), tile=tile))
    pixels = RANDOM.integers(0, 256, (*size, 3), np.uint8)
    np.testing.assert_array_equal(all_ids(Predictor(engine).predict_image(pixels)), pixels[:, :, 0] > 128)
    assert engine.shapes == [(*seen, 3)]


def test_the_side_of_a_tile_is_checked():
    crop, resize = (make_spec(fit=fit, image_size=(32, 64)) for fit in ("crop", "resize"))
    assert chosen_tile(None, resize) is None
    assert chosen_tile("96", crop) == (96, 96)
    for wrong in ("100", "0", "big", "8224", True):
        with pytest.raises(UserError, match=f"^tile: got {wrong}; need a multiple of 32 from 32 to 8192, e.g. 256$"):
            chosen_tile(wrong, crop, "tile")
    message = r"^--tile: got 64; the model sees whole images at 64×32 \(fit: resize\), not tiles; leave"
    with pytest.raises(UserError, match=message):
        chosen_tile(64, resize)


def test_a_resizing_model_sees_its_own_size_and_gives_that_of_the_image():
    found = Predictor(BrightnessEngine(make_spec(fit="resize", image_size=(32, 32))))
    ids = all_ids(found.predict_image(np.repeat([[[200] * 3], [[10] * 3]], 50, 0).repeat(70, 1).astype(np.uint8)))
    assert found.engine.shapes == [(1, 32, 32, 3)]
    assert ids.shape == (100, 70)
    assert ids[:48].all()
    assert not ids[52:].any()


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
        "2 images are seen at a scale far from training's: 800×1600 pixels become 32×32, scaled by 0.028 (training's by 0.32 to "
        "0.64); results are likely poor: give parts of them of about 100×100 pixels, or train with fit=crop"
    )
    assert found.take_scale_warning() is None


# Tiles in bands: every pixel once, no seams, memory of a band


class BlurEngine(BrightnessEngine):
    """Each logit is the mean of 5 × 5 pixels, with zeros beyond the edge: it is wrong within 2 pixels of a tile's border."""

    def logits(self, images):
        blurred = torch.nn.functional.avg_pool2d(images[..., 0].float().unsqueeze(1), 5, 1, padding=2)
        return torch.cat([torch.zeros_like(blurred), blurred - 128], 1)


def joined(logits):
    """K,H,W of all bands, which follow each other from top to bottom."""
    bands = list(logits.bands())
    whole = torch.cat(bands, 1)
    assert whole.shape[1:] == logits.size
    return whole


def tile(engine, pixels, side):
    return TiledLogits(TileGrid(engine, pixels.shape[:2], (side, side)), ImageReader(pixels))


def test_no_seam_is_at_the_borders_of_tiles():
    """What a tile gets wrong at its border hardly counts: the others that hold the pixel do."""
    pixels, engine = RANDOM.integers(0, 256, (150, 200, 3), np.uint8), BlurEngine(make_spec(fit="crop"))
    whole = engine.logits(torch.from_numpy(pixels)[None])[0]
    difference = joined(tile(engine, pixels, 64)) - whole
    assert difference[:, 2:-2, 2:-2].abs().max() < 0.5  # of some 100 at the borders of a tile


def test_a_batch_of_images_gives_what_each_gives_in_bands():
    pixels = RANDOM.integers(0, 256, (3, 100, 150, 3), np.uint8)
    engine = BlurEngine(make_spec(fit="crop"))
    found = TileGrid(engine, (100, 150), (64, 64)).logits(torch.from_numpy(pixels))
    for one, image in zip(found, pixels, strict=True):
        torch.testing.assert_close(one, joined(tile(engine, image, 64)))


# Ids and probabilities


TWO = torch.tensor([[[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.5]]])  # K,1,3


def test_the_id_with_the_largest_logit_wins_and_the_first_of_equal_ones():
    assert predicted_ids(TWO).tolist() == [[1, 0, 0]]
    three = torch.tensor([[[0.0, 5.0]], [[2.0, 5.0]], [[1.0, 6.0]]])
    assert predicted_ids(three).tolist() == [[1, 2]]
    assert predicted_ids(torch.stack([three, -three])).tolist() == [[[1, 2]], [[0, 0]]]
    assert predicted_ids(three).dtype == torch.uint8


class LargestTensor(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return made


def test_memory_is_that_of_a_row_of_tiles_whatever_the_height():
    engine = BrightnessEngine(make_spec(fit="crop"))
    largest = {}
    for height in (200, 800):
        with LargestTensor() as recorded:
            for _ in tile(engine, np.zeros((height, 500, 3), np.uint8), 64).bands():
                pass
        largest[height] = recorded.num_bytes
    # K × tile × width float32; the tiles of a row overlap by half
    assert largest[200] == largest[800] <= 2 * (2 * 64 * 500 * 4)
