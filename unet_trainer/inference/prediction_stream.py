"""Predicts many images into files: threads read ahead, the device computes batches of one shape, threads write behind.

    files → ReadAhead → batches of one shape → device → HostCopy → WriteBehind → files
                                                      → WriterProcesses → files      many small images on a fast GPU

Images come from the readers in their order, so that batches, and with them results, are the same in every run. The device is given
the next batch before the one before it is done, and nothing in between waits for it. What is read ahead and what waits to be
written is bounded in bytes. An image that is too large for that is read, computed and written in bands of rows, one at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import cv2
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.georeference import Georeference
from unet_trainer.images.image_files import Pixels, read_mask
from unet_trainer.images.image_readers import ArrayReader, ImageReader, open_reader, read_small
from unet_trainer.images.tiling import Size
from unet_trainer.inference.engine import host_batch
from unet_trainer.inference.forward_graphs import NUM_BEFORE_CAPTURE, ForwardGraphs
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.logits import Logits, WholeLogits, predicted_ids
from unet_trainer.inference.polygon_files import CocoFile, write_geojson
from unet_trainer.inference.prediction_files import COCO_NAME, FULL, ImageFiles, PredictionFolder, Rows, georeference_of
from unet_trainer.inference.predictor import ModelInput, Predictor
from unet_trainer.inference.tiled import TiledLogits
from unet_trainer.inference.writer_processes import WriterProcesses
from unet_trainer.model.native_resolution import MAX_ELEMENTS, select_images, upsampled_rows
from unet_trainer.runs.host_copy import HostCopy
from unet_trainer.system.read_ahead import ReadAhead
from unet_trainer.system.resources import count_cores
from unet_trainer.system.write_behind import WriteBehind

# Of a batch, if its size is not given. While the network is called, its thread waits for Python's lock beside readers and writers:
# large batches keep a fast GPU busy all the same.
CPU_BATCH_PIXELS = 2 * 512**2
GPU_BATCH_PIXELS = {0: 16 * 512**2, 12: 32 * 512**2, 32: 64 * 512**2}  # by GiB of its memory
MAX_BATCH = 64
SMALL_BATCH = 16  # no less than this for being few images
MIN_BATCHES = 32  # beyond that size
MAX_BYTES = 2**28  # of images that are read ahead, and again of results that wait to be written
IMAGES_PER_TASK = 4  # of a writer: waking it costs about as much as an image
MAX_BATCHES_AHEAD = 3  # that the device may have before it
MAX_OPEN_BATCHES = 4  # images of different shapes that wait for others like them, in batches

Found = ModelInput | ArrayReader | DataError | None  # None: large, and not read yet


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


class PredictionStream:
    """Runs once. `batch_size` None: by the number of pixels. `threshold`: see predicted_ids. `processes`: write the images that
    are computed in batches, in place of threads; forked with the inputs of `run`, which closes them if it fails."""

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
        device = predictor.engine.device
        self.batch_pixels = _batch_pixels(device)
        # On a CPU the network has the cores.
        self.num_readers = max(2, count_cores() // 2) if device.type == "cuda" else 2
        self.num_writers = max(2, count_cores() // 4) if device.type == "cuda" else 2
        self.processes = None if folder.kinds.polygons else processes  # all polygons go into one file, which this process writes
        self.forward = ForwardGraphs(predictor.engine)
        self.outcome = Outcome()
        self.lock = threading.Lock()
        self.coco: CocoFile | None = None
        self.on_device: deque[HostCopy] = deque()
        self.streamed: StreamedImage | None = None
        self.queued: tuple[Sequence[tuple[Numbered, ModelInput]], Future[torch.Tensor]] | None = None
        if self.processes is not None:
            self.processes.open(folder, device, partial(self._count_answers, self.processes.inputs))

    def warm_up(self, num_images: int) -> None:
        """Loads the device's kernels for the batches that are known to come: those of a model that sees whole images resized."""
        self.num_images = num_images
        spec = self.predictor.spec
        shape = (*spec.image_size, spec.image.channels)
        batch_size = self.batch_size_of(shape)
        if spec.fit == "resize" and num_images >= NUM_BEFORE_CAPTURE * batch_size:
            dtype = torch.uint8 if spec.image.is_8bit else torch.float32
            self.forward.prepare((batch_size, *shape), dtype)
            if self.predictor.engine.device.type == "cuda":
                if num_left := num_images % batch_size:  # the last batch: its kernels are chosen for its shape, layer by layer
                    with contextlib.suppress(torch.OutOfMemoryError):  # told when it is computed
                        self.predictor.engine.logits(torch.zeros((num_left, *shape), dtype=dtype))
                # Allocating page-locked memory stops the device; what is freed here is given out again.
                pixels = batch_size * shape[0] * shape[1]
                _ = [
                    torch.empty(size, dtype=dtype, pin_memory=True)
                    for size in ((pixels, pixels * shape[2]) if self.processes is None else (pixels * shape[2],))
                    for _ in range(2 * MAX_BATCHES_AHEAD)
                ]

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
                ThreadPoolExecutor(1, "batches", partial(_use_device, self.predictor.engine.device)) as self.batches,
                WriteBehind(self.num_writers, MAX_BYTES) as self.writers,
                WriteBehind(1, MAX_BYTES) as self.large_writer,  # one thread: in order
                self.read_ahead(todo) as ahead,
                _closed_on_failure(self.processes),
                torch.inference_mode(),
            ):
                for numbered in every:
                    if done[numbered.number] and self.coco is not None:
                        self.writers.submit(partial(self._polygons_of_mask, numbered), 0)
                self._compute(ahead)
                self.large_writer.finish()
                self.writers.finish()
                if self.processes is not None:
                    self.processes.finish()
            if self.coco is not None:
                self.coco.finish() if self.coco.num_written else self.coco.discard()
        except torch.OutOfMemoryError:
            raise UserError("the GPU has too little memory even for one image at a time; take --device cpu") from None
        finally:
            if self.streamed is not None:
                self.streamed.discard()
            if self.coco is not None:
                self.coco.discard()
        self.outcome.failed.sort()
        return self.outcome

    def read_ahead(self, images: Sequence[Numbered]) -> ReadAhead[Numbered, Found]:
        return ReadAhead(self._read, images, self.num_readers, _num_bytes, MAX_BYTES, max_items=2 * MAX_BATCH)

    def _read(self, numbered: Numbered) -> Found:
        try:
            found = read_small(numbered.given.path, self.predictor.spec.image.channels, self.predictor.min_side)
            if found is None:
                return None
            image, size = found
            return ArrayReader(image) if self.predictor.is_tiled(size) else self.predictor.prepare(image, size)
        except DataError as error:
            return error

    def _compute(self, ahead: ReadAhead[Numbered, Found]) -> None:
        waiting: dict[tuple[int, ...], list[tuple[Numbered, ModelInput]]] = {}  # by shape
        for numbered, found in ahead:
            if self.processes is not None:
                self.processes.poll()
            if isinstance(found, DataError):
                self.failed(numbered, found)
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
        pixels = [given.pixels for _, given in images]
        coming = self.batches.submit(host_batch, pixels, self.predictor.engine.device)
        self._run_queued()
        self.queued = images, coming

    def _run_queued(self) -> None:
        if self.queued is not None:
            (images, coming), self.queued = self.queued, None
            self._run_batch(images, coming.result())

    def _run_batch(self, images: Sequence[tuple[Numbered, ModelInput]], batch: torch.Tensor) -> None:
        logits = self.forward.logits(batch)  # before the next call they are used up
        by_size: dict[Size, list[int]] = {}
        for place, (_, given) in enumerate(images):
            by_size.setdefault(given.size, []).append(place)
        for size, places in by_size.items():
            num_elements = self.folder.spec.num_ids * size[0] * size[1]
            if num_elements > MAX_ELEMENTS:
                for place in places:
                    self._stream(images[place][0], WholeLogits(logits[place], size))
                continue
            num_at_once = max(1, 4 * MAX_ELEMENTS // num_elements)
            if self.processes is not None:
                num_at_once = min(num_at_once, self.processes.num_at_once(size))
            for start in range(0, len(places), num_at_once):
                some = places[start : start + num_at_once]
                results = self._at_native_size(select_images(logits, some), size)
                if self.processes is not None:
                    self.processes.write([images[place][0].number for place in some], size, results)
                    continue
                copy = self._copy_to_host(results)
                num_bytes = sum(result.nbytes for result in results) // len(some)
                for first in range(0, len(some), IMAGES_PER_TASK):
                    numbered = [images[place][0] for place in some[first : first + IMAGES_PER_TASK]]
                    self.writers.submit(partial(self._write_images, numbered, size, copy, first), num_bytes * len(numbered))

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

    def _write_images(self, images: Sequence[Numbered], size: Size, copy: HostCopy, first: int) -> None:
        """In a writer's thread: all files of some images, which lie at `first` and behind it in a batch."""
        for position, numbered in enumerate(images, first):
            streamed = StreamedImage(self, numbered, size, None)
            try:
                streamed.write(copy, position)
                streamed.finish()
            finally:
                streamed.discard()

    def _run_large(self, numbered: Numbered, reader: ArrayReader | None) -> None:
        """An image in tiles, or one that is read block by block."""
        try:
            with contextlib.ExitStack() as stack:
                opened: ImageReader = reader or stack.enter_context(
                    open_reader(numbered.given.path, self.predictor.spec.image.channels)
                )
                logits = self.predictor.predict_large(opened)
                num_tiles = logits.num_tiles if isinstance(logits, TiledLogits) else 1
                on_tiles = stack.enter_context(self.progress.large_image(numbered.given.path, num_tiles))
                if isinstance(logits, TiledLogits):
                    logits.on_tiles = on_tiles
                self._stream(numbered, logits, opened if isinstance(opened, ArrayReader) else None)
        except DataError as error:
            self.failed(numbered, error)

    def _stream(self, numbered: Numbered, logits: Logits, picture: ImageReader | None = None) -> None:
        """Writes the bands of one image as they come. Raises DataError if the image cannot be read to its end."""
        self.large_writer.finish()  # of the image before
        self.streamed = streamed = StreamedImage(self, numbered, logits.size, picture)
        bands = logits.bands()
        try:
            while (band := next(bands, None)) is not None:
                copy = self._copy_to_host(self._results(band.logits))
                num_bytes = sum(tensor.nbytes for tensor in copy.content_now)
                self.large_writer.submit(partial(streamed.write, copy), num_bytes)
        except DataError:
            self.large_writer.finish()
            streamed.discard()
            raise
        self.large_writer.submit(streamed.finish, 0)

    def _polygons_of_mask(self, numbered: Numbered) -> None:
        """Of an image that was predicted before."""
        path = self.folder.mask(numbered.given.name)
        try:
            ids = read_mask(path)
        except ReadError as error:
            self.failed(numbered, DataError(f"{path}: {error}"))
            return
        self.add_polygons(numbered, ids, georeference_of(numbered.given.path))

    def add_polygons(self, numbered: Numbered, ids: Pixels, georeference: Georeference | None) -> None:
        assert self.coco is not None
        if georeference is not None and georeference.transform is not None:
            write_geojson(self.folder.out / f"{numbered.given.name}.geojson", ids, self.folder.spec, georeference)
            self.coco.leave_out(numbered.number)
        else:
            file_name = f"{numbered.given.name}{numbered.given.path.suffix}"
            self.coco.add(numbered.number, file_name, (ids.shape[0], ids.shape[1]), ids)

    def _count_answers(self, inputs: Sequence[Input], num_written: int, unreadable: Sequence[tuple[int, str]]) -> None:
        """Of the processes."""
        self.written(num_written)
        for number, reason in unreadable:
            self.failed(Numbered(number, inputs[number]), DataError(reason))

    def written(self, number: int = 1) -> None:
        with self.lock:
            self.outcome.num_written += number
            self.progress.images_done(number)

    def failed(self, numbered: Numbered, error: DataError) -> None:
        with self.lock:
            self.outcome.failed.append((numbered.given.path, str(error)))
            self.progress.images_done(1)
        if self.coco is not None:
            self.coco.leave_out(numbered.number)


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """OpenCV's calls use one thread each: there are as many readers and writers as cores."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


@contextlib.contextmanager
def _closed_on_failure(processes: WriterProcesses | None) -> Iterator[None]:
    """After a success, whoever started them closes them: that takes as long as some images."""
    try:
        yield
    except BaseException:
        if processes is not None:
            processes.close()
        raise


class StreamedImage:
    """The files of one image, opened with its first rows. If the image cannot be read again for them, it counts as failed."""

    def __init__(self, stream: PredictionStream, numbered: Numbered, size: Size, picture: ImageReader | None) -> None:
        self.stream, self.numbered, self.size, self.picture = stream, numbered, size, picture
        self.files: ImageFiles | None = None
        self.georeference: Georeference | None = None
        self.has_failed = False

    def write(self, copy: HostCopy, position: int | None = None) -> None:
        """`position`: of the image in a batch."""
        if self.has_failed:
            return
        try:
            if self.files is None:
                self.georeference = georeference_of(self.numbered.given.path)
                self.files = ImageFiles(self.stream.folder, self.numbered.given, self.size, self.georeference, self.picture)
            arrays = [tensor if position is None else tensor[position] for tensor in copy.content()]
            probabilities = None if len(arrays) == 1 else arrays[1].numpy()
            if probabilities is not None and probabilities.dtype == "int16":
                probabilities = probabilities.view("uint16")
            self.files.write(Rows(arrays[0].numpy(), probabilities))
        except ReadError as error:
            self.has_failed = True
            self.discard()
            self.stream.failed(self.numbered, error)

    def finish(self) -> None:
        if self.has_failed:
            return
        assert self.files is not None
        if self.stream.coco is not None:
            self.stream.add_polygons(self.numbered, self.files.all_ids(), self.georeference)
        self.files.finish()
        self.stream.written()

    def discard(self) -> None:
        """Deletes what is unfinished."""
        if self.files is not None:
            self.files.discard()


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
    return found.pixels.nbytes if isinstance(found, ModelInput | ArrayReader) else 0
