"""Calls a function on many items in forked child processes.

Native code that crashes or hangs costs one item, not the run, and its message is kept. Standard error is captured in the children
only; that of this process stays as it is. Signals are handled while this process waits. Children end with it, even when it is
killed while they hang.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any, Generic, TypeVar

from unet_trainer.system.parent_process import end_with

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

CAN_FORK = sys.platform == "linux"
MAX_MESSAGE = 300  # characters of what a crashed child printed
POLL_SECONDS = 1.0
HANG_SECONDS = 600.0  # on one item; as worker_timeout
JOIN_SECONDS = 5.0  # after SIGKILL; a child that is stuck in the kernel (a dead network disk) is left behind

ReadStderr = Callable[[], str]  # what native code has printed since the last call


@dataclass(frozen=True)
class Crash:
    """The child that worked on an item died, or was killed because it took too long; `reason` says how, and what it printed."""

    reason: str
    is_timeout: bool = False


@dataclass
class _Child(Generic[Item]):
    process: BaseProcess
    connection: Connection
    stderr: IO[bytes]
    index: int | None = None  # of the item that it works on
    since: float = 0.0  # when it began with it


def forked_map(
    function: Callable[[Item, ReadStderr], Outcome],
    items: Sequence[Item],
    num_children: int,
    set_up: Callable[[], object] = lambda: None,
    timeout: float | None = HANG_SECONDS,
) -> Generator[tuple[int, Outcome | Crash], None, None]:
    """Index and outcome of each item, as they are done. An exception in `function` is raised here, with its traceback as text.

    `set_up` is called once in each child. After `timeout` seconds on one item a child is killed. Where processes cannot be forked,
    threads do the work: nothing is caught from standard error, a crash is a crash, and there is no time limit.
    """
    if not items:
        return
    if not CAN_FORK or multiprocessing.current_process().daemon:  # a daemonic process may have no children
        with ThreadPoolExecutor(num_children) as threads:
            yield from enumerate(threads.map(lambda item: function(item, lambda: ""), items))
        return
    waiting = deque(range(len(items)))
    children: list[_Child[Item]] = []
    try:
        for _ in range(min(num_children, len(items))):
            children.append(_start(function, items, set_up, children))
            _assign(children[-1], waiting)
        num_done = 0
        while num_done < len(items):
            busy = [child.connection for child in children if child.index is not None]
            ready = multiprocessing.connection.wait(busy, POLL_SECONDS)
            for number, child in enumerate(children):
                is_late = timeout is not None and time.monotonic() - child.since > timeout
                if child.index is None or not (is_late or child.connection in ready):
                    continue
                index, answer = child.index, _receive(child) if child.connection in ready else _late(timeout)
                if isinstance(answer, Crash):
                    yield index, answer
                    _end(child)
                    children[number] = _start(function, items, set_up, [other for other in children if other is not child])
                else:
                    outcome, error = answer
                    if error is not None:
                        raise RuntimeError(f"a child process failed:\n{error}")
                    yield index, outcome
                num_done += 1
                _assign(children[number], waiting)
    finally:
        for child in children:
            _end(child)


def _start(
    function: Callable[[Item, ReadStderr], Outcome],
    items: Sequence[Item],
    set_up: Callable[[], object],
    others: Sequence[_Child[Item]],
) -> _Child[Item]:
    here, there = multiprocessing.Pipe()
    stderr = _memory_file()
    # A child that inherited the parent's end of a pipe would keep it open when the parent dies.
    inherited = [here, *(other.connection for other in others)]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(function, items, set_up, there, inherited, stderr, os.getpid()), daemon=True)
    with warnings.catch_warnings():  # Python 3.12 warns that a fork could copy held locks; the children take none
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()
    there.close()
    return _Child(process, here, stderr)


def _memory_file() -> IO[bytes]:
    """Needs no temporary directory where the system has files in memory. To be closed with the child."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("standard error"), "w+b")
    return tempfile.TemporaryFile()


def _assign(child: _Child[Item], waiting: deque[int]) -> None:
    child.index = waiting.popleft() if waiting else None
    child.since = time.monotonic()
    if child.index is not None:
        with contextlib.suppress(OSError):  # it died while idle: the next receive reports it
            child.connection.send(child.index)


def _late(timeout: float | None) -> Crash:
    return Crash(f"no answer in {timeout:g} s", is_timeout=True)


def _receive(child: _Child[Item]) -> tuple[Any, str | None] | Crash:
    """Outcome and error of an item that is done."""
    try:
        return child.connection.recv()
    except (EOFError, OSError):
        return Crash(_describe_exit(child))


def _end(child: _Child[Item]) -> None:
    child.process.kill()
    child.process.join(JOIN_SECONDS)
    if child.process.exitcode is None:  # the interpreter's exit would wait for it
        multiprocessing.process._children.discard(child.process)  # type: ignore[attr-defined]
    child.connection.close()
    child.stderr.close()


def _describe_exit(child: _Child[Item]) -> str:
    child.process.join(JOIN_SECONDS)
    code = child.process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    child.stderr.seek(0)
    printed = " ".join(child.stderr.read().decode(errors="replace").split())
    return f"{how}: {printed[-MAX_MESSAGE:]}" if printed else how


def _work(
    function: Callable[[Item, ReadStderr], Outcome],
    items: Sequence[Item],
    set_up: Callable[[], object],
    connection: Connection,
    inherited: Sequence[Connection],
    stderr: IO[bytes],
    parent: int,
) -> None:
    """Child main loop."""
    end_with(parent)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles these and ends its children
        signal.signal(name, signal.SIG_IGN)
    for other in inherited:
        other.close()
    os.dup2(stderr.fileno(), 2)
    set_up()

    def read_stderr() -> str:
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
        stderr.seek(0)
        stderr.truncate()
        return text

    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            index = connection.recv()
            try:
                answer = pickle.dumps((function(items[index], read_stderr), None))
            except Exception:  # an outcome that cannot be pickled is an error as well
                answer = pickle.dumps((None, traceback.format_exc()))
            connection.send_bytes(answer)
