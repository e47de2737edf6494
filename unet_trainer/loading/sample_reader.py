"""An image and its mask as a model takes them: decoded, missing data filled, in the channels and the depth of a batch.
The one way in which training, evaluate and predict read. Imports no torch."""

from typing import NamedTuple

import numpy as np

from unet_trainer.data.pairs import Pair
from unet_trainer.images.file_bytes import DataError, ReadError, naming, read_bytes, shown_path
from unet_trainer.images.image_decoding import EncodedImage, Pixels
from unet_trainer.images.image_spec import ImageSpec, depth_name
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, decode_mask_or_alpha
from unet_trainer.images.tiling import Size, resize_mask
from unet_trainer.system.console import counted

CHANGED = "changed since the run began"


class PairSize(NamedTuple):
    """Height and width of both files when they were scanned."""

    image: Size
    mask: Size


def read_pair(
    pair: Pair,
    spec: ImageSpec,
    coding: MaskCoding,
    known: PairSize,
    resize_masks: bool = False,
    min_side: int | None = None,
) -> tuple[Pixels, Pixels]:
    """H,W,C image as in a batch and H,W class ids. The files were looked at before, when they had the sizes `known`.
    `min_side`: see ImageSpec.decode. Raises DataError."""
    with naming(shown_path(pair.image)):
        image, size, is_missing = spec.decode(read_bytes(pair.image), min_side)
        if image.shape[2] == 1:  # the scan lets grey images pass among those of any number of channels
            image = image.repeat(spec.channels, axis=2)
        image = model_pixels(image, spec)
    with naming(shown_path(pair.mask)):
        file = EncodedImage(read_bytes(pair.mask))
        file.refuse_bomb(known.mask)
        mask = coding.encode(decode_mask_or_alpha(file)[0])
        if mask.shape != known.mask or (mask == UNKNOWN).any():
            raise ReadError(CHANGED)
    if size != known.image:
        raise DataError(f"{shown_path(pair.image)}: {CHANGED}")
    if resize_masks:
        mask = resize_mask(mask, size)
    if is_missing is not None and spec.ignores_nodata:
        mask = np.where(is_missing, np.uint8(IGNORED), mask)
    return image, mask


def model_pixels(image: Pixels, spec: ImageSpec) -> Pixels:
    """H,W,C pixels of a file, missing data filled → as in a batch. Raises ReadError."""
    return spec.to_batch(of_known_kind(image, spec))


def of_known_kind(image: Pixels, spec: ImageSpec) -> Pixels:
    """H,W,C, of RGB that is grey one channel if the model has one. Raises ReadError for other kinds of images."""
    if (image.shape[2], spec.channels) == (3, 1) and (image == image[:, :, :1]).all():
        image = image[:, :, :1]
    depth = "float" if image.dtype.kind == "f" else image.dtype.name  # in any byte order
    if difference := kind_difference(depth, image.shape[2], spec):
        raise ReadError(difference)
    return image


def kind_difference(depth: str, channels: int, spec: ImageSpec) -> str:
    """What a model of this spec does not know about such images; empty if it knows them."""
    if depth != spec.depth:
        return f"{depth_name(depth)} values; the model was trained on {depth_name(spec.depth)} images"
    if channels == spec.channels or (channels, spec.channels) == (1, 3):  # grey is repeated, as in training
        return ""
    if (channels, spec.channels) == (3, 1):
        return "RGB in colour; the model was trained on grey images: convert them (image.convert('L') of PIL)"
    return f"{counted(channels, 'channel')}; the model was trained on images of {spec.channels}"
