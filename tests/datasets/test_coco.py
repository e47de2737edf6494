"""COCO JSON as COCO, CVAT, Label Studio and Roboflow write it: polygons, run lengths, crowds; what is wrong is named."""

from __future__ import annotations

import json
import re

import pytest

from helpers.annotated import Folder
from unet_trainer.datasets.coco import is_coco
from unet_trainer.images.file_bytes import DataError


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def box(x0, y0, x1, y1):
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def coco(images, annotations, categories=((1, "cat"),)):
    """The document: images as (id, file_name, width, height), annotations as (image_id, category_id, segmentation), or dicts."""
    return {
        "info": {"year": 2024, "version": "1.0"},
        "licenses": [{"id": 1, "name": "", "url": ""}],
        "images": [
            entry if isinstance(entry, dict) else dict(zip(("id", "file_name", "width", "height"), entry, strict=True))
            for entry in images
        ],
        "annotations": [
            entry
            if isinstance(entry, dict)
            else {
                "id": number,
                "image_id": entry[0],
                "category_id": entry[1],
                "segmentation": entry[2],
                "area": 1.0,
                "bbox": [0, 0, 1, 1],
                "iscrowd": entry[3] if len(entry) > 3 else 0,
            }
            for number, entry in enumerate(annotations, start=1)
        ],
        "categories": [{"id": identity, "name": name, "supercategory": ""} for identity, name in categories],
    }


def one_image(folder, *annotations, **settings):
    """The mask of one image, 4 wide and 3 high, and what is found."""
    folder.image("images/a.png")
    folder.write("annotations/instances_default.json", coco([(1, "a.png", 4, 3)], annotations, **settings))
    found = folder.find()
    return folder.masks()["images/a"], found


def test_a_polygon_becomes_class_1(folder):
    mask, found = one_image(folder, (1, 1, [box(1, 0, 3, 2)]))
    assert mask == ["0110", "0110", "0000"]
    assert (found.num_classes, found.class_names) == (1, ("cat",))
    (pair,) = found.pairs
    assert (pair.name, pair.image, pair.part) == ("images/a", folder.path / "images/a.png", None)
    assert pair.mask.is_relative_to(folder.checkpoints)
    assert found.rule == "annotations/instances_default.json (COCO), drawn as masks, classes by category id"
    assert (found.notices, found.problems, found.blocking_message) == ((), (), "")


def test_the_polygons_of_one_object_are_joined(folder):
    mask, _ = one_image(folder, (1, 1, [box(0, 0, 1, 3), box(2, 0, 4, 1)]))
    assert mask == ["1011", "1000", "1000"]


def test_run_lengths_compressed_and_not(folder):
    """Both go down the columns: two pixels outside, three inside, seven outside; with 2 as the second category."""
    plain = {"counts": [2, 3, 7], "size": [3, 4]}
    mask, _ = one_image(folder, (1, 1, plain))
    assert mask == ["0100", "0100", "1000"]
    folder.write("annotations/instances_default.json", coco([(1, "a.png", 4, 3)], [(1, 1, {"counts": "237", "size": [3, 4]})]))
    assert folder.masks()["images/a"] == mask


def test_run_lengths_may_have_a_hole(folder):
    mask, _ = one_image(folder, (1, 1, {"counts": [0, 4, 1, 7], "size": [3, 4]}))
    assert mask == ["1111", "1011", "1111"]


def test_classes_are_in_the_order_of_their_ids_and_those_without_objects_are_left_out(folder):
    mask, found = one_image(
        folder,
        (1, 90, [box(0, 0, 1, 3)]),
        (1, 3, [box(2, 0, 4, 3)]),
        categories=((90, "tree"), (7, "unused"), (3, "house")),
    )
    assert mask == ["2011", "2011", "2011"]
    assert (found.num_classes, found.class_names) == (3, ("background", "house", "tree"))
    assert found.notices == ("1 class without any object left out: unused",)


