"""Workers that fill batches in memory which they share with the training process.

A batch lies in a slot, and each worker fills a piece of it. The training process plans ahead, over the end of an epoch and
through validation, so that the slots are never empty. What is sent is a few numbers of fixed size: a message is whole or not
there, whatever is killed when. A piece that a worker could not fill is read again here, where its reason is heard.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import multiprocessing
import multiprocessing.util
import os
import queue
import select
import signal
import struct
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import torch

from unet_trainer.dataset import EpochBatches, SegmentationDataset
from unet_trainer.framing import Windows
from unet_trainer.images import Pixels
from unet_trainer.masks import IGNORED
from unet_trainer.transfer import copy_stream, pin, unpin

CAN_FORK = sys.platform == "linux"
POLL_SECONDS = 1  # how often one who waits looks whether the workers live and the run goes on
CLOSE_SECONDS = 1  # that a worker has to end
MIN_SLOTS = 4
SLOTS_AHEAD = 8  # batches: bridges a pause of the workers, or the end of an epoch
MAX_SLOT_BYTES = 1 << 29  # in all, unless MIN_SLOTS need more
MAX_PIECES = 64  # of a batch: their messages fit into the smallest of pipes
MAX_OPEN_PIECES = 1024  # in all

Serve = Callable[[Callable[[], bytes], Callable[[bytes], object], int], None]


class WorkerError(RuntimeError):
    """A worker process died or hangs; the message says which, and what it was reading."""


@dataclass
class Source:
    """A dataset and the batches that are made of it."""

    dataset: SegmentationDataset
    batches: EpochBatches

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.dataset.framing.size, self.dataset.form.channels

    @property
    def itemsize(self) -> int:
        return 1 if self.dataset.form.is_8bit else 4

    @property
    def image_bytes(self) -> int:
        height, width, channels = self.shape
        return self.batches.batch_size * height * width * channels * self.itemsize

    @property
    def num_bytes(self) -> int:
        height, width, _ = self.shape
        return self.image_bytes + self.batches.batch_size * height * width

    def views(self, slot: Pixels) -> tuple[Pixels, Pixels]:
        """Images and masks of a batch that lies in these bytes."""
        height, width, channels = self.shape
        size = self.batches.batch_size
        images = slot[: self.image_bytes].view(np.uint8 if self.itemsize == 1 else np.float32)
        return images.reshape(size, height, width, channels), slot[self.image_bytes : self.num_bytes].reshape(size, height, width)

    def fill(
        self, slot: Pixels, epoch: int, batch: int, piece: range, begin: Callable[[int], object] = lambda _: None
    ) -> tuple[float, float]:
        """Samples at these positions of a batch; what is left of a short batch counts nowhere. Seconds of reading, augmenting."""
        keys = self.batches.keys(epoch, batch)
        images, masks = self.views(slot)
        stages = [0.0, 0.0]
        for position in piece:
            if position < len(keys):
                begin(position)
                image, mask = self.dataset.sample(keys[position], stages)
                np.copyto(images[position], image)
                np.copyto(masks[position], mask)
            else:
                images[position] = 0
                masks[position] = IGNORED
        return stages[0], stages[1]

    def file(self, epoch: int, batch: int, position: int) -> Path:
        index = self.batches.keys(epoch, batch)[position][1]
        return self.dataset.pairs[self.dataset.framing.source(index)].image

    def files(self, epoch: int, batch: int) -> list[Path]:
        return [self.file(epoch, batch, position) for position in range(len(self.batches.keys(epoch, batch)))]

    def pieces(self, num_workers: int) -> list[range]:
        """What the workers share a batch in. The windows of one image stay together, or each worker would read it."""
        size = self.batches.batch_size
        length = -(-size // min(num_workers, MAX_PIECES))
        framing = self.dataset.framing
        if isinstance(framing, Windows):
            length = max(length, min(size, -(-len(framing) // len(self.dataset.pairs))))
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def own(self) -> Source:
        """For a thread: albumentations' pipelines draw from a generator that they hold."""
        return Source(self.dataset.own(), copy.copy(self.batches))


