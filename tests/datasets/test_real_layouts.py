"""Folders as datasets come, with files of real encoders: found, checked and read for training without moving a file."""

from __future__ import annotations

import shutil

import pytest

from helpers.layouts import (
    COUNT,
    disc,
    photo,
    stacks,
    write,
)
from helpers.runs import stop_after
from train_unet import main, train

# Through training


@pytest.mark.usefixtures("small_network")
def test_data_beside_checkpoints_is_the_same_at_the_second_start(tiny_config, tmp_path, monkeypatch, capsys):
    """data_dir: . with checkpoints/ in it: the pictures of the first run were taken for images."""
    monkeypatch.chdir(tmp_path)
    for index in range(COUNT):
        write(tmp_path / "images" / f"{index}.png", photo(index))
        write(tmp_path / "masks" / f"{index}_mask.png", disc(index))
    settings = {**tiny_config, "data_dir": ".", "checkpoint_dir": "checkpoints", "num_epochs": 1}
    assert main(["check", "data_dir=."]) == 0
    first = train(settings)
    assert (first.run_dir / "samples").is_dir()
    assert main(["check", "data_dir=."]) == 0
    second = train(settings)
    capsys.readouterr()
    assert (second.run_dir / "split.csv").read_text() == (first.run_dir / "split.csv").read_text()


@pytest.mark.usefixtures("small_network")
def test_a_run_on_converted_files_goes_on_when_they_were_deleted(tiny_config, tmp_path):
    stacks(tmp_path / "data")
    config = {**tiny_config, "data_dir": str(tmp_path / "data"), "run_name": "mine"}
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=stop_after(1))
    shutil.rmtree(tmp_path / "checkpoints/.converted")
    assert train(config, resume=str(tmp_path / "checkpoints/mine")).epochs == 2


@pytest.mark.usefixtures("small_network")
def test_a_resumed_run_in_blocks_keeps_its_gap_and_its_test_pairs(tiny_config, tmp_path, capsys):
    for index in range(20):
        write(tmp_path / f"data/images/{index}.png", photo(index))
        write(tmp_path / f"data/masks/{index}.png", disc(index))
    write(tmp_path / "data/test/images/90.png", photo(5))
    write(tmp_path / "data/test/masks/90.png", disc(5))
    config = {**tiny_config, "data_dir": str(tmp_path / "data"), "split": "blocks", "run_name": "mine"}
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=stop_after(1))
    lines = (tmp_path / "checkpoints/mine/split.csv").read_text().splitlines()
    counts = {part: sum(line.split(",")[2] == part for line in lines) for part in ("train", "val", "test", "unused")}
    assert (counts["val"], counts["test"], counts["train"] + counts["unused"]) == (4, 1, 16)
    capsys.readouterr()
    train(config, resume=str(tmp_path / "checkpoints/mine"))
    said = capsys.readouterr().out
    assert "1 test kept for evaluate (as the run began" in said
    assert "which the run began with, and left out" not in said
