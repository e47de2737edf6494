"""(seed, epoch, index) → sample → batch. A sample depends on nothing else: not on workers, order or history."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from unet_trainer.augment import Augmentation
from unet_trainer.cache import PixelCache
from unet_trainer.forms import ImageForm
from unet_trainer.framing import Framing, Resized, Windows, resize_pair
from unet_trainer.images import DataError, Pixels, ReadError, is_reduced, read_image, read_mask
from unet_trainer.masks import IGNORED, UNKNOWN, MaskCoding
from unet_trainer.pairs import Pair

Key = tuple[int, int]  # epoch, index
ORDER_STREAM, AUGMENT_STREAM = 2, 3  # keep the random numbers of order and augmentation apart
# Forked workers see when their parent is gone; those of a fork server, the default from Python 3.14 on, would stay for ever.
WORKER_START = "fork" if sys.platform == "linux" else None
POLL_SECONDS = 1  # how often a loader that waits for its workers looks whether they live


class WorkerError(RuntimeError):
    """A worker process died or hangs; the message says which, and what it was reading."""


class Batch(NamedTuple):
    """What the workers hand over: small numbers, channels last; the device does the rest."""

    images: torch.Tensor  # N,H,W,C uint8, or float32 where the files are no 8-bit ones
    masks: torch.Tensor  # N,H,W uint8 class ids
    num_images: int  # those that are no padding
    stages: tuple[float, float] = (0.0, 0.0)  # seconds that reading and augmenting took


class Samples(NamedTuple):
    """The samples of a batch, and the seconds they took."""

    pairs: list[tuple[Pixels, Pixels]]
    stages: tuple[float, float]


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
        self.cache: PixelCache | None = None
        self._last: tuple[int, Pixels, Pixels] | None = None  # the windows of one image follow each other

    def __len__(self) -> int:
        return len(self.framing)

    def __getitem__(self, key: Key) -> tuple[Pixels, Pixels]:
        """H,W,C image and H,W class ids."""
        return self._sample(key, [0.0, 0.0])

    def _sample(self, key: Key, stages: list[float]) -> tuple[Pixels, Pixels]:
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

    def __getitems__(self, keys: list[Key]) -> Samples | DataError:
        """A batch of samples. What is wrong with a file comes back as a value: raised in a worker, its sentence would drown."""
        stages = [0.0, 0.0]
        try:
            return Samples([self._sample(key, stages) for key in keys], (stages[0], stages[1]))
        except DataError as error:
            return error

    def _pixels(self, index: int) -> tuple[Pixels, Pixels]:
        if self.cache is not None and index < len(self.cache):
            return self.cache.pair(index)
        if self._last is not None and self._last[0] == index:
            return self._last[1:]
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


class EpochBatches(Sampler[list[Key]]):
    """The batches of one epoch as lists of (epoch, index). `set_epoch` picks the epoch that the next pass yields."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle  # training: shuffled, and the last partial batch is dropped to keep shapes static
        self.epoch = 0
        self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.epoch = epoch
        self.first_batch = first_batch

    def __len__(self) -> int:
        return self.num_samples // self.batch_size if self.shuffle else -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, order = self.epoch, self._order(self.epoch)
        for batch in range(self.first_batch, len(self)):
            yield self._keys(order, epoch, batch)

    def keys(self, epoch: int, batch: int) -> list[Key]:
        """What one batch of an epoch is made of."""
        return self._keys(self._order(epoch), epoch, batch)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, ORDER_STREAM, epoch]).permutation(self.num_samples)

    def _keys(self, order: np.ndarray, epoch: int, batch: int) -> list[Key]:
        return [(epoch, int(index)) for index in order[batch * self.batch_size : (batch + 1) * self.batch_size]]


class Collate:
    """Stacks samples; a short batch is filled up with pixels that count nowhere."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __call__(self, samples: Samples | DataError) -> Batch | DataError:
        if isinstance(samples, DataError):
            return samples
        first, _ = samples.pairs[0]
        height, width, channels = first.shape
        images = _empty((self.batch_size, height, width, channels), torch.uint8 if first.dtype == np.uint8 else torch.float32)
        masks = _empty((self.batch_size, height, width), torch.uint8)
        for index, (image, mask) in enumerate(samples.pairs):
            np.copyto(images[index].numpy(), image)
            np.copyto(masks[index].numpy(), mask)
        images[len(samples.pairs) :] = 0
        masks[len(samples.pairs) :] = IGNORED
        return Batch(images, masks, len(samples.pairs), samples.stages)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """In a worker right in shared memory: a batch is copied once, into the pinned memory of the main process."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]