class Task(NamedTuple):
    ticket: int
    source: int
    epoch: int
    batch: int
    slot: int
    start: int
    stop: int


class Result(NamedTuple):
    ticket: int
    start: int
    is_filled: int
    read_seconds: float
    augment_seconds: float


TASK = struct.Struct("7q")
RESULT = struct.Struct("3q2d")


class Hands(Protocol):
    """Those who do the work: processes where they can be forked, else threads."""

    capacity: int  # tasks that can be under way without anybody waiting to hand one over

    def give(self, message: bytes) -> None: ...

    def take(self, seconds: float) -> bytes:
        """Results that are there, waiting for the first one for so long."""

    def is_hurt(self) -> bool:
        """Whether a worker is dead."""

    def fate(self) -> tuple[int, str] | None:
        """The number of a worker that is dead, and how it came to be."""

    def close(self) -> None: ...


class Processes:
    """Forked, so that they have the datasets without a copy. They end when the training process does, however it ends."""

    def __init__(self, num_workers: int, serve: Serve) -> None:
        import fcntl  # not there where processes cannot be forked

        task_reader, self.task_writer = os.pipe()
        self.result_reader, result_writer = os.pipe()
        others = (self.task_writer, self.result_reader)
        self.workers: list[BaseProcess] = []
        # At the latest when the interpreter ends, before it would wait for them; and before there is one that could be left over.
        self.close = multiprocessing.util.Finalize(
            self, _close, (self.task_writer, self.result_reader, self.workers), exitpriority=100
        )
        context = multiprocessing.get_context("fork")
        try:
            for number in range(num_workers):
                arguments = serve, number, task_reader, result_writer, others
                self.workers.append(context.Process(target=_be_worker, args=arguments, daemon=True))
                with warnings.catch_warnings():  # Python 3.12 warns of threads whose locks a fork could copy; workers take none
                    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                    self.workers[-1].start()
        except OSError as error:
            self.close()
            raise WorkerError(f"worker process {number + 1} of {num_workers} could not be started ({error.strerror})") from None
        except BaseException:
            self.close()
            raise
        finally:
            os.close(task_reader)
            os.close(result_writer)
        os.set_blocking(self.result_reader, False)
        self.bell = select.poll()
        for file in (self.result_reader, *(worker.sentinel for worker in self.workers)):
            self.bell.register(file, select.POLLIN)
        sizes = [fcntl.fcntl(file, fcntl.F_GETPIPE_SZ) for file in others]
        self.capacity = min(sizes) // max(TASK.size, RESULT.size)

    def give(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # all are dead; whoever waits is told
            os.write(self.task_writer, message)

    def take(self, seconds: float) -> bytes:
        found = self._read()
        if not found and seconds:
            self.bell.poll(1000 * seconds)
            found = self._read()
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self.result_reader, 256 * RESULT.size)
        except BlockingIOError:
            return b""

    def is_hurt(self) -> bool:
        return any(file != self.result_reader for file, _ in self.bell.poll(0))

    def fate(self) -> tuple[int, str] | None:
        for number, worker in enumerate(self.workers):
            if (code := worker.exitcode) is not None:
                return (
                    number,
                    f"worker process {worker.pid} died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})",
                )
        return None


def _close(task_writer: int, result_reader: int, workers: Sequence[BaseProcess]) -> None:
    """At once: they hold nothing that could be lost."""
    os.close(task_writer)
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join(CLOSE_SECONDS)
        if worker.exitcode is None:  # a dead network disk holds it; the interpreter would wait for it without end
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    os.close(result_reader)


def _be_worker(serve: Serve, number: int, task_reader: int, result_writer: int, others: Sequence[int]) -> None:
    # The training process decides what a signal means; these often come to all processes at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for file in others:  # or the end of the training process would not be seen
        os.close(file)
    cv2.setNumThreads(0)  # one process a core is enough
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):  # the training process is gone
        serve(lambda: os.read(task_reader, TASK.size), lambda message: os.write(result_writer, message), number)


