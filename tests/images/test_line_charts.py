"""Charts as pictures: ticks at round numbers, lines where their values are, text that fits."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.images import line_charts
from unet_trainer.images.line_charts import LINE_COLOURS, Chart, Line, Mark, Picture, draw_charts, nice_ticks, tick_texts

RED, BLUE = (220, 0, 0), (0, 0, 220)
LEFT = line_charts.MARGIN + line_charts.LEFT
RIGHT = line_charts.MARGIN + line_charts.PANEL_WIDTH - line_charts.RIGHT
TOP = line_charts.MARGIN + line_charts.TITLE_HEIGHT + line_charts.TOP
BOTTOM = line_charts.MARGIN + line_charts.TITLE_HEIGHT + line_charts.PANEL_HEIGHT - line_charts.BOTTOM


def places_of(picture, colour):
    """Rows and columns of the pixels of a colour inside the plot of the first panel."""
    rows, columns = np.nonzero((picture[TOP - 5 : BOTTOM + 6, LEFT - 5 : RIGHT + 6] == colour).all(-1))
    return rows + TOP - 5, columns + LEFT - 5


def draw(*lines, marks=(), **options):
    return draw_charts(Picture("a run", "running", [Chart("Loss", lines, **options)], marks, [("best", BLUE)]), columns=1)


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 1, 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1.1, 7, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.9, 5, [0, 0.25, 0.5, 0.75]),
        (0.6, 1, 5, [0.6, 0.7, 0.8, 0.9, 1.0]),
        (1e-5, 9e-5, 5, [2e-5, 4e-5, 6e-5, 8e-5]),
        (-3, 3, 4, [-2, 0, 2]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, most, expected):
    assert nice_ticks(low, high, most) == pytest.approx(expected)


@pytest.mark.parametrize("last", [1.5, 2, 7, 13, 60, 999, 12345])
def test_ticks_of_epochs_are_whole_and_few(last):
    ticks = nice_ticks(1, last, 9, whole=True)
    assert 1 <= len(ticks) <= 9
    assert all(tick == int(tick) and 1 <= tick <= last for tick in ticks)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([0, 200, 400], ["0", "200", "400"]),
        ([0, 2e-4, 4e-4], ["0", "2e-4", "4e-4"]),
        ([2.5e6, 5e6], ["2.5e6", "5.0e6"]),
        ([], []),
    ],
)
def test_numbers_have_the_digits_that_tell_them_apart(values, texts):
    assert tick_texts(values) == texts


def test_a_line_lies_where_its_values_are():
    """From the lower left corner of the plot to the upper right one."""
    picture = draw(Line("train", [(1, 0.0), (5, 2.0)], RED), limits=(0.0, 2.0))
    rows, columns = places_of(picture, RED)
    assert (columns.min() - LEFT, RIGHT - columns.max()) == pytest.approx((0, 0), abs=6)
    assert (rows.min() - TOP, BOTTOM - rows.max()) == pytest.approx((0, 0), abs=6)
    middle = abs(columns - (LEFT + RIGHT) // 2) < 2
    assert rows[middle].mean() == pytest.approx((TOP + BOTTOM) / 2, abs=3)


def test_a_single_point_is_a_dot_in_the_middle():
    rows, columns = places_of(draw(Line("train", [(1, 0.5)], RED), limits=(0.0, 1.0)), RED)
    assert (rows.mean(), columns.mean()) == pytest.approx(((TOP + BOTTOM) / 2, (LEFT + RIGHT) / 2), abs=2)


def test_values_beyond_the_limits_and_those_that_are_no_numbers_leave_the_frame_alone():
    picture = draw(Line("train", [(1, 0.5), (2, float("nan")), (3, 1e9)], RED), limits=(0.0, 1.0))
    rows, _ = places_of(picture, RED)
    assert rows.min() >= TOP - 5
    assert (picture[: TOP - line_charts.TOP] != RED).any(-1).all()


def test_a_mark_is_a_vertical_line_dotted_or_not():
    line = Line("train", [(0, 0.0), (10, 0.0)], RED)
    for is_dotted in (True, False):
        rows, columns = places_of(draw(line, marks=[Mark(5, BLUE, is_dotted)], limits=(0.0, 1.0)), BLUE)
        assert set(columns) == {(LEFT + RIGHT) // 2}
        height = rows.max() - rows.min() + 1
        assert (len(rows) < height) == is_dotted
        assert height > 0.95 * (BOTTOM - TOP)


@pytest.mark.parametrize("lines", [[], [Line("nothing yet", [], RED)], [Line("flat", [(1, 0.0), (2, 0.0)], RED)]])
def test_charts_without_a_range_are_drawn(lines):
    picture = draw_charts(Picture("", "", [Chart("Loss", lines)]), columns=1)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3


def test_long_names_and_many_lines_stay_within_the_picture():
    lines = [Line(f"class {number} with a very long name indeed", [(1, 0.1)], RED, 1) for number in range(30)]
    picture = draw_charts(Picture("x" * 500, "y" * 500, [Chart("IoU", lines)] * 3))
    assert picture.shape[1] == 2 * line_charts.PANEL_WIDTH + 2 * line_charts.MARGIN
    border = np.concatenate([picture[:2].reshape(-1, 3), picture[-2:].reshape(-1, 3), picture[:, :2].reshape(-1, 3)])
    assert (border == 255).all()


def test_colours_are_distinct():
    assert len(set(LINE_COLOURS)) == len(LINE_COLOURS) >= 8
