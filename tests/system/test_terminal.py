"""Colours on terminals that take them and nowhere else."""

from __future__ import annotations

import io

import pytest

from unet_trainer.system.terminal import MIN_COLUMNS, USUAL_COLUMNS, has_colours, num_columns, painted


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLUMNS", "WT_SESSION"):
        monkeypatch.delenv(name, raising=False)


def test_a_terminal_shows_colours_and_a_file_does_not():
    assert painted("failed", "red", Terminal()) == "\033[31mfailed\033[0m"
    assert painted("failed", "red", io.StringIO()) == "failed"


@pytest.mark.parametrize(("value", "shown"), [("1", False), ("0", False), ("", True)])
def test_no_color_is_respected_whatever_its_value_unless_it_is_empty(value, shown, monkeypatch):
    monkeypatch.setenv("NO_COLOR", value)
    assert has_colours(Terminal()) == shown


@pytest.mark.parametrize(("name", "value", "shown"), [("TERM", "dumb", False), ("TERM", "", False), ("WT_SESSION", "x", True)])
def test_a_terminal_that_does_not_know_colours_gets_none(name, value, shown, monkeypatch):
    monkeypatch.setenv("TERM", "")
    monkeypatch.setenv(name, value)
    assert has_colours(Terminal()) == shown


def test_a_stream_that_is_closed_or_missing_gets_none():
    closed = io.StringIO()
    closed.close()
    assert [has_colours(stream) for stream in (closed, None)] == [False, False]
    assert num_columns(closed) == USUAL_COLUMNS


@pytest.mark.parametrize(("columns", "expected"), [("40", 40), ("200", 200), ("3", MIN_COLUMNS)])
def test_the_width_is_that_of_the_terminal(columns, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert num_columns(Terminal()) == expected
    assert num_columns(io.StringIO()) == USUAL_COLUMNS