class Threads:
    """For systems that cannot fork. OpenCV and numpy let them work side by side."""

    def __init__(self, num_workers: int, serve: Serve) -> None:
        self.tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.num_workers = num_workers
        self.capacity = sys.maxsize
        for number in range(num_workers):
            threading.Thread(target=serve, args=(self.tasks.get, self.results.put, number), daemon=True).start()

    def give(self, message: bytes) -> None:
        self.tasks.put(message)

    def take(self, seconds: float) -> bytes:
        try:
            return self.results.get(timeout=seconds) if seconds else self.results.get_nowait()
        except queue.Empty:
            return b""

    def is_hurt(self) -> bool:
        return False

    def fate(self) -> None:
        return None

    def close(self) -> None:
        for _ in range(self.num_workers):
            self.tasks.put(b"")


@dataclass
class Pass:
    """An epoch of a source that is planned, from one of its batches to the last."""

    source: int
    epoch: int
    first: int
    to_order: deque[int]  # batches
    num_to_take: int
    is_begun: bool = False

    @property
    def name(self) -> tuple[int, int, int]:
        return self.source, self.epoch, self.first


class Slots:
    """Room for batches; and a desk, where each worker leaves the ticket and the position in the batch that it is at."""

    def __init__(self, num_slots: int, slot_bytes: int, num_workers: int) -> None:
        # Not under /dev/shm, which containers keep small.
        memory = np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), np.uint8)
        self.arrays: list[Pixels] = list(memory.reshape(num_slots, slot_bytes))
        self.desk = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.int64).reshape(num_workers, 2)
        self.desk[:] = -1
        self.first_wanted = np.frombuffer(mmap.mmap(-1, 8), np.int64)  # tasks with earlier tickets are not done
        self.memory = torch.from_numpy(memory)

    def pin_for(self, device: torch.device) -> None:
        """After the workers were forked, who are not to inherit it."""
        if pin(self.memory):
            weakref.finalize(self, _unpin, self.memory, device)


@dataclass
class Order:
    """A batch that the workers are at."""

    ticket: int
    source: int
    epoch: int
    batch: int
    slots: Slots
    slot: int
    missing: int  # pieces
    failed: list[int] = field(default_factory=list)  # where the pieces start that no worker could fill
    stages: list[float] = field(default_factory=lambda: [0.0, 0.0])  # seconds of reading and augmenting
    is_wanted: bool = True


def _unpin(memory: torch.Tensor, device: torch.device) -> None:
    copy_stream(device).synchronize()
    unpin(memory)


