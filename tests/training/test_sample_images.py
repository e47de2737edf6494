"""The validation images of samples/: whole ones, stitched from tiles, bounded in size, and with something to see."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from helpers.small_runs import make_run
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.training import sample_images


def write_pairs(folder, height, width, count=6, marked=None):
    """Noise, and masks with a square of 8 pixels in the middle, or at `marked`."""
    top, left = marked or (height // 2, width // 2)
    for index in range(count):
        mask = np.zeros((height, width), np.uint8)
        mask[top : top + 8, left : left + 8] = 255
        image = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
        for kind, pixels in (("images", image), ("masks", mask)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(folder / kind / f"{index}.png"), pixels)
    return folder


def samples_of(data, tmp_path, **settings):
    return make_run(data, tmp_path / "run", **settings).loaders


def test_images_that_validate_in_tiles_are_shown_whole(tmp_path):
    data = write_pairs(tmp_path / "data", 75, 100, count=12)
    loaders = samples_of(data, tmp_path, fit="crop", val_fraction=0.2)
    samples, pairs = loaders.samples, loaders.val.dataset.pairs
    assert len(samples.pictures) == len(pairs) == 2
    for picture, truth, pair in zip(samples.pictures, samples.truths, pairs, strict=True):
        assert np.array_equal(picture, cv2.imread(str(pair.image))[:, :, ::-1])
        assert np.array_equal(truth * 255, cv2.imread(str(pair.mask), cv2.IMREAD_GRAYSCALE))
    assert samples.inputs.shape == (2 * 3 * 4, 32, 32, 3)
    tiles = loaders.val.dataset.tiling
    ids = np.stack([np.where(loaders.val.dataset[0, index][1] == IGNORED, 9, 1) for index in range(len(tiles))])
    assert all((picture == 1).all() for picture in samples.stitch(ids.astype(np.uint8)))  # counted parts alone are taken


def test_of_large_images_a_part_is_shown_that_holds_something(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_images, "MAX_SIDE", 64)
    data = write_pairs(tmp_path / "data", 40, 300, marked=(4, 250))
    samples = samples_of(data, tmp_path, fit="crop").samples
    (picture,), (truth,) = samples.pictures, samples.truths
    assert picture.shape[0] == 40
    assert 32 <= picture.shape[1] <= 64
    assert truth.sum() == 64  # the whole square
    assert len(samples.inputs) <= 2 * 3


def test_a_tile_is_shown_even_where_it_is_larger_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_images, "MAX_SIDE", 8)
    data = write_pairs(tmp_path / "data", 40, 60)
    samples = samples_of(data, tmp_path, fit="crop").samples
    assert len(samples.inputs) == 1
    assert samples.truths[0].sum() > 0


@pytest.mark.parametrize("shape", [(20, 24), (32, 32)])
def test_images_no_larger_than_a_tile_are_shown_without_its_padding(shape, tmp_path):
    data = write_pairs(tmp_path / "data", *shape)
    samples = samples_of(data, tmp_path, fit="crop").samples
    assert samples.pictures[0].shape == (*shape, 3)


def test_images_that_are_resized_are_shown_at_the_size_that_the_model_sees(tmp_path):
    samples = samples_of(write_pairs(tmp_path / "data", 75, 100), tmp_path, fit="resize").samples
    assert samples.pictures[0].shape == (32, 32, 3)
    ids = np.ones((len(samples.inputs), 32, 32), np.uint8)
    assert np.array_equal(np.stack(samples.stitch(ids)), ids)