def test_a_category_called_background_is_class_0(folder):
    mask, found = one_image(
        folder, (1, 1, [box(0, 0, 4, 3)]), (1, 2, [box(1, 1, 2, 2)]), categories=((1, "cat"), (2, "Background"))
    )
    assert mask == ["1111", "1011", "1111"]
    assert found.class_names == ("cat",)


def test_the_smaller_object_is_on_top_and_the_pixels_of_both_are_counted(folder):
    mask, found = one_image(folder, (1, 2, [box(1, 1, 2, 2)]), (1, 1, [box(0, 0, 4, 3)]), categories=((1, "house"), (2, "door")))
    assert mask == ["1111", "1211", "1111"]
    assert found.notices == ("1 pixel in 1 image in objects of several classes; the smaller object is on top: a.png",)


def test_crowds_are_drawn_below_all_objects_and_said(folder):
    crowd = {"counts": [0, 12], "size": [3, 4]}
    mask, found = one_image(
        folder, (1, 1, [box(0, 0, 4, 3)]), (1, 2, crowd, 1), (1, 2, [box(0, 0, 1, 1)]), categories=((1, "street"), (2, "person"))
    )
    assert mask == ["2111", "1111", "1111"]
    assert found.notices[0] == "1 crowd region (iscrowd) drawn as part of its class, below all objects: in a.png"


def test_an_image_without_annotations_is_background_one_without_a_file_and_one_that_is_not_listed_are_left_out(folder):
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        folder.image(f"images/{name}")
    images = [(1, "a.jpg", 4, 3), (2, "b.jpg", 4, 3), (3, "gone.jpg", 4, 3)]
    folder.write("coco.json", coco(images, [(1, 1, [box(0, 0, 4, 3)])]))
    found = folder.find()
    assert folder.masks() == {"images/a": ["1111"] * 3, "images/b": ["0000"] * 3}
    assert found.notices == (
        "1 image of coco.json without a readable file left out: gone.jpg",
        "1 image without any annotation counts as all background: b.jpg",
        "1 image file that no annotation names left out: images/c.jpg",
    )


def test_roboflow_has_a_file_in_each_folder_and_its_group_is_no_class(folder):
    """Category 0 is the name of the dataset; names have a hash; test is there and not used."""
    categories = [
        {"id": 0, "name": "cells", "supercategory": "none"},
        {"id": 1, "name": "cell", "supercategory": "cells"},
    ]
    for part, number in (("train", 2), ("valid", 1), ("test", 1)):
        names = [f"{part}{index}_jpg.rf.0a1b2c.jpg" for index in range(number)]
        for name in names:
            folder.image(f"{part}/{name}")
        content = coco(
            [(index, name, 4, 3) for index, name in enumerate(names)], [(index, 1, [box(0, 0, 2, 2)]) for index in range(number)]
        )
        folder.write(f"{part}/_annotations.coco.json", {**content, "categories": categories})
    folder.write("README.roboflow.txt", "cells - v1\nhttps://universe.roboflow.com\n")
    found = folder.find()
    assert [(pair.image.name, pair.part) for pair in found.pairs] == [
        ("train0_jpg.rf.0a1b2c.jpg", "train"),
        ("train1_jpg.rf.0a1b2c.jpg", "train"),
        ("valid0_jpg.rf.0a1b2c.jpg", "val"),
    ]
    assert (found.num_classes, found.class_names, found.notices) == (1, ("cell",), ())
    assert [(pair.image.name, pair.part) for pair in found.test] == [("test0_jpg.rf.0a1b2c.jpg", "test")]
    assert found.rule.endswith("as they are divided into train and val")


