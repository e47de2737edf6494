"""Files that are made from others: pages of stacks, and masks that are written once."""

import re

import cv2
import numpy as np
import pytest
import tifffile

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.formats.large_image import cut_blocks
from unet_trainer.data.formats.stacks import split_into_pages
from unet_trainer.data.pairs import Box, Pair
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import EncodedImage, read_image
from unet_trainer.images.mask_decoding import read_mask


def volume(pages, dtype=np.uint8, channels=()):
    return np.random.default_rng(0).integers(0, 200, (pages, 6, 8, *channels)).astype(dtype)


def split(tmp_path, images, labels):
    for name, pages in (("images", images), ("labels", labels)):
        tifffile.imwrite(tmp_path / f"{name}.tif", pages, photometric="rgb" if pages.ndim == 4 else "minisblack")
    stack = Pair("s", tmp_path / "images.tif", tmp_path / "labels.tif")
    return split_into_pages(Converter(tmp_path, tmp_path / "checkpoints"), [stack])


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, (3,)), (np.uint16, ()), (np.float32, (3,))])
def test_pages_keep_their_values(tmp_path, dtype, channels):
    images, labels = volume(12, dtype, channels), volume(12, np.int32) * 2
    pages = split(tmp_path, images, labels)
    assert [page.name for page in pages] == [f"s/{index:02d}" for index in range(12)]
    read = np.stack([read_image(page.image) for page in pages])
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, images if channels else images[..., None])
    np.testing.assert_array_equal([read_mask(page.mask) for page in pages], labels)


def test_stacks_that_do_not_fit_are_refused_with_their_files(tmp_path):
    with pytest.raises(DataError, match=r"images\.tif has 4 pages and .*labels\.tif has 3; need a page of the mask"):
        split(tmp_path, volume(4), volume(3))
    with pytest.raises(DataError, match=r"labels\.tif, page 0: float32 values from .* need whole numbers from 0 to"):
        split(tmp_path, volume(2), volume(2).astype(np.float32) / 7)
    with pytest.raises(DataError, match=r"a\.png has 1 page and .*labels\.tif has 2; need a page of the mask"):
        split_into_pages(None, [Pair("a", tmp_path / "a.png", tmp_path / "labels.tif")])


def tiff(**options):
    def write(path, pixels):
        kind = "rgb" if pixels.shape[2] in (3, 4) else "minisblack"
        tifffile.imwrite(path, pixels, photometric=kind, planarconfig="contig", **options)

    return write


@pytest.mark.parametrize(("name", "channels", "dtype", "write"), [
    ("a.png", 3, np.uint8, lambda path, pixels: cv2.imwrite(str(path), pixels[:, :, ::-1])),
    ("a.png", 1, np.uint16, lambda path, pixels: cv2.imwrite(str(path), pixels)),
    ("a.tif", 4, np.uint8, tiff(extrasamples=["unassalpha"], tile=(16, 16))),
    ("a.tif", 7, np.float32, tiff(extratags=[(42113, "s", 0, "-9999", True)])),
    ("a.npy", 5, np.int16, np.save),
])  # fmt: skip
def test_blocks_keep_values_channels_alpha_and_the_mark_of_missing_data(tmp_path, name, channels, dtype, write):
    pixels = np.random.default_rng(0).integers(0, 250, (40, 60, channels)).astype(dtype)
    colours = np.random.default_rng(1).choice(np.array([[255, 0, 0], [0, 64, 128], [9, 9, 9]], np.uint8), (20, 30))
    write(tmp_path / name, pixels)
    cv2.imwrite(str(tmp_path / "mask.png"), colours[:, :, ::-1])  # half the size: resize_masks
    box = Box(tmp_path / name, tmp_path / "mask.png", 3, 10, 30, 59)
    (block,) = cut_blocks(Converter(tmp_path, tmp_path / "checkpoints"), [box.pair("a/0", "train")])
    whole, read = read_image(box.image), read_image(block.image)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, whole[3:30, 10:59])
    np.testing.assert_array_equal(read_mask(block.mask), read_mask(box.mask).repeat(2, 0).repeat(2, 1)[3:30, 10:59])
    before, after = box.image.read_bytes(), block.image.read_bytes()
    written, source = EncodedImage(after), EncodedImage(before)
    assert (written.channels_with_alpha, written.nodata) == (source.channels_with_alpha, source.nodata)
    assert block.shown_image == f"{box.image}, rows 3 to 29, columns 10 to 58"


def test_a_box_outside_of_its_image_is_refused_and_no_name_leads_out_of_the_folder(tmp_path):
    for name in ("a", "mask"):
        cv2.imwrite(str(tmp_path / f"{name}.png"), np.zeros((20, 30), np.uint8))
    inside, outside = (Box(tmp_path / "a.png", tmp_path / "mask.png", 0, 0, 20, right) for right in (30, 31))
    converter = Converter(tmp_path, tmp_path / "checkpoints")
    (block,) = cut_blocks(converter, [inside.pair("../../../../x", "train")])
    assert block.image.resolve().is_relative_to(tmp_path / "checkpoints/.converted")
    with pytest.raises(DataError, match=r"a\.png: box: rows 0 to 19, columns 0 to 30 are not inside of its 30×20 pix"):
        cut_blocks(converter, [outside.pair("../../../../x", "train")])


def write(tmp_path, names, settings=None):
    """The outcome for each name, and the marks that the makers left."""

    def conversion(name):
        def make():
            with (tmp_path / "made").open("a") as file:
                file.write(f"{name}\n")
            return np.full((2, 3), 7, np.uint8), {"seven": 6}

        return Conversion(name, [tmp_path / "source"], make)

    (tmp_path / "made").write_text("")
    converter = Converter(tmp_path, tmp_path / "checkpoints")
    outcome = converter.write("test", settings, [conversion(name) for name in names], "")
    return outcome, sorted((tmp_path / "made").read_text().split())


def test_a_file_is_made_once_and_again_when_it_or_its_source_has_changed(tmp_path):
    (tmp_path / "source").write_text("a")
    names = [f"x/{number}" for number in range(20)]
    first, made = write(tmp_path, names)
    assert made == sorted(names)
    assert all(each.facts == {"seven": 6} and read_mask(each.path).tolist() == [[7] * 3] * 2 for each in first)
    assert write(tmp_path, names) == (first, [])
    first[3].path.unlink()
    assert write(tmp_path, names)[1] == ["x/3"]
    assert write(tmp_path, names, settings=["other"])[1] == sorted(names)
    (tmp_path / "source").write_text("changed")
    assert write(tmp_path, names)[1] == sorted(names)
    index = first[0].path.parents[1] / "index.json"
    for damage in ('{"cut', '{"x": 3}', "[" * 10**5, index.read_text().replace("6", "[]")):
        index.write_text(damage)
        assert write(tmp_path, names)[1] == sorted(names)


def test_a_missing_source_and_a_folder_that_cannot_be_written_are_told(tmp_path):
    with pytest.raises(DataError, match=r"source: No such file"):
        write(tmp_path, ["a"])
    (tmp_path / "source").write_text("a")
    (tmp_path / "checkpoints").write_text("a file")
    ((outcome,), _) = write(tmp_path, ["a"])
    assert re.search(r"cannot be written \(.*\); converted masks are kept under checkpoint_dir", outcome.problem)
