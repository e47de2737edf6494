"""YOLO segmentation labels as Ultralytics, Roboflow and CVAT lay them out: texts with shares of width and height, and data.yaml."""

from __future__ import annotations

import pytest

from helpers.annotated import Folder
from unet_trainer.datasets.yolo_seg import looks_like_labels
from unet_trainer.images.file_bytes import DataError

LEFT, LOWER = "0 0 0 0.5 0 0.5 1 0 1", "1 0 0.66667 1 0.66667 1 1 0 1"  # two of four columns; the lowest of three rows


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_ultralytics_folders_with_names_by_number(folder):
    """images/train beside labels/train; data.yaml as of coco8-seg."""
    for part in ("train", "val"):
        folder.image(f"images/{part}/a.jpg")
        folder.write(f"labels/{part}/a.txt", f"{LEFT}\n{LOWER}\n")
    folder.write(
        "coco8-seg.yaml",
        "path: coco8-seg # root\ntrain: images/train\nval: images/val\ntest:\nnames:\n  0: person\n  1: on\n  2: car\n",
    )
    found = folder.find()
    assert folder.masks() == {"images/train/a": ["1100", "1100", "2222"], "images/val/a": ["1100", "1100", "2222"]}
    assert [pair.part for pair in found.pairs] == ["train", "val"]
    assert (found.num_classes, found.class_names) == (3, ("background", "person", "on"))
    assert found.rule.startswith(
        "2 text files such as a.txt (YOLO), drawn as masks, classes in the order of coco8-seg.yaml; as they are"
    )
    assert found.notices == (
        "1 class without any object left out: car",
        "4 pixels in 2 images in objects of several classes; the smaller object is on top: a.jpg, a.jpg",
    )


def test_roboflow_folders_with_a_list_of_names(folder):
    for part in ("train", "valid", "test"):
        folder.image(f"{part}/images/{part}_jpg.rf.12ab.jpg")
        folder.write(f"{part}/labels/{part}_jpg.rf.12ab.txt", LEFT)
    folder.write("README.dataset.txt", "# cells > 2024\n")
    folder.write(
        "data.yaml",
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 1\nnames: ['cell']\n\nroboflow:\n  workspace: me\n  version: 1\n",
    )
    found = folder.find()
    assert [(pair.name, pair.part) for pair in found.pairs] == [
        ("train/images/train_jpg.rf.12ab", "train"),
        ("valid/images/valid_jpg.rf.12ab", "val"),
    ]
    assert (found.num_classes, found.class_names) == (1, ("cell",))


def test_a_text_beside_each_image_and_classes_txt(folder):
    folder.image("a.png")
    folder.write("a.txt", LOWER)
    folder.write("classes.txt", "cat\ndog\n\n")
    assert folder.masks() == {"a": ["0000", "0000", "1111"]}
    assert folder.find().class_names == ("dog",)


def test_data_yaml_may_name_the_folders_of_train_and_val(folder):
    for part in ("first", "second"):
        folder.image(f"images/{part}/a.jpg")
        folder.write(f"labels/{part}/a.txt", LEFT)
    folder.write("data.yaml", "train: images/first\nval: images/second\nnames: [cat]\n")
    assert [(pair.name, pair.part) for pair in folder.find().pairs] == [("images/first/a", "train"), ("images/second/a", "val")]
    folder.write("data.yaml", "train: images\nval: images\nnames: [cat]\n")
    assert [pair.part for pair in folder.find().pairs] == [None, None]


def test_without_names_the_classes_are_numbers(folder):
    folder.image("a.png")
    folder.write("a.txt", "7 0 0 1 0 1 1")
    found = folder.find()
    assert found.class_names == ("class 7",)
    assert found.notices == ("no data.yaml or classes.txt with the names of the classes: they are numbers",)


def test_an_empty_label_file_and_none_are_background_and_said(folder):
    for name in ("a", "b", "c"):
        folder.image(f"images/{name}.jpg")
    folder.write("labels/a.txt", LEFT)
    folder.write("labels/b.txt", "\n")
    folder.write("data.yaml", "names: [cat]")
    assert folder.masks() == {"images/a": ["1100"] * 3, "images/b": ["0000"] * 3, "images/c": ["0000"] * 3}
    assert folder.find().notices == (
        "all background, as in YOLO: 1 image without a label file, c.jpg",
        "1 image without any annotation counts as all background: b.jpg",
    )


def test_images_of_a_part_without_any_label_are_left_out(folder):
    for part in ("train", "val", "test"):
        folder.image(f"images/{part}/a.jpg")
    for part in ("train", "val"):
        folder.write(f"labels/{part}/a.txt", LEFT)
    folder.write("data.yaml", "names: [cat]")
    found = folder.find()
    assert (len(found.pairs), found.test) == (2, ())
    assert found.notices == ("1 image file that no annotation names left out: images/test/a.jpg",)


