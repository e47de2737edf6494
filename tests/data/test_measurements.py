"""Sizes of structures and symmetry are measured in images and masks that are drawn here, with known answers."""

import io

import cv2
import numpy as np
import pytest

from helpers.evaluated_models import write_pairs
from unet_trainer.data.measurements import measure_dataset
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.system.console import Console


@pytest.fixture
def measure(tmp_path):
    def measure(draw, count, num_ids=2):
        rng = np.random.default_rng(0)
        pairs = write_pairs(tmp_path, [draw(rng) for _ in range(count)])
        return measure_dataset(pairs, MaskCoding(tuple(range(num_ids))), num_ids, 0, Console(io.StringIO()))

    return measure


def noise(rng, size=(128, 128)):
    return rng.integers(90, 160, (*size, 3), dtype=np.uint8)


def cells_in_uneven_light(rng):
    """Round cells anywhere; a microscope's light falls off to one side, and the cells do not care."""
    image, mask = noise(rng), np.zeros((128, 128), np.uint8)
    for _ in range(6):
        cv2.circle(mask, rng.integers(8, 120, 2).tolist(), 8, 1, -1)
    image[mask == 1] += 60
    return (image * np.linspace(1.0, 0.6, 128)[:, None, None]).astype(np.uint8), mask


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


def test_streets_have_an_up(measure):
    found = measure(street, 20)
    assert not found.keeps_labels("vertical_flip", in_views=False)
    assert not found.keeps_labels("quarter_turn", in_views=False)
    assert found.keeps_labels("horizontal_flip", in_views=False)


def test_uneven_light_is_no_up(measure):
    assert measure(cells_in_uneven_light, 40).keeps_labels("vertical_flip", in_views=False)


def test_a_network_of_lines_is_as_fine_as_its_lines(measure):
    found = measure(lines, 5)
    assert 2 <= found.thickness <= 7  # three pixels: distances of 1, 2 and 1 to the edge, times four
    assert found.structure <= 4 * 7
    assert found.relative_structure < 0.12


def test_left_and_right_are_different_classes(measure):
    assert measure(lungs, 8, num_ids=3).has_sides
