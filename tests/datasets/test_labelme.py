"""LabelMe JSON, one file for each image, as LabelMe 3 to 5 and AnyLabeling write it."""

from __future__ import annotations

import base64

import cv2
import numpy as np
import pytest

from helpers.annotated import Folder
from helpers.image_bytes import cv2_bytes
from unet_trainer.datasets.labelme import is_labelme
from unet_trainer.images.file_bytes import DataError


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def shape(label, points, shape_type="polygon", **others):
    return {"label": label, "points": points, "group_id": None, "description": "", "shape_type": shape_type, "flags": {}, **others}


def labelme(image_path, shapes, width=4, height=3, **others):
    return {
        "version": "5.4.1",
        "flags": {},
        "shapes": shapes,
        "imagePath": image_path,
        "imageData": base64.b64encode(b"not looked at").decode(),
        "imageHeight": height,
        "imageWidth": width,
        **others,
    }


BOX = [[1, 0], [3, 0], [3, 2], [1, 2]]


def one_image(folder, *shapes, width=4, height=3):
    folder.image("a.jpg", width, height)
    folder.write("a.json", labelme("a.jpg", list(shapes), width, height))
    return folder.masks()["a"], folder.find()


def test_a_polygon_beside_its_image(folder):
    mask, found = one_image(folder, shape("cat", BOX))
    assert mask == ["0110", "0110", "0000"]
    assert (found.num_classes, found.class_names, found.notices) == (1, ("cat",), ())
    assert found.rule == "1 JSON file such as a.json (LabelMe), drawn as masks, classes in alphabetical order"


def test_a_rectangle_is_filled_and_said(folder):
    """Two opposite corners, in any order; or all four, as AnyLabeling writes them."""
    wanted = ["0110", "0110", "0000"]
    mask, found = one_image(folder, shape("cat", [[3, 2], [1, 0]], "rectangle"))
    assert mask == wanted
    assert found.notices == ("1 rectangle filled, as the tool does: the mask has its corners, not the object's outline: in a.jpg",)
    folder.write("a.json", labelme("a.jpg", [shape("cat", BOX, "rectangle")]))
    assert folder.masks()["a"] == wanted


def test_a_circle_is_its_centre_and_a_point_on_it(folder):
    mask, _ = one_image(folder, shape("cat", [[1.5, 1.5], [2.5, 1.5]], "circle"))
    assert mask == ["0100", "1110", "0100"]


def test_lines_are_ten_pixels_wide_and_said(folder):
    """Down the middle of 14 columns: five pixels on either side."""
    mask, found = one_image(folder, shape("road", [[7, 0], [7, 3]], "linestrip"), width=14)
    assert mask == ["00111111111100"] * 3
    assert found.notices == ("1 line drawn 10 pixels wide, as the tool does: in a.jpg",)


def test_points_have_no_area_and_outlines_of_two_points_are_left_out(folder):
    mask, found = one_image(folder, shape("cat", [[1, 1]], "point"), shape("cat", BOX), shape("cat", [[0, 0], [4, 3]]))
    assert mask == ["0110", "0110", "0000"]
    assert found.notices == (
        "1 outline of fewer than 3 points left out: in a.jpg",
        "1 point, line or box in space left out: without an area: in a.jpg",
    )


def test_a_mask_is_a_picture_between_two_corners(folder):
    bitmap = np.array([[0, 255], [255, 255]], np.uint8)
    picture = base64.b64encode(cv2_bytes(".png", bitmap)).decode()
    mask, _ = one_image(folder, shape("cat", [[2, 1], [3, 2]], "mask", mask=picture))
    assert mask == ["0000", "0001", "0011"]


def test_classes_are_in_alphabetical_order_and_the_later_shape_is_on_top(folder):
    mask, found = one_image(folder, shape("zebra", BOX), shape("ant", [[2, 0], [4, 0], [4, 1], [2, 1]]))
    assert mask == ["0211", "0220", "0000"]
    assert (found.num_classes, found.class_names) == (3, ("background", "ant", "zebra"))
    assert found.notices == ("1 pixel in 1 image in objects of several classes; the later shape is on top: a.jpg",)


