"""Iterates over the batches of an epoch, filled by a worker pool or in this process.

What this process reads, it reads in a thread that it waits for no longer than `timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from unet_trainer.images.image_files import Pixels
from unet_trainer.loading.cutmix import cut_boxes
from unet_trainer.loading.dataset import Batch, BatchAssembler, EpochBatches, Key, SegmentationDataset
from unet_trainer.loading.worker_pool import WorkerError, WorkerPool
from unet_trainer.system.concurrency import ReadTimeout, call_with_timeout
from unet_trainer.system.distributed import Launch

Outcome = TypeVar("Outcome")

STOP_SECONDS = 30.0  # for what is still read after a signal, to finish an accumulation group


class Loader:
    """Batches of a dataset. With a worker pool, a batch's memory is valid until the next one is asked for.

    `timeout`: seconds without a batch after which reading is taken to hang; None: never. `cutmix`: share of the images that
    get a piece of another. `launch`: this process reads its share of the samples; all of them where it is None.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        batch_size: int,
        shuffle: bool,
        pool: WorkerPool | None = None,
        timeout: float | None = None,
        num_parts: int = 1,
        cutmix: float = 0.0,
        launch: Launch | None = None,
    ) -> None:
        self.dataset = dataset
        rank, world_size = (0, 1) if launch is None else (launch.rank, launch.world_size)
        own = None if shuffle or world_size == 1 else samples_of(dataset, rank, world_size)
        self.batches = EpochBatches(len(dataset), batch_size, dataset.seed, shuffle, num_parts, rank, world_size, own)
        self.assembler = BatchAssembler(dataset, self.batches)
        self.pool = pool
        self.number = 0 if pool is None else pool.add(self.assembler)
        self.timeout = timeout
        self.cutmix = cutmix
        self._assembler = self.assembler  # of the thread that reads in this process

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_workers(self) -> int:
        return 0 if self.pool is None else self.pool.num_workers

    def prepare(self, epoch: int, first_batch: int = 0) -> None:
        """Lets the workers fill an epoch before it is iterated over, after those that were prepared earlier."""
        if self.pool is not None:
            self.pool.plan(self.number, epoch, first_batch)

    def epoch(
        self, epoch: int, first_batch: int = 0, is_stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Batch, None, None]:
        """The batches from `first_batch` on; earlier ones are not read. Ends early when `is_stopping` while it waits."""
        if self.pool is None:
            for batch in range(first_batch, len(self)):
                try:
                    found = self.read(epoch, batch, is_stopping, stop_seconds=0.0)
                except WorkerError:
                    if is_stopping():
                        return
                    raise
                yield found
                del found  # while the next one is read
            return
        begun = self.pool.begin(self.number, epoch, first_batch)
        if begun is None:
            return
        num_left = len(self) - first_batch
        try:
            while num_left:
                pending = self.pool.take(begun, is_stopping, self.timeout)
                if pending is None:
                    return
                num_left -= 1  # before the yield: after the last batch the generator need not be resumed
                images, masks = (torch.from_numpy(array) for array in self.pool.view(pending))
                seconds = pending.read_seconds, pending.augment_seconds
                try:
                    yield self._batch(images, masks, epoch, pending.batch, seconds)
                finally:
                    self.pool.release(pending)
        finally:
            if num_left:
                self.pool.abandon(begun)

    def read(
        self, epoch: int, batch: int, is_stopping: Callable[[], bool] = lambda: False, stop_seconds: float = STOP_SECONDS
    ) -> Batch:
        """One batch, read in this process into memory of its own. Raises WorkerError after `timeout`, or `stop_seconds` after
        is_stopping."""
        memory = np.empty(self.assembler.num_bytes, np.uint8)
        reading = [0]
        whole = range(self.batches.batch_size)
        fill = partial(self._assembler.fill, memory, epoch, batch, whole, partial(reading.__setitem__, 0))
        seconds = self._call(fill, lambda: str(self.assembler.file(epoch, batch, reading[0])), is_stopping, stop_seconds)
        images, masks = (torch.from_numpy(array) for array in self.assembler.views(memory))
        return self._batch(images, masks, epoch, batch, seconds)

    def sample(self, key: Key) -> tuple[Pixels, Pixels]:
        """One sample, read in this process. Raises WorkerError after `timeout`."""
        return self._call(partial(self._assembler.dataset.__getitem__, key), lambda: f"sample {key[1]}")

    def _call(
        self,
        function: Callable[[], Outcome],
        describe: Callable[[], str],
        is_stopping: Callable[[], bool] = lambda: False,
        stop_seconds: float = STOP_SECONDS,
    ) -> Outcome:
        try:
            return call_with_timeout(function, self.timeout, is_stopping, stop_seconds)
        except ReadTimeout:
            reading = describe()
            self._assembler = self.assembler.clone_for_worker()  # the other still hangs
            why = "a signal came" if is_stopping() else f"no batch in {self.timeout:g} s (worker_timeout)"
            raise WorkerError(f"{why}: reading {reading} hangs") from None

    def _batch(self, images: torch.Tensor, masks: torch.Tensor, epoch: int, batch: int, seconds: tuple[float, float]) -> Batch:
        num_images = len(self.batches.keys(epoch, batch))
        boxes = None
        if self.cutmix:
            number = self.batches.number_of(batch)
            boxes = cut_boxes((self.dataset.seed, epoch, number), len(masks), self.dataset.tiling.size, self.cutmix)
        return Batch(images, masks, num_images, *seconds, self.assembler.mask_sizes(epoch, batch), boxes)

    def files(self, epoch: int, batch: int) -> list[Path]:
        """The images of one batch."""
        return self.assembler.files(epoch, batch)


def samples_of(dataset: SegmentationDataset, rank: int, world_size: int) -> list[int]:
    """Every world_size-th image, with all of its tiles: each would be decoded by each process otherwise. No sample comes twice."""
    return [index for index in range(len(dataset)) if dataset.tiling.pair_index(index) % world_size == rank]
