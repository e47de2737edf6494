"""Processes that read and write the small images of a PredictionStream: in threads, that would take the GIL from the
thread that keeps a fast GPU busy. Forked before the GPU is started up; they never use CUDA.

A call lies in a slot of memory that the processes inherit, and so does what it returns: pixels that go through a pipe
are copied under the GIL.
"""

import contextlib
import copy
import gc
import mmap
import multiprocessing
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageSpec, read_small
from unet_trainer.images.tiling import Size, fit_image
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import ImageFiles, PredictionFolder, Rows
from unet_trainer.inference.predictor import ModelInput, check_image
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.system.concurrency import CAN_FORK, ForkedWorkers
from unet_trainer.system.resources import count_cores

MIN_IMAGES = 256  # for fewer, starting processes takes longer than they save
MAX_PROCESSES = 8  # that read, and as many that write
HEAD_BYTES = 2**20  # of a slot, for names of files and all else
WRITE_BYTES = 2**24  # of results in a slot: 16 masks of 512 × 512 take 4 MiB
READ_BYTES = 2**22  # of pixels in a slot
NUM_READ_SLOTS = 64
READ_AT_ONCE = 4  # images of a call: 32 of them, the first batch of 1,000, are so shared among 8 processes
SLOT = struct.Struct("q")  # a call, and that it is done: the number of its slot
SIZES = struct.Struct("8q")  # at the start of a slot: how many parts it holds, and the bytes of each

OnDone = Callable[[Sequence[Input], list[str]], object]  # images, and for each what write_images says


class ForkedCalls:
    """Calls functions in processes, any of them. For one thread at a time."""

    def __init__(self, num_processes: int, num_slots: int, slot_bytes: int, doing: str) -> None:
        """`doing`: what the processes do, for messages. Raises OSError."""
        self.slots = [np.frombuffer(mmap.mmap(-1, HEAD_BYTES + slot_bytes), np.uint8) for _ in range(num_slots)]
        self.free = deque(range(num_slots))
        self.under_way: dict[int, Any] = {}  # by slot: what `begin` was given to keep
        self.num_processes, self.doing = num_processes, doing
        self.workers = ForkedWorkers(num_processes, partial(_worker_main, self.slots), SLOT.size, SLOT.size)
        self.close = self.workers.close

    def begin(self, kept: object, function: Callable[..., object], *arguments: object) -> None:
        """There must be a free slot. The function is one of a module."""
        slot = self.free.popleft()
        _store(self.slots[slot], (function, arguments))
        self.under_way[slot] = kept
        self.workers.send(SLOT.pack(slot))

    def ended(self, seconds: float) -> Iterator[tuple[Any, Any, int]]:
        """What was kept, what the function returned or the exception that it raised, and the slot, which the caller
        adds to `free` once the arrays in it are used up. Waits for so long if no call has ended."""
        for (slot,) in SLOT.iter_unpack(self.workers.receive(seconds)):
            yield self.under_way.pop(slot), _load(self.slots[slot]), slot

    def is_broken(self) -> bool:
        """One has died, and with it perhaps a call: they are ended."""
        is_dead = bool(self.under_way) and self.workers.dead_worker() is not None
        if is_dead:
            self.close()
        return is_dead

    def death(self, images: Sequence[Input]) -> WorkerError:
        names = " to ".join(dict.fromkeys(str(images[place].path) for place in (0, -1)))
        return WorkerError(f"a process that {self.doing} died, perhaps for want of memory, while they had {names}")


