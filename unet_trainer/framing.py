"""From an image of any size to a sample of the batch's size: resized, cropped at random, or cut into windows.

The windows of an image cover it at its native resolution. They overlap, and each pixel counts in one of them alone: the one
in which it lies most central.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import cv2
import numpy as np

from unet_trainer.images import Pixels
from unet_trainer.masks import IGNORED

Size = tuple[int, int]  # height, width

CROP_STREAM = 4  # keeps the random numbers of crops apart from those of order and augmentation
OVERLAP = 0.25  # of two neighbouring windows
MAX_CROPS = 16  # of an image in an epoch, when their number is chosen by the size


class Framing(Protocol):
    """Which samples there are, and how one is cut."""

    @property
    def size(self) -> Size: ...

    def __len__(self) -> int: ...

    def source(self, index: int) -> int:
        """The pair that a sample comes from."""

    def cut(self, image: Pixels, mask: Pixels, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids of the pair → those of the sample."""


@dataclass(frozen=True)
class Resized:
    """Every pair is one sample, resized."""

    size: Size
    num_pairs: int

    def __len__(self) -> int:
        return self.num_pairs

    def source(self, index: int) -> int:
        return index

    def cut(self, image: Pixels, mask: Pixels, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        return resize_pair(image, mask, self.size)


@dataclass(frozen=True)
class RandomCrops:
    """Several crops of each pair, new ones in every epoch; a share of them is centred on a pixel of a rare class."""

    size: Size
    num_pairs: int
    per_image: int
    rare_ids: Sequence[Sequence[int]]  # of each pair: its classes other than the most common one
    rare_share: float
    seed: int

    def __len__(self) -> int:
        return self.num_pairs * self.per_image

    def source(self, index: int) -> int:
        return index // self.per_image

    def cut(self, image: Pixels, mask: Pixels, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        chooser = np.random.default_rng([self.seed, CROP_STREAM, epoch, index])
        rare = self.rare_ids[self.source(index)]
        places = np.empty(0, np.int64)
        if rare and chooser.random() < self.rare_share:
            places = np.flatnonzero(mask == rare[int(chooser.integers(len(rare)))])
        if len(places):  # a class may be lost where a mask was made smaller
            row, column = divmod(int(places[chooser.integers(len(places))]), mask.shape[1])
            corner = [centre - side // 2 for centre, side in zip((row, column), self.size, strict=True)]
        else:
            corner = [int(chooser.integers(max(0, have - side) + 1)) for have, side in zip(mask.shape, self.size, strict=True)]
        top, left = (
            min(max(0, start), max(0, have - side)) for start, have, side in zip(corner, mask.shape, self.size, strict=True)
        )
        return crop_pair(image, mask, top, left, self.size)


class Window(NamedTuple):
    """Where a window lies in its image, and the rows and columns of the image that count in it."""

    pair: int
    top: int
    left: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Every pair is as many samples as windows cover it."""

    size: Size
    windows: Sequence[Window]
    image_sizes: Sequence[Size]

    def __len__(self) -> int:
        return len(self.windows)

    def source(self, index: int) -> int:
        return self.windows[index].pair

    def cut(self, image: Pixels, mask: Pixels, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        window = self.windows[index]
        counted = np.full_like(mask, IGNORED)
        own = slice(*window.rows), slice(*window.columns)
        counted[own] = mask[own]
        return crop_pair(image, counted, window.top, window.left, self.size)


def cover(image_sizes: Sequence[Size], size: Size) -> Windows:
    """Windows that cover images of these sizes."""
    windows = []
    for pair, (height, width) in enumerate(image_sizes):
        for top, rows in _spread(height, size[0]):
            windows += [Window(pair, top, left, rows, columns) for left, columns in _spread(width, size[1])]
    return Windows(size, windows, image_sizes)


def _spread(length: int, window: int) -> list[tuple[int, tuple[int, int]]]:
    """Start of each window along an axis, and what counts in it: the windows meet in the middle of their overlap."""
    if length <= window:
        return [(0, (0, length))]
    count = 1 + int(np.ceil((length - window) / (window * (1 - OVERLAP))))
    starts = np.linspace(0, length - window, count).round().astype(int).tolist()
    borders = [0, *((start + window + following) // 2 for start, following in pairwise(starts)), length]
    return [(start, (borders[index], borders[index + 1])) for index, start in enumerate(starts)]


def choose_crops_per_image(image_sizes: Sequence[Size], size: Size) -> int:
    """As many crops as fit into the middle image side by side."""
    area = float(np.median([height * width for height, width in image_sizes]))
    return int(min(max(1, round(area / (size[0] * size[1]))), MAX_CROPS))


def crop_pair(image: Pixels, mask: Pixels, top: int, left: int, size: Size) -> tuple[Pixels, Pixels]:
    """What lies at (top, left); where the image ends it is mirrored, and the mask counts nowhere."""
    height, width = size
    image, mask = image[top : top + height, left : left + width], mask[top : top + height, left : left + width]
    below, beside = height - mask.shape[0], width - mask.shape[1]
    if below or beside:
        image = np.pad(image, ((0, below), (0, beside), (0, 0)), mode="reflect")
        mask = np.pad(mask, ((0, below), (0, beside)), constant_values=IGNORED)
    return np.ascontiguousarray(image), np.ascontiguousarray(mask)


def resize_pair(image: Pixels, mask: Pixels, size: Size) -> tuple[Pixels, Pixels]:
    """Image and mask at (height, width); the mask keeps its values, so nothing is interpolated in it."""
    height, width = size
    if image.shape[:2] != size:
        shrinks = image.shape[0] > height and image.shape[1] > width
        image = resize_image(image, (width, height), cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    if mask.shape != size:
        mask = cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
    return image, mask


def resize_image(image: Pixels, width_height: tuple[int, int], interpolation: int) -> Pixels:
    """OpenCV drops the axis of a single channel, and takes four channels at a time."""
    if image.shape[2] in (2, 3, 4):
        return cv2.resize(image, width_height, interpolation=interpolation)
    parts = [
        cv2.resize(image[:, :, start : start + 4], width_height, interpolation=interpolation)
        for start in range(0, image.shape[2], 4)
    ]
    return np.concatenate([part if part.ndim == 3 else part[:, :, None] for part in parts], axis=2)
