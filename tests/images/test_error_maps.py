"""Pictures of errors: wrong pixels are seen, at any size."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.images.error_maps import (
    FALSE_COLOUR,
    GAP,
    LINE_HEIGHT,
    MAX_SIDE,
    MISSED_COLOUR,
    RIGHT_COLOUR,
    SAMPLE_SIDE,
    WRONG_COLOUR,
    error_map,
    error_picture,
    sample_sheet,
)
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.overlays import COLOURS, HEADER, IGNORED_COLOUR

NAMES = ("background", "cell")


def grey(height, width, value=100):
    return np.full((height, width, 3), value, np.uint8)


def has_colour(picture, colour):
    return bool((picture == np.array(colour)).all(2).any())


def ids(text):
    return np.array([[IGNORED if letter == "x" else int(letter) for letter in row] for row in text.split()], np.uint8)


def test_found_missed_and_false_pixels_have_their_colours():
    truth, predicted = ids("0011x"), ids("01011")
    shown = error_map(grey(1, 5), truth, predicted, (1, 5), is_binary=True)
    dimmed = (35, 35, 35)
    assert [tuple(pixel) for pixel in shown[0].tolist()] == [dimmed, FALSE_COLOUR, MISSED_COLOUR, RIGHT_COLOUR, IGNORED_COLOUR]


def test_of_many_classes_all_that_is_wrong_has_one_colour():
    shown = error_map(grey(1, 4), ids("0121"), ids("0112"), (1, 4), is_binary=False)
    assert [tuple(pixel) for pixel in shown[0].tolist()] == [(35, 35, 35), (35, 35, 35), WRONG_COLOUR, WRONG_COLOUR]


def test_a_single_wrong_pixel_is_seen_in_an_image_that_is_made_much_smaller():
    truth, predicted = np.zeros((900, 1200), np.uint8), np.zeros((900, 1200), np.uint8)
    predicted[417, 633] = 1
    shown = error_map(grey(900, 1200), truth, predicted, (90, 120), is_binary=True)
    assert [place.tolist() for place in np.nonzero((shown == np.array(FALSE_COLOUR)).all(2))] == [[41], [63]]


def test_where_both_kinds_of_error_fall_together_the_larger_one_is_shown():
    truth, predicted = ids("1110 0000"), ids("0001 0000")
    shown = error_map(grey(2, 4), truth, predicted, (1, 1), is_binary=True)
    assert tuple(shown[0, 0].tolist()) == MISSED_COLOUR


@pytest.mark.parametrize(
    ("size", "panel"), [((100, 80), (500, 400)), ((400, 300), (400, 300)), ((1000, 2000), (256, 512)), ((1, 3000), (1, 512))]
)
def test_panels_have_a_size_that_can_be_looked_at(size, panel):
    assert MAX_SIDE / 2 < max(panel) <= MAX_SIDE
    truth = np.zeros(size, np.uint8)
    picture = error_picture(grey(*size), truth, truth, NAMES, "a.png: IoU 1", has_background=True)
    margins = 2 * 8
    assert picture.shape[1] == 4 * panel[1] + 3 * 8 + margins
    assert picture.shape[0] == panel[0] + 24 * 3 + HEADER + margins  # title, headings, legends of classes and errors
    assert picture.dtype == np.uint8


def test_the_legend_shows_the_colours_that_are_used():
    truth, predicted = ids("0011x"), ids("01011")
    picture = error_picture(grey(1, 5), truth, predicted, NAMES, "title", has_background=True)
    legend = picture[-60:]
    for colour in (COLOURS[0], RIGHT_COLOUR, MISSED_COLOUR, FALSE_COLOUR, IGNORED_COLOUR):
        assert has_colour(legend, colour), colour
    many = error_picture(grey(1, 5), truth, predicted, ("sky", "road"), "title", has_background=False)
    assert has_colour(many[-60:], WRONG_COLOUR)
    assert not has_colour(many[-60:], MISSED_COLOUR)


def test_many_classes_and_long_names_fit():
    truth = np.arange(40, dtype=np.uint8)[None].repeat(40, 0)
    names = tuple(f"a class with a rather long näme {number}" for number in range(40))
    picture = error_picture(grey(40, 40), truth, truth, names, "x" * 500, has_background=False)
    assert picture.shape[1] == 4 * 480 + 3 * 8 + 16


def test_a_sample_sheet_has_a_row_of_four_panels_for_each_image_and_one_legend():
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8)
    truth, nothing = np.zeros((112, 112), np.uint8), np.zeros((112, 112), np.uint8)
    truth[20:60, 20:60] = 1
    sheet = sample_sheet([image, grey(112, 112)], [truth, nothing], [nothing, truth], NAMES, has_background=True)
    side = SAMPLE_SIDE
    assert sheet.shape[1] == 4 * side + 3 * GAP + 2 * GAP
    first = sheet[LINE_HEIGHT : LINE_HEIGHT + side]
    panels = [first[:, GAP + number * (side + GAP) :][:, :side] for number in range(4)]
    assert np.array_equal(panels[0], image.repeat(2, 0).repeat(2, 1))
    assert has_colour(panels[1], COLOURS[0])
    assert np.array_equal(panels[2], panels[0])
    assert has_colour(panels[3], MISSED_COLOUR)
    assert not has_colour(panels[3], FALSE_COLOUR)
    second = sheet[LINE_HEIGHT + side + GAP :][:side]
    assert has_colour(second, FALSE_COLOUR)
    legend = sheet[LINE_HEIGHT + 2 * (side + GAP) :]
    assert len(legend) == HEADER + LINE_HEIGHT + GAP
    for colour in (COLOURS[0], RIGHT_COLOUR, MISSED_COLOUR, FALSE_COLOUR):
        assert has_colour(legend, colour)


def test_images_of_different_sizes_share_a_sheet():
    sizes = [(64, 64), (32, 96), (600, 300)]
    nothing = [np.zeros(size, np.uint8) for size in sizes]
    sheet = sample_sheet([grey(*size) for size in sizes], nothing, nothing, ("sky", "road"), has_background=False)
    assert sheet.shape[1] == 4 * 192 + 3 * GAP + 2 * GAP  # 64 × 3 and 96 × 2; 600×300 is 112 wide
    assert has_colour(sheet, (255, 255, 255))
