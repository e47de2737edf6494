"""The shapes in a mask: outlines that cover exactly their pixels, centre lines, and numbers that can be counted by hand."""

import cv2
import numpy as np
import pytest

from unet_trainer.images.mask_shapes import MaskStructure, find_polygons, measure_structure, thin


def mask(*rows):
    return np.array([[int(value) for value in row] for row in rows], np.uint8)


def fill(polygon, shape):
    """Pixels whose centres lie inside: even-odd, from every edge that crosses the line to the left of a centre."""
    inside = np.zeros(shape, int)
    for ring in (polygon.outer, *polygon.holes):
        for (x, y), (next_x, next_y) in zip(ring, np.roll(ring, -1, 0), strict=True):
            if x == next_x:
                inside[min(y, next_y) : max(y, next_y), x:] += 1
    return inside % 2 == 1


def test_a_ring_never_touches_itself():
    ((_, polygon),) = find_polygons(mask("1111", "1011", "1101", "1111"))  # two holes that touch at a corner
    assert [len(hole) for hole in polygon.holes] == [4, 4]
    ((_, polygon),) = find_polygons(mask("111", "101", "110"))  # what is enclosed is open at a corner
    assert (len(polygon.holes), len(polygon.outer), polygon.num_pixels) == (1, 6, 7)


def test_polygons_cover_exactly_the_pixels_of_random_masks():
    random = np.random.default_rng(1)
    for _ in range(60):
        ids = random.choice(3, size=random.integers(1, 12, 2), p=[0.3, 0.6, 0.1]).astype(np.uint8)
        covered, polygons = np.zeros_like(ids), list(find_polygons(ids))
        for class_id, polygon in polygons:
            inside = fill(polygon, ids.shape)
            assert inside.sum() == polygon.num_pixels
            assert not covered[inside].any()
            covered[inside] = class_id
            for ring in (polygon.outer, *polygon.holes):
                assert len(set(map(tuple, ring.tolist()))) == len(ring)
        np.testing.assert_array_equal(covered, ids)
        for number in (1, 2):
            num_objects = cv2.connectedComponents((ids == number).astype(np.uint8), connectivity=4)[0] - 1
            assert sum(number == class_id for class_id, _ in polygons) == num_objects


def test_a_bar_becomes_its_middle_line():
    bar = mask("00000000000", *["01111111110"] * 3, "00000000000")
    assert thin(bar).tolist() == mask(*["00000000000"] * 2, "00111111100", *["00000000000"] * 2).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_no_part_vanishes_falls_apart_or_joins_another(seed):
    """Of random shapes of many sizes, some of single pixels, some at the border."""
    noise = np.random.default_rng(seed).random((60, 80)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), 1 + seed % 4)
    shapes = (smooth > np.quantile(smooth, 0.55)).astype(np.uint8)
    lines = thin(shapes)
    num_labels, labels = cv2.connectedComponents(shapes, connectivity=8)
    assert num_labels > 4
    assert cv2.connectedComponents(lines, connectivity=8)[0] == num_labels
    assert set(np.unique(labels[lines == 1])) == set(range(1, num_labels))
    assert (lines <= shapes).all()


def test_pixels_among_their_own_value_are_solid_and_255_on_the_background_alone_is_apart():
    ids = np.zeros((10, 40), np.uint8)
    ids[:, 19:22] = 2
    ids[:, 22:] = 1
    assert measure_structure(ids) == MaskStructure({0: 180, 1: 170, 2: 10}, 2, False)
    ids[3:6, 5:8] = 255
    assert measure_structure(ids) == MaskStructure({0: 159, 1: 170, 2: 10, 255: 1}, 3, True)
    ids[3:6, 18] = 255  # beside another id
    assert not measure_structure(ids).void_is_apart
