"""Every layout and every kind of masks of docs/data.md: what check prints, and that what it writes trains as it is."""

import io
import json
import re

import numpy as np
import pytest
import yaml
from PIL import Image

from helpers import layouts
from helpers import mask_files as m
from helpers.mask_files import blob, colour, objects, palette, rings, voc_colours, with_gaps, write_dataset
from helpers.project import ROOT
from train_unet import main
from unet_trainer.config.load import load_config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.system.console import Console

pytestmark = pytest.mark.usefixtures("small_network")


def masks(make_mask, extension="png", files=None):
    """Writes pairs with such masks, and further files."""

    def make(data):
        write_dataset(data, make_mask, extension)
        for name, text in (files or {}).items():
            (data / name).write_text(text)

    return make


def camvid(index):
    """Ids 0 to 10 in squares, with thin lines of 11 between some of them."""
    rows, columns = np.mgrid[:48, :48]
    ids = (rows // 12 * 4 + columns // 12 + index) % 11
    return np.where(rows % 24 == 0, 11, ids).astype(np.uint8)


def noisy(index):
    ids = rings(index) * 120
    if index == 3:
        ids[0, :2] = (7, 9)
    return ids


def voc_palette(index):
    return palette(with_gaps(index, VOC_IDS), voc_colours())


def jpeg_colours(data):
    write_dataset(data, blob)
    for path in (data / "masks").iterdir():
        colour(rings(int(path.stem)), COLOURS).save(path.with_suffix(".jpg"), quality=95, subsampling=0)
        path.unlink()


CLASS_FILE = {"class_dict.csv": "name,r,g,b\nground,0,0,0\nroad,255,0,0\ncar,0,0,255\n"}
VOC_IDS = (0, 5, 6, 7, 9, 15, 18)
VOC_NAMES = {"masks/class_names.txt": "\n".join(["_background_", *(f"thing {index}" for index in range(1, 21))])}
CELL = {"classes.txt": "background\ncell\n"}
COLOURS = [(0, 0, 0), (255, 0, 0), (0, 0, 255)]

# What docs/data.md names → what makes it, how many guesses check takes, and what is printed.
LAYOUTS = {
    "same names": (layouts.plain, 0, "images/ + masks/, same names"),
    "a common part": (layouts.renamed, 0, "paired like 21_training.tif ↔ 21_manual1.png"),
    "side by side": (layouts.marked, 0, "image and mask side by side, paired like 0.jpg ↔ 0_mask.png"),
    "two extensions": (layouts.side_by_side, 0, "image and mask side by side, paired like 0.jpg ↔ 0.png"),
    "train, val and test": (layouts.parts, 0, "folders train and val", "20 test kept for evaluate"),
    "sequences": (layouts.sequences, 0, "*/images/ + */masks/, same names"),
    "PASCAL VOC": (layouts.voc, 0, "ImageSets/Segmentation/train.txt and val.txt", "9963 images in no list of"),
    "Cityscapes": (layouts.cityscapes, 1, "mask_suffix: _gtFine_labelTrainIds"),
    "2018 Data Science Bowl": (layouts.bowl, 0, "a mask file for each object, 29461 files merged"),
    "a folder for each class": (layouts.classes, 0, "a mask file for each class: sea, whale"),
    "stacks": (layouts.stacks, 0, "30 pages of 1 stack"),
    "images without masks": (layouts.few_masks, 1, "unpaired: skip  # GUESS: 352 images without a mask in masks"),
    "several folders of masks": (layouts.two_folders_of_masks, 1, "mask_dir: labels", "#   mask_dir: masks"),
    "folders of any names": (layouts.other_names, 1, "mask_dir: by hand", "#   mask_dir: raw"),
    "masks of another size": (layouts.other_sizes, 1, "resize_masks: true  # GUESS: 328 masks of another size than"),
    "results of predict": (layouts.with_results, 0, "9 results of predict left out, such as images/0.png"),
    "a video": (layouts.video, 0, "split: blocks"),
    "an archive": (layouts.archive, 0, "download/mine/images/ + download/mine/masks/, same names"),
    "COCO": (layouts.coco, 0, "annotations/instances.json (COCO), drawn as masks, classes by category id"),
    "LabelMe": (layouts.labelme, 0, "6 JSON files such as 0.json (LabelMe), drawn as masks, classes in alphabetical"),
    "YOLO": (layouts.yolo, 0, "6 text files such as 0.txt (YOLO), drawn as masks, classes in the order of data.yaml"),
    "shards": (layouts.shards, 0, "4 shards, 67.9 MB"),
}
MASKS = {
    "two values": (masks(lambda i: blob(i) * 255), 0, "num_classes: 1 (the masks hold two values)"),
    "ids": (masks(rings), 0, "num_classes: 3 (the masks hold ids 0 to 2)"),
    "ids in 16 bit": (masks(lambda i: rings(i).astype(np.uint16)), 0, "num_classes: 3 (the masks hold ids 0 to 2)"),
    "a palette": (masks(lambda i: palette(rings(i), COLOURS)), 0, "num_classes: 3 (the masks hold ids 0 to 2)"),
    "ids and 255": (masks(m.voc), 0, "255 beside them is taken as void"),
    "ids with gaps and 255": (masks(voc_palette), 0, "hold 7 indices of a palette; 255 beside them is taken as void"),
    "a block of 255": (
        masks(lambda i: with_gaps(i, (0, 2, 5), is_lined=False)),
        1,
        "# GUESS: 255 is ignored",
        "ignore_value: 255",
        "#   mask_values: [0, 2, 5, 255]",
    ),
    "names of ids with gaps": (masks(voc_palette, files=VOC_NAMES), 0, "21 classes in class_names.txt"),
    "names that begin with background": (masks(lambda i: blob(i) * 255, files=CELL), 0, "class_names: [cell]"),
    "white first in a palette": (masks(lambda i: Image.fromarray(blob(i) * 255).quantize(2)), 0, "two values"),
    "void": (masks(camvid), 1, "num_classes: 11", "ignore_value: 11", "#   num_classes: 12"),
    "soft edges": (masks(m.soft), 0, "num_classes: 1 (the masks hold greys around 0 and 255)"),
    "two values as JPEG": (masks(lambda i: blob(i) * 255, "jpg"), 0, "the masks hold greys around 0 and 255"),
    "colours as JPEG": (jpeg_colours, 1, "others go to the nearest", "num_classes: 3"),
    "objects": (
        masks(lambda i: objects(i, 2 + i).astype(np.uint8)),
        1,
        "mask_values: nonzero",
        "# GUESS: every object is",
    ),
    "objects made visible": (masks(lambda i: (objects(i, 2 + i) * 30).astype(np.uint8)), 1, "# GUESS: every object is"),
    "greys": (masks(lambda i: rings(i) * 100), 1, "mask_values: [0, 100, 200]"),
    "colours": (masks(lambda i: colour(rings(i), COLOURS)), 0, "mask_values: [0, [0, 0, 255], [255, 0, 0]]"),
    "a class file": (
        masks(lambda i: colour(rings(i), COLOURS), files=CLASS_FILE),
        0,
        "class_names: [ground, road, car]",
    ),
    "two values without 0": (masks(lambda i: blob(i) * 100 + 38), 1, "mask_values: [38, 138]", "values: [138, 38]"),
    "ids in the red channel": (masks(m.carla), 1, "[0, [1, 0, 0], [7, 0, 0], [8, 0, 0], [10, 0, 0], [12, 0, 0]]"),
    "ids from 1": (masks(lambda i: rings(i) + 1), 0, "num_classes: 3 (the masks hold ids 1 to 3)"),
    "a trimap": (masks(m.trimap), 1, "mask_values: [2, 1]", "#   mask_values: [1, 2]"),
    "noise": (masks(noisy), 1, "unknown_values: ignore", "      9 |           0.01% | masks/3.png"),
    "transparent": (masks(lambda i: m.transparent(blob(i), 255)), 0, "the alpha channel of 8 of 8 masks is the mask"),
    "an id and void": (masks(lambda i: m.with_void(blob(i))), 0, "255 beside them is taken as void"),
}
TRAINED = "train, val and test", "stacks", "COCO", "shards", "masks of another size", "a video", "void", "soft edges"


@pytest.fixture
def small(tiny_config, tmp_path):
    """A config that keeps training short; what it says of the data is nothing."""
    settings = {name: value for name, value in tiny_config.items() if name != "data_dir"}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**settings, "num_epochs": 1, "batch_size": 2, "class_weights": "auto"}))
    return file


