"""Annotations of labelling tools as they write them → masks; what is wrong in a file is refused with its entry."""

import base64
import json
import re

import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import cv2_bytes, exif, pil_bytes
from helpers.no_files import replace_by
from helpers.project import ROOT
from unet_trainer.config.schema import Config
from unet_trainer.data import annotations, find
from unet_trainer.data.formats import coco as coco_format
from unet_trainer.data.formats import labelme as labelme_format
from unet_trainer.data.formats import rle_table, shapes, yolo
from unet_trainer.data.formats.shapes import draw_line, fill_polygon
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import read_mask


class Folder:
    """A data folder; images are noise, so that no two are identical."""

    def __init__(self, tmp_path):
        self.path, self.checkpoints, self.num_images = tmp_path / "data", tmp_path / "checkpoints", 0
        self.path.mkdir()

    def image(self, *names):
        for name in names:
            self.num_images += 1
            pixels = np.random.default_rng(self.num_images).integers(0, 256, (3, 4, 3)).astype(np.uint8)
            self.write(name, cv2_bytes(name[-4:], pixels))

    def write(self, name, content):
        """Text and bytes as they are, anything else as JSON."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def config(self, **settings):
        return Config(data_dir=str(self.path), checkpoint_dir=str(self.checkpoints), **settings)

    def find(self, **settings):
        place, pairs = Place.of(self.config(**settings)), None
        for module in (coco_format, labelme_format, yolo, rle_table, annotations):
            pairs = module.find(place, self.config(**settings)) if pairs is None else pairs
        return None if pairs is None else place.said.with_pairs(pairs)

    def refuses(self, message, **settings):
        with pytest.raises(DataError, match=message):
            self.find(**settings)


def masks_of(found):
    """Name → rows of class ids as text."""
    return {pair.name: ["".join(map(str, row)) for row in read_mask(pair.mask).tolist()] for pair in found.pairs}


BOX = [[1, 0], [3, 0], [3, 2], [1, 2]]  # of images that are 4 wide and 3 high
BOXED = ["0110", "0110", "0000"]
FLAT = [number for point in BOX for number in point]
LEFT = "0 0 0 0.5 0 0.5 1 0 1"  # YOLO: two of four columns


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def picture(pixels):
    return base64.b64encode(cv2_bytes(".png", np.array(pixels, np.uint8))).decode()


def box(x0, y0, x1, y1):
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def coco(*annotations, names=("a.png",), categories=((1, "cat"), (2, "dog")), **changes):
    """Annotations as (category, segmentation) of the first image, or as dicts."""
    entries = [
        entry if isinstance(entry, dict) else {"image_id": 1, "category_id": entry[0], "segmentation": entry[1]}
        for entry in annotations
    ]
    return {
        "images": [{"id": i, "file_name": name, "width": 4, "height": 3} for i, name in enumerate(names, start=1)],
        "annotations": [{"id": number, "iscrowd": 0, **entry} for number, entry in enumerate(entries, start=1)],
        "categories": [{"id": identity, "name": name, "supercategory": ""} for identity, name in categories],
        **changes,
    }


def shape(label, points, kind="polygon", **others):
    return {"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}, **others}


def labelme(*shapes, path="a.png", **changes):
    content = {"version": "5.4.1", "shapes": list(shapes), "imagePath": path, "imageData": "not looked at"}
    return {**content, "imageHeight": 3, "imageWidth": 4, **changes}


# Shapes, and what is on top


CROWD = {"image_id": 1, "category_id": 1, "segmentation": [box(1, 0, 2, 3)], "iscrowd": 1}
NO_AREA = "left out, without an area (a point, a line) or outside of the image: in a.png"
SMALLER = "pixels in objects of several classes; the smaller object is on top: in a.png"
BANDS = [[0, 0], [4, 0], [4, 1], [0, 1]], [[0, 1], [4, 1], [4, 2], [0, 2]]


@pytest.mark.parametrize(("name", "content", "mask", "notice"), [
    ("coco.json", coco((1, [box(0, 0, 1, 3), box(2, 0, 4, 1)])), ["1011", "1000", "1000"], ""),
    ("coco.json", coco((1, FLAT)), BOXED, ""),  # without the list around it
    ("coco.json", coco((1, {"counts": [2, 3, 7], "size": [3, 4]})), ["0100", "0100", "1000"], ""),  # down the columns
    ("coco.json", coco((1, {"counts": "237", "size": [3, 4]})), ["0100", "0100", "1000"], ""),
    ("coco.json", coco((1, {"counts": "114O02", "size": [3, 4]})), ["0000", "1001", "0001"], ""),  # 1 1 4, -1 + 1, 0 + 4, 2 + 0
    ("coco.json", coco((1, {"counts": [0, 4, 1, 7], "size": [3, 4]})), ["1111", "1011", "1111"], ""),
    ("a.json", labelme(shape("cat", BOX)), BOXED, ""),
    ("a.json", labelme(shape("cat", [[3, 2], [1, 0]], "rectangle")), BOXED, ""),
    ("a.json", labelme(shape("cat", BOX, "rectangle")), BOXED, ""),
    ("a.json", labelme(shape("cat", [[1.5, 1.5], [2.5, 1.5]], "circle")), ["0100", "1110", "0100"], ""),
    ("a.json", labelme(shape("cat", [[2, 1], [3, 2]], "mask", mask=picture([[0, 255], [255, 255]]))), ["0000", "0001", "0011"], ""),
    ("a.json", labelme({"label": "cat", "points": BOX}), BOXED, ""),  # an old file
    ("a.txt", LEFT, ["1100"] * 3, ""),
    ("rle.csv", "ImageId,EncodedPixels\na.png,4 2\na.png,7 2\n", BOXED, ""),
    ("rle.csv", "ImageId;Label;EncodedPixels\na.png;cat, dog;4 2 7 2\n", BOXED, ""),
    ("rle.csv", "ImageId_ClassId\tEncodedPixels\na.png_1\t4 2 7 2\na.png_2\t\n", BOXED, ""),
    ("coco.json", coco((1, [FLAT]), (1, [[0, 0, 4, 3]])), BOXED, f"1 object {NO_AREA}"),
    ("a.json", labelme(shape("cat", BOX), shape("cat", [[0, 0], [4, 3]]), shape("cat", [[1, 1]], "point")), BOXED, f"2 objects {NO_AREA}"),
    ("coco.json", coco((2, [box(1, 1, 3, 2)]), (1, [box(0, 0, 4, 3)])), ["1111", "1221", "1111"], f"2 {SMALLER}"),
    ("coco.json", coco((1, [FLAT]), (2, [FLAT])), ["0220", "0220", "0000"], f"4 {SMALLER}"),  # the later of equal ones
    ("coco.json", coco((2, [box(0, 0, 4, 3)]), CROWD), ["2222"] * 3, f"3 {SMALLER}"),
    ("a.json", labelme(shape("zebra", BOX), shape("ant", [[2, 0], [4, 0], [4, 1], [2, 1]])), ["0211", "0220", "0000"], "the later shape is on top"),
    ("a.json", labelme(shape("cat", BOX), shape("__ignore__", BANDS[0]), shape("Background", BANDS[1])), ["255255255255", "0000", "0000"], ""),
])  # fmt: skip
def test_a_shape_becomes_its_pixels(folder, name, content, mask, notice):
    folder.image("a.png")
    folder.write(name, content)
    found = folder.find()
    assert masks_of(found) == {"a": mask}
    assert notice in " ".join(found.notices)


# Outlines


def on_image(draw, points, height, width, *more):
    draw(canvas := np.zeros((height, width), np.bool_), points, *more)
    return canvas


def inside_by_definition(points, height, width):
    """Even-odd, centre by centre: how often a ray to the left meets an edge."""
    image = np.zeros((height, width), bool)
    for row, column in np.ndindex(height, width):
        x, y = column + 0.5, row + 0.5
        for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
            image[row, column] ^= (y0 < y) != (y1 < y) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x
    return image


@pytest.mark.parametrize("seed", range(3))
def test_random_polygons_are_filled_as_the_definition_says(seed):
    points = np.random.default_rng(seed).uniform(-3, 15, (seed + 3, 2))
    np.testing.assert_array_equal(on_image(fill_polygon, points, 11, 13), inside_by_definition(points, 11, 13))


def test_an_endless_outline_is_refused(monkeypatch):
    monkeypatch.setattr(shapes, "MAX_CROSSINGS", 1000)
    with pytest.raises(DataError, match=r"an outline of 300 points that crosses .* rows; need a simpler one"):
        on_image(fill_polygon, np.random.default_rng(1).uniform(-5, 45, (300, 2)), 40, 40)


@pytest.mark.parametrize(("points", "width", "rows"), [
    ([[1.5, 1.5], [3.5, 1.5]], 2, [".###..", "#####.", ".###..", "......"]),  # the centres within 1 of it, round ends
    ([[0.5, 0.5], [0.5, 2.5], [2.5, 2.5]], 1, ["#..", "#..", "###"]),
    ([[1.5, 1.5]] * 2, 1, ["...", ".#.", "..."]),
    ([[50, 50], [60, 60]], 4, ["..."] * 3),
])  # fmt: skip
def test_a_line_has_the_centres_within_half_of_its_width(points, width, rows):
    expected = np.array([[pixel == "#" for pixel in row] for row in rows])
    np.testing.assert_array_equal(on_image(draw_line, np.array(points), *expected.shape, width), expected)


# Classes


def test_classes_without_objects_are_left_out_and_background_is_0(folder):
    folder.image("a.png")
    categories = ((90, "tree"), (7, "unused"), (3, "house"), (1, "Background"))
    entries = (90, [box(0, 0, 1, 3)]), (3, [box(2, 0, 4, 3)]), (1, [box(3, 0, 4, 1)])
    folder.write("coco.json", coco(*entries, categories=categories))
    found = folder.find()
    assert (found.class_names, masks_of(found)) == (("background", "house", "tree"), {"a": ["2010", "2011", "2011"]})
    assert found.notices[0] == "1 class without any object left out: unused"


def test_classes_of_run_lengths_are_in_the_order_of_their_numbers(folder):
    folder.image("a.png")
    folder.write("rle.csv", "image,label,height,rle\na,type 10,x,1 1\na,type 2,x,2 1\na,oak,x,3 1\n")
    assert folder.find().class_names == ("background", "oak", "type 2", "type 10")


def test_labels_of_labelme_that_differ_in_case_or_spaces_are_one_class(folder):
    for name, label in (("a", "Nucleus "), ("b", "nucleus"), ("c", " nucleus"), ("d", "debris")):
        folder.image(f"{name}.png")
        folder.write(f"{name}.json", labelme(shape(label, BOX), path=f"{name}.png"))
    found = folder.find()
    assert found.class_names == ("background", "debris", "nucleus")
    assert masks_of(found)["a"] == masks_of(found)["b"] == ["0220", "0220", "0000"]
    assert found.notices == ("labels that differ only in case are one class, nucleus: 'Nucleus' (1), 'nucleus' (2)",)
    for names in (["Nucleus", "debris"], ["nucleus", "Nucleus", "debris"], ["NUCLEUS", "debris"]):
        assert folder.find(class_names=["background", *names]).class_names == ("background", *names)


def test_class_names_decide_the_ids(folder):
    folder.image("a.png")
    folder.write("a.json", labelme(shape("cat", BANDS[0]), shape("dog", BANDS[1])))
    names = ["background", "dog", "bird", "cat"]
    found = folder.find(class_names=names)
    assert (found.class_names, found.num_classes, masks_of(found)) == (tuple(names), 4, {"a": ["3333", "1111", "0000"]})
    lacks = r"class_names: it lacks dog of .*a\.json; leave it out, or list background, cat, dog"
    folder.refuses(lacks, class_names=["background", "cat", "hound"])
    folder.write("a.json", labelme(shape("cat", BOX)))
    assert folder.find(class_names=["Katze"]).class_names == ("cat",)  # a single class may be called anything


# Images and parts


def test_images_without_annotations_are_background_and_files_and_names_without_the_other_are_left_out(folder):
    folder.image("images/a.png", "images/b.png", "images/c.png")
    outside = folder.path.parent / "secret.png"
    outside.write_bytes((folder.path / "images/c.png").read_bytes())
    folder.write("coco.json", coco((1, [FLAT]), names=("a.png", "b.png", "../secret.png", str(outside))))
    found = folder.find()
    assert masks_of(found) == {"images/a": BOXED, "images/b": ["0000"] * 3}
    assert found.notices == (
        f"2 images of coco.json without a readable file left out: ../secret.png, {outside}",
        "1 class without any object left out: dog",
        "1 image without any annotation, all background: b.png",
        "1 image file that no annotation names left out: images/c.png",
    )


@pytest.mark.parametrize("path", ["..\\images\\A.PNG", "C:\\me\\a.png", "other name.png", None, "../../etc/a.png"])
def test_the_image_may_be_in_another_folder_under_a_name_of_another_system(folder, path):
    folder.image("images/a.png")
    folder.write("json/a.json", labelme(shape("cat", BOX), path=path))
    assert masks_of(folder.find()) == {"images/a": BOXED}


def test_images_of_one_name_are_told_apart_by_their_folders(folder):
    folder.image("p1/1.png", "p3/1.png", "p3/2.png")
    folder.write("coco.json", coco((1, [FLAT]), names=("p3/1.png", "p2/2.png", "p1/1.png")))
    found = folder.find()  # p3/2.png is not the image p2/2.png
    assert masks_of(found) == {"p1/1": ["0000"] * 3, "p3/1": BOXED}


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
    folder.write("test/_annotations.coco.json", coco(names=("test_jpg.rf.0a1b2c.jpg",), categories=[(1, "cell")]))
    found = folder.find()
    assert (len(found.pairs), found.test) == (2, ())
    assert found.notices[0].startswith("1 test image left out, none has any annotation: test_jpg")


def test_yolo_folders_names_and_images_without_labels(folder):
    folder.image(*(f"images/{part}/a.jpg" for part in ("train", "val", "test")), "images/train/b.jpg")
    for part in ("train", "val"):
        folder.write(f"labels/{part}/a.txt", f"{LEFT}\n1 0 0.66667 1 0.66667 1 1 0 1\n")
    parts = "train: images/train\nval: images/val\ntest:\n"
    folder.write("coco8-seg.yaml", f"{parts}names:\n  0: person\n  1: on\n  2: car\n")
    found, mask = folder.find(), ["1100", "1100", "2222"]
    assert masks_of(found) == {"images/train/a": mask, "images/train/b": ["0000"] * 3, "images/val/a": mask}
    assert [pair.part for pair in found.pairs] == ["train", "train", "val"]
    assert found.class_names == ("background", "person", "on")
    assert found.rule.startswith("2 text files such as a.txt (YOLO), drawn as masks, classes in the order of coco8")
    assert found.notices[:3] == (
        "1 class without any object left out: car",
        "1 image without any annotation, all background: b.jpg",
        "1 image file that no annotation names left out: images/test/a.jpg",
    )
    # The folders that it names count.
    folder.write("data.yaml", "train: images/val\nval: images/train\nnames: [person, on]\n")
    assert [pair.part for pair in folder.find().pairs] == ["val", "val", "train"]


def test_an_image_rotated_by_exif_is_annotated_as_it_is_seen(folder):
    (folder.path / "a.jpg").write_bytes(pil_bytes("JPEG", Image.new("RGB", (3, 4)), exif=exif(6)))
    folder.write("a.json", labelme(shape("cat", BOX), path="a.jpg"))
    assert masks_of(folder.find()) == {"a": BOXED}
    folder.write("a.json", labelme(shape("cat", BOX), path="a.jpg", imageHeight=4, imageWidth=3))
    folder.refuses(r"annotated at 3×4, and the file a\.jpg has 4×3 pixels \(is it rotated by its EXIF")


# Which files are annotations


def test_a_folder_without_annotations_has_none(folder):
    folder.image("a.png")
    others = {"a.txt": "A photo of a cat, 2 years old", "x.json": {"name": "x"}, "y.json": [[]], "z.json": 3,
              "other.xml": "<project/>", "sample_submission.csv": "ImageId,EncodedPixels\na.png,1 1\n"}  # fmt: skip
    hidden = dict.fromkeys([".cache/a.json", "checkpoints/run/a.json"], labelme(shape("cat", BOX)))
    for name, content in (others | hidden).items():
        folder.write(name, content)
    (folder.path / "checkpoints/.scan").mkdir()
    assert folder.find() is None


def test_results_of_predict_are_no_annotations_and_no_images_unless_mask_dir_names_them(folder):
    folder.image("a.png")
    polygons = coco((1, [FLAT]), categories=((1, "seen"),))
    folder.write("polygons.json", {"info": {"description": "unet-trainer predict"}, **polygons})
    assert folder.find() is None
    assert folder.find(mask_dir="polygons.json").class_names == ("seen",)
    folder.write("coco.json", coco((1, [FLAT])))
    (folder.path / "overlays").mkdir()
    (folder.path / "overlays/a.png").write_bytes(b"\x89PNG unet-trainer predict")
    found = folder.find()
    assert found.class_names == ("cat",)
    assert found.notices[-1] == f"2 results of predict left out, such as {folder.path / 'overlays/a.png'}"


def test_mask_dir_and_image_dir_choose_among_several(folder):
    folder.image("a.png", "copies/a.png")
    folder.write("old/coco.json", coco((1, [FLAT])))
    folder.write("new/a.json", labelme(shape("lynx", BOX)))
    folder.refuses("mask_dir: annotations of COCO and LabelMe in .*; set mask_dir to the folder or file of one")
    folder.refuses(r"image_dir: a\.png could be a\.png, copies/a\.png; set image_dir", mask_dir="old")
    (pair,) = folder.find(mask_dir="old/coco.json", image_dir="copies").pairs
    assert (pair.name, pair.image) == ("a", folder.path / "copies/a.png")
    folder.write("old/coco2.json", coco((1, [FLAT])))
    twice = r"a\.png is annotated twice: .* set mask_dir to the annotations that count"
    folder.refuses(twice, mask_dir="old", image_dir="copies")
    folder.image("val/b.png")
    folder.write("../polygons/coco.json", coco((1, [FLAT]), names=("b.png",)))
    (pair,) = folder.find(mask_dir=str(folder.path.parent / "polygons")).pairs  # the folders above are of no part
    assert pair.name == "val/b"


# What is wrong


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("coco.json", coco((1, [["x", 0, 4, 0, 4, 3]])), "annotation 1: could not convert string to float: 'x'; was it cut off"),
    ("coco.json", coco((1, [[0, 0, 4, 0, 4]])), r"annotation 1: coordinates are \[0, 0, 4, 0, 4\]; need x and y of each point"),
    ("coco.json", coco((1, [[0, 0, 4, 0, 4, float("nan")]])), "annotation 1: coordinates are .*nan.; need x and y of each point, numbers"),
    ("coco.json", coco((1, [[0, 0, 4, 0, 1e300, 3]])), "annotation 1: coordinates are .*; need .*, numbers up to 10000000"),
    ("coco.json", coco((1, {"counts": [2, 3, 7], "size": [4, 3]})), r"its run lengths are for the size \[4, 3\]; need \[3, 4\]"),
    ("coco.json", coco((1, {"counts": [2, -3, 13], "size": [3, 4]})), "run lengths that are not 12 pixels together"),
    ("coco.json", coco((1, {"counts": [2, 3], "size": [3, 4]})), "run lengths that are not 12 pixels together"),
    ("coco.json", coco((1, {"counts": "23~", "size": [3, 4]})), "run lengths '23~'; need the characters 0 to o"),
    ("coco.json", coco((1, {"counts": "23P", "size": [3, 4]})), "run lengths '23P'; need .* to the end of a number"),
    ("coco.json", coco((1, [FLAT]), (1, [])), "annotation 2: a box without an outline, and a box is no mask; export polygons or masks"),
    ("coco.json", coco((1, [FLAT]), {"image_id": 1, "segmentation": [FLAT]}), "annotation 2: 'category_id' is missing"),
    ("coco.json", coco((1, [FLAT]), (None, [FLAT])), "annotation 2: category_id is None; need one of 1, 2"),
    ("coco.json", coco(annotations=[None]), "annotation 1: argument of type 'NoneType' is not .*; was it cut off"),
    ("coco.json", coco((3, [FLAT]), categories=((3, "cat"), (3, "dog"))), "category 2: id 3 is used twice"),
    ("coco.json", coco((1, [FLAT]), categories=((1, "a\x00b"),)), r"category 1: the name of a class is 'a\\x00b'; need a text of 1 to 100"),
    ("coco.json", coco((1, [FLAT]), images=[{"id": 1, "file_name": "a.png", "width": 10**6, "height": 10**6}]), "annotated at 1000000×1000000"),
    ("coco.json", coco((1, [FLAT]), images=[{"id": 1, "file_name": "a.png", "width": 4.5, "height": 3}]), "annotated at 4.5×3, and the file a.png has 4×3 pixels"),
    ("coco.json", coco(), "has objects of 0 classes; need 1 to 253"),
    ("coco.json", coco((1, [FLAT]), names=("b.png",)), "none of their images is in .*b.png.; set image_dir"),
    ("coco.json", '{"images": [', r"Expecting value: line 1.*; was it cut off"),
    ("coco.json", '{"images": ' + "[" * 100_000, "nested too deeply"),
    ("a.json", labelme(shape("cat", BOX, ["polygon"])), r"shape 1 \(cat\): shape_type \['polygon'\] is not known; need polygon"),
    ("a.json", labelme(shape("cat", BOX[:1], "circle")), r"shape 1 \(cat\): 1 point; need 2"),
    ("a.json", labelme(shape("cat", [[0, 0], [1, 1]], "mask", mask=base64.b64encode(b"none").decode())), "shape 1 .*: .*not an image"),
    ("a.txt", f"{LEFT}\n0 10 10 50 50 30 30", "50 is no share of the image; need numbers from 0 to 1, not pixels"),
    ("a.txt", f"{LEFT}\n² 0 0 1 0 1 1", "line 2: class '²'; need a class number"),
    ("rle.csv", "ImageId,EncodedPixels\na.png,1 2\nb.png\nc.png,1 2\n", "line 3 has too few cells, no name of an image, or a quote"),
    ("rle.csv", 'EncodedPixels,ImageId\n1 2,a.png\n1 2,"b.png\n1 2,c.png\n', "line 3 has too few cells, no name of an image, or a quote"),
    ("rle.csv", "ImageId,EncodedPixels\na.png,1 2 3\n", "line 2: run lengths '1 2 3'; need pairs of start and length"),
    ("rle.csv", "id,annotation\na,2 2 6 2\n", "is run lengths that may go along the rows, .* need them down"),
    ("data.yaml", "names: [cat]\ntrain: [./train.txt]", "train is a list of files, train.txt, which is not read; name the folder .* split_file"),
    ("data.yaml", "names: {0: cat, 2: dog}", "'1' is missing; was it cut off"),
    ("data.yaml", "names: [[cat]]", "need a text"),
    ("data.yaml", "names: cell", "names is 'cell'; need a list"),
    ("data.yaml", "names: !!python/object/apply:os.system [ls]", "tags are not allowed"),
    ("a.json", json.dumps(labelme(shape("Öl", BOX)), ensure_ascii=False).encode("cp1252"), "it is not UTF-8 text, as some programs save it; save it as UTF-8"),
    ("train.csv", "ImageId,Label,rle\na.png,Öl,1 2\n".encode("cp1252"), "it is not UTF-8 text, as some programs save it; save it as UTF-8"),
    # Of tools that are not read.
    ("x.json", {"_via_settings": {}, "_via_img_metadata": {}, "_via_attributes": {}}, "is .*a project of the VGG Image Annotator, .*export COCO"),
    ("x.json", {"images": [], "annotations": [{"segments_info": [], "image_id": 1}], "categories": []}, "is .*COCO panoptic.*; use"),
    ("x.json", {"images": [], "annotations": [{"caption": "a cat", "image_id": 1}]}, "is .*COCO without categories.*; use"),
    ("x.json", [{"image": "/data/a.png", "id": 1, "annotator": 1, "annotation_id": 1}], "is .*Label Studio's own JSON, .*PNG masks"),
    ("x.json", [{"id": 1, "annotations": [{"id": 1, "result": []}], "data": {}}], "is .*Label Studio's own JSON, .*export COCO.*PNG masks"),
    ("x.json", {"size": {"height": 3, "width": 4}, "tags": [], "objects": []}, "is .*Supervisely's own JSON, .*export COCO.*PNG masks"),
    ("x.xml", "<?xml version='1.0'?><annotations><version>1.1</version>", "is .*CVAT's XML, .*export COCO.*PNG masks"),
    ("metadata.csv", "file_name,mask\na.png,b.png\n", "is a table of Hugging Face, which is not read; set split_file to a CSV"),
])  # fmt: skip
def test_what_is_wrong_or_not_read_is_refused_with_its_place_and_what_to_do(folder, name, content, reason):
    folder.image("a.png")
    if name == "data.yaml":
        folder.write("a.txt", LEFT)
    folder.write(name, content)
    folder.refuses(rf"(?s){re.escape(name)}.*{reason}")


def test_a_format_is_added_as_the_page_shows(folder, monkeypatch):
    (example,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(example, names := {})
    monkeypatch.setattr(find, "FORMATS", (names["find"], *find.FORMATS))
    folder.image("a.png")
    folder.write("circles.csv", "image,class,x,y,radius\na.png,cat,1.5,1.5,1\n")
    found = find.find_dataset(folder.config())
    assert (masks_of(found), found.class_names) == ({"a": ["0100", "1110", "0100"]}, ("cat",))
    folder.write("circles.csv", "image,class,x,y,radius\na.png,cat,1,1,1\na.png,cat,1.5,1.5,wide\n")
    with pytest.raises(DataError, match=r"circles\.csv: line 3: could not convert string to float: 'wide'"):
        find.find_dataset(folder.config())


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_pipe_or_a_device_instead_of_annotations_is_named_and_not_waited_for(folder, kind):
    folder.image("a.png")
    replace_by(kind, folder.path / "coco.json")
    folder.refuses(r"coco\.json cannot be read \(a pipe, a socket or a device; need a file\)")
