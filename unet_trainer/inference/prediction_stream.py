"""Predicts many images into files: threads read, the main thread runs the engine on batches of one shape, threads
write.

    files → read_ahead → batches of one shape → device → HostCopy → WriteBehind → files

Images keep their order, so that batches, and with them results, are the same in every run. The device is given the next
batch before the one before it is done, and nothing in between waits for it. What is read ahead and what waits to be
written is bounded in bytes. An image that is too large for that is read, computed and written in bands of rows, one
image at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress
from pathlib import Path

import cv2
import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageReader, open_reader, read_small
from unet_trainer.images.tiling import Size
from unet_trainer.inference.engine import SymmetricEngine, TorchEngine, host_batch
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import FULL, PredictionFolder, image_files, image_polygons, write_coco
from unet_trainer.inference.predictor import Logits, ModelInput, Predictor, TiledLogits, WholeLogits, predicted_ids
from unet_trainer.inference.recorded_forward import NUM_EAGER
from unet_trainer.loading.sample_reader import model_pixels
from unet_trainer.model.metrics import MAX_ELEMENTS, select_images, upsampled_rows
from unet_trainer.system.concurrency import WriteBehind, read_ahead
from unet_trainer.system.console import Bar, Console
from unet_trainer.system.resources import count_cores
from unet_trainer.training.async_device import HostCopy

# Of a batch, if its size is not given. While the network is called, its thread waits for the GIL beside readers and
# writers: large batches keep a fast GPU busy all the same.
CPU_BATCH_PIXELS = 2 * 512**2
GPU_BATCH_PIXELS = {0: 16 * 512**2, 12: 32 * 512**2, 32: 64 * 512**2}  # by GiB of its memory
MAX_BATCH = 64
SMALL_BATCH = 16  # no less than this for being few images
MIN_BATCHES = 32  # beyond that size
MAX_BYTES = 2**28  # of images that are read ahead, and again of results that wait to be written
IMAGES_PER_TASK = 16  # of a thread that writes: waking it costs about as much as an image
MAX_BATCHES_AHEAD = 3  # that the device may have before it
MAX_OPEN_BATCHES = 4  # images of different shapes that wait for others like them, in batches

Content = ModelInput | ImageReader | DataError | None  # of a file; None: large, and not read yet
Batch = Sequence[tuple[Input, ModelInput]]


class PredictionStream:
    """Predicts once. `batch_size` None: by the number of pixels. `threshold`: see predicted_ids."""

    def __init__(
        self,
        predictor: Predictor,
        folder: PredictionFolder,
        console: Console,
        threshold: float | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.predictor, self.folder, self.console, self.threshold = predictor, folder, console, threshold
        self.batch_size = batch_size
        self.num_images = self.num_to_come = MAX_BATCH * MIN_BATCHES  # until it is known; the second: not computed yet
        engine = predictor.engine
        if isinstance(network := engine.engine if isinstance(engine, SymmetricEngine) else engine, TorchEngine):
            network.record_forward()  # each batch is written to the host before the next is computed
        self.device = device = engine.device
        self.batch_pixels, self.num_readers, self.num_writers = CPU_BATCH_PIXELS, 2, 2  # the network has the cores
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory / 2**30
            self.batch_pixels = max(pixels for least, pixels in GPU_BATCH_PIXELS.items() if memory >= least)
            # More of them wait for the GIL more than they work: 8 and 6 were slower than 6 and 4 on 16 cores.
            self.num_readers, self.num_writers = max(2, 3 * count_cores() // 8), max(2, count_cores() // 4)
        self.num_written, self.num_with_missing = 0, 0  # the second: images of which some values are no data
        self.failed: list[tuple[Path, str]] = []  # path and reason
        self.lock = threading.Lock()
        self.on_device: deque[HostCopy] = deque()

    def warm_up(self) -> None:
        """Run batches of the expected shape on a GPU, so that its forward pass is recorded before images are read."""
        spec = self.predictor.spec
        if self.device.type == "cuda" and spec.fit == "resize":
            shape = (*spec.image_size, spec.image.channels)
            dtype = torch.uint8 if spec.image.is_8bit else torch.float32
            with torch.inference_mode(), contextlib.suppress(torch.OutOfMemoryError):  # run() reports it
                for _ in range(NUM_EAGER + 1):
                    self.predictor.logits(torch.zeros((self.batch_size_of(shape), *shape), dtype=dtype))

    def run(self, inputs: Sequence[Input], is_done: Sequence[bool] = ()) -> PredictionStream:
        """Predict, and return itself, with what came out. Whatever ends it, there are whole files only. `is_done`:
        images whose files are there. Raises OSError where results cannot be written."""
        done = set(compress(inputs, is_done))
        todo = [image for image in inputs if image not in done]
        self.num_images = self.num_to_come = len(todo)
        self.predictor.far_sizes.clear()
        try:
            with contextlib.ExitStack() as stack:
                self.bar: Bar = stack.enter_context(self.console.bar("Predicting:", len(todo)))
                stack.enter_context(one_thread_each(self.device))
                # It allocates page-locked memory, which would start up the first GPU, whichever is used.
                use = partial(torch.cuda.set_device, self.device) if str(self.device).startswith("cuda:") else None
                self.batches = stack.enter_context(ThreadPoolExecutor(1, initializer=use))
                self.writers = stack.enter_context(WriteBehind(self.num_writers, MAX_BYTES))
                ahead = read_ahead(self._read, todo, self.num_readers, _num_bytes, MAX_BYTES, 2 * MAX_BATCH)
                stack.enter_context(contextlib.closing(ahead))
                stack.enter_context(torch.inference_mode())
                self._compute(ahead)
            if self.folder.kinds.polygons:  # of an earlier run too
                failed = {path for path, _ in self.failed}
                images = [(number, image) for number, image in enumerate(inputs, 1) if image.path not in failed]
                found = read_ahead(lambda entry: image_polygons(self.folder, *entry), images, self.num_writers)
                with contextlib.closing(found):
                    write_coco(self.folder, (polygons for _, polygons in found if polygons is not None))
        except torch.OutOfMemoryError:
            raise UserError("the GPU has too little memory even for one image at a time; take --device cpu") from None
        self.failed.sort()
        return self

    def _read(self, image: Input) -> Content:
        try:
            spec = self.predictor.spec.image
            if (small := read_small(image.path, spec, self.predictor.min_side)) is None:
                return None
            content: Content = ImageReader(small.pixels)
            if not self.predictor.is_large(small.size):
                content = self.predictor.prepare(model_pixels(small.pixels, spec), small.size)
            with self.lock:
                self.num_with_missing += small.is_missing is not None
            return content
        except DataError as error:
            return error

    def _compute(self, ahead: Iterable[tuple[Input, Content]]) -> None:
        """A thread copies each batch into one piece of memory while the one before it is computed."""
        coming: deque[tuple[Batch, Future[torch.Tensor]]] = deque()
        for batch in self._group(ahead):
            if batch:
                pixels = [image.pixels for _, image in batch]
                coming.append((batch, self.batches.submit(host_batch, pixels, self.device)))
            # At the start a batch is given to the device as soon as it is there: the next is still to be read.
            while coming and (len(coming) > 1 or coming[0][1].done()):
                self._run_batch(*coming.popleft())
        for batch, stacked in coming:
            self._run_batch(batch, stacked)

    def _group(self, ahead: Iterable[tuple[Input, Content]]) -> Iterator[Batch]:
        """After each image those of one shape that make a batch, or none; large ones are predicted on the way."""
        waiting: dict[tuple[int, ...], list[tuple[Input, ModelInput]]] = {}  # by shape
        for image, content in ahead:
            full: Batch = ()
            if isinstance(content, ModelInput):
                shape = content.pixels.shape
                waiting.setdefault(shape, []).append((image, content))
                size = self.batch_size_of(shape)
                if len(waiting[shape]) == size or sum(map(len, waiting.values())) > MAX_OPEN_BATCHES * size:
                    full = waiting.pop(max(waiting, key=lambda shape: len(waiting[shape])))
            else:
                self.num_to_come -= 1
                if isinstance(content, DataError):
                    self._finish(image, content)
                else:
                    self._run_large(image, content)
            yield full
        yield from waiting.values()

    def batch_size_of(self, shape: Sequence[int]) -> int:
        if self.batch_size is not None:
            return self.batch_size
        # While the first batch is read, or the last written, the device waits: of few images, batches are small.
        most = SMALL_BATCH * max(1, -(-self.num_images // (SMALL_BATCH * MIN_BATCHES)))
        return max(1, min(MAX_BATCH, most, self.batch_pixels // (shape[0] * shape[1])))

    def _run_batch(self, images: Batch, stacked: Future[torch.Tensor]) -> None:
        batch_logits = self.predictor.logits(stacked.result())
        self.num_to_come -= len(images)
        # At the end all writers take part: one would take as long for its images as three batches are computed.
        per_task = IMAGES_PER_TASK if self.num_to_come >= 3 * len(images) else -(-len(images) // self.num_writers)
        by_size: dict[Size, list[int]] = {}
        for place, (_, image) in enumerate(images):
            by_size.setdefault(image.size, []).append(place)
        for size, places in by_size.items():
            logits = self.predictor.at_size(batch_logits, size)
            num_elements = self.folder.spec.num_ids * size[0] * size[1]
            if num_elements > MAX_ELEMENTS:
                for place in places:
                    self._write_bands(images[place][0], WholeLogits(logits[place], size))
                continue
            num_at_once = max(1, 4 * MAX_ELEMENTS // num_elements)
            for start in range(0, len(places), num_at_once):
                some = places[start : start + num_at_once]
                results = self._at_native_size(select_images(logits, some), size)
                copy = self._copy_to_host(results)
                num_bytes = sum(result.nbytes for result in results) // len(some)
                for first in range(0, len(some), per_task):
                    inputs = [images[place][0] for place in some[first : first + per_task]]
                    self.writers.submit(partial(self._write_images, inputs, copy, first), num_bytes * len(inputs))

    def _at_native_size(self, logits: torch.Tensor, size: Size) -> list[torch.Tensor]:
        """Results of N,K,h,w logits at one size."""
        if logits.shape[2:] == size:
            return self._results(logits)
        parts = [self._results(upsampled) for _, upsampled in upsampled_rows(logits, size)]
        return [torch.cat(part, -2) for part in zip(*parts, strict=True)]

    def _results(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """…,K,rows,W logits → …,rows,W ids and, if wanted, …,M,rows,W probabilities, as the files have them."""
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
        """Wait only for a batch some way back, so that the device has work and memory stays bounded."""
        copy = HostCopy(results)
        self.on_device.append(copy)
        if len(self.on_device) > MAX_BATCHES_AHEAD:
            self.on_device.popleft().content()
        return copy

    def _write_images(self, images: Sequence[Input], copy: HostCopy, first: int) -> None:
        """Write all files of some images, whose results are at `first` and after it in a batch; runs in a thread."""
        results = [array[first : first + len(images)] for array in _arrays(copy)]
        for image, *rows in zip(images, *results, strict=True):
            try:
                with image_files(self.folder, image, rows[0].shape) as write:
                    write(rows)
                self._finish(image)
            except ReadError as error:
                self._finish(image, error)

    def _run_large(self, image: Input, reader: ImageReader | None) -> None:
        """Predict an image in bands of rows, or one that is mapped into memory."""
        with contextlib.ExitStack() as stack:
            try:
                opened: ImageReader = reader or stack.enter_context(open_reader(image.path, self.predictor.spec.image))
                logits = self.predictor.predict_large(opened)
            except DataError as error:
                self._finish(image, error)
                return
            if isinstance(logits, TiledLogits):
                title = f"  {image.path.name}, tiles:"
                logits.grid.on_tiles = stack.enter_context(self.console.bar(title, logits.num_tiles, keep=False)).tick
            self._write_bands(image, logits, opened)
            self.num_with_missing += opened.has_missing

    def _write_bands(self, image: Input, logits: Logits, picture: ImageReader | None = None) -> None:
        """Write the rows of one image as they come."""
        try:
            with image_files(self.folder, image, logits.size, picture) as write, WriteBehind(1, MAX_BYTES) as writer:
                for band in logits.bands():
                    copy = self._copy_to_host(self._results(band))
                    task = partial(lambda copy: write(_arrays(copy)), copy)
                    writer.submit(task, sum(tensor.nbytes for tensor in copy.content_now))
            self._finish(image)
        except DataError as error:
            self._finish(image, error)

    def _finish(self, image: Input, error: Exception | None = None) -> None:
        with self.lock:
            if error is None:
                self.num_written += 1
            else:
                self.failed.append((image.path, str(error)))
            self.bar.tick()


def _arrays(copy: HostCopy) -> list[Pixels]:
    """Ids and, if they are wanted, probabilities. On the device, 16 bits have a sign."""
    arrays = [tensor.numpy() for tensor in copy.content()]
    return [array.view(np.uint16) if array.dtype == np.int16 else array for array in arrays]


@contextlib.contextmanager
def one_thread_each(device: torch.device) -> Iterator[None]:
    """Make calls of OpenCV use one thread each, as there are as many readers and writers as cores; those of torch too,
    unless it computes the network: a batch copied by 16 threads on 16 busy cores took 13 ms, and the GPU waited."""
    before, torch_before = cv2.getNumThreads(), torch.get_num_threads()
    cv2.setNumThreads(1)
    torch.set_num_threads(torch_before if device.type == "cpu" else 1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)
        torch.set_num_threads(torch_before)


def _num_bytes(content: Content) -> int:
    pixels = content.stored if isinstance(content, ImageReader) else getattr(content, "pixels", None)
    return 0 if pixels is None else pixels.nbytes