def without_numbers(text):
    return re.sub(r"\d+", "#", text)


@pytest.mark.parametrize("kind", [*LAYOUTS, *MASKS])
def test_what_check_writes_trains_as_it_is(kind, small, tmp_path, capsys):
    make, num_guesses, *documented = {**LAYOUTS, **MASKS}[kind]
    data, mine = tmp_path / "data", tmp_path / "mine.yaml"
    make(data)
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    report = tmp_path / "report.json"
    assert main(["check", str(small), f"data_dir={data}", "--write", str(mine), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("# GUESS") == num_guesses
    assert (", with one guess to confirm (" in printed) == (num_guesses == 1)
    for said in documented:
        assert without_numbers(said) in without_numbers(printed)
    block = printed.partition("(--write FILE writes them as a config):\n")[2].partition("\n\nWritten. ")[0]
    assert yaml.safe_load(block) == yaml.safe_load(mine.read_text(encoding="utf-8"))
    assert yaml.safe_load(block) == json.loads(report.read_text(encoding="utf-8"))["settings"]
    assert printed.count(str(data)) == 1  # data_dir, in the settings
    assert not re.findall(
        r"(?<![\d.#])\b1 (?:images|masks|pairs|files|problems|decisions|values|sizes|groups|sets)\b", printed
    )
    assert (tmp_path / "checkpoints/check").is_dir()
    if kind in TRAINED:
        assert main([str(mine)]) == 0
        assert "cannot" not in capsys.readouterr().out
    else:  # training begins with the same report
        assert build_dataset_report(load_config(mine), Console(io.StringIO())).checked().notices is not None
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_every_setting_in_the_tables_of_the_page_is_one_that_check_proposes():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| (?:layout|masks) \| .* \|\n\| --- \| --- \|\n((?:\|.*\n)+)", page)
    assert len(tables) == 3
    said = "\n".join(phrase for row in (*LAYOUTS.values(), *MASKS.values()) for phrase in row[2:])
    for row in "".join(tables).splitlines():
        for setting in re.findall(r"`(\w+: [^`]+)`", row.split(" | ")[-1]):
            assert setting in said, row
