"""The block of settings that `check` ends with: valid YAML with the answers, their reasons, and the other answers as comments."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.report_data import HEIGHT, WIDTH, Dataset
from unet_trainer.commands.data_check import block_lines, block_settings
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def stripes(*values):
    return np.repeat(np.array(values, np.uint8), HEIGHT // len(values))[:, None].repeat(WIDTH, 1)


def test_the_other_answers_stand_as_comments_below_the_likely_one(data):
    for index in range(6):
        data.mask(index, stripes(3, 9))
    lines = block_lines(data.answered())
    assert lines[1:-1] == [
        "# GUESS: 3 is background, 9 is foreground",
        "num_classes: 1",
        "mask_values: [3, 9]",
        "# or in their place: 9 is background, 3 is foreground",
        "#   num_classes: 1",
        "#   mask_values: [9, 3]",
    ]


@pytest.mark.parametrize("name", ["data: #1", "- x", "1e3", "null", "with 'quotes\"", "K\u00e4fer"])
def test_any_name_of_data_dir_is_read_back(name, tmp_path):
    data = Dataset(tmp_path)
    data.folder = data.folder.rename(tmp_path / name)
    answered = data.answered()
    text = "\n".join(block_lines(answered))
    read = load_config(parse_yaml(text))
    assert read.data_dir == str(tmp_path / name)
    assert block_settings(answered)["data_dir"] == str(tmp_path / name)
    assert read == load_config(answered.config, {"num_classes": 1, "mask_values": [0, 255]})
