"""One large image: blocks of it, cut out as files, train and validate."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.pairs import Box, Pair
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, naming, read_bytes
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import COLOUR, read_mask
from unet_trainer.images.tiff_files import COLOUR_CHANNELS, NODATA
from unet_trainer.images.tiling import resize_mask


def cut_blocks(converter: Converter, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, those with a box as files of their own; raises DataError, which names the user's files."""
    wanted = []
    for pair, box in ((pair, pair.box) for pair in pairs if pair.box is not None):
        # Not by the name of the pair: a table may have any.
        source = hashlib.sha256(f"{box.image}\n{box.mask}".encode(errors="surrogateescape")).hexdigest()[:8]
        name = box.name_in(f"{box.image.stem}-{source}")
        image = Conversion(f"images/{name}", [box.image], partial(_image_block, box), ".tiff")
        wanted.append((pair, image, Conversion(f"masks/{name}", [box.mask, box.image], partial(_mask_block, box))))
    # One process: it decodes the image once, and each further one would hold it in memory too.
    one = replace(converter, num_processes=1)
    blocks = iter(one.write_pairs("blocks", wanted, "Cutting the image into blocks:"))
    return [pair if pair.box is None else next(blocks) for pair in pairs]


@lru_cache(maxsize=1)
def _read_image(path: Path) -> tuple[Pixels, bool, float | None]:
    """H,W,C with alpha, whether there is one, and the value of pixels without data."""
    with naming(path):
        file = image_decoding.EncodedImage(read_bytes(path))
        image = file.decode(channels=file.channels_with_alpha or None)
        return image, image.shape[2] == file.channels_with_alpha, file.nodata


@lru_cache(maxsize=1)
def _read_mask(path: Path, size: tuple[int, int]) -> Pixels:
    """H,W values as read_mask gives them, at the size of the image."""
    with naming(path):
        return resize_mask(read_mask(path), size)


def _image_block(box: Box) -> tuple[bytes, dict[str, int]]:
    """A TIFF of any number of channels and depth, with what the file says of alpha and of missing data."""
    import tifffile

    image, has_alpha, nodata = _read_image(box.image)
    height, width, channels = image.shape
    if box.bottom > height or box.right > width:
        raise DataError(f"{box.image}: box: {box.place} are not inside of its {width}×{height} pixels")
    is_colour = channels - has_alpha == COLOUR_CHANNELS
    extra = ["unspecified"] * (channels - (COLOUR_CHANNELS if is_colour else 1))
    tifffile.imwrite(
        file := io.BytesIO(),
        np.ascontiguousarray(image[box.top : box.bottom, box.left : box.right]),
        photometric="rgb" if is_colour else "minisblack",
        planarconfig="contig",
        extrasamples=[*extra[1:], "unassalpha"] if has_alpha else extra,
        extratags=() if nodata is None else [(NODATA, "s", 0, repr(nodata), True)],
        metadata=None,
    )
    return file.getvalue(), {}


def _mask_block(box: Box) -> tuple[Pixels, dict[str, int]]:
    mask = _read_mask(box.mask, _read_image(box.image)[0].shape[:2])
    block = np.ascontiguousarray(mask[box.top : box.bottom, box.left : box.right])
    if block.dtype != np.int32:
        return block, {}
    colours = np.where(block >= COLOUR, block - COLOUR, block * 0x010101)
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], 2).astype(np.uint8), {}
