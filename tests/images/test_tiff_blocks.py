"""TIFF files read block by block: the same pixels as of the whole file, and no more blocks than the part has."""

from __future__ import annotations

import errno
import io
import struct

import numpy as np
import pytest
import tifffile

from helpers.image_bytes import change_tag, tiff_bytes
from unet_trainer.images import tiff_blocks
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_files import decode_image
from unet_trainer.images.tiff_blocks import TiffBlocks

RANDOM = np.random.default_rng(0)
SMOOTH = np.add.outer(np.arange(70), np.arange(90))[:, :, None] + RANDOM.integers(0, 9, (70, 90, 5))  # compresses, and is no ramp
COLOUR = SMOOTH[:, :, :3].astype(np.uint8)
TILES = {"tile": (32, 16)}

CASES = {
    "one strip": (COLOUR, {}),
    "strips": (COLOUR, {"rowsperstrip": 8}),
    "strips of deflate": (COLOUR, {"rowsperstrip": 8, "compression": "zlib"}),
    "tiles": (COLOUR, TILES),
    "tiles of deflate": (COLOUR, {**TILES, "compression": "zlib"}),
    "differences": (COLOUR, {**TILES, "compression": "zlib", "predictor": True}),
    "BigTIFF": (COLOUR, {**TILES, "bigtiff": True}),
    "grey": (COLOUR[:, :, 0], TILES),
    "16 bit": (SMOOTH[:, :, 0].astype(np.uint16), {**TILES, "compression": "zlib"}),
    "16 bit, differences": (SMOOTH[:, :, :3].astype(np.uint16), {**TILES, "compression": "zlib", "predictor": True}),
    "float": (SMOOTH[:, :, 0].astype(np.float32) / 7, TILES),
    "five channels": (SMOOTH.astype(np.uint8), {**TILES, "photometric": "minisblack", "planarconfig": "contig"}),
    "five channels, signed": (-SMOOTH.astype(np.int16), {"rowsperstrip": 1, "compression": "zlib", "photometric": "minisblack", "planarconfig": "contig"}),
    "planes": (np.moveaxis(SMOOTH, 2, 0).astype(np.uint16), {**TILES, "photometric": "minisblack", "planarconfig": "separate"}),
    "pages": (np.moveaxis(SMOOTH, 2, 0).astype(np.uint8), {"photometric": "minisblack", "compression": "zlib"}),
    "big-endian": (SMOOTH[:, :, :3].astype(np.uint16), {**TILES, "byteorder": ">", "compression": "zlib"}),
    "big-endian, one strip": (SMOOTH[:, :, 0].astype(np.uint16), {"byteorder": ">"}),
    "palette": (COLOUR[:, :, 0], {"tile": (64, 64), "photometric": "palette", "colormap": RANDOM.integers(0, 65536, (3, 256), np.uint16)}),
    "white is 0": (COLOUR[:, :, 0], {"tile": (64, 64), "photometric": "miniswhite"}),
}  # fmt: skip


def write(tmp_path, array, **options):
    path = tmp_path / "image.tif"
    path.write_bytes(tiff_bytes(array, **options))
    return path


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_whole_image(name, tmp_path):
    array, options = CASES[name]
    path = write(tmp_path, array, **options)
    whole = decode_image(path.read_bytes())
    with TiffBlocks(path) as blocks:
        assert blocks.size == (70, 90)
        for rows, columns in ((slice(0, 70), slice(0, 90)), (slice(5, 41), slice(20, 85)), (slice(69, 70), slice(0, 1))):
            part = blocks.read(rows, columns)
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(part, whole[rows, columns])


GDAL_CASES = [
    *((dtype, {"compress": kind}) for dtype in ("uint8", "uint16", "float32") for kind in ("lzw", "packbits")),
    *((dtype, {"compress": "lzw", "predictor": 2}) for dtype in ("uint8", "uint16")),  # differences of values
    ("float32", {"compress": "deflate", "predictor": 3}),  # differences of bytes
]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore:Dataset has no geotransform")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("dtype", "options"), GDAL_CASES)
def test_compressions_of_other_programs_are_read_without_further_packages(dtype, options, channels, tmp_path):
    rasterio = pytest.importorskip("rasterio", reason="writes such files")
    pixels = SMOOTH[:, :, :channels].astype(dtype)
    path = tmp_path / "image.tif"
    size = {"height": 70, "width": 90, "count": channels, "dtype": dtype}
    with rasterio.open(path, "w", driver="GTiff", tiled=True, blockxsize=32, blockysize=16, **size, **options) as file:
        file.write(np.moveaxis(pixels, 2, 0))
    has_alpha = channels == 4 and dtype == "uint8"
    with TiffBlocks(path) as blocks:
        np.testing.assert_array_equal(blocks.read(slice(3, 40), slice(0, 90)), pixels[3:40, :, : 3 if has_alpha else channels])


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore:Dataset has no geotransform")
def test_jpeg_tiles_have_the_colours_that_the_whole_image_has(tmp_path):
    rasterio = pytest.importorskip("rasterio", reason="writes such files")
    path = tmp_path / "image.tif"
    size = {"height": 70, "width": 90, "count": 3, "dtype": "uint8"}
    with rasterio.open(
        path, "w", driver="GTiff", tiled=True, blockxsize=32, blockysize=32, compress="jpeg", photometric="ycbcr", **size
    ) as file:
        file.write(np.moveaxis(COLOUR, 2, 0))
    with TiffBlocks(path) as blocks:
        np.testing.assert_array_equal(blocks.read(slice(0, 70), slice(0, 90)), decode_image(path.read_bytes()))


