"""python train_unet.py watch: serves the runs that are named, writes nothing, ends with Ctrl-C."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from helpers.project import ROOT
from helpers.report_runs import write_run
from train_unet import main
from unet_trainer.commands import watch


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    servers = []
    monkeypatch.setattr(watch, "serve", lambda server, console: servers.append(server) or server.server_close() or 0)
    monkeypatch.setattr(watch, "open_browser", lambda url: None)
    return servers


def test_the_newest_run_or_those_that_are_named_are_served(served, tmp_path, capsys):
    first, second = write_run(tmp_path / "checkpoints/a"), write_run(tmp_path / "checkpoints/b", end=None)
    os.utime(first / "events.jsonl", (1, 1))
    assert main(["watch"]) == 0
    assert "checkpoints/b: interrupted, 3 of 3 epochs" in capsys.readouterr().out
    assert main(["watch", "a", "b", "a"]) == 0
    assert [[folder.name for folder in server.folders] for server in served] == [["b"], ["a", "b"]]
    assert served[0].server_address[0] == "127.0.0.1"
    assert second.name == "b"


def test_what_cannot_be_watched_is_one_message(served, capsys):
    assert main(["watch"]) == 2
    assert capsys.readouterr().err == "Error: checkpoint_dir: checkpoints holds no runs; python train_unet.py starts one\n"
    assert main(["watch", "--port", "99999"]) == 2
    assert served == []


def test_the_command_serves_and_ends_with_ctrl_c_and_writes_nothing(tmp_path):
    folder = write_run(tmp_path / "checkpoints/run")
    before = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, str(ROOT / "train_unet.py"), "watch", "--no-browser"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            while not lines or not lines[-1].startswith("Ctrl-C"):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            address = urlsplit(re.search(r"^Open (\S+)$", "".join(lines), re.MULTILINE)[1])
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
            connection.request("GET", f"{address.path}version")
            assert len(connection.getresponse().read()) == 16
            connection.close()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "\nStopped.\n", "")
    assert sorted(path.name for path in folder.iterdir()) == before
