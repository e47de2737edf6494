"""(seed, epoch, index) → sample → batch. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from unet_trainer.augment import Augmentation
from unet_trainer.cache import PixelCache
from unet_trainer.forms import ImageForm
from unet_trainer.framing import Framing, Resized, Windows, resize_pair
from unet_trainer.images import DataError, Pixels, ReadError, is_reduced, read_image, read_mask
from unet_trainer.masks import IGNORED, UNKNOWN, MaskCoding
from unet_trainer.pairs import Pair

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # keep the random numbers of order and augmentation apart
MAX_PIECES = 64  # of a batch: the messages of one fit into the smallest of pipes


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
        image, mask = self.framing.cut(*self._pixels(self.framing.source(index)), epoch, index)
        read = time.perf_counter()  # with the resizing, which a cache saves as well
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
        image, mask = self._read(index)
        if isinstance(self.framing, Windows):
            self._last = (index, image, mask)
        return image, mask

    def decode(self, index: int) -> tuple[Pixels, Pixels]:
        """A pair as a cache keeps it: at the size of the batch where all are resized, else as it is."""
        image, mask = self._read(index)
        return resize_pair(image, mask, self.framing.size) if isinstance(self.framing, Resized) else (image, mask)

    def _read(self, index: int) -> tuple[Pixels, Pixels]:
        """The files were checked before the first step; they may have changed since."""
        pair = self.pairs[index]
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
        is_of_size = not isinstance(self.framing, Windows) or self.framing.image_sizes[index] == (height, width)
        is_of_form = image.shape[2] in (1, self.form.channels) and (image.dtype == np.uint8) == self.form.is_8bit
        if not (is_of_size and is_of_form):
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


@dataclass
class Source:
    """A dataset and the batches that are made of it."""

    dataset: SegmentationDataset
    batches: EpochBatches

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.dataset.framing.size, self.dataset.form.channels

    @property
    def itemsize(self) -> int:
        return 1 if self.dataset.form.is_8bit else 4

    @property
    def image_bytes(self) -> int:
        height, width, channels = self.shape
        return self.batches.batch_size * height * width * channels * self.itemsize

    @property
    def num_bytes(self) -> int:
        height, width, _ = self.shape
        return self.image_bytes + self.batches.batch_size * height * width

    def views(self, slot: Pixels) -> tuple[Pixels, Pixels]:
        """Images and masks of a batch that lies in these bytes."""
        height, width, channels = self.shape
        size = self.batches.batch_size
        images = slot[: self.image_bytes].view(np.uint8 if self.itemsize == 1 else np.float32)
        return images.reshape(size, height, width, channels), slot[self.image_bytes : self.num_bytes].reshape(size, height, width)

    def fill(
        self, slot: Pixels, epoch: int, batch: int, piece: range, begin: Callable[[int], object] = lambda _: None
    ) -> tuple[float, float]:
        """Samples at these positions of a batch; what is left of a short batch counts nowhere. Seconds of reading, augmenting."""
        keys = self.batches.keys(epoch, batch)
        images, masks = self.views(slot)
        stages = [0.0, 0.0]
        for position in piece:
            if position < len(keys):
                begin(position)
                image, mask = self.dataset.sample(keys[position], stages)
                np.copyto(images[position], image)
                np.copyto(masks[position], mask)
            else:
                images[position] = 0
                masks[position] = IGNORED
        return stages[0], stages[1]

    def file(self, epoch: int, batch: int, position: int) -> Path:
        index = self.batches.keys(epoch, batch)[position][1]
        return self.dataset.pairs[self.dataset.framing.source(index)].image

    def files(self, epoch: int, batch: int) -> list[Path]:
        return [self.file(epoch, batch, position) for position in range(len(self.batches.keys(epoch, batch)))]

    def pieces(self, num_workers: int) -> list[range]:
        """What the workers share a batch in. The windows of one image stay together, or each worker would read it."""
        size = self.batches.batch_size
        length = -(-size // min(num_workers, MAX_PIECES))
        framing = self.dataset.framing
        if isinstance(framing, Windows):
            length = max(length, min(size, -(-len(framing) // len(self.dataset.pairs))))
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def own(self) -> Source:
        """For a thread: albumentations' pipelines draw from a generator that they hold."""
        return Source(self.dataset.own(), copy.copy(self.batches))
