"""Sizes of structures and symmetry are measured in images and masks that are drawn here, with known answers."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.datasets.measurements import TRANSFORMS, measure_dataset, share_told
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.mask_coding import MaskCoding

BINARY = MaskCoding((0, 1))


def write_pairs(folder, drawings):
    pairs = []
    for index, (image, mask) in enumerate(drawings):
        paths = folder / f"{index}_image.png", folder / f"{index}_mask.png"
        cv2.imwrite(str(paths[0]), image)
        cv2.imwrite(str(paths[1]), mask)
        pairs.append(Pair(str(index), *paths))
    return pairs


def measure(folder, drawings, num_ids=2, **others):
    coding = MaskCoding(tuple(range(num_ids)))
    return measure_dataset(write_pairs(folder, drawings), coding, num_ids, common_id=0, num_workers=1, **others)


def noise(rng, size=(128, 128)):
    return rng.integers(90, 160, (*size, 3), dtype=np.uint8)


def blobs(rng, radius=8, count=6, size=(128, 128)):
    """Round cells anywhere on a noisy ground: no direction is special."""
    image, mask = noise(rng, size), np.zeros(size, np.uint8)
    for _ in range(count):
        centre = tuple(int(value) for value in rng.integers(radius, min(size) - radius, 2))
        cv2.circle(mask, centre, radius, 1, -1)
    image[mask == 1] += 60
    return image, mask


def street(rng):
    """A bright sky above, and a road that fills the lower half."""
    image, mask = noise(rng), np.zeros((128, 128), np.uint8)
    horizon = int(rng.integers(50, 80))
    image[:horizon] = (220, 180, 150)
    mask[horizon:] = 1
    return image, mask


def lines(rng):
    image, mask = noise(rng, (256, 256)), np.zeros((256, 256), np.uint8)
    for _ in range(6):
        ends = rng.integers(0, 256, (2, 2))
        cv2.line(mask, tuple(ends[0].tolist()), tuple(ends[1].tolist()), 1, 3)
    image[mask == 1] -= 60
    return image, mask


def lungs(rng):
    """Class 1 on the left, class 2 on the right, never the other way round."""
    image, mask = noise(rng), np.zeros((128, 128), np.uint8)
    shift = int(rng.integers(-5, 6))
    cv2.ellipse(mask, (36 + shift, 64), (18, 36), 0, 0, 360, 1, -1)
    cv2.ellipse(mask, (92 + shift, 64), (18, 36), 0, 0, 360, 2, -1)
    return image, mask


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_cells_look_alike_whichever_way_they_are_turned(tmp_path, rng):
    found = measure(tmp_path, [blobs(rng) for _ in range(40)])
    assert all(found.keeps_labels(name, in_views) for name in TRANSFORMS for in_views in (False, True))


def test_streets_have_an_up(tmp_path, rng):
    found = measure(tmp_path, [street(rng) for _ in range(20)])
    assert not found.keeps_labels("vertical_flip", in_views=False)
    assert not found.keeps_labels("quarter_turn", in_views=False)
    assert found.keeps_labels("horizontal_flip", in_views=False)


def test_the_images_alone_may_have_an_up(tmp_path, rng):
    """Cells anywhere, but the ground is always red at the top and blue at the bottom."""
    drawings = []
    for _ in range(20):
        image, mask = blobs(rng)
        image[:64, :, 2] = 250
        image[64:, :, 0] = 250
        drawings.append((image, mask))
    assert not measure(tmp_path, drawings).keeps_labels("vertical_flip", in_views=False)


def test_uneven_light_is_no_up(tmp_path, rng):
    """A microscope's light falls off to one side; the cells do not care."""
    drawings = []
    for _ in range(40):
        image, mask = blobs(rng)
        light = np.linspace(1.0, 0.6, 128)[:, None, None]
        drawings.append(((image * light).astype(np.uint8), mask))
    assert measure(tmp_path, drawings).keeps_labels("vertical_flip", in_views=False)


def test_three_images_are_too_few_to_forbid_a_flip(tmp_path, rng):
    assert measure(tmp_path, [street(rng) for _ in range(3)]).keeps_labels("vertical_flip", in_views=False)


def test_the_size_of_round_cells(tmp_path, rng):
    found = measure(tmp_path, [blobs(rng, radius=8, count=1) for _ in range(10)])
    assert found.structure == pytest.approx(np.sqrt(np.pi) * 8, rel=0.1)  # the side of a square of the same area
    assert found.relative_structure == pytest.approx(found.structure / 128)


def test_a_network_of_lines_is_as_fine_as_its_lines(tmp_path, rng):
    found = measure(tmp_path, [lines(rng) for _ in range(5)])
    assert 2 <= found.thickness <= 7  # three pixels: distances of 1, 2 and 1 to the edge, times four
    assert found.structure <= 4 * 7
    assert found.relative_structure < 0.12


def test_a_road_that_fills_half_the_image_is_large(tmp_path, rng):
    assert measure(tmp_path, [street(rng) for _ in range(5)]).relative_structure > 0.5


