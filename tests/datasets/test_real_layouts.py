"""Folders as datasets come, with files of real encoders: found, checked and read for training without moving a file."""

from __future__ import annotations

import io
import os
import re
import shutil

import cv2
import pytest

from helpers.layouts import (
    COUNT,
    archive,
    bowl,
    cityscapes,
    classes,
    disc,
    few_masks,
    parts,
    photo,
    sequences,
    side_by_side,
    stacks,
    voc,
    write,
)
from helpers.project import ROOT
from helpers.runs import stop_after
from helpers.steps import CPU, CPU_FACTS
from train_unet import main, train
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.problems import Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset, build_loaders
from unet_trainer.training.settings import build_settings

# Layout → (what makes it, settings, pairs to train, to validate and to test on, what docs/data.md says is printed)
LAYOUTS = {
    "train, val and test": (parts, {}, (4, 1, 1), ["folders train and val", "20 test kept for evaluate"]),
    "one name, two extensions": (side_by_side, {}, (5, 1, 0), ["image and mask side by side, paired like 0.jpg ↔ 0.png"]),
    "sequences": (sequences, {}, (5, 1, 0), ["*/images/ + */masks/ in 2 folders"]),
    "PASCAL VOC": (
        voc,
        {},
        (4, 2, 0),
        ["ImageSets/Segmentation/train.txt and val.txt", "9963 images in no list of ImageSets/Segmentation left out"],
    ),
    "Cityscapes": (cityscapes, {"mask_suffix": "_gtFine_labelTrainIds"}, (4, 1, 1), ["20 test kept for evaluate"]),
    "2018 Data Science Bowl": (bowl, {}, (5, 1, 0), ["a mask file for each object, 29461 files merged"]),
    "a folder for each class": (classes, {"num_classes": 2}, (5, 1, 0), ["a mask file for each class: sea, whale"]),
    "stacks": (stacks, {}, (5, 1, 0), ["30 pages of 1 stack"]),
    "images without masks": (few_masks, {"unpaired": "skip"}, (5, 1, 0), ["352 images without a mask left out"]),
    "a folder around everything": (archive, {}, (10, 2, 0), []),
}


def without_numbers(text):
    return re.sub(r"\d+|\ba\.(?=jpg|png)", "#", text).replace("#.jpg", "#jpg").replace("#.png", "#png")


@pytest.fixture
def prepare(tiny_config, tmp_path):
    """Does what training does with a dataset before it builds a model."""

    def prepare(**settings):
        config = load_config(tiny_config, {"data_dir": str(tmp_path / "data"), "batch_size": 2, **settings})
        output = io.StringIO()
        console = Console(output)
        dataset = build_dataset(config, console, None)
        settings = build_settings(config, CPU_FACTS, dataset, console)
        return dataset, build_loaders(settings.taken, dataset, CPU, console), output.getvalue()

    return prepare


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_for_training_as_it_is(layout, prepare, tmp_path):
    make, settings, (num_train, num_val, num_test), documented = LAYOUTS[layout]
    make(tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    dataset, loaders, printed = prepare(**settings)
    split = dataset.split
    assert (len(split.train), len(split.val), len(split.test)) == (num_train, num_val, num_test)
    for said in documented:
        assert f"`{said}`" in (ROOT / "docs/data.md").read_text()
        assert without_numbers(said) in without_numbers(printed)
    batch = loaders.train.read(0, 0)
    assert (batch.images.shape[0], int(batch.masks.max())) == (2, settings.get("num_classes", 2) - 1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before


@pytest.mark.parametrize(("layout", "needed"), [("Cityscapes", "mask_suffix"), ("images without masks", "unpaired")])
def test_what_training_says_about_a_layout_answers_it(layout, needed, prepare, tmp_path):
    """The lines of the message, pasted: the first of several."""
    LAYOUTS[layout][0](tmp_path / "data")
    with pytest.raises(DataError) as raised:
        prepare()
    message = str(raised.value).rpartition("\nTo see all of it")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip().startswith(f"{needed}: ") and "holds" not in line]
    dataset, _, _ = prepare(**parse_yaml(lines[0]))
    assert len(dataset.split.train) == LAYOUTS[layout][2][0]


def test_a_question_has_its_answers_for_programs(prepare, tmp_path):
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
@pytest.mark.parametrize("layout", ["2018 Data Science Bowl", "stacks"])
def test_a_run_on_converted_files_goes_on_when_they_were_deleted(layout, tiny_config, tmp_path):
    make, settings, _, _ = LAYOUTS[layout]
    make(tmp_path / "data")
    config = {**tiny_config, **settings, "data_dir": str(tmp_path / "data"), "run_name": "mine"}
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
