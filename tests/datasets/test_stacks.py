"""Multi-page TIFF files as images and masks of single pages, written by real encoders."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
from PIL import Image

from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.datasets.stacks import count_pages, has_pages, split_into_pages
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import read_image, read_mask

HEIGHT, WIDTH = 6, 8


def volume(pages, dtype=np.uint8, channels=()):
    return np.random.default_rng(0).integers(0, 200, (pages, HEIGHT, WIDTH, *channels)).astype(dtype)


def split(tmp_path):
    files = ConvertedFiles(tmp_path, tmp_path / "checkpoints", "pages")
    return split_into_pages(files, "train/s", tmp_path / "images.tif", tmp_path / "labels.tif")


def write_stacks(tmp_path, images, labels):
    for name, pages in (("images", images), ("labels", labels)):
        photometric = "rgb" if pages.ndim == 4 else "minisblack"
        tifffile.imwrite(tmp_path / f"{name}.tif", pages, photometric=photometric)


@pytest.mark.parametrize(
    ("options", "pages"), [({}, 5), ({"bigtiff": True}, 5), ({"byteorder": ">"}, 5), ({"imagej": True}, 5), ({}, 1)], ids=str
)
def test_files_with_pages_are_known_by_their_first_bytes(tmp_path, options, pages):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, volume(pages), photometric="minisblack", **options)
    assert (has_pages(path), count_pages(path)) == (pages > 1, pages)


def test_pages_that_pil_wrote_are_counted(tmp_path):
    first, *others = [Image.fromarray(page) for page in volume(3)]
    first.save(tmp_path / "a.tif", save_all=True, append_images=others)
    assert (has_pages(tmp_path / "a.tif"), count_pages(tmp_path / "a.tif")) == (True, 3)


def test_a_thumbnail_is_no_page(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(volume(1)[0], photometric="minisblack")
        writer.write(volume(1)[0, ::2, ::2], photometric="minisblack", subfiletype=1)
    assert (has_pages(tmp_path / "a.tif"), count_pages(tmp_path / "a.tif")) == (True, 1)


@pytest.mark.parametrize("data", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"no tiff at all", b"MM\0+" + b"\xff" * 12])
def test_a_broken_file_has_no_pages(tmp_path, data):
    (tmp_path / "a.tif").write_bytes(data)
    assert not has_pages(tmp_path / "a.tif")


def test_other_files_are_not_opened(tmp_path):
    assert not has_pages(tmp_path / "missing.png")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_pages_keep_their_values(tmp_path, dtype, channels):
    images, labels = volume(12, dtype, channels), (volume(12) > 100).astype(np.uint8)
    write_stacks(tmp_path, images, labels)
    pages = split(tmp_path)
    assert [page.number for page in pages] == [f"{index:02d}" for index in range(12)]
    for index, page in enumerate(pages):
        read = read_image(page.image)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, images[index] if channels else images[index][:, :, None])
        np.testing.assert_array_equal(read_mask(page.mask), labels[index])


@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.uint8, np.uint8), (np.uint16, np.uint16), (np.int32, np.uint16), (np.float32, np.uint16)]
)
def test_labels_of_any_whole_numbers_become_a_mask(tmp_path, dtype, stored):
    """All pages in the same depth: ids above 255 may be in one page only."""
    labels = volume(3, dtype)
    labels[1, 0, 0] = 200 if stored == np.uint8 else 300
    write_stacks(tmp_path, volume(3), labels)
    for page, expected in zip(split(tmp_path), labels, strict=True):
        np.testing.assert_array_equal(read_mask(page.mask), expected)


def test_another_number_of_pages_is_refused_with_both_files(tmp_path):
    write_stacks(tmp_path, volume(4), volume(3))
    with pytest.raises(DataError, match=r"images\.tif has 4 pages and .*labels\.tif has 3; need a page of the mask for each"):
        split(tmp_path)


def test_labels_that_are_no_whole_numbers_are_refused_with_the_file(tmp_path):
    write_stacks(tmp_path, volume(2), volume(2).astype(np.float32) / 7)
    with pytest.raises(DataError, match=r"labels\.tif: page 0 has float32 values from .* need whole numbers up to 65535"):
        split(tmp_path)


def test_pages_are_written_once(tmp_path):
    write_stacks(tmp_path, volume(3), volume(3))
    files = ConvertedFiles(tmp_path, tmp_path / "checkpoints", "pages")
    first = split_into_pages(files, "s", tmp_path / "images.tif", tmp_path / "labels.tif")
    files.save_index()
    before = [page.image.stat().st_mtime_ns for page in first]
    again = ConvertedFiles(tmp_path, tmp_path / "checkpoints", "pages")
    assert split_into_pages(again, "s", tmp_path / "images.tif", tmp_path / "labels.tif") == first
    assert [page.image.stat().st_mtime_ns for page in first] == before
