"""Iterates over the batches of an epoch, filled by a worker pool or in this process, in a thread that is waited for no
longer than `timeout`; CutMix; and advice where training waits."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.loading.dataset import PILOT_EPOCH, Batch, BatchAssembler, EpochBatches, Key, SegmentationDataset
from unet_trainer.loading.worker_pool import WorkerError, WorkerPool
from unet_trainer.system.concurrency import ReadTimeout, call_with_timeout
from unet_trainer.system.launch import Launch

Outcome = TypeVar("Outcome")

CUTMIX_STREAM = 5  # part of the seed: independent of the random numbers of order, augmentation and crops
SMALLEST, LARGEST = 0.2, 0.7  # side of a rectangle, as a share of the image's
MAX_WAIT = 0.10  # share of an epoch up to which there is no advice


class Loader:
    """Batches of a dataset. With a worker pool, a batch's memory is valid until the next one is asked for. `timeout`:
    seconds without a batch after which reading hangs; None: never. `cutmix`: share of the images that get a piece of
    another. `launch`: this process reads its share of the samples, without it all of them."""

    def __init__(
        self,
        dataset: SegmentationDataset,
        batch_size: int,
        shuffle: bool,
        pool: WorkerPool | None = None,
        timeout: float | None = None,
        epochs_per_pass: int = 1,
        cutmix: float = 0.0,
        launch: Launch | None = None,
    ) -> None:
        self.dataset = dataset
        rank, world_size = (0, 1) if launch is None else (launch.rank, launch.world_size)
        samples = np.arange(len(dataset)) if shuffle or world_size == 1 else samples_of(dataset, rank, world_size)
        self.batches = EpochBatches(samples, batch_size, dataset.seed, shuffle, epochs_per_pass, rank, world_size)
        self.assembler = BatchAssembler(dataset, self.batches)
        self.pool = pool
        self.number = 0 if pool is None else pool.add(self.assembler)
        self.timeout = timeout
        self.cutmix = cutmix
        self._assembler = self.assembler  # of the thread that reads in this process

    def __len__(self) -> int:
        return len(self.batches)

    def prepare(self, epoch: int, first_batch: int = 0) -> None:
        """Lets the workers fill an epoch before it is iterated over, after those that were prepared earlier."""
        if self.pool is not None:
            self.pool.plan(self.number, epoch, first_batch)

    def epoch(
        self, epoch: int, first_batch: int = 0, is_stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Batch, None, None]:
        """The batches from `first_batch` on. Ends early when `is_stopping` while it waits for a worker."""
        if self.pool is None:
            for batch in range(first_batch, len(self)):
                yield self.read(epoch, batch)
            return
        with contextlib.closing(self.pool.epoch(self.number, epoch, first_batch, is_stopping, self.timeout)) as filled:
            for batch, (images, masks, pending) in enumerate(filled, first_batch):
                if pending.num_failed:
                    again = self.read(epoch, batch)
                    self.pool.num_failed += pending.num_failed
                    yield again
                else:
                    yield self._batch(images, masks, epoch, batch, pending.read_seconds, pending.augment_seconds)

    def read(self, epoch: int, batch: int) -> Batch:
        """One batch, read in this process into memory of its own. Raises WorkerError after `timeout`."""
        memory, reading = np.empty(self.assembler.num_bytes, np.uint8), [0]
        whole = range(self.batches.batch_size)
        fill = partial(self._assembler.fill, memory, epoch, batch, whole, partial(reading.__setitem__, 0))
        seconds = self._call(fill, lambda: self.assembler.files(epoch, batch)[reading[0]])
        return self._batch(*self.assembler.views(memory), epoch, batch, *seconds)

    def sample(self, key: Key) -> tuple[Pixels, Pixels]:
        """One sample, read in this process. Raises WorkerError after `timeout`."""
        return self._call(partial(self._assembler.dataset.__getitem__, key), lambda: f"sample {key[1]}")

    def _call(self, function: Callable[[], Outcome], describe: Callable[[], object]) -> Outcome:
        try:
            return call_with_timeout(function, self.timeout)
        except ReadTimeout:
            self._assembler = self.assembler.clone_for_worker()  # the other still hangs
            why = f"no batch in {self.timeout:g} s (worker_timeout)"
            raise WorkerError(f"{why}: reading {describe()} hangs") from None

    def _batch(
        self, images: Pixels, masks: Pixels, epoch: int, batch: int, read_seconds: float, augment_seconds: float
    ) -> Batch:
        boxes = None
        if self.cutmix:
            key = self.dataset.seed, epoch, self.batches.number_of(batch)
            share = 0.0 if epoch >= PILOT_EPOCH else self.cutmix
            boxes = cut_boxes(key, len(masks), self.dataset.tiling.size, share)
        num_images, sizes = len(self.batches.keys(epoch, batch)), self.assembler.mask_sizes(epoch, batch)
        tensors = torch.from_numpy(images), torch.from_numpy(masks)
        return Batch(*tensors, num_images, read_seconds, augment_seconds, sizes, boxes)


def samples_of(dataset: SegmentationDataset, rank: int, world_size: int) -> NDArray[np.int64]:
    """Every world_size-th image, with all of its tiles: each would be decoded by each process otherwise."""
    return np.flatnonzero([dataset.tiling.pair_index(index) % world_size == rank for index in range(len(dataset))])


def cut_boxes(key: tuple[int, int, int], num_images: int, size: tuple[int, int], share: float) -> torch.Tensor:
    """CutMix, N,4 int64: first and last + 1 of the rows, then of the columns, that each image takes from the one before
    it; zeros for those beyond `share`. `key`: seed, epoch, batch. The border may cut rectangles off."""
    seed, epoch, batch = key
    drawn = np.random.default_rng([seed, CUTMIX_STREAM, epoch, batch]).random((4, num_images))
    sides = SMALLEST + (LARGEST - SMALLEST) * drawn[0]
    boxes = np.zeros((num_images, 4), np.int64)
    for axis, (length, centre) in enumerate(zip(size, drawn[1:3], strict=True)):
        first, last = (centre - sides / 2) * length, (centre + sides / 2) * length
        boxes[:, 2 * axis], boxes[:, 2 * axis + 1] = first.round().clip(0, length), last.round().clip(0, length)
    boxes[drawn[3] >= share] = 0
    return torch.from_numpy(boxes)


def paste_pieces(images: torch.Tensor, masks: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """N,H,W,C images and N,H,W masks with the rectangles pasted; all three on one device, for which nothing waits."""
    rows = torch.arange(masks.shape[1], device=masks.device)
    columns = torch.arange(masks.shape[2], device=masks.device)
    in_rows = (rows >= boxes[:, :1]) & (rows < boxes[:, 1:2])
    in_columns = (columns >= boxes[:, 2:3]) & (columns < boxes[:, 3:])
    inside = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
    mixed = torch.where(inside.unsqueeze(3), images.roll(1, 0), images)
    return mixed, torch.where(inside, masks.roll(1, 0), masks)


@dataclass(frozen=True)
class EpochTimes:
    """Measured in an epoch of training."""

    images_per_second: float
    data_wait: float  # share of the time
    read_seconds: float  # of one image, in a worker
    augment_seconds: float
    num_workers: int


def advise(times: EpochTimes, num_cores: int, cache: str, on_cpu: bool) -> str | None:
    """One sentence when the model waits for more than a tenth of the time, else None."""
    if times.data_wait <= MAX_WAIT:
        return None
    most = num_cores // 2 if on_cpu else num_cores - 1
    fix = f"num_workers: {most}" if most > times.num_workers else "a smaller image_size or a lighter augmentation"
    fix = "cache: ram" if cache == "none" and times.augment_seconds < times.read_seconds else fix
    cost = f"reading {times.read_seconds * 1e3:.1f} ms and augmenting {times.augment_seconds * 1e3:.1f} ms an image"
    waits = f"the model waits for data in {times.data_wait:.0%} of the time"
    return f"{waits} ({cost}, {times.num_workers} workers); {fix} would help"
