"""Saves in the background: a thread writes, and training goes on meanwhile.

One save is in flight and one may wait; a newer state takes the place of the waiting one, so that epochs shorter than a save
are not slowed by it. An error comes out at the next call.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping

Job = Callable[[], object]

EXIT_SECONDS = 30  # that a save has to end when the interpreter does
_at_work: set[threading.Thread] = set()


class Saver:
    """Runs jobs by name in a thread. Of two waiting jobs of a name the newer is done; those of one call keep their order.

    A job that fails keeps no other from being done but those that need it.
    """

    def __init__(self, needs: Mapping[str, str] | None = None) -> None:
        self.needs = needs or {}  # a job by name → the one that it is not done without, when that fails
        self.waiting: dict[str, Job] = {}
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def submit(self, jobs: Mapping[str, Job]) -> None:
        """Raises the error of an earlier save, with the jobs taken in nevertheless."""
        with self.lock:
            earlier, self.error = self.error, None
            self.waiting = _merge(self.waiting, jobs)
            if self.thread is None:
                # A daemon: a second Ctrl-C does not wait for the disk.
                self.thread = threading.Thread(target=self._work, name="saver", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError as error:
                    self.thread = None
                    raise OSError(f"there is no thread to write with ({error})") from None
        if earlier is not None:
            raise earlier

    def is_busy(self) -> bool:
        with self.lock:
            return self.thread is not None

    def wait(self) -> None:
        """Until everything is written; raises the error if something could not be."""
        while (thread := self.thread) is not None:
            thread.join()
        self.raise_error()

    def abandon(self) -> None:
        """Drops what waits and lets what is under way end: a thread in the middle of torch's code would abort the process."""
        while (thread := self.thread) is not None:
            with self.lock:
                self.waiting = {}
            thread.join()
        with self.lock:
            self.waiting, self.error = {}, None

    def raise_error(self) -> None:
        with self.lock:
            error, self.error = self.error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        _at_work.add(threading.current_thread())
        try:
            while self._do_what_waits():
                pass
        finally:
            _at_work.discard(threading.current_thread())

    def _do_what_waits(self) -> bool:
        """Whether there was something to do, and all of it went well."""
        with self.lock:
            jobs, self.waiting = self.waiting, {}
            if not jobs:
                self.thread = None
                return False
        failed: set[str] = set()
        again: dict[str, Job] = {}  # comes along with the next save, or best.pt would be lost
        first: Exception | None = None
        for name, job in jobs.items():
            error: Exception | None = None
            if self.needs.get(name) in failed:
                failed.add(name)
                again[name] = job
                continue
            try:
                job()
            except Exception as caught:  # whatever it is, it is raised where somebody hears it
                error = caught
            if error is not None:
                first = first or error
                failed.add(name)
                if isinstance(error, OSError):
                    again[name] = job
        if first is None:
            return True
        with self.lock:
            self.error = first
            self.waiting = _merge(again, self.waiting)
            self.thread = None
        return False


def is_any_at_work() -> bool:
    """Whether a save is under way, of whichever run: then the interpreter must not be torn down, or the process aborts."""
    return bool(_at_work)


@atexit.register
def _let_them_end() -> None:
    for thread in list(_at_work):
        thread.join(EXIT_SECONDS)


def _merge(older: Mapping[str, Job], newer: Mapping[str, Job]) -> dict[str, Job]:
    return {**{name: job for name, job in older.items() if name not in newer}, **newer}
