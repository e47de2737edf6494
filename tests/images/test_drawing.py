"""Pictures: overlays in the colours of classes, sheets, error maps and bars, whatever they are given."""

import numpy as np
import pytest

from unet_trainer.images.drawing import (
    COLOURS,
    ERROR_COLOURS,
    GAP,
    LINE_HEIGHT,
    SAMPLE_SIDE,
    ErrorKind,
    display_range,
    error_map,
    error_sheet,
    overlay,
    to_display,
)
from unet_trainer.images.mask_decoding import IGNORED

FOUND, IGNORED_KIND, MISSED, FALSE, WRONG = (ERROR_COLOURS[kind] for kind in ErrorKind)
DIM = (35, 35, 35)
NAMES = ("background", "cell")


def grey(height=24, width=24, value=100):
    return np.full((height, width, 3), value, np.uint8)


def square(class_id, height=24, width=24):
    ids = np.zeros((height, width), np.uint8)
    ids[6:18, 6:18] = class_id
    return ids


def ids(text):
    return np.array([[IGNORED if letter == "x" else int(letter) for letter in row] for row in text.split()], np.uint8)


def colours_in(picture):
    return {tuple(colour) for colour in np.unique(picture.reshape(-1, 3), axis=0).tolist()}


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float16, np.float64])
def test_other_depths_are_scaled_to_the_values_that_occur(dtype):
    ramp = np.linspace(1000, 3000, 10_001).reshape(1, -1, 1).astype(dtype)
    displayed = to_display(ramp)[0, :, 0].astype(int)
    assert (displayed[0], displayed[-1]) == (0, 255)
    assert displayed[5000] == pytest.approx(127, abs=2)
    assert (np.diff(displayed) >= 0).all()
    np.testing.assert_array_equal(to_display(ramp[:, 99:200], display_range(ramp)), to_display(ramp)[:, 99:200])
    assert not to_display(np.full((4, 5, 1), 300, dtype)).any()


def test_a_class_is_tinted_inside_and_outlined_in_its_colour_and_background_does_not_change():
    image, mask = grey(), square(1)
    image.setflags(write=False)
    shown = overlay(image, mask)
    assert shown[12, 12].tolist() == (0.6 * 100 + 0.4 * COLOURS[0]).astype(np.uint8).tolist()
    assert shown[6, 6].tolist() == COLOURS[0].tolist()
    assert np.array_equal(shown[mask == 0], image[mask == 0])
    assert overlay(grey(value=0), square(IGNORED))[12, 12].tolist() == [51, 51, 51]


def test_wrong_pixels_have_the_colour_of_their_error():
    shown = error_map(grey(1, 5), ids("0011x"), ids("01011"), (1, 5), is_binary=True)
    assert [tuple(pixel) for pixel in shown[0].tolist()] == [DIM, FALSE, MISSED, FOUND, IGNORED_KIND]
    shown = error_map(grey(1, 4), ids("0121"), ids("0112"), (1, 4), is_binary=False)
    assert [tuple(pixel) for pixel in shown[0].tolist()] == [DIM, DIM, WRONG, WRONG]


@pytest.mark.parametrize(
    ("size", "panel"), [((100, 80), (500, 400)), ((1000, 2000), (256, 512)), ((1, 3000), (1, 512))]
)
def test_an_error_picture_has_four_panels_of_a_size_that_can_be_looked_at(size, panel):
    truth = np.zeros(size, np.uint8)
    picture = error_sheet([(grey(*size), truth, truth)], NAMES, has_background=True, title="x" * 500)
    assert picture.shape == (panel[0] + 4 * LINE_HEIGHT + 2 * GAP, 4 * panel[1] + 3 * GAP + 2 * GAP, 3)
    assert {FOUND, MISSED, FALSE, tuple(COLOURS[0].tolist())} <= colours_in(picture[-60:])


def test_a_sample_sheet_has_a_row_of_four_panels_for_each_image_whatever_their_sizes():
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8)
    truth, nothing = square(1, 112, 112), np.zeros((112, 112), np.uint8)
    small = (image[:50, :20], nothing[:50, :20], nothing[:50, :20])
    sheet = error_sheet([(image, truth, nothing), small], NAMES, has_background=True)
    first = sheet[GAP + LINE_HEIGHT :][:SAMPLE_SIDE]
    panels = [first[:, GAP + number * (SAMPLE_SIDE + GAP) :][:, :SAMPLE_SIDE] for number in range(4)]
    assert np.array_equal(panels[0], image.repeat(2, 0).repeat(2, 1))
    assert np.array_equal(panels[2], panels[0])
    assert MISSED in colours_in(panels[3])
    assert sheet.shape[1] == 4 * SAMPLE_SIDE + 5 * GAP
