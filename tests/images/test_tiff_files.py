"""TIFF files: the same pixels whole and by blocks, georeferences, and hostile files, which end in one sentence."""

import shutil
import struct
import tracemalloc

import numpy as np
import pytest
import tifffile

from helpers.image_bytes import change_tag, cv2_bytes, point_back, shared_strip_tiff, tiff_bytes
from unet_trainer.data.formats.stacks import has_pages, page_types
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import EncodedImage, decode_image
from unet_trainer.images.image_spec import RGB_8BIT, open_reader, read_small
from unet_trainer.images.mask_decoding import decode_mask
from unet_trainer.images.tiff_files import read_georeference

RANDOM = np.random.default_rng(0)
# Compresses, and is no ramp.
SMOOTH = np.add.outer(np.arange(70), np.arange(90))[:, :, None] + RANDOM.integers(0, 9, (70, 90, 5))
COLOUR = SMOOTH[:, :, :3].astype(np.uint8)
PALETTE = RANDOM.integers(0, 65536, (3, 256), np.uint16)
TILES = {"tile": (32, 16)}
MANY = {"photometric": "minisblack", "planarconfig": "contig"}

CASES = {
    "one strip": (COLOUR, {}),
    "strips of deflate, differences": (COLOUR, {"rowsperstrip": 8, "compression": "zlib", "predictor": True}),
    "tiles, BigTIFF": (COLOUR, {**TILES, "bigtiff": True}),
    "grey, LZW": (COLOUR[:, :, 0], {**TILES, "compression": "lzw"}),
    "16 bit, ZSTD": (SMOOTH[:, :, 0].astype(np.uint16), {**TILES, "compression": "zstd"}),
    "float, differences of bytes": (SMOOTH.astype(np.float32) / 7, {**TILES, "compression": "zlib", "predictor": True, **MANY}),
    "five channels, signed": (-SMOOTH.astype(np.int16), {"rowsperstrip": 1, "compression": "packbits", **MANY}),
    "planes": (np.moveaxis(SMOOTH, 2, 0).astype(np.uint16), {**TILES, "photometric": "minisblack", "planarconfig": "separate"}),
    "planes in one strip": (np.moveaxis(SMOOTH, 2, 0).astype(np.uint16), {"photometric": "minisblack", "planarconfig": "separate"}),
    "pages": (np.moveaxis(SMOOTH, 2, 0).astype(np.uint8), {"photometric": "minisblack", "compression": "zlib"}),
    "big-endian": (SMOOTH[:, :, :3].astype(np.uint16), {**TILES, "byteorder": ">", "compression": "zlib"}),
    "big-endian, one strip": (SMOOTH[:, :, 0].astype(np.uint16), {"byteorder": ">"}),
}  # fmt: skip


def write(tmp_path, array, **options):
    path = tmp_path / "image.tif"
    path.write_bytes(tiff_bytes(array, **options))
    return path


@pytest.mark.parametrize("name", CASES)
def test_the_pixels_that_were_written_are_read_whole_and_in_parts(name, tmp_path):
    array, options = CASES[name]
    path = write(tmp_path, array, **options)
    expected = np.moveaxis(array, 0, 2) if len(array) == 5 else array.reshape(70, 90, -1)
    whole = decode_image(path.read_bytes())
    assert whole.dtype == expected.dtype
    np.testing.assert_array_equal(whole, expected)
    with open_reader(path, RGB_8BIT) as image:
        for place in (np.s_[0:70, 0:90], np.s_[5:41, 20:85], np.s_[69:70, 0:1]):
            assert image.read(*place).dtype == expected.dtype
            np.testing.assert_array_equal(image.read(*place), expected[place])


