"""The Hugging Face hub without a network: its cache as its client lays it out, and servers that answer, refuse or stay silent."""

import contextlib
import hashlib
import http.server
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants

from helpers.ports import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of a branch


def isolate(monkeypatch, folder):
    """Caches inside the folder, and no setting of the machine that runs the test; returns the hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    proxies = [name for name in os.environ if name.lower().endswith("_proxy")]
    for name in [*proxies, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    return folder / "hub"


def use(monkeypatch, endpoint):
    """The hub's client makes the second of the first when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def write_cached(cache, repo_id, revision, name, content):
    """A file of a repository; revision None: of its main branch."""
    folder = Path(cache) / f"models--{repo_id.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    pointer = folder / "snapshots" / (revision or COMMIT) / name
    for path in (blob, pointer, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    if revision is None:
        (folder / "refs" / "main").write_text(COMMIT)
    return blob


@contextlib.contextmanager
def serving(files):
    """A hub with these files, {"owner/repo/name": bytes}; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_content=False)

        def do_GET(self):
            self.answer(with_content=True)

        def answer(self, with_content):
            path = urlsplit(self.path).path  # a proxy is asked for whole addresses
            repo, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            content = files.get(f"{repo}/{name}")
            self.send_response(404 if content is None else 200)
            self.send_header("X-Repo-Commit", COMMIT if revision == "main" else revision)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if content is not None and with_content:
                self.wfile.write(content)

        def log_message(self, *values):
            pass

    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextlib.contextmanager
def silent_server():
    """Accepts connections and never answers; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def refusing_address():
    """Where no one listens."""
    with silent_server() as address:
        return address
