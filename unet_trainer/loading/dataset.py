"""(seed, epoch, index) → sample → batch. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

import copy
import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import DataError, ReadError, content_digest, find_member, read_with_stamp, shown_path
from unet_trainer.images.image_decoding import Pixels, refuse_bomb
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, decode_mask
from unet_trainer.images.tiling import Size, Tiles, Tiling, WholeImages, resize_mask, resize_pair
from unet_trainer.loading.pixel_cache import ContentDamage, MemoryCache

if TYPE_CHECKING:
    from unet_trainer.loading.augmentation import Augmentation  # imports albumentations, which prediction does without

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # separate random numbers for order and augmentation
PILOT_EPOCH = 2**30  # epochs from this number on are those of training.pilots: their samples are flipped and no more
MAX_PIECES = 64  # of a batch: their tasks fit into the smallest buffer of a pipe


class Batch(NamedTuple):
    """A batch on the host: uint8 (or float32), channels last; normalisation happens on the device."""

    images: torch.Tensor  # N,H,W,C uint8, or float32 where the files are not 8-bit
    masks: torch.Tensor  # N,H,W uint8 class ids; at the images' size, or padded with IGNORED to one that holds all of mask_sizes
    num_images: int  # without padding
    read_seconds: float = 0.0  # summed over the workers
    augment_seconds: float = 0.0
    mask_sizes: tuple[Size, ...] | None = None  # of each image without padding: its mask's own; None: the images' size
    cut_boxes: torch.Tensor | None = None  # N,4: see cutmix


class FileState(NamedTuple):
    """Of a file when it was scanned: its stamp, and a digest of its content."""

    stamp: tuple[int, ...] = ()
    digest: str = ""


class PairSize(NamedTuple):
    """Height and width of both files when they were scanned; and what tells whether their content has changed since."""

    image: Size
    mask: Size
    image_state: FileState = FileState()
    mask_state: FileState = FileState()


IMAGE_CHANGED, MASK_CHANGED, CACHE_DAMAGED = 1, 2, 4  # flags in SegmentationDataset.noticed


class SegmentationDataset:
    """Reads a pair, takes the sample from it and augments it."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        sizes: Sequence[PairSize],
        coding: MaskCoding,
        image_spec: ImageSpec,
        tiling: Tiling,
        augmentation: Augmentation | None,
        seed: int,
        resize_masks: bool = False,
    ) -> None:
        self.pairs = pairs
        self.sizes = sizes
        self.coding = coding  # mask value → class id
        self.image_spec = image_spec
        self.tiling = tiling
        self.augmentation = augmentation
        self.seed = seed
        self.resize_masks = resize_masks
        self.mask_sizes: list[Size] | None = None  # of each pair; None: masks have the size of the samples
        self.batch_mask_size = tiling.size  # of the masks of a batch: it holds every mask, so that the memory of a batch is fixed
        if isinstance(tiling, WholeImages) and tiling.native_masks:
            own = [size.image if resize_masks else size.mask for size in sizes]
            if any(size != tiling.size for size in own):
                self.mask_sizes = own
                self.batch_mask_size = max(height for height, _ in own), max(width for _, width in own)
        self.cache: MemoryCache | None = None
        # Of each pair, what was noticed while it was read; shared with the workers, which are forked from this process.
        self.noticed = np.frombuffer(mmap.mmap(-1, max(1, len(pairs))), np.uint8)
        self._taken = np.zeros_like(self.noticed)
        self._last_read: tuple[int, Pixels, Pixels] | None = None  # consecutive tiles come from one image

    def __len__(self) -> int:
        return len(self.tiling)

    def __getitem__(self, key: Key) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids, at the mask's own size where `mask_sizes` are given."""
        image, mask, _, _ = self.timed_sample(key)
        return image, mask

    def timed_sample(self, key: Key) -> tuple[Pixels, Pixels, float, float]:
        """A sample and the seconds that reading and augmenting took."""
        epoch, index = key
        started = time.perf_counter()
        image, mask = self._extract(epoch, index)
        was_read = time.perf_counter()  # resizing counts as reading: a cache avoids both
        if self.augmentation is not None:
            drawn_by = (self.seed, AUGMENT_STREAM, epoch, index)
            image, mask = self.augmentation(image, mask, drawn_by, is_gentle=epoch >= PILOT_EPOCH)
            image, mask = resize_pair(image, mask, self.tiling.size)  # the user's list may hold crops
        return image, mask, was_read - started, time.perf_counter() - was_read

    def clone_for_worker(self) -> SegmentationDataset:
        """A copy that one thread can use alone: an albumentations pipeline holds the generator that it draws from."""
        clone = copy.copy(self)
        clone.augmentation = copy.deepcopy(self.augmentation)
        return clone

    @property
    def is_remote(self) -> bool:
        """Whether reading waits for a network."""
        stored = find_member(self.pairs[0].image) if self.pairs else None
        return stored is not None and bool(stored.store.is_remote)

    def read_ahead(self, keys: Sequence[Key]) -> None:
        """Begins to fetch samples of remote shards that will be asked for next."""
        if not self.is_remote:
            return
        pairs = dict.fromkeys(self.tiling.pair_index(index) for _, index in keys)
        missing = [self.pairs[pair] for pair in pairs if self.cache is None or pair >= len(self.cache)]
        files = [stored for pair in missing for path in (pair.image, pair.mask) if (stored := find_member(path)) is not None]
        if files:
            files[0].store.read_ahead(files)

    def _extract(self, epoch: int, index: int) -> tuple[Pixels, Pixels]:
        pair = self.tiling.pair_index(index)
        if self.cache is not None and pair < len(self.cache):
            try:
                return self.tiling.extract(*self.cache.pair(pair), epoch, index)
            except ContentDamage:  # the files are as good, and slower
                self.noticed[pair] |= CACHE_DAMAGED
        return self.tiling.extract(*self._pixels(pair), epoch, index)

    def _pixels(self, index: int) -> tuple[Pixels, Pixels]:
        last = self._last_read
        if last is not None and last[0] == index:
            return last[1:]
        image, mask = self._read(index)
        if isinstance(self.tiling, Tiles):
            self._last_read = (index, image, mask)
        return image, mask

    def take_noticed(self, flag: int) -> list[int]:
        """The pairs of which this was noticed, each once."""
        found = np.flatnonzero(self.noticed & ~self._taken & flag)
        self._taken[found] |= flag
        return found.tolist()

    def decode(self, index: int) -> tuple[Pixels, Pixels]:
        """A pair as the cache keeps it: as the sample where whole images are resized, else as it is."""
        image, mask = self._read(index)
        return self.tiling.extract(image, mask, 0, index) if isinstance(self.tiling, WholeImages) else (image, mask)

    def _read(self, index: int) -> tuple[Pixels, Pixels]:
        """Decodes a pair. The files were checked before the first step, and may have changed since."""
        pair = self.pairs[index]
        # A JPEG may be decoded at a fraction while it stays twice the size of the sample: resizing then still averages pixels.
        min_side = 2 * max(self.tiling.size) if isinstance(self.tiling, WholeImages) and not self.resize_masks else None
        known = self.sizes[index]
        path = pair.image
        try:
            image, size, is_missing = self.image_spec.decode(self._content(index, path, known.image_state, IMAGE_CHANGED), min_side)
            path = pair.mask
            data = self._content(index, path, known.mask_state, MASK_CHANGED)
            refuse_bomb(data, known.mask)
            mask = self.coding.encode(decode_mask(data))
        except ReadError as error:
            raise DataError(f"{shown_path(path)}: {error}") from None
        if mask.shape != known.mask or (mask == UNKNOWN).any():
            raise DataError(f"{pair.mask}: changed since the run began")
        has_kind = image.shape[2] in (1, self.image_spec.channels) and (image.dtype == np.uint8) == self.image_spec.is_8bit
        if size != known.image or not has_kind:
            raise DataError(f"{shown_path(pair.image)}: changed since the run began")
        if self.resize_masks:
            mask = resize_mask(mask, size)
        if is_missing is not None and self.image_spec.ignores_nodata:
            mask = np.where(is_missing, np.uint8(IGNORED), mask)
        return self.image_spec.to_batch(image), mask

    def _content(self, index: int, path: Path, known: FileState, flag: int) -> bytes:
        """The bytes of a file. Those of another stamp than when it was scanned are compared by their digest."""
        data, stamp = read_with_stamp(path)
        if known.stamp and tuple(stamp) != known.stamp and content_digest(data) != known.digest:
            self.noticed[index] |= flag
        return data


