"""Files that name the classes of masks: where they are looked for, and what is read from each form."""

from __future__ import annotations

import pytest

from unet_trainer.datasets.class_files import ClassFile, NamedClass, find_class_file
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.image_files import COLOUR

CAMVID = "64 128 64\tAnimal\n192 0 128\t\tArchway\n0 0 0\tVoid\n"
CLASS_DICT = "name,r,g,b\nAnimal,64,128,64\nArchway,192,0,128\nVoid,0,0,0\n"
ROBOFLOW = "Pixel Value, Class\n0, background\n1, Head Light\n"
LABELMAP = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:128,0,0::\n"


def pairs_in(folder):
    return [Pair("a", folder.parent / "images/a.png", folder / "a.png")]


@pytest.fixture
def read(tmp_path):
    """Writes a file and reads it."""

    def read(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return find_class_file(tmp_path, pairs_in(tmp_path / "masks"))

    return read


@pytest.mark.parametrize(("name", "text"), [("label_colors.txt", CAMVID), ("class_dict.csv", CLASS_DICT)])
def test_names_and_colours_are_read_in_their_order(read, tmp_path, name, text):
    green, pink = COLOUR + 0x408040, COLOUR + 0xC00080
    found = read(name, text)
    assert found == ClassFile(
        tmp_path / name,
        (NamedClass("Animal", green, True), NamedClass("Archway", pink, True), NamedClass("Void", 0, True)),
    )
    assert (found.has_values, found.has_colours) == (True, True)
    assert [one.is_void for one in found.classes] == [False, False, True]


def test_values_and_names_of_roboflow_are_read(read):
    found = read("_classes.csv", ROBOFLOW)
    assert found.classes == (NamedClass("background", 0), NamedClass("Head Light", 1))
    assert (found.has_values, found.has_colours) == (True, False)
    assert [one.is_background for one in found.classes] == [True, False]


def test_the_label_map_of_cvat_is_read(read):
    assert read("labelmap.txt", LABELMAP).classes == (NamedClass("background", 0, True), NamedClass("car", COLOUR + 0x800000, True))


def test_a_list_of_names_is_read_if_it_has_a_background_or_void(read):
    found = read("codes.txt", "Sky\nRoad\nVoid\n")
    assert [(one.name, one.value) for one in found.classes] == [("Sky", None), ("Road", None), ("Void", None)]
    assert not found.has_values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("label_colors.txt", "hello\n"),
        ("label_colors.txt", "64 128 300 Animal\n0 0 0 Void\n"),
        ("label_colors.txt", "64 128 64 Animal\n64 128 64 Archway\n"),  # one colour twice
        ("class_dict.csv", "class,score\na,1\nb,2\n"),
        ("class_dict.csv", "name,r,g,b\na,1,2\nb,1,2,3\n"),
        ("_classes.csv", "filename, cat, dog\na.jpg, 0, 1\nb.jpg, 1, 0\n"),  # of images, not of pixels
        ("_classes.csv", ""),
        ("classes.txt", "person\ncar\n"),  # of boxes: no background
        ("labelmap.txt", "car\n"),
        ("codes.txt", "Void\n"),
        ("codes.txt", "Void\nVoid\n"),
    ],
)
def test_a_file_in_another_form_is_left_alone(read, name, text):
    assert read(name, text) is None


def test_a_file_that_is_no_text_is_left_alone(tmp_path):
    (tmp_path / "codes.txt").write_bytes(b"\xff\xfe\x00Void\n\xff")
    (tmp_path / "class_dict.csv").mkdir()
    assert find_class_file(tmp_path, pairs_in(tmp_path / "masks")) is None


def test_files_are_looked_for_beside_the_masks_and_up_to_data_dir(tmp_path):
    data = tmp_path / "data"
    masks = data / "train/masks"
    masks.mkdir(parents=True)
    (tmp_path / "label_colors.txt").write_text(CAMVID)  # above data_dir
    assert find_class_file(data, pairs_in(masks)) is None
    (data / "class_dict.csv").write_text(CLASS_DICT)
    assert find_class_file(data, pairs_in(masks)).path == data / "class_dict.csv"
    (masks / "_classes.csv").write_text(ROBOFLOW)
    assert find_class_file(data, pairs_in(masks)).path == masks / "_classes.csv"  # nearer to the masks
    assert find_class_file(data, pairs_in(tmp_path / "elsewhere/masks")).path == data / "class_dict.csv"


def test_values_are_better_than_names_alone(tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    (masks / "codes.txt").write_text("Sky\nVoid\n")
    (tmp_path / "label_colors.txt").write_text(CAMVID)
    assert find_class_file(tmp_path, pairs_in(masks)).path.name == "label_colors.txt"
    (tmp_path / "label_colors.txt").unlink()
    assert find_class_file(tmp_path, pairs_in(masks)).path.name == "codes.txt"
