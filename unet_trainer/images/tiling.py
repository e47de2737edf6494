"""Samples of one size from images of any size: the whole image resized, random crops, or overlapping tiles at native
resolution. Where tiles overlap, each pixel counts in one tile only, the one whose centre is nearest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED

Size = tuple[int, int]  # height, width

CROP_STREAM = 4  # part of the seed: random numbers of crops are independent of those of order and augmentation
OVERLAP = 0.25  # least share of a tile that its neighbour covers too


@dataclass(frozen=True)
class WholeImages:
    """Every pair is one sample, resized, or `repeats` of them. With `native_masks` the mask keeps its own size.
    `extract` takes the image (H,W,C) and class ids (H,W) of the pair, or those from which a part is wanted."""

    size: Size
    num_pairs: int
    repeats: int = 1
    native_masks: bool = False

    def __len__(self) -> int:
        return self.num_pairs * self.repeats

    def pair_index(self, sample: int) -> int:
        return sample % self.num_pairs

    def extract(self, image: Pixels, mask: Pixels, epoch: int, sample: int) -> tuple[Pixels, Pixels]:
        return fit_image(image, self.size), mask if self.native_masks else resize_mask(mask, self.size)


@dataclass(frozen=True)
class RandomCrops:
    """Other `per_image` crops of each pair in every epoch; a share is centred on a pixel of a rare class."""

    size: Size
    num_pairs: int
    per_image: int
    rare_ids: Sequence[Sequence[int]]  # of each pair: its classes except the most common one of the dataset
    rare_share: float
    seed: int

    def __len__(self) -> int:
        return self.num_pairs * self.per_image

    def pair_index(self, sample: int) -> int:
        return sample // self.per_image

    def extract(self, image: Pixels, mask: Pixels, epoch: int, sample: int) -> tuple[Pixels, Pixels]:
        rng = np.random.default_rng([self.seed, CROP_STREAM, epoch, sample])
        rare = self.rare_ids[self.pair_index(sample)]
        room = [max(0, have - side) for have, side in zip(mask.shape, self.size, strict=True)]
        candidates = np.empty(0, np.int64)  # flat positions of the pixels that the crop may be centred on
        if rare and rng.random() < self.rare_share:
            candidates = np.flatnonzero(np.asarray(mask) == rare[int(rng.integers(len(rare)))])
        if len(candidates):  # resizing a mask may have removed the class
            centre = divmod(int(candidates[rng.integers(len(candidates))]), mask.shape[1])
            corner = [place - side // 2 for place, side in zip(centre, self.size, strict=True)]
        else:
            corner = [int(rng.integers(most + 1)) for most in room]
        top, left = (min(max(0, start), most) for start, most in zip(corner, room, strict=True))
        return crop_pair(image, mask, top, left, self.size)


class Tile(NamedTuple):
    """Where a tile of an image begins, and which of its rows and columns count."""

    pair: int
    top: int
    left: int
    counted: tuple[slice, slice]


@dataclass(frozen=True)
class Tiles:
    """Every tile is one sample; the tiles of a pair follow each other."""

    size: Size
    tiles: Sequence[Tile]

    def __len__(self) -> int:
        return len(self.tiles)

    def pair_index(self, sample: int) -> int:
        return self.tiles[sample].pair

    def extract(self, image: Pixels, mask: Pixels, epoch: int, sample: int) -> tuple[Pixels, Pixels]:
        _, top, left, counted = self.tiles[sample]
        image, mask = crop_pair(image, mask, top, left, self.size)
        ids = np.full_like(mask, IGNORED)
        ids[counted] = mask[counted]
        return image, ids


Tiling = WholeImages | RandomCrops | Tiles  # which samples a dataset has, and how one is taken from its pair


def tile_images(image_sizes: Sequence[Size], size: Size) -> Tiles:
    """Tiles that cover images of these sizes."""
    tiles = []
    for pair, (height, width) in enumerate(image_sizes):
        for (top, rows), (left, columns) in product(spread_tiles(height, size[0]), spread_tiles(width, size[1])):
            tiles.append(Tile(pair, top, left, (rows, columns)))
    return Tiles(size, tiles)


def spread_tiles(length: int, tile: int, overlap: float = OVERLAP) -> list[tuple[int, slice]]:
    """Along one side of an image: where each tile starts, evenly spread from the first pixel to the last, and which of
    its pixels count, up to the middle of what it shares with the next. `overlap`: least share of it that that is."""
    room = max(0, length - tile)
    starts = np.linspace(0, room, 1 + math.ceil(room / (tile * (1 - overlap)))).round().astype(int).tolist()
    borders = [0, *((before + tile + after) // 2 for before, after in pairwise(starts)), length]
    counted = zip(starts, pairwise(borders), strict=True)
    return [(start, slice(first - start, last - start)) for start, (first, last) in counted]


def crop_pair(image: Pixels, mask: Pixels, top: int, left: int, size: Size) -> tuple[Pixels, Pixels]:
    """The crop of this size at (top, left). Beyond the edge the image is mirrored and the mask is IGNORED."""
    place = slice(top, top + size[0]), slice(left, left + size[1])
    beyond = [(0, side - have) for side, have in zip(size, mask[place].shape, strict=True)]
    ids = np.pad(mask[place], beyond, constant_values=IGNORED)
    return np.ascontiguousarray(mirrored_to(image[place], size)), ids


def mirrored_to(image: Pixels, size: Size) -> Pixels:
    """H,W,C of no less than this height and width: mirrored at the lower and right edge."""
    bottom, right = (max(0, least - side) for least, side in zip(size, image.shape[:2], strict=True))
    return np.pad(image, ((0, bottom), (0, right), (0, 0)), mode="reflect") if bottom or right else image


def fit_image(image: Pixels, size: Size) -> Pixels:
    """H,W,C at (height, width). Pixels are averaged where both sides shrink."""
    if image.shape[:2] == size:
        return image
    shrinks = image.shape[0] > size[0] and image.shape[1] > size[1]
    return resize_image(image, size[::-1], cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def resize_mask(mask: Pixels, size: Size) -> Pixels:
    """H,W ids at (height, width), by nearest neighbour."""
    return mask if mask.shape == size else cv2.resize(mask, size[::-1], interpolation=cv2.INTER_NEAREST_EXACT)


@lru_cache(maxsize=4096)
def nearest_positions(length: int, new_length: int) -> NDArray[np.int64]:
    """The rows, or columns, of so many that `resize_mask` takes. Asked of OpenCV: where ⌊(i + ½) · length / new_length⌋
    lies between two pixels, its versions round differently."""
    return resize_mask(np.arange(length, dtype=np.float32)[None], (1, new_length))[0].astype(np.int64)


def resize_image(image: Pixels, width_height: tuple[int, int], interpolation: int) -> Pixels:
    """H,W,C. OpenCV drops the axis of a single channel, and INTER_AREA takes at most four channels."""
    if image.shape[2] in (2, 3, 4):
        return cv2.resize(image, width_height, interpolation=interpolation)
    groups = [image[:, :, start : start + 4] for start in range(0, image.shape[2], 4)]
    return np.dstack([cv2.resize(group, width_height, interpolation=interpolation) for group in groups])
