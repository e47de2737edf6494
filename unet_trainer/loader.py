"""The batches of an epoch, one after the other, read by workers or here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import torch

from unet_trainer.crew import Crew, Order
from unet_trainer.dataset import Batch, EpochBatches, SegmentationDataset, Source


class Loader:
    """Batches of a dataset. A batch of the crew's lies in memory that the workers fill again once the next one is asked for.

    `timeout`: seconds without a batch after which the workers are taken to hang; None: never.
    """

    def __init__(
        self, dataset: SegmentationDataset, batch_size: int, shuffle: bool, crew: Crew | None = None, timeout: float | None = None
    ) -> None:
        self.dataset = dataset
        self.batches = EpochBatches(len(dataset), batch_size, dataset.seed, shuffle)
        self.source = Source(dataset, self.batches)
        self.crew = crew
        self.number = 0 if crew is None else crew.add(self.source)
        self.timeout = timeout

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_workers(self) -> int:
        return 0 if self.crew is None else self.crew.num_workers

    def prepare(self, epoch: int, first_batch: int = 0) -> None:
        """Lets the workers begin with an epoch before it is asked for, behind those that were prepared before it."""
        if self.crew is not None:
            self.crew.plan(self.number, epoch, first_batch)

    def epoch(
        self, epoch: int, first_batch: int = 0, is_stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Batch, None, None]:
        """The batches from `first_batch` on; the earlier ones are not read. Ends early when `is_stopping` while it waits."""
        if self.crew is None:
            for number in range(first_batch, len(self)):
                yield self.read(epoch, number)
            return
        begun = self.crew.begin(self.number, epoch, first_batch)
        if begun is None:
            return
        num_left = len(self) - first_batch
        try:
            while num_left:
                order = self.crew.take(begun, is_stopping, self.timeout)
                if order is None:
                    return
                num_left -= 1  # before it is handed over: whoever has the last one need not ask for another
                try:
                    yield self._batch(order, *self.crew.view(order))
                finally:
                    self.crew.release(order)
        finally:
            if num_left:
                self.crew.leave(begun)

    def _batch(self, order: Order, images: np.ndarray, masks: np.ndarray) -> Batch:
        num_images = len(self.batches.keys(order.epoch, order.batch))
        return Batch(torch.from_numpy(images), torch.from_numpy(masks), num_images, (order.stages[0], order.stages[1]))

    def read(self, epoch: int, batch: int) -> Batch:
        """One batch, read here and now without the workers, in memory of its own."""
        memory = np.empty(self.source.num_bytes, np.uint8)
        stages = self.source.fill(memory, epoch, batch, range(self.batches.batch_size))
        images, masks = self.source.views(memory)
        return Batch(torch.from_numpy(images), torch.from_numpy(masks), len(self.batches.keys(epoch, batch)), stages)

    def files(self, epoch: int, batch: int) -> list[Path]:
        """The images of one batch."""
        return self.source.files(epoch, batch)
