"""Predicts many images into files: threads read, the main thread runs the engine on batches of one shape, threads write.

    files → ReadAhead → batches of one shape → device → HostCopy → WriteBehind → files
                                                             → WriterProcesses → files     many small images on a fast GPU

Images keep their order, so that batches, and with them results, are the same in every run. The device is given the next batch
before the one before it is done, and nothing in between waits for it. What is read ahead and what waits to be written is bounded
in bytes. An image that is too large for that is read, computed and written in bands of rows, one image at a time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_files import Pixels, read_mask
from unet_trainer.images.image_readers import ImageReader, open_reader, read_small
from unet_trainer.images.tiling import Size
from unet_trainer.inference.engine import NUM_BEFORE_CAPTURE, ForwardGraphs, host_batch
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.logits import Logits, TiledLogits, WholeLogits, predicted_ids
from unet_trainer.inference.prediction_files import (
    COCO_NAME,
    FULL,
    CocoFile,
    ImageFiles,
    PredictionFolder,
    Rows,
    georeference_of,
    write_geojson,
    write_image,
)
from unet_trainer.inference.predictor import ModelInput, Predictor
from unet_trainer.loading.worker_pool import CAN_FORK, WorkerError
from unet_trainer.model.metrics import MAX_ELEMENTS, select_images, upsampled_rows
from unet_trainer.system.concurrency import SIGNALS, ReadAhead, WriteBehind, run_as_child
from unet_trainer.system.resources import count_cores
from unet_trainer.training.async_device import HostCopy

# Of a batch, if its size is not given. While the network is called, its thread waits for the GIL beside readers and writers: large
# batches keep a fast GPU busy all the same.
CPU_BATCH_PIXELS = 2 * 512**2
GPU_BATCH_PIXELS = {0: 16 * 512**2, 12: 32 * 512**2, 32: 64 * 512**2}  # by GiB of its memory
MAX_BATCH = 64
SMALL_BATCH = 16  # no less than this for being few images
MIN_BATCHES = 32  # beyond that size
MAX_BYTES = 2**28  # of images that are read ahead, and again of results that wait to be written
IMAGES_PER_TASK = 8  # of a thread that writes: waking it costs about as much as an image
IMAGES_PER_PROCESS_TASK = 16  # a task of a process wakes three threads here
MAX_BATCHES_AHEAD = 3  # that the device may have before it
MAX_OPEN_BATCHES = 4  # images of different shapes that wait for others like them, in batches
MIN_IMAGES = 256  # for fewer, starting processes takes longer than they save
MAX_PROCESSES = 8
SLOT_BYTES = 2**24  # of memory that a task shares with its process: 16 masks of 512 × 512 take 4 MiB

Found = ModelInput | ImageReader | DataError | None  # None: large, and not read yet


class Progress(Protocol):
    """What is told while it goes on; called from several threads, one at a time."""

    def images_done(self, number: int) -> None: ...

    def large_image(self, path: Path, num_tiles: int) -> contextlib.AbstractContextManager[Callable[[int], object]]:
        """Around the tiles of a large image; what it gives is called with the number of tiles that are done."""


class Numbered(NamedTuple):
    """An image and its place among all."""

    number: int
    given: Input


@dataclass
class Outcome:
    num_written: int = 0
    failed: list[tuple[Path, str]] = field(default_factory=list)  # path and reason
    num_with_missing: int = 0  # images of which some values are no data


class WriterProcesses:
    """Processes that encode and write the files of small images: in threads, that would take the GIL from the thread that keeps a
    fast GPU busy. Forked before the GPU is started up; they never use CUDA."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        # A place a task, in memory that the processes inherit: pixels that go through a pipe are copied under the GIL.
        num_slots = 2 * num_processes  # the next task of a process waits for it
        memory = [np.frombuffer(mmap.mmap(-1, SLOT_BYTES), np.uint8) for _ in range(num_slots)]
        self.slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_slots):
            self.slots.put(slot)
        self.memory, context = memory, multiprocessing.get_context("fork")
        self.pool = ProcessPoolExecutor(num_processes, context, run_as_child, (_start_process, os.getpid(), memory))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the processes ignore them
        try:
            for _ in range(num_processes):  # of sleeping ones: some versions of Python fork only where none is idle
                self.pool.submit(time.sleep, 0.02)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.workers = [*self.pool._processes.values()]

    def __enter__(self) -> WriterProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True)

    def submit(self, folder: PredictionFolder, images: Sequence[Input], rows: Sequence[Rows]) -> Future[list[str]]:
        """As write_images, in one of the processes. Waits only for a slot. Raises WorkerError if a process has died."""
        slot = self.slots.get()
        try:
            stored = _store(self.memory[slot], rows)
            if stored is None:  # too large
                future = self.pool.submit(write_images, folder, images, rows)
            else:
                future = self.pool.submit(_write_stored, folder, images, slot, stored)
        except BrokenExecutor:
            self.slots.put(slot)
            raise self.died(folder, images) from None
        future.add_done_callback(lambda _: self.slots.put(slot))
        return future

    def died(self, folder: PredictionFolder, images: Sequence[Input]) -> WorkerError:
        """Ends the other processes and deletes what was half written of these images; returns the error to raise."""
        for worker in self.workers:
            worker.kill()  # the pool sends SIGTERM, which they ignore, and waits for them
        self.pool.shutdown()
        for given in images:
            folder.discard_drafts(given.name, [worker.pid or 0 for worker in self.workers])
        names = f"{images[0].path} to {images[-1].path}" if len(images) > 1 else str(images[0].path)
        return WorkerError(f"a process that writes results died, perhaps for want of memory, while those of {names} were written")


