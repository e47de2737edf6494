"""How the values of one mask lie, in masks drawn so that the numbers can be counted by hand."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.images.image_files import COLOUR
from unet_trainer.images.mask_structure import PIECES_SIDE, MaskStructure, measure_structure, piece_stride


def measure(mask):
    values, counts = np.unique(mask, return_counts=True)
    return measure_structure(mask, int(values[np.argmax(counts)]))


def halves(left, right, height=20, width=40, between=()):
    """Two values side by side, with columns of others between."""
    mask = np.full((height, width), left, np.uint8)
    mask[:, width // 2 :] = right
    for offset, value in enumerate(between):
        mask[:, width // 2 + offset] = value
    return mask


def test_greys_between_two_ends_that_touch_them_lie_beside_both():
    found = measure(halves(0, 255, between=(100, 150)))
    assert (found.between, found.beside_both) == (40, 40)


def test_a_wide_band_of_grey_does_not_lie_beside_both_ends():
    """A class of ten columns: only its outer columns see one of the ends, and none sees both."""
    found = measure(halves(0, 255, between=(128,) * 10))
    assert (found.between, found.beside_both) == (200, 0)


def test_a_grey_island_in_the_background_lies_beside_one_end():
    mask = halves(0, 255)
    mask[8:12, 2:6] = 120
    found = measure(mask)
    assert (found.between, found.beside_both) == (16, 0)


def test_the_edge_of_a_disc_that_was_scaled_down_lies_beside_both_ends():
    large = np.zeros((400, 400), np.uint8)
    cv2.circle(large, (200, 200), 120, 255, -1)
    found = measure(cv2.resize(large, (100, 100), interpolation=cv2.INTER_AREA))
    assert found.between > 50
    assert found.beside_both == found.between


@pytest.mark.parametrize("mask", [halves(0, 150, between=(70,)), halves(0, 3, between=(1, 2)).astype(np.uint16)])
def test_ends_that_are_close_to_each_other_have_no_soft_edge(mask):
    found = measure(mask)
    assert (found.between, found.beside_both) == (0, 0)


def test_pieces_of_each_value_are_counted_and_those_that_touch_are_told_apart():
    mask = np.zeros((30, 30), np.uint8)
    mask[2:8, 2:8] = 1
    mask[2:8, 8:14] = 2  # touches 1
    mask[20:25, 2:8] = 2  # a second piece
    mask[20:25, 20:25] = 7
    found = measure(mask)
    assert (found.num_values, found.num_pieces) == (3, 4)
    assert measure((mask + np.int32(COLOUR) * (mask > 0)).astype(np.int32)).num_pieces == 4
    assert measure(mask.astype(np.uint16) * 300).num_pieces == 4


def test_pieces_of_a_large_mask_are_counted_in_a_smaller_one():
    mask = np.zeros((1200, 900), np.uint8)
    for number in range(8):
        cv2.circle(mask, (100 + 200 * (number % 4), 200 + 600 * (number // 4)), 40, number + 1, -1)
    assert piece_stride(mask.shape) == 5
    assert piece_stride((PIECES_SIDE, 10)) == 1
    found = measure(mask)
    assert (found.num_values, found.num_pieces) == (8, 8)


def test_pixels_close_to_another_value_are_the_border():
    """Two columns on each side of an edge; a line of three columns is border from side to side."""
    mask = halves(0, 1, height=10, width=40)
    mask[:, 19:22] = 2
    found = measure(mask)
    assert found == MaskStructure(0, 0, 2, 2, border=70, border_of_last=30, border_of_most=20)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_borders_of_values_of_any_size_are_found(dtype):
    mask = halves(0, 1, height=10, width=40).astype(dtype)
    mask[:, 19:22] = 60_000 if dtype == np.uint16 else COLOUR + 0xFFFFFF
    assert measure(mask).border_of_last == 30


def test_colours_that_differ_by_one_are_different_values():
    mask = np.full((10, 40), COLOUR + 0xFFFFFE, np.int32)
    mask[:, 20:] = COLOUR + 0xFFFFFF
    mask[:2] = 0
    found = measure(mask)
    assert found.border == 2 * 40 + 2 * 40 + 6 * 4  # two rows on each side, and two columns on each side below them