@pytest.mark.parametrize("options", [{}, {"tile": (64, 64)}, {"bigtiff": True}])
def test_palettes_are_shown_in_colours_and_white_that_is_0_as_brightness_but_masks_keep_ids(options, tmp_path):
    ids = COLOUR[:, :, 0]
    shown = {"palette": (PALETTE.T >> 8).astype(np.uint8)[ids], "miniswhite": (255 - ids)[:, :, None]}
    for photometric, expected in shown.items():
        colormap = PALETTE if photometric == "palette" else None
        path = write(tmp_path, ids, photometric=photometric, colormap=colormap, **options)
        np.testing.assert_array_equal(decode_image(path.read_bytes()), expected)
        np.testing.assert_array_equal(decode_mask(path.read_bytes()), ids)
        with open_reader(path, RGB_8BIT) as image:
            np.testing.assert_array_equal(image.read(*np.s_[3:40, 0:90]), expected[3:40])


def test_of_a_pyramid_and_of_a_file_with_a_preview_the_full_size_is_read(tmp_path):
    for name, options in (("pyramid.tif", {"subifds": 1}), ("preview.tif", {})):
        with tifffile.TiffWriter(tmp_path / name) as writer:
            writer.write(COLOUR, photometric="rgb", **options, **TILES)
            writer.write(COLOUR[::2, ::2], photometric="rgb", subfiletype=1, **TILES)
        with open_reader(tmp_path / name, RGB_8BIT) as image:
            np.testing.assert_array_equal(image.read(*np.s_[0:70, 0:90]), COLOUR)
        np.testing.assert_array_equal(decode_image((tmp_path / name).read_bytes()), COLOUR)


# Damaged and hostile files


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}])
def test_a_directory_that_points_back_is_damage_wherever_a_tiff_is_opened(options, tmp_path):
    data = point_back(tiff_bytes(COLOUR, photometric="rgb", **options))
    path = tmp_path / "loop.tif"
    path.write_bytes(data)
    why = r"cannot be decoded \(its directories point back at each other\)"
    for read in (decode_image, decode_mask):
        with pytest.raises(ReadError, match=why):
            read(data)
    for open_it in (lambda: read_small(path, RGB_8BIT), lambda: open_reader(path, RGB_8BIT).__enter__()):
        with pytest.raises(ReadError, match=why):
            open_it()
    with pytest.raises(DataError, match=rf"^{path}: {why}$"):
        page_types(path)
    assert not has_pages(path)
    file = EncodedImage(data)
    assert (file.channels_with_alpha, file.is_turned, file.is_lossy) == (0, False, False)
    file.refuse_bomb()  # says nothing: decoding tells what is wrong


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:6], "cannot be decoded|cut off"),
        (lambda data: data[: len(data) // 2], "cut off"),
        (lambda data: data[:4] + struct.pack("<I", len(data)), "cut off"),
        (lambda data: data[:4] + bytes(4) + data[8:], "cut off"),
        (lambda data: change_tag(data, 273, count=2**31), None),
        (lambda data: change_tag(data, 256, value=0), None),
        (lambda data: change_tag(data, 257, kind=4, long_value=2**32 - 1), "a decompression bomb|cut off|decoded"),
        (lambda data: change_tag(data, 273, kind=9, long_value=2**32 - 5), "a block of "),  # at a negative place
        (lambda data: change_tag(data, 279, kind=9, long_value=2**32 - 5), "a block of "),  # of a negative size
        (lambda data: b"II*\0" + struct.pack("<I", 8) + b"\xff\xff" + bytes(100), None),
    ],
)
def test_what_cannot_be_is_a_read_error_whole_and_by_blocks(change, why, tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(change(tiff_bytes(COLOUR[:, :, 0], compression="zlib")))
    with pytest.raises(ReadError, match=why):
        decode_image(path.read_bytes())
    with pytest.raises(ReadError, match=why):
        open_reader(path, RGB_8BIT).__enter__()


def test_a_large_file_that_is_compressed_needs_room_on_the_disk(tmp_path, monkeypatch):
    path = write(tmp_path, COLOUR, compression="zlib")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10_000))
    with pytest.raises(ReadError, match=r"^1\.89e-05 GB decompressed, and .* has 1e-05; set TMPDIR to a folder with"):
        open_reader(path, RGB_8BIT).__enter__()
    with open_reader(write(tmp_path, COLOUR), RGB_8BIT) as image:  # is mapped as it is
        assert image.size == (70, 90)


