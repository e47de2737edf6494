"""Outlines: polygons that cover exactly the pixels of their objects."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.images import mask_outlines
from unet_trainer.images.mask_outlines import find_polygons, joined_rings, outline, signed_area


def mask(*rows):
    return np.array([[int(value) for value in row] for row in rows], np.uint8)


def corners(ring):
    return {tuple(corner) for corner in ring.tolist()}


def fill(polygon, shape):
    """Pixels whose centres lie inside: even-odd, from every edge that crosses the line to the left of a centre."""
    inside = np.zeros(shape, int)
    for ring in (polygon.outer, *polygon.holes):
        for (x, y), (next_x, next_y) in zip(ring, np.roll(ring, -1, 0), strict=True):
            if x == next_x:
                inside[min(y, next_y) : max(y, next_y), x:] += 1
    return inside % 2 == 1


def test_one_pixel_is_a_square_of_area_1():
    ((class_id, polygon),) = find_polygons(mask("000", "020"))
    assert class_id == 2
    assert corners(polygon.outer) == {(1, 1), (2, 1), (2, 2), (1, 2)}
    assert polygon.num_pixels == 1
    assert polygon.holes == []


def test_only_corners_are_listed():
    (polygon,) = outline(mask("1110", "1000"), 1)
    assert corners(polygon.outer) == {(0, 0), (3, 0), (3, 1), (1, 1), (1, 2), (0, 2)}


def test_a_hole_is_a_ring_of_the_object_around_it():
    (polygon,) = outline(mask("1111", "1001", "1111"), 1)
    (hole,) = polygon.holes
    assert corners(hole) == {(1, 1), (3, 1), (3, 2), (1, 2)}
    assert polygon.num_pixels == 10


def test_an_object_in_a_hole_is_one_of_its_own():
    rows = ("1111111", "1000001", "1011101", "1010101", "1011101", "1000001", "1111111")
    outer, inner = outline(mask(*rows), 1)
    assert [len(polygon.holes) for polygon in (outer, inner)] == [1, 1]
    assert [polygon.num_pixels for polygon in (outer, inner)] == [24, 8]


def test_each_of_many_holes_belongs_to_the_object_around_it():
    # The second hole lies to the right of the first, in the same rows: its row of pixels begins at an edge of the first.
    left, right = outline(mask("1111100111", "1010100101", "1111100111", "1000000000"), 1)
    assert [len(polygon.holes) for polygon in (left, right)] == [2, 1]


def test_pixels_that_touch_at_a_corner_are_two_objects():
    for rows in (("10", "01"), ("01", "10")):
        polygons = outline(mask(*rows), 1)
        assert [len(polygon.outer) for polygon in polygons] == [4, 4]


def test_a_ring_never_touches_itself():
    (polygon,) = outline(mask("1111", "1011", "1101", "1111"), 1)  # two holes that touch at a corner
    assert [len(hole) for hole in polygon.holes] == [4, 4]
    (polygon,) = outline(mask("111", "101", "110"), 1)  # what is enclosed is open at a corner
    assert len(polygon.holes) == 1
    assert len(polygon.outer) == 6
    assert polygon.num_pixels == 7


def test_outer_rings_run_clockwise_as_displayed_and_holes_the_other_way():
    (polygon,) = outline(mask("111", "101", "111"), 1)
    assert signed_area(polygon.outer) == 9
    assert signed_area(polygon.holes[0]) == -1


def test_an_empty_mask_has_no_polygon():
    assert list(find_polygons(mask("00", "00"))) == []


@pytest.mark.parametrize("rows_at_once", [1, 3, 1024])
def test_polygons_cover_exactly_the_pixels_of_random_masks(monkeypatch, rows_at_once):
    monkeypatch.setattr(mask_outlines, "ROWS_AT_ONCE", rows_at_once)
    random = np.random.default_rng(1)
    for _ in range(60):
        ids = random.choice(3, size=random.integers(1, 12, 2), p=[0.3, 0.6, 0.1]).astype(np.uint8)
        covered = np.zeros_like(ids)
        polygons = list(find_polygons(ids))
        for class_id, polygon in polygons:
            inside = fill(polygon, ids.shape)
            assert inside.sum() == polygon.num_pixels
            assert not covered[inside].any()
            covered[inside] = class_id
            for ring in (polygon.outer, *polygon.holes):
                assert len(corners(ring)) == len(ring)
        np.testing.assert_array_equal(covered, ids)
        for class_id in (1, 2):
            num_objects, _ = cv2.connectedComponents((ids == class_id).astype(np.uint8), connectivity=4)
            assert sum(1 for its_class, _ in polygons if its_class == class_id) == num_objects - 1


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools with numpy 2
def test_joined_rings_have_the_same_inside_for_programs_that_read_coco():
    coco = pytest.importorskip("pycocotools.mask", reason="compares with the COCO tools")
    random = np.random.default_rng(2)
    for _ in range(40):
        ids = (random.random(random.integers(3, 14, 2)) < 0.75).astype(np.uint8)
        covered = np.zeros_like(ids)
        for _, polygon in find_polygons(ids):
            ring = joined_rings(polygon).ravel().astype(float).tolist()
            covered |= coco.decode(coco.merge(coco.frPyObjects([ring], *ids.shape)))
        np.testing.assert_array_equal(covered, ids)
