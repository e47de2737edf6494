"""Outlines → pixels: by hand-computed cases, and against pycocotools' own rasteriser."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.datasets import rasterize
from unet_trainer.datasets.rasterize import (
    EMPTY,
    Canvas,
    box_outline,
    crop,
    decompress_runs,
    draw_line,
    ellipse_outline,
    fill_polygon,
    join,
    unroll,
)
from unet_trainer.images.file_bytes import DataError


def polygon(*points):
    return np.array(points, np.float64)


def on_image(patch, height, width):
    """Rows of the whole image as text: # is inside."""
    return ["".join("#" if pixel else "." for pixel in row) for row in whole_image(patch, height, width)]


def whole_image(patch, height, width):
    image = np.zeros((height, width), np.uint8)
    rows, columns = patch.pixels.shape
    image[patch.top : patch.top + rows, patch.left : patch.left + columns] = patch.pixels
    return image


def test_polygons_that_share_an_edge_share_no_pixel_and_leave_none_out():
    generator = np.random.default_rng(0)
    for _ in range(50):
        x0, x1 = generator.uniform(0, 20, 2)  # a line through the square from its upper to its lower edge
        left = fill_polygon(polygon((0, 0), (x0, 0), (x1, 20), (0, 20)), 20, 20)
        right = fill_polygon(polygon((x0, 0), (20, 0), (20, 20), (x1, 20)), 20, 20)
        assert left.pixels.sum() + right.pixels.sum() == 400
        assert join([left, right]).pixels.sum() == 400


def test_what_lies_beyond_the_border_is_cut_off():
    assert on_image(fill_polygon(polygon((-3, -3), (2, -3), (2, 2), (-3, 2)), 3, 3), 3, 3) == ["##.", "##.", "..."]
    assert fill_polygon(polygon((-1e7, -1e7), (1e7, -1e7), (1e7, 1e7), (-1e7, 1e7)), 3, 4).pixels.sum() == 12
    for outside in (polygon((5, 5), (9, 5), (9, 9)), polygon((-5, -5), (-1, -5), (-1, -1)), polygon((0, 7), (3, 7), (3, 9))):
        assert fill_polygon(outside, 4, 4).pixels.sum() == 0


def test_an_endless_outline_is_refused(monkeypatch):
    points = np.random.default_rng(1).uniform(-5, 45, (300, 2))
    monkeypatch.setattr(rasterize, "MAX_CROSSINGS", 1000)
    with pytest.raises(DataError, match=r"an outline of 300 points that crosses .* rows; need a simpler one"):
        fill_polygon(points, 40, 40)


def inside_by_definition(points, height, width):
    """Even-odd, centre by centre: how often a ray to the left meets an edge."""
    image = np.zeros((height, width), bool)
    for row in range(height):
        for column in range(width):
            x, y, is_inside = column + 0.5, row + 0.5, False
            for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
                if (y0 < y) != (y1 < y) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x:
                    is_inside = not is_inside
            image[row, column] = is_inside
    return ["".join("#" if pixel else "." for pixel in row) for row in image]


@pytest.mark.parametrize("seed", range(3))
def test_random_polygons_are_filled_as_the_definition_says(seed):
    points = np.random.default_rng(seed).uniform(-3, 15, (seed + 3, 2))
    assert on_image(fill_polygon(points, 11, 13), 11, 13) == inside_by_definition(points, 11, 13)


def test_pycocotools_agrees_to_within_a_pixel_of_the_border():
    """Its rasteriser rounds outlines to fifths of a pixel."""
    mask_utils = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    generator = np.random.default_rng(7)
    for _ in range(40):
        angles = np.sort(generator.uniform(0, 2 * np.pi, generator.integers(3, 30)))
        radii = generator.uniform(5, 40, len(angles))
        points = np.stack([60 + radii * np.cos(angles), 50 + radii * np.sin(angles)], axis=1)
        (encoded,) = mask_utils.frPyObjects([points.ravel().tolist()], 100, 120)
        theirs, ours = (
            whole_image(patch, 100, 120)
            for patch in (crop(unroll(decompress_runs(encoded["counts"].decode()), 120, 100).T), fill_polygon(points, 100, 120))
        )
        outline = draw_line(np.vstack([points, points[:1]]), 2.0, 100, 120)  # up to a pixel away from it
        assert ours.sum() > 20
        assert not ((ours != theirs) & (whole_image(outline, 100, 120) == 0)).any()


def ellipse(*shape):
    return on_image(fill_polygon(ellipse_outline(*shape), 7, 7), 7, 7)


def test_a_circle_has_the_centres_within_its_radius():
    """Centre (2, 2), radius 1.6: centres are half pixels away, so that 0.5² + 1.5² = 2.5 ≤ 2.56 is in and 4.5 is out."""
    assert ellipse(2, 2, 1.6, 1.6)[:5] == [".##....", "####...", "####...", ".##....", "......."]
    assert fill_polygon(ellipse_outline(2, 2, 0, 0), 4, 4).pixels.sum() == 0


def test_ellipses_and_boxes_turn_clockwise():
    flat, upright, slanted = (ellipse(3.5, 3.5, 3, 0.6, degrees) for degrees in (0, 90, 45))
    assert (flat[3], sum(row.count("#") for row in flat)) == ("#######", 7)
    assert ["".join(row) for row in zip(*upright, strict=True)] == flat
    assert (slanted[2][2], slanted[4][4], slanted[2][4]) == ("#", "#", ".")  # down to the right
    assert box_outline(0, 0, 4, 2, 90).round(9).tolist() == [[3, -1], [3, 3], [1, 3], [1, -1]]


def test_a_line_has_the_centres_within_half_of_its_width():
    """From (1.5, 1.5) to (3.5, 1.5), 2 wide: within 1 of the line, with round ends."""
    assert on_image(draw_line(polygon((1.5, 1.5), (3.5, 1.5)), 2, 4, 6), 4, 6) == [".###..", "#####.", ".###..", "......"]
    assert on_image(draw_line(polygon((0.5, 0.5), (0.5, 2.5), (2.5, 2.5)), 1, 3, 3), 3, 3) == ["#..", "#..", "###"]
    assert on_image(draw_line(polygon((1.5, 1.5), (1.5, 1.5)), 1, 3, 3), 3, 3) == ["...", ".#.", "..."]
    assert draw_line(polygon((50, 50), (60, 60)), 4, 9, 9) is EMPTY


def box(x0, y0, x1, y1):
    return fill_polygon(box_outline(x0, y0, x1, y1), 4, 4)


LARGE = box(0, 0, 4, 4)


def test_endless_drawing_is_refused(monkeypatch):
    monkeypatch.setattr(rasterize, "MAX_DRAWN", 40)
    canvas = Canvas(4, 4, smaller_on_top=False)
    canvas.draw(LARGE, 1)
    canvas.draw(LARGE, 1)
    with pytest.raises(DataError, match="its shapes cover the image thousands of times"):
        canvas.draw(LARGE, 1)
