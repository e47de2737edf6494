"""Tiles over large images: every pixel once, the result of the whole image, no seams, memory of a band."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.predicting import BrightnessEngine, write_model
from helpers.steps import make_spec
from unet_trainer.images.image_readers import ArrayReader
from unet_trainer.inference import tiled
from unet_trainer.inference.loaded_model import load
from unet_trainer.inference.tiled import TiledLogits, summed_weights, tile_starts, tile_weights

RANDOM = np.random.default_rng(0)


class RecordingReader(ArrayReader):
    """Keeps which rows were read, and how many at once."""

    parts: list[slice]

    def read(self, rows, columns):
        self.parts.append(rows)
        return super().read(rows, columns)


def recording(pixels):
    reader = RecordingReader(pixels)
    object.__setattr__(reader, "parts", [])
    return reader


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


class BlurEngine(BrightnessEngine):
    """Each logit is the mean of 5 × 5 pixels, with zeros beyond the edge: it is wrong within 2 pixels of a tile's border."""

    def logits(self, images):
        blurred = torch.nn.functional.avg_pool2d(images[..., 0].float().unsqueeze(1), 5, 1, padding=2)
        return torch.cat([torch.zeros_like(blurred), blurred - 128], 1)


def joined(logits):
    """K,H,W of all bands, which follow each other from top to bottom."""
    bands = list(logits.bands())
    height, width = logits.size
    ends = [band.rows.stop for band in bands]
    assert [band.rows.start for band in bands] == [0, *ends[:-1]]
    assert ends[-1] == height
    assert all(band.logits.shape[1:] == (band.rows.stop - band.rows.start, width) for band in bands)
    return torch.cat([band.logits for band in bands], 1)


def tile(engine, pixels, side):
    return TiledLogits(engine, ArrayReader(pixels), side, lambda part: part)


def test_tiles_begin_at_most_half_a_tile_apart_evenly_spread():
    assert tile_starts(110, 64) == [0, 23, 46]
    assert tile_starts(64, 64) == [0]
    assert tile_starts(65, 64) == [0, 1]
    assert tile_starts(40, 64) == [0]
    for length in range(64, 400, 7):
        starts = tile_starts(length, 64)
        assert starts[-1] + 64 == length
        assert max(np.diff(starts), default=0) <= 33  # half a tile, but for rounding


def test_weights_are_largest_in_the_middle_and_nowhere_zero():
    weights = tile_weights(64)
    assert weights.argmax() in (31, 32)
    assert weights.min() == pytest.approx(np.exp(-0.5 * (31.5 / 8) ** 2))  # at the border, of a Gaussian with a sigma of 8
    assert tile_weights(512).min() > 0
    np.testing.assert_allclose(weights, weights.flip(0))


def test_summed_weights_are_those_of_all_tiles():
    weights = tile_weights(4)
    expected = torch.tensor([weights[0], weights[1], weights[2] + weights[0], weights[3] + weights[1], weights[2], weights[3]])
    np.testing.assert_allclose(summed_weights([0, 2], 4, 6), expected)


@pytest.mark.parametrize("size", [(200, 150), (64, 64), (65, 300), (30, 200), (200, 30), (1, 1)])
def test_every_pixel_has_its_own_logit_whatever_the_size(size):
    pixels = RANDOM.integers(0, 256, (*size, 3), np.uint8)
    logits = joined(tile(BrightnessEngine(make_spec(fit="crop")), pixels, 64))
    np.testing.assert_allclose(logits[1], pixels[:, :, 0].astype(np.float32) - 128, atol=1e-3)


def test_tiles_equal_the_whole_where_the_network_sees_only_near_pixels():
    pixels = RANDOM.integers(0, 256, (300, 210, 3), np.uint8)
    engine = BlurEngine(make_spec(fit="crop"))
    whole = engine.logits(torch.from_numpy(pixels).unsqueeze(0))[0]
    difference = (joined(tile(engine, pixels, 96)) - whole).abs()
    assert whole[1].std() > 10
    assert difference.max() < 0.2


def test_each_row_is_read_once_and_no_more_than_a_tile_at_once():
    reader = recording(np.zeros((1000, 40, 3), np.uint8))
    joined(TiledLogits(BrightnessEngine(make_spec(fit="crop")), reader, 64, lambda part: part))
    assert [part.start for part in reader.parts] == [0, *(part.stop for part in reader.parts[:-1])]
    assert reader.parts[-1].stop == 1000
    assert max(part.stop - part.start for part in reader.parts) == 64


