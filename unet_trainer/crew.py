"""Workers that fill batches in memory which they share with the training process.

A batch lies in a slot, and each worker fills a piece of it. The training process plans ahead, over the end of an epoch and
through validation, so that the slots are never empty. A piece that a worker could not fill is read again here, where its
reason is heard.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import multiprocessing.util
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from unet_trainer.dataset import Source
from unet_trainer.hands import CAN_FORK, RESULT, TASK, Hands, Processes, Result, Task, Threads, WorkerError
from unet_trainer.images import Pixels
from unet_trainer.transfer import copy_stream, pin, unpin

POLL_SECONDS = 1  # how often one who waits looks whether the workers live and the run goes on
MIN_SLOTS = 4
SLOTS_AHEAD = 8  # batches: bridges a pause of the workers, or the end of an epoch
MAX_SLOT_BYTES = 1 << 29  # in all, unless MIN_SLOTS need more
MAX_OPEN_PIECES = 1024  # in all


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
        while True:
            if (fate := self.hands.fate()) is not None:  # told even when the others could do its work
                number, how = fate
                reading = self._reading(number)
                self.close()
                raise WorkerError(f"{how}; it may have been reading {reading}")
            if self.orders and not self.orders[0].missing:  # no order, when all slots hold what was wanted before
                break
            if self._note(self.hands.take(POLL_SECONDS)):
                self._order()
                continue
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