def test_the_spread_of_object_sizes(tmp_path, rng):
    alike = measure(tmp_path / "a", _made(tmp_path / "a", [blobs(rng, radius=8, count=1) for _ in range(10)]))
    mixed = [blobs(rng, radius=radius, count=1) for radius in (4, 16) * 5]
    different = measure(tmp_path / "b", _made(tmp_path / "b", mixed))
    assert alike.size_spread < 1.1
    assert different.size_spread == pytest.approx(4, rel=0.15)


def _made(folder, drawings):
    folder.mkdir()
    return drawings


def test_left_and_right_are_different_classes(tmp_path, rng):
    assert measure(tmp_path, [lungs(rng) for _ in range(8)], num_ids=3).has_sides


def test_two_classes_that_lie_anywhere_have_no_sides(tmp_path, rng):
    drawings = []
    for index in range(8):
        image, mask = lungs(rng)
        drawings.append((image, mask if index % 2 else mask[:, ::-1].copy()))
    assert not measure(tmp_path, drawings, num_ids=3).has_sides


def test_grey_images_in_three_channels_have_no_colour(tmp_path, rng):
    grey = [(np.repeat(image[:, :, :1], 3, 2), mask) for image, mask in (blobs(rng) for _ in range(4))]
    assert not measure(tmp_path, grey).has_colour


def test_brightness_differs_between_images(tmp_path, rng):
    drawings = [(np.full((64, 64, 3), level, np.uint8), np.eye(64, dtype=np.uint8)) for level in (50, 150)]
    assert measure(tmp_path, drawings).brightness_spread == pytest.approx(50 / 255, rel=0.01)


def test_masks_of_background_alone_are_measured_without_structures(tmp_path, rng):
    found = measure(tmp_path, [(noise(rng), np.zeros((128, 128), np.uint8)) for _ in range(3)])
    assert (found.structure, found.relative_structure, found.thickness) == (0, 0, 0)


@pytest.mark.parametrize("num_background", [0, 1])
def test_a_class_that_fills_the_image_is_as_thick_as_the_image(tmp_path, rng, num_background):
    """It has no edge to measure from, or one that is far away. What OpenCV gives without an edge differs between processors."""
    mask = np.ones((96, 128), np.uint8)
    mask[0, :num_background] = 0
    found = measure(tmp_path, [(noise(rng, mask.shape), mask)] * 2)
    assert found.thickness == 128
    assert found.structure == pytest.approx(np.sqrt(mask.sum()))


def test_one_image_tells_nothing(tmp_path, rng):
    assert measure(tmp_path, [street(rng)]).told["vertical_flip"] == 0.5


def test_what_was_measured_is_found_again_until_a_file_changes(tmp_path, rng):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    ticks = []
    first = measure(data, [street(rng) for _ in range(6)], cache_folder=cache, tick=lambda: ticks.append(1))
    pairs = [Pair(str(index), data / f"{index}_image.png", data / f"{index}_mask.png") for index in range(6)]
    again = measure_dataset(pairs, BINARY, 2, 0, 1, lambda: ticks.append(1), cache)
    assert again == first
    assert len(ticks) == 6
    cv2.imwrite(str(pairs[0].mask), np.ones((128, 128), np.uint8))
    assert measure_dataset(pairs, BINARY, 2, 0, 1, lambda: ticks.append(1), cache) != first
    assert len(ticks) == 12


def test_a_damaged_cache_is_measured_again(tmp_path, rng):
    cache = tmp_path / "cache"
    first = measure(tmp_path, [street(rng) for _ in range(6)], cache_folder=cache)
    next(cache.iterdir()).write_text("{")
    pairs = [Pair(str(index), tmp_path / f"{index}_image.png", tmp_path / f"{index}_mask.png") for index in range(6)]
    assert measure_dataset(pairs, BINARY, 2, 0, 1, cache_folder=cache) == first


def test_a_pair_that_cannot_be_read_any_more_is_left_out(tmp_path, rng):
    pairs = write_pairs(tmp_path, [blobs(rng) for _ in range(3)])
    pairs[1].mask.unlink()
    assert measure_dataset(pairs, BINARY, 2, 0, 1).num_pairs == 2


def test_half_of_maps_without_a_direction_are_told_by_chance(rng):
    maps = [rng.normal(size=(2, 8, 8)).astype(np.float32) for _ in range(400)]
    share, chance = share_told(maps, TRANSFORMS["vertical_flip"])
    assert share == pytest.approx(0.5, abs=0.1)
    assert chance > 0.05


@pytest.mark.parametrize("num_images", [6, 8, 10, 15, 30])
def test_maps_without_a_direction_seldom_seem_to_have_one(num_images):
    """At a level of 2 % a few of 60 draws at most, whatever the number of images."""
    found = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        maps = [rng.random((2, 8, 8)).astype(np.float32) for _ in range(num_images)]
        share, chance = share_told(maps, TRANSFORMS["vertical_flip"])
        found += share >= 0.85 and chance <= 0.02
    assert found <= 4