def test_cocos_own_folder(folder):
    """train2017, val2017 and annotations; captions and key points are not opened. Numbers repeat in train and val."""
    for part in ("train", "val"):
        folder.image(f"{part}2017/000000000001.jpg")
        folder.write(
            f"annotations/instances_{part}2017.json",
            coco([(1, "000000000001.jpg", 4, 3)], [(1, 18, [box(0, 0, 4, 1 if part == "train" else 2)])], ((18, "dog"),)),
        )
        folder.write(f"annotations/captions_{part}2017.json", "not even JSON")
        folder.write(f"annotations/person_keypoints_{part}2017.json", "not even JSON")
    found = folder.find()
    assert [pair.part for pair in found.pairs] == ["train", "val"]
    assert folder.masks() == {
        "train2017/000000000001": ["1111", "0000", "0000"],
        "val2017/000000000001": ["1111", "1111", "0000"],
    }


def test_the_ids_of_a_category_may_differ_between_files(folder):
    """Their names are the same thing."""
    for part, categories in (("train", ((1, "cat"), (2, "dog"))), ("val", ((1, "dog"), (2, "cat")))):
        folder.image(f"{part}/{part}.png")
        folder.write(
            f"{part}.json", coco([(1, f"{part}.png", 4, 3)], [(1, 1, [box(0, 0, 4, 1)]), (1, 2, [box(0, 1, 4, 2)])], categories)
        )
    assert folder.masks() == {"train/train": ["1111", "2222", "0000"], "val/val": ["2222", "1111", "0000"]}
    assert folder.find().class_names == ("background", "cat", "dog")


def test_one_polygon_without_the_list_around_it_is_read(folder):
    mask, _ = one_image(folder, (1, 1, box(0, 0, 1, 1)))
    assert mask == ["1000", "0000", "0000"]


def test_outlines_of_two_points_are_left_out_and_said(folder):
    mask, found = one_image(folder, (1, 1, [[0, 0, 4, 3]]), (1, 1, [[0, 0, 1, 1], box(0, 0, 1, 1)]))
    assert mask == ["1000", "0000", "0000"]
    assert found.notices == ("1 outline of fewer than 3 points left out: in a.png",)


def test_an_object_without_a_pixel_is_said(folder):
    _, found = one_image(folder, (1, 1, [box(0, 0, 4, 3)]), (1, 1, [box(0.1, 0.1, 0.2, 0.2)]), (1, 1, [box(40, 0, 44, 3)]))
    assert found.notices == ("2 objects without a pixel: smaller than one, or outside of the image: in a.png",)


def test_boxes_are_no_masks(folder):
    with pytest.raises(
        DataError, match=r"\(COCO\) holds boxes only, 2 boxes without an outline, and a box is no mask; export polygons"
    ):
        one_image(folder, (1, 1, []), (1, 1, None))


def test_a_box_among_outlines_is_refused_with_its_entry_and_the_others_are_found(folder):
    for name in ("a.png", "b.png"):
        folder.image(name)
    folder.write("coco.json", coco([(1, "a.png", 4, 3), (2, "b.png", 4, 3)], [(1, 1, [box(0, 0, 1, 1)]), (2, 1, [])]))
    found = folder.find()
    assert [pair.name for pair in found.pairs] == ["a"]
    assert found.blocking_message == (
        "1 annotation that cannot be used:\n"
        "  Fix: correct these entries, or their image files, or remove them\n"
        "  coco.json, image 'b.png': annotation 2: a box without an outline, and a box is no mask; draw its outline, "
        "or remove it"
    )


def test_another_size_than_that_of_the_file_is_refused_by_name(folder):
    folder.image("a.png", 4, 3)
    folder.image("b.png", 5, 3)
    folder.write("coco.json", coco([(1, "a.png", 4, 3), (2, "b.png", 4, 3)], [(1, 1, [box(0, 0, 1, 1)])]))
    (line,) = folder.find().problems[0].lines
    assert line == "coco.json, image 'b.png': annotated at 4×3, and the file b.png has 5×3 pixels"


def test_without_a_size_that_of_the_file_counts(folder):
    folder.image("a.png", 4, 3)
    content = coco([{"id": "x1", "file_name": "a.png"}], [("x1", 1, [box(0, 0, 4, 1)])])
    folder.write("coco.json", content)
    assert folder.masks() == {"a": ["1111", "0000", "0000"]}