def test_only_the_blocks_of_the_part_are_decoded_and_the_last_row_of_them_once(tmp_path, monkeypatch):
    path = write(tmp_path, COLOUR, **TILES)  # rows of blocks begin at 0, 32 and 64; six blocks in each
    decoded = []
    decode = TiffBlocks._decode
    monkeypatch.setattr(TiffBlocks, "_decode", lambda self, page, index: decoded.append(index // 6) or decode(self, page, index))
    with TiffBlocks(path) as blocks:
        blocks.read(slice(0, 40), slice(0, 90))
        assert sorted(decoded) == [0] * 6 + [1] * 6
        blocks.read(slice(40, 60), slice(0, 90))
        assert len(decoded) == 12
        blocks.read(slice(60, 70), slice(0, 90))
        assert sorted(decoded[12:]) == [2] * 6


def test_an_uncompressed_image_in_one_strip_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff_blocks, "STRIP_BYTES", 90 * 3 * 10)
    with TiffBlocks(write(tmp_path, COLOUR)) as blocks:
        assert len(blocks.pages[0].blocks) == 7
        np.testing.assert_array_equal(blocks.read(slice(15, 33), slice(0, 90)), COLOUR[15:33])


def test_of_a_pyramid_the_full_size_is_read(tmp_path):
    path = tmp_path / "pyramid.tif"
    with tifffile.TiffWriter(path) as writer:
        writer.write(COLOUR, photometric="rgb", subifds=1, **TILES)
        writer.write(COLOUR[::2, ::2], photometric="rgb", subfiletype=1, **TILES)
    with TiffBlocks(path) as blocks:
        np.testing.assert_array_equal(blocks.read(slice(0, 70), slice(0, 90)), COLOUR)


@pytest.mark.parametrize(("channels", "expected"), [(None, 4), (3, 3), (4, 4)])
def test_alpha_of_a_bigtiff_is_dropped_where_the_model_has_no_channel_for_it(tmp_path, channels, expected):
    """decode_image keeps it: of a BigTIFF it does not know that it is alpha. So a model may have been trained with it."""
    path = write(tmp_path, SMOOTH[:, :, :4].astype(np.uint8), photometric="rgb", extrasamples=["unassalpha"], bigtiff=True, **TILES)
    assert decode_image(path.read_bytes()).shape[2] == 4
    with TiffBlocks(path, channels) as blocks:
        assert blocks.read(slice(0, 9), slice(0, 9)).shape == (9, 9, expected)


def test_alpha_of_another_tiff_is_dropped_as_in_training(tmp_path):
    path = write(tmp_path, SMOOTH[:, :, :4].astype(np.uint8), photometric="rgb", extrasamples=["unassalpha"], **TILES)
    with TiffBlocks(path) as blocks:
        np.testing.assert_array_equal(blocks.read(slice(0, 70), slice(0, 90)), decode_image(path.read_bytes()))


def test_blocks_that_a_sparse_file_leaves_out_are_zero(tmp_path):
    path = write(tmp_path, COLOUR, **TILES)
    with tifffile.TiffFile(path) as file:
        offsets, counts = (file.pages.first.tags[tag] for tag in (324, 325))
    data = bytearray(path.read_bytes())
    assert (int(offsets.dtype), int(counts.dtype)) == (4, 3)  # 32 bit and 16 bit
    struct.pack_into("<I", data, offsets.valueoffset, 0)  # of the first tile
    struct.pack_into("<H", data, counts.valueoffset, 0)
    path.write_bytes(data)
    with TiffBlocks(path) as blocks:
        part = blocks.read(slice(0, 70), slice(0, 90))
    assert not part[:32, :16].any()
    np.testing.assert_array_equal(part[:, 16:], COLOUR[:, 16:])


def test_a_file_that_is_cut_off_is_refused_where_it_ends(tmp_path):
    path = write(tmp_path, COLOUR, **TILES)
    with tifffile.TiffFile(path) as file:
        end = max(file.pages.first.dataoffsets)
    path.write_bytes(path.read_bytes()[: end + 10])
    with TiffBlocks(path) as blocks:
        np.testing.assert_array_equal(blocks.read(slice(0, 32), slice(0, 90)), COLOUR[:32])
        with pytest.raises(ReadError, match="the file is cut off"):
            blocks.read(slice(64, 70), slice(0, 90))


def test_a_bomb_in_one_block_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff_blocks, "BOMB_PIXELS", 1000)
    path = write(tmp_path, np.zeros((400, 400), np.uint8), rowsperstrip=400, compression="zlib")
    with TiffBlocks(path) as blocks, pytest.raises(ReadError, match="a decompression bomb"):
        blocks.read(slice(0, 1), slice(0, 400))


