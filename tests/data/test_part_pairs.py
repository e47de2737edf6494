"""The pairs of one part whose masks are objects, classes or pages: real files, merged and split. Plain ones are in test_folder_pairs."""

import io

import numpy as np
import pytest

from helpers.layouts import write
from unet_trainer.config.load import load_config
from unet_trainer.data.find import find_dataset
from unet_trainer.data.pairs import Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import read_mask
from unet_trainer.images.row_writers import PngWriter
from unet_trainer.system.console import Console

SIDE = 12
WHALE = {"class_names": ["background", "sea", "whale"]}


def disc(row, column, radius=3):
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return (np.hypot(rows - row, columns - column) <= radius).astype(np.uint8) * 255


def noise(seed):
    return np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3)).astype(np.uint8)


@pytest.fixture
def find(tmp_path):
    def find(**settings):
        places = {"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}
        return find_dataset(load_config({**places, **settings}), Console(io.StringIO()))

    return find


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def test_one_file_an_object_becomes_a_mask_of_all_objects(data, find):
    for index, name in enumerate(("0a", "1b", "2c")):
        write(data / name / "images" / f"{name}.png", noise(index))
        for number in range(index + 1):
            write(data / name / "masks" / f"{name}{number:04x}.png", disc(2 + 3 * number, 3))
    found = find()
    assert [pair.name for pair in found.pairs] == ["0a/0a", "1b/1b", "2c/2c"]
    assert found.rule == "*/images/ + */masks/, a mask file for each object, 6 files merged"
    np.testing.assert_array_equal(read_mask(found.pairs[2].mask), disc(2, 3) | disc(5, 3) | disc(8, 3))
    assert found.pairs[2].shown_mask == f"{data / '2c/masks/2c0000.png'} and 2 more"
    assert (found.blocking_message, found.notices, found.num_classes) == ("", (), None)
    bad = data / "2c/masks/2c0001.png"
    bad.write_bytes(b"")
    assert find().blocking_message.endswith(f"be used:\n  Fix: repair these files\n  {bad}: the file is empty")


def write_whales(data, sea=(0, 1, 2), whale=(1, 2), names=("sea", "whale")):
    for index in range(3):
        write(data / f"images/{index}.jpg", noise(index))
    for name, numbers, mask in zip(names, (sea, whale), (disc(6, 3, 3), disc(6, 7, 2)), strict=True):
        for index in numbers:
            write(data / f"masks/{name}/{index}.png", mask)


def test_one_folder_a_class_becomes_masks_of_class_ids(data, find):
    write_whales(data)
    found = find()
    assert (found.class_names, found.num_classes) == (("background", "sea", "whale"), 3)
    assert found.rule == "images/ + masks/, a mask file for each class: sea, whale"
    only_sea, both = read_mask(found.pairs[0].mask), read_mask(found.pairs[1].mask)
    np.testing.assert_array_equal(only_sea, disc(6, 3, 3) // 255)
    np.testing.assert_array_equal(both == 2, disc(6, 7, 2) > 0)
    shared = int(((disc(6, 3, 3) > 0) & (disc(6, 7, 2) > 0)).sum())
    assert shared > 0
    wins = "the later of sea, whale wins (class_names sets another order)"
    assert found.notices == (f"{2 * shared} pixels in 2 of 3 masks belong to several classes: {wins}",)


def test_masks_of_several_readers_are_not_merged(data, find):
    write_whales(data, names=("annotator1", "annotator2"))
    with pytest.raises(Question, match="3 images without a mask, 5 masks without an image"):
        find()
    assert len(find(mask_dir="masks/annotator1").pairs) == 3


def test_folders_of_which_each_image_is_in_one_may_be_batches_or_classes(data, find):
    write_whales(data, sea=(0, 1), whale=(2,))
    with pytest.raises(Question, match=r"one of .*masks/sea, whale; if these are classes; set:\n  class_names: \[back"):
        find()
    assert find(**WHALE).class_names == ("background", "sea", "whale")


@pytest.mark.parametrize(("folders", "answer"), [
    (["final"], None),  # as archives have it
    (["batch1", "batch2"], None),  # half of the masks in each
    (["ids", "color"], r"kinds of masks for the same images: color, ids; set one of these:\n  mask_dir: masks/color\n  mask_dir: masks/ids"),
])  # fmt: skip
def test_a_folder_of_masks_with_several_values_is_no_class(data, find, folders, answer):
    for index in range(4):
        write(data / f"images/{index}.png", noise(index))
        ids = (disc(4, 4, 2) > 0) + 2 * (disc(9, 9, 2) > 0)
        chosen = folders if answer else [folders[index % len(folders)]]
        for folder in chosen:
            write(data / f"masks/{folder}/{index}.png", ids.astype(np.uint8) * (20 if folder == "color" else 1))
    if answer is None:
        found = find()
        assert (len(found.pairs), found.class_names, found.problems) == (4, None, ())
    else:
        with pytest.raises(Question, match=answer):
            find()
        assert len(find(mask_dir=f"masks/{folders[0]}").pairs) == 4


def test_validation_has_the_classes_of_train(data, find):
    for part, names in (("train", ("sea", "whale")), ("val", ("whale",))):
        for index in range(2):
            write(data / part / f"images/{index}.png", noise(index))
            for number, name in enumerate(names):
                write(data / part / f"masks/{name}/{index}.png", disc(3 + 5 * number, 4, 2))
    found = find()
    assert found.class_names == ("background", "sea", "whale")
    val = [pair for pair in found.pairs if pair.part == "val"]
    assert sorted(np.unique(read_mask(val[0].mask))) == [0, 2]  # not 1: whale is the second class
    (data / "val/masks/whale").rename(data / "val/masks/boat")
    with pytest.raises(DataError, match=r"val/images/0\.png has masks of boat; need the classes that train has"):
        find()


def test_what_is_wrong_with_test_alone_stops_no_training(data, find):
    for part, names in (("train", ("sea", "whale")), ("test", ("sea", "boat"))):
        for index in range(3):
            write(data / part / f"images/{index}.png", noise(index))
            for number, name in enumerate(names[: 1 + index]):
                write(data / part / f"masks/{name}/{index}.png", disc(3 + 5 * number, 4, 2))
    (data / "test/masks/sea/0.png").write_bytes(b"damaged")
    found = find()
    assert (len(found.pairs), found.test, found.problems) == (3, (), ())
    (notice,) = found.notices
    assert notice.startswith("test/images/ cannot be used by evaluate: ")
    assert "test/images/1.png has masks of boat; need the classes that train has" in notice


def test_masks_that_are_all_results_are_trained_on_and_told(data, find):
    for index, name in enumerate("abc"):
        write(data / f"images/{name}.jpg", noise(index))
        (data / "masks").mkdir(exist_ok=True)
        with (data / f"masks/{name}.png").open("wb") as file:
            writer = PngWriter(file, (SIDE, SIDE), np.uint8)
            writer.write(disc(5, 5))
            writer.finish()
    found = find()
    assert len(found.pairs) == 3
    written = f"masks in {data / 'masks'} were written by predict, such as a.png: training learns from what a model saw"
    assert found.notices == (written,)
