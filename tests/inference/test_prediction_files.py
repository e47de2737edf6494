"""The files of a prediction: what is in them, and that there are whole ones only."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import cv2_bytes, tiff_bytes
from helpers.predicting import GEO_TAGS, files_in
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.images.image_decoding import read_image
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding, read_mask
from unet_trainer.images.tiff_files import Georeference, read_georeference
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import (
    Kinds,
    PredictionFolder,
    image_files,
    image_polygons,
    value_table,
    write_coco,
    write_geojson,
)

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (40, 30, 3), np.uint8)
IDS = np.zeros((40, 30), np.uint8)
IDS[5:20, 4:9] = 1
IDS[18:33, 12:30] = 2
SPEC = dataclasses.replace(make_spec(num_classes=3), id_colours=((0, 0, 0), (0, 200, 120), (255, 130, 0)))


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "images/a.png"
    path.parent.mkdir()
    path.write_bytes(cv2_bytes(".png", PIXELS[:, :, ::-1]))
    return Input(path, "sub/a")


def write(folder, given, stops=(1, 19, 40)):
    with image_files(folder, given, IDS.shape) as write_rows:
        for rows in np.split(IDS, stops[:-1]):
            write_rows([rows])


def test_a_mask_holds_ids_and_shows_the_colours_of_the_classes(tmp_path, image):
    write(PredictionFolder(tmp_path / "out", SPEC, Kinds()), image)
    assert files_in(tmp_path / "out") == ["sub/a.png"]
    picture = Image.open(tmp_path / "out/sub/a.png")
    np.testing.assert_array_equal(np.array(picture), IDS)
    np.testing.assert_array_equal(np.array(picture.convert("RGB")), np.array(SPEC.id_colours, np.uint8)[IDS])


CODINGS = {
    "ids": (MaskCoding((0, 1, 2)), [0, 1, 2]),
    "greys": (MaskCoding((0, 100, 255)), [0, 100, 255]),
    "16 bit": (MaskCoding((0, 300, 65535)), [0, 300, 65535]),
    "colours": (MaskCoding((0, COLOUR + 0x102030, COLOUR + 0xFF0000)), [[0, 0, 0], [0x10, 0x20, 0x30], [255, 0, 0]]),
}


@pytest.mark.parametrize("name", CODINGS)
def test_values_are_those_of_the_dataset_and_read_back_as_the_same_ids(name, tmp_path, image):
    coding, expected = CODINGS[name]
    spec = dataclasses.replace(SPEC, coding=coding)
    assert value_table(coding, 3).tolist() == expected
    write(PredictionFolder(tmp_path / "out", spec, Kinds(values=True)), image)
    np.testing.assert_array_equal(coding.encode(read_mask(tmp_path / "out/values/sub/a.png")), IDS)


@pytest.mark.parametrize(
    ("ignored", "expected"), [(None, [0, 255]), (255, [0, 254]), (0, [1, 255])], ids=["none", "white", "black"]
)
def test_a_threshold_s_values_lie_on_their_sides_of_it_and_are_not_ignored(ignored, expected):
    coding = MaskCoding(None, 127, ignore_value=ignored)
    table = value_table(coding, 2)
    assert table.tolist() == expected
    assert coding.encode(table[None]).tolist() == [[0, 1]]


def test_an_overlay_does_not_depend_on_the_parts_it_came_in(tmp_path, image):
    folder = PredictionFolder(tmp_path / "out", SPEC, Kinds(overlay=True))
    drawn = []
    for stops in ([40], range(1, 41), [7, 20, 40]):
        write(folder, image, stops=stops)
        drawn.append(read_image(tmp_path / "out/overlays/sub/a.png"))
        np.testing.assert_array_equal(drawn[0], drawn[-1])
    np.testing.assert_array_equal(drawn[0][IDS == 0], PIXELS[IDS == 0])  # background stays
    assert drawn[0][10, 4].tolist() == [0, 200, 120]  # outlined on its left border
    middle = (0.6 * PIXELS[10, 6] + 0.4 * np.array([0, 200, 120])).round()
    np.testing.assert_allclose(drawn[0][10, 6], middle, atol=1)


def test_results_of_a_geotiff_are_geotiffs_too(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(tiff_bytes(PIXELS, extratags=GEO_TAGS))
    folder = PredictionFolder(tmp_path / "out", SPEC, Kinds(values=True))
    write(folder, Input(path, "a"))
    assert files_in(tmp_path / "out") == ["a.png", "a.tif", "values/a.png", "values/a.tif"]
    with Image.open(tmp_path / "out/a.tif") as picture:
        assert np.array_equal(np.array(picture), IDS)
        assert picture.getpalette()[3:6] == [0, 200, 120]
    assert read_georeference(tmp_path / "out/a.tif") == read_georeference(path) is not None


def test_images_whose_results_would_have_one_name_are_refused(tmp_path):
    folder = PredictionFolder(tmp_path / "out", SPEC, Kinds(values=True))
    # Where case is ignored; the values of one and the mask of the other.
    for one, two in (("a", "A"), ("b", "values/b")):
        with pytest.raises(
            UserError, match=rf"{one}\.jpg and .*{two}\.png: both would write .*\.png; give each its own --out"
        ):
            folder.refuse_overwriting([Input(tmp_path / f"{one}.jpg", one), Input(tmp_path / f"{two}.png", two)])


def test_a_result_never_replaces_an_image_or_a_link(tmp_path, image):
    folder = PredictionFolder(tmp_path / "images", SPEC, Kinds())
    with pytest.raises(UserError, match=r"--out: .*images/a.png is one of the images, and would be overwritten"):
        folder.refuse_overwriting([Input(image.path, "a")])
    (tmp_path / "images/b.png").symlink_to("elsewhere.png")
    with pytest.raises(UserError, match=r"images/b.png is a link to elsewhere.png; remove it"):
        folder.refuse_overwriting([Input(image.path, "b")])


DRAWN = b'{"type": "FeatureCollection", "features": []}'  # polygons that somebody drew


@pytest.mark.parametrize(
    ("name", "content", "image", "kind"),
    [
        ("a.png", cv2_bytes(".png", IDS), "a.jpg", "result of predict"),
        ("a.tif", tiff_bytes(IDS), "a.tif", "result of predict"),
        ("probabilities/a.npy", b"notes", "a.jpg", ".npy array"),
        ("polygons.json", DRAWN, "a.jpg", "result of predict"),
        ("a.geojson", DRAWN, "a.tif", "result of predict"),
    ],
)
def test_a_result_replaces_nothing_but_a_result_of_its_kind(tmp_path, name, content, image, kind):
    path = tmp_path / "out" / name
    (tmp_path / "out/probabilities").mkdir(parents=True)
    path.write_bytes(content)
    folder = PredictionFolder(tmp_path / "out", SPEC, Kinds(probabilities="npy", polygons=True))
    with pytest.raises(UserError, match=rf"^--out: {path} is there and is no {kind}; choose another folder"):
        folder.refuse_overwriting([Input(tmp_path / image, "a")])
    path.unlink()
    folder.refuse_overwriting([Input(tmp_path / image, "a")])


RINGS = np.zeros((12, 10), np.uint8)
RINGS[1:8, 1:8] = 1
RINGS[3:6, 3:6] = 0
RINGS[10, 0:3] = 2
PLACE = Georeference((), (0.5, 0.0, 100.0, 0.0, -0.5, 200.0), 32633)


def test_a_coco_file_has_images_categories_and_an_annotation_for_each_object(tmp_path):
    folder = PredictionFolder(tmp_path, SPEC, Kinds(polygons=True))
    images = [Input(Path("sub/a.jpg"), "sub/a"), Input(Path("b.jpg"), "b")]
    for image, ids in zip(images, (RINGS, np.zeros((3, 4), np.uint8)), strict=True):
        with image_files(folder, image, ids.shape) as write_rows:
            write_rows([ids])
    found = (image_polygons(folder, number, image) for number, image in enumerate(images, 1))
    write_coco(folder, found)
    content = json.loads((tmp_path / "polygons.json").read_text())
    assert content["categories"] == [{"id": 1, "name": "class 1"}, {"id": 2, "name": "class 2"}]
    assert content["images"] == [
        {"id": 1, "file_name": "sub/a.jpg", "width": 10, "height": 12},
        {"id": 2, "file_name": "b.jpg", "width": 4, "height": 3},
    ]
    ring, bar = content["annotations"]
    assert (ring["area"], ring["bbox"], ring["category_id"], ring["image_id"]) == (40, [1, 1, 7, 7], 1, 1)
    assert (bar["area"], bar["bbox"], bar["category_id"], bar["id"]) == (3, [0, 10, 3, 1], 2, 2)
    corners = sorted(zip(bar["segmentation"][0][::2], bar["segmentation"][0][1::2], strict=True))
    assert corners == [(0, 10), (0, 11), (3, 10), (3, 11)]
    assert files_in(tmp_path) == ["b.png", "polygons.json", "sub/a.png"]


def test_geojson_has_closed_rings_in_the_coordinates_of_the_image(tmp_path):
    write_geojson(tmp_path / "a.geojson", RINGS, SPEC, PLACE)
    content = json.loads((tmp_path / "a.geojson").read_text())
    assert content["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32633"
    ring, bar = content["features"]
    assert ring["properties"] == {"class_id": 1, "class": "class 1", "pixels": 40}
    outer, hole = ring["geometry"]["coordinates"]
    assert outer[0] == outer[-1]
    assert sorted(map(tuple, outer[1:])) == [(100.5, 196.0), (100.5, 199.5), (104.0, 196.0), (104.0, 199.5)]
    assert sorted(map(tuple, hole[1:])) == [(101.5, 197.0), (101.5, 198.5), (103.0, 197.0), (103.0, 198.5)]
    assert (turns_left(outer), turns_left(hole)) == (True, False)  # as RFC 7946 asks
    assert len(bar["geometry"]["coordinates"]) == 1


def turns_left(ring):
    """Whether a closed ring runs anticlockwise, with y upwards."""
    return sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairwise(ring)) > 0
