"""Georeferences: what is read from a GeoTIFF, and what GDAL reads from the copy of its tags."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import tifffile

from helpers.image_bytes import cv2_bytes, tiff_bytes
from unet_trainer.images.georeference import read_georeference
from unet_trainer.images.row_writers import TiffWriter

PIXELS = np.zeros((4, 6), np.uint8)
SCALE = (33550, 12, 3, (0.5, 0.25, 0.0), True)  # of a pixel, in x and y
TIE = (33922, 12, 6, (2.0, 1.0, 0.0, 1000.0, 2000.0, 0.0), True)  # column 2, row 1 lies at (1000, 2000)


def keys(*entries):
    """A directory of keys whose values are numbers: (key, value) each."""
    directory = [1, 1, 0, len(entries), *(number for key, value in entries for number in (key, 0, 1, value))]
    return (34735, 3, len(directory), directory, True)


def write(tmp_path, *tags, **options):
    path = tmp_path / "image.tif"
    path.write_bytes(tiff_bytes(PIXELS, extratags=list(tags), **options))
    return path


def test_scale_and_tie_point_are_an_affine_map_of_pixel_corners(tmp_path):
    found = read_georeference(write(tmp_path, SCALE, TIE, keys((1024, 1), (1025, 1), (3072, 32633))))
    assert found.transform == (0.5, 0.0, 999.0, 0.0, -0.25, 2000.25)
    assert found.epsg == 32633
    np.testing.assert_array_equal(found.places(np.array([[0, 0], [2, 1], [6, 4]])), [[999, 2000.25], [1000, 2000], [1002, 1999.25]])


def test_coordinates_of_centres_are_shifted_to_corners(tmp_path):
    found = read_georeference(write(tmp_path, SCALE, TIE, keys((1025, 2), (2048, 4326))))
    assert found.transform == (0.5, 0.0, 998.75, 0.0, -0.25, 2000.375)  # by half a pixel, to the upper left
    assert found.epsg == 4326


def test_a_matrix_is_an_affine_map(tmp_path):
    matrix = (0.0, 2.0, 0.0, 10.0, 3.0, 0.0, 0.0, 20.0, 0, 0, 0, 0, 0, 0, 0, 1.0)
    found = read_georeference(write(tmp_path, (34264, 12, 16, matrix, True)))
    assert found.transform == (0, 2, 10, 3, 0, 20)
    assert found.epsg is None


def test_a_user_defined_system_has_no_number(tmp_path):
    assert read_georeference(write(tmp_path, SCALE, TIE, keys((3072, 32767)))).epsg is None


def test_control_points_alone_are_no_affine_map_but_are_carried_on(tmp_path):
    found = read_georeference(write(tmp_path, (33922, 12, 12, (0.0,) * 12, True)))
    assert found.transform is None
    assert [tag.tag for tag in found.tags] == [33922]


def test_files_without_a_georeference_have_none(tmp_path):
    png = tmp_path / "image.png"
    png.write_bytes(cv2_bytes(".png", PIXELS))
    broken = tmp_path / "broken.tif"
    broken.write_bytes(b"II*\0" + struct.pack("<I", 10**6))
    assert read_georeference(write(tmp_path)) is None
    assert read_georeference(png) is None
    assert read_georeference(broken) is None
    assert read_georeference(tmp_path / "missing.tif") is None


def test_a_turned_image_has_none(tmp_path):
    """Its results have the shape that is displayed; the coordinates are of the pixels as stored."""
    assert read_georeference(write(tmp_path, SCALE, TIE, (274, 3, 1, 6, True))) is None


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of rasterio's own use of affine
@pytest.mark.parametrize("bigtiff", [False, True])
def test_gdal_reads_the_same_place_from_the_tags_that_are_carried_on(tmp_path, bigtiff):
    rasterio = pytest.importorskip("rasterio", reason="compares with GDAL")
    source = tmp_path / "source.tif"
    transform = rasterio.Affine(0.3, 0.01, 500_000.5, -0.02, -0.3, 5_400_000.25)
    with rasterio.open(
        source, "w", driver="GTiff", height=4, width=6, count=1, dtype="uint8", crs="EPSG:25832", transform=transform,
        BIGTIFF="YES" if bigtiff else "NO",
    ) as file:  # fmt: skip
        file.write(PIXELS[None])
    georeference = read_georeference(source)
    assert georeference.transform == pytest.approx(tuple(transform)[:6])
    assert georeference.epsg == 25832
    with (tmp_path / "result.tif").open("w+b") as result:
        writer = TiffWriter(result, PIXELS.shape, np.uint8, tags=georeference.tags)
        writer.write(PIXELS)
        writer.finish()
    with rasterio.open(source) as before, rasterio.open(tmp_path / "result.tif") as after:
        assert after.crs == before.crs
        assert after.transform == before.transform
        assert after.bounds == before.bounds


def test_tags_of_text_are_carried_on(tmp_path):
    source = write(tmp_path, SCALE, TIE, (34737, 2, 8, "WGS 84|\0", True))
    stream = io.BytesIO()
    writer = TiffWriter(stream, PIXELS.shape, np.uint8, tags=read_georeference(source).tags)
    writer.write(PIXELS)
    writer.finish()
    with tifffile.TiffFile(io.BytesIO(stream.getvalue())) as file:
        assert file.pages.first.tags[34737].value == "WGS 84|"
