"""Runs workers, forked processes on Linux and threads elsewhere, and carries messages to and from the training process.

Messages have a fixed size and are smaller than a pipe's atomic write, so a killed process never leaves half a message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import queue
import select
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol

import cv2
import torch

from unet_trainer.system.parent_process import end_with

CAN_FORK = sys.platform == "linux"
JOIN_SECONDS = 1  # after SIGKILL
IGNORED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # by the workers

# receive a task (empty: no more tasks), send a result, the worker's number
WorkerMain = Callable[[Callable[[], bytes], Callable[[bytes], object], int], None]


class WorkerError(RuntimeError):
    """A worker died or hangs; the message says which, and what it was reading."""


class Task(NamedTuple):
    """Fill positions `start` to `stop` of a batch in a shared buffer."""

    batch_id: int
    assembler: int
    epoch: int
    batch: int
    buffer: int
    start: int
    stop: int


class Result(NamedTuple):
    """What came of a task."""

    batch_id: int
    start: int
    worker: int
    is_filled: int
    read_seconds: float
    augment_seconds: float


TASK = struct.Struct("7q")
RESULT = struct.Struct("4q2d")


class WorkerBackend(Protocol):
    """Runs the workers and carries messages."""

    capacity: int  # tasks that can be open before a write to a full pipe would block

    def send(self, task: bytes) -> None: ...

    def receive(self, seconds: float) -> bytes:
        """All results that have arrived; waits up to so many seconds for the first one."""

    def dead_worker(self) -> tuple[int, str] | None:
        """Number of a worker that died, and how."""

    def close(self) -> None: ...


class ForkBackend:
    """Forked processes, which share what there is at their start copy-on-write. They end with this process, even when it is
    killed."""

    def __init__(
        self, num_workers: int, worker_main: WorkerMain, task: struct.Struct = TASK, result: struct.Struct = RESULT
    ) -> None:
        import fcntl  # only where processes can be forked

        task_reader, self.task_writer = os.pipe()
        self.result_reader, result_writer = os.pipe()
        parent_ends = (self.task_writer, self.result_reader)
        self.result_bytes = result.size
        self.workers: list[BaseProcess] = []
        # Registered before the first worker exists, and run before multiprocessing's own exit handler would join them.
        self.close = multiprocessing.util.Finalize(
            self, _close, (self.task_writer, self.result_reader, self.workers), exitpriority=100
        )
        context = multiprocessing.get_context("fork")
        try:
            for number in range(num_workers):
                arguments = worker_main, number, task_reader, result_writer, task.size, parent_ends, os.getpid()
                self.workers.append(context.Process(target=_run_worker, args=arguments, daemon=True))
                with warnings.catch_warnings(), _signals_blocked():
                    # Python 3.12 warns that a fork could copy held locks; workers take none
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
        self.poller = select.poll()  # readable: a result has come; or a sentinel: a worker has ended
        for file in (self.result_reader, *(worker.sentinel for worker in self.workers)):
            self.poller.register(file, select.POLLIN)
        pipe_sizes = [fcntl.fcntl(file, fcntl.F_GETPIPE_SZ) for file in parent_ends]
        self.capacity = min(pipe_sizes) // max(task.size, result.size)

    def send(self, task: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # all workers are dead: dead_worker says so
            os.write(self.task_writer, task)

    def receive(self, seconds: float) -> bytes:
        found = self._read()
        if not found and seconds:
            self.poller.poll(1000 * seconds)
            found = self._read()
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self.result_reader, 256 * self.result_bytes)
        except BlockingIOError:
            return b""

    def dead_worker(self) -> tuple[int, str] | None:
        ready = {file for file, _ in self.poller.poll(0)}
        for number, worker in enumerate(self.workers):
            if worker.sentinel in ready and (code := worker.exitcode) is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return number, f"worker process {worker.pid} died ({how})"
        return None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Around a fork: a signal would run this process's handler in the worker too, until the worker ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(task_writer: int, result_reader: int, workers: Sequence[BaseProcess]) -> None:
    """Kills the workers: they hold nothing that could be lost."""
    os.close(task_writer)
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join(JOIN_SECONDS)
        if worker.exitcode is None:  # stuck in the kernel (a dead network disk); the interpreter's exit would wait for it
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    os.close(result_reader)


def _run_worker(
    worker_main: WorkerMain,
    number: int,
    task_reader: int,
    result_writer: int,
    task_bytes: int,
    parent_ends: Sequence[int],
    parent: int,
) -> None:
    end_with(parent)
    # A terminal or a scheduler signals the whole process group; the training process alone handles the signal.
    for name in IGNORED:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    for file in parent_ends:  # else the pipe would stay open after the training process has ended
        os.close(file)
    cv2.setNumThreads(0)  # one thread per worker
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):  # the training process has ended
        worker_main(lambda: os.read(task_reader, task_bytes), lambda result: os.write(result_writer, result), number)


class ThreadBackend:
    """Threads, for systems that cannot fork. OpenCV and numpy release the GIL."""

    def __init__(self, num_workers: int, worker_main: WorkerMain) -> None:
        self.tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.num_workers = num_workers
        self.capacity = sys.maxsize
        for number in range(num_workers):
            threading.Thread(target=worker_main, args=(self.tasks.get, self.results.put, number), daemon=True).start()

    def send(self, task: bytes) -> None:
        self.tasks.put(task)

    def receive(self, seconds: float) -> bytes:
        try:
            return self.results.get(timeout=seconds) if seconds else self.results.get_nowait()
        except queue.Empty:
            return b""

    def dead_worker(self) -> None:
        return None

    def close(self) -> None:
        for _ in range(self.num_workers):
            self.tasks.put(b"")
