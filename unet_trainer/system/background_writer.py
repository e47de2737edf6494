"""Writes files in a background thread, so that training goes on meanwhile.

The writer is given an ordered list of jobs and works through it once. What it could not write it hands back: whether, when and
with what else to try again is the caller's decision.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

EXIT_SECONDS = 30  # that a write under way has when the interpreter exits
_busy_threads: set[threading.Thread] = set()


class Job(NamedTuple):
    """One file to write."""

    write: Callable[[], object]
    requires: str | None = None  # is not written when the job of that name in the same list failed


class BackgroundWriter:
    """Runs one list of jobs at a time. After a job fails, all others run but those that require it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.unwritten: dict[str, Job] = {}
        self.error: Exception | None = None
        self.is_cancelled = False

    def start(self, jobs: Mapping[str, Job]) -> None:
        """Begins to write, in the order of the jobs. Raises OSError where no thread can be started."""
        if self.is_busy():
            raise RuntimeError("the writer is busy; wait for it first")
        self.is_cancelled = False
        # A daemon: a second Ctrl-C does not wait for the disk.
        self.thread = threading.Thread(target=self._run, args=(dict(jobs),), name="background writer", daemon=True)
        _busy_threads.add(self.thread)  # before it starts: the process may exit right after
        try:
            self.thread.start()
        except RuntimeError as error:
            _busy_threads.discard(self.thread)
            self.thread = None
            self.unwritten = {**self.unwritten, **jobs}
            raise OSError(f"no thread can be started to write with ({error})") from None

    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Until the jobs are done or have failed."""
        if self.thread is not None:
            self.thread.join()

    def collect(self) -> tuple[dict[str, Job], Exception | None]:
        """The jobs that a disk error kept from being written, in their order, and the first error of any kind; each once."""
        if self.is_busy():
            return {}, None
        unwritten, error = self.unwritten, self.error
        self.unwritten, self.error = {}, None
        return unwritten, error

    def cancel(self) -> None:
        """Skips jobs that have not begun, and waits for the one under way: a thread inside torch would abort the process."""
        self.is_cancelled = True
        self.wait()
        self.collect()

    def _run(self, jobs: Mapping[str, Job]) -> None:
        failed: set[str] = set()
        try:
            for name, job in jobs.items():
                if self.is_cancelled:
                    return
                if job.requires in failed:
                    failed.add(name)
                    if job.requires in self.unwritten:  # else another try would not help
                        self.unwritten[name] = job
                    continue
                try:
                    job.write()
                except Exception as error:  # of any kind: raised in the training thread, where it is handled
                    failed.add(name)
                    self.error = self.error or error
                    if isinstance(error, OSError):
                        self.unwritten[name] = job
        finally:
            _busy_threads.discard(threading.current_thread())


def is_any_busy() -> bool:
    """Whether any writer is running: then the interpreter must not be torn down, or the process aborts."""
    return bool(_busy_threads)


@atexit.register
def _wait_at_exit() -> None:
    for thread in list(_busy_threads):
        thread.join(EXIT_SECONDS)
