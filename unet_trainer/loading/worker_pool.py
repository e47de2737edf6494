"""A pool of workers that fill batches in memory shared with the training process: forked processes on Linux, threads
elsewhere; and the copy of batches to the GPU.

A batch is planned, then pending: it has a buffer, and its pieces are tasks of the workers. The training loop reads it
from the buffer, which is free again once the copy to the GPU has ended. Plans reach past the end of an epoch, so that
the workers never run dry. A batch that a worker failed to fill is read again by the loader, and its pieces counted."""

import contextlib
import mmap
import queue
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.loading.dataset import BatchAssembler
from unet_trainer.system.concurrency import ForkedWorkers, WorkerMain, can_fork

POLL_SECONDS = 1  # between liveness checks while waiting for a batch
MIN_BUFFERS = 4
BUFFERS_AHEAD = 8  # batches: enough for a pause of the workers, or for the end of an epoch
MAX_BUFFER_BYTES = 1 << 29  # of all buffers, unless MIN_BUFFERS need more


def to_device(tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copies to a GPU while the previous step computes; the host does not wait, and the source must not change."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    with torch.cuda.stream(copy_stream(device)):
        moved = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(copy_stream(device))
    for tensor in moved:
        tensor.record_stream(computing)  # else its memory could get the next copy while the step still reads it
    return moved


copy_stream = cache(torch.cuda.Stream)


def pin(memory: torch.Tensor) -> bool:
    """Page-locks memory, so that copies to the GPU are asynchronous. False if it fails: copies are slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")  # clears the error, which the next kernel would raise
    return False


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    copy_stream(device).synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class WorkerError(RuntimeError):
    """A worker died or hangs; the message says which, and what it was reading."""


TASK = struct.Struct("7q")  # batch id, assembler, epoch, batch, buffer, and of the piece: first position, last + 1
# batch id, whether the piece is filled, seconds of reading and of augmenting, why it is not filled (if it is wanted)
RESULT = struct.Struct("2q2d200s")


class ThreadWorkers:
    """Threads, where processes cannot be forked, with the methods of ForkedWorkers."""

    def __init__(self, num_workers: int, main: WorkerMain) -> None:
        tasks, self.results = queue.SimpleQueue[bytes](), queue.SimpleQueue[bytes]()
        self.num_workers, self.send, self.capacity = num_workers, tasks.put, sys.maxsize
        for number in range(num_workers):
            threading.Thread(target=main, args=(tasks.get, self.results.put, number), daemon=True).start()

    def receive(self, seconds: float) -> bytes:
        with contextlib.suppress(queue.Empty):
            return self.results.get(timeout=seconds)
        return b""

    def dead_worker(self) -> None:
        return None

    def close(self) -> None:
        for _ in range(self.num_workers):
            self.send(b"")


class BatchKey(NamedTuple):
    assembler: int  # its number
    epoch: int
    batch: int


class SharedBuffers:
    """Anonymous shared memory (/dev/shm is small in containers): buffers for batches, and what each worker is doing."""

    def __init__(self, num_buffers: int, buffer_bytes: int, num_workers: int) -> None:
        memory = np.frombuffer(mmap.mmap(-1, num_buffers * buffer_bytes), np.uint8)
        self.arrays: list[Pixels] = list(memory.reshape(num_buffers, buffer_bytes))
        # of each worker: the batch id and the position in the batch that it is reading; -1 when it is idle
        self.in_progress = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.int64).reshape(num_workers, 2)
        self.in_progress[:] = -1
        self.first_wanted = np.frombuffer(mmap.mmap(-1, 8), np.int64)  # tasks of earlier batch ids are not filled
        self.memory = torch.from_numpy(memory)


@dataclass
class PendingBatch:
    """A batch that is assigned to the workers."""

    batch_id: int
    key: BatchKey
    buffers: SharedBuffers
    buffer: int
    num_missing: int  # pieces
    num_failed: int = 0  # pieces that no worker could fill
    read_seconds: float = 0.0
    augment_seconds: float = 0.0
    is_wanted: bool = True


class WorkerPool:
    """Fills the batches of its assemblers in the order in which they are planned. Workers start with the first plan."""

    def __init__(self, num_workers: int, device: torch.device | None = None, with_threads: bool = False) -> None:
        self.num_workers, self.with_threads = num_workers, with_threads
        self.device = device if device is not None and device.type == "cuda" else None
        self.assemblers: list[BatchAssembler] = []
        self.num_failed, self.failure_reason = 0, ""  # pieces that were read in the training process instead
        self._reset()

    def _reset(self) -> None:
        self.workers: ForkedWorkers | ThreadWorkers | None = None
        self.buffers: SharedBuffers | None = None
        self.free: deque[int] = deque()
        self.copying: deque[tuple[int, torch.cuda.Event]] = deque()  # buffers that are still being copied to the GPU
        self.planned: deque[BatchKey] = deque()  # in the order in which they are taken, behind those that are pending
        self.pending: deque[PendingBatch] = deque()  # in the order in which they are taken
        self.incomplete: dict[int, PendingBatch] = {}  # by batch id: pieces are missing, wanted or not
        self.next_batch_id = 0

    def close(self) -> None:
        """Ends the workers; new ones start when they are needed again."""
        if self.workers is not None:
            self.drop_plans()  # threads cannot be killed; they hand back the tasks that they have not begun
            self.workers.close()
        self._reset()

    def add(self, assembler: BatchAssembler) -> int:
        """Registers an assembler for workers that start from now on; returns its number."""
        self.close()
        self.assemblers.append(assembler)
        return len(self.assemblers) - 1

    def plan(self, assembler: int, epoch: int, first: int = 0) -> None:
        """Adds the batches of an epoch, from `first` on, behind those that are planned already; not a second time."""
        keys = [BatchKey(assembler, epoch, batch) for batch in range(first, len(self.assemblers[assembler].batches))]
        if keys and keys[-1] not in (*self.planned, *(batch.key for batch in self.pending)):
            self.planned.extend(keys)
            self._assign()

    def epoch(
        self, assembler: int, epoch: int, first: int, is_stopping: Callable[[], bool], timeout: float | None
    ) -> Generator[tuple[Pixels, Pixels, PendingBatch], None, None]:
        """Images and masks of each batch of an epoch, valid until the next ones are asked for. Drops other plans before
        the epoch, and all of them where it is left early. Ends if `is_stopping` while it waits. To be closed."""
        following = self.pending[0].key if self.pending else self.planned[0] if self.planned else None
        if following != (assembler, epoch, first):
            self.drop_plans()
            self.plan(assembler, epoch, first)
        num_left = len(self.assemblers[assembler].batches) - first
        try:
            while num_left > 0 and (batch := self._take(is_stopping, timeout)) is not None:
                num_left -= 1  # before the yield: after the last batch the generator need not be resumed
                try:
                    yield *self.assemblers[assembler].views(batch.buffers.arrays[batch.buffer]), batch
                finally:
                    self._release(batch)
        finally:
            if num_left > 0:
                self.drop_plans()

    def drop_plans(self) -> None:
        """Workers hand back unfilled what they have not begun."""
        self.planned.clear()
        if self.buffers is not None:
            self.buffers.first_wanted[0] = self.next_batch_id
        for batch in self.pending:
            batch.is_wanted = False
            if not batch.num_missing:
                self.free.append(batch.buffer)
        self.pending.clear()

    def _take(self, is_stopping: Callable[[], bool], timeout: float | None) -> PendingBatch | None:
        """The next batch, filled; `_release` must follow. None when the run is asked to stop while waiting."""
        started = time.monotonic()
        workers = self._assign()
        while True:
            if (dead := workers.dead_worker()) is not None:  # reported even when the other workers could do its work
                raise self._closed(f"{dead[1]}; it may have been reading {self._describe_reading(dead[0])}")
            if self.pending and not self.pending[0].num_missing:
                return self.pending.popleft()
            if self._collect(workers.receive(POLL_SECONDS)):
                self._assign()
            elif is_stopping():
                return None
            elif timeout is not None and time.monotonic() - started > timeout:
                why = f"no batch in {timeout:g} s (worker_timeout): the worker processes hang, perhaps in reading"
                raise self._closed(f"{why} {self._describe_reading()}")

    def _closed(self, reason: str) -> WorkerError:
        self.close()
        return WorkerError(reason)

    def _release(self, batch: PendingBatch) -> None:
        """Gives the buffer back, once the copy to the GPU has ended."""
        if batch.buffers is not self.buffers:  # the workers were restarted since
            return
        if self.device is None:
            self.free.append(batch.buffer)
        else:
            copied = torch.cuda.Event()
            copied.record(copy_stream(self.device))
            self.copying.append((batch.buffer, copied))
        self._assign()

    def start(self) -> tuple[ForkedWorkers | ThreadWorkers, SharedBuffers]:
        """Starts the workers unless they run. A process that is to use NCCL must call it before."""
        if self.workers is not None and self.buffers is not None:
            return self.workers, self.buffers
        num_pieces = [len(assembler.pieces(self.num_workers)) for assembler in self.assemblers]
        buffer_bytes = -(-max(assembler.num_bytes for assembler in self.assemblers) // mmap.PAGESIZE) * mmap.PAGESIZE
        wanted = max(BUFFERS_AHEAD, *(-(-2 * self.num_workers // number) for number in num_pieces))
        num_buffers = max(MIN_BUFFERS, min(wanted, MAX_BUFFER_BYTES // buffer_bytes))
        buffers = SharedBuffers(num_buffers, buffer_bytes, self.num_workers)
        main = partial(_worker_main, self.assemblers, buffers)
        try:
            if can_fork() and not self.with_threads:
                self.workers = ForkedWorkers(self.num_workers, main, TASK.size, RESULT.size)
            else:
                self.workers = ThreadWorkers(self.num_workers, main)
        except OSError as error:
            raise WorkerError(f"{self.num_workers} worker processes could not be started ({error.strerror})") from None
        self.buffers = buffers
        self.free.extend(range(num_buffers))
        # after the fork: workers must not inherit registered memory
        if self.device is not None and pin(buffers.memory):
            weakref.finalize(buffers, unpin, buffers.memory, self.device)
        return self.workers, buffers

    def _assign(self) -> ForkedWorkers | ThreadWorkers:
        """Gives the workers as many planned batches as there are free buffers."""
        workers, buffers = self.start()
        while self.planned:
            pieces = self.assemblers[self.planned[0].assembler].pieces(self.num_workers)
            num_open = sum(batch.num_missing for batch in self.incomplete.values())
            if num_open and num_open + len(pieces) > workers.capacity:
                break
            while self.copying and (self.copying[0][1].query() or not (self.free or self.incomplete or self.pending)):
                buffer, copied = self.copying.popleft()
                copied.synchronize()  # returns at once, unless there is nothing else to do
                self.free.append(buffer)
            if not self.free:
                break
            batch = PendingBatch(self.next_batch_id, self.planned.popleft(), buffers, self.free.popleft(), len(pieces))
            self.next_batch_id += 1
            self.pending.append(batch)
            self.incomplete[batch.batch_id] = batch
            for piece in pieces:
                workers.send(TASK.pack(batch.batch_id, *batch.key, batch.buffer, piece.start, piece.stop))
        return workers

    def _collect(self, messages: bytes) -> bool:
        """Notes what the workers have done; whether there was anything."""
        for batch_id, is_filled, read_seconds, augment_seconds, error in RESULT.iter_unpack(messages):
            batch = self.incomplete[batch_id]
            batch.num_missing -= 1
            batch.read_seconds += read_seconds
            batch.augment_seconds += augment_seconds
            batch.num_failed += not is_filled
            if batch.is_wanted and (reason := error.rstrip(b"\0").decode(errors="ignore")):
                self.failure_reason = reason
            if not batch.num_missing:
                del self.incomplete[batch_id]
                if not batch.is_wanted:
                    self.free.append(batch.buffer)
        return bool(messages)

    def _describe_reading(self, number: int | None = None) -> str:
        """The files that one worker is reading, or those of the batch that is waited for."""
        wanted = self.pending[0] if self.pending else None
        workers = slice(None) if number is None else slice(number, number + 1)
        files = []
        for batch_id, position in [] if self.buffers is None else self.buffers.in_progress[workers].tolist():
            batch = self.incomplete.get(batch_id)
            if batch is not None and (number is not None or batch is wanted):
                files.append(self.assemblers[batch.key.assembler].files(*batch.key[1:])[position])
        return ", ".join(map(str, files[:3])) or "nothing"


def _worker_main(
    assemblers: Sequence[BatchAssembler],
    buffers: SharedBuffers,
    receive: Callable[[], bytes],
    send: Callable[[bytes], object],
    number: int,
) -> None:
    """Worker main loop."""
    if threading.current_thread() is threading.main_thread():  # of a process of its own
        torch.set_num_threads(1)  # as OpenCV has
    own = [assembler.clone_for_worker() for assembler in assemblers]
    in_progress = buffers.in_progress[number]

    def note(batch_id: int, position: int) -> None:
        in_progress[:] = batch_id, position

    while message := receive():
        batch_id, assembler, epoch, batch, buffer, *piece = TASK.unpack(message)
        is_filled, seconds, why = False, (0.0, 0.0), ""
        if batch_id >= buffers.first_wanted[0]:
            try:
                reading, memory = partial(note, batch_id), buffers.arrays[buffer]
                seconds, is_filled = own[assembler].fill(memory, epoch, batch, range(*piece), reading), True
            except Exception as error:  # of any kind: the training process reads the batch and raises what it meets
                why = f"{type(error).__name__}: {error}"
        in_progress[:] = -1
        send(RESULT.pack(batch_id, is_filled, *seconds, why.encode(errors="replace")))
