"""Annotations of labelling tools as they write them → masks; what is wrong in a file is refused with its entry."""

import base64
import json
import re

import cv2
import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import cv2_bytes, exif, pil_bytes
from helpers.no_files import replace_by
from unet_trainer.config.schema import Config
from unet_trainer.datasets.annotations import find_annotations, kind_of_json
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import read_mask


class Folder:
    """A data folder; images are noise, so that no two are identical."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "data"
        self.checkpoints = tmp_path / "checkpoints"
        self.path.mkdir()
        self.num_images = 0

    def image(self, name, width=4, height=3):
        self.num_images += 1
        pixels = np.random.default_rng(self.num_images).integers(0, 256, (height, width, 3)).astype(np.uint8)
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), pixels)
        return path

    def write(self, name, content):
        """A text as it is, anything else as JSON."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def find(self, **settings):
        return find_annotations(Config(checkpoint_dir=str(self.checkpoints), **settings), self.path)

    def masks(self, **settings):
        """Name → rows of class ids as text."""
        return masks_of(self.find(**settings))


def masks_of(found):
    return {pair.name: ["".join(map(str, row)) for row in read_mask(pair.mask).tolist()] for pair in found.pairs}


BOX = [[1, 0], [3, 0], [3, 2], [1, 2]]  # of images that are 4 wide and 3 high
BOXED = ["0110", "0110", "0000"]
FLAT = [number for point in BOX for number in point]
WHOLE = [[0, 0], [4, 0], [4, 3], [0, 3]]
LEFT = "0 0 0 0.5 0 0.5 1 0 1"  # YOLO: two of four columns
BITMAP = cv2_bytes(".png", np.array([[0, 255], [255, 255]], np.uint8))
LARGE = cv2_bytes(".png", np.ones((9, 9), np.uint8))


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def text64(data):
    return base64.b64encode(data).decode()


def box(x0, y0, x1, y1):
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def coco(*annotations, names=("a.png",), categories=((1, "cat"), (2, "dog")), **changes):
    """Annotations as (category, segmentation) of the first image, or as dicts."""
    entries = [
        entry
        if isinstance(entry, dict)
        else {"image_id": 1, "category_id": entry[0], "segmentation": entry[1], "iscrowd": 0}
        for entry in annotations
    ]
    return {
        "images": [
            {"id": number, "file_name": name, "width": 4, "height": 3} for number, name in enumerate(names, start=1)
        ],
        "annotations": [{"id": number, **entry} for number, entry in enumerate(entries, start=1)],
        "categories": [{"id": identity, "name": name, "supercategory": ""} for identity, name in categories],
        **changes,
    }


