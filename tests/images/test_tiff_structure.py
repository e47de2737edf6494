"""Directories of TIFF files: walked to the end of an honest file, and never for ever."""

from __future__ import annotations

import io
import struct
import tracemalloc

import numpy as np
import pytest

from helpers.image_bytes import change_tag, pil_bytes, point_back, shared_strip_tiff, tiff_bytes
from unet_trainer.datasets.stacks import count_pages, has_pages
from unet_trainer.images import image_headers as headers
from unet_trainer.images import tiff_structure
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.georeference import read_georeference
from unet_trainer.images.image_files import decode_image, decode_mask, refuse_bomb
from unet_trainer.images.image_readers import open_reader, read_small
from unet_trainer.images.tiff_structure import BITS, HEIGHT, SAMPLES, WIDTH, TiffDamage, read_file_structure, read_structure

RGB = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"byteorder": ">"}, {"bigtiff": True, "byteorder": ">"}])
def test_size_depth_and_channels_are_read_in_either_order_and_size_of_offsets(options):
    data = tiff_bytes(RGB.astype(np.uint16), photometric="rgb", **options)
    for found in (read_structure(data), read_file_structure(io.BytesIO(data))):
        (page,) = found.pages
        assert [page.number(tag, 0) for tag in (HEIGHT, WIDTH, SAMPLES)] == [4, 5, 3]
        assert page.tags[BITS].values == (16, 16, 16)
        assert (found.num_values, found.num_bytes, found.is_big) == (60, 120, "bigtiff" in options)


def test_pages_are_counted_and_summed_and_inner_directories_are_not():
    data = tiff_bytes(np.zeros((7, 4, 5), np.float32), photometric="minisblack")
    found = read_structure(data)
    assert (len(found.pages), found.num_values, found.num_bytes) == (7, 140, 560)
    import tifffile

    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(np.zeros((64, 64), np.uint8), subifds=1)
        writer.write(np.zeros((32, 32), np.uint8), subfiletype=1)
    found = read_structure(stream.getvalue())
    assert (len(found.pages), len(found.inner), found.num_values) == (1, 1, 4096)


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}])
def test_a_directory_that_points_back_is_damage_wherever_a_tiff_is_opened(options, tmp_path):
    data = point_back(tiff_bytes(RGB, photometric="rgb", **options))
    path = tmp_path / "loop.tif"
    path.write_bytes(data)
    why = r"cannot be decoded \(its directories point back at each other\)"
    for read in (decode_image, decode_mask):
        with pytest.raises(ReadError, match=why):
            read(data)
    for open_it in (read_small, open_reader):
        with pytest.raises(ReadError, match=why):
            open_it(path, 3) if open_it is read_small else open_it(path).__enter__()
    with pytest.raises(DataError, match=rf"^{path}: {why}$"):
        count_pages(path)
    assert not has_pages(path)
    assert read_georeference(path) is None
    assert (headers.has_alpha(data), headers.is_turned(data), headers.is_lossy(data), headers.has_palette(data)) == (False,) * 4
    refuse_bomb(data)  # says nothing: decoding tells what is wrong


def test_an_inner_directory_that_points_at_its_page_is_damage():
    data = tiff_bytes(RGB, photometric="rgb", extratags=[(65000, 4, 1, 0xABCD, True)])
    first = struct.unpack_from("<I", data, 4)[0]
    data = data.replace(struct.pack("<HHII", 65000, 4, 1, 0xABCD), struct.pack("<HHII", 330, 4, 1, first))
    with pytest.raises(TiffDamage, match="point back"):
        read_structure(data)


def test_the_walk_has_a_bound(monkeypatch):
    monkeypatch.setattr(tiff_structure, "MAX_DIRECTORIES", 3)
    assert len(read_structure(tiff_bytes(np.zeros((3, 4, 5), np.uint8), photometric="minisblack")).pages) == 3
    with pytest.raises(TiffDamage, match="more than 3 directories"):
        read_structure(tiff_bytes(np.zeros((4, 4, 5), np.uint8), photometric="minisblack"))


@pytest.mark.parametrize("tag", [256, 257, 258, 259, 262, 273, 274, 277, 279, 284])
def test_a_structural_tag_without_a_value_is_a_damaged_file(tag):
    """OpenCV reads some of these as if the tag were not there; others were an IndexError."""
    data = change_tag(pil_bytes("TIFF", RGB, tiffinfo={274: 1, 284: 1}), tag, count=0)
    for read in (decode_image, decode_mask):
        with pytest.raises(ReadError, match=rf"^cannot be decoded \(tag {tag} has no value\)$"):
            read(data)
    assert (headers.has_alpha(data), headers.is_turned(data), headers.is_lossy(data), headers.has_palette(data)) == (False,) * 4


def test_a_description_without_text_is_no_damage():
    data = tiff_bytes(RGB, photometric="rgb", description="x", metadata=None)
    assert np.array_equal(decode_image(change_tag(data, 270, count=0)), RGB)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:6], "cut off"),
        (lambda data: data[:4] + struct.pack("<I", len(data)), "cut off"),
        (lambda data: data[:4] + bytes(4) + data[8:], "no directory"),
        (lambda data: change_tag(data, 273, count=2**31), "tag 273 is longer than the file"),
        (lambda data: b"II*\0" + struct.pack("<I", 8) + b"\xff\xff" + bytes(100), "a directory of 65535 tags"),
    ],
)
def test_what_lies_outside_of_the_file_is_damage(change, why):
    with pytest.raises(TiffDamage, match=why):
        read_structure(change(tiff_bytes(RGB, photometric="rgb")))


def test_pages_that_share_one_strip_are_a_bomb_by_their_sum_before_any_is_decoded(tmp_path):
    """Each page alone is below the limit; decoding them all took 9.5 GB."""
    data = shared_strip_tiff(9_000, 9_000, num_pages=60)
    assert len(data) < 200_000
    path = tmp_path / "bomb.tif"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for read in (decode_image, refuse_bomb):
            with pytest.raises(ReadError, match=r"decompress to 9000×9000 pixels on 60 pages: a decompression bomb$"):
                read(data)
        with pytest.raises(DataError, match=rf"^{path}: .* million values on 60 pages: a decompression bomb$"):
            count_pages(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_channels_count_in_the_sum_too():
    data = change_tag(shared_strip_tiff(9_000, 9_000, num_pages=1), 277, value=64)
    with pytest.raises(ReadError, match="a decompression bomb"):
        decode_image(data)
