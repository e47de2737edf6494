"""Files made from other files: written once, again when a source changes, never beside the user's data."""

from __future__ import annotations

import os

import numpy as np
import pytest

from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.images.image_files import DataError, read_mask


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
