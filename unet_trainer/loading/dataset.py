"""(seed, epoch, index) → sample → batch. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.data.pairs import Pair
from unet_trainer.images.file_bytes import StoredFile
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import IGNORED, MaskCoding
from unet_trainer.images.tiling import Size, Tiles, Tiling, WholeImages, fit_image, resize_mask
from unet_trainer.loading.pixel_cache import PixelCache
from unet_trainer.loading.sample_reader import PairSize, read_pair

if TYPE_CHECKING:
    from unet_trainer.loading.augmentation import Augmentation  # imports albumentations, which prediction does without

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # separate random numbers for order and augmentation
PILOT_EPOCH = 2**30  # epochs from this number on are those of training.pilots: their samples are flipped and no more
MAX_PIECES = 64  # of a batch: their tasks fit into the smallest buffer of a pipe


class Batch(NamedTuple):
    """A batch on the host: uint8 (or float32), channels last; normalisation happens on the device."""

    images: torch.Tensor  # N,H,W,C uint8, or float32 where the files are not 8-bit
    masks: torch.Tensor  # N,H,W uint8 ids; at the images' size, or padded with IGNORED to one that holds all mask_sizes
    num_images: int  # without padding
    read_seconds: float = 0.0  # summed over the workers
    augment_seconds: float = 0.0
    mask_sizes: tuple[Size, ...] | None = None  # of each image without padding: its mask's own; None: the images' size
    cut_boxes: torch.Tensor | None = None  # N,4: see cutmix


@dataclass(eq=False)
class SegmentationDataset:
    """Reads a pair, takes the sample from it and augments it."""

    pairs: Sequence[Pair]
    sizes: Sequence[PairSize]
    coding: MaskCoding  # mask value → class id
    image_spec: ImageSpec
    tiling: Tiling
    augmentation: Augmentation | None
    seed: int
    resize_masks: bool = False
    cache: PixelCache | None = None
    mask_sizes: list[Size] | None = field(init=False, default=None)  # of each pair; None: masks have the samples' size

    def __post_init__(self) -> None:
        self.batch_mask_size = self.tiling.size  # holds every mask, so that the memory of a batch is fixed
        if isinstance(self.tiling, WholeImages) and self.tiling.native_masks:
            own = [size.image if self.resize_masks else size.mask for size in self.sizes]
            if any(size != self.tiling.size for size in own):
                self.mask_sizes = own
                self.batch_mask_size = max(height for height, _ in own), max(width for _, width in own)
        self._last_read: tuple[int, Pixels, Pixels] | None = None  # consecutive tiles or crops of one image

    def __len__(self) -> int:
        return len(self.tiling)

    def __getitem__(self, key: Key) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids, at the mask's own size where `mask_sizes` are given."""
        return self.timed_sample(key)[:2]

    def timed_sample(self, key: Key) -> tuple[Pixels, Pixels, float, float]:
        """A sample and the seconds that reading and augmenting took."""
        epoch, index = key
        started = time.perf_counter()
        image, mask = self._extract(epoch, index)
        was_read = time.perf_counter()  # resizing counts as reading: a cache avoids both
        if self.augmentation is not None:
            drawn_by = (self.seed, AUGMENT_STREAM, epoch, index)
            image, mask = self.augmentation(image, mask, drawn_by, is_gentle=epoch >= PILOT_EPOCH)
            # The user's list may hold crops.
            image, mask = fit_image(image, self.tiling.size), resize_mask(mask, self.tiling.size)
        return image, mask, was_read - started, time.perf_counter() - was_read

    def clone_for_worker(self) -> SegmentationDataset:
        """A copy that one thread can use alone: an albumentations pipeline holds the generator that it draws from."""
        clone = copy.copy(self)
        clone.augmentation = copy.deepcopy(self.augmentation)
        return clone

    @property
    def is_remote(self) -> bool:
        """Whether reading waits for a network."""
        first = self.pairs[0].image if self.pairs else None
        return isinstance(first, StoredFile) and bool(first.store.is_remote)

    def read_ahead(self, keys: Sequence[Key]) -> None:
        """Fetches samples of remote shards that will be asked for next."""
        num_cached = 0 if self.cache is None else len(self.cache)
        pairs = [self.pairs[pair] for _, index in keys if (pair := self.tiling.pair_index(index)) >= num_cached]
        files = [file for pair in pairs for file in (pair.image, pair.mask) if isinstance(file, StoredFile)]
        if files:
            files[0].store.read_ahead(files)

    def _extract(self, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        pair = self.tiling.pair_index(index)
        if self.cache is not None and pair < len(self.cache):
            return self.tiling.extract(*self.cache.pair(pair), epoch, index)
        if isinstance(self.tiling, WholeImages):
            return self.tiling.extract(*self._read(pair), epoch, index)
        if self._last_read is None or self._last_read[0] != pair:
            self._last_read = (pair, *self._read(pair))
        return self.tiling.extract(*self._last_read[1:], epoch, index)

    def decode(self, index: int) -> tuple[Pixels, Pixels]:
        """A pair as the cache keeps it: as the sample where whole images are resized, else as it is."""
        image, mask = self._read(index)
        return self.tiling.extract(image, mask, 0, index) if isinstance(self.tiling, WholeImages) else (image, mask)

    def _read(self, index: int) -> tuple[Pixels, Pixels]:
        # A JPEG is decoded at a fraction that is at least twice the sample's size: resizing then still averages pixels.
        min_side = 2 * max(self.tiling.size) if isinstance(self.tiling, WholeImages) and not self.resize_masks else None
        pair, known, spec = self.pairs[index], self.sizes[index], self.image_spec
        return read_pair(pair, spec, self.coding, known, self.resize_masks, min_side)


@dataclass(eq=False)
class EpochBatches:
    """The batches of every epoch as lists of (epoch, index). `epochs_per_pass` epochs share one pass over the samples.
    Shuffled: a step takes the next batch_size × world_size samples in the seed's order, each process its slice."""

    samples: NDArray[np.int64]  # shuffled: those of all processes; else those of this one, in order
    batch_size: int
    seed: int
    shuffle: bool  # training: shuffled, without the last partial batch, so that shapes are static
    epochs_per_pass: int = 1
    rank: int = 0
    world_size: int = 1
    _last: tuple[int, NDArray[np.int64]] | None = field(init=False, default=None)  # epoch and its order

    def __len__(self) -> int:
        if self.shuffle:
            return len(self.samples) // self.epochs_per_pass // (self.batch_size * self.world_size)
        return -(-len(self.samples) // self.batch_size)

    def keys(self, epoch: int, batch: int) -> list[Key]:
        """The samples of one batch of an epoch."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._order(epoch)
        start = self.number_of(batch) * self.batch_size
        return [(epoch, int(index)) for index in self._last[1][start : start + self.batch_size]]

    def number_of(self, batch: int) -> int:
        """Of this process's batch, among those of all processes."""
        return batch * self.world_size + self.rank if self.shuffle else batch

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return self.samples
        one_pass, part = divmod(epoch, self.epochs_per_pass)
        order = np.random.default_rng([self.seed, ORDER_STREAM, one_pass]).permutation(self.samples)
        length = len(self.samples) // self.epochs_per_pass
        return order[part * length : (part + 1) * length]


@dataclass
class BatchAssembler:
    """Writes batches of a dataset into memory that it is given."""

    dataset: SegmentationDataset
    batches: EpochBatches

    def __post_init__(self) -> None:
        spec, size = self.dataset.image_spec, self.batches.batch_size
        self.image_shape = (size, *self.dataset.tiling.size, spec.channels)
        self.mask_shape = (size, *self.dataset.batch_mask_size)
        self.dtype = np.dtype(np.uint8 if spec.is_8bit else np.float32)
        self.image_bytes = math.prod(self.image_shape) * self.dtype.itemsize
        self.num_bytes = self.image_bytes + math.prod(self.mask_shape)

    def views(self, memory: Pixels) -> tuple[Pixels, Pixels]:
        """N,H,W,C images and N,H,W masks of a batch that lies in these bytes."""
        images, masks = memory[: self.image_bytes], memory[self.image_bytes : self.num_bytes]
        return images.view(self.dtype).reshape(self.image_shape), masks.reshape(self.mask_shape)

    def fill(
        self, memory: Pixels, epoch: int, batch: int, piece: range, on_start: Callable[[int], object]
    ) -> tuple[float, float]:
        """Writes the samples at these positions of a batch; beyond a short batch, padding of ignored pixels. `on_start`
        gets each position first. Returns the seconds that reading and augmenting took."""
        keys = self.batches.keys(epoch, batch)
        images, masks = self.views(memory)
        read_seconds = augment_seconds = 0.0
        self.dataset.read_ahead([keys[position] for position in piece if position < len(keys)])
        # Crops of one image follow each other: it is decoded once for them.
        for position in sorted(piece, key=lambda position: self._pair_index(keys, position)):
            if position >= len(keys):
                images[position], masks[position] = 0, IGNORED
                continue
            on_start(position)
            image, mask, reading, augmenting = self.dataset.timed_sample(keys[position])
            height, width = mask.shape
            images[position], masks[position, :height, :width] = image, mask
            masks[position, height:] = masks[position, :height, width:] = IGNORED
            read_seconds += reading
            augment_seconds += augmenting
        return read_seconds, augment_seconds

    def _pair_index(self, keys: Sequence[Key], position: int) -> int:
        return self.dataset.tiling.pair_index(keys[position][1]) if position < len(keys) else len(self.dataset.pairs)

    def mask_sizes(self, epoch: int, batch: int) -> tuple[Size, ...] | None:
        """As a Batch has them."""
        sizes, tiling, keys = self.dataset.mask_sizes, self.dataset.tiling, self.batches.keys(epoch, batch)
        return None if sizes is None else tuple(sizes[tiling.pair_index(index)] for _, index in keys)

    def files(self, epoch: int, batch: int) -> list[Path]:
        """The images of a batch."""
        dataset = self.dataset
        return [dataset.pairs[dataset.tiling.pair_index(index)].image for _, index in self.batches.keys(epoch, batch)]

    def pieces(self, num_workers: int) -> list[range]:
        """Ranges of positions that workers fill independently. Tiles of one image stay together: each worker would
        decode it. Of remote data a worker has a whole batch, whose samples it fetches together."""
        size = self.batches.batch_size
        length = size if self.dataset.is_remote else -(-size // min(num_workers, MAX_PIECES))
        if isinstance(self.dataset.tiling, Tiles):
            length = max(length, min(size, -(-len(self.dataset) // len(self.dataset.pairs))))
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def clone_for_worker(self) -> BatchAssembler:
        return BatchAssembler(self.dataset.clone_for_worker(), copy.copy(self.batches))
