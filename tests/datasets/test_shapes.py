"""Outlines → pixels, by hand-computed cases."""

import numpy as np
import pytest

from unet_trainer.datasets.formats import shapes
from unet_trainer.datasets.formats.shapes import EMPTY, draw_line, fill_polygon
from unet_trainer.images.file_bytes import DataError


def polygon(*points):
    return np.array(points, np.float64)


def on_image(patch, height, width):
    """Rows of the whole image as text: # is inside."""
    image = np.zeros((height, width), bool)
    image[patch.area] = patch.pixels
    return ["".join("#" if pixel else "." for pixel in row) for row in image]


def inside_by_definition(points, height, width):
    """Even-odd, centre by centre: how often a ray to the left meets an edge."""
    image = np.zeros((height, width), bool)
    for row, column in np.ndindex(height, width):
        x, y = column + 0.5, row + 0.5
        for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
            image[row, column] ^= (y0 < y) != (y1 < y) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x
    return ["".join("#" if pixel else "." for pixel in row) for row in image]


@pytest.mark.parametrize("seed", range(3))
def test_random_polygons_are_filled_as_the_definition_says(seed):
    points = np.random.default_rng(seed).uniform(-3, 15, (seed + 3, 2))
    assert on_image(fill_polygon(points, 11, 13), 11, 13) == inside_by_definition(points, 11, 13)


def test_an_endless_outline_is_refused(monkeypatch):
    monkeypatch.setattr(shapes, "MAX_CROSSINGS", 1000)
    with pytest.raises(DataError, match=r"an outline of 300 points that crosses .* rows; need a simpler one"):
        fill_polygon(np.random.default_rng(1).uniform(-5, 45, (300, 2)), 40, 40)


def test_a_line_has_the_centres_within_half_of_its_width():
    """The first is 2 wide: the centres within 1 of it, with round ends."""
    around = on_image(draw_line(polygon((1.5, 1.5), (3.5, 1.5)), 2, 4, 6), 4, 6)
    assert around == [".###..", "#####.", ".###..", "......"]
    assert on_image(draw_line(polygon((0.5, 0.5), (0.5, 2.5), (2.5, 2.5)), 1, 3, 3), 3, 3) == ["#..", "#..", "###"]
    assert on_image(draw_line(polygon((1.5, 1.5), (1.5, 1.5)), 1, 3, 3), 3, 3) == ["...", ".#.", "..."]
    assert draw_line(polygon((50, 50), (60, 60)), 4, 9, 9) is EMPTY
