"""Samples of one size from images of any size: resized, random crops, or overlapping tiles."""

from collections import Counter

import cv2
import numpy as np
import pytest

from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.tiling import RandomCrops, crop_pair, resize_image, tile_images


def numbered(height, width, channels=1):
    """An image in which the value of each pixel is its position."""
    places = np.arange(height * width, dtype=np.float32).reshape(height, width, 1)
    return np.repeat(places, channels, axis=2)


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
@pytest.mark.parametrize("image_size", [(63, 64), (20, 200), (1, 1), (200, 333)])
def test_every_pixel_counts_in_exactly_one_tile(image_size, size):
    image, mask = numbered(*image_size), np.ones(image_size, np.uint8)
    tiles = tile_images([image_size], size)
    seen = Counter()
    for index in range(len(tiles)):
        part, ids = tiles.extract(image, mask, 0, index)
        assert part.shape == (*size, 1)
        assert ids.shape == size
        assert set(np.unique(ids)) <= {1, IGNORED}
        seen.update(part[:, :, 0][ids == 1].astype(int).tolist())
    assert seen == dict.fromkeys(range(image_size[0] * image_size[1]), 1)


def test_beyond_its_edge_an_image_is_mirrored_and_its_mask_ignored():
    image = np.array([[[1], [2], [3]], [[4], [5], [6]]], np.uint8)
    padded, ids = crop_pair(image, np.full((2, 3), 7, np.uint8), 0, 0, (4, 5))
    assert padded[:, :, 0].tolist() == [[1, 2, 3, 2, 1], [4, 5, 6, 5, 4], [1, 2, 3, 2, 1], [4, 5, 6, 5, 4]]
    assert ids.tolist() == [[7, 7, 7, 255, 255]] * 2 + [[255] * 5] * 2


def crops(num_pairs=1, per_image=4, rare_ids=((),), rare_share=0.5, size=(32, 48), seed=1):
    return RandomCrops(size, num_pairs, per_image, rare_ids, rare_share, seed)


def test_a_crop_is_a_piece_of_the_image_and_its_mask():
    image = numbered(100, 130)
    mask = (image[:, :, 0] % 7).astype(np.uint8)
    corners = set()
    for index in range(4):
        for epoch in range(40):
            part, ids = crops().extract(image, mask, epoch, index)
            top, left = divmod(int(part[0, 0, 0]), 130)
            corners.add((top, left))
            assert np.array_equal(part, image[top : top + 32, left : left + 48])
            assert np.array_equal(ids, mask[top : top + 32, left : left + 48])
    tops, lefts = zip(*corners, strict=True)
    assert min(tops) < 8
    assert 60 < max(tops) <= 68
    assert min(lefts) < 8
    assert 74 < max(lefts) <= 82


def test_a_share_of_crops_is_centred_on_a_rare_class():
    image, mask = numbered(400, 400), np.zeros((400, 400), np.uint8)
    mask[200, 150] = 2
    tiling = crops(per_image=400, rare_ids=((2,),), rare_share=0.4)
    parts = [tiling.extract(image, mask, 0, index) for index in range(400)]
    hits = [ids for _, ids in parts if (ids == 2).any()]
    centred = sum(int(ids[16, 24] == 2) for ids in hits)
    assert 0.4 * 400 - 40 < centred < 0.4 * 400 + 40  # four standard deviations
    assert len(hits) - centred < 20  # others meet it by chance: 32 × 48 of 369 × 353 places


@pytest.mark.parametrize(
    ("channels", "dtype", "size"),
    [(1, np.uint8, (20, 30)), (3, np.float32, (90, 100)), (5, np.uint8, (20, 100)), (9, np.float32, (20, 30))],
)
def test_every_channel_is_resized_as_a_single_channel_would_be(channels, dtype, size):
    image = np.random.default_rng(0).integers(0, 256, (50, 70, channels)).astype(dtype)
    for interpolation in (cv2.INTER_AREA, cv2.INTER_LINEAR):
        resized = resize_image(image, size[::-1], interpolation)
        alone = [cv2.resize(image[:, :, index], size[::-1], interpolation=interpolation) for index in range(channels)]
        assert resized.dtype == dtype
        assert resized.shape == (*size, channels)
        tolerance = 4 if dtype == np.uint8 else 1e-3  # OpenCV rounds them differently
        assert np.abs(resized - np.dstack(alone).astype(np.float64)).max() <= tolerance
