"""A web server of a folder, on the loopback, that can be told to misbehave."""

import contextlib
import html
import threading
import time
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from helpers.ports import running


class ShardServer(ThreadingHTTPServer):
    """`faults`: what happens to the next requests of a range, in turn: a status (503), "cut" (half of the bytes come), "garbage"
    (other bytes), "whole" (the range is not heeded), "hang up" (no answer), or a number of seconds to wait (a float)."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.faults: deque[object] = deque()
        self.head_faults: deque[int] = (
            deque()
        )  # statuses of the next answers to the question for a size, asked with HEAD or GET
        self.every: tuple[int, object] | None = None  # (n, fault): of every n-th such request
        self.delay = 0.0  # seconds before each such answer
        self.requests: Counter[str] = Counter()  # path → number of requests with content
        self.num_bytes = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self) -> object:
        with self.lock:
            if self.faults:
                return self.faults.popleft()
            return self.every[1] if self.every and sum(self.requests.values()) % self.every[0] == 0 else None


class _Handler(BaseHTTPRequestHandler):
    server: ShardServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        path = self.server.folder / self.path.strip("/")
        if path.is_dir():
            links = "".join(f'<a href="{html.escape(one.name)}">x</a>\n' for one in sorted(path.iterdir()))
            return self._send(200, links.encode(), with_content)
        if not path.is_file():
            return self._send(404, b"", with_content)
        if self.server.head_faults and not self.headers.get("Range"):
            return self._send(self.server.head_faults.popleft(), b"", with_content)
        content, status = path.read_bytes(), 200
        size, wanted = len(content), self.headers.get("Range")
        fault = None
        if with_content:
            with self.server.lock:
                self.server.requests[self.path] += 1
            fault = self.server.next_fault() if path.suffix == ".tar" else None
            time.sleep(self.server.delay)
        if isinstance(fault, int):
            return self._send(fault, b"", with_content)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "hang up":
            self.close_connection = True
            return None
        if wanted and fault != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = int(last) + 1 if last else size
            content, status = content[int(first) : stop], 206
        if fault == "garbage":
            content = bytes(len(content))
        return self._send(status, content, with_content, f"bytes */{size}", is_cut=fault == "cut")

    def _send(
        self, status: int, content: bytes, with_content: bool, content_range: str = "", is_cut: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            if status == 206:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            if with_content:
                with self.server.lock:
                    self.server.num_bytes += len(content)
                self.wfile.write(content[: len(content) // 2] if is_cut else content)
        if is_cut:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


def serving(folder: Path):
    return running(ShardServer(folder))
