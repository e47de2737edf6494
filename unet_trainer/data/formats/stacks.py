"""Volumes and TIFFs of several pages: a pair of files for each page. They are found among the pairs of folders."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.pairs import Pair
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, ReadError, naming, read_bytes
from unet_trainer.images.image_decoding import VOLUME_EXTENSIONS, Pixels
from unet_trainer.images.mask_decoding import whole_numbers
from unet_trainer.images.tiff_files import BOMB_PIXELS, BOMB_RATIO, COLOUR_CHANNELS, open_pages, read_errors
from unet_trainer.system.console import counted

TIFF = (".tif", ".tiff")
ENDINGS = (*TIFF, *VOLUME_EXTENSIONS)  # of masks that may have pages
VOLUMES = (*VOLUME_EXTENSIONS, ".npy")  # NIfTI, or an array of the channels that were joined


def has_pages(path: Path) -> bool:
    """Whether a file is a volume, or a TIFF with several pages. Reads a few bytes of it; False for a broken one."""
    with contextlib.suppress(DataError):
        if path.suffix.lower() in TIFF:
            return len(page_types(path)) > 1
    return path.name.lower().endswith(VOLUME_EXTENSIONS)


def page_types(path: Path) -> Sequence[Any]:
    """The dtype of each page, by the header; raises DataError, also for pages that are a decompression bomb."""
    with _open(path) as (types, num_pixels, _):
        if num_pixels > max(BOMB_PIXELS, (num_bytes := path.stat().st_size) * BOMB_RATIO):
            what = f"{num_bytes / 1e6:.2g} MB that decompress to {num_pixels / 1e6:.3g} Mpx on {len(types)} pages"
            raise ReadError(f"{what}: a decompression bomb")
        return types


@lru_cache(maxsize=2)  # an image stack and its mask stack
def read_pages(path: Path) -> Any:
    """N,H,W or N,H,W,C, or a list of pages; of a volume Z,Y,X or Z,Y,X,C. Raises DataError."""
    with _open(path) as (_, _, read):
        return read()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Sequence[Any], int, Callable[[], Any]]]:
    """The dtype of each page, the number of all pixels, and what reads them."""
    with naming(path):
        if path.suffix.lower() == ".npy":
            array = image_decoding.decode_array(read_bytes(path))
            yield [array.dtype] * len(array), 0, lambda: array
        elif _is_volume(path):
            try:
                import nibabel
            except ImportError:
                raise DataError(f"{path} is a NIfTI volume; pip install nibabel reads it") from None
            # It logs what it raises, and what it repairs.
            logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)
            with read_errors():
                file: Any = nibabel.load(path)
                shape, dtype = (*file.shape, *[1] * (3 - len(file.shape))), file.get_data_dtype()
                if len(shape) > 4 or min(shape) < 1 or dtype.kind not in "uifb":
                    need = "need numbers in 3 dimensions, or 4 with channels"
                    raise ReadError(f"a NIfTI volume of {dtype} of shape {file.shape}; {need}")
                yield [dtype] * shape[2], math.prod(shape), lambda: _slices(np.asanyarray(file.dataobj).reshape(shape))
        else:
            with open_pages(path) as tiff:
                pages = [page for page in tiff.pages if not getattr(page, "is_reduced", False)]  # no smaller copies
                num_pixels = sum(page.size for page in pages) // COLOUR_CHANNELS
                yield [page.dtype for page in pages], num_pixels, lambda: [page.asarray() for page in pages]


def _slices(volume: Pixels) -> Pixels:
    """X,Y,Z or X,Y,Z,C → Z,Y,X or Z,Y,X,C."""
    return np.ascontiguousarray(np.moveaxis(volume.swapaxes(0, 1), 2, 0))


def _is_volume(path: Path) -> bool:
    return path.name.lower().endswith(VOLUMES)


def split_into_pages(converter: Converter, stacks: Sequence[Pair]) -> list[Pair]:
    """A pair of files for each page of image stacks and their mask stacks; raises DataError."""
    wanted = []
    for stack in stacks:
        is_stack = stack.image.name.lower().endswith((*VOLUMES, *TIFF))
        images, masks = page_types(stack.image) if is_stack else [None], page_types(stack.mask)
        if len(images) != len(masks):
            there = f"{stack.image} has {counted(len(images), 'page')} and {stack.mask} has {len(masks)}"
            raise DataError(f"{there}; need a page of the mask for each of the image")
        extension = ".npy" if _is_volume(stack.image) else ".png" if images[0] in (np.uint8, np.uint16) else ".tiff"
        for index in range(len(images)):
            name = f"{stack.name}/{index:0{len(str(len(images) - 1))}d}"  # with zeros in front: they sort
            origins = (f"{shown}, page {index}" for shown in (stack.shown_image, stack.shown_mask))
            make_image, make_mask = partial(_image_page, stack.image, index), partial(_mask_page, stack.mask, index)
            place = f"{stack.part or 'train'}/{name}"
            image = Conversion(f"images/{place}", [stack.image], make_image, extension)
            mask = Conversion(f"masks/{place}", [stack.mask], make_mask)
            wanted.append((Pair(name, stack.image, stack.mask, stack.part, stack.name, *origins), image, mask))
    return converter.write_pairs("pages", wanted, "Splitting stacks into pages:")


def _image_page(path: Path, index: int) -> tuple[Pixels, dict[str, int]]:
    page = read_pages(path)[index]
    if page.ndim > 3 or (page.ndim == 3 and page.shape[2] not in (1, 3) and not _is_volume(path)):
        raise DataError(f"{path}: a page of shape {page.shape}; need grey or RGB pages")
    page = page[:, :, 0] if page.ndim == 3 and page.shape[2] == 1 else page
    return page if page.dtype in (np.uint8, np.uint16) else page.astype(np.float32), {}


def _mask_page(path: Path, index: int) -> tuple[Pixels, dict[str, int]]:
    page = np.squeeze(read_pages(path)[index])
    if page.ndim == 3 and page.shape[2] == 3 and page.dtype == np.uint8:
        return page, {}
    with naming(f"{path}, page {index}"):
        return whole_numbers(page), {}
