"""The server of `watch`: pages that follow the files of a run, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time

from helpers.report_runs import epoch_event, write_run
from helpers.try_page import ask, refusal
from unet_trainer.reports import run_report
from unet_trainer.reports.gallery import Gallery
from unet_trainer.reports.run_report import WatchServer
from unet_trainer.training.history import EventLog

IDS = ["background", "foreground"]


@contextlib.contextmanager
def watching(*folders, **options):
    server = WatchServer(("127.0.0.1", 0), folders, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        server.worker.shutdown()


def get(server, path):
    status, _, content = ask(server, "GET", path)
    assert status == 200, content
    return content.decode()


def test_the_page_follows_the_run(tmp_path):
    folder = write_run(tmp_path / "run", end=None)
    with watching(folder, with_pictures=False) as server:
        first, version = get(server, ""), get(server, "version")
        assert f'data-live="{version}"' in first
        assert ">0.600</p>" in first
        assert get(server, "version") == version
        log = EventLog()
        log.open(folder, resumed_after={"epoch": 3, "batch": 0})
        log.add("epoch", **epoch_event(4, IDS, 0.75))
        assert get(server, "version") != version
        assert ">0.750</p>" in get(server, "")


def test_several_runs_are_compared_and_each_has_its_report(tmp_path):
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with watching(*folders, with_pictures=False) as server:
        assert "2 runs compared" in get(server, "")
        assert "<title>b – training report</title>" in get(server, "run/1/")
        assert get(server, "run/1/version") != get(server, "version")


def test_other_paths_lead_nowhere(tmp_path):
    with watching(write_run(tmp_path / "run"), with_pictures=False) as server:
        for path in ("run/0/", "run/7/", "events.jsonl", "../run", "run/0/../../settings.json", "version/x"):
            assert refusal(ask(server, "GET", path)) == (404, "nothing here")
        assert ask(server, "GET", "/wrong-key/")[0] == 403
        assert ask(server, "GET", "", Host="evil.example")[0] == 421


def test_pictures_are_made_once_a_run_has_ended(tmp_path, monkeypatch):
    folder, made = write_run(tmp_path / "run"), []

    def make(summary, device):
        made.append((summary.folder, device))
        return Gallery(note="here they are")

    monkeypatch.setattr(run_report, "make_gallery", make)
    with watching(folder) as server:
        assert "are being made …" in get(server, "")
        deadline = time.monotonic() + 60
        while "here they are" not in get(server, ""):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not server.is_busy
        get(server, "")
    assert made == [(folder, "cpu")]