class EpochBatches:
    """The batches of every epoch as lists of (epoch, index). With `num_parts`, that many epochs share one pass over the samples.

    The processes of a job divide what one process would read. Shuffled: the order is that of the seed, a step takes the next
    batch_size × world_size samples of it, and each process its slice of them, so all have the same number of batches. Else `own`
    holds the samples of this process.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        num_parts: int = 1,
        rank: int = 0,
        world_size: int = 1,
        own: Sequence[int] | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.num_parts = num_parts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle  # training: shuffled, without the last partial batch, so that shapes are static
        self.rank = rank
        self.world_size = world_size
        self.own = np.arange(num_samples) if own is None else np.asarray(own, np.int64)
        self._last: tuple[int, np.ndarray] | None = None  # epoch and its order, of the last call

    def __len__(self) -> int:
        if self.shuffle:
            return self.num_samples // self.num_parts // (self.batch_size * self.world_size)
        return -(-len(self.own) // self.batch_size)

    def keys(self, epoch: int, batch: int) -> list[Key]:
        """The samples of one batch of an epoch."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._order(epoch)
        start = self.number_of(batch) * self.batch_size
        return [(epoch, int(index)) for index in self._last[1][start : start + self.batch_size]]

    def number_of(self, batch: int) -> int:
        """Of this process's batch, among those of all processes."""
        return batch * self.world_size + self.rank if self.shuffle else batch

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return self.own
        one_pass, part = divmod(epoch, self.num_parts)
        order = np.random.default_rng([self.seed, ORDER_STREAM, one_pass]).permutation(self.num_samples)
        length = self.num_samples // self.num_parts
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
        self, memory: Pixels, epoch: int, batch: int, piece: range, on_start: Callable[[int], object] = lambda position: None
    ) -> tuple[float, float]:
        """Writes the samples at these positions of a batch; positions beyond a short batch are padded with ignored pixels.

        Returns the seconds that reading and augmenting took.
        """
        keys = self.batches.keys(epoch, batch)
        images, masks = self.views(memory)
        read_seconds = augment_seconds = 0.0
        self.dataset.read_ahead([keys[position] for position in piece if position < len(keys)])
        for position in piece:
            if position < len(keys):
                on_start(position)
                image, mask, reading, augmenting = self.dataset.timed_sample(keys[position])
                np.copyto(images[position], image)
                height, width = mask.shape
                np.copyto(masks[position, :height, :width], mask)
                masks[position, height:] = masks[position, :height, width:] = IGNORED
                read_seconds += reading
                augment_seconds += augmenting
            else:
                images[position] = 0
                masks[position] = IGNORED
        return read_seconds, augment_seconds

    def mask_sizes(self, epoch: int, batch: int) -> tuple[Size, ...] | None:
        """As a Batch has them."""
        sizes, tiling = self.dataset.mask_sizes, self.dataset.tiling
        return None if sizes is None else tuple(sizes[tiling.pair_index(index)] for _, index in self.batches.keys(epoch, batch))

    def file(self, epoch: int, batch: int, position: int) -> Path:
        index = self.batches.keys(epoch, batch)[position][1]
        return self.dataset.pairs[self.dataset.tiling.pair_index(index)].image

    def files(self, epoch: int, batch: int) -> list[Path]:
        return [self.file(epoch, batch, position) for position in range(len(self.batches.keys(epoch, batch)))]

    def pieces(self, num_workers: int) -> list[range]:
        """Ranges of positions that workers fill independently. Tiles of one image stay together: each worker would decode it.

        Of remote data a worker has a whole batch, whose samples it fetches all at once.
        """
        size = self.batches.batch_size
        length = size if self.dataset.is_remote else -(-size // min(num_workers, MAX_PIECES))
        if isinstance(self.dataset.tiling, Tiles):
            length = max(length, min(size, -(-len(self.dataset) // len(self.dataset.pairs))))
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def clone_for_worker(self) -> BatchAssembler:
        return BatchAssembler(self.dataset.clone_for_worker(), copy.copy(self.batches))
