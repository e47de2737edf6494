"""What runs beside the main thread: processes that are forked from this one and killed with it (forked_map, and
ForkedWorkers, which fill batches in shared memory), and threads for work that releases the GIL: ahead of the caller
(read_ahead), behind it (WriteBehind), or because a call may hang (call_with_timeout).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

CAN_FORK = sys.platform == "linux"
# Windows has no SIGHUP
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
PR_SET_PDEATHSIG = 1  # of prctl(2)
KILL_SECONDS = 5.0  # to wait after SIGKILL; a process that is stuck in the kernel (a dead network disk) is left behind
GROUP = 4  # small items that read_ahead begins at a time
HANG_SECONDS = 600.0  # on one item of forked_map; as worker_timeout
POLL_SECONDS = 1.0  # between checks for children of forked_map that hang
JOIN_SECONDS = 30.0  # for the calls under way when read_ahead ends early, or when the interpreter exits
MAX_MESSAGE = 300  # characters of what a crashed child printed
PIPE_BYTES = 2**18  # asked for, of the pipes of ForkedWorkers


def can_fork() -> bool:
    """A daemonic process, such as a worker of the caller's own pool, may not have children."""
    return CAN_FORK and not multiprocessing.current_process().daemon


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """Delivers signals that come meanwhile at its end: what a handler raises during a fork is lost. To block them is
    not enough: they reach Python through other threads."""
    received: list[int] = []

    def deliver() -> None:
        for number in received:
            signal.raise_signal(number)

    with contextlib.ExitStack() as restores:  # goes through to its end, also where a restored handler raises
        restores.callback(deliver)
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            # None: it was not set from Python
            restores.callback(signal.signal, number, signal.SIG_DFL if handler is None else handler)
            signal.signal(number, lambda number, _: received.append(number))
        yield