def test_annotations_of_images_that_are_not_listed_are_said(folder):
    _, found = one_image(folder, (1, 1, [box(0, 0, 1, 1)]), (7, 1, [box(0, 0, 1, 1)]))
    assert found.notices == ("1 annotation in instances_default.json of images that it does not list, left out",)


@pytest.mark.parametrize(("change", "message"), [
    ({"categories": [{"id": "1", "name": "cat"}]}, r"category 1: id is '1'; need a whole number"),
    ({"categories": [{"id": 1, "name": ""}]}, r"category 1: name is ''; need a text"),
    ({"categories": [{"id": 1, "name": "a\x00b"}]}, r"category 1: name is 'a\\x00b'; need a text"),
    ({"categories": [{"id": 1, "name": "n" * 101}]}, r"category 1: name is 'nnn.*…; need a text of 1 to 100 characters"),
    ({"categories": [{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}]}, r"category 2: id 1 is used twice"),
    ({"categories": ["cat"]}, r"category 1: it is 'cat'; need an object with keys"),
    ({"annotations": [[]]}, r"annotation 1: it is \[\]; need an object with keys"),
    ({"annotations": [{"image_id": 1, "category_id": 9, "segmentation": []}]}, r"annotation 1: category_id is 9; need one of 1"),
    ({"annotations": [{"image_id": 1, "category_id": [1], "segmentation": []}]}, r"annotation 1: category_id is \[1\]"),
    ({"annotations": [{"image_id": None, "category_id": 1}]}, r"annotation 1: image_id is None; need the id of an image"),
    ({"images": [{"id": 1, "file_name": 5, "width": 4, "height": 3}]}, r"image 1: file_name is 5; need a text"),
    ({"images": [{"id": 1.5, "file_name": "a.png"}]}, r"image 1: id 1.5 is no id"),
    ({"images": [{"id": 1, "file_name": "a.png"}] * 2}, r"image 2: id 1 is used twice"),
    ({"images": [{"id": 1, "file_name": "a.png", "width": -4, "height": 3}]}, r"image 'a.png': width is -4; need a whole number"),
    ({"images": [{"id": 1, "file_name": "a.png", "width": 4}]}, r"image 'a.png': height is None"),
    ({"images": [{"id": 1, "file_name": "a.png", "width": 50000, "height": 50000}]}, r"image 'a.png': 50000×50000 pixels; images of up to"),
    ({"images": [{"id": 1, "file_name": "a.png", "width": 10**30, "height": 3}]}, r"image 'a.png': width is 1000"),
])  # fmt: skip
def test_a_wrong_entry_is_refused_with_its_place(folder, change, message):
    folder.image("a.png")
    folder.write("coco.json", {**coco([(1, "a.png", 4, 3)], [(1, 1, [box(0, 0, 1, 1)])]), **change})
    with pytest.raises(DataError, match=rf"coco\.json, {message}") as raised:
        folder.find()
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(("segmentation", "reason"), [
    ([["1", 0, 4, 0, 4, 3]], "a polygon holds '1'; need numbers"),
    ([[True, 0, 4, 0, 4, 3]], "a polygon holds True; need numbers"),
    ([[[0, 0], [1, 1], [2, 2]]], r"a polygon holds \[0, 0\]; need numbers"),
    ([[0, 0, 4, 0, 4, 3, 1]], "a polygon holds 7 numbers; need x and y for each point"),
    ([[0, 0, 4, 0, 4, float("nan")]], "a polygon holds nan, which is no number"),
    ([[0, 0, 4, 0, 4, float("inf")]], "a polygon holds inf, which lies far outside of any image"),
    ([[0, 0, 4, 0, 4, -1e300]], r"a polygon holds -1e\+300, which lies far outside of any image"),
    ([[0, 0, 4, 0, 4, 10**400]], "a polygon holds 1000.*, which lies far outside of any image"),
    ([{"x": 1}], r"a polygon is \{'x': 1\}; need a list"),
    ("polygon", "segmentation is 'polygon'; need a list"),
    (7, "segmentation is 7; need a list"),
    ({"counts": [2, 3, 7], "size": [4, 3]}, r"its run lengths are for the size \[4, 3\]; need \[3, 4\], height and width"),
    ({"counts": [2, 3, 8], "size": [3, 4]}, "run lengths that are not 12 pixels together, those of 4×3"),
    ({"counts": "~~", "size": [3, 4]}, "run lengths with '~'"),
    ({"counts": {}, "size": [3, 4]}, r"counts is \{\}; need a list"),
    ({"x": 1}, "its run lengths are for the size None"),
])  # fmt: skip
def test_a_wrong_outline_is_refused_with_its_entry(folder, segmentation, reason):
    for name in ("a.png", "b.png"):
        folder.image(name)
    images = [(1, "a.png", 4, 3), (2, "b.png", 4, 3)]
    folder.write("coco.json", json.dumps(coco(images, [(1, 1, [box(0, 0, 1, 1)]), (2, 1, segmentation)])))
    found = folder.find()
    (line,) = found.problems[0].lines
    assert re.fullmatch(rf"coco\.json, image 'b\.png': annotation 2: {reason}.*", line)
    assert line in found.blocking_message


