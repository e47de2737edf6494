"""(seed, epoch, index) → sample. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch

from unet_trainer.augment import Augmentation
from unet_trainer.cache import PixelCache
from unet_trainer.forms import ImageForm
from unet_trainer.framing import Framing, Resized, Windows, resize_pair
from unet_trainer.images import DataError, Pixels, ReadError, is_reduced, read_image, read_mask
from unet_trainer.masks import UNKNOWN, MaskCoding
from unet_trainer.pairs import Pair

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # keep the random numbers of order and augmentation apart


class Batch(NamedTuple):
    """What the workers hand over: small numbers, channels last; the device does the rest."""

    images: torch.Tensor  # N,H,W,C uint8, or float32 where the files are no 8-bit ones
    masks: torch.Tensor  # N,H,W uint8 class ids
    num_images: int  # those that are no padding
    stages: tuple[float, float] = (0.0, 0.0)  # seconds that reading and augmenting took


class SegmentationDataset:
    """Reads a pair, cuts the sample out of it and augments it."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        coding: MaskCoding,
        form: ImageForm,
        framing: Framing,
        augmentation: Augmentation | None,
        seed: int,
        resize_masks: bool = False,
    ) -> None:
        self.pairs = pairs
        self.coding = coding  # mask value → class id
        self.form = form
        self.framing = framing
        self.augmentation = augmentation
        self.seed = seed
        self.resize_masks = resize_masks
        self.cache: PixelCache | None = None
        self._last: tuple[int, Pixels, Pixels] | None = None  # the windows of one image follow each other

    def __len__(self) -> int:
        return len(self.framing)

    def __getitem__(self, key: Key) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids."""
        return self.sample(key, [0.0, 0.0])

    def sample(self, key: Key, stages: list[float]) -> tuple[Pixels, Pixels]:
        """A sample; the seconds for reading and for augmenting are added to `stages`."""
        epoch, index = key
        started = time.perf_counter()
        pixels = self._pixels(self.framing.source(index))
        read = time.perf_counter()
        image, mask = self.framing.cut(*pixels, epoch, index)
        if self.augmentation is not None:
            image, mask = self.augmentation(image, mask, (self.seed, AUGMENT_STREAM, epoch, index))
            image, mask = resize_pair(image, mask, self.framing.size)  # the user's list may hold crops
        stages[0] += read - started
        stages[1] += time.perf_counter() - read
        return image, mask

    def own(self) -> SegmentationDataset:
        """For one worker alone: pipelines hold the generator that they draw from."""
        own = copy.copy(self)
        own.augmentation = copy.deepcopy(self.augmentation)
        return own

    def _pixels(self, index: int) -> tuple[Pixels, Pixels]:
        if self.cache is not None and index < len(self.cache):
            return self.cache.pair(index)
        last = self._last
        if last is not None and last[0] == index:
            return last[1:]
        image, mask = self._read(self.pairs[index])
        if isinstance(self.framing, Windows):
            self._last = (index, image, mask)
        return image, mask

    def decode(self, index: int) -> tuple[Pixels, Pixels]:
        """A pair as a cache keeps it: at the size of the batch where all are resized, else as it is."""
        image, mask = self._read(self.pairs[index])
        return resize_pair(image, mask, self.framing.size) if isinstance(self.framing, Resized) else (image, mask)

    def _read(self, pair: Pair) -> tuple[Pixels, Pixels]:
        """The files were checked before the first step; they may have changed since."""
        # Twice the size of the batch at least, so that it is still averaged down: a decoder's own small picture is coarser.
        least = 2 * max(self.framing.size) if isinstance(self.framing, Resized) and not self.resize_masks else None
        path = pair.image
        try:
            image = read_image(path, least)
            path = pair.mask
            mask = self.coding.encode(read_mask(path))
        except ReadError as error:
            raise DataError(f"{path}: {error}") from None
        height, width = image.shape[:2]
        if self.resize_masks and mask.shape != (height, width):
            mask = cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
        if (mask == UNKNOWN).any() or not is_reduced(mask.shape, (height, width)):
            raise DataError(f"{path}: changed since the run began")
        if image.shape[2] not in (1, self.form.channels) or (image.dtype == np.uint8) != self.form.is_8bit:
            raise DataError(f"{pair.image}: changed since the run began")
        return self.form.shape(image), mask


class EpochBatches:
    """The batches of every epoch as lists of (epoch, index)."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle  # training: shuffled, and the last partial batch is dropped to keep shapes static
        self._last: tuple[int, np.ndarray] | None = None  # the order of the epoch that was asked for last

    def __len__(self) -> int:
        return self.num_samples // self.batch_size if self.shuffle else -(-self.num_samples // self.batch_size)

    def keys(self, epoch: int, batch: int) -> list[Key]:
        """What one batch of an epoch is made of."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._order(epoch)
        order = self._last[1][batch * self.batch_size : (batch + 1) * self.batch_size]
        return [(epoch, int(index)) for index in order]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, ORDER_STREAM, epoch]).permutation(self.num_samples)
