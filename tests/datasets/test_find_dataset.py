"""Where the pairs of data_dir come from: folders first, then annotations, or the rows of a CSV."""

from __future__ import annotations

import json
import shutil

import pytest

from unet_trainer.config.load import load_config
from unet_trainer.datasets.dataset_report import find_dataset
from unet_trainer.images.file_bytes import DataError


def find(data_dir, tmp_path, **settings):
    return find_dataset(load_config({"data_dir": str(data_dir), "checkpoint_dir": str(tmp_path / "runs"), **settings}))


@pytest.fixture
def data(tiny_data, tmp_path):
    return shutil.copytree(tiny_data, tmp_path / "mine")


def annotate(data):
    """One square in each image, as COCO."""
    names = sorted(path.name for path in (data / "images").iterdir())
    images = [{"id": number, "file_name": name, "width": 64, "height": 64} for number, name in enumerate(names)]
    square = [4, 4, 12, 4, 12, 12, 4, 12]
    annotations = [{"id": n, "image_id": n, "category_id": 1, "segmentation": [square]} for n in range(len(names))]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (data / "annotations.json").write_text(json.dumps(content))


def test_a_data_dir_that_is_missing_or_a_file_is_said(tmp_path):
    with pytest.raises(DataError, match=r"^data_dir: .*nowhere does not exist; need a folder with images/ and masks/$"):
        find(tmp_path / "nowhere", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^data_dir: .*file is not a folder"):
        find(tmp_path / "file", tmp_path)


def test_masks_win_over_annotations_and_annotations_over_nothing(data, tmp_path):
    annotate(data)
    found = find(data, tmp_path)
    assert found.num_classes is None
    assert found.pairs[0].mask.is_relative_to(data / "masks")
    shutil.rmtree(data / "masks")
    drawn = find(data, tmp_path)
    assert (drawn.num_classes, drawn.class_names) == (1, ("cat",))
    assert [pair.image for pair in drawn.pairs] == [pair.image for pair in found.pairs]
    assert drawn.pairs[0].mask.is_relative_to(tmp_path / "runs")


def test_a_split_file_is_looked_for_here_and_in_data_dir(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^split_file: no file rows\.csv or .*mine/rows\.csv$"):
        find(data, tmp_path, split_file="rows.csv")
    pair = find(data, tmp_path).pairs[0]
    rows = f"image,mask,split\nimages/{pair.image.name},masks/{pair.mask.name},train\n"
    (data / "rows.csv").write_text(rows)
    assert [found.part for found in find(data, tmp_path, split_file="rows.csv").pairs] == ["train"]
    (data / "rows.csv").write_text(rows.replace("split", "split,group").replace("train", "train,a"))
    with pytest.raises(DataError, match=r"^group_pattern: rows\.csv has groups of its own"):
        find(data, tmp_path, split_file="rows.csv", group_pattern=r"(\d+)")
