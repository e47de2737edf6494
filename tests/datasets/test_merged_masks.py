"""Masks of several files: found by their names, merged into one file; what overlaps is counted."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.datasets.layouts import Folders
from unet_trainer.datasets.merged_masks import (
    READERS,
    MaskMerger,
    MaskParts,
    class_parts,
    find_class_files,
    find_object_files,
    order_classes,
)
from unet_trainer.datasets.name_matching import File
from unet_trainer.images.image_files import read_mask

FLAT, UNITS = [Folders(Path("images"), Path("masks"))], [Folders(Path("a/images"), Path("a/masks"), "a/")]


def files(*names):
    """`sub/a` is the file a of the folder sub/."""
    return [File(Path(f"{name}.png"), "".join(name.rpartition("/")[:2]), name.rpartition("/")[2]) for name in names]


def named(parts):
    return None if parts is None else {
        each.image.folder + each.image.stem: [(name, str(path)) for name, path in each.files] for each in parts
    }  # fmt: skip


# Found by names


def test_objects_lie_in_a_folder_with_their_image():
    found = find_object_files(files("a/x", "b/y"), files("a/1", "a/2", "b/3"), UNITS)
    assert named(found) == {"a/x": [("", "a/1.png"), ("", "a/2.png")], "b/y": [("", "b/3.png")]}


def test_objects_lie_in_a_folder_of_the_name_of_their_image():
    found = find_object_files(files("x", "y"), files("x/1", "x/2", "y/1"), FLAT)
    assert named(found) == {"x": [("", "x/1.png"), ("", "x/2.png")], "y": [("", "y/1.png")]}


def test_an_image_without_a_file_has_no_mask():
    assert list(named(find_object_files(files("a/x", "b/y"), files("a/1"), UNITS))) == ["a/x"]


@pytest.mark.parametrize(
    ("images", "masks", "folders"),
    [
        (["a/x", "a/y"], ["a/1", "a/2"], UNITS),  # two images in a folder: which objects are whose?
        (["x", "y"], ["sea/x", "whale/x"], FLAT),
        (["x", "y"], ["x/1", "z/1"], FLAT),
        (["x"], ["x_1", "x_2"], FLAT),
    ],
)
def test_other_layouts_are_no_objects(images, masks, folders):
    assert find_object_files(files(*images), files(*masks), folders) is None


def test_files_of_one_name_in_many_folders_are_classes_and_numbers_are_not():
    found = find_object_files(files("a/x", "b/y"), files("a/liver", "a/tumour", "b/liver", "b/tumour"), UNITS)
    assert named(found)["a/x"] == [("liver", "a/liver.png"), ("tumour", "a/tumour.png")]
    found = find_object_files(files("a/x", "b/y"), files("a/mask1", "a/mask2", "b/mask1", "b/mask2"), UNITS)
    assert {name for each in found for name, _ in each.files} == {""}


def test_each_class_may_have_a_folder_and_lack_some_images():
    found = find_class_files(files("a", "b"), files("sea/a", "sea/b", "whale/b"), Path("images"))
    assert named(class_parts(found)) == {
        "a": [("sea", "sea/a.png")],
        "b": [("sea", "sea/b.png"), ("whale", "whale/b.png")],
    }


def test_names_in_the_folder_of_a_class_may_have_an_affix():
    found = find_class_files(files("a", "b"), files("sea/a_sea", "sea/b_sea", "whale/a_whale", "whale/b_whale"), Path("images"))
    assert [len(each.files) for each in class_parts(found)] == [2, 2]


@pytest.mark.parametrize(
    ("images", "masks"),
    [(["a"], ["sea/a", "b"]), (["sea/a"], ["sea/a", "whale/a"]), (["a"], ["sea/a", "whale/c"])],
    ids=["a mask in no folder", "folders that the images have too", "a mask without an image"],
)
def test_other_layouts_are_no_classes(images, masks):
    assert find_class_files(files(*images), files(*masks), Path("images")) is None


@pytest.mark.parametrize(
    ("class_names", "expected"),
    [
        (None, ["sea", "whale"]),
        (["background", "whale", "sea"], ["whale", "sea"]),
        (["whale", "sea"], ["whale", "sea"]),
        (["background", "x", "y"], ["sea", "whale"]),
    ],
)
def test_class_names_order_the_classes_if_they_name_them(class_names, expected):
    assert order_classes(["whale", "sea"], class_names) == expected


@pytest.mark.parametrize("name", ["annotator1", "rater_2", "Expert A", "1st_manual", "2nd", "reader"])
def test_readers_are_known_by_their_names(name):
    assert READERS.search(name)


@pytest.mark.parametrize("name", ["sea", "whale", "1", "building", "class_3", "landmark"])
def test_classes_are_no_readers(name):
    assert not READERS.search(name)


# Merged


@pytest.fixture
def write(tmp_path):
    """Writes a mask and returns its path."""

    def write(name, pixels):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), np.array(pixels, np.uint8))
        return path

    return write


def merger(tmp_path, *classes):
    return MaskMerger(ConvertedFiles(tmp_path / "data", tmp_path / "checkpoints", "classes", list(classes)), classes)


IMAGE = File(Path("a.png"), "", "a")


def test_objects_become_foreground(tmp_path, write):
    parts = MaskParts(IMAGE, (("", write("1.png", [[255, 0, 0]])), ("", write("2.png", [[1, 0, 1]]))))
    merging = merger(tmp_path)
    assert read_mask(merging.merge("a", parts)).tolist() == [[255, 0, 255]]
    assert merging.notices() == []


def test_of_overlapping_classes_the_later_one_wins_and_the_pixels_are_counted(tmp_path, write):
    parts = MaskParts(IMAGE, (("whale", write("w.png", [[0, 255, 255, 0]])), ("sea", write("s.png", [[1, 1, 1, 0]]))))
    merging = merger(tmp_path, "sea", "whale")
    assert read_mask(merging.merge("a", parts)).tolist() == [[1, 2, 2, 0]]
    notice = "2 pixels in 1 of 1 masks belong to several classes: the later of sea, whale wins (class_names sets another order)"
    assert merging.notices() == [notice]
    other = merger(tmp_path, "whale", "sea")
    assert read_mask(other.merge("a", parts)).tolist() == [[2, 2, 2, 0]]


def test_what_was_counted_is_said_at_the_next_start_too(tmp_path, write):
    parts = MaskParts(IMAGE, (("sea", write("s.png", [[1, 1, 0]])), ("whale", write("w.png", [[0, 255, 255]]))))
    for _ in range(2):
        merging = merger(tmp_path, "sea", "whale")
        merging.merge("a", parts)
        merging.save()
        assert merging.notices()[0].startswith("1 pixels in 1 of 1 masks")


@pytest.mark.parametrize("damage", ["{", "[]", '{"m": 3}', '{"m": {"overlap": "many"}}'])
def test_what_was_counted_is_counted_again_where_the_table_is_damaged(damage, tmp_path, write):
    parts = MaskParts(IMAGE, (("a", write("a.png", [[1, 1, 0]])), ("b", write("b.png", [[0, 1, 0]]))))
    for _ in range(2):
        merged = merger(tmp_path, "a", "b")
        merged.merge("m", parts)
        merged.save()
        assert [notice.split(" masks")[0] for notice in merged.notices()] == ["1 pixels in 1 of 1"]
        merged._path.write_text(damage)


def test_greys_are_cut_in_the_middle_and_said(tmp_path, write):
    parts = MaskParts(IMAGE, (("sea", write("s.png", [[0, 3, 120, 130, 250, 255]])),))
    merging = merger(tmp_path, "sea")
    assert read_mask(merging.merge("a", parts)).tolist() == [[0, 0, 0, 1, 1, 1]]
    assert merging.notices() == ["1 files of classes hold greys: what is above 127 belongs to the class"]


def test_two_folders_that_mark_the_same_are_two_readings(tmp_path, write):
    square = np.zeros((10, 10), np.uint8)
    square[2:8, 2:8] = 255
    shifted = np.roll(square, 1, 1)
    parts = MaskParts(IMAGE, (("a", write("a.png", square)), ("b", write("b.png", shifted))))
    merging = merger(tmp_path, "a", "b")
    merging.merge("x", parts)
    assert merging.two_readings() == ("a", "b", pytest.approx(30 / 42))
    tumour = np.zeros_like(square)
    tumour[4:6, 4:6] = 255
    nested = MaskParts(IMAGE, (("liver", write("l.png", square)), ("tumour", write("t.png", tumour))))
    merging = merger(tmp_path, "liver", "tumour")
    merging.merge("x", nested)
    assert merging.two_readings() is None


def test_files_that_cannot_be_used_are_named(tmp_path, write):
    bad = tmp_path / "data/bad.png"
    good = write("1.png", [[255, 0]])
    bad.write_bytes(b"no image")
    large = write("large.png", [[255, 0, 0]])
    merging = merger(tmp_path)
    assert merging.merge("a", MaskParts(IMAGE, (("", good), ("", bad)))) is None
    assert merging.merge("b", MaskParts(IMAGE, (("", good), ("", large)))) is None
    assert merging.unreadable == [
        f"{bad}: not an image that can be decoded",
        f"{large}: 3×1, the other masks of this image are 2×1",
    ]