Stored = tuple[int, tuple[int, ...], str]  # where an array lies in a slot, its shape and dtype
_memory: list[Pixels] = []  # the slots, in a process that writes


def _store(memory: Pixels, rows: Sequence[Rows]) -> list[list[Stored]] | None:
    """Copies the arrays of each image into a slot; None where they do not fit."""
    if sum(array.nbytes for its_rows in rows for array in its_rows if array is not None) + 16 * len(rows) > len(memory):
        return None
    place, stored = 0, []
    for its_rows in rows:
        parts: list[Stored] = []
        for array in its_rows:
            if array is not None:
                memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
                parts.append((place, array.shape, array.dtype.str))
                place += -(-array.nbytes // 8) * 8
        stored.append(parts)
    return stored


def _write_stored(folder: PredictionFolder, images: Sequence[Input], slot: int, stored: Sequence[Sequence[Stored]]) -> list[str]:
    """As write_images, of the arrays in a slot."""

    def array(place: int, shape: tuple[int, ...], dtype: str) -> Pixels:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return _memory[slot][place : place + num_bytes].view(dtype).reshape(shape)

    return write_images(folder, images, [Rows(*(array(*part) for part in parts), *[None] * (2 - len(parts))) for parts in stored])


def _start_process(memory: list[Pixels]) -> None:
    _memory[:] = memory
    gc.freeze()  # a collection would walk, and so copy, all that this process shares with its parent
    cv2.setNumThreads(1)


def start_writers(num_images: int, device: str) -> WriterProcesses | None:
    """For many images on what may become a CUDA device; None elsewhere. To be called before the device is started up: `device` is
    the user's word for it. Raises OSError."""
    # device_count asks the driver's monitoring library: the GPU is not started up by it.
    is_gpu = device.startswith(("auto", "cuda")) and torch.cuda.device_count() > 0
    # A daemonic process (a worker of somebody else's pool) may not have children.
    if not CAN_FORK or multiprocessing.current_process().daemon or not is_gpu or num_images < MIN_IMAGES:
        return None
    return WriterProcesses(max(2, min(MAX_PROCESSES, count_cores() // 2)))


def write_images(folder: PredictionFolder, images: Sequence[Input], rows: Sequence[Rows]) -> list[str]:
    """All files of some images; for each an empty text, or why it can no longer be read. Raises OSError."""
    reasons = []
    for given, its_rows in zip(images, rows, strict=True):
        try:
            write_image(folder, given, its_rows)
            reasons.append("")
        except ReadError as error:
            reasons.append(str(error))
    return reasons


class PredictionStream:
    """Runs once. `batch_size` None: by the number of pixels. `threshold`: see predicted_ids. `processes` write the images that are
    computed in batches, in place of threads."""

    def __init__(
        self,
        predictor: Predictor,
        folder: PredictionFolder,
        progress: Progress,
        threshold: float | None = None,
        batch_size: int | None = None,
        processes: WriterProcesses | None = None,
    ) -> None:
        self.predictor, self.folder, self.progress, self.threshold = predictor, folder, progress, threshold
        self.batch_size = batch_size
        self.num_images = MAX_BATCH * MIN_BATCHES  # until it is known
        self.device = device = predictor.engine.device
        self.batch_pixels = _batch_pixels(device)
        self.processes = None if folder.kinds.polygons else processes  # all polygons go into one file, which this process writes
        # On a CPU the network has the cores.
        self.num_readers = max(2, count_cores() // 2) if device.type == "cuda" else 2
        self.num_writers = max(2, count_cores() // 4) if device.type == "cuda" else 2
        if self.processes is not None:
            self.num_writers = 1  # hands the results over: more threads would take the GIL from the one that computes
        self.in_processes: deque[tuple[Sequence[Numbered], Future[list[str]]]] = deque()
        self.forward = ForwardGraphs(predictor.engine)
        self.outcome = Outcome()
        self.lock = threading.Lock()
        self.coco: CocoFile | None = None
        self.on_device: deque[HostCopy] = deque()
        self.large: LargeImage | None = None
        self.queued: tuple[Sequence[tuple[Numbered, ModelInput]], Future[torch.Tensor]] | None = None

    def warm_up(self, num_images: int) -> None:
        """Loads the device's kernels for the batches that are known to come: those of a model that sees whole images resized."""
        self.num_images = num_images
        spec = self.predictor.spec
        shape = (*spec.image_size, spec.image.channels)
        batch_size = self.batch_size_of(shape)
        if spec.fit == "resize" and num_images >= NUM_BEFORE_CAPTURE * batch_size:
            dtype = torch.uint8 if spec.image.is_8bit else torch.float32
            self.forward.prepare((batch_size, *shape), dtype)
            if self.device.type == "cuda":
                if num_left := num_images % batch_size:  # the last batch: its kernels are chosen for its shape, layer by layer
                    with contextlib.suppress(torch.OutOfMemoryError):  # told when it is computed
                        self.predictor.engine.logits(torch.zeros((num_left, *shape), dtype=dtype))
                # Allocating page-locked memory stops the device; what is freed here is given out again.
                pixels = batch_size * shape[0] * shape[1]
                sizes = (pixels, pixels * shape[2]) * (2 * MAX_BATCHES_AHEAD)
                _ = [torch.empty(size, dtype=dtype, pin_memory=True) for size in sizes]

    def run(self, inputs: Sequence[Input], is_done: Sequence[bool] | None = None) -> Outcome:
        """Raises OSError where results cannot be written, WorkerError where a process that writes them died. Whatever ends it,
        there are whole files only. `is_done`: images whose files are there; they are left alone, and their polygons made from
        their masks."""
        done = is_done or [False] * len(inputs)
        every = [Numbered(number, given) for number, given in enumerate(inputs)]
        todo = [numbered for numbered in every if not done[numbered.number]]
        self.num_images = len(todo)
        if self.folder.kinds.polygons:
            self.coco = CocoFile(self.folder.out / COCO_NAME, self.folder.spec, len(every))
        try:
            with (
                one_opencv_thread(),
                ThreadPoolExecutor(1, "batches", partial(_use_device, self.device)) as self.batches,
                WriteBehind(self.num_writers, MAX_BYTES) as self.writers,
                WriteBehind(1, MAX_BYTES) as self.large_writer,  # one thread: in order
                self.read_ahead(todo) as found,
                torch.inference_mode(),
            ):
                for numbered in every:
                    if done[numbered.number] and self.coco is not None:
                        self.writers.submit(partial(self._polygons_of_mask, numbered), 0)
                self._compute(found)
                self.large_writer.finish()
                self.writers.finish()
                self._take_written(is_last=True)
            if self.coco is not None:
                self.coco.finish() if self.coco.num_written else self.coco.discard()
        except torch.OutOfMemoryError:
            raise UserError("the GPU has too little memory even for one image at a time; take --device cpu") from None
        finally:
            self._end_tasks()
            if self.large is not None:
                self.large.discard()
            if self.coco is not None:
                self.coco.discard()
        self.outcome.failed.sort()
        return self.outcome

    def read_ahead(self, images: Sequence[Numbered]) -> ReadAhead[Numbered, Found]:
        return ReadAhead(self._read, images, self.num_readers, _num_bytes, MAX_BYTES, 2 * MAX_BATCH)

    def _read(self, numbered: Numbered) -> Found:
        try:
            found = read_small(numbered.given.path, self.predictor.spec.image, self.predictor.min_side)
            if found is None:
                return None
            image, size, is_missing = found
            self._count_missing(is_missing is not None)
            return ImageReader(image) if self.predictor.is_large(size) else self.predictor.prepare(image, size)
        except DataError as error:
            return error

    def _compute(self, ahead: ReadAhead[Numbered, Found]) -> None:
        waiting: dict[tuple[int, ...], list[tuple[Numbered, ModelInput]]] = {}  # by shape
        for numbered, found in ahead:
            if isinstance(found, DataError):
                self.failed(numbered, str(found))
            elif isinstance(found, ModelInput):
                group = waiting.setdefault(found.pixels.shape, [])
                group.append((numbered, found))
                size = self.batch_size_of(found.pixels.shape)
                if len(group) == size or sum(map(len, waiting.values())) > MAX_OPEN_BATCHES * size:
                    largest = max(waiting, key=lambda shape: len(waiting[shape]))
                    self._queue_batch(waiting.pop(largest))
            else:
                self._run_large(numbered, found)
        for group in waiting.values():
            self._queue_batch(group)
        self._run_queued()

    def batch_size_of(self, shape: Sequence[int]) -> int:
        if self.batch_size is not None:
            return self.batch_size
        # While the first batch is read the device waits, and while the last is written too: of few images, batches are small.
        most = SMALL_BATCH * max(1, -(-self.num_images // (SMALL_BATCH * MIN_BATCHES)))
        return max(1, min(MAX_BATCH, most, self.batch_pixels // (shape[0] * shape[1])))

    def _queue_batch(self, images: Sequence[tuple[Numbered, ModelInput]]) -> None:
        """Begins to copy the images into one piece of memory, and computes the batch before it meanwhile."""
        coming = self.batches.submit(host_batch, [given.pixels for _, given in images], self.device)
        self._run_queued()
        self.queued = images, coming

    def _run_queued(self) -> None:
        if self.queued is not None:
            (images, coming), self.queued = self.queued, None
            self._run_batch(images, coming.result())

    def _run_batch(self, images: Sequence[tuple[Numbered, ModelInput]], batch: torch.Tensor) -> None:
        batch_logits = self.predictor.logits(batch, self.forward.logits)  # before the next call they are used up
        by_size: dict[Size, list[int]] = {}
        for place, (_, given) in enumerate(images):
            by_size.setdefault(given.size, []).append(place)
        for size, places in by_size.items():
            logits = self.predictor.at_size(batch_logits, size)
            num_elements = self.folder.spec.num_ids * size[0] * size[1]
            if num_elements > MAX_ELEMENTS:
                for place in places:
                    self._stream(images[place][0], WholeLogits(logits[place], size))
                continue
            num_at_once = max(1, 4 * MAX_ELEMENTS // num_elements)
            for start in range(0, len(places), num_at_once):
                some = places[start : start + num_at_once]
                results = self._at_native_size(select_images(logits, some), size)
                copy = self._copy_to_host(results)
                num_bytes = sum(result.nbytes for result in results) // len(some)
                step = IMAGES_PER_TASK if self.processes is None else IMAGES_PER_PROCESS_TASK
                for first in range(0, len(some), step):
                    numbered = [images[place][0] for place in some[first : first + step]]
                    self.writers.submit(partial(self._write_images, numbered, copy, first), num_bytes * len(numbered))

    def _at_native_size(self, logits: torch.Tensor, size: Size) -> list[torch.Tensor]:
        """Results of N,K,h,w logits at one size."""
        if logits.shape[2:] == size:
            return self._results(logits)
        parts = [self._results(upsampled) for _, upsampled in upsampled_rows(logits, size)]
        return [torch.cat(part, -2) for part in zip(*parts, strict=True)]

    def _results(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """…,K,rows,W logits → …,rows,W ids and, if they are wanted, …,M,rows,W probabilities, as the files have them."""
        ids = predicted_ids(logits, self.threshold)
        kind = self.folder.kinds.probabilities
        if kind is None:
            return [ids]
        probabilities = logits.softmax(-3)
        if self.folder.probable_ids == [1]:
            probabilities = probabilities.narrow(-3, 1, 1)
        if kind == "png":
            # 16 bits without a sign; int16 has as many, and every device knows it.
            probabilities = (probabilities * FULL).round().to(torch.int32).to(torch.int16)
        return [ids, probabilities.contiguous()]

    def _copy_to_host(self, results: list[torch.Tensor]) -> HostCopy:
        """Waits only for a batch some way back, so that the device has work and memory stays bounded."""
        copy = HostCopy(results)
        self.on_device.append(copy)
        if len(self.on_device) > MAX_BATCHES_AHEAD:
            self.on_device.popleft().content()
        return copy

    def _write_images(self, images: Sequence[Numbered], copy: HostCopy, first: int) -> None:
        """In a writer's thread: all files of some images, which lie at `first` and behind it in a batch."""
        rows = [_rows(copy, position) for position in range(first, first + len(images))]
        inputs = [numbered.given for numbered in images]
        if self.processes is not None:
            self.in_processes.append((images, self.processes.submit(self.folder, inputs, rows)))
            self._take_written()
            return
        for numbered, its_rows, reason in zip(images, rows, write_images(self.folder, inputs, rows), strict=True):
            if reason:
                self.failed(numbered, reason)
            else:
                self.written(numbered, its_rows.ids)

    def _take_written(self, is_last: bool = False) -> None:
        """Counts what the processes have written, at the end all of it. Raises WorkerError."""
        while self.in_processes and (is_last or self.in_processes[0][1].done()):
            images, future = self.in_processes.popleft()
            try:
                reasons = future.result()
            except BrokenExecutor:
                assert self.processes is not None
                raise self.processes.died(self.folder, [numbered.given for numbered in images]) from None
            self._count_written(images, reasons)

    def _end_tasks(self) -> None:
        """After an error or a signal: tasks that a process has begun are waited for and counted, the others dropped."""
        for images, future in self.in_processes:
            if not future.cancel() and not future.exception():
                self._count_written(images, future.result())
        self.in_processes.clear()

    def _count_written(self, images: Sequence[Numbered], reasons: Sequence[str]) -> None:
        for numbered, reason in zip(images, reasons, strict=True):
            if reason:
                self.failed(numbered, reason)
        num_written = reasons.count("")
        with self.lock:
            self.outcome.num_written += num_written
            self.progress.images_done(num_written)

    def _run_large(self, numbered: Numbered, reader: ImageReader | None) -> None:
        """An image in bands of rows, or one that is read block by block."""
        try:
            with contextlib.ExitStack() as stack:
                opened: ImageReader = reader or stack.enter_context(open_reader(numbered.given.path, self.predictor.spec.image))
                logits = self.predictor.predict_large(opened)
                num_tiles = logits.num_tiles if isinstance(logits, TiledLogits) else 1
                on_tiles = stack.enter_context(self.progress.large_image(numbered.given.path, num_tiles))
                if isinstance(logits, TiledLogits):
                    logits.on_tiles = on_tiles
                self._stream(numbered, logits, opened if opened.in_memory is not None else None)
                self._count_missing(opened.has_missing)
        except DataError as error:
            self.failed(numbered, str(error))

    def _stream(self, numbered: Numbered, logits: Logits, picture: ImageReader | None = None) -> None:
        """Writes the bands of one image as they come. Raises DataError if the image cannot be read to its end."""
        self.large_writer.finish()  # of the image before
        self.large = large = LargeImage(self, numbered, logits.size, picture)
        try:
            for band in logits.bands():
                copy = self._copy_to_host(self._results(band.logits))
                num_bytes = sum(tensor.nbytes for tensor in copy.content_now)
                self.large_writer.submit(partial(large.write, copy), num_bytes)
        except DataError:
            self.large_writer.finish()
            large.discard()
            raise
        self.large_writer.submit(large.finish, 0)

    def _polygons_of_mask(self, numbered: Numbered) -> None:
        """Of an image that was predicted before."""
        path = self.folder.mask(numbered.given.name)
        try:
            ids = read_mask(path)
        except ReadError as error:
            self.failed(numbered, f"{path}: {error}")
        else:
            self._add_polygons(numbered, ids)

    def _add_polygons(self, numbered: Numbered, ids: Pixels) -> None:
        assert self.coco is not None
        georeference = georeference_of(numbered.given.path)
        if georeference is not None and georeference.transform is not None:
            write_geojson(self.folder.out / f"{numbered.given.name}.geojson", ids, self.folder.spec, georeference)
            self.coco.leave_out(numbered.number)
        else:
            file_name = f"{numbered.given.name}{numbered.given.path.suffix}"
            self.coco.add(numbered.number, file_name, (ids.shape[0], ids.shape[1]), ids)

    def _count_missing(self, has_missing: bool) -> None:
        with self.lock:
            self.outcome.num_with_missing += has_missing

    def written(self, numbered: Numbered, ids: Pixels | None) -> None:
        """`ids`: H,W, where polygons are wanted."""
        if self.coco is not None and ids is not None:
            self._add_polygons(numbered, ids)
        with self.lock:
            self.outcome.num_written += 1
            self.progress.images_done(1)

    def failed(self, numbered: Numbered, reason: str) -> None:
        with self.lock:
            self.outcome.failed.append((numbered.given.path, reason))
            self.progress.images_done(1)
        if self.coco is not None:
            self.coco.leave_out(numbered.number)


class LargeImage:
    """The files of one image, opened with its first rows. If the image cannot be read again for them, it counts as failed."""

    def __init__(self, stream: PredictionStream, numbered: Numbered, size: Size, picture: ImageReader | None) -> None:
        self.stream, self.numbered, self.size, self.picture = stream, numbered, size, picture
        self.files: ImageFiles | None = None
        self.has_failed = False

    def write(self, copy: HostCopy) -> None:
        if self.has_failed:
            return
        try:
            self.files = self.files or ImageFiles(self.stream.folder, self.numbered.given, self.size, self.picture)
            self.files.write(_rows(copy))
        except ReadError as error:
            self.has_failed = True
            self.discard()
            self.stream.failed(self.numbered, str(error))

    def finish(self) -> None:
        if not self.has_failed:
            assert self.files is not None
            self.files.finish()
            self.stream.written(self.numbered, self.files.all_ids() if self.stream.coco is not None else None)

    def discard(self) -> None:
        """Deletes what is unfinished."""
        if self.files is not None:
            self.files.discard()


def _rows(copy: HostCopy, position: int | None = None) -> Rows:
    """Of one image, or of that at `position` of a batch."""
    ids, *others = (tensor.numpy() if position is None else tensor[position].numpy() for tensor in copy.content())
    probabilities = others[0] if others else None
    if probabilities is not None and probabilities.dtype == "int16":
        probabilities = probabilities.view("uint16")
    return Rows(ids, probabilities)


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """OpenCV's calls use one thread each: there are as many readers and writers as cores."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def _use_device(device: torch.device) -> None:
    """In a thread that allocates page-locked memory: else that would start up the first GPU, whichever is used."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _batch_pixels(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BATCH_PIXELS
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return max(pixels for least, pixels in GPU_BATCH_PIXELS.items() if memory >= least)


def _num_bytes(found: Found) -> int:
    pixels = found.pixels if isinstance(found, ModelInput) else found.in_memory if isinstance(found, ImageReader) else None
    return 0 if pixels is None else pixels.nbytes
