"""Centre lines by hand, and against scikit-image."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.images.thinning import thin


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
    assert thin(bar).tolist() == picture("...........", "...........", "..#######..", "...........", "...........").tolist()


def test_a_bar_at_the_border_is_thinned_as_one_inside():
    bar = np.ones((3, 9), np.uint8)
    assert thin(bar).tolist() == thin(np.pad(bar, 4))[4:-4, 4:-4].tolist()
    assert thin(bar).sum() == 7


def test_a_line_of_one_pixel_stays():
    for line in (np.eye(9, dtype=np.uint8), picture("#########"), picture("#", "#", "#")):
        assert thin(line).tolist() == line.tolist()


def test_nothing_stays_nothing():
    assert thin(np.zeros((5, 7), np.uint8)).sum() == 0


@pytest.mark.parametrize("seed", range(8))
def test_no_part_vanishes_falls_apart_or_joins_another(seed):
    mask = blobs(seed)
    lines = thin(mask)
    labels = cv2.connectedComponents(mask, connectivity=8)[1]
    assert num_parts(mask) > 3
    assert num_parts(lines) == num_parts(mask)
    assert set(np.unique(labels[lines == 1])) == set(range(1, num_parts(mask) + 1))
    assert (lines <= mask).all()


@pytest.mark.parametrize("seed", range(8))
def test_lines_are_those_of_scikit_image(seed):
    morphology = pytest.importorskip("skimage.morphology", reason="scikit-image is not installed: it is the reference here")
    for mask in (blobs(seed), blobs(seed, 1, 30), np.random.default_rng(seed).integers(0, 2, (30, 40)).astype(np.uint8)):
        assert (thin(mask) == morphology.thin(mask.astype(bool))).all()
