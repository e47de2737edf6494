"""python train_unet.py try: finds the model and its images, serves them to this machine alone, ends with Ctrl-C."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from helpers.image_bytes import cv2_bytes
from helpers.ports import free_port
from helpers.project import ROOT
from helpers.try_page import parse_result
from train_unet import main
from unet_trainer.commands import runs

# Runs the script as `python train_unet.py` does, and reports every file that is opened for writing once the address was printed.
WATCH_WRITING = """
import builtins, os, runpy, sys
sys.argv = sys.argv[1:]
printed = []
def report(event, values):
    if event == "open" and printed and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(2, f"written: {values[0]}\\n".encode())
sys.addaudithook(report)
write = builtins.print
def print_and_watch(*values, **options):
    write(*values, **options)
    if "Ctrl-C" in str(values):
        printed.append(True)
builtins.print = print_and_watch
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def place(tiny_data, trained_run, tmp_path_factory):
    """A folder with checkpoints/tiny, a real run."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(trained_run, folder / "checkpoints/tiny")
    return folder


@pytest.fixture
def served(place, monkeypatch):
    """The servers that `try` would have run, with what was said in place of waiting for requests."""
    monkeypatch.chdir(place)
    servers = []

    def run(server, console):
        servers.append(server)
        server.server_close()
        return 0

    monkeypatch.setattr(runs, "serve", run)
    monkeypatch.setattr(webbrowser, "get", lambda: pytest.fail("a browser was opened"))
    return servers


def refused(capsys, *arguments):
    assert main(["try", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_run_is_served_to_this_machine_with_its_validation_images(served, capsys):
    assert main(["try", "tiny"]) == 0
    (server,) = served
    said = capsys.readouterr().out
    assert server.server_address[0] == "127.0.0.1"
    assert re.search(r"^Model: tiny, epoch 1, val IoU 0\.\d{4}, on cpu, float32$", said, re.MULTILINE)
    assert "Validation images: 2\n" in said
    assert f"Open http://127.0.0.1:{server.server_port}/{server.key}/\n" in said
    assert "Warning" not in said
    rows = [line.split(",") for line in Path("checkpoints/tiny/split.csv").read_text().splitlines()]
    assert [pair.name for pair in server.pairs] == [row[4] for row in rows if row[2] == "val"]


def test_a_model_without_its_data_is_served_and_the_page_says_why_there_are_no_images(served, capsys, tmp_path):
    (tmp_path / "best.pt").write_bytes(Path("checkpoints/tiny/best.pt").read_bytes())
    assert main(["try", str(tmp_path / "best.pt")]) == 0
    reason = f"{tmp_path} has no split.csv, which names them"
    assert f"Note: there are no validation images to choose from: {reason}\n" in capsys.readouterr().out
    assert json.loads(served[0].facts)["note"] == reason


def test_data_that_moved_can_be_named_and_must_then_be_there(served, capsys, tiny_data):
    assert main(["try", "tiny", f"data_dir={tiny_data}"]) == 0
    assert served[0].pairs[0].image.parent == tiny_data / "images"
    capsys.readouterr()
    assert refused(capsys, "tiny", "data_dir=nowhere").startswith("Error: data_dir: nowhere does not exist here")


def test_a_port_can_be_chosen_and_one_in_use_is_named(served, capsys):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert refused(capsys, "tiny", "--port", str(port)) == (
            f"Error: --port {port}: cannot be used (Address already in use); leave it out for a free one\n"
        )
    assert main(["try", "tiny", "--port", str(port)]) == 0
    assert served[0].server_port == port


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "Error: no run nothing; checkpoints holds tiny\n"),
        (["tiny", "other"], "Error: got 2 models (tiny, other); need one run or file\n"),
        (["tiny", "batch_size=4"], "Error: batch_size=4: of settings try takes data_dir=FOLDER alone, once each\n"),
        (["tiny", "--port", "70000"], "Error: --port: got 70000; need a number from 1 to 65535, or leave it out for a free one\n"),
        (["tiny", "--host", "no.such.host.invalid"], "Error: --host no.such.host.invalid: cannot be used ("),
        (["tiny", "--device", "gpu"], "Error: 1 problem in the config:\n  device: got 'gpu'"),
        (["tiny/../.."], "Error: "),
    ],
)
def test_what_cannot_be_served_is_one_message(served, capsys, arguments, message):
    assert refused(capsys, *arguments).startswith(message)
    assert served == []


# Serving


def test_the_command_serves_writes_nothing_and_ends_with_ctrl_c(place):
    command = [sys.executable, "-c", WATCH_WRITING, str(ROOT / "train_unet.py"), "try", "tiny", "--no-browser", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=place, env=environment, **pipes) as process:
        try:
            lines = []
            while not lines or not lines[-1].startswith("Ctrl-C"):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            address = urlsplit(re.search(r"^Open (\S+)$", "".join(lines), re.MULTILINE)[1])
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
            connection.request("POST", f"{address.path}predict", cv2_bytes(".png", np.zeros((48, 40, 3), np.uint8)))
            header, parts = parse_result(connection.getresponse().read())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (header["height"], header["width"], len(parts["ids"])) == (48, 40, 48 * 40)
    assert (process.returncode, out, err) == (0, "\nStopped.\n", "")
