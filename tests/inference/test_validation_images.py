"""The validation images of a run are found, or the reason is named why not."""

from __future__ import annotations

import numpy as np
import pytest

from unet_trainer.config.errors import ConfigError
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import write_image
from unet_trainer.inference.validation_images import find_validation_pairs


@pytest.fixture
def run(tmp_path):
    """A run whose split has a train and two val pairs, with their data."""
    data, folder = tmp_path / "data", tmp_path / "run"
    for name in ("images", "masks"):
        (data / name).mkdir(parents=True)
        for number in (1, 2, 3):
            write_image(data / name / f"{number}.png", np.zeros((4, 4), np.uint8))
    folder.mkdir()
    rows = [f"images/{number}.png,masks/{number}.png,{part},," for number, part in ((1, "val"), (2, "train"), (3, "val"))]
    (folder / "split.csv").write_text("\n".join(["image,mask,split,group,name", *rows]))
    (folder / "config.yaml").write_text(f"data_dir: {data}\n")
    return folder


def test_the_val_rows_of_the_split_are_taken(run, tmp_path):
    pairs = find_validation_pairs(run / "best.pt")
    assert [pair.name for pair in pairs] == ["images/1", "images/3"]
    assert pairs[0].mask == tmp_path / "data/masks/1.png"


def test_data_that_moved_are_named(run, tmp_path):
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=rf"^data_dir: {tmp_path}/data does not exist here; data_dir=FOLDER names another place$"):
        find_validation_pairs(run / "best.pt")
    assert len(find_validation_pairs(run / "best.pt", tmp_path / "moved")) == 2


def test_a_given_data_dir_needs_no_config(run, tmp_path):
    (run / "config.yaml").unlink()
    with pytest.raises(DataError, match=r"run has no config\.yaml, which says where the data are; data_dir=FOLDER says it too$"):
        find_validation_pairs(run / "best.pt")
    assert len(find_validation_pairs(run / "best.pt", tmp_path / "data")) == 2


def test_a_file_without_its_run_has_none(tmp_path):
    with pytest.raises(DataError, match=rf"^{tmp_path} has no split\.csv, which names them$"):
        find_validation_pairs(tmp_path / "model.onnx")


def test_a_missing_image_is_named(run, tmp_path):
    (tmp_path / "data/images/3.png").unlink()
    with pytest.raises(DataError, match=r"line 4: no file .*images/3\.png"):
        find_validation_pairs(run / "best.pt")


def test_a_broken_config_is_named(run):
    (run / "config.yaml").write_text("data_dir: [")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        find_validation_pairs(run / "best.pt")