def test_background_cuts_holes_and_ignore_counts_nowhere(folder):
    inner = [[1, 1], [2, 1], [2, 2], [1, 2]]
    corner = [[3, 0], [4, 0], [4, 1], [3, 1]]
    whole = [[0, 0], [4, 0], [4, 3], [0, 3]]
    mask, found = one_image(folder, shape("cat", whole), shape("_background_", inner), shape("__ignore__", corner))
    assert mask == ["111255", "1011", "1111"]
    assert found.class_names == ("cat",)


def test_a_file_without_shapes_is_background_and_an_image_without_a_file_is_left_out(folder):
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        folder.image(name)
    folder.write("a.json", labelme("a.jpg", [shape("cat", BOX)]))
    folder.write("b.json", labelme("b.jpg", []))
    found = folder.find()
    assert folder.masks()["b"] == ["0000"] * 3
    assert found.notices == (
        "1 image without any annotation counts as all background: b.jpg",
        "1 image file that no annotation names left out: c.jpg",
    )


def test_an_old_file_has_neither_sizes_nor_types(folder):
    folder.image("a.jpg")
    content = labelme("a.jpg", [{"label": "cat", "line_color": None, "fill_color": None, "points": BOX}])
    del content["imageHeight"], content["imageWidth"]
    folder.write("a.json", content)
    assert folder.masks() == {"a": ["0110", "0110", "0000"]}


@pytest.mark.parametrize(
    "image_path", ["..\\images\\a.jpg", "../images/a.jpg", "C:\\me\\a.jpg", "other name.jpg", None, "../../etc/a.jpg"]
)
def test_the_image_may_be_in_another_folder(folder, image_path):
    """Found by the path in the file, whatever system wrote it, else by the file's own name; never outside of the folder."""
    folder.image("images/a.jpg")
    folder.write("json/a.json", labelme(image_path, [shape("cat", BOX)]))
    assert folder.masks() == {"images/a": ["0110", "0110", "0000"]}


def test_train_and_val_folders_divide_the_data(folder):
    for part in ("train", "val", "test"):
        folder.image(f"{part}/a.jpg")
        folder.write(f"{part}/a.json", labelme("a.jpg", [shape("cat", BOX)]))
    found = folder.find()
    assert [(pair.name, pair.part) for pair in found.pairs] == [("train/a", "train"), ("val/a", "val")]
    assert [(pair.name, pair.part) for pair in found.test] == [("test/a", "test")]


def test_an_image_rotated_by_exif_is_annotated_as_it_is_seen(folder, tmp_path):
    from PIL import Image

    from helpers.image_bytes import exif, pil_bytes

    (folder.path / "a.jpg").write_bytes(pil_bytes("JPEG", Image.new("RGB", (3, 4)), exif=exif(6)))
    folder.write("a.json", labelme("a.jpg", [shape("cat", BOX)], 4, 3))
    assert folder.masks() == {"a": ["0110", "0110", "0000"]}
    folder.write("a.json", labelme("a.jpg", [shape("cat", BOX)], 3, 4))
    with pytest.raises(
        DataError, match=r"a\.json: annotated at 3×4, and the file a\.jpg has 4×3 pixels \(rotated by its EXIF orientation"
    ):
        folder.find()