def shape(label, points, kind="polygon", **others):
    return {"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}, **others}


def labelme(*shapes, path="a.png", **changes):
    content = {"version": "5.4.1", "shapes": list(shapes), "imagePath": path, "imageData": "not looked at"}
    return {**content, "imageHeight": 3, "imageWidth": 4, **changes}


# Shapes of every format → the mask of one image


COCO_SHAPES = {
    "a polygon": ((1, [FLAT]), BOXED),
    "polygons are joined": ((1, [box(0, 0, 1, 3), box(2, 0, 4, 1)]), ["1011", "1000", "1000"]),
    "without the list around it": ((1, FLAT), BOXED),
    "run lengths down the columns": ((1, {"counts": [2, 3, 7], "size": [3, 4]}), ["0100", "0100", "1000"]),
    "compressed": ((1, {"counts": "237", "size": [3, 4]}), ["0100", "0100", "1000"]),
    "with a hole": ((1, {"counts": [0, 4, 1, 7], "size": [3, 4]}), ["1111", "1011", "1111"]),
}
LABELME_SHAPES = {
    "a polygon": (shape("cat", BOX), BOXED),
    "a rectangle by two corners": (shape("cat", [[3, 2], [1, 0]], "rectangle"), BOXED),
    "a rectangle by four": (shape("cat", BOX, "rectangle"), BOXED),
    "a circle": (shape("cat", [[1.5, 1.5], [2.5, 1.5]], "circle"), ["0100", "1110", "0100"]),
    "a picture": (shape("cat", [[2, 1], [3, 2]], "mask", mask=text64(BITMAP)), ["0000", "0001", "0011"]),
    "of an old file": ({"label": "cat", "points": BOX}, BOXED),
}
SHAPES = [
    *(("coco.json", coco(content), mask) for content, mask in COCO_SHAPES.values()),
    *(("a.json", labelme(content), mask) for content, mask in LABELME_SHAPES.values()),
    ("a.txt", LEFT, ["1100"] * 3),
]


@pytest.mark.parametrize(("name", "content", "mask"), SHAPES)
def test_a_shape_becomes_its_pixels(folder, name, content, mask):
    folder.image("a.png")
    folder.write(name, content)
    found = folder.find()
    assert (masks_of(found), found.num_classes) == ({"a": mask}, 1)


@pytest.mark.parametrize(("name", "content"), [
    ("coco.json", coco((1, [FLAT]), (1, [[0, 0, 4, 3]]))),
    ("a.json", labelme(shape("cat", BOX), shape("cat", [[0, 0], [4, 3]]), shape("cat", [[1, 1]], "point"))),
])  # fmt: skip
def test_shapes_without_an_area_are_left_out_and_counted(folder, name, content):
    folder.image("a.png")
    folder.write(name, content)
    found = folder.find()
    assert masks_of(found) == {"a": BOXED}
    notices = [notice for notice in found.notices if "without any object" not in notice]
    number = "1 object" if name == "coco.json" else "2 objects"
    assert notices == [f"{number} left out, without an area (a point, a line) or outside of the image: in a.png"]


# Classes, and what is on top


@pytest.mark.parametrize(("name", "content", "mask", "rule"), [
    ("coco.json", coco((2, [box(1, 1, 2, 2)]), (1, [box(0, 0, 4, 3)])), ["1111", "1211", "1111"], "the smaller object is on top"),
    ("a.json", labelme(shape("zebra", BOX), shape("ant", [[2, 0], [4, 0], [4, 1], [2, 1]])), ["0211", "0220", "0000"],
     "the later shape is on top"),
])  # fmt: skip
def test_classes_have_the_order_of_their_format_and_overlaps_are_counted(folder, name, content, mask, rule):
    folder.image("a.png")
    folder.write(name, content)
    found = folder.find()
    assert masks_of(found) == {"a": mask}
    assert re.search(rf"\d pixels? in objects of several classes; {rule}: in a\.png", found.notices[-1])


def test_classes_without_objects_are_left_out_and_background_is_0(folder):
    folder.image("a.png")
    categories = ((90, "tree"), (7, "unused"), (3, "house"), (1, "Background"))
    folder.write(
        "coco.json",
        coco((90, [box(0, 0, 1, 3)]), (3, [box(2, 0, 4, 3)]), (1, [box(3, 0, 4, 1)]), categories=categories),
    )
    found = folder.find()
    assert folder.masks() == {"a": ["2010", "2011", "2011"]}
    assert (found.num_classes, found.class_names) == (3, ("background", "house", "tree"))
    assert found.notices[0] == "1 class without any object left out: unused"
    folder.write("coco.json", labelme(shape("cat", WHOLE), shape("__ignore__", [[3, 0], [4, 0], [4, 1], [3, 1]])))
    assert folder.masks() == {"a": ["111255", "1111", "1111"]}


def test_labels_of_labelme_that_differ_in_case_or_spaces_are_one_class(folder):
    """`Nucleus ` and `nucleus` were two classes."""
    for name, label in (("a", "Nucleus "), ("b", "nucleus"), ("c", " nucleus"), ("d", "debris")):
        folder.image(f"{name}.png")
        folder.write(f"{name}.json", labelme(shape(label, BOX), path=f"{name}.png"))
    found = folder.find()
    assert found.class_names == ("background", "debris", "nucleus")
    assert masks_of(found)["a"] == masks_of(found)["b"] == ["0220", "0220", "0000"]
    note = "labels that differ only in case or spaces are one class, nucleus: 'Nucleus ' (1), ' nucleus' (1), 'nucleus' (1)"
    assert found.notices == (note,)
    named = folder.find(class_names=["background", "Nucleus", "debris"])
    assert named.class_names == ("background", "Nucleus", "debris")
    apart = folder.find(class_names=["background", "nucleus", "Nucleus", "debris"])
    assert apart.class_names == ("background", "nucleus", "Nucleus", "debris")
    other = folder.find(class_names=["background", "NUCLEUS", "debris"])
    assert other.class_names == ("background", "NUCLEUS", "debris")


def test_class_names_decide_the_ids(folder):
    folder.image("a.png")
    folder.write(
        "a.json",
        labelme(shape("cat", [[0, 0], [4, 0], [4, 1], [0, 1]]), shape("dog", [[0, 1], [4, 1], [4, 2], [0, 2]])),
    )
    names = ["background", "dog", "bird", "cat"]
    assert (folder.find(class_names=names).class_names, folder.find(class_names=names).num_classes) == (tuple(names), 4)
    assert folder.masks(class_names=names) == {"a": ["3333", "1111", "0000"]}
    with pytest.raises(
        DataError, match=r"class_names: it lacks dog of .*a\.json; leave it out, or list background, cat, dog"
    ):
        folder.find(class_names=["background", "cat", "hound"])
    folder.write("a.json", labelme(shape("cat", BOX)))
    assert folder.find(class_names=["Katze"]).class_names == ("cat",)  # a single class may be called anything


# Images and parts


def test_images_without_annotations_are_background_and_files_and_names_without_the_other_are_left_out(folder):
    for name in ("a.png", "b.png", "c.png"):
        folder.image(f"images/{name}")
    folder.write("coco.json", coco((1, [FLAT]), names=("a.png", "b.png", "../gone.png")))
    assert folder.masks() == {"images/a": BOXED, "images/b": ["0000"] * 3}
    assert folder.find().notices == (
        "1 image of coco.json without a readable file left out: ../gone.png",
        "1 class without any object left out: dog",
        "1 image without any annotation counts as all background: b.png",
        "1 image file that no annotation names left out: images/c.png",
    )


def test_a_name_that_leads_out_of_the_folder_finds_only_files_inside(folder):
    outside = folder.image("../secret.png")
    folder.image("a.png")
    folder.write("coco.json", coco((1, [FLAT]), names=("a.png", "../secret.png", str(outside))))
    found = folder.find()
    assert [pair.image for pair in found.pairs] == [folder.path / "a.png"]
    assert found.notices[0].startswith("2 images of coco.json without a readable file left out: ../secret.png, ")


@pytest.mark.parametrize("path", ["..\\images\\A.PNG", "C:\\me\\a.png", "other name.png", None, "../../etc/a.png"])
def test_the_image_may_be_in_another_folder_under_a_name_of_another_system(folder, path):
    folder.image("images/a.png")
    folder.write("json/a.json", labelme(shape("cat", BOX), path=path))
    assert folder.masks() == {"images/a": BOXED}


def test_roboflow_has_a_file_in_each_folder_and_its_group_is_no_class(folder):
    categories = [
        {"id": 0, "name": "cells", "supercategory": "none"},
        {"id": 1, "name": "cell", "supercategory": "cells"},
    ]
    for part in ("train", "valid", "test"):
        folder.image(f"{part}/{part}_jpg.rf.0a1b2c.jpg")
        content = coco((1, [FLAT]), names=(f"{part}_jpg.rf.0a1b2c.jpg",))
        folder.write(f"{part}/_annotations.coco.json", {**content, "categories": categories})
    folder.write("README.roboflow.txt", "cells - v1\n")
    found = folder.find()
    assert [pair.part for pair in (*found.pairs, *found.test)] == ["train", "val", "test"]
    assert (found.num_classes, found.class_names, found.notices) == (1, ("cell",), ())
    assert found.rule.endswith("as they are divided into train and val")


def test_test_images_without_annotations_are_no_background(folder):
    for part in ("train", "val", "test"):
        folder.image(f"{part}/{part}.png")
        folder.write(f"{part}.json", coco(*([(1, [FLAT])] if part != "test" else []), names=(f"{part}.png",)))
    found = folder.find()
    assert (len(found.pairs), found.test) == (2, ())
    assert "1 test image left out: none has any annotation" in found.notices


def test_yolo_folders_names_and_images_without_labels(folder):
    for part in ("train", "val", "test"):
        folder.image(f"images/{part}/a.jpg")
    folder.image("images/train/b.jpg")
    for part in ("train", "val"):
        folder.write(f"labels/{part}/a.txt", f"{LEFT}\n1 0 0.66667 1 0.66667 1 1 0 1\n")
    folder.write(
        "coco8-seg.yaml", "train: images/train\nval: images/val\ntest:\nnames:\n  0: person\n  1: on\n  2: car\n"
    )
    found = folder.find()
    mask = ["1100", "1100", "2222"]
    assert folder.masks() == {"images/train/a": mask, "images/train/b": ["0000"] * 3, "images/val/a": mask}
    assert [pair.part for pair in found.pairs] == ["train", "train", "val"]
    assert found.class_names == ("background", "person", "on")
    assert found.rule.startswith(
        "2 text files such as a.txt (YOLO), drawn as masks, classes in the order of coco8-seg.yaml"
    )
    assert found.notices[:3] == (
        "all background, as in YOLO: 1 image without a label file, b.jpg",
        "1 class without any object left out: car",
        "1 image file that no annotation names left out: images/test/a.jpg",
    )
    folder.write(
        "data.yaml", "train: images/val\nval: images/train\nnames: [person, on]\n"
    )  # the folders that it names count
    assert [pair.part for pair in folder.find().pairs] == ["val", "val", "train"]


def test_the_lists_that_data_yaml_names_are_the_split(folder):
    for name in "abcde":
        folder.image(f"images/{name}.jpg")
        folder.write(f"labels/{name}.txt", LEFT)
    folder.write(
        "data.yaml", "path: ../datasets/mine\ntrain: train.txt\nval: ./val.txt\ntest: test.txt\nnames: [person]\n"
    )
    folder.write("train.txt", "./images/a.jpg\r\nimages/b.jpg\r\n\r\n/data/mine/images/c.jpg\r\n")
    folder.write("val.txt", "datasets\\mine\\images\\c.jpg\nother/images/e.jpg/a.jpg\n")
    folder.write("test.txt", "images/d.jpg\n")
    found = folder.find()
    parts = {pair.name: pair.part for pair in (*found.pairs, *found.test)}
    assert parts == {"images/a": "train", "images/b": "train", "images/c": "val", "images/d": "test"}
    assert "1 image in no list of data.yaml left out" in found.notices


def test_a_table_of_run_lengths_may_have_semicolons_or_tabs(folder):
    folder.image("a.png")
    for separator in ";\t":
        folder.write("train.csv", "ImageId;Label;EncodedPixels\na.png;cat, dog;4 2 7 2\n".replace(";", separator))
        assert folder.masks() == {"a": BOXED}


def test_run_lengths_with_the_size_of_their_image(folder):
    for name in ("a.png", "b.png"):
        folder.image(name)
    # As pandas writes.
    folder.write("rle.csv", "ImageId,height,width,EncodedPixels\na.png,3.0,4.0,4 2\na.png,3,4,7 2\n\nb.png,,,\n")
    assert folder.masks() == {"a": BOXED, "b": ["0000"] * 3}


def test_an_image_rotated_by_exif_is_annotated_as_it_is_seen(folder):
    (folder.path / "a.jpg").write_bytes(pil_bytes("JPEG", Image.new("RGB", (3, 4)), exif=exif(6)))
    folder.write("a.json", labelme(shape("cat", BOX), path="a.jpg"))
    assert folder.masks() == {"a": BOXED}
    folder.write("a.json", labelme(shape("cat", BOX), path="a.jpg", imageHeight=4, imageWidth=3))
    with pytest.raises(
        DataError, match=r"annotated at 3×4, and the file a\.jpg has 4×3 pixels \(is it rotated by its EXIF"
    ):
        folder.find()


# Which files are annotations


def test_a_folder_without_annotations_has_none(folder):
    folder.image("a.png")
    folder.write("a.txt", "A photo of a cat, 2 years old")
    folder.write("package.json", {"name": "x"})
    folder.write("other.xml", "<project/>")
    folder.write(".cache/a.json", labelme(shape("cat", BOX)))
    folder.write("checkpoints/run/a.json", labelme(shape("cat", BOX)))
    (folder.path / "checkpoints/.scan").mkdir()
    assert folder.find() is None


def test_results_of_predict_are_no_annotations_and_no_images_unless_there_are_no_others(folder):
    folder.image("a.png")
    folder.write(
        "polygons.json",
        {"info": {"description": "unet-trainer predict"}, **coco((1, [FLAT]), categories=((1, "seen"),))},
    )
    assert folder.find().class_names == ("seen",)
    folder.write("coco.json", coco((1, [FLAT])))
    (folder.path / "overlays").mkdir()
    (folder.path / "overlays/a.png").write_bytes(b"\x89PNG unet-trainer predict")
    found = folder.find()
    assert found.class_names == ("cat",)
    assert found.notices[-1] == f"2 results of predict left out, such as {folder.path / 'overlays/a.png'}"


def test_mask_dir_and_image_dir_choose_among_several(folder):
    folder.image("a.png")
    folder.image("copies/a.png")
    folder.write("old/coco.json", coco((1, [FLAT])))
    folder.write("new/a.json", labelme(shape("lynx", BOX)))
    with pytest.raises(
        DataError, match=r"mask_dir: annotations of COCO and LabelMe in .*; set mask_dir to the folder or file of one"
    ):
        folder.find()
    with pytest.raises(DataError, match=r"image_dir: a\.png could be a\.png, copies/a\.png; set image_dir"):
        folder.find(mask_dir="old")
    (pair,) = folder.find(mask_dir="old/coco.json", image_dir="copies").pairs
    assert (pair.name, pair.image) == ("a", folder.path / "copies/a.png")
    folder.write("old/coco2.json", coco((1, [FLAT])))
    with pytest.raises(DataError, match=r"a\.png is annotated twice: .* set mask_dir to the annotations that count"):
        folder.find(mask_dir="old", image_dir="copies")


@pytest.mark.parametrize(("content", "what"), [
    ({"_via_settings": {}, "_via_img_metadata": {}, "_via_attributes": {}}, "VGG Image Annotator"),
    ({"images": [], "annotations": [{"segments_info": [], "file_name": "a.png", "image_id": 1}], "categories": []}, "COCO panoptic"),
    ({"images": [], "annotations": [{"caption": "a cat", "image_id": 1}]}, "COCO without categories"),
    ([{"image": "/data/a.png", "id": 1, "annotator": 1, "annotation_id": 1, "tag": []}], "Label Studio's JSON-MIN"),
    ([{"id": 1, "annotations": [{"id": 1, "result": []}], "data": {"image": "/data/a.png"}}], "Label Studio's own JSON"),
    ({"size": {"height": 3, "width": 4}, "tags": [], "objects": []}, "Supervisely's own JSON"),
    ({"type": "FeatureCollection", "features": []}, "GeoJSON"),
])  # fmt: skip
def test_other_formats_are_named_with_what_to_do(folder, content, what):
    folder.write("x.json", content)
    folder.image("a.png")
    with pytest.raises(DataError, match=rf"x\.json is .*{what}.*; "):
        folder.find()
    (folder.path / "x.json").rename(folder.path / "x.geojson")
    with pytest.raises(DataError, match=rf"x\.geojson is .*{what}.*; "):
        folder.find()
    assert [kind_of_json(other) for other in ({"name": "x"}, [], ["a"], "text", 3, [[]])] == [""] * 6


@pytest.mark.parametrize("name", ["a.json", "train.csv"])
def test_annotations_in_another_encoding_are_named_with_what_to_do(folder, name):
    folder.image("a.png")
    texts = {
        "a.json": json.dumps(labelme(shape("Öl", BOX)), ensure_ascii=False),
        "train.csv": "ImageId,Label,rle\na.png,Öl,1 2\n",
    }
    (folder.path / name).write_bytes(texts[name].encode("cp1252"))
    with pytest.raises(
        DataError, match=rf"{re.escape(name)}: it is not UTF-8 text, as some programs save it; save it as UTF-8$"
    ):
        folder.find()


def test_json_of_another_tool_and_tables_of_vgg_are_named_with_what_to_do(folder):
    folder.image("a.png")
    folder.write("a.json", {"item": {"name": "a.png"}, "annotations": [{"polygon": {"paths": []}, "name": "cat"}]})
    with pytest.raises(
        DataError, match=r"a\.json has the name of an image, and is JSON of no tool that is read; .* export COCO"
    ):
        folder.find()
    (folder.path / "a.json").unlink()
    folder.write("annotations/a.xml", "<Annotations><Annotation Id='1'/></Annotations>")
    with pytest.raises(DataError, match=r"a\.xml has the name of an image, and is XML of no tool that is read"):
        folder.find()
    (folder.path / "annotations/a.xml").unlink()
    path = folder.write("annotations.xml", "<?xml version='1.0'?><annotations><version>1.1</version></annotations>")
    with pytest.raises(DataError, match=r"annotations\.xml is CVAT's XML, which is not read; export COCO, .*PNG masks"):
        folder.find()
    path.unlink()
    folder.write("via.csv", "filename,file_size,region_id,region_shape_attributes,region_attributes\n")
    with pytest.raises(
        DataError, match=r"via\.csv is a project of the VGG Image Annotator, which is not read; export COCO"
    ):
        folder.find()


# What is wrong


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("coco.json", coco((1, [["x", 0, 4, 0, 4, 3]])), r"annotation 1: coordinates are \['x', 0, .*; need numbers"),
    ("coco.json", coco((1, [[0, 0, 4, 0, 4]])), r"annotation 1: 5 numbers, \[0, 0, 4, 0, 4\]; need x and y for each point"),
    ("coco.json", coco((1, [[0, 0, 4, 0, 4, float("nan")]])), "annotation 1: a coordinate that is no number"),
    ("coco.json", coco((1, {"counts": [2, 3, 7], "size": [4, 3]})), r"its run lengths are for the size \[4, 3\]; need \[3, 4\]"),
    ("coco.json", coco((1, {"counts": "~~", "size": [3, 4]})), "run lengths with '~'"),
    ("coco.json", coco((1, [FLAT]), (1, [])), "annotation 2: a box without an outline, and a box is no mask; export polygons or masks"),
    ("coco.json", coco((1, [FLAT]), {"image_id": 1, "segmentation": [FLAT]}), "annotation 2: 'category_id' is missing"),
    ("coco.json", coco((1, [FLAT]), (None, [FLAT])), "annotation 2: category_id is None; need one of 1, 2"),
    ("coco.json", coco((1, [FLAT]), annotations=[None]), "annotation 1: a value has the wrong type, such as null in place of a list"),
    ("coco.json", coco((3, [FLAT]), categories=((3, "cat"), (3, "dog"))), "category 2: id 3 is used twice"),
    ("coco.json", coco((1, [FLAT]), categories=((1, "a\x00b"),)), r"category 1: name is 'a\\x00b'; need a text of 1 to 100"),
    ("coco.json", coco((1, [FLAT]), images=[{"id": 1, "file_name": "a.png", "width": 10**6, "height": 10**6}]), "annotated at 1000000×1000000"),
    ("coco.json", coco((1, [FLAT]), images=[{"id": 1, "file_name": "a.png", "width": 4.5, "height": 3}]),
     "image 1: height is 3 and width 4.5; need whole numbers"),
    ("coco.json", coco(), "holds no object of any class, so that there is nothing to learn"),
    ("coco.json", coco((1, [FLAT]), names=("b.png",)), "none of their images is in .*b.png.; set image_dir"),
    ("coco.json", coco((1, [FLAT]), names=("x\\\\a.jpg",)), "none of their images .*a.jpg.; files of these names have another extension: rename"),
    ("coco.json", '{"images": [', r"Expecting value: line 1.*; was it cut off"),
    ("a.json", labelme(shape("cat", BOX, ["polygon"])), r"shape 1 \(cat\): shape_type \['polygon'\] is not known; need polygon"),
    ("a.json", labelme(shape("cat", BOX[:1], "circle")), r"shape 1 \(cat\): 1 point; need 2"),
    ("a.json", labelme(shape("cat", [[0, 0], [1, 1]], "mask", mask=text64(LARGE))), "a mask that is no picture, or larger than its image"),
    ("a.txt", f"{LEFT}\n0 10 10 50 50 30 30", "50 is no share of the image; need numbers from 0 to 1, not pixels"),
    ("rle.csv", "ImageId,height,width,EncodedPixels\na.png,6,8,1 2\n", "annotated at 8×6, and the file a.png has 4×3 pixels"),
    ("rle.csv", "ImageId,EncodedPixels\na.png,1 2\nb.png\nc.png,1 2\n", "line 3 has too few cells, no name of an image, or a quote"),
    ("rle.csv", 'EncodedPixels,ImageId\n1 2,a.png\n1 2,"b.png\n1 2,c.png\n', "line 3 has too few cells, no name of an image, or a quote"),
    ("rle.csv", "ImageId,EncodedPixels\na.png,1 2 3\n", "line 2: run lengths '1 2 3'; need pairs of start and length"),
    ("a.txt", f"{LEFT}\n² 0 0 1 0 1 1", "line 2: class '²'; need a class number"),
])  # fmt: skip
def test_what_is_wrong_is_refused_with_its_entry(folder, name, content, reason):
    folder.image("a.png")
    folder.write(name, content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=rf"{re.escape(name)}.*{reason}"):
        folder.find()


@pytest.mark.parametrize(("yaml", "reason"), [
    ("names: {0: cat, 2: dog}", "names has the keys 0, 2; need the numbers from 0 to 1"),
    ("names: [[cat]]", "need a text"),
    ("names: cell", "names is 'cell'; need a list"),
    ("names: !!python/object/apply:os.system [ls]", "tags are not allowed"),
])  # fmt: skip
def test_a_wrong_data_yaml_is_refused(folder, yaml, reason):
    folder.image("a.png")
    folder.write("a.txt", LEFT)
    path = folder.write("data.yaml", yaml)
    with pytest.raises(DataError, match=f"{path}: .*{reason}"):
        folder.find()


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_pipe_or_a_device_in_the_place_of_annotations_is_named_and_not_waited_for(folder, kind):
    folder.image("a.png")
    replace_by(kind, folder.path / "coco.json")
    with pytest.raises(DataError, match=r"coco\.json cannot be read \(a pipe, a socket or a device; need a file\)"):
        folder.find()