def test_edges_through_centres_are_as_exact_as_in_pixels(folder):
    """From 3.5 to 8.5 of 11 columns, as shares that are not exact: 3.5 is out, 8.5 is in."""
    folder.image("a.png", 11, 2)
    folder.write("a.txt", " ".join(["0", *(f"{x / 11!r} {y}" for x, y in ((3.5, 0), (8.5, 0), (8.5, 1), (3.5, 1)))]))
    assert folder.masks() == {"a": ["00001111100"] * 2}


def test_boxes_are_no_masks(folder):
    folder.image("images/a.jpg")
    folder.write("labels/a.txt", "0 0.5 0.5 0.2 0.2\n0 0.1 0.1 0.05 0.05\n")
    with pytest.raises(
        DataError, match=r"\(YOLO\) hold boxes only, 2 lines of class, x, y, width and height, and a box is no mask"
    ):
        folder.find()
    folder.image("images/b.jpg")
    folder.write("labels/b.txt", f"{LEFT}\n0 0.5 0.5 0.2 0.2\n")
    lines = folder.find().problems[0].lines if folder.write("labels/a.txt", LEFT) else ()
    assert lines == (
        "labels/b.txt: line 2: four numbers, a box, among polygons, and a box is no mask; draw its outline, or remove it",
    )


@pytest.mark.parametrize(("line", "reason"), [
    ("0 0.1 0.1 0.5 0.5 x 0.3", "'0 0.1 0.1 0.5 0.5 x 0.3'; need a class and numbers"),
    ("0 0.1 0.1 0.5 0.5 0.3", "the line holds 5 numbers; need x and y for each point"),
    ("0 0.1 0.1 0.5 nan 0.3 0.3", "the line holds nan, which is no number"),
    ("0 10 10 50 50 30 30", "50.0 is no share of the image; need numbers from 0 to 1, not pixels"),
])  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(folder, line, reason):
    folder.image("images/a.jpg")
    folder.image("images/b.jpg")
    folder.write("labels/a.txt", LEFT)
    folder.write("labels/b.txt", f"{LEFT}\n\n{line}\n")
    folder.write("data.yaml", "names: [cat]")
    (found,) = folder.find().problems[0].lines
    assert found == f"labels/b.txt: line 3: {reason}"


@pytest.mark.parametrize(
    "line", ["3 0 0 1 0 1 1", "-1 0 0 1 0 1 1", "cat 0 0 1 0 1 1", "99999999999 0 0 1 0 1 1", "0.0 0 0 1 0 1 1", "² 0 0 1 0 1 1"]
)
def test_a_class_without_a_name_is_refused(folder, line):
    folder.image("a.jpg")
    folder.write("a.txt", f"{LEFT}\n{line}")
    folder.write("data.yaml", "names: [cat]")
    with pytest.raises(DataError, match=r"a\.txt, line 2: class '.*'; need a number below 1, the number of names in data\.yaml"):
        folder.find()


@pytest.mark.parametrize(("yaml", "reason"), [
    ("names: {0: cat, 2: dog}", "names has the keys 0, 2; need the numbers from 0 to 1"),
    ("names: cat", "names is 'cat'; need a list of names"),
    ("names: [[cat]]", "need a list of names"),
    ("names: ['']", "name 0 is ''; need a text"),
    ("names: [cat\nnc: 1", "not valid YAML"),
    ("names: !!python/object/apply:os.system [ls]", "tags are not allowed"),
])  # fmt: skip
def test_a_wrong_data_yaml_is_refused(folder, yaml, reason):
    folder.image("a.jpg")
    folder.write("a.txt", LEFT)
    path = folder.write("data.yaml", yaml)
    with pytest.raises(DataError, match=f"{path}: .*{reason}"):
        folder.find()


def test_labels_that_could_be_of_two_folders_are_refused(folder):
    folder.image("pictures/a.jpg")
    folder.write("labels1/a.txt", LEFT)
    folder.write("labels2/a.txt", LEFT)
    with pytest.raises(
        DataError, match=r"mask_dir: .*a\.jpg could have the labels .*labels1/a\.txt, .*labels2/a\.txt; set mask_dir"
    ):
        folder.find()
    assert folder.masks(mask_dir="labels2") == {"pictures/a": ["1100"] * 3}


def test_texts_that_are_no_labels_are_none(folder):
    folder.image("a.jpg")
    folder.write("a.txt", "A photo of a cat, 2 years old")
    assert folder.find() is None
    assert looks_like_labels(folder.write("long.txt", "0 " + "0.123e-1 " * 9000))
    binary = folder.path / "b.txt"
    binary.write_bytes(b"\xff\xfe0 0 0 1 0 1 1")
    assert not looks_like_labels(binary)
    assert not looks_like_labels(folder.path / "missing.txt")
