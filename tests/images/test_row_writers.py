"""Files written row by row: what other programs read from them."""

import io
import tracemalloc

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from helpers.image_bytes import cv2_bytes
from unet_trainer.images import row_writers
from unet_trainer.images.row_writers import PngWriter, TiffWriter, is_result

PALETTE = ((0, 0, 0), (0, 200, 120), (255, 130, 0))
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 3, (37, 23), np.uint8)
ARRAYS = {
    "grey": IDS,
    "16 bit": RANDOM.integers(0, 65536, (37, 23), np.uint16),
    "rgb": RANDOM.integers(0, 256, (37, 23, 3), np.uint8),
}


def written(kind, pixels, **options):
    """The bytes of a file whose rows came in three parts."""
    file = io.BytesIO()
    writer = kind(file, pixels.shape[:2], pixels.dtype, 3 if pixels.ndim == 3 else 1, **options)
    for rows in np.split(pixels, [1, 11]):
        writer.write(rows)
    writer.finish()
    return file.getvalue()


def assert_others_read(data, pixels):
    read = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(read[:, :, ::-1] if read.ndim == 3 else read, pixels)
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(data))), pixels)


@pytest.mark.parametrize("pixels", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("content", ["mask", "picture"])
def test_a_png_holds_the_pixels(pixels, content):
    assert_others_read(written(PngWriter, pixels, content=content), pixels)


def test_a_file_that_was_written_here_is_known(tmp_path):
    def is_known(data):
        (tmp_path / "a.png").write_bytes(data)
        return is_result(tmp_path / "a.png")

    for options in ({}, {"palette": PALETTE}):
        for kind in (PngWriter, TiffWriter):
            assert is_known(written(kind, IDS, **options))
    assert not is_known(cv2_bytes(".png", IDS))
    assert not is_known(b"")
    assert not is_result(tmp_path / "none.png")
    assert not is_result(tmp_path)


def test_a_large_png_needs_memory_for_the_rows_alone():
    rows = np.zeros((64, 4096), np.uint8)  # of 64 MiB in all
    with open("/dev/null", "wb") as file:  # noqa: PTH123
        writer = PngWriter(file, (16384, 4096), np.uint8)
        tracemalloc.start()
        for _ in range(256):
            writer.write(rows)
        writer.finish()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * rows.nbytes


@pytest.mark.parametrize("pixels", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("is_big", [False, True])
def test_a_tiff_holds_the_pixels(pixels, is_big, monkeypatch, tmp_path):
    """A big one has 64-bit offsets, and its rows wait in a file."""
    if is_big:
        monkeypatch.setattr(row_writers, "BIGTIFF_BYTES", 100)
        monkeypatch.setattr(row_writers, "MEMORY_BYTES", 100)
    with (tmp_path / "a.tif").open("wb") as file:
        writer = TiffWriter(file, pixels.shape[:2], pixels.dtype, 3 if pixels.ndim == 3 else 1)
        assert isinstance(writer.pixels, np.memmap) == is_big
        for rows in np.split(pixels, [1, 11]):
            writer.write(rows)
        writer.finish()
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert file.is_bigtiff == is_big
        np.testing.assert_array_equal(file.asarray(), pixels)
    assert_others_read((tmp_path / "a.tif").read_bytes(), pixels)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tif"]
