"""Run as a process of its own, which can be ended at a time limit: downloads weight files into the usual caches.

python fetch_weights.py REQUEST, where REQUEST is JSON. Prints why it failed, in one clause, and exits with 1; prints nothing
otherwise. Imports nothing of this project, and torch only where a file is not on the hub, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit


def main(request: dict[str, Any]) -> None:
    check_connection(request["connect_to"], request["connect_limit"])
    try:
        for file in request["hub_files"]:
            download_from_hub(**file, endpoint=request["endpoint"], cache_dir=request["cache_dir"])
        for file in request["url_files"]:
            download_from_url(**file)
    except Exception as error:  # whatever it is, the run goes on without these weights
        give_up(f"the download failed ({describe(error)})")


def check_connection(url: str, limit: float) -> None:
    """Gives up if the host cannot be resolved and connected to within `limit` seconds. A proxy may reach what we cannot."""
    target, proxies = urlsplit(url), urllib.request.getproxies()
    if target.scheme in proxies or "all" in proxies:
        return
    host, port = target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
    no_answer = f"no network ({host} did not answer within {limit:g} s)"
    watchdog = threading.Timer(limit, give_up, [no_answer])  # resolving a name has no time limit of its own
    watchdog.daemon = True
    watchdog.start()
    try:
        socket.create_connection((host, port), timeout=limit).close()
    except TimeoutError:
        give_up(no_answer)
    except OSError as error:
        give_up(f"no network ({host}: {error.strerror or error})")
    watchdog.cancel()


def download_from_hub(repo_id: str, revision: str | None, names: list[str], endpoint: str, cache_dir: str) -> None:
    """The first of the names that the repository has."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in names:
        try:
            hf_hub_download(repo_id, name, revision=revision, endpoint=endpoint, cache_dir=cache_dir)
            return
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) or name == names[-1]:  # the former: the hub did not answer
                raise


def download_from_url(url: str, path: str) -> None:
    from torch.hub import download_url_to_file

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    download_url_to_file(url, path, progress=False)


def describe(error: BaseException) -> str:
    """The error at the root of the chain, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:160]


def give_up(reason: str) -> NoReturn:
    """From any thread."""
    print(reason, flush=True)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that parts of files are deleted
    main(json.loads(sys.argv[1]))
