"""A web server of a folder, on the loopback, that can be told to misbehave."""

import contextlib
import html
import threading
import time
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helpers.ports import running


class ShardServer(ThreadingHTTPServer):
    """`faults`: what happens to the next requests of a range, in turn: a status (503), "cut" (half of the bytes come), "garbage"
    (other bytes), "whole" (the range is not heeded), "hang up" (no answer), or a number of seconds to wait (a float); `always`: to
    each of them. `head_faults`: statuses of the next answers to the question for a size. `delay`: seconds before an answer."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"
        self.faults, self.head_faults, self.always, self.delay = deque(), deque(), None, 0.0
        self.requests = Counter()  # path → number of requests with content
        self.num_bytes = 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path, wanted = self.server, self.server.folder / self.path.strip("/"), self.headers.get("Range")
        if path.is_dir():
            return self._send(
                200, "".join(f'<a href="{html.escape(one.name)}">x</a>\n' for one in sorted(path.iterdir())).encode()
            )
        if not path.is_file():
            return self._send(404)
        if server.head_faults and not wanted:
            return self._send(server.head_faults.popleft())
        content, status, fault = path.read_bytes(), 200, None
        if self.command == "GET":
            with server.lock:
                server.requests[self.path] += 1
                fault = (server.faults.popleft() if server.faults else server.always) if path.suffix == ".tar" else None
            time.sleep(server.delay + (fault if isinstance(fault, float) else 0))
        if isinstance(fault, int):
            return self._send(fault)
        if fault == "hang up":
            self.close_connection = True
            return None
        if wanted and fault != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        return self._send(
            status, bytes(len(content)) if fault == "garbage" else content, path.stat().st_size, fault == "cut"
        )

    def do_HEAD(self):
        self.do_GET()

    def _send(self, status, content=b"", size=0, is_cut=False):
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            if status == 206:
                self.send_header("Content-Range", f"bytes */{size}")
            self.end_headers()
            if self.command == "GET":
                with self.server.lock:
                    self.server.num_bytes += len(content)
                self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection |= is_cut

    def log_message(self, *arguments):
        pass


def serving(folder):
    return running(ShardServer(folder))
