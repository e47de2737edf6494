"""Augmentation depends on the pair and the key alone, keeps the ids of a mask, and refuses what cannot work."""

import dataclasses

import albumentations as A
import numpy as np
import pytest

from helpers.resolving import MEASURED
from unet_trainer.config.auto_images import choose_augmentation
from unet_trainer.config.errors import ConfigError
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.loading.augmentation import Augmentation, build_augmentation

# The first corner tells which flips were applied.
CORNERS = np.array([[[0] * 3, [1] * 3], [[2] * 3, [3] * 3]], np.uint8)
# 16-bit microscopy, a signed scan and a small float: none of them lies in 0 to 1
DEEP = {
    "16 bit": ImageSpec(1, "uint16", (33000.0,), (200.0,), 32000.0, 35000.0),
    "signed": ImageSpec(2, "int16", (-500.0, 40.0), (300.0, 60.0), -1024.0, 3000.0),
    "small": ImageSpec(5, "float", (1e-3,) * 5, (1e-4,) * 5, 0.0, 2e-3),
}


def pair(side=64):
    rng = np.random.default_rng(5)
    mask = np.zeros((side, side), np.uint8)
    mask[8:40, 12:50] = 1
    mask[30:60, 2:20] = 3
    mask[:4] = 255
    return rng.integers(0, 256, (side, side, 3), np.uint8), mask


def build(spec, size=(64, 64), image_spec=RGB_8BIT):
    return build_augmentation(spec, size, image_spec)


def test_flips_are_independent_of_each_other():
    augment = Augmentation([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])
    corners = [int(augment(CORNERS, CORNERS[:, :, 0], (42, 3, 0, index))[0][0, 0, 0]) for index in range(400)]
    counts = np.bincount(corners, minlength=4)
    assert counts.sum() == 400
    assert (abs(counts - 100) < 35).all()  # four standard deviations


@pytest.mark.parametrize(("name", "brightness"), [("default", 0.5), ("strong", 0.5), ("auto", 0.5), ("auto", 0.9)])
def test_dark_images_do_not_become_black_nor_bright_ones_white(name, brightness):
    measured = dataclasses.replace(MEASURED, brightness=brightness, brightness_spread=0.25, has_colour=True)
    augment = build(choose_augmentation(measured, "crop", 3)[0] if name == "auto" else name)
    mask = pair()[1].clip(0, 1)
    image, least = (240 - 20 * mask, 10) if brightness == 0.9 else (4 + 10 * mask, 1)
    for index in range(100):
        augmented, moved = augment(np.dstack([image] * 3), mask, (42, 0, 0, index))
        assert abs(augmented[moved == 1].mean() - augmented[moved == 0].mean()) > least


@pytest.mark.parametrize("name", ["default", "strong"])
@pytest.mark.parametrize("shape", [(64, 64), (32, 96)])
def test_image_and_mask_keep_their_kind_and_move_together(name, shape):
    """An image whose brightness is its mask: still so afterwards, but for colours, noise and interpolated edges."""
    mask = pair()[1].clip(0, 1)[: shape[0]].repeat(2, 1)[:, : shape[1]]
    image = np.dstack([mask * 160 + 40] * 3)
    augment = build(name)
    agreements = []
    for index in range(40):
        new_image, new_mask = augment(image, mask, (0, 3, 0, index))
        assert (new_image.dtype, new_image.shape) == (np.uint8, image.shape)
        assert (new_mask.dtype, new_mask.shape) == (np.uint8, mask.shape)
        assert set(np.unique(new_mask)) == {0, 1}
        grey = new_image.mean(2)
        middle = (grey[new_mask == 1].mean() + grey[new_mask == 0].mean()) / 2
        agreements.append(((grey > middle) == (new_mask == 1)).mean())
    assert min(agreements) > 0.9


def deep_pair(image_spec, side=64):
    rng = np.random.default_rng(5)
    image = rng.normal(image_spec.mean, image_spec.std, (side, side, image_spec.channels)).astype(np.float32)
    return image.clip(image_spec.low, image_spec.high), pair(side)[1]


