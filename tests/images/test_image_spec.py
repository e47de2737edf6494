"""How the pixels of a file become those of a batch, and how the spec goes through a checkpoint."""

import numpy as np
import pytest

from helpers.image_bytes import cv2_bytes, exif, npy_bytes, pil_bytes, tiff_bytes
from unet_trainer.images import image_spec
from unet_trainer.images.image_decoding import read_image
from unet_trainer.images.image_spec import (
    RGB_8BIT,
    ImageReader,
    ImageSpec,
    find_missing,
    open_reader,
    read_small,
)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_missing_value_by_value(dtype):
    image = np.array([[[1, np.nan], [np.inf, 2], [-777, 0]]], dtype)
    assert find_missing(image, [-777.0]).tolist() == [[[False, True], [True, False], [True, False]]]
    assert find_missing(image[:, 2:]) is None
    assert (find_missing(np.full((2, 2, 1), np.finfo(dtype).max / 2, dtype)) is None) == (dtype == np.float16)


def test_whole_numbers_are_missing_where_all_channels_hold_the_mark():
    image = np.array([[[0, 0], [0, 7], [7, 7]]], np.uint8)
    assert find_missing(image, [0.0]).tolist() == [[[True, True], [False, False], [False, False]]]
    for no_mark in (-9999.0, 256.0, 0.5):  # of another depth
        assert find_missing(image, [no_mark]) is None
    assert find_missing(np.zeros((2, 2, 1), bool), [0.0]) is None


def test_a_mark_that_the_user_set_counts_in_whole_numbers_without_a_tag_and_another_only_with_it():
    image = np.array([[[0], [7]]], np.uint8)
    for is_set, tag, filled in ((True, None, [5, 7]), (False, None, [0, 7]), (False, 0.0, [5, 7]), (True, 7.0, [5, 7])):
        spec = ImageSpec(1, "uint8", (5.0,), (1.0,), 0.0, 255.0, nodata=(0.0,), is_nodata_set=is_set)
        assert spec.fill(image, tag)[0].ravel().tolist() == filled


# Readers: parts of images of any format, at full size and averaged

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (61, 83, 3), np.uint8)
FOUR = ImageSpec(4, "uint8", (90.0,) * 4, (40.0,) * 4, 0.0, 255.0)


def write(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def read_all(reader):
    return reader.read(slice(0, reader.size[0]), slice(0, reader.size[1]))


FILES = {
    "a.png": cv2_bytes(".png", PIXELS),
    "a.jpg": pil_bytes("JPEG", PIXELS, exif=exif(6)),
    "a.bmp": cv2_bytes(".bmp", PIXELS),
    "a.tif": tiff_bytes(PIXELS),
    "big.tif": tiff_bytes(PIXELS, bigtiff=True),
    "a.npy": npy_bytes(PIXELS),
    "planes.npy": npy_bytes(np.moveaxis(PIXELS, 2, 0)),
}
TURNED = {f"turned{number}.tif": (274, 3, 1, number, True) for number in range(1, 9)}
OTHERS = {name: tiff_bytes(PIXELS, photometric="rgb", extratags=[tag]) for name, tag in TURNED.items()}
OTHERS["swapped.npy"] = npy_bytes(PIXELS.astype(">u2"))


@pytest.mark.parametrize("name", [*FILES, *OTHERS])
def test_a_reader_gives_what_read_image_gives(name, tmp_path):
    path = write(tmp_path, name, (FILES | OTHERS)[name])
    whole = read_image(path)
    with open_reader(path, RGB_8BIT) as reader:
        assert reader.size == whole.shape[:2]
        np.testing.assert_array_equal(read_all(reader), whole)
        np.testing.assert_array_equal(reader.read(slice(7, 20), slice(3, 50)), whole[7:20, 3:50])


@pytest.mark.parametrize(
    ("size", "dtype"), [((20, 30), np.uint8), ((7, 83), np.uint16), ((60, 82), np.float32), ((200, 10), np.uint8)]
)
def test_rows_are_averaged_as_they_are_read(size, dtype, monkeypatch):
    monkeypatch.setattr(image_spec, "ROWS_AT_ONCE", 9)
    pixels = (PIXELS.astype(np.float64) * (1 if dtype == np.uint8 else 200.5)).astype(dtype)
    found = ImageReader(pixels, RGB_8BIT).read_resized(size)
    expected = exact_average(exact_average(pixels.astype(np.float64), 0, min(61, size[0])), 1, min(83, size[1]))
    assert found.dtype == dtype
    tolerance = 0.51 if np.issubdtype(dtype, np.integer) else 0.05
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=tolerance)


def exact_average(pixels, axis, length):
    """Each new row is the mean of the area that it covers."""
    rows = np.moveaxis(pixels, axis, 0)
    fine = np.repeat(rows, length, 0)  # a new row takes as many of these parts as there were rows
    return np.moveaxis(fine.reshape(length, len(rows), *rows.shape[1:]).mean(1), 0, axis)


@pytest.mark.parametrize("name", FILES)
def test_a_large_image_is_known_by_its_header(name, tmp_path, monkeypatch):
    monkeypatch.setattr(image_spec, "LARGE_PIXELS", 61 * 83 - 1)
    assert read_small(write(tmp_path, name, FILES[name]), RGB_8BIT) is None
    monkeypatch.setattr(image_spec, "LARGE_PIXELS", 61 * 83)
    assert read_small(tmp_path / name, RGB_8BIT) is not None


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"planarconfig": "separate"}, {"tile": (32, 32)}])
def test_alpha_is_kept_where_it_is_one_of_the_channels_of_the_model_and_dropped_beyond_them(options, tmp_path):
    four = RANDOM.integers(0, 256, (61, 83, 4), np.uint8)
    stored = np.moveaxis(four, 2, 0) if "planarconfig" in options else four
    path = write(tmp_path, "a.tif", tiff_bytes(stored, photometric="rgb", extrasamples=["unassalpha"], **options))
    for spec in (RGB_8BIT, FOUR):
        np.testing.assert_array_equal(read_small(path, spec)[0], four[:, :, : spec.channels])
        with open_reader(path, spec) as reader:
            np.testing.assert_array_equal(read_all(reader), four[:, :, : spec.channels])


@pytest.mark.parametrize("name", ["a.tif", "tiles.tif", "a.npy"])
def test_missing_data_is_filled_however_a_file_is_read(name, tmp_path):
    """By the tag of the file, by the mark of the training images, and NaN."""
    spec = ImageSpec(2, "float", (3.0, 5.0), (1.0, 1.0), 0.0, 9.0, nodata=(-777.0,))
    pixels = RANDOM.random((61, 83, 2)).astype(np.float32)
    filled = pixels.copy()
    for row, mark in ((0, np.nan), (7, -777.0), (40, -9999.0)):
        pixels[row, 5:50], filled[row, 5:50] = mark, (3.0, 5.0)
    if name == "a.npy":  # has no tag
        pixels[40, 5:50] = -777.0
    options = {"extratags": [(42113, "s", 0, "-9999", True)], "photometric": "minisblack", "planarconfig": "contig"}
    options |= {"tile": (32, 32)} if name == "tiles.tif" else {}
    path = write(tmp_path, name, npy_bytes(pixels) if name == "a.npy" else tiff_bytes(pixels, **options))
    np.testing.assert_array_equal(read_small(path, spec)[0], filled)
    with open_reader(path, spec) as reader:
        np.testing.assert_array_equal(read_all(reader), filled)
        small = reader.read_resized((20, 30))
    np.testing.assert_allclose(small, ImageReader(filled, spec).read_resized((20, 30)), rtol=1e-5)