class Crew:
    """Fills the batches of its sources, one after the other as they are planned. Starts its workers when first asked for one."""

    def __init__(self, num_workers: int, device: torch.device | None = None, with_threads: bool = not CAN_FORK) -> None:
        self.num_workers = num_workers
        self.device = device if device is not None and device.type == "cuda" else None
        self.with_threads = with_threads
        self.sources: list[Source] = []
        self.close()

    def close(self) -> None:
        """Ends the workers; others are started when they are needed again."""
        hands: Hands | None = getattr(self, "hands", None)
        if hands is not None:
            self.abandon()  # threads are not killed; they hand back what they have not begun
            hands.close()
        self.hands: Hands | None = None
        self.slots: Slots | None = None
        self.free: deque[int] = deque()
        self.cooling: deque[tuple[int, torch.cuda.Event]] = deque()  # slots that are still being copied from
        self.passes: deque[Pass] = deque()
        self.orders: deque[Order] = deque()  # as they will be taken
        self.open: dict[int, Order] = {}  # by ticket: those that pieces are missing of, wanted or not
        self.num_tickets = 0

    def add(self, source: Source) -> int:
        """A source for the workers to come; its number."""
        self.close()
        self.sources.append(source)
        return len(self.sources) - 1

    def plan(self, source: int, epoch: int, first: int = 0) -> None:
        """Lets the workers go on with this epoch once they are done with what was planned before."""
        batches = range(first, len(self.sources[source].batches))
        if batches and (source, epoch, first) not in [one.name for one in self.passes]:
            self.passes.append(Pass(source, epoch, first, deque(batches), len(batches)))
            self._order()

    def begin(self, source: int, epoch: int, first: int) -> Pass | None:
        """This epoch is wanted now: what was planned for now, or else all plans are dropped. None if it has no batch."""
        if self.passes and (self.passes[0].name != (source, epoch, first) or self.passes[0].is_begun):
            self.abandon()
        self.plan(source, epoch, first)
        if self.passes:
            self.passes[0].is_begun = True
        return self.passes[0] if self.passes else None

    def leave(self, begun: Pass) -> None:
        """An epoch is not gone on with: its batches are dropped, and all that was planned behind it."""
        if any(one is begun for one in self.passes):  # else another epoch was begun since
            self.abandon()

    def abandon(self) -> None:
        """Drops all plans. What the workers have not begun they hand back as it is."""
        self.passes.clear()
        if self.slots is not None:
            self.slots.first_wanted[0] = self.num_tickets
        for order in self.orders:
            order.is_wanted = False
            if not order.missing:
                self.free.append(order.slot)
        self.orders.clear()

    def take(self, begun: Pass, is_stopping: Callable[[], bool], timeout: float | None) -> Order | None:
        """The next batch, whole; its slot is to be released. None when the run is to stop while it waits."""
        if not self.passes or self.passes[0] is not begun:
            raise RuntimeError("another epoch was begun before this one was over")
        asked = time.monotonic()
        self._order()
        assert self.hands is not None  # since an epoch was begun
        is_hurt = self.hands.is_hurt()  # told even when the others could do its work
        while is_hurt or not self.orders or self.orders[0].missing:  # no order, when all slots hold what was wanted before
            if self._note(self.hands.take(0.0 if is_hurt else POLL_SECONDS)) and not is_hurt:
                self._order()
                continue
            if (fate := self.hands.fate()) is not None:
                number, how = fate
                reading = self._reading(number)
                self.close()
                raise WorkerError(f"{how}; it may have been reading {reading}")
            is_hurt = False
            if is_stopping():
                return None
            if timeout is not None and time.monotonic() - asked > timeout:
                reading = self._reading()
                self.close()
                raise WorkerError(
                    f"no batch in {timeout:g} s (worker_timeout): the worker processes hang, perhaps in reading {reading}"
                )
        order = self.orders.popleft()
        self.passes[0].num_to_take -= 1
        if not self.passes[0].num_to_take:
            self.passes.popleft()
        self._fill_what_failed(order)
        return order

    def view(self, order: Order) -> tuple[Pixels, Pixels]:
        """Images and masks, as they lie in the slot."""
        return self.sources[order.source].views(order.slots.arrays[order.slot])

    def release(self, order: Order) -> None:
        """The batch was used; another may take its place."""
        if order.slots is not self.slots:  # the workers were ended since
            return
        if self.device is None:
            self.free.append(order.slot)
        else:
            copied = torch.cuda.Event()
            copied.record(copy_stream(self.device))
            self.cooling.append((order.slot, copied))
        self._order()

    def _start(self) -> None:
        if self.hands is not None:
            return
        # A worker of somebody's pool may not have processes of its own.
        with_threads = self.with_threads or multiprocessing.current_process().daemon
        pieces = [len(source.pieces(self.num_workers)) for source in self.sources]
        slot_bytes = -(-max(source.num_bytes for source in self.sources) // mmap.PAGESIZE) * mmap.PAGESIZE
        wanted = max(SLOTS_AHEAD, *(-(-2 * self.num_workers // number) for number in pieces))
        num_slots = max(MIN_SLOTS, min(wanted, MAX_SLOT_BYTES // slot_bytes))
        slots = Slots(num_slots, slot_bytes, self.num_workers)
        self.hands = (Threads if with_threads else Processes)(self.num_workers, partial(_serve, self.sources, slots))
        self.slots = slots
        self.free.extend(range(num_slots))
        if self.device is not None:
            slots.pin_for(self.device)

    def _order(self) -> None:
        """As many batches as there is room for."""
        while (ahead := next((one for one in self.passes if one.to_order), None)) is not None:
            self._start()
            pieces = self.sources[ahead.source].pieces(self.num_workers)
            assert self.hands is not None
            assert self.slots is not None
            num_open = sum(order.missing for order in self.open.values())
            if num_open and num_open + len(pieces) > min(MAX_OPEN_PIECES, self.hands.capacity):
                return  # no message ever waits for room in a pipe: both ends would wait for each other
            slot = self._free_slot()
            if slot is None:
                return
            order = Order(self.num_tickets, ahead.source, ahead.epoch, ahead.to_order.popleft(), self.slots, slot, len(pieces))
            self.num_tickets += 1
            self.orders.append(order)
            self.open[order.ticket] = order
            for piece in pieces:
                task = Task(order.ticket, order.source, order.epoch, order.batch, slot, piece.start, piece.stop)
                self.hands.give(TASK.pack(*task))

    def _free_slot(self) -> int | None:
        while self.cooling and (self.cooling[0][1].query() or not (self.free or self.open or self.orders)):
            slot, copied = self.cooling.popleft()
            copied.synchronize()  # returns at once, unless there is nothing else to do
            self.free.append(slot)
        return self.free.popleft() if self.free else None

    def _note(self, messages: bytes) -> bool:
        for message in RESULT.iter_unpack(messages):
            result = Result(*message)
            order = self.open[result.ticket]
            order.missing -= 1
            order.stages[0] += result.read_seconds
            order.stages[1] += result.augment_seconds
            if not result.is_filled:
                order.failed.append(result.start)
            if not order.missing:
                del self.open[result.ticket]
                if not order.is_wanted:
                    self.free.append(order.slot)
        return bool(messages)

    def _fill_what_failed(self, order: Order) -> None:
        source = self.sources[order.source]
        try:
            for piece in source.pieces(self.num_workers):
                if piece.start in order.failed:
                    source.fill(order.slots.arrays[order.slot], order.epoch, order.batch, piece)
        except BaseException:
            self.release(order)
            raise

    def _reading(self, number: int | None = None) -> str:
        """What this worker is at; or those who are at the batch that comes next."""
        assert self.slots is not None
        wanted = self.orders[0] if self.orders else next(iter(self.open.values()))
        files = []
        for ticket, position in self.slots.desk.tolist() if number is None else [self.slots.desk[number].tolist()]:
            order = self.open.get(ticket)
            if order is not None and (number is not None or order is wanted):
                files.append(self.sources[order.source].file(order.epoch, order.batch, position))
        files = files or self.sources[wanted.source].files(wanted.epoch, wanted.batch)
        return ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")


def _serve(
    sources: Sequence[Source],
    slots: Slots,
    take: Callable[[], bytes],
    give: Callable[[bytes], object],
    number: int,
) -> None:
    """A worker's life: tasks, until there are none any more."""
    own = [source.own() for source in sources]
    while message := take():
        task = Task(*TASK.unpack(message))
        piece = range(task.start, task.stop)
        begin = partial(_leave_on_desk, slots.desk[number], task.ticket)
        result = Result(task.ticket, task.start, 0, 0.0, 0.0)
        if task.ticket >= slots.first_wanted[0]:
            # Else the training process tries it again, and hears what is wrong.
            with contextlib.suppress(Exception):
                stages = own[task.source].fill(slots.arrays[task.slot], task.epoch, task.batch, piece, begin)
                result = Result(task.ticket, task.start, 1, *stages)
        slots.desk[number] = -1
        give(RESULT.pack(*result))


def _leave_on_desk(place: np.ndarray, ticket: int, position: int) -> None:
    place[:] = ticket, position


def choose_num_workers(num_workers: int | str, num_cores: int, on_cpu: bool) -> int:
    """`auto`: all cores but one for a GPU; half of them where the model needs the cores itself, at most 4."""
    if isinstance(num_workers, int):
        return num_workers
    return min(num_cores // 2, 4) if on_cpu else max(1, min(num_cores - 1, 16))
