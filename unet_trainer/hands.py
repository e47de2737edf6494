"""Those who do a crew's work: processes where they can be forked, else threads.

What is sent is a few numbers of fixed size: a message is whole or not there, whatever is killed when.
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
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol

import cv2
import torch

CAN_FORK = sys.platform == "linux"
CLOSE_SECONDS = 1  # that a worker has to end

Serve = Callable[[Callable[[], bytes], Callable[[bytes], object], int], None]


class WorkerError(RuntimeError):
    """A worker process died or hangs; the message says which, and what it was reading."""


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

    def fate(self) -> tuple[int, str] | None:
        ended = {file for file, _ in self.bell.poll(0)}
        for number, worker in enumerate(self.workers):
            if worker.sentinel in ended and (code := worker.exitcode) is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return number, f"worker process {worker.pid} died ({how})"
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
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
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

    def fate(self) -> None:
        return None

    def close(self) -> None:
        for _ in range(self.num_workers):
            self.tasks.put(b"")
