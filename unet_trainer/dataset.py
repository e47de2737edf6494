"""(seed, epoch, index) → sample → batch. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from unet_trainer.augment import Augmentation
from unet_trainer.forms import ImageForm
from unet_trainer.framing import Framing, Resized, Windows, resize_pair
from unet_trainer.images import DataError, Pixels, ReadError, is_reduced, read_image, read_mask
from unet_trainer.masks import IGNORED, UNKNOWN, MaskCoding
from unet_trainer.pairs import Pair

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # keep the random numbers of order and augmentation apart


class Batch(NamedTuple):
    """What the workers hand over: small numbers, channels last; the device does the rest."""

    images: torch.Tensor  # N,H,W,C uint8, or float32 where the files are no 8-bit ones
    masks: torch.Tensor  # N,H,W uint8 class ids
    num_images: int  # those that are no padding


class SegmentationDataset(Dataset[tuple[Pixels, Pixels]]):
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
        self._last: tuple[int, Pixels, Pixels] | None = None  # the windows of one image follow each other

    def __len__(self) -> int:
        return len(self.framing)

    def __getitem__(self, key: Key) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids."""
        epoch, index = key
        image, mask = self.framing.cut(*self._pixels(self.framing.source(index)), epoch, index)
        if self.augmentation is not None:
            image, mask = self.augmentation(image, mask, (self.seed, AUGMENT_STREAM, epoch, index))
            image, mask = resize_pair(image, mask, self.framing.size)  # the user's list may hold crops
        return image, mask

    def __getitems__(self, keys: list[Key]) -> list[tuple[Pixels, Pixels]] | DataError:
        """A batch of samples. What is wrong with a file comes back as a value: raised in a worker, its sentence would drown."""
        try:
            return [self[key] for key in keys]
        except DataError as error:
            return error

    def _pixels(self, index: int) -> tuple[Pixels, Pixels]:
        if self._last is not None and self._last[0] == index:
            return self._last[1:]
        image, mask = self._read(self.pairs[index])
        if isinstance(self.framing, Windows):
            self._last = (index, image, mask)
        return image, mask

    def _read(self, pair: Pair) -> tuple[Pixels, Pixels]:
        """The files were checked before the first step; they may have changed since."""
        least = max(self.framing.size) if isinstance(self.framing, Resized) and not self.resize_masks else None
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


class EpochBatches(Sampler[list[Key]]):
    """The batches of one epoch as lists of (epoch, index). `set_epoch` picks the epoch that the next pass yields."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle  # training: shuffled, and the last partial batch is dropped to keep shapes static
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples // self.batch_size if self.shuffle else -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        order = np.arange(self.num_samples)
        if self.shuffle:
            order = np.random.default_rng([self.seed, ORDER_STREAM, self.epoch]).permutation(self.num_samples)
        for batch in range(len(self)):
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(self.epoch, int(index)) for index in indices]


class Collate:
    """Stacks samples; a short batch is filled up with pixels that count nowhere."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __call__(self, samples: list[tuple[Pixels, Pixels]] | DataError) -> Batch | DataError:
        if isinstance(samples, DataError):
            return samples
        height, width, channels = samples[0][0].shape
        dtype = torch.uint8 if samples[0][0].dtype == np.uint8 else torch.float32
        images = torch.zeros(self.batch_size, height, width, channels, dtype=dtype)
        masks = torch.full((self.batch_size, height, width), IGNORED, dtype=torch.uint8)
        for index, (image, mask) in enumerate(samples):
            images[index] = torch.from_numpy(np.ascontiguousarray(image))
            masks[index] = torch.from_numpy(np.ascontiguousarray(mask))
        return Batch(images, masks, len(samples))


class Loader:
    """Batches of an epoch, with workers that live as long as the loader."""

    def __init__(self, dataset: SegmentationDataset, batch_size: int, num_workers: int, shuffle: bool, pin_memory: bool) -> None:
        self.batches = EpochBatches(len(dataset), batch_size, dataset.seed, shuffle)
        num_workers = min(num_workers, len(self.batches))
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.batches,
            collate_fn=Collate(batch_size),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=4 if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # or every pass would move the global random state
        )

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.batches.set_epoch(epoch)
        for batch in self.loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch


def _start_worker(_: int) -> None:
    cv2.setNumThreads(0)  # one process a core is enough
    torch.set_num_threads(1)


def choose_num_workers(num_workers: int | str, num_cores: int, on_cpu: bool) -> int:
    """`auto`: all cores but one for a GPU; half of them where the model needs the cores itself, at most 4."""
    if isinstance(num_workers, int):
        return num_workers
    return min(num_cores // 2, 4) if on_cpu else max(1, min(num_cores - 1, 16))