def test_a_name_that_leads_out_of_the_folder_finds_only_files_inside(folder, tmp_path):
    outside = folder.image("../secret.png")
    folder.image("a.png")
    folder.write(
        "coco.json", coco([(1, "../secret.png", 4, 3), (2, str(outside), 4, 3), (3, "a.png", 4, 3)], [(3, 1, [box(0, 0, 1, 1)])])
    )
    found = folder.find()
    assert [pair.image for pair in found.pairs] == [folder.path / "a.png"]
    assert found.notices[0].startswith("2 images of coco.json without a readable file left out: ../secret.png, ")


def test_of_folders_that_are_partly_here_only_these_are_found(folder):
    """The same numbers in each folder, and one of them was downloaded."""
    folder.image("p1/1.png")
    images = [(1, "p1/1.png", 4, 3), (2, "p2/1.png", 4, 3)]
    folder.write("coco.json", coco(images, [(1, 1, [box(0, 0, 4, 1)]), (2, 1, [box(0, 0, 4, 3)])]))
    assert folder.masks() == {"p1/1": ["1111", "0000", "0000"]}
    assert folder.find().notices == ("1 image of coco.json without a readable file left out: p2/1.png",)


def test_test_images_without_annotations_are_no_background(folder):
    for part in ("train", "val", "test"):
        folder.image(f"{part}/{part}.png")
        folder.write(f"{part}.json", coco([(1, f"{part}.png", 4, 3)], [(1, 1, [box(0, 0, 1, 1)])] if part != "test" else []))
    found = folder.find()
    assert (len(found.pairs), found.test) == (2, ())
    assert found.notices == ("1 test image left out: none has any annotation",)


def test_no_image_at_all_is_an_error_that_names_some(folder):
    folder.image("other.png")
    folder.write("coco.json", coco([(1, "a.png", 4, 3)], [(1, 1, [box(0, 0, 1, 1)])]))
    with pytest.raises(
        DataError, match=r"coco.json \(COCO\) lists 1 image, and no such file is in .*data: a.png; put the images there"
    ):
        folder.find()


def test_no_object_at_all_is_an_error(folder):
    folder.image("a.png")
    folder.write("coco.json", coco([(1, "a.png", 4, 3)], []))
    with pytest.raises(DataError, match="holds no object of any class, so that there is nothing to learn"):
        folder.find()


def test_what_is_coco():
    assert is_coco({"images": [], "annotations": [], "categories": []})
    for other in ({"images": [], "annotations": []}, {"images": {}, "annotations": [], "categories": []}, [], None):
        assert not is_coco(other)
