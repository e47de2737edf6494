"""Pages that are served to this machine alone: `try`, `watch`. Standard library only; knows nothing of what is served.

KEY is random and part of the address that the command prints: who does not know it, another user of the machine or a
page of another site, gets nothing. Host and Origin are checked besides, against pages whose host name is made to lead
here."""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import re
import secrets
import socket
import socketserver
import sys
import time
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from unet_trainer.config.errors import UserError
from unet_trainer.system.console import EXIT_DONE, Console

SOCKET_SECONDS = 30  # without a byte
CHUNK = 2**20
LINGER_SECONDS = 60  # for which a refused upload is read on
LOCALHOST = "127.0.0.1"
LOOPBACK_NAMES = frozenset({"localhost", LOCALHOST, "::1"})
HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?"
)  # and nothing before an @
JSON_TYPE, HTML_TYPE = "application/json", "text/html; charset=utf-8"


class RequestRefused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class LocalServer(ThreadingHTTPServer):
    """Answers below a random KEY."""

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[LocalHandler]) -> None:
        """Raises OSError if the address cannot be used."""
        self.key = secrets.token_urlsafe(16)
        self.names = LOOPBACK_NAMES if is_loopback(address[0]) else LOOPBACK_NAMES | {address[0], socket.gethostname()}
        self.takes_any_ip = not is_loopback(address[0])
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the name lookup of HTTPServer, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        host = self.server_name
        host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/{self.key}/"

    @property
    def is_busy(self) -> bool:
        """Whether something is being computed that cannot be stopped."""
        return False

    def is_known_host(self, host: str) -> bool:
        """Whether a Host header names this server. Its port is free: a tunnel may have another.

        An address in digits cannot have been made to lead here by a name server.
        """
        found = HOST.fullmatch(host)
        name = "" if found is None else (found["address"] or found["name"]).lower()
        return name in {known.lower() for known in self.names} or (self.takes_any_ip and _is_ip(name))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error; anything else is one of ours and shown in full."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """A subclass has `get`, which sends the answer to what follows the key in the path."""

    server: LocalServer
    timeout = SOCKET_SECONDS
    server_version, sys_version = "unet-trainer", ""
    error_message_format, error_content_type = (
        "not a request of this page\n",
        "text/plain",
    )  # of another method, or no HTTP

    def get(self, path: str) -> None:
        raise NotImplementedError

    def explain(self, error: Exception) -> tuple[HTTPStatus, str] | None:
        """Of an error that is not a fault of the program."""
        return None

    def do_GET(self) -> None:  # as the base class has it
        self.answer(self.get)

    def log_message(self, format: str, *values: Any) -> None:
        """Requests are not logged: the terminal has the address, and names of files are nobody's business."""

    def answer(self, respond: Callable[[str], None]) -> None:
        try:
            respond(self._checked_path())
        except RequestRefused as refusal:
            self._send_error(refusal.status, str(refusal))
        except UserError as error:
            self._send_error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            explained = self.explain(error)
            fault = f"a fault of the program ({type(error).__name__}); the terminal shows it"
            self._send_error(*(explained or (HTTPStatus.INTERNAL_SERVER_ERROR, fault)))
            if explained is None:
                raise

    def _checked_path(self) -> str:
        """What follows the key in the path; raises RequestRefused."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.is_known_host(host):
            raise RequestRefused(
                HTTPStatus.MISDIRECTED_REQUEST, f"Host: {host[:100]!r} is not the address of this page"
            )
        is_foreign = origin is not None and origin.partition("://")[2] != host
        is_foreign |= self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        is_link = (
            self.command == "GET" and self.headers.get("Sec-Fetch-Mode") == "navigate"
        )  # e.g. in a terminal within a browser
        if is_foreign and not is_link:
            raise RequestRefused(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        _, key, *rest = f"{self.path.partition('?')[0]}/".split("/", 2)
        if not secrets.compare_digest(key.encode(), self.server.key.encode()):
            raise RequestRefused(
                HTTPStatus.FORBIDDEN, "open the address that the command printed, with all that follows the port"
            )
        return "".join(rest).removesuffix("/")

    def _send_error(self, status: HTTPStatus, sentence: str) -> None:
        """What the browser still sends is read before the connection is closed: else it is reset, and the answer lost
        with it."""
        self.send(json.dumps({"error": sentence}).encode(), JSON_TYPE, status=status)
        if self.command == "POST":
            deadline = time.monotonic() + LINGER_SECONDS
            with contextlib.suppress(OSError):  # the browser is gone
                self.connection.shutdown(socket.SHUT_WR)
                while time.monotonic() < deadline and self.rfile.read1(CHUNK):
                    pass

    def send(
        self,
        content: bytes,
        content_type: str,
        headers: dict[str, str] | None = None,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def is_loopback(address: str) -> bool:
    """Whether it leads to this machine alone."""
    return address == "localhost" or (_is_ip(address) and ipaddress.ip_address(address).is_loopback)


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def content_security_policy(page: str) -> str:
    """Allows the page its own style and script, by their digests, and requests to this server; nothing else."""
    style, script = (re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)[0] for name in ("style", "script"))
    return (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


def digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


Server = TypeVar("Server", bound=LocalServer)

# What the commands that serve a page share: the address, the browser, Ctrl-C.


def add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="of the page; a free one if left out")
    what = f"other machines see the page there; {LOCALHOST}: this machine alone"
    parser.add_argument("--host", default=LOCALHOST, metavar="ADDRESS", help=what)
    parser.add_argument("--no-browser", action="store_true", help="print the address only, do not open it")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text}; need a number from 1 to 65535, or leave it out for a free one")
    return int(text)


def bind(given: argparse.Namespace, make: Callable[[tuple[str, int]], Server]) -> Server:
    """The server at the address of the page options. Raises UserError if it cannot be used."""
    try:
        return make((given.host, given.port))
    except OSError as error:
        is_host = given.port == 0 or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        key = f"--host {given.host}" if is_host else f"--port {given.port}"
        hint = "leave it out for this machine alone" if is_host else "leave it out for a free one"
        raise UserError(f"{key}: cannot be used ({error.strerror}); {hint}") from None


def serve(server: LocalServer, given: argparse.Namespace, console: Console, what_others_can: str) -> int:
    """Says the address, opens it in a browser and serves until Ctrl-C."""
    if not is_loopback(given.host):
        reached = f"--host {given.host}: whoever has the address below can {what_others_can}"
        console.warn(f"{reached}, over a connection that is not encrypted")
    console.say(f"Open {server.url}\nCtrl-C ends it.")
    if not given.no_browser:
        _open_browser(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        console.say("\nStopped.")
    server.server_close()
    if server.is_busy:  # what is being computed cannot be stopped, and would be waited for
        sys.stderr.flush()
        os._exit(EXIT_DONE)
    return EXIT_DONE


def _open_browser(url: str) -> None:
    """If there is surely a browser with a window: a text browser would take the terminal."""
    has_display = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if has_display and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ:
        with contextlib.suppress(webbrowser.Error, OSError):
            browser = webbrowser.get()
            if type(browser) is not webbrowser.GenericBrowser:
                browser.open(url)
