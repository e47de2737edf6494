"""The pairs of one part whose masks are objects, classes or pages: real files, merged and split. Plain ones are in test_folder_pairs."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
import tifffile

from unet_trainer.config.load import load_config
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.problems import Question
from unet_trainer.images.image_files import read_image, read_mask
from unet_trainer.system.console import Console

SIDE = 12


def disc(row, column, radius=3):
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return (np.hypot(rows - row, columns - column) <= radius).astype(np.uint8) * 255


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels)


def noise(seed):
    return np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3)).astype(np.uint8)


@pytest.fixture
def find(tmp_path):
    def find(**settings):
        config = load_config({"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints"), **settings})
        return find_dataset(config, Console(io.StringIO()))

    return find


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


# Objects


def write_bowl(data, place="", ids=("0a", "1b", "2c")):
    for index, name in enumerate(ids):
        write(data / place / name / "images" / f"{name}.png", noise(index))
        for number in range(index + 1):
            write(data / place / name / "masks" / f"{name}{number:04x}.png", disc(2 + 3 * number, 3))


def test_one_file_an_object_becomes_a_mask_of_all_objects(data, find):
    write_bowl(data)
    found = find()
    assert [pair.name for pair in found.pairs] == ["0a/0a", "1b/1b", "2c/2c"]
    assert found.rule == "*/images/ + */masks/ in 3 folders, a mask file for each object, 6 files merged"
    np.testing.assert_array_equal(read_mask(found.pairs[2].mask), disc(2, 3) | disc(5, 3) | disc(8, 3))
    assert found.pairs[2].shown_mask == f"{data / '2c/masks/2c0000.png'} and 2 more"
    assert found.pairs[0].image == data / "0a/images/0a.png"
    assert (found.blocking_message, found.notices, found.num_classes) == ("", (), None)


def test_the_stages_of_the_bowl_are_train_and_test(data, find):
    write_bowl(data, "stage1_train")
    write(data / "stage1_test/9z/images/9z.png", noise(9))
    found = find()
    assert (len(found.pairs), found.test, found.notices) == (3, (), ("1 test image without masks in stage1_test/",))


def test_objects_may_lie_in_a_folder_of_the_images_name(data, find):
    for name in ("a", "b"):
        write(data / f"images/{name}.png", noise(0))
        for number in (1, 2):
            write(data / f"masks/{name}/{number}.png", disc(3 * number, 4))
    found = find()
    assert [pair.name for pair in found.pairs] == ["a", "b"]
    np.testing.assert_array_equal(read_mask(found.pairs[0].mask), disc(3, 4) | disc(6, 4))


def test_a_damaged_file_of_an_object_is_named_by_the_users_path(data, find):
    write_bowl(data)
    bad = data / "2c/masks/2c0001.png"
    bad.write_bytes(b"")
    found = find()
    assert len(found.pairs) == 2
    assert found.blocking_message == f"1 file that cannot be used:\n  Fix: repair these files\n  {bad}: the file is empty"
    assert found.problems[0].lines == (f"{bad}: the file is empty",)


def test_the_users_folders_are_only_read_and_merged_masks_are_found_again(data, tmp_path, find):
    write_bowl(data)
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    first = [pair.mask for pair in find().pairs]
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert all(path.is_relative_to(tmp_path / "checkpoints/.converted") for path in first)
    written = [path.stat().st_mtime_ns for path in first]
    assert [pair.mask for pair in find().pairs] == first
    assert [path.stat().st_mtime_ns for path in first] == written
    write(data / "0a/masks/0a0000.png", disc(9, 9))
    np.testing.assert_array_equal(read_mask(find().pairs[0].mask), disc(9, 9))


# Classes


def write_whales(data, sea=(0, 1, 2), whale=(1, 2)):
    for index in range(3):
        write(data / f"images/{index}.jpg", noise(index))
    for index in sea:
        write(data / f"masks/sea/{index}.png", disc(6, 3, 3))
    for index in whale:
        write(data / f"masks/whale/{index}.png", disc(6, 7, 2))


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
    assert found.notices == (
        f"{2 * shared} pixels in 2 of 3 masks belong to several classes: the later of sea, whale wins (class_names sets another order)",
    )


def test_classes_that_cover_every_pixel_leave_no_background(data, find):
    write_whales(data, whale=(0, 1, 2))
    for index in range(3):
        write(data / f"masks/sea/{index}.png", np.full((SIDE, SIDE), 255, np.uint8))
    for _ in range(2):  # also when the masks were merged before
        found = find()
        assert (found.class_names, found.num_classes) == (("sea", "whale"), 2)
        assert sorted(np.unique(read_mask(found.pairs[1].mask))) == [1, 2]


def test_class_names_set_the_order_and_thereby_what_wins(data, find):
    write_whales(data)
    found = find(class_names=["background", "whale", "sea"], num_classes=3)
    assert found.class_names == ("background", "whale", "sea")
    np.testing.assert_array_equal(read_mask(found.pairs[1].mask) == 2, disc(6, 3, 3) > 0)


def test_an_image_without_a_file_of_any_class_is_unpaired(data, find):
    write_whales(data, sea=(0, 1), whale=(1,))
    found = find()
    assert f"1 image without a mask in {data / 'masks'}" in found.blocking_message
    assert found.blocking_message.endswith("leave out 1 image without a mask; set:\n  unpaired: skip")
    assert len(find(unpaired="skip").pairs) == 2


def test_masks_of_several_readers_are_not_merged(data, find):
    write_whales(data)
    (data / "masks/sea").rename(data / "masks/annotator1")
    (data / "masks/whale").rename(data / "masks/annotator2")
    with pytest.raises(Question) as raised:
        find()
    assert str(raised.value) == (
        f"mask_dir: {data / 'masks'} holds masks of several readers: annotator1, annotator2; set one of these:\n"
        "  mask_dir: masks/annotator1\n  # or\n  mask_dir: masks/annotator2\n  # or\n"
        "  num_classes: 3\n  class_names: [background, annotator1, annotator2]"
    )
    assert len(find(**raised.value.choices[0].settings).pairs) == 3
    assert find(**raised.value.choices[2].settings).num_classes == 3


def test_folders_that_mark_the_same_pixels_are_asked_for(data, find):
    for index in range(3):
        write(data / f"images/{index}.png", noise(index))
        write(data / f"masks/anna/{index}.png", disc(6, 6, 4))
        write(data / f"masks/bert/{index}.png", disc(6, 7, 4))
    with pytest.raises(
        Question, match=r"mask_dir: anna/ and bert/ in .* mark the same pixels \(IoU 0\.\d+\); two readings of one thing\?"
    ):
        find()
    assert find(num_classes=3, class_names=["background", "anna", "bert"]).num_classes == 3


def test_folders_of_which_each_image_is_in_one_are_batches_and_the_lines_for_classes_are_said(data, find):
    write_whales(data, sea=(0, 1), whale=(2,))
    found = find()
    assert (len(found.pairs), found.class_names) == (3, None)
    assert found.notices == (
        f"the folders in {data / 'masks'} are taken as parts of one set: sea/, whale/; if they are classes, set:\n"
        "  num_classes: 3\n  class_names: [background, sea, whale]",
    )
    assert find(num_classes=3, class_names=["background", "sea", "whale"]).class_names == ("background", "sea", "whale")


def test_files_of_classes_beside_each_image_are_named_by_their_class(data, find):
    for case in ("p1", "p2"):
        write(data / case / "images/scan.png", noise(0))
        write(data / case / "masks/liver.png", disc(6, 6, 5))
        write(data / case / "masks/tumour.png", disc(6, 6, 1))
    found = find()
    assert (found.class_names, [pair.name for pair in found.pairs]) == (("background", "liver", "tumour"), ["p1/scan", "p2/scan"])
    assert sorted(np.unique(read_mask(found.pairs[0].mask))) == [0, 1, 2]


def test_validation_has_the_classes_of_train(data, find):
    for part, names in (("train", ("sea", "whale")), ("val", ("whale",)), ("test", ("boat", "whale"))):
        for index in range(2):
            write(data / part / f"images/{index}.png", noise(index))
            for number, name in enumerate(names):
                write(data / part / f"masks/{name}/{index}.png", disc(3 + 5 * number, 4, 2))
    found = find()
    assert found.class_names == ("background", "sea", "whale")
    val = [pair for pair in found.pairs if pair.part == "val"]
    assert sorted(np.unique(read_mask(val[0].mask))) == [0, 2]  # not 1: whale is the second class
    assert found.test == ()
    assert found.notices[-1].startswith("test/images/ cannot be used by evaluate: ")
    assert "holds classes that the training masks do not have: boat" in found.notices[-1]


# Stacks


def test_the_pages_of_two_stacks_are_pairs(data, find):
    data.mkdir()
    images = np.random.default_rng(0).integers(0, 255, (11, SIDE, SIDE)).astype(np.uint8)
    labels = np.stack([disc(index, 6) for index in range(11)])
    tifffile.imwrite(data / "images.tif", images, photometric="minisblack")
    tifffile.imwrite(data / "labels.tif", labels, photometric="minisblack")
    found = find()
    assert found.rule == "image and mask side by side, paired like images ↔ labels, 11 pages of 1 stack"
    assert [pair.name for pair in found.pairs] == [f"images/{index:02d}" for index in range(11)]
    third = found.pairs[3]
    assert (third.shown_image, third.shown_mask) == (f"{data / 'images.tif'}, page 3", f"{data / 'labels.tif'}, page 3")
    np.testing.assert_array_equal(read_image(third.image)[:, :, 0], images[3])
    np.testing.assert_array_equal(read_mask(third.mask), labels[3])


def test_stacks_in_folders_are_groups_by_their_names(data, find):
    for name in ("s1", "s2"):
        for folder, pages in (("images", 20), ("masks", 200)):
            (data / folder).mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(data / folder / f"{name}.tif", np.full((3, SIDE, SIDE), pages, np.uint8), photometric="minisblack")
    found = find(group_pattern=r"^(s\d)/")
    assert [(pair.name, pair.group) for pair in found.pairs[2:4]] == [("s1/2", "s1"), ("s2/0", "s2")]
    assert found.rule == "images/ + masks/, same names, 6 pages of 2 stacks"


def test_the_stacks_of_the_isbi_challenge_pair_up_and_its_test_stack_may_be_skipped(data, find):
    data.mkdir()
    for name in ("train-volume", "train-labels", "test-volume"):
        tifffile.imwrite(data / f"{name}.tif", np.stack([disc(index, 5) for index in range(4)]), photometric="minisblack")
    found = find()
    assert found.blocking_message.endswith("\n  unpaired: skip")
    assert len(find(**found.suggested).pairs) == 4
