"""The process that downloads: what it writes, what it prints, and what it leaves behind when it is ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from helpers import hub
from unet_trainer.model import fetch_weights

COMMIT = "89abcdef" * 5


@pytest.fixture
def cache(monkeypatch, tmp_path):
    return hub.isolate(monkeypatch, tmp_path)


def start(endpoint, cache, hub_files=(), url_files=(), connect_limit=3.0, before=""):
    """`before`: code that runs first in the process."""
    request = {"hub_files": hub_files, "url_files": url_files, "endpoint": endpoint, "cache_dir": str(cache)}
    request |= {"connect_to": endpoint, "connect_limit": connect_limit}
    code = f"{before}\nimport runpy; runpy.run_path({fetch_weights.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, json.dumps(request)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments, **options):
    with start(*arguments, **options) as process:
        output, errors = process.communicate()
    return process.returncode, output, errors


def hub_file(*names, revision=COMMIT):
    return {"repo_id": "owner/repo", "revision": revision, "names": names}


def test_files_are_written_into_the_cache_and_nothing_is_printed(cache):
    with hub.serving({"owner/repo/config.json": b"{}", "owner/repo/model.safetensors": b"weights"}) as endpoint:
        code, output, _ = run(endpoint, cache, [hub_file("config.json"), hub_file("model.safetensors")])
    assert (code, output) == (0, "")
    snapshot = cache / "models--owner--repo" / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {"config.json": b"{}", "model.safetensors": b"weights"}


def test_of_several_names_the_first_that_there_is_is_taken(cache):
    with hub.serving({"owner/repo/b": b"second", "owner/repo/c": b"third"}) as endpoint:
        assert run(endpoint, cache, [hub_file("a", "b", "c", revision=None)])[:2] == (0, "")
    snapshot = cache / "models--owner--repo" / "snapshots" / hub.COMMIT
    assert [path.name for path in snapshot.iterdir()] == ["b"]


def test_a_file_that_is_not_there_is_told_in_one_line(cache):
    with hub.serving({}) as endpoint:
        code, output, _ = run(endpoint, cache, [hub_file("a", "b")])
    assert code == 1
    assert output.startswith("the download failed (")
    assert output.endswith(")\n")
    assert output.count("\n") == 1


def test_a_file_that_is_not_on_the_hub_is_written_where_torch_looks_for_it(cache, tmp_path):
    path = tmp_path / "torch" / "checkpoints" / "weights.pth"
    with hub.serving({"owner/repo/weights.pth": b"weights"}) as endpoint:
        url = f"{endpoint}/owner/repo/resolve/main/weights.pth"
        assert run(endpoint, cache, url_files=[{"url": url, "path": str(path)}])[:2] == (0, "")
    assert path.read_bytes() == b"weights"


@pytest.mark.parametrize(
    "before",
    [
        "import socket, time; socket.getaddrinfo = lambda *_, **__: time.sleep(600)",
        "import socket\ndef fail(*_, **__): raise TimeoutError\nsocket.create_connection = fail",
    ],
    ids=["a name that is not resolved", "packets that are swallowed"],
)
def test_a_host_that_does_not_answer_is_no_network(cache, before):
    code, output, _ = run("https://hub.invalid", cache, [hub_file("a")], connect_limit=0.2, before=before)
    assert (code, output) == (1, "no network (hub.invalid did not answer within 0.2 s)\n")


def test_behind_a_proxy_the_host_itself_is_not_tried(cache, monkeypatch):
    with hub.serving({"owner/repo/a": b"content"}) as endpoint:
        monkeypatch.setenv("http_proxy", endpoint)
        assert run("http://hub.invalid", cache, [hub_file("a")])[:2] == (0, "")


def test_a_process_that_is_ended_leaves_no_part_of_a_file(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    half_sent = threading.Event()
    with (
        hub.serving({"owner/repo/a": bytes(1_000_000)}, half_sent) as endpoint,
        start(endpoint, cache, [hub_file("a")]) as process,
    ):
        assert half_sent.wait(60)
        process.terminate()
        process.communicate()
    blobs = cache / "models--owner--repo" / "blobs"
    assert (process.returncode, list(blobs.iterdir())) == (1, [])
