"""Overlays, contact sheets, sample sheets and bar charts: colours and layout."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.overlays import (
    BACKGROUND_COLOUR,
    BAR_HEIGHT,
    CELL,
    CHART_WIDTH,
    COLOURS,
    GAP,
    HEADER,
    IGNORED_COLOUR,
    NAME_WIDTH,
    NUMBER_WIDTH,
    bar_chart,
    class_colours,
    contact_sheet,
    display_range,
    legend,
    overlay,
    overlay_rows,
    to_display,
)


def grey(height=24, width=24, value=100):
    return np.full((height, width, 3), value, np.uint8)


def square(class_id, height=24, width=24):
    ids = np.zeros((height, width), np.uint8)
    ids[6:18, 6:18] = class_id
    return ids


def test_8_bit_images_are_shown_as_they_are():
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    assert np.array_equal(to_display(image), image)


@pytest.mark.parametrize(("channels", "shown"), [(1, [0, 0, 0]), (2, [0, 1, None]), (4, [0, 1, 2]), (5, [0, 1, 2])])
def test_any_number_of_channels_is_shown_as_three(channels, shown):
    image = np.random.default_rng(0).integers(0, 256, (24, 24, channels), np.uint8)
    displayed = to_display(image)
    assert (displayed.dtype, displayed.shape) == (np.uint8, (24, 24, 3))
    for place, channel in enumerate(shown):
        assert np.array_equal(displayed[:, :, place], np.zeros((24, 24)) if channel is None else image[:, :, channel])


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float16, np.float32, np.float64])
def test_other_depths_are_scaled_to_the_values_that_occur(dtype):
    ramp = np.linspace(1000, 3000, 10_001).reshape(1, -1, 1).astype(dtype)
    displayed = to_display(ramp)
    assert (displayed.dtype, displayed.shape) == (np.uint8, (1, 10_001, 3))
    assert displayed[0, 0].tolist() == [0, 0, 0]  # the lowest hundredth is black
    assert displayed[0, -1].tolist() == [255, 255, 255]
    assert displayed[0, 5000, 0] == pytest.approx(127, abs=2)
    assert (np.diff(displayed[0, :, 0].astype(int)) >= 0).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float64])
def test_a_constant_image_of_another_depth_is_black(dtype):
    assert to_display(np.full((4, 5, 1), 300, dtype)).tolist() == np.zeros((4, 5, 3)).tolist()


def test_an_outlier_does_not_darken_the_rest():
    image = np.random.default_rng(0).normal(100, 10, (50, 50, 1)).astype(np.float16)
    image[0, 0] = 60000
    assert 90 < to_display(image).mean() < 165


@pytest.mark.parametrize("dtype", ["uint16", "float16", "float32"])
def test_a_part_is_shown_as_in_the_whole_image(dtype):
    image = np.linspace(0, 60000, 24 * 24 * 3).reshape(24, 24, 3).astype(dtype)
    np.testing.assert_array_equal(to_display(image[10:14], display_range(image)), to_display(image)[10:14])


def test_rows_of_an_overlay_are_those_of_the_whole():
    ids, colours = square(2), np.zeros((256, 3), np.uint8)
    colours[2] = COLOURS[1]
    whole = overlay_rows(grey(), ids, None, None, colours)
    np.testing.assert_array_equal(whole, overlay(grey(), ids))  # away from the edge of the image
    part = overlay_rows(grey()[5:9], ids[5:9], ids[4:5], ids[9:10], colours)
    np.testing.assert_array_equal(part, whole[5:9])


def test_an_overlay_of_rows_has_no_outline_along_the_edge_of_the_image():
    ids, colours = np.full((24, 24), 1, np.uint8), np.full((256, 3), 200, np.uint8)
    assert (overlay_rows(grey(), ids, None, None, colours) == 140).all()  # 0.6 · 100 + 0.4 · 200


def test_a_contact_sheet_has_a_cell_for_each_pair_with_its_label():
    pictures = [(grey(50, 100, 40 * index), square(1, 50, 100)) for index in range(1, 6)]
    sheet = contact_sheet(pictures, [f"image {index}" for index in range(5)], columns=2)
    width, height = 2 * CELL + GAP, CELL // 2 + HEADER - 6
    assert sheet.shape == (3 * height + 2 * 2 * GAP, 2 * width + 3 * GAP, 3)
    for index in range(5):
        top, left = (index // 2) * (height + 2 * GAP), (index % 2) * (width + 3 * GAP)
        cell = sheet[top : top + height, left : left + width]
        caption, pair = cell[: HEADER - 6], cell[HEADER - 6 :]
        assert (caption < 150).any()
        assert pair[2, 2].tolist() == [40 * (index + 1)] * 3
        assert pair[99, 100].tolist() == [40 * (index + 1)] * 3  # 100×50 is shown at 200×100
        assert pair[2 * 12, CELL + GAP + 2 * 12].tolist() != pair[2 * 12, 2 * 12].tolist()  # tinted
    assert (sheet[2 * (height + 2 * GAP) :, width:] == 255).all()  # the empty sixth cell


def test_a_sheet_of_one_image_has_one_column():
    sheet = contact_sheet([(grey(), square(1))], ["a" * 300 + "größe"], columns=4)
    assert sheet.shape == (CELL + HEADER - 6, 2 * CELL + GAP, 3)


def test_images_of_any_shape_fit_into_a_contact_sheet():
    shapes = [(1, 1), (1, 500), (500, 1), (700, 650), (3, 900)]
    sheet = contact_sheet([(grey(*shape), np.ones(shape, np.uint8)) for shape in shapes], ["x"] * 5, columns=5)
    assert sheet.shape == (CELL + HEADER - 6, 5 * (2 * CELL + GAP) + 4 * 3 * GAP, 3)


def test_a_row_of_a_contact_sheet_is_as_high_as_its_highest_image():
    pictures = [(grey(*shape), np.ones(shape, np.uint8)) for shape in [(50, 100), (75, 100), (10, 100)]]
    sheet = contact_sheet(pictures, ["x"] * 3, columns=2)
    assert sheet.shape[0] == (150 + HEADER - 6) + 2 * GAP + (20 + HEADER - 6)
    assert (sheet[HEADER - 6 + 100 : 150 + HEADER - 6, :CELL] == 255).all()  # below the lower image


def test_background_pixels_do_not_change():
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


def test_each_class_has_its_colour_and_the_forty_first_has_the_first_again():
    outlines = [overlay(grey(), square(class_id))[6, 6].tolist() for class_id in range(1, 42)]
    assert outlines[:40] == COLOURS.tolist()
    assert outlines[40] == outlines[0]
    assert class_colours(42)[1:] == tuple(tuple(colour) for colour in outlines)


def test_forty_colours_are_far_from_each_other_and_from_those_of_background_and_ignored_pixels():
    """ΔE of CIE76: 2.3 is just noticeable; halved by the tint, these are still told apart."""
    colours = np.vstack([COLOURS, [BACKGROUND_COLOUR, IGNORED_COLOUR]]).astype(np.float32) / 255
    lab = cv2.cvtColor(colours[None], cv2.COLOR_RGB2LAB)[0]
    distances = np.linalg.norm(lab[:, None] - lab, axis=2) + 1000 * np.eye(len(lab))
    assert len(COLOURS) == 40
    assert distances.min() > 20


def test_a_class_0_that_is_no_background_has_the_last_colour_and_is_drawn():
    assert class_colours(3, has_background=False) == (tuple(COLOURS[-1].tolist()), *class_colours(3)[1:])
    ids = square(1)
    shown = overlay(grey(), ids, has_background=False)
    assert shown[12, 12].tolist() == overlay(grey(), ids)[12, 12].tolist()
    assert shown[2, 2].tolist() == (0.6 * 100 + 0.4 * COLOURS[-1]).astype(np.uint8).tolist()
    colours = np.zeros((256, 3), np.uint8)
    colours[:2] = class_colours(2, has_background=False)
    assert overlay_rows(grey(), ids, None, None, colours)[2, 2].tolist() != [100, 100, 100]


def legend_colours(picture):
    found = np.unique(picture.reshape(-1, 3), axis=0).tolist()
    return {tuple(colour) for colour in found} & {*map(tuple, COLOURS.tolist()), IGNORED_COLOUR}


def test_a_legend_has_the_classes_that_are_drawn_in_as_many_rows_as_they_need():
    names = ["background", "road", "sky"]
    row = legend([square(1)], names, True, 400)
    assert row.shape == (HEADER, 400, 3)
    assert legend_colours(row) == {tuple(COLOURS[0].tolist()), tuple(COLOURS[1].tolist())}
    assert legend_colours(legend([square(IGNORED)], names, False, 400)) == {
        *(tuple(COLOURS[index].tolist()) for index in (-1, 0, 1)),
        IGNORED_COLOUR,
    }
    rows = legend([square(1)], [f"class {index}" for index in range(41)], True, 400)
    assert rows.shape[0] >= 5 * HEADER
    assert rows.shape[0] % HEADER == 0
    assert legend_colours(rows) == set(map(tuple, COLOURS.tolist()))
    assert legend([square(1)], [], True, 400).shape == (0, 400, 3)  # no names, no legend


def test_sheets_have_a_legend_below_where_the_names_are_known():
    names = ["background", "größe"]
    sheet = contact_sheet([(grey(), square(1))], ["x"], names=names)
    assert sheet.shape[0] == CELL + HEADER - 6 + HEADER
    assert legend_colours(sheet[-HEADER:]) == {tuple(COLOURS[0].tolist())}


def test_the_colours_of_classes_begin_with_black_for_the_background():
    assert class_colours(2) == ((0, 0, 0), (0, 200, 120))


def test_ignored_pixels_are_grey():
    assert overlay(grey(value=0), square(IGNORED))[12, 12].tolist() == [51, 51, 51]
    assert overlay(grey(value=0), square(IGNORED))[6, 6].tolist() == [128, 128, 128]


def test_an_overlay_changes_neither_image_nor_ids():
    image, ids = grey(), square(3)
    image.setflags(write=False)
    ids.setflags(write=False)
    assert not np.array_equal(overlay(image, ids), image)


# Bar charts


def test_the_longest_bar_of_a_chart_fills_its_width_and_the_others_are_in_proportion():
    chart = bar_chart(["one", "two", "three"], [("speed", [10.0, 40.0, 0.0])])
    title = BAR_HEIGHT + GAP
    assert chart.shape == (title + 3 * BAR_HEIGHT + GAP, CHART_WIDTH, 3)
    full = CHART_WIDTH - NAME_WIDTH - NUMBER_WIDTH
    lengths = []
    for index in range(3):
        row = chart[title + index * BAR_HEIGHT + BAR_HEIGHT // 2]
        lengths.append(int((row == COLOURS[index]).all(1).sum()))
    assert lengths == [round(full / 4) + 1, full + 1, 2]  # both ends of a bar are drawn; 0 is a bar of one pixel
    assert (chart[:title] < 150).any()  # the title


def test_charts_are_below_each_other():
    one = bar_chart(["a"], [("first", [1.0])])
    two = bar_chart(["a"], [("first", [1.0]), ("second", [2.0])])
    assert two.shape[0] == 2 * (one.shape[0] - GAP) + GAP
    assert np.array_equal(two[: one.shape[0] - GAP], one[:-GAP])