def _store(slot: Pixels, content: object) -> None:
    """A pickle, and behind it the memory of the arrays in it."""
    buffers: list[pickle.PickleBuffer] = []
    parts: list[Any] = [
        pickle.dumps(content, protocol=5, buffer_callback=buffers.append),
        *(buffer.raw() for buffer in buffers),
    ]
    sizes, place = [len(part) for part in parts], SIZES.size
    SIZES.pack_into(slot.data, 0, len(sizes), *sizes, *[0] * (7 - len(sizes)))
    for part, size in zip(parts, sizes, strict=True):
        if size:
            slot[place : place + size] = np.frombuffer(part, np.uint8)  # without the GIL
        place += -(-size // 8) * 8


def _load(slot: Pixels) -> Any:
    """What _store stored; its arrays lie in the slot."""
    parts, place = [], SIZES.size
    num_parts, *sizes = SIZES.unpack_from(slot.data)
    for size in sizes[:num_parts]:
        parts.append(slot.data[place : place + size])
        place += -(-size // 8) * 8
    return pickle.loads(parts[0], buffers=parts[1:])  # of this process, or of one that it forked


def _worker_main(
    slots: list[Pixels], receive: Callable[[], bytes], send: Callable[[bytes], object], number: int
) -> None:
    gc.freeze()  # a collection would walk, and so copy, all that this process shares with its parent
    while message := receive():
        slot = slots[SLOT.unpack(message)[0]]
        try:
            function, arguments = _load(slot)
            _store(slot, function(*arguments))
        except Exception as error:  # of any kind: raised in the parent
            _store(slot, error)
        send(message)


class StreamProcesses(contextlib.AbstractContextManager["StreamProcesses"]):
    """Use it in `with`."""

    def __init__(self, num_processes: int) -> None:
        """Of each kind. Raises OSError."""
        self.readers = ForkedCalls(num_processes, NUM_READ_SLOTS, READ_BYTES, "reads images")
        try:
            # Two slots for each process: its next call waits for it.
            self.writers = ForkedCalls(num_processes, 2 * num_processes, WRITE_BYTES, "writes results")
        except BaseException:
            self.readers.close()
            raise
        self.errors: list[Exception] = []

    def __exit__(self, *_: object) -> None:
        self.readers.close()
        self.writers.close()

    def can_read(self, num_bytes: int, batch_size: int) -> bool:
        """Inputs of so many bytes each: what is under way, and three batches that are made and computed, must have
        slots, else all would wait for one for ever."""
        num_held = 3 * -(-batch_size // READ_AT_ONCE)
        return READ_AT_ONCE * num_bytes <= READ_BYTES and num_held + 2 * self.readers.num_processes <= NUM_READ_SLOTS

    def read_ahead(
        self, images: Sequence[Input], *arguments: object
    ) -> Generator[tuple[Input, ModelInput | DataError | None, bool], None, None]:
        """Each image in order, as read_images gives it with these arguments. The memory of pixels is used again once
        their ModelInputs are gone. Raises WorkerError."""
        calls = self.readers
        tasks = [images[first : first + READ_AT_ONCE] for first in range(0, len(images), READ_AT_ONCE)]
        num_begun, outcomes = 0, dict[int, tuple[Any, int]]()
        for number, task in enumerate(tasks):
            while True:
                while calls.free and num_begun < len(tasks):
                    calls.begin(num_begun, read_images, tasks[num_begun], *arguments)
                    num_begun += 1
                if number in outcomes:
                    break
                outcomes.update((ended, (outcome, slot)) for ended, outcome, slot in calls.ended(1.0))
                if calls.is_broken():
                    raise calls.death([given for ended in sorted(calls.under_way.values()) for given in tasks[ended]])
            outcome, slot = outcomes.pop(number)
            if isinstance(outcome, Exception):
                raise outcome
            held: _Held | None = _Held()
            weakref.finalize(held, calls.free.append, slot)
            if not all(isinstance(found, ModelInput) for found, _ in outcome):
                outcome, held = copy.deepcopy(outcome), None  # a few images of a batch must not hold a slot each
            for given, (found, has_missing) in zip(task, outcome, strict=True):
                yield given, found._replace(held=held) if isinstance(found, ModelInput) else found, has_missing
            del outcome, held, found

    def write(
        self, folder: PredictionFolder, images: Sequence[Input], results: Sequence[Pixels], on_done: OnDone
    ) -> None:
        """As write_images, by one of the processes; `on_done` gets the images and what that returns, in a later call.
        Waits only for a slot. Raises what a process raised, and WorkerError if one has died. From one thread at a
        time."""
        if not self.errors:
            self._collect(seconds=0.0)
        while not self.writers.free and not self.errors:
            self._collect(seconds=1.0)
        if self.errors:
            raise self.errors[0]
        self.writers.begin((folder, images, on_done), write_images, folder, images, results)

    def finish(self) -> None:
        """Waits until all is written. Raises as `write` does."""
        while self.writers.under_way:
            self._collect(seconds=1.0)
        if self.errors:
            raise self.errors[0]

    def _collect(self, seconds: float) -> None:
        """Takes what is done; waits for so long if nothing is."""
        for (_, images, on_done), found, slot in self.writers.ended(seconds):
            self.writers.free.append(slot)
            if isinstance(found, Exception):
                self.errors.append(found)
            else:
                on_done(images, found)
        if self.writers.is_broken():
            pids = [process.pid or 0 for process in self.writers.workers.processes]
            lost = [(folder, given) for folder, images, _ in self.writers.under_way.values() for given in images]
            self.writers.under_way.clear()
            for folder, given in lost:
                folder.discard_drafts(given.name, pids)
            self.errors.insert(0, self.writers.death([given for _, given in lost]))


class _Held:
    """Pixels in a slot are used while this is referred to."""


def start_processes(num_images: int, device: str) -> StreamProcesses | None:
    """For many images on what may become a CUDA device; None elsewhere. To be called before the device is started up:
    `device` is the user's word for it. Raises OSError."""
    # device_count asks the driver's monitoring library: the GPU is not started up by it.
    is_gpu = device.startswith(("auto", "cuda")) and torch.cuda.device_count() > 0
    # A daemonic process (a worker of somebody else's pool) may not have children.
    if not CAN_FORK or multiprocessing.current_process().daemon or not is_gpu or num_images < MIN_IMAGES:
        return None
    return StreamProcesses(max(2, min(MAX_PROCESSES, count_cores() // 2)))


def read_images(
    images: Sequence[Input], spec: ImageSpec, min_side: int | None, size: Size
) -> list[tuple[ModelInput | DataError | None, bool]]:
    """Each resized, an error, or None, with nothing decoded, if it is large; and whether some of its values were
    missing."""
    outcomes: list[tuple[ModelInput | DataError | None, bool]] = []
    for given in images:
        try:
            found = read_small(given.path, spec, min_side)
            pixels = None if found is None else ModelInput(fit_image(check_image(found.pixels, spec), size), found.size)
            outcomes.append((pixels, found is not None and found.is_missing is not None))
        except DataError as error:
            outcomes.append((error, False))
    return outcomes


def write_images(folder: PredictionFolder, images: Sequence[Input], results: Sequence[Pixels]) -> list[str]:
    """All files of images of one size; for each an empty text, or why it can no longer be read. `results`: N,H,W ids
    and, if they are wanted, N,M,H,W probabilities. Raises OSError."""
    reasons = []
    for given, *rows in zip(images, *results, strict=True):
        try:
            with ImageFiles(folder, given, rows[0].shape) as files:
                files.write(Rows(*rows))
                files.finish()
            reasons.append("")
        except ReadError as error:
            reasons.append(str(error))
    return reasons