def test_a_large_image_of_ordinary_blocks_is_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff_blocks, "BOMB_PIXELS", 1000)
    path = write(tmp_path, np.zeros((400, 400), np.uint8), tile=(16, 16), compression="zlib")
    with TiffBlocks(path) as blocks:
        assert not blocks.read(slice(0, 400), slice(0, 400)).any()


def test_other_files_are_refused_with_a_reason(tmp_path):
    path = tmp_path / "image.tif"
    path.write_bytes(b"II*\0" + bytes(50))
    with pytest.raises(ReadError, match="cannot be decoded"):
        TiffBlocks(path)
    with pytest.raises(ReadError, match="No such file"):
        TiffBlocks(tmp_path / "missing.tif")
    many = write(tmp_path, np.zeros((3, 4, 16, 16), np.uint8), photometric="minisblack", metadata=None)
    with tifffile.TiffFile(many) as file:
        assert len(file.pages) == 12
    volume = write(tmp_path, np.zeros((70, 16, 16), np.uint8), photometric="minisblack")
    with pytest.raises(ReadError, match="need height, width and up to 64 channels"):
        TiffBlocks(volume)


def test_a_compression_that_needs_a_package_names_it(tmp_path):
    data = bytearray(tiff_bytes(COLOUR, **TILES))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        struct.pack_into("<H", data, file.pages.first.tags[259].valueoffset, 50000)
    path = tmp_path / "image.tif"
    path.write_bytes(data)
    reason = "ZSTD compression needs another package: run pip install imagecodecs|cannot be decoded"  # where the package is there
    with TiffBlocks(path) as blocks, pytest.raises(ReadError, match=reason):
        blocks.read(slice(0, 1), slice(0, 9))


# What random changes of files have found


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(("tag", "value"), [(256, 0), (257, 0), (257, 60000), (258, 0), (277, 0), (323, 0)])
def test_sizes_of_blocks_that_cannot_be_are_refused(tmp_path, tag, value, compression):
    """Some of these were an IndexError or a division by zero, which no caller expects."""
    options = {"tile": (16, 16)} if tag == 323 else {}
    path = tmp_path / "a.tif"
    data = tiff_bytes(np.zeros((20, 24), np.uint8), compression=compression, **options)
    path.write_bytes(change_tag(change_tag(data, tag, kind=3), tag, value=value))

    def read():
        with TiffBlocks(path) as blocks:
            blocks.read(slice(0, blocks.size[0]), slice(0, blocks.size[1]))

    with pytest.raises(ReadError):
        read()


@pytest.mark.parametrize("tag", [273, 279])
def test_blocks_at_negative_places_or_of_negative_sizes_are_refused(tmp_path, tag):
    path = tmp_path / "a.tif"
    path.write_bytes(change_tag(tiff_bytes(np.zeros((20, 24), np.uint8), compression="zlib"), tag, kind=9, long_value=2**32 - 5))
    with TiffBlocks(path) as blocks, pytest.raises(ReadError, match=r"^a block of -?\d+ bytes at -?\d+$"):
        blocks.read(slice(0, 20), slice(0, 24))


def test_a_disk_that_fails_is_told_as_a_file_that_cannot_be_read(tmp_path):
    with TiffBlocks(write(tmp_path, COLOUR, **TILES)) as blocks:
        blocks.file.close()
        blocks.file = FailingFile()
        with pytest.raises(ReadError, match="Input/output error"):
            blocks.read(slice(0, 32), slice(0, 90))


class FailingFile(io.BytesIO):
    def read(self, size=-1):
        raise OSError(errno.EIO, "Input/output error")


def test_a_page_of_billions_of_rows_is_refused_at_once(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(change_tag(tiff_bytes(np.zeros((20, 24), np.uint8)), 257, kind=4, long_value=2**32 - 1))
    with TiffBlocks(path) as blocks, pytest.raises(ReadError, match="cut off"):
        blocks.read(slice(2**31, 2**31 + 8), slice(0, 24))
