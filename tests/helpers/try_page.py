"""A running server of `try` and requests to it."""

import contextlib
import http.client
import json
import struct

from helpers.ports import running
from unet_trainer.inference.try_server import TryServer


@contextlib.contextmanager
def serving(predictor, pairs=(), note=""):
    with running(TryServer(("127.0.0.1", 0), predictor, pairs, note)) as server:
        yield server
    server.worker.shutdown()


def ask(server, method, path, body=None, **headers):
    """Status, headers and content of the answer; `path` follows the key unless it starts with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(
            method,
            path if path.startswith("/") else f"/{server.key}/{path}",
            body,
            {name.replace("_", "-"): v for name, v in headers.items()},
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def refusal(answer):
    """Status and sentence of an answer."""
    status, headers, content = answer
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(content)["error"]


def parse_result(content):
    """Header and parts of PageResult.to_bytes."""
    length = struct.unpack_from("<I", content)[0]
    header = json.loads(content[4 : 4 + length])
    parts, start = {}, 4 + length
    for name, size in header["parts"].items():
        parts[name] = content[start : start + size]
        start += size
    assert start == len(content)
    return header, parts
