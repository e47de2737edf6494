"""Pictures for people: what is tinted, what is left, and how a sheet is laid out."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.masks import IGNORED
from unet_trainer.pictures import COLOURS, GAP, HEADER, overlay, sample_sheet


def grey(height=24, width=24, value=100):
    return np.full((height, width, 3), value, np.uint8)


def square(class_id, height=24, width=24):
    ids = np.zeros((height, width), np.uint8)
    ids[6:18, 6:18] = class_id
    return ids


def test_background_is_left_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    assert np.array_equal(overlay(image, np.zeros((24, 24), np.uint8)), image)
    shown = overlay(image, square(1))
    outside = square(1) == 0
    assert np.array_equal(shown[outside], image[outside])


def test_a_class_is_tinted_inside_and_outlined_in_its_colour():
    shown = overlay(grey(), square(1))
    assert shown[12, 12].tolist() == (0.6 * 100 + 0.4 * COLOURS[0]).astype(np.uint8).tolist()
    assert shown[6, 6].tolist() == COLOURS[0].tolist()
    assert shown[17, 10].tolist() == COLOURS[0].tolist()


def test_classes_have_colours_of_their_own_and_begin_again_after_the_last():
    outlines = [overlay(grey(), square(class_id))[6, 6].tolist() for class_id in range(1, 10)]
    assert outlines[:8] == COLOURS.tolist()
    assert outlines[8] == outlines[0]
    assert overlay(grey(), square(0), first_shown=0)[0, 0].tolist() == COLOURS[0].tolist()


def test_ignored_pixels_are_grey():
    assert overlay(grey(value=0), square(IGNORED))[12, 12].tolist() == [51, 51, 51]
    assert overlay(grey(value=0), square(IGNORED))[6, 6].tolist() == [128, 128, 128]


def test_an_overlay_leaves_image_and_ids_as_they_are():
    image, ids = grey(), square(3)
    image.setflags(write=False)
    ids.setflags(write=False)
    overlay(image, ids)


def test_a_sheet_shows_image_truth_and_prediction_side_by_side():
    image = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    truth, prediction = np.zeros((160, 160), np.uint8), np.zeros((160, 160), np.uint8)
    truth[20:60, 20:60] = 1
    prediction[30:90, 30:90] = 2
    sheet = sample_sheet([image], [truth], [prediction], columns=1)
    assert (sheet.dtype, sheet.shape) == (np.uint8, (HEADER + 160, 3 * 160 + 2 * GAP, 3))
    below = sheet[HEADER:]
    assert np.array_equal(below[:, :160], image)
    assert np.array_equal(below[:, 160 + GAP : 320 + GAP], overlay(image, truth))
    assert np.array_equal(below[:, 320 + 2 * GAP :], overlay(image, prediction))
    assert (below[:, 160 : 160 + GAP] == 255).all()
    assert (sheet[:HEADER] < 100).any()  # the words


def test_triples_are_laid_out_in_rows_and_the_last_row_is_filled_with_white():
    images = [grey(160, 160, value) for value in (10, 20, 30)]
    nothing = [np.zeros((160, 160), np.uint8)] * 3
    sheet = sample_sheet(images, nothing, nothing, columns=2)
    width = 3 * 160 + 2 * GAP
    assert sheet.shape == (HEADER + 160 + GAP + 160, 2 * width + 3 * GAP, 3)
    assert sheet[HEADER + 5, 5].tolist() == [10] * 3
    assert sheet[HEADER + 5, width + 3 * GAP + 5].tolist() == [20] * 3
    assert sheet[HEADER + 160 + GAP + 5, 5].tolist() == [30] * 3
    assert (sheet[HEADER + 160 + GAP :, width:] == 255).all()


def test_a_small_image_is_enlarged_by_a_whole_factor():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    nothing = np.zeros((32, 32), np.uint8)
    sheet = sample_sheet([image], [nothing], [nothing], columns=1)
    assert sheet.shape == (HEADER + 160, 3 * 160 + 2 * GAP, 3)
    assert np.array_equal(sheet[HEADER:, :160], image.repeat(5, 0).repeat(5, 1))


@pytest.mark.parametrize(
    ("size", "shown"),
    [((512, 512), (320, 320)), ((512, 1024), (160, 320)), ((320, 32), (320, 32)), ((96, 192), (96, 192)), ((64, 96), (192, 288))],
)
def test_every_shape_is_shown_within_320_pixels_at_its_own_aspect(size, shown):
    ids = np.zeros(size, np.uint8)
    sheet = sample_sheet([grey(*size)], [ids], [ids], columns=1)
    assert sheet.shape == (HEADER + shown[0], 3 * shown[1] + 2 * GAP, 3)