def start_process(function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Forks a process that ignores SIGINT, SIGTERM and SIGHUP, which go to a whole process group: this process handles
    them and ends its children, and Linux kills them when it is killed itself. OpenCV is set to one thread, which the
    child keeps: it would wait for ever for threads that do not survive a fork."""
    import cv2  # 0.1 s

    parent, num_threads = os.getpid(), cv2.getNumThreads()

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    try:
        with signals_waiting(), warnings.catch_warnings():
            # Python 3.12 warns that a fork could copy held locks; the children take none
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            cv2.setNumThreads(1)
            process.start()
    except BaseException:
        if process.pid is not None:
            kill_processes([process])
        raise
    finally:
        cv2.setNumThreads(num_threads)
    return process


def kill_processes(processes: Sequence[BaseProcess], seconds: float = KILL_SECONDS) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(seconds)
        if process.exitcode is None:  # the interpreter's exit would wait for it
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def describe_exit(process: BaseProcess) -> str:
    """SIGKILL, exit code 1."""
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# receives a task (empty: no more tasks), sends a result, the worker's number
WorkerMain = Callable[[Callable[[], bytes], Callable[[bytes], object], int], None]


class ForkedWorkers:
    """Processes that take their tasks from one pipe and send their results into another. Messages have a fixed size,
    smaller than a pipe's atomic write, so a killed process never leaves half a message."""

    def __init__(self, num_workers: int, main: WorkerMain, task_bytes: int, result_bytes: int) -> None:
        """Raises OSError if not all can be started."""
        import fcntl  # only where processes can be forked

        task_reader, self.task_writer = os.pipe()
        self.result_reader, result_writer = os.pipe()
        self.result_bytes = result_bytes
        self.processes: list[BaseProcess] = []
        parent_ends = self.task_writer, self.result_reader
        # Registered before the first worker exists, and run before multiprocessing's own exit handler would join them.
        self.close = multiprocessing.util.Finalize(self, _end_workers, (*parent_ends, self.processes), exitpriority=100)

        def run(number: int) -> None:
            main(lambda: os.read(task_reader, task_bytes), lambda result: os.write(result_writer, result), number)

        try:
            for file in parent_ends:
                with contextlib.suppress(OSError):  # beyond the limit of this user
                    fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            for number in range(num_workers):
                self.processes.append(start_process(run, number))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(task_reader)
            os.close(result_writer)
        os.set_blocking(self.result_reader, False)
        # Tasks that may be open: two full pipes would block both ends for ever. A page holds whole messages only.
        pipe_bytes = min(fcntl.fcntl(file, fcntl.F_GETPIPE_SZ) for file in parent_ends)
        self.capacity = pipe_bytes // (2 * max(task_bytes, result_bytes))

    def send(self, task: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # all workers are dead, which dead_worker reports
            os.write(self.task_writer, task)

    def receive(self, seconds: float) -> bytes:
        """All results that have arrived; waits so long for the first one, or for the death of a worker."""
        multiprocessing.connection.wait(
            [self.result_reader, *(process.sentinel for process in self.processes)], seconds
        )
        with contextlib.suppress(BlockingIOError):
            return os.read(self.result_reader, 256 * self.result_bytes)
        return b""

    def dead_worker(self) -> tuple[int, str] | None:
        """Number of a worker that died, and how."""
        for number, process in enumerate(self.processes):
            if process.exitcode is not None:
                return number, f"worker process {process.pid} died ({describe_exit(process)})"
        return None


def _end_workers(task_writer: int, result_reader: int, processes: Sequence[BaseProcess]) -> None:
    os.close(task_writer)
    kill_processes(processes, seconds=1.0)
    os.close(result_reader)


ReadStderr = Callable[[], str]  # what native code has printed since the last call


@dataclass(frozen=True)
class Crash:
    """The child that worked on an item died or took too long; `reason` says how, and what it printed."""

    reason: str
    is_timeout: bool = False


def forked_map(
    function: Callable[[Item, ReadStderr], Outcome],
    items: Sequence[Item],
    num_children: int,
    timeout: float | None = HANG_SECONDS,
) -> Generator[tuple[int, Outcome | Crash], None, None]:
    """Calls the function in child processes (threads, where none can be forked); index and outcome of each item, as
    they are done. A crash or `timeout` seconds cost an item; an exception is raised here, with its traceback as text.
    """
    if not can_fork():
        with ThreadPoolExecutor(max(1, num_children)) as threads:
            yield from enumerate(threads.map(lambda item: function(item, lambda: ""), items))
        return
    waiting = deque(range(len(items)))
    children: dict[Connection, _Child] = {}
    try:
        while waiting or children:
            while waiting and len(children) < max(1, num_children):
                child = _Child(function, items)
                children[child.connection] = child
                child.send(waiting.popleft())
            ready = multiprocessing.connection.wait(list(children), min(POLL_SECONDS, timeout or POLL_SECONDS))
            for connection, child in list(children.items()):
                if connection in ready:
                    outcome = child.receive()
                elif timeout is not None and time.monotonic() - child.since > timeout:
                    outcome = Crash(f"no answer in {timeout:g} s", is_timeout=True)
                else:
                    continue
                yield child.index, outcome  # before it gets another item: the caller may end it here
                if waiting and not isinstance(outcome, Crash):
                    child.send(waiting.popleft())
                else:
                    del children[connection]
                    child.close()
    finally:
        for child in children.values():
            child.close()


class _Child:
    """A process that answers indices, one at a time. Its standard error goes into a file."""

    def __init__(self, function: Callable[[Item, ReadStderr], Outcome], items: Sequence[Item]) -> None:
        self.index, self.since = 0, 0.0  # of the item that it works on, and when it began with it
        self.connection, theirs = multiprocessing.Pipe()
        self.stderr: IO[bytes] = os.fdopen(os.memfd_create("standard error"), "w+b")

        def answer() -> None:
            os.dup2(self.stderr.fileno(), 2)
            while True:
                index = theirs.recv()
                try:
                    theirs.send((function(items[index], self.read_stderr), ""))
                except Exception:  # an outcome that cannot be pickled is an error as well
                    theirs.send((None, traceback.format_exc()))

        self.process = start_process(answer)
        theirs.close()

    def send(self, index: int) -> None:
        self.index, self.since = index, time.monotonic()
        with contextlib.suppress(OSError):  # it died while idle: `receive` reports it
            self.connection.send(index)

    def receive(self) -> Any:
        """The outcome, or a Crash. Raises RuntimeError with the traceback of the child."""
        try:
            outcome, error = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(KILL_SECONDS)
            printed = " ".join(self.read_stderr().split())
            return Crash(f"{describe_exit(self.process)}: {printed[-MAX_MESSAGE:]}".removesuffix(": "))
        if error:
            raise RuntimeError(f"a child process failed:\n{error}")
        return outcome

    def read_stderr(self) -> str:
        """All that was written to it, which is forgotten."""
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")
        self.stderr.seek(0)
        self.stderr.truncate()
        return text

    def close(self) -> None:
        kill_processes([self.process])
        self.connection.close()
        self.stderr.close()


_awaited: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # that the interpreter's exit waits for


def start_thread(function: Callable[[], Outcome], name: str, is_awaited: bool = False) -> Future[Outcome]:
    """Calls the function in a daemon thread, for which the interpreter's exit does not wait (it may hang), or for
    JOIN_SECONDS if it `is_awaited`. Raises RuntimeError where no more threads can be started."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)

    if is_awaited:
        _awaited.add(future)  # before it starts: the process may exit right after
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def is_writing() -> bool:
    """Whether an awaited thread runs: the process would abort if the interpreter were torn down under it."""
    return not all(future.done() for future in _awaited)


@atexit.register
def _wait_at_exit() -> None:
    wait(list(_awaited), JOIN_SECONDS)


class ReadTimeout(Exception):
    """Nothing was read in the time limit."""


def call_with_timeout(function: Callable[[], Outcome], timeout: float | None) -> Outcome:
    """What the function returns or raises. Raises ReadTimeout after `timeout` seconds: a file on a dead network disk
    never answers. The thread that hangs is left behind."""
    future = start_thread(function, "reading")
    if not wait([future], timeout).done:
        raise ReadTimeout
    return future.result()


Task = tuple[Sequence[Item], Future[list[tuple[Any, BaseException | None]]]]  # a group; its outcomes or errors


def read_ahead(
    function: Callable[[Item], Outcome],
    items: Sequence[Item],
    num_threads: int,
    num_bytes: Callable[[Outcome], int] | None = None,
    max_bytes: int = 1,
    max_items: int = 64,
    timeout: float | None = None,
) -> Generator[tuple[Item, Outcome], None, None]:
    """Calls a function on items in threads; items and outcomes in order. To be closed if it is left early. An exception
    is raised at its item's turn; ReadTimeout if that takes longer than `timeout` seconds. At most `max_items` are begun
    and not yet taken, and no more than fit into `max_bytes`, by the largest outcome so far.

    A GPU takes thousands of small images a second, and each time that a thread takes a lock another may get the GIL: so
    small items are begun several at a time."""
    tasks: SimpleQueue[Task[Item] | None] = SimpleQueue()
    pending: deque[Task[Item]] = deque()
    num_begun = num_taken = largest = 0

    def work() -> None:
        while (task := tasks.get()) is not None:
            group, future = task
            future.set_result([_attempt(function, item) for item in group])

    threads: list[Future[None]] = []
    try:
        for _ in range(min(num_threads, len(items))):
            threads.append(start_thread(work, "read ahead"))
        while num_taken < len(items):
            room = max_items
            if num_bytes is not None:  # at first the size of an outcome is not known
                room = min(room, max(2, max_bytes // max(1, largest)) if num_taken else num_threads)
            has_many = num_taken and min(room, len(items) - num_begun) >= 2 * GROUP * num_threads
            while num_begun < len(items) and (num_begun - num_taken < room or not pending):
                group = items[num_begun : num_begun + (GROUP if has_many and timeout is None else 1)]
                num_begun += len(group)
                pending.append((group, Future()))
                tasks.put(pending[-1])
            group, future = pending.popleft()
            if not wait([future], timeout).done:
                threads.clear()  # they hang, and are left behind
                raise ReadTimeout
            for item, (outcome, error) in zip(group, future.result(), strict=True):
                if error is not None:
                    raise error
                largest = max(largest, 0 if num_bytes is None else num_bytes(outcome))
                yield item, outcome
                num_taken += 1
    finally:
        with contextlib.suppress(Empty):
            while True:
                tasks.get_nowait()
        for _ in range(num_threads):
            tasks.put(None)
        wait(threads, JOIN_SECONDS)


def _attempt(function: Callable[[Item], Outcome], item: Item) -> tuple[Outcome | None, BaseException | None]:
    try:
        return function(item), None
    except BaseException as error:  # raised where the outcome is taken
        return None, error


class WriteBehind(contextlib.AbstractContextManager["WriteBehind"]):
    """Runs tasks such as writing files in threads while the caller goes on; with one thread, in their order. The caller
    waits while tasks that hold `max_bytes` are unfinished, and gets the exception of a task from a later call. Left by
    an exception, tasks that have not begun are dropped and those under way are waited for."""

    def __init__(self, num_threads: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.pending: deque[tuple[Future[object], int]] = deque()  # with their bytes
        self.threads = ThreadPoolExecutor(num_threads)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.threads.shutdown(cancel_futures=True)

    def submit(self, task: Callable[[], object], num_bytes: int) -> None:
        while self.pending and (self.pending[0][0].done() or self._held() + num_bytes > self.max_bytes):
            self.pending.popleft()[0].result()
        self.pending.append((self.threads.submit(task), num_bytes))

    def _held(self) -> int:
        return sum(num_bytes for _, num_bytes in self.pending)

    def finish(self) -> None:
        """Waits until all tasks are done."""
        while self.pending:
            self.pending.popleft()[0].result()
