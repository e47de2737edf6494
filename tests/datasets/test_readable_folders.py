"""Folders that may not be read are named, not taken for empty ones."""

from __future__ import annotations

import os

import pytest

from unet_trainer.datasets.readable_folders import refuse_unreadable
from unet_trainer.images.file_bytes import DataError


@pytest.fixture
def closed(monkeypatch):
    """Folders that look closed to this user; root could read them all."""
    names = set()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in names and real(path, mode))
    return names


@pytest.fixture
def data(tmp_path):
    for name in ("images/a", "masks", ".hidden"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


def test_folders_that_may_be_read_pass(data):
    refuse_unreadable(data)
    refuse_unreadable(data, ["images", None, "masks", "none"])
    refuse_unreadable(data / "none")  # missing, which is told elsewhere


@pytest.mark.parametrize("name", ["", "images", "images/a", "masks"])
def test_a_closed_folder_is_named(name, data, closed):
    closed.add(str(data / name))
    with pytest.raises(
        DataError, match=rf"data_dir: {data / name} cannot be read \(Permission denied\); need the permissions r and x"
    ):
        refuse_unreadable(data)


def test_a_closed_folder_that_is_hidden_is_not_searched_anyway(data, closed):
    closed.add(str(data / ".hidden"))
    refuse_unreadable(data)


def test_a_folder_of_the_config_that_lies_elsewhere_is_looked_at(data, tmp_path, closed):
    (tmp_path / "other").mkdir()
    closed.add(str(data / "../other"))
    refuse_unreadable(data)
    with pytest.raises(DataError, match=r"data/\.\./other cannot be read"):
        refuse_unreadable(data, ["../other"])