@pytest.mark.parametrize("name", ["default", "strong"])
@pytest.mark.parametrize("kind", DEEP)
def test_images_in_their_own_units_stay_in_them(name, kind):
    """albumentations would cut them to 0..1."""
    image_spec = DEEP[kind]
    augment = build(name, image_spec=image_spec)
    image, mask = deep_pair(image_spec)
    moved = []
    for index in range(60):
        new_image, new_mask = augment(image, mask, (0, 3, 0, index))
        assert (new_image.dtype, new_image.shape) == (np.float32, image.shape)
        assert new_mask.shape == mask.shape
        mean, std = new_image.mean((0, 1)), new_image.std((0, 1))
        assert (np.abs(mean - image_spec.mean) < 1.0 * np.array(image_spec.std)).all()
        assert (std > 0.3 * np.array(image_spec.std)).all()  # interpolation smooths noise
        assert (std < 1.6 * np.array(image_spec.std)).all()
        moved.append((mean - image_spec.mean) / image_spec.std)
    assert np.std(moved) > 0.1  # brightness does vary


def test_a_list_sees_the_range_that_occurs_as_0_to_1():
    """Inverted there is 1 - x: the lowest value becomes the highest, in the file's own units."""
    image_spec = DEEP["16 bit"]
    augment = build([{"InvertImg": {"p": 1.0}}], size=(2, 2), image_spec=image_spec)
    image = np.array([[[32000], [35000]], [[33000], [33500]]], np.float32)
    inverted, mask = augment(image, np.zeros((2, 2), np.uint8), (0, 0))
    assert inverted.dtype == np.float32
    assert inverted[:, :, 0] == pytest.approx(np.array([[35000, 32000], [34000, 33500]]), abs=0.1)
    assert mask.tolist() == [[0, 0], [0, 0]]


UNUSABLE = "cannot be used: batches keep the dtype of the files, and the device normalises them"
NO_ENTRY = "got {!r}; need Name or {{Name: {{parameter: value}}}}"
INNER = {"OneOf": {"transforms": ["Lambda", {"Affine": {"rotat": 1}}]}}
LARGE = {"RandomCrop": {"height": 256, "width": 256, "p": 0.1}}  # fails before the first step, however rare it is
JITTER = {"IntensityJitter": {"brightness": 0.5, "contrast": 0.2, "noise": 0.0, "p": 1.0}}
NEED_JITTER = "IntensityJitter: need brightness, contrast, noise, p"
NO_ENTRIES = [3, None, {"HorizontalFlip": 0.5}, {"HorizontalFlip": None, "VerticalFlip": None}, ["Transpose"]]


@pytest.mark.parametrize(
    ("image_spec", "spec", "problems"),
    [
        *((RGB_8BIT, [{"OneOf": {"transforms": [entry]}}], [NO_ENTRY.format(entry)]) for entry in NO_ENTRIES),
        (RGB_8BIT, ["Normalize", "HorizontalFlp", "Transpose", INNER],
         [f"Normalize {UNUSABLE}", "unknown transform 'HorizontalFlp'", f"Lambda {UNUSABLE}", "Affine: Argument(s) 'rotat' are not"]),
        (RGB_8BIT, [LARGE], ["the pipeline fails on a 96×64 image: Crop size "]),
        (RGB_8BIT, [JITTER], ["IntensityJitter is for images that are not 8-bit"]),
        (DEEP["16 bit"], [{"IntensityJitter": {"brightness": 0.5}}], [NEED_JITTER]),
        (DEEP["16 bit"], [{"IntensityJitter": None}], [NEED_JITTER]),
    ],
)  # fmt: skip
def test_a_list_that_cannot_work_is_refused_with_all_its_problems(image_spec, spec, problems):
    with pytest.raises(ConfigError) as raised:
        build(spec, (64, 96), image_spec)
    for line, problem in zip(str(raised.value).splitlines(), problems, strict=True):
        assert line.strip().startswith(f"augmentation: {problem}")
