"""Multi-page TIFF files whose pages are the images of a dataset: images.tif and labels.tif become a pair of files for each page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.images.file_bytes import DataError, ReadError, open_file
from unet_trainer.images.image_files import BOMB_PIXELS, BOMB_RATIO, COLOUR_CHANNELS, Pixels, check_tiff
from unet_trainer.images.tiff_structure import TiffDamage, read_file_structure
from unet_trainer.system.console import first_line

EXTENSIONS = (".tif", ".tiff")
MAX_LABEL = 65535


class Page(NamedTuple):
    """A page of an image stack and that of its mask stack, as files of their own."""

    number: str  # with zeros in front: they sort
    image: Path
    mask: Path


def has_pages(path: Path) -> bool:
    """Whether a file is a TIFF with several pages. Reads a few bytes of it; False for a broken one."""
    if path.suffix.lower() not in EXTENSIONS:
        return False
    try:
        with open_file(path) as file:
            return len(read_file_structure(file).pages) > 1
    except (OSError, ReadError, TiffDamage):
        return False


def split_into_pages(files: ConvertedFiles, name: str, image: Path, mask: Path) -> list[Page]:
    """The pages of an image and of its mask, each written to a file; raises DataError, which names the user's files."""
    num_images, num_masks = count_pages(image), count_pages(mask)
    if num_images != num_masks:
        raise DataError(f"{image} has {num_images} pages and {mask} has {num_masks}; need a page of the mask for each of the image")
    images, masks = _Stack(image), _Stack(mask)
    extension = images.extension
    found = []
    for index in range(num_images):
        number = f"{index:0{len(str(num_images - 1))}d}"
        image_page = files.write(f"images/{name}/{number}", [image], partial(images.image, index), extension)
        found.append(Page(number, image_page, files.write(f"masks/{name}/{number}", [mask], partial(masks.mask, index))))
    return found


def count_pages(path: Path) -> int:
    """Raises DataError, also for a stack whose pages together are a decompression bomb."""
    import tifffile  # as in image_files: importing it takes a tenth of a second

    try:
        with open_file(path) as file:
            structure = check_tiff(file)
            num_bytes = file.seek(0, 2)
        if structure.num_values // COLOUR_CHANNELS > max(BOMB_PIXELS, num_bytes * BOMB_RATIO):
            what = f"{structure.num_values / 1e6:.3g} million values on {len(structure.pages)} pages"
            raise ReadError(f"{num_bytes / 1e6:.2g} MB that decompress to {what}: a decompression bomb")
        with tifffile.TiffFile(path) as found:
            return sum(not _is_thumbnail(page) for page in found.pages)
    except ReadError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a broken file may raise anything here
        raise DataError(f"{path}: cannot be decoded ({first_line(error)})") from None


def _is_thumbnail(page: Any) -> bool:
    return bool(getattr(page, "is_reduced", False))


class _Stack:
    """The pages of a file; all are read when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pages: Sequence[Pixels] | None = None

    @property
    def extension(self) -> str:
        """PNG holds 8 and 16 bit, TIFF everything else."""
        import tifffile

        try:
            with tifffile.TiffFile(self.path) as file:
                return ".png" if file.pages[0].dtype in (np.uint8, np.uint16) else ".tiff"
        except Exception as error:  # a broken file may raise anything here
            raise DataError(f"{self.path}: cannot be decoded ({first_line(error)})") from None

    def image(self, index: int) -> Pixels:
        page = self._page(index)
        if page.ndim > 3 or (page.ndim == 3 and page.shape[2] not in (1, 3)):
            raise DataError(f"{self.path}: a page of shape {page.shape}; need grey or RGB pages")
        page = page[:, :, 0] if page.ndim == 3 and page.shape[2] == 1 else page
        return page if page.dtype in (np.uint8, np.uint16) else page.astype(np.float32)

    def mask(self, index: int) -> Pixels:
        page = np.squeeze(self._page(index))
        if page.ndim == 3 and page.shape[2] == 3 and page.dtype == np.uint8:
            return page
        low, high = page.min(), page.max()
        if page.ndim != 2 or low < 0 or high > MAX_LABEL or not np.array_equal(page, np.floor(page)):
            there = f"{page.dtype} values from {low} to {high}"
            raise DataError(f"{self.path}: page {index} has {there}; need whole numbers up to {MAX_LABEL}")
        return page.astype(np.uint8 if page.dtype in (np.uint8, np.bool_) else np.uint16)

    def _page(self, index: int) -> Pixels:
        if self._pages is None:
            self._pages = _read_pages(self.path)
        return self._pages[index]


def _read_pages(path: Path) -> Sequence[Pixels]:
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            return [page.asarray() for page in file.pages if not _is_thumbnail(page)]
    except Exception as error:  # a broken file may raise anything here
        if "imagecodecs" in str(error):  # a compression that OpenCV may know
            done, pages = cv2.imreadmulti(str(path), flags=cv2.IMREAD_UNCHANGED)
            if done:
                return [page[:, :, ::-1] if page.ndim == 3 else page for page in pages]
        raise DataError(f"{path}: cannot be decoded ({first_line(error)})") from None
