"""Files made from other files: written once, again when a source changes, never beside the user's data."""

from __future__ import annotations

import os

import numpy as np
import pytest

from unet_trainer.datasets.converted import FEW, Conversion, ConvertedFiles
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import read_mask


class Maker:
    def __init__(self):
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return np.full((3, 4), self.num_calls, np.uint8)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "data" / "a.json"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def open_files(tmp_path, **settings):
    return ConvertedFiles(tmp_path / "data", tmp_path / "checkpoints", "polygons", settings)


def test_a_file_is_made_once_and_found_at_the_next_start(tmp_path, source):
    make, files = Maker(), open_files(tmp_path)
    path = files.write("train/a", [source], make)
    files.save_index()
    assert open_files(tmp_path).write("train/a", [source], make) == path
    assert make.num_calls == 1
    assert read_mask(path).tolist() == [[1] * 4] * 3
    assert path.is_relative_to(tmp_path / "checkpoints")
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["a.json"]


def test_it_is_made_again_when_a_source_has_changed_or_it_is_gone(tmp_path, source):
    make, files = Maker(), open_files(tmp_path)
    path = files.write("a", [source], make)
    os.utime(source, ns=(1, 1))
    files.write("a", [source], make)
    assert make.num_calls == 2
    path.unlink()
    files.write("a", [source], make)
    assert make.num_calls == 3


def test_other_settings_have_other_files(tmp_path, source):
    make = Maker()
    first = open_files(tmp_path, classes=["cat"]).write("a", [source], make)
    assert open_files(tmp_path, classes=["dog"]).write("a", [source], make) != first
    assert make.num_calls == 2


def test_a_damaged_index_only_costs_time(tmp_path, source):
    make, files = Maker(), open_files(tmp_path)
    files.write("a", [source], make)
    for text in ("[1, 2", '"text"', "[[1]]"):
        (files.folder / "index.json").write_text(text)
        open_files(tmp_path).write("a", [source], make)
    assert make.num_calls == 4


def test_a_source_that_is_missing_and_a_folder_that_cannot_be_written_are_told(tmp_path, source):
    with pytest.raises(DataError, match=r"gone\.json: No such file"):
        open_files(tmp_path).write("a", [source.parent / "gone.json"], Maker())
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written .*kept under checkpoint_dir"):
        open_files(tmp_path).write("a", [source], Maker())


def conversions(source, makers):
    return [Conversion(f"{number}", [source], make) for number, make in enumerate(makers)]


@pytest.mark.parametrize("number", [2, 2 * FEW])
def test_many_files_are_made_once_with_their_facts(tmp_path, source, number):
    """In this process or, if there are many, in others."""

    def make(value):
        return np.full((2, 2), value, np.uint8), {"value": value}

    makers = [lambda value=value: make(value) for value in range(number)]
    ticks = []
    first = open_files(tmp_path).write_many(conversions(source, makers), 2, lambda: ticks.append(1))
    assert len(ticks) == number
    assert [(read_mask(one.path)[0, 0].item(), one.facts, one.problem) for one in first] == [
        (value, {"value": value}, "") for value in range(number)
    ]
    again = open_files(tmp_path).write_many(conversions(source, [None] * number), 2, lambda: None)  # nothing is called
    assert again == first


def test_bad_sources_are_told_and_tried_again(tmp_path, source):
    def refuse():
        raise DataError("its points are nonsense")

    good = lambda: (np.zeros((2, 2), np.uint8), {})  # noqa: E731
    found = open_files(tmp_path).write_many(conversions(source, [good, refuse]), 2, lambda: None)
    assert [one.problem for one in found] == ["", "its points are nonsense"]
    found = open_files(tmp_path).write_many(conversions(source, [None, good]), 2, lambda: None)
    assert [one.problem for one in found] == ["", ""]


def test_what_was_made_before_an_error_is_kept(tmp_path, source):
    make = Maker()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_files(tmp_path).write_many(conversions(source, [lambda: (make(), {}), interrupt]), 2, lambda: None)
    open_files(tmp_path).write_many(conversions(source, [lambda: (make(), {})]), 2, lambda: None)
    assert make.num_calls == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path, source):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written .*kept under checkpoint_dir"):
        open_files(tmp_path).write_many(conversions(source, [lambda: (np.zeros((2, 2), np.uint8), {})]), 2, lambda: None)