def test_memory_is_that_of_a_row_of_tiles_whatever_the_height():
    engine = BrightnessEngine(make_spec(fit="crop"))
    largest = {}
    for height in (200, 800):
        with LargestTensor() as recorded:
            for _ in tile(engine, np.zeros((height, 500, 3), np.uint8), 64).bands():
                pass
        largest[height] = recorded.num_bytes
    assert largest[200] == largest[800] <= 2 * (2 * 64 * 500 * 4)  # K × tile × width float32; the tiles of a row overlap by half


def test_the_next_row_of_tiles_is_read_while_the_network_computes():
    reader = recording(np.zeros((1000, 40, 3), np.uint8))
    engine = BrightnessEngine(make_spec(fit="crop"))
    bands = TiledLogits(engine, reader, 64, lambda part: part).bands()
    next(bands)
    bands.close()  # waits for what is under way
    assert len(reader.parts) == 2
    assert len(engine.shapes) == 1


def test_an_error_of_the_reader_is_raised_at_its_band():
    class Broken(ArrayReader):
        def read(self, rows, columns):
            if rows.stop > 100:
                raise OSError("gone")
            return super().read(rows, columns)

    reader = Broken(np.zeros((300, 40, 3), np.uint8))
    bands = TiledLogits(BrightnessEngine(make_spec(fit="crop")), reader, 64, lambda part: part).bands()
    assert next(bands).rows == slice(0, 30)
    with pytest.raises(OSError, match="gone"):
        list(bands)


def test_progress_counts_every_tile():
    logits = tile(BrightnessEngine(make_spec(fit="crop")), np.zeros((200, 150, 3), np.uint8), 64)
    done = []
    logits.on_tiles = done.append
    joined(logits)
    assert sum(done) == logits.num_tiles == 6 * 4


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A U-Net with random weights, an image, its logits as one piece and in tiles. Such a network sees far: no two tiles agree."""
    path = write_model(
        tmp_path_factory.mktemp("run") / "best.pt",
        encoder="resnet18",
        fit="crop",
        num_classes=3,
        decoder_channels=(32, 16, 8, 8, 8),
    )
    engine = load(path, device="cpu").engine
    pixels = cv2.resize(RANDOM.integers(0, 256, (40, 50, 3), np.uint8), (400, 320), interpolation=cv2.INTER_CUBIC)
    return engine, pixels, engine.logits(torch.from_numpy(pixels).unsqueeze(0))[0], joined(tile(engine, pixels, 256))


def at_borders(size, side):
    """Of H,W: the pixels on both sides of a tile's border."""
    found = np.zeros(size, bool)
    for axis, length in enumerate(size):
        for start in tile_starts(length, side):
            for border in (start, start + side):
                if 0 < border < length:
                    np.moveaxis(found, axis, 0)[border - 1 : border + 1] = True
    return found


def steps_at_borders(difference, side):
    """Mean step from a row to the next: across the borders of tiles, and elsewhere."""
    steps = difference.diff(dim=1).abs().mean((0, 2)).numpy()
    length = difference.shape[1]
    borders = {border - 1 for start in tile_starts(length, side) for border in (start, start + side) if 0 < border < length}
    is_border = np.isin(np.arange(length - 1), list(borders))
    return steps[is_border].mean(), steps[~is_border].mean()


def test_tiles_of_a_unet_are_near_the_whole(seen):
    _, _, whole, logits = seen
    assert (logits - whole).abs().mean() < 0.15 * whole.std()
    assert (logits.argmax(0) == whole.argmax(0)).float().mean() > 0.9


def test_no_seam_is_at_the_borders_of_tiles(seen):
    _, _, whole, logits = seen
    difference = logits - whole
    is_border = at_borders((320, 400), 256)
    error = difference.abs().mean(0).numpy()
    assert error[is_border].mean() <= error[~is_border].mean()
    across, elsewhere = steps_at_borders(difference, 256)
    assert across < 1.1 * elsewhere


def test_equal_weights_would_show_seams(seen, monkeypatch):
    """The measure of the test above finds them."""
    engine, pixels, whole, _ = seen
    monkeypatch.setattr(tiled, "tile_weights", lambda side: torch.ones(side, dtype=torch.float64))
    difference = joined(tile(engine, pixels, 256)) - whole
    is_border = at_borders((320, 400), 256)
    error = difference.abs().mean(0).numpy()
    assert error[is_border].mean() > 1.2 * error[~is_border].mean()
    across, elsewhere = steps_at_borders(difference, 256)
    assert across > 1.5 * elsewhere
