"""Which images a model is evaluated on, and what is refused by name."""

import dataclasses
import io
import re
import shutil

import numpy as np
import pytest

from helpers.evaluated_models import bright, write_pairs
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.data.formats.table import split_csv_text
from unet_trainer.data.splits import Split
from unet_trainer.images.image_decoding import write_image
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding
from unet_trainer.inference.evaluation_data import (
    check_comparable,
    check_same_classes,
    find_source,
    load_evaluation_data,
    run_folder_of,
)
from unet_trainer.system.console import Console

KNOWN = dataclasses.replace(make_spec(), coding=MaskCoding((0, 255)))
SQUARE = np.zeros((8, 8), np.uint8)
SQUARE[2:6, 2:6] = 1


def write_data(folder, num_pairs=4, foreground=255):
    return write_pairs(folder, [(bright(SQUARE), SQUARE * foreground)] * num_pairs)


@pytest.fixture
def run(tmp_path):
    """A run's folder, with data of four pairs: 0, 1, 2 train and 3 validates. The model's file is not needed."""
    pairs = write_data(tmp_path / "data")
    return make_run(tmp_path / "runs/one", tmp_path / "data", pairs[:3], pairs[3:])


def make_run(folder, data_dir, train, val, **settings):
    folder.mkdir(parents=True)
    settings = {"data_dir": data_dir, "mask_values": [0, 255], **settings}
    (folder / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    (folder / "split.csv").write_text(split_csv_text(Split(train, val, ""), data_dir))
    return folder


def load(model_file, split=None, known=KNOWN, **overrides):
    source = find_source(model_file, overrides, known.num_classes)
    return load_evaluation_data(source, known, overrides, split, Console(io.StringIO()))


def names(data):
    return [pair.image.name for pair in data.pairs]


def test_a_file_outside_of_a_run_needs_data_dir(tmp_path):
    (tmp_path / "config.yaml").touch()  # empty: the defaults, and with them the data of the demo, are not the run's
    assert run_folder_of(tmp_path / "model.pt") is None
    with pytest.raises(UserError, match=r"^data_dir: .*model\.pt is not in a run folder.*data_dir=FOLDER"):
        load(tmp_path / "model.pt")
    write_data(tmp_path / "data")
    assert len(load(tmp_path / "model.pt", data_dir=str(tmp_path / "data")).pairs) == 4


def test_a_folder_that_is_divided_is_evaluated_on_the_part_that_is_named(tmp_path):
    for part, num_pairs in (("train", 3), ("val", 2)):
        write_data(tmp_path / "data" / part, num_pairs)
    where = {"data_dir": str(tmp_path / "data")}
    message = r"^--split: .*data has no test images with masks; it has train, val .*; need test/images and test/masks"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "model.pt", "test", **where)
    write_data(tmp_path / "data/test", 4)  # which training leaves alone
    assert load(tmp_path / "model.pt", **where).split == "val"
    parts = {name: load(tmp_path / "model.pt", name, **where) for name in (None, "train", "test", "all")}
    assert [len(data.pairs) for data in parts.values()] == [2, 3, 4, 9]
    assert parts["test"].rule == "test of train/images/ + train/masks/, same names; folders train and val"
    own = make_run(tmp_path / "runs/one", tmp_path / "data", [], [])
    assert len(load(own / "best.pt", "test").pairs) == 4


def test_rows_of_test_in_a_split_file_are_the_test_split(tmp_path):
    write_data(tmp_path / "data", 4)
    parts = enumerate(["train", "val", "test", "test"])
    rows = [f"images/{number}.png,masks/{number}.png,{part}" for number, part in parts]
    (tmp_path / "data/split.csv").write_text("\n".join(["image,mask,split", *rows]))
    where = {"data_dir": str(tmp_path / "data"), "split_file": "split.csv"}
    assert names(load(tmp_path / "model.pt", **where)) == ["1.png"]
    assert names(load(tmp_path / "model.pt", "test", **where)) == ["2.png", "3.png"]
    own = make_run(tmp_path / "runs/one", tmp_path / "data", [], [], split_file="split.csv")
    assert names(load(own / "best.pt", "test")) == ["2.png", "3.png"]


def test_a_run_is_evaluated_on_what_it_was_validated_on_and_data_that_moved_are_told_how_to_be_named(run, tmp_path):
    data = load(run / "best.pt")
    assert (names(data), data.split, data.source.is_own) == (["3.png"], "val", True)
    assert names(load(run / "best.pt", "train")) == ["0.png", "1.png", "2.png"]
    assert names(load(run / "best.pt", "all")) == ["0.png", "1.png", "2.png", "3.png"]
    shutil.move(tmp_path / "data", tmp_path / "moved")
    with pytest.raises(UserError) as raised:
        load(run / "best.pt")
    assert str(raised.value).splitlines() == [
        f"split_file: {run / 'split.csv'}:",
        f"  no folder {tmp_path / 'data'} (4 rows)",
        f"If the data have moved: data_dir=FOLDER split_file={run / 'split.csv'}",
    ]
    data = load(run / "best.pt", data_dir=str(tmp_path / "moved"), split_file=str(run / "split.csv"))
    assert names(data) == ["3.png"]