@pytest.mark.parametrize(("wrong", "reason"), [
    (shape("cat", BOX, "sphere"), "shape_type 'sphere' is not known; need one of circle, line, .*, mask, point"),
    (shape("cat", BOX, ["polygon"]), r"shape_type \['polygon'\] is not known"),
    (shape("cat", "points"), "points is 'points'; need a list"),
    (shape("cat", [[1], [2, 2], [3, 3]]), r"points is .*; need points as \[x, y\]"),
    (shape("cat", [["a", 1], [2, 2], [3, 3]]), "points holds 'a'; need numbers"),
    (shape("cat", [[1e9, 1], [2, 2], [3, 3]]), "points holds 1000000000.0, which lies far outside"),
    (shape("cat", [[1, 1], [2, 2], [3, 3]], "circle"), "a circle with 3 points; need 2"),
    (shape("cat", [[1, 1]], "rectangle"), "a rectangle with 1 point; need 2"),
    (shape("cat", [[0, 0], [1, 1]], "mask", mask="###"), "mask is not base64"),
    (shape("cat", [[0, 0], [1, 1]], "mask"), "mask is not base64"),
    (shape("cat", [[0, 0], [1, 1]], "mask", mask=base64.b64encode(b"no picture").decode()), "mask is not a picture"),
    (shape("cat", [[0, 0], [1, 1]], "mask", mask=base64.b64encode(cv2_bytes(".png", np.ones((9, 9), np.uint8))).decode()),
     "mask is 9×9 pixels, larger than its image"),
])  # fmt: skip
def test_a_wrong_shape_is_refused_with_its_number(folder, wrong, reason):
    folder.image("a.jpg")
    folder.write("a.json", labelme("a.jpg", [shape("dog", BOX), wrong]))
    with pytest.raises(DataError, match=rf"a\.json: shape 2 \(cat\): {reason}"):
        folder.find()


@pytest.mark.parametrize(("content", "reason"), [
    (labelme("a.jpg", ["cat"]), "shape 1 is 'cat'; need an object with keys"),
    (labelme("a.jpg", [shape(None, BOX)]), "label of shape 1 is None; need a text"),
    (labelme("a.jpg", [shape("cat", BOX)], 4, -3), "height is -3; need a whole number"),
    (labelme("a.jpg", [shape("cat", BOX)], 4, None), "height is None"),
])  # fmt: skip
def test_a_wrong_file_is_refused_by_name(folder, content, reason):
    folder.image("a.jpg")
    folder.write("a.json", content)
    with pytest.raises(DataError, match=rf"a\.json: {reason}"):
        folder.find()


def test_files_without_images_are_named(folder):
    folder.write("a.json", labelme("a.jpg", [shape("cat", BOX)]))
    with pytest.raises(DataError, match=r"LabelMe annotations, but no image in .*; set image_dir"):
        folder.find()
    folder.image("b.jpg")
    with pytest.raises(
        DataError, match=r"1 JSON file such as a.json \(LabelMe\), and none of their images is in .*: a.json \(a.jpg\)"
    ):
        folder.find()
    folder.image("a.jpg")
    folder.write("gone.json", labelme("gone.jpg", [shape("cat", BOX)]))
    assert "1 JSON file without an image file left out: gone.json (gone.jpg)" in folder.find().notices


def test_what_is_labelme():
    assert is_labelme(labelme("a.jpg", []))
    for other in ({"shapes": []}, {"shapes": {}, "imagePath": ""}, [], "shapes"):
        assert not is_labelme(other)


def test_the_mask_of_labelmes_own_converter_differs_only_at_the_outline(folder):
    """LabelMe draws with PIL, which includes the outline: every pixel of ours is one of its."""
    from PIL import Image, ImageDraw

    points = [[5.2, 3.1], [28.7, 6.4], [25.3, 27.9], [14.8, 15.5], [4.4, 26.2]]
    mask, _ = one_image(folder, shape("cat", points), width=32, height=32)
    theirs = Image.new("L", (32, 32), 0)
    ImageDraw.Draw(theirs).polygon([tuple(point) for point in points], outline=1, fill=1)
    ours = np.array([[int(pixel) for pixel in row] for row in mask], np.uint8)
    near = np.array(theirs, np.uint8)
    assert not (ours & ~cv2.dilate(near, np.ones((3, 3), np.uint8))).any()
    assert not (cv2.erode(near, np.ones((3, 3), np.uint8)) & ~ours).any()