class Loader:
    """Batches of an epoch, with workers that live as long as the loader. `timeout`: seconds without a batch; None: any."""

    def __init__(
        self,
        dataset: SegmentationDataset,
        batch_size: int,
        num_workers: int,
        shuffle: bool,
        pin_memory: bool,
        timeout: float | None = None,
    ) -> None:
        self.dataset = dataset
        self.batches = EpochBatches(len(dataset), batch_size, dataset.seed, shuffle)
        self.collate = Collate(batch_size)
        self.num_workers = min(num_workers, len(self.batches))
        self.pin_memory = pin_memory
        self.timeout = timeout
        self.loader = self._build()
        self.prepared: tuple[int, Iterator[Batch | DataError]] | None = None  # an epoch that is being read ahead

    def _build(self) -> DataLoader[tuple[Pixels, Pixels]]:
        return DataLoader(
            self.dataset,
            batch_sampler=self.batches,
            collate_fn=self.collate,  # type: ignore[arg-type] # what __getitems__ returns, and no list
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            prefetch_factor=2 if self.num_workers else None,
            pin_memory=self.pin_memory,
            timeout=POLL_SECONDS if self.num_workers else 0,
            worker_init_fn=_start_worker,
            multiprocessing_context=WORKER_START if self.num_workers else None,
            generator=torch.Generator(),  # or every pass would move the global random state
        )

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(
        self, epoch: int, first_batch: int = 0, is_stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Batch, None, None]:
        """The batches from `first_batch` on; the earlier ones are not read. Ends early when `is_stopping` while it waits."""
        num_left = len(self) - first_batch
        try:
            batches = self._take_prepared(epoch, first_batch)
            while num_left:
                batch = self._wait_for(batches, epoch, len(self) - num_left, is_stopping)
                if batch is None:
                    return
                num_left -= 1  # before it is handed over: whoever has the last one need not ask for another
                yield batch
        finally:
            if num_left:  # batches of an epoch that was left are still on their way
                self.loader = self._build()

    def prepare(self, epoch: int) -> None:
        """Lets the workers begin with an epoch before it is asked for; the one before must be over."""
        if self.num_workers and self.prepared is None:
            self.batches.set_epoch(epoch)
            self.prepared = epoch, self._start(epoch, 0)

    def _take_prepared(self, epoch: int, first_batch: int) -> Iterator[Batch | DataError]:
        prepared, self.prepared = self.prepared, None
        if prepared is not None and prepared[0] == epoch and first_batch == 0:
            return prepared[1]
        if prepared is not None:
            self.loader = self._build()
        self.batches.set_epoch(epoch, first_batch)
        return self._start(epoch, first_batch)

    def read(self, epoch: int, batch: int) -> Batch:
        """One batch, read here and now without the workers."""
        samples = self.collate(self.dataset.__getitems__(self.batches.keys(epoch, batch)))
        if isinstance(samples, DataError):
            raise samples
        return samples

    def files(self, epoch: int, batch: int) -> list[Path]:
        """The images of one batch."""
        sources = (self.dataset.framing.source(index) for _, index in self.batches.keys(epoch, batch))
        return [self.dataset.pairs[source].image for source in sources]

    def _start(self, epoch: int, first_batch: int) -> Iterator[Batch | DataError]:
        try:
            return _iterate(self.loader)
        except RuntimeError as error:
            self._raise_if_dead(error, self.loader, epoch, first_batch)
            if not _is_timeout(error):
                raise
        self.loader = self._build()  # workers that do not answer at once, on a machine that has too much to do
        return _iterate(self.loader)

    def _wait_for(
        self, batches: Iterator[Batch | DataError], epoch: int, number: int, is_stopping: Callable[[], bool]
    ) -> Batch | None:
        asked = time.monotonic()
        while True:
            try:
                batch = next(batches)
            except RuntimeError as error:
                self._raise_if_dead(error, batches, epoch, number)
                if not _is_timeout(error):
                    raise
                if is_stopping():
                    return None
                if self.timeout is not None and time.monotonic() - asked > self.timeout:
                    raise WorkerError(
                        f"no batch in {self.timeout:g} s (worker_timeout): the worker processes hang, perhaps in reading "
                        f"{self._reading(epoch, number)}"
                    ) from None
                continue
            if isinstance(batch, DataError):
                raise batch
            return batch

    def _raise_if_dead(self, error: RuntimeError, loader: object, epoch: int, number: int) -> None:
        if str(error).startswith(("DataLoader worker (pid", "Pin memory thread")):
            workers = getattr(loader, "_workers", None) or getattr(getattr(loader, "_iterator", None), "_workers", [])
            codes = [worker.exitcode for worker in workers if worker.exitcode]  # negative: by a signal
            fate = "".join(f" ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})" for code in codes[:1])
            raise WorkerError(f"{error}{fate}; it may have been reading {self._reading(epoch, number)}") from None

    def _reading(self, epoch: int, number: int) -> str:
        return ", ".join(str(file) for file in self.files(epoch, number)[:3]) + (", ..." if self.batches.batch_size > 3 else "")


def _iterate(loader: DataLoader[tuple[Pixels, Pixels]]) -> Iterator[Batch | DataError]:
    """torch's own handler for dead workers raises wherever the main thread is, in the middle of a step too: it is put away,
    and a dead worker is found when its batch is asked for."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    return batches


def _is_timeout(error: RuntimeError) -> bool:
    return "DataLoader timed out" in str(error)


def _start_worker(_: int) -> None:
    cv2.setNumThreads(0)  # one process a core is enough
    torch.set_num_threads(1)


def choose_num_workers(num_workers: int | str, num_cores: int, on_cpu: bool) -> int:
    """`auto`: all cores but one for a GPU; half of them where the model needs the cores itself, at most 4."""
    if isinstance(num_workers, int):
        return num_workers
    return min(num_cores // 2, 4) if on_cpu else max(1, min(num_cores - 1, 16))
