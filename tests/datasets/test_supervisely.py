"""Supervisely projects: meta.json, polygons with holes, bitmaps, rectangles."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from helpers.annotated import Folder
from helpers.image_bytes import cv2_bytes, pil_bytes
from unet_trainer.datasets.supervisely import is_supervisely, is_supervisely_meta
from unet_trainer.images.file_bytes import DataError

META = {
    "classes": [
        {"title": "road", "description": "", "shape": "polygon", "color": "#50E3C2", "geometry_config": {}, "id": 1, "hotkey": ""},
        {"title": "car", "description": "", "shape": "bitmap", "color": "#FF0000", "geometry_config": {}, "id": 2, "hotkey": ""},
    ],
    "tags": [],
    "projectType": "images",
}


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def polygon(title, exterior, *interior):
    return {
        "id": 1,
        "classId": 1,
        "geometryType": "polygon",
        "classTitle": title,
        "tags": [],
        "points": {"exterior": exterior, "interior": list(interior)},
    }


def bitmap(title, data, origin):
    return {"id": 2, "geometryType": "bitmap", "classTitle": title, "tags": [], "bitmap": {"data": data, "origin": origin}}


def packed(picture):
    return base64.b64encode(zlib.compress(picture)).decode()


def annotation(*objects, width=6, height=5):
    return {"description": "", "tags": [], "size": {"height": height, "width": width}, "objects": list(objects)}


def one_image(folder, *objects):
    folder.image("ds0/img/a.jpg", 6, 5)
    folder.write("ds0/ann/a.jpg.json", annotation(*objects))
    folder.write("meta.json", META)
    return folder.masks()["ds0/img/a"], folder.find()


def test_a_polygon_includes_the_pixels_of_its_outline_and_may_have_a_hole(folder):
    """Its corners are pixels: columns 0 to 4 and rows 0 to 4; the hole has columns and rows 1 to 3."""
    mask, found = one_image(folder, polygon("road", [[0, 0], [4, 0], [4, 4], [0, 4]], [[1, 1], [3, 1], [3, 3], [1, 3]]))
    assert mask == ["111110", "100010", "100010", "100010", "111110"]
    assert (found.num_classes, found.class_names) == (1, ("road",))
    assert "1 class without any object left out: car" in found.notices
    assert found.rule == "1 JSON file such as a.jpg.json (Supervisely), drawn as masks, classes in the order of meta.json"


def test_a_bitmap_has_an_origin_and_its_alpha_is_the_mask(folder):
    flat = np.array([[1, 0], [1, 1]], np.uint8)
    mask, _ = one_image(folder, bitmap("car", packed(cv2_bytes(".png", flat * 255)), [3, 1]))
    assert mask == ["000000", "000100", "000110", "000000", "000000"]
    colours = np.zeros((2, 2, 4), np.uint8)
    colours[..., 3] = flat * 255
    folder.write("ds0/ann/a.jpg.json", annotation(bitmap("car", packed(pil_bytes("PNG", colours)), [3, 1])))
    assert folder.masks()["ds0/img/a"] == mask


def test_classes_are_in_the_order_of_the_meta_and_the_later_object_is_on_top(folder):
    road = polygon("road", [[0, 0], [5, 0], [5, 4], [0, 4]])
    car = bitmap("car", packed(cv2_bytes(".png", np.full((1, 2), 255, np.uint8))), [2, 2])
    mask, found = one_image(folder, road, car)
    assert mask == ["111111", "111111", "112211", "111111", "111111"]
    assert found.class_names == ("background", "road", "car")
    assert "2 pixels in 1 image in objects of several classes; the later object is on top: a.jpg" in found.notices


def test_rectangles_are_filled_and_points_left_out(folder):
    rectangle = {**polygon("road", [[3, 3], [1, 1]]), "geometryType": "rectangle"}
    point = {**polygon("car", [[3, 3]]), "geometryType": "point"}
    mask, found = one_image(folder, rectangle, point, polygon("road", [[0, 0], [1, 1]]))
    assert mask == ["000000", "011100", "011100", "011100", "000000"]
    assert found.class_names == ("road",)
    assert [notice.split(":")[0] for notice in found.notices[1:]] == [
        "1 outline of fewer than 3 points left out",
        "1 point, line or box in space left out",
        "1 rectangle filled, as the tool does",
    ]


def test_what_lies_beyond_the_border_is_cut_off(folder):
    mask, found = one_image(
        folder, polygon("road", [[-3, -3], [1, -3], [1, 1], [-3, 1]]), polygon("road", [[60, 0], [70, 0], [70, 9]])
    )
    assert mask == ["110000", "110000", "000000", "000000", "000000"]
    assert "1 object without a pixel: smaller than one, or outside of the image: in a.jpg" in found.notices


def test_datasets_named_train_and_val_divide_the_data(folder):
    for part in ("train", "val"):
        folder.image(f"{part}/img/a.jpg", 6, 5)
        folder.write(f"{part}/ann/a.jpg.json", annotation(polygon("road", [[0, 0], [1, 0], [1, 1]])))
    assert [(pair.name, pair.part) for pair in folder.find().pairs] == [("train/img/a", "train"), ("val/img/a", "val")]


@pytest.mark.parametrize(("wrong", "reason"), [
    (bitmap("car", packed(b"no picture"), [0, 0]), "data is not a picture"),
    (bitmap("car", base64.b64encode(b"not zlib").decode(), [0, 0]), "data is not compressed with zlib"),
    (bitmap("car", "###", [0, 0]), "data is not base64"),
    (bitmap("car", packed(bytes(10**6)), [0, 0]), "data is cut off, or larger than its image"),
    (bitmap("car", packed(cv2_bytes(".png", np.ones((9, 9), np.uint8))), [0, 0]), "data is 9×9 pixels, larger than its image"),
    (bitmap("car", "", [0]), r"origin is \[0\]; need \[x, y\]"),
    (bitmap("car", "", ["a", 0]), "origin is 'a'; need a number of pixels"),
    ({**bitmap("car", "", [0, 0]), "bitmap": None}, "bitmap is None; need an object with keys"),
    (polygon("car", None), "exterior is None; need a list"),
    ({**polygon("car", [[0, 0]]), "geometryType": "rectangle"}, "a rectangle with 1 point; need 2"),
])  # fmt: skip
def test_a_wrong_object_is_refused_with_its_number(folder, wrong, reason):
    with pytest.raises(DataError, match=rf"a\.jpg\.json: object 2 \(car\): {reason}"):
        one_image(folder, polygon("road", [[0, 0], [1, 0], [1, 1]]), wrong)


@pytest.mark.parametrize(("content", "reason"), [
    (annotation("car"), "object 1 is 'car'; need an object with keys"),
    (annotation({"classTitle": 3}), "classTitle of object 1 is 3; need a text"),
    (annotation(width=0), "width is 0; need a whole number"),
])  # fmt: skip
def test_a_wrong_file_is_refused_by_name(folder, content, reason):
    folder.image("ds0/img/a.jpg", 6, 5)
    folder.write("ds0/ann/a.jpg.json", content)
    with pytest.raises(DataError, match=rf"a\.jpg\.json: {reason}"):
        folder.find()


def test_annotations_without_images_are_named(folder):
    folder.image("ds0/img/b.jpg", 6, 5)
    folder.write("ds0/ann/a.jpg.json", annotation(polygon("road", [[0, 0], [1, 0], [1, 1]])))
    with pytest.raises(
        DataError, match=r"\(Supervisely\), and none of their images is in .*: a\.jpg\.json; export the project with its images"
    ):
        folder.find()
    folder.image("ds0/img/a.jpg", 6, 5)
    folder.write("ds0/ann/c.jpg.json", annotation())
    assert "1 JSON file without an image file left out: c.jpg.json" in folder.find().notices


def test_what_is_supervisely():
    assert is_supervisely(annotation())
    assert is_supervisely_meta(META)
    for other in ({"objects": [], "imgHeight": 3}, {"classes": ["a"]}, {"classes": {}}, [], None):
        assert not is_supervisely(other)
        assert not is_supervisely_meta(other)


def test_a_wrong_meta_is_refused_by_name(folder):
    folder.image("ds0/img/a.jpg", 6, 5)
    folder.write("ds0/ann/a.jpg.json", annotation())
    folder.write("meta.json", {"classes": [{"title": "", "shape": "polygon"}]})
    with pytest.raises(DataError, match=r"meta\.json: title of a class is ''; need a text"):
        folder.find()
