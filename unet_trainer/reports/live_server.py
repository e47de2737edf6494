"""The server of `watch`: reports of runs that go on, made anew when their files change. Writes nothing.

GET  /KEY/               the report of the run; of several runs, their comparison
GET  /KEY/version        changes when the page does
GET  /KEY/run/N/         the report of one of several runs; run/N/version likewise
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from unet_trainer.reports.comparison import render_comparison
from unet_trainer.reports.gallery import Gallery, make_gallery
from unet_trainer.reports.page import page_policy
from unet_trainer.reports.run_report import NO_PICTURES, render_report
from unet_trainer.system.local_server import HTML_TYPE, LocalHandler, LocalServer, RequestRefused
from unet_trainer.system.locks import is_locked
from unet_trainer.training.run_folder import BEST, SAMPLES, SETTINGS, VAL_SCORES
from unet_trainer.training.run_summary import RUN_FILES, RunSummary, read_run_summary

WATCHED = (*(name for name in RUN_FILES if not name.endswith(".pt")), BEST, SETTINGS, VAL_SCORES, SAMPLES)


class WatchServer(LocalServer):
    """Pictures of the worst and best images are predicted once a run has ended: while it trains it needs the machine itself."""

    def __init__(self, address: tuple[str, int], folders: Sequence[Path], with_pictures: bool = True) -> None:
        """Raises OSError if the address cannot be used."""
        self.folders = list(folders)
        self.with_pictures = with_pictures
        self.galleries: dict[Path, tuple[Any, Gallery]] = {}  # with the version of the files that they were made of
        self.worker = ThreadPoolExecutor(1, "pictures")
        self.num_running = 0
        super().__init__(address, WatchHandler)

    @property
    def is_busy(self) -> bool:
        return self.num_running > 0

    def shown_folders(self, path: str) -> list[Path]:
        """Whose page a path names. Raises RequestRefused."""
        found = re.fullmatch(r"run/([0-9]{1,4})/", path)
        if path == "":
            return self.folders
        if found and int(found[1]) < len(self.folders) and len(self.folders) > 1:
            return [self.folders[int(found[1])]]
        raise RequestRefused(HTTPStatus.NOT_FOUND, "nothing here")

    def version(self, folders: Sequence[Path]) -> str:
        """Of all that the page of these runs shows."""
        facts = [(_file_facts(folder), folder in self.galleries, is_locked(folder)) for folder in folders]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def page(self, path: str) -> bytes:
        folders = self.shown_folders(path)
        version, summaries = self.version(folders), [read_run_summary(folder) for folder in folders]
        if len(summaries) > 1:
            return render_comparison(summaries, live=version, links=True).encode()
        return render_report(summaries[0], self._gallery(summaries[0]), live=version).encode()

    def _gallery(self, summary: RunSummary) -> Gallery:
        """As far as it is made; asks for it if it is not."""
        if summary.state == "running":
            note = "Pictures of the worst and the best images follow when the run has ended."
            return Gallery(note=note) if summary.best else NO_PICTURES
        if not self.with_pictures:
            return NO_PICTURES
        made_of = _file_facts(summary.folder)
        known = self.galleries.get(summary.folder)
        if known is not None and known[0] == made_of:
            return known[1]
        if not self.is_busy:
            self.num_running += 1
            self.worker.submit(self._make_gallery, summary, made_of)
        return Gallery(note="Pictures of the worst and the best images are being made …")

    def _make_gallery(self, summary: RunSummary, made_of: Any) -> None:
        try:
            # On the CPU: a run that trains beside needs the GPU's memory.
            self.galleries[summary.folder] = made_of, make_gallery(summary, "cpu")
        finally:
            self.num_running -= 1


class WatchHandler(LocalHandler):
    server: WatchServer

    def get(self, path: str) -> None:
        if path == "version" or path.endswith("/version"):
            folders = self.server.shown_folders(path.removesuffix("version"))
            self.send(self.server.version(folders).encode(), "text/plain; charset=utf-8")
            return
        policy = f"{page_policy(live=True)}; frame-ancestors 'none'"
        self.send(self.server.page(path), HTML_TYPE, {"Content-Security-Policy": policy})


def _file_facts(folder: Path) -> list[tuple[str, int, int]]:
    """Sizes and times of the files that a report is made of."""
    facts = []
    for name in WATCHED:
        with contextlib.suppress(OSError):
            found = (folder / name).stat()
            facts.append((name, found.st_size, found.st_mtime_ns))
    return facts
