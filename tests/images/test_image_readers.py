"""Readers: parts of images of any format, at full size and averaged."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.image_bytes import cv2_bytes, exif, npy_bytes, pil_bytes, tiff_bytes
from unet_trainer.images import image_readers
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_files import read_image
from unet_trainer.images.image_readers import ArrayReader, BlockReader, average_rows, open_reader, read_small
from unet_trainer.images.tiling import fit_image

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (61, 83, 3), np.uint8)


def write(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def read_all(reader):
    return reader.read(slice(0, reader.size[0]), slice(0, reader.size[1]))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.png", cv2_bytes(".png", PIXELS)),
        ("a.jpg", pil_bytes("JPEG", PIXELS, exif=exif(6))),
        ("a.tif", tiff_bytes(PIXELS)),
        ("a.npy", npy_bytes(PIXELS)),
        ("planes.npy", npy_bytes(np.moveaxis(PIXELS, 2, 0))),
        ("swapped.npy", npy_bytes(PIXELS.astype(">u2"))),
    ],
)
def test_a_reader_gives_what_read_image_gives(name, data, tmp_path):
    path = write(tmp_path, name, data)
    whole = read_image(path)
    with open_reader(path) as reader:
        assert reader.size == whole.shape[:2]
        np.testing.assert_array_equal(read_all(reader), whole)
        np.testing.assert_array_equal(reader.read(slice(7, 20), slice(3, 50)), whole[7:20, 3:50])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_read_as_it_is_displayed(orientation, tmp_path):
    path = write(tmp_path, "a.tif", tiff_bytes(PIXELS, photometric="rgb", extratags=[(274, 3, 1, orientation, True)]))
    whole = read_image(path)
    with open_reader(path) as reader:
        assert isinstance(reader, BlockReader)
        np.testing.assert_array_equal(read_all(reader), whole)
        np.testing.assert_array_equal(reader.read(slice(7, 20), slice(3, 50)), whole[7:20, 3:50])


def test_an_array_file_is_mapped_and_not_read(tmp_path):
    with open_reader(write(tmp_path, "a.npy", npy_bytes(PIXELS))) as reader:
        assert isinstance(reader.pixels, np.memmap)


@pytest.mark.parametrize("size", [(20, 30), (7, 83), (61, 11), (60, 82), (200, 10)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_rows_are_averaged_as_they_are_read(size, dtype, monkeypatch):
    monkeypatch.setattr(image_readers, "ROWS_AT_ONCE", 9)
    pixels = (PIXELS.astype(np.float64) * (1 if dtype == np.uint8 else 200.5)).astype(dtype)
    found = average_rows(ArrayReader(pixels).read, pixels.shape[:2], size)
    expected = exact_average(exact_average(pixels.astype(np.float64), 0, min(61, size[0])), 1, min(83, size[1]))
    assert found.dtype == dtype
    tolerance = 0.51 if np.issubdtype(dtype, np.integer) else 0.05
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=tolerance)


def exact_average(pixels, axis, length):
    """Each new row is the mean of the area that it covers."""
    rows = np.moveaxis(pixels, axis, 0)
    fine = np.repeat(rows, length, 0)  # every row in `length` parts, of which a new row takes as many as there were rows
    return np.moveaxis(fine.reshape(length, len(rows), *rows.shape[1:]).mean(1), 0, axis)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_the_highest_whole_numbers_stay_what_they_are(dtype):
    """As float32 they are rounded to a number that the dtype does not have; what becomes of it differs between processors."""
    highest = np.full((40, 40, 1), np.iinfo(dtype).max, dtype)
    found = average_rows(ArrayReader(highest).read, (40, 40), (7, 7))
    np.testing.assert_allclose(found, np.float64(np.iinfo(dtype).max), rtol=1e-6)


def test_large_files_are_resized_while_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(image_readers, "ROWS_AT_ONCE", 16)
    with open_reader(write(tmp_path, "a.tif", tiff_bytes(PIXELS))) as tiff:
        blocks = tiff.read_resized((20, 30))
    with open_reader(write(tmp_path, "a.npy", npy_bytes(PIXELS))) as array:
        mapped = array.read_resized((20, 30))
    for found in (blocks, mapped):
        assert np.abs(found.astype(int) - fit_image(PIXELS, (20, 30))).max() <= 1


def test_a_small_image_is_read_whole_with_its_size(tmp_path):
    path = write(tmp_path, "a.png", cv2_bytes(".png", PIXELS))
    image, size = read_small(path, 3)
    np.testing.assert_array_equal(image, read_image(path))
    assert size == (61, 83)


def test_a_jpeg_may_be_decoded_at_a_fraction_of_its_size(tmp_path):
    image, size = read_small(write(tmp_path, "a.jpg", pil_bytes("JPEG", PIXELS[:56, :80])), 3, min_side=14)
    assert image.shape == (14, 20, 3)
    assert size == (56, 80)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.png", cv2_bytes(".png", PIXELS)),
        ("a.jpg", cv2_bytes(".jpg", PIXELS)),
        ("a.bmp", cv2_bytes(".bmp", PIXELS)),
        ("a.tif", tiff_bytes(PIXELS)),
        ("big.tif", tiff_bytes(PIXELS, bigtiff=True)),
        ("a.npy", npy_bytes(PIXELS)),
    ],
)
def test_a_large_image_is_known_by_its_header(name, data, tmp_path, monkeypatch):
    monkeypatch.setattr(image_readers, "LARGE_PIXELS", 61 * 83 - 1)
    assert read_small(write(tmp_path, name, data), 3) is None
    monkeypatch.setattr(image_readers, "LARGE_PIXELS", 61 * 83)
    assert read_small(tmp_path / name, 3) is not None


def test_alpha_beyond_the_channels_of_the_model_is_dropped(tmp_path):
    four = RANDOM.integers(0, 256, (61, 83, 4), np.uint8)
    path = write(tmp_path, "a.tif", tiff_bytes(four, photometric="rgb", extrasamples=["unassalpha"], bigtiff=True))
    np.testing.assert_array_equal(read_small(path, 3)[0], four[:, :, :3])
    np.testing.assert_array_equal(read_small(path, 4)[0], four)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore:Dataset has no geotransform")
def test_a_small_tiff_whose_compression_opencv_knows_for_bytes_alone_is_read(tmp_path):
    rasterio = pytest.importorskip("rasterio", reason="writes such files")
    path, pixels = tmp_path / "a.tif", PIXELS.astype(np.uint16) * 257
    with rasterio.open(path, "w", driver="GTiff", height=61, width=83, count=3, dtype="uint16", compress="lzw") as file:
        file.write(np.moveaxis(pixels, 2, 0))
    np.testing.assert_array_equal(read_small(path, 3)[0], pixels)


@pytest.mark.parametrize("read", [lambda path: read_small(path, 3), lambda path: open_reader(path).__enter__()])
def test_what_cannot_be_read_says_why(read, tmp_path):
    with pytest.raises(ReadError, match="No such file"):
        read(tmp_path / "missing.png")
    with pytest.raises(ReadError, match="the file is empty"):
        read(write(tmp_path, "empty.png", b""))
    with pytest.raises(ReadError, match="the file is cut off"):
        read(write(tmp_path, "cut.png", cv2_bytes(".png", PIXELS)[:-200]))
    with pytest.raises(ReadError, match="not an image"):
        read(write(tmp_path, "text.png", b"just text"))