def test_pages_that_share_one_strip_are_a_bomb_by_their_sum_before_any_is_decoded(tmp_path):
    """Each page alone is below the limit."""
    data = shared_strip_tiff(4_000, 4_000, num_pages=20)
    path = tmp_path / "bomb.tif"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for read in (decode_image, lambda data: EncodedImage(data).refuse_bomb()):
            with pytest.raises(ReadError, match=r"decompress to 4000×4000 pixels on 20 pages: a decompression bomb$"):
                read(data)
        with pytest.raises(ReadError, match=r"on 20 pages: a decompression bomb$"):
            open_reader(path, RGB_8BIT).__enter__()
        with pytest.raises(DataError, match=rf"^{path}: .* Mpx on 20 pages: a decompression bomb$"):
            page_types(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    with pytest.raises(ReadError, match="a decompression bomb"):
        decode_image(change_tag(shared_strip_tiff(4_000, 4_000, num_pages=1), 277, value=64))


# Values without data, and georeferences


@pytest.mark.parametrize(
    ("text", "value"),
    [("-9999", -9999), (" 0 ", 0), ("-3.4028234663852886e+38", -3.4028234663852886e38), ("nan", None), ("", None)],
)
def test_the_value_without_data_is_read_from_the_tag_of_gdal(text, value):
    data = tiff_bytes(COLOUR, photometric="rgb", extratags=[(42113, "s", 0, text, True)])
    assert EncodedImage(data).nodata == value
    decode_image(data)


SCALE = (33550, 12, 3, (0.5, 0.25, 0.0), True)  # of a pixel, in x and y
FROM_CORNER = (0.5, 0.0, 999.0, 0.0, -0.25, 2000.25)
FROM_CENTRE = (0.5, 0.0, 998.75, 0.0, -0.25, 2000.375)
TIE = (33922, 12, 6, (2.0, 1.0, 0.0, 1000.0, 2000.0, 0.0), True)  # column 2, row 1 lies at (1000, 2000)
MATRIX = (34264, 12, 16, (0.0, 2.0, 0.0, 10.0, 3.0, 0.0, 0.0, 20.0, 0, 0, 0, 0, 0, 0, 0, 1.0), True)


def keys(*entries):
    """A directory of keys whose values are numbers: (key, value) each."""
    directory = [1, 1, 0, len(entries), *(number for key, value in entries for number in (key, 0, 1, value))]
    return (34735, 3, len(directory), directory, True)


@pytest.mark.parametrize(
    ("tags", "transform", "epsg"),
    [
        ([SCALE, TIE, keys((1024, 1), (1025, 1), (3072, 32633))], FROM_CORNER, 32633),
        ([SCALE, TIE, keys((1025, 2), (2048, 4326))], FROM_CENTRE, 4326),
        ([SCALE, TIE, keys((3072, 32767))], FROM_CORNER, None),  # a system of the user's own
        ([MATRIX], (0, 2, 10, 3, 0, 20), None),
        ([(33922, 12, 12, (0.0,) * 12, True)], None, None),  # control points alone
    ],
)
def test_a_georeference_is_an_affine_map_of_pixel_corners(tags, transform, epsg, tmp_path):
    found = read_georeference(write(tmp_path, COLOUR, extratags=tags))
    assert (found.transform, found.epsg) == (transform, epsg)
    assert {tag[0] for tag in found.tags} == {tag[0] for tag in tags}
    if epsg == 32633:
        np.testing.assert_array_equal(found.places(np.array([[0, 0], [6, 4]])), [[999, 2000.25], [1002, 1999.25]])


def test_files_without_a_georeference_and_turned_ones_have_none(tmp_path):
    """Results of a turned image have the shape that is displayed; the coordinates are of the pixels as stored."""
    for name, data in {
        "plain.tif": tiff_bytes(COLOUR),
        "a.png": cv2_bytes(".png", COLOUR),
        "broken.tif": b"II*\0" + struct.pack("<I", 10**6),
        "turned.tif": tiff_bytes(COLOUR, extratags=[SCALE, TIE, (274, 3, 1, 6, True)]),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert read_georeference(tmp_path / name) is None
    assert read_georeference(tmp_path / "missing.tif") is None
