"""COCO and GeoJSON files: what other programs read from them."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from itertools import pairwise

import numpy as np
import pytest

from helpers.steps import make_spec
from unet_trainer.images.georeference import Georeference
from unet_trainer.inference.polygon_files import CocoFile, write_geojson

SPEC = make_spec(num_classes=3)
IDS = np.zeros((12, 10), np.uint8)
IDS[1:8, 1:8] = 1
IDS[3:6, 3:6] = 0
IDS[10, 0:3] = 2
PLACE = Georeference((), (0.5, 0.0, 100.0, 0.0, -0.5, 200.0), 32633)


def test_a_coco_file_has_images_categories_and_an_annotation_for_each_object(tmp_path):
    coco = CocoFile(tmp_path / "polygons.json", SPEC, 2)
    coco.add(0, "sub/a.jpg", IDS.shape, IDS)
    coco.add(1, "b.jpg", (3, 4), np.zeros((3, 4), np.uint8))
    coco.finish()
    content = json.loads((tmp_path / "polygons.json").read_text())
    assert content["categories"] == [{"id": 1, "name": "class 1"}, {"id": 2, "name": "class 2"}]
    assert content["images"] == [
        {"id": 1, "file_name": "sub/a.jpg", "width": 10, "height": 12},
        {"id": 2, "file_name": "b.jpg", "width": 4, "height": 3},
    ]
    ring, bar = content["annotations"]
    assert (ring["area"], ring["bbox"], ring["category_id"], ring["image_id"]) == (40, [1, 1, 7, 7], 1, 1)
    assert (bar["area"], bar["bbox"], bar["category_id"], bar["id"]) == (3, [0, 10, 3, 1], 2, 2)
    assert sorted(zip(bar["segmentation"][0][::2], bar["segmentation"][0][1::2], strict=True)) == [
        (0, 10),
        (0, 11),
        (3, 10),
        (3, 11),
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "polygons.json"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools with numpy 2
def test_the_coco_tools_read_the_masks_with_their_holes(tmp_path):
    tools = pytest.importorskip("pycocotools.coco", reason="compares with the COCO tools")
    coco = CocoFile(tmp_path / "polygons.json", SPEC, 1)
    coco.add(0, "a.jpg", IDS.shape, IDS)
    coco.finish()
    with contextlib.redirect_stdout(io.StringIO()):
        read = tools.COCO(str(tmp_path / "polygons.json"))
    masks = np.zeros_like(IDS)
    for annotation in read.loadAnns(read.getAnnIds(imgIds=1)):
        masks += read.annToMask(annotation) * np.uint8(annotation["category_id"])
    np.testing.assert_array_equal(masks, IDS)


def test_the_file_has_the_order_of_the_inputs_whichever_is_done_first(tmp_path):
    texts = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        coco = CocoFile(tmp_path / "polygons.json", SPEC, 4)
        threads = [
            threading.Thread(target=coco.leave_out, args=(2,)) if index == 2
            else threading.Thread(target=coco.add, args=(index, f"{index}.jpg", IDS.shape, np.roll(IDS, index)))
            for index in order
        ]  # fmt: skip
        for thread in threads:
            thread.start()
            thread.join()
        coco.finish()
        texts.append((tmp_path / "polygons.json").read_text())
    assert texts[0] == texts[1]
    assert [image["id"] for image in json.loads(texts[0])["images"]] == [1, 2, 4]


def test_a_discarded_file_leaves_nothing(tmp_path):
    coco = CocoFile(tmp_path / "polygons.json", SPEC, 2)
    coco.add(0, "a.jpg", IDS.shape, IDS)
    coco.discard()
    assert list(tmp_path.iterdir()) == []


def test_geojson_has_closed_rings_in_the_coordinates_of_the_image(tmp_path):
    write_geojson(tmp_path / "a.geojson", IDS, SPEC, PLACE)
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


def test_geojson_without_a_number_of_its_system_names_none(tmp_path):
    write_geojson(tmp_path / "a.geojson", IDS * 0, SPEC, Georeference((), PLACE.transform, None))
    found = json.loads((tmp_path / "a.geojson").read_text())
    assert found == {"type": "FeatureCollection", "generator": "unet-trainer predict", "features": []}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of rasterio's own use of affine
def test_gdal_paints_the_polygons_back_to_the_mask(tmp_path):
    rasterio = pytest.importorskip("rasterio", reason="paints polygons")
    from rasterio.features import rasterize

    write_geojson(tmp_path / "a.geojson", IDS, SPEC, PLACE)
    features = json.loads((tmp_path / "a.geojson").read_text())["features"]
    shapes = [(feature["geometry"], feature["properties"]["class_id"]) for feature in features]
    np.testing.assert_array_equal(rasterize(shapes, IDS.shape, transform=rasterio.Affine(*PLACE.transform)), IDS)
