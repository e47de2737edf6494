"""fit, image_size, crops and augmentation follow from what was measured in the data."""

from __future__ import annotations

import dataclasses

import pytest

from unet_trainer.config.choices import (
    choose_augmentation,
    choose_crops_per_image,
    choose_fit,
    choose_image_size,
    count_tiles,
    named_augmentation,
)
from unet_trainer.config.facts import Measurements

FREE = {"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5}
UPRIGHT = {"horizontal_flip": 0.5, "vertical_flip": 0.98, "quarter_turn": 1.0}
MEASURED = Measurements(
    num_pairs=100,
    structure=100.0,
    relative_structure=0.3,
    thickness=20.0,
    size_spread=4.0,
    brightness_spread=0.1,
    has_colour=True,
    told=UPRIGHT,
    told_in_views=FREE,
    has_sides=False,
    chance=dict.fromkeys(FREE, 0.0),
    chance_in_views=dict.fromkeys(FREE, 0.5),
)
SIZES = [(1000, 1000)]


def measured(**values):
    return dataclasses.replace(MEASURED, **values)


def names(transforms):
    return [next(iter(item)) for item in transforms]


def parameters(transforms, name):
    return next(item[name] for item in transforms if name in item)


@pytest.mark.parametrize(("share", "fit"), [(0.5, "resize"), (0.2, "resize"), (0.19, "crop"), (0.02, "crop"), (0.0, "resize")])
def test_large_structures_need_the_whole_image_and_small_ones_native_resolution(share, fit):
    assert choose_fit(measured(relative_structure=share), SIZES)[0] == fit


def test_large_images_are_brought_to_the_area_of_512_squared_with_their_shape():
    (height, width), _ = choose_image_size("resize", [(2000, 4000), (2000, 4000)], measured(thickness=100.0), on_cpu=False)
    assert (height, width) == (352, 736)  # sqrt(512² / 8 Mpx) = 0.181: 362 × 724, in multiples of 32


def test_thin_structures_keep_four_pixels_up_to_a_megapixel():
    sizes = [(1200, 1200), (1210, 1210)]
    thick, _ = choose_image_size("resize", sizes, measured(thickness=12.0), on_cpu=False)
    thin, reason = choose_image_size("resize", sizes, measured(thickness=5.0), on_cpu=False)
    finest, _ = choose_image_size("resize", sizes, measured(thickness=2.0), on_cpu=False)
    assert thick == (512, 512)  # 12 · 512 / 1205 = 5.1 pixels
    assert thin == (960, 960)  # 5 · 0.8 = 4 pixels
    assert finest == (1024, 1024)
    assert "5 pixels thin" in reason


@pytest.mark.parametrize(("structure", "side"), [(5, 256), (40, 320), (500, 512)])
def test_a_crop_shows_several_structures(structure, side):
    assert choose_image_size("crop", [(2000, 2000)], measured(structure=structure), on_cpu=False)[0] == side


def test_as_many_crops_as_fit_into_an_image_of_median_area():
    assert choose_crops_per_image([(100, 100), (200, 200), (1000, 1000)], (100, 100)) == 4
    assert choose_crops_per_image([(5000, 5000)], (100, 100)) == 16


def test_tiles_overlap_by_a_quarter():
    assert [count_tiles(length, 100) for length in (80, 100, 101, 175, 176)] == [1, 1, 2, 2, 3]


def test_images_with_an_up_are_neither_turned_upside_down_nor_far():
    transforms, reason = choose_augmentation(MEASURED, "resize", 3)
    assert names(transforms) == ["HorizontalFlip", "Affine", "RandomBrightnessContrast", "HueSaturationValue"]
    assert parameters(transforms, "Affine")["rotate"] == [-5, 5]
    assert "have an up (98% are told" in reason


def test_crops_without_an_up_are_turned_every_way():
    transforms, reason = choose_augmentation(MEASURED, "crop", 3)
    assert names(transforms)[:3] == ["HorizontalFlip", "VerticalFlip", "RandomRotate90"]
    assert parameters(transforms, "Affine")["rotate"] == [-180, 180]
    assert "look alike upside down" in reason


def test_left_and_right_as_classes_forbid_the_horizontal_flip():
    transforms, reason = choose_augmentation(measured(has_sides=True), "resize", 3)
    assert "HorizontalFlip" not in names(transforms)
    assert "left and right are different classes" in reason


@pytest.mark.parametrize(("channels", "has_colour"), [(1, False), (3, False), (4, True)])
def test_hue_is_varied_in_colour_images_alone(channels, has_colour):
    transforms, _ = choose_augmentation(measured(has_colour=has_colour), "resize", channels)
    assert "HueSaturationValue" not in names(transforms)


def test_named_pipelines_do_not_turn_the_world_upside_down():
    for name in ("default", "strong"):
        geometry, _ = named_augmentation(name, 3, is_upright=True)
        free, _ = named_augmentation(name, 3, is_upright=False)
        assert "VerticalFlip" not in names(geometry)
        assert "VerticalFlip" in names(free)
        assert max(parameters(geometry, "Affine")["rotate"]) <= 10 < max(parameters(free, "Affine")["rotate"])
