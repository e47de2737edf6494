"""Folders as datasets come, with files of real encoders: found, checked and read for training without moving a file."""

from __future__ import annotations

import os
import shutil

import cv2
import pytest

from helpers.layouts import (
    COUNT,
    bowl,
    cityscapes,
    disc,
    photo,
    stacks,
    write,
)
from helpers.runs import stop_after
from train_unet import main, train
from unet_trainer.config.load import load_config
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.problems import Question


def test_a_question_has_its_answers_for_programs(tmp_path):
    cityscapes(tmp_path / "data")
    with pytest.raises(Question) as raised:
        find_dataset(load_config({"data_dir": str(tmp_path / "data")}))
    assert raised.value.choices[0].settings == {"mask_suffix": "_gtFine_labelTrainIds"}


# Through training

STRANGE = [
    b"K\xe4fer",
    b" leading",
    b"trailing ",
    b"a\rb",
    b"a\nb",
    b'comma,quote"',
    "Zu\u0308ge".encode(),
    "\u4e2d\u6587".encode(),
]


def write_strange(data):
    for index, name in enumerate(STRANGE):
        for folder, pixels in (("images", photo(index)), ("masks", disc(index))):
            (data / folder).mkdir(parents=True, exist_ok=True)
            (data / folder / f"{os.fsdecode(name)}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())


@pytest.mark.usefixtures("small_network")
def test_any_name_of_a_file_is_trained_on_and_goes_on_after_an_interruption(tiny_config, tmp_path, capsys):
    """Not UTF-8, with spaces at either end, with line breaks: nothing of it breaks split.csv, tables or messages."""
    write_strange(tmp_path / "data")
    settings = {**tiny_config, "data_dir": str(tmp_path / "data"), "run_name": "strange"}
    with pytest.raises(KeyboardInterrupt):
        train(settings, on_epoch=stop_after(1))
    result = train(settings, resume=str(tmp_path / "checkpoints/strange"))
    assert result.epochs == 2
    assert b"K\xe4fer.png" in (tmp_path / "checkpoints/strange/split.csv").read_bytes()
    report = tmp_path / "report.json"
    assert (
        main(["check", f"data_dir={tmp_path / 'data'}", f"checkpoint_dir={tmp_path / 'checkpoints'}", "--json", str(report)]) == 0
    )


@pytest.mark.usefixtures("small_network")
def test_a_damaged_file_of_a_strange_name_is_named(tiny_config, tmp_path, capfd):
    write_strange(tmp_path / "data")
    (tmp_path / "data/masks" / f"{os.fsdecode(STRANGE[0])}.png").write_bytes(b"")
    words = [
        "check",
        f"data_dir={tmp_path / 'data'}",
        f"checkpoint_dir={tmp_path / 'checkpoints'}",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(words) == 2
    assert "masks/K\\xe4fer.png: the file is empty" in capfd.readouterr().out
    assert b"K\\udce4fer.png: the file is empty" in (tmp_path / "r.json").read_bytes()


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("is_side_by_side", [False, True])
def test_data_beside_checkpoints_is_the_same_at_the_second_start(tiny_config, tmp_path, monkeypatch, capsys, is_side_by_side):
    """data_dir: . with checkpoints/ in it: the pictures of the first run were taken for images."""
    monkeypatch.chdir(tmp_path)
    for index in range(COUNT):
        write(tmp_path / ("" if is_side_by_side else "images") / f"{index}.png", photo(index))
        write(tmp_path / ("" if is_side_by_side else "masks") / f"{index}_mask.png", disc(index))
    settings = {**tiny_config, "data_dir": ".", "checkpoint_dir": "checkpoints", "num_epochs": 1}
    assert main(["check", "data_dir=."]) == 0
    first = train(settings)
    assert (first.run_dir / "samples").is_dir()
    assert main(["check", "data_dir=."]) == 0
    second = train(settings)
    capsys.readouterr()
    assert (second.run_dir / "split.csv").read_text() == (first.run_dir / "split.csv").read_text()


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("make", [bowl, stacks])
def test_a_run_on_converted_files_goes_on_when_they_were_deleted(make, tiny_config, tmp_path):
    make(tmp_path / "data")
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
