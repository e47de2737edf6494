"""Forked processes that encode and write the files of small images, which they find in shared memory.

In threads of this process, encoding would take Python's lock from the thread that keeps a fast GPU busy. The life of a piece, which
is some images of one size:

    reserved   it has a place in the shared memory; the device copies the results there (`arriving`)
    arrived    the copy has ended; its images are tasks of the processes (`open_pieces`)
    answered   all of its images are written, or cannot be; the place is free again

Messages have a fixed size, one for each image and back; those of a piece are sent with one call.

The processes are forked before the GPU is started up and before there are threads. What they need of the model they are told later,
through the shared memory. They never use CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import mmap
import multiprocessing
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import Kinds, PredictionFolder, Rows, write_image
from unet_trainer.loading.transfer import pin, unpin
from unet_trainer.loading.worker_backends import CAN_FORK, ForkBackend, WorkerError
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.os_errors import named_file
from unet_trainer.system.resources import count_cores

MIN_IMAGES = 256  # for fewer, starting processes takes longer than they save
MAX_PROCESSES = 8
NUM_BYTES = 2**27  # of the shared memory; page-locked on a GPU
MAX_PIECES_ARRIVING = 3  # that the device may have before it
ATOMIC_BYTES = 4096  # that are written to a pipe at once
TEXT_BYTES = 512  # in which a process says why an image cannot be written
ERROR_BYTES = 2**14  # in which it says why none can
ALIGNMENT = 64
POLL_SECONDS = 1.0  # between liveness checks
JOIN_SECONDS = 60.0  # for the images that are under way at the end

TASK = struct.Struct("6q")  # place and number of images of the piece; position in it, image, height, width
RESULT = struct.Struct("4q")  # place of the piece, position in it, process, one of those:
WRITTEN, UNREADABLE, FAILED = range(3)  # UNREADABLE: this image; FAILED: no further image is begun
END = TASK.pack(*[-1] * 6)


class OnAnswers(Protocol):
    def __call__(self, num_written: int, unreadable: Sequence[tuple[int, str]]) -> object:
        """Images that are done, and those (with the reason) whose file can no longer be read."""


def start_writers(inputs: Sequence[Input], device: str, num_processes: int | None = None) -> WriterProcesses | None:
    """For many images on what may become a CUDA device; None elsewhere. To be called before the device is started up: `device` is
    the user's word for it. Raises WorkerError."""
    # device_count asks the driver's monitoring library: the GPU is not started up by it.
    is_gpu = device.startswith(("auto", "cuda")) and torch.cuda.device_count() > 0
    # A daemonic process (a worker of somebody else's pool) may not have children.
    if not CAN_FORK or multiprocessing.current_process().daemon or not is_gpu or len(inputs) < MIN_IMAGES:
        return None
    return WriterProcesses(inputs, num_processes or max(2, min(MAX_PROCESSES, count_cores() // 2)))


def suits(device: torch.device) -> bool:
    """Whether the processes are worth it: a CPU has its cores for the network."""
    return device.type == "cuda"


class WriterProcesses:
    """Writes the files of images by their number among `inputs`. After `open`: `write`, `poll` often, and `finish`; whatever
    happens, `close`."""

    def __init__(self, inputs: Sequence[Input], num_processes: int, num_bytes: int = NUM_BYTES) -> None:
        self.inputs = inputs
        self.shared = _SharedMemory(num_processes, num_bytes)
        self.backend = ForkBackend(num_processes, partial(_process_main, inputs, self.shared), TASK, RESULT)
        self.max_tasks = self.backend.capacity - num_processes  # room for the last messages
        self.num_tasks = 0
        self.arriving: deque[_Piece] = deque()
        self.open_pieces: dict[int, _Piece] = {}  # by place
        self.folder: PredictionFolder | None = None
        self.pinned_for: torch.device | None = None
        self.is_closed = False

    def __enter__(self) -> WriterProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open(self, folder: PredictionFolder, device: torch.device, on_answers: OnAnswers) -> None:
        """Says what is to be written, once."""
        self.folder, self.on_answers = folder, on_answers
        self.ring = _Ring(self.shared.store(_folder_as_json(folder)), len(self.shared.memory))
        self.tensor = torch.from_numpy(self.shared.memory)
        if device.type == "cuda" and pin(self.tensor):  # after the fork: children must not inherit registered memory
            self.pinned_for = device

    def num_at_once(self, size: Size) -> int:
        """Images of a piece: several pieces fit into the memory, and its messages into a pipe."""
        assert self.folder is not None
        return max(1, min(self.max_tasks, self.ring.num_bytes // 4 // _Layout.of(self.folder, 1, size).num_bytes))

    def write(self, images: Sequence[int], size: Size, results: Sequence[torch.Tensor]) -> None:
        """`results`: N,H,W ids and, if they are wanted, N,M,H,W probabilities, where the device computes them. Waits only for a
        piece some way back, so that the device has work and memory stays bounded. Raises what ended a process."""
        assert self.folder is not None
        layout = _Layout.of(self.folder, len(images), size)
        while (place := self.ring.take(layout.num_bytes)) is None:
            self._hand_over() if self.arriving else self._receive(POLL_SECONDS)
        piece = _Piece(place, images, size)
        for start, result in zip((layout.ids, layout.probabilities), results, strict=False):
            there = self.tensor[place + start : place + start + result.nbytes].view(result.dtype).view(result.shape)
            there.copy_(result, non_blocking=True)
        if results[0].is_cuda:
            piece.arrived = torch.cuda.Event()
            piece.arrived.record()
        self.arriving.append(piece)
        if len(self.arriving) > MAX_PIECES_ARRIVING:
            self._hand_over()
        self._receive(0)

    def poll(self) -> None:
        """Hands over what has arrived. Costs little."""
        while self.arriving and ((event := self.arriving[0].arrived) is None or event.query()):
            self._hand_over()

    def finish(self) -> None:
        """Waits until all is written."""
        while self.arriving:
            self._hand_over()
        while self.open_pieces:
            self._receive(POLL_SECONDS)

    def _hand_over(self) -> None:
        """Sends the oldest piece as tasks, once it has arrived."""
        piece = self.arriving[0]
        if piece.arrived is not None:
            piece.arrived.synchronize()
        while self.num_tasks + len(piece.images) > self.max_tasks:  # two full pipes would block both ends for ever
            self._receive(POLL_SECONDS)
        self.arriving.popleft()
        self.open_pieces[piece.place] = piece
        self.num_tasks += len(piece.images)
        height, width = piece.size
        tasks = b"".join(
            TASK.pack(piece.place, len(piece.images), position, image, height, width) for position, image in enumerate(piece.images)
        )
        step = ATOMIC_BYTES // TASK.size * TASK.size
        for start in range(0, len(tasks), step):
            self.backend.send(tasks[start : start + step])

    def _receive(self, seconds: float) -> None:
        """Takes the answers that are there; waits up to so many seconds for the first."""
        if (error := self._take(self.backend.receive(seconds))) is not None:
            raise error
        if (dead := self.backend.dead_worker()) is not None:
            raise WorkerError(self._describe_death(*dead))

    def _take(self, answers: bytes) -> Exception | None:
        """Counts them; returns what made a process fail."""
        if not answers:
            return None
        num_written, unreadable, error = 0, [], None
        for place, position, process, status in RESULT.iter_unpack(answers):
            piece = self.open_pieces[place]
            if status == WRITTEN:
                num_written += 1
            elif status == UNREADABLE:
                unreadable.append((piece.images[position], self.shared.read_text(place, position)))
            else:
                error = error or self.shared.read_error(process)
            piece.num_answered += 1
            self.num_tasks -= 1
            if piece.num_answered == len(piece.images):
                del self.open_pieces[place]
                self.ring.free(place)
        self.on_answers(num_written, unreadable)
        return error

    def _describe_death(self, process: int, how: str) -> str:
        how = how.replace("(SIGKILL)", "(SIGKILL, which the system sends where memory has run out)")
        image = int(self.shared.in_progress[process])
        return how if image < 0 else f"{how} while it wrote the results of {self.inputs[image].path}"

    def close(self) -> None:
        """Images that are under way are waited for, others dropped. There are whole files only, and no process."""
        if self.is_closed:
            return
        try:
            self.is_closed = True
            self.shared.is_stopping[0] = 1
            self.backend.send(END * len(self.backend.workers))
            deadline = time.monotonic() + JOIN_SECONDS
            for worker in self.backend.workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            while answers := self.backend.receive(0):
                self._take(answers)
        finally:
            self.backend.close()  # kills those that hang
            self._delete_drafts()
            if self.pinned_for is not None:
                with contextlib.suppress(RuntimeError):  # the device has failed
                    torch.cuda.synchronize(self.pinned_for)  # it may still be copying
                unpin(self.tensor)

    def _delete_drafts(self) -> None:
        """Of processes that were killed."""
        for worker, image in zip(self.backend.workers, self.shared.in_progress.tolist(), strict=True):
            if image >= 0 and self.folder is not None and worker.pid is not None:
                self.folder.discard_drafts(self.inputs[image].name, worker.pid)


@dataclass
class _Piece:
    place: int
    images: Sequence[int]
    size: Size
    arrived: torch.cuda.Event | None = None
    num_answered: int = 0


class _Layout(NamedTuple):
    """Where the parts of a piece begin, from its own start."""

    ids: int  # N,H,W uint8; before them lie the texts
    probabilities: int  # N,M,H,W
    num_bytes: int

    @staticmethod
    def of(folder: PredictionFolder, num_images: int, size: Size) -> _Layout:
        num_pixels = num_images * size[0] * size[1]
        ids = num_images * TEXT_BYTES
        probabilities = _aligned(ids + num_pixels)
        num_stored = num_pixels * len(folder.probable_ids)
        kind = folder.kinds.probabilities
        return _Layout(
            ids, probabilities, _aligned(probabilities + (0 if kind is None else num_stored * _probability_type(folder).itemsize))
        )


def _probability_type(folder: PredictionFolder) -> np.dtype[np.generic]:
    return np.dtype(np.float32 if folder.kinds.probabilities == "npy" else np.uint16)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass
class _Ring:
    """Places in memory from `start` to `stop`, one behind the other and then from the start again. Freed in any order; a place is
    given out again once those before it are free too."""

    start: int
    stop: int
    taken: deque[tuple[int, int]] = field(default_factory=deque)  # where each starts and stops, the oldest first
    freed: set[int] = field(default_factory=set)  # starts

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def take(self, num_bytes: int) -> int | None:
        assert num_bytes <= self.num_bytes
        if not self.taken:
            place = self.start
        else:
            place, oldest = self.taken[-1][1], self.taken[0][0]
            if place > oldest and place + num_bytes > self.stop:
                place = self.start
            if place <= oldest and place + num_bytes > oldest:
                return None
        self.taken.append((place, place + num_bytes))
        return place

    def free(self, place: int) -> None:
        self.freed.add(place)
        while self.taken and self.taken[0][0] in self.freed:
            self.freed.remove(self.taken.popleft()[0])


class _SharedMemory:
    """Anonymous memory, shared with the processes. Not in /dev/shm, which is small in containers."""

    def __init__(self, num_processes: int, num_bytes: int) -> None:
        self.memory: Pixels = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.is_stopping = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        # Of each process: the image that it writes, -1 when it is idle; and the exception that ended its work.
        self.in_progress = np.frombuffer(mmap.mmap(-1, 8 * num_processes), np.int64)
        self.in_progress[:] = -1
        self.errors = np.frombuffer(mmap.mmap(-1, ERROR_BYTES * num_processes), np.uint8).reshape(num_processes, ERROR_BYTES)

    def store(self, content: bytes) -> int:
        """At the start of the memory; returns where it ends."""
        _put(self.memory, content)
        return _aligned(8 + len(content))

    def stored(self) -> bytes:
        return _get(self.memory)

    def write_text(self, place: int, position: int, text: str) -> None:
        start = place + position * TEXT_BYTES
        content = text.encode(errors="replace")[: TEXT_BYTES - 8]
        _put(self.memory[start:], content)

    def read_text(self, place: int, position: int) -> str:
        return _get(self.memory[place + position * TEXT_BYTES :]).decode(errors="ignore")

    def write_error(self, process: int, error: Exception) -> None:
        """In the process, whose work ends with it."""
        told: list[Any] = ["error", traceback.format_exc()[-ERROR_BYTES // 16 :]]  # a character takes 12 bytes at most
        if isinstance(error, OSError) and error.errno is not None:
            told = ["os", error.errno, error.strerror, named_file(error)[: ERROR_BYTES // 16]]
        elif isinstance(error, MemoryError):
            told = ["memory", str(error)[: ERROR_BYTES // 16]]
        _put(self.errors[process], json.dumps(told).encode())

    def read_error(self, process: int) -> Exception:
        kind, *told = json.loads(_get(self.errors[process]))
        if kind == "os":
            number, text, name = told
            return OSError(number, text, name or None)
        return MemoryError(*told) if kind == "memory" else RuntimeError(f"a process that writes results failed:\n{told[0]}")


def _folder_as_json(folder: PredictionFolder) -> bytes:
    return json.dumps([str(folder.out), folder.spec.to_dict(), asdict(folder.kinds)]).encode()


def _folder_from_json(content: bytes) -> PredictionFolder:
    out, spec, kinds = json.loads(content)
    return PredictionFolder(Path(out), SegmenterSpec.from_dict(spec), Kinds(**kinds))


def _put(memory: Pixels, content: bytes) -> None:
    """With its length before it."""
    memory[:8].view(np.int64)[0] = len(content)
    memory[8 : 8 + len(content)] = np.frombuffer(content, np.uint8)


def _get(memory: Pixels) -> bytes:
    return memory[8 : 8 + int(memory[:8].view(np.int64)[0])].tobytes()


def _process_main(
    inputs: Sequence[Input], shared: _SharedMemory, receive: Callable[[], bytes], send: Callable[[bytes], object], process: int
) -> None:
    """Main loop of a process."""
    gc.freeze()  # a collection would walk, and so copy, all that this process shares with its parent
    folder: PredictionFolder | None = None
    while (task := receive()) and task != END:
        if shared.is_stopping[0]:
            continue
        place, num_images, position, image, height, width = TASK.unpack(task)
        shared.in_progress[process] = image
        status = WRITTEN
        try:
            folder = folder or _folder_from_json(shared.stored())
            write_image(folder, inputs[image], _rows(folder, shared.memory, place, num_images, position, (height, width)))
        except ReadError as error:
            shared.write_text(place, position, str(error))
            status = UNREADABLE
        except Exception as error:  # raised where the answer is taken
            shared.is_stopping[0] = 1
            shared.write_error(process, error)
            status = FAILED
        shared.in_progress[process] = -1
        send(RESULT.pack(place, position, process, status))


def _rows(folder: PredictionFolder, memory: Pixels, place: int, num_images: int, position: int, size: Size) -> Rows:
    """Of one image of a piece."""
    layout, num_pixels = _Layout.of(folder, num_images, size), math.prod(size)
    start = place + layout.ids + position * num_pixels
    ids = memory[start : start + num_pixels].reshape(size)
    if folder.kinds.probabilities is None:
        return Rows(ids, None)
    shape = len(folder.probable_ids), *size
    dtype = _probability_type(folder)
    num_bytes = math.prod(shape) * dtype.itemsize
    start = place + layout.probabilities + position * num_bytes
    return Rows(ids, memory[start : start + num_bytes].view(dtype).reshape(shape))
