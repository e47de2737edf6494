"""Saves in the background: a thread writes, and training goes on meanwhile.

One save is in flight and one may wait; a newer state takes the place of the waiting one, so that epochs shorter than a save
are not slowed by it. An error comes out at the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

Job = Callable[[], object]


class Saver:
    """Runs jobs by name in a thread. Of two waiting jobs of a name the newer is done; those of one call keep their order."""

    def __init__(self) -> None:
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
                self.thread.start()
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
        while True:
            with self.lock:
                jobs, self.waiting = self.waiting, {}
                if not jobs:
                    self.thread = None
                    return
            for name in list(jobs):
                try:
                    jobs[name]()
                except Exception as error:  # whatever it is, it is raised where somebody hears it
                    with self.lock:
                        self.error = error
                        if isinstance(error, OSError):  # what is left comes along with the next save, or best.pt would be lost
                            self.waiting = _merge(jobs, self.waiting)
                        self.thread = None
                    return
                del jobs[name]


def _merge(older: Mapping[str, Job], newer: Mapping[str, Job]) -> dict[str, Job]:
    return {**{name: job for name, job in older.items() if name not in newer}, **newer}