def test_masks_with_values_that_the_model_does_not_know_are_named_and_can_be_explained(tmp_path):
    write_data(tmp_path / "data", 2, foreground=1)
    where = {"data_dir": str(tmp_path / "data")}
    with pytest.raises(UserError) as refusal:
        load(tmp_path / "model.pt", **where)
    said = str(refusal.value)
    assert "2 masks with values that belong to no class of the model (0 → background, 255 → foreground)" in said
    assert re.search(r"/masks/0\.png: 1 \(25\.0% of pixels\)\n.*/masks/1\.png: 1 \(25\.0% of pixels\)$", said)
    assert "mask_values=[...] gives the value of each class of the model" in said
    data = load(tmp_path / "model.pt", **where, mask_values="[0, 1]", ignore_value="[255, 0, 0]")
    assert (data.coding.values, data.coding.ignored) == ((0, 1), (COLOUR + 0xFF0000,))
    known = dataclasses.replace(KNOWN, coding=data.coding)
    data = load(tmp_path / "model.pt", known=known, **where, ignore_value="[0, 0, 255]")  # a colour, not three values
    assert (data.coding.values, data.coding.ignored) == ((0, 1), (COLOUR + 0x0000FF,))


@pytest.mark.parametrize(
    ("coding", "foreground"),
    [(MaskCoding(None, 127), 1), (MaskCoding((0, 1), ignore_value=255), 255)],
    ids=["threshold above all values", "foreground taken as void"],
)
def test_masks_that_would_silently_be_all_background_are_refused(tmp_path, coding, foreground):
    write_data(tmp_path / "data", 2, foreground)
    known = dataclasses.replace(KNOWN, coding=coding)
    message = rf"^mask_values: the masks hold the values 0, {foreground}, and by the model's coding"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "model.pt", known=known, data_dir=str(tmp_path / "data"))


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    pairs = write_data(tmp_path / "data", 5)
    pairs[0].image.write_bytes(b"")
    write_image(pairs[1].mask, np.zeros((9, 9), np.uint8))
    write_image(pairs[2].mask, SQUARE * 9)
    write_image(pairs[3].image, bright(SQUARE).astype(np.uint16))
    np.save(tmp_path / "data/images/4.npy", np.zeros((8, 8, 5), np.uint8))
    pairs[4].image.unlink()
    with pytest.raises(UserError) as refusal:
        load(tmp_path / "model.pt", data_dir=str(tmp_path / "data"))
    for part in (
        "0.png: the file is empty",
        "1.png: 9×9, its image",
        "2.png: 9 (25.0% of pixels)",
        "2 images of a kind that the model does not know",
        "3.png: 16-bit values; the model was trained on 8-bit images",
        "4.npy: 5 channels; the model was trained on images of 3",
    ):
        assert part in str(refusal.value)


def test_rgb_images_without_colour_are_grey_for_a_grey_model(tmp_path):
    pairs = write_data(tmp_path / "data", 2)
    known = dataclasses.replace(KNOWN, image=dataclasses.replace(KNOWN.image, channels=1, mean=(100.0,), std=(50.0,)))
    assert len(load(tmp_path / "model.pt", known=known, data_dir=str(tmp_path / "data")).pairs) == 2
    coloured = bright(SQUARE)
    coloured[0, 0] = (255, 0, 0)
    write_image(pairs[1].image, coloured)
    with pytest.raises(UserError, match=r"1\.png: RGB in colour; the model was trained on grey images: convert them"):
        load(tmp_path / "model.pt", known=known, data_dir=str(tmp_path / "data"))


def test_runs_with_other_validation_images_are_not_compared(run, tmp_path):
    pairs = write_data(tmp_path / "data")
    other = make_run(tmp_path / "runs/two", tmp_path / "data", pairs[2:], pairs[:2]) / "best.pt"
    data = load(run / "best.pt")
    with pytest.raises(UserError) as refusal:
        check_comparable(data, run / "best.pt", other)
    said = str(refusal.value)
    assert "the val images of" in said
    assert "differ (1 and 2, of which 0 are the same)" in said
    assert f"split_file={run / 'split.csv'}" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id_names": ("sky", "road")}, "the classes of other are sky, road; need background, foreground"),
        ({"coding": MaskCoding((255, 0))}, "mask value 0 is another class, or none, for other"),
        ({"coding": MaskCoding((0, 1))}, "mask value 255 is another class, or none, for other"),
    ],
    ids=["names", "turned", "ids"],
)
def test_models_of_other_classes_are_not_compared(run, changes, message):
    data = load(run / "best.pt")
    with pytest.raises(UserError, match=f"^--compare: {message}"):
        check_same_classes(data, KNOWN, dataclasses.replace(KNOWN, **changes), "other")
    check_same_classes(data, KNOWN, dataclasses.replace(KNOWN, coding=MaskCoding(None)), "other")  # 255 is not 0
