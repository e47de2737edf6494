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
    assert len(polygon.holes) == 1
    assert len(polygon.outer) == 6
    assert polygon.num_pixels == 7


def test_polygons_cover_exactly_the_pixels_of_random_masks():
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
                assert len(set(map(tuple, ring.tolist()))) == len(ring)
        np.testing.assert_array_equal(covered, ids)
        for class_id in (1, 2):
            num_objects, _ = cv2.connectedComponents((ids == class_id).astype(np.uint8), connectivity=4)
            assert sum(1 for its_class, _ in polygons if its_class == class_id) == num_objects - 1


def picture(*rows):
    return np.array([[letter == "#" for letter in row] for row in rows], np.uint8)


def num_parts(mask):
    """8-connected parts, without the background."""
    return cv2.connectedComponents(mask, connectivity=8)[0] - 1


def blobs(seed, height=60, width=80):
    """Random shapes of many sizes, some of single pixels, some at the border."""
    noise = np.random.default_rng(seed).random((height, width)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), 1 + seed % 4)
    return (smooth > np.quantile(smooth, 0.55)).astype(np.uint8)


def test_a_bar_becomes_its_middle_line():
    bar = picture("...........", ".#########.", ".#########.", ".#########.", "...........")
    assert (
        thin(bar).tolist()
        == picture("...........", "...........", "..#######..", "...........", "...........").tolist()
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_part_vanishes_falls_apart_or_joins_another(seed):
    mask = blobs(seed)
    lines = thin(mask)
    labels = cv2.connectedComponents(mask, connectivity=8)[1]
    assert num_parts(mask) > 3
    assert num_parts(lines) == num_parts(mask)
    assert set(np.unique(labels[lines == 1])) == set(range(1, num_parts(mask) + 1))
    assert (lines <= mask).all()


def test_pixels_close_to_another_value_are_the_border():
    """Two columns on each side of an edge; a line of three columns is border from side to side."""
    mask = np.zeros((10, 40), np.uint8)
    mask[:, 20:] = 1
    mask[:, 19:22] = 2
    assert measure_structure(mask, 0) == MaskStructure(0, 0, 2, 2, border=70, border_of_last=30, border_of_most=20)
