"""What the commands share that serve a page to this machine: the address, the browser, Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Callable
from typing import TypeVar

from unet_trainer.config.errors import UserError
from unet_trainer.system.console import EXIT_DONE, Console
from unet_trainer.system.local_server import LocalServer, is_loopback

LOCALHOST = "127.0.0.1"
Server = TypeVar("Server", bound=LocalServer)


def add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the page; a free one if left out")
    parser.add_argument(
        "--host",
        default=LOCALHOST,
        metavar="ADDRESS",
        help=f"other machines see the page there; {LOCALHOST}: this machine alone",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address only, do not open it")


def check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise UserError(f"--port: got {port}; need a number from 1 to 65535, or leave it out for a free one")


def bind(host: str, port: int, make: Callable[[tuple[str, int]], Server]) -> Server:
    """The server at this address. Raises UserError if it cannot be used."""
    try:
        return make((host, port))
    except OSError as error:
        key = f"--host {host}" if port == 0 else f"--port {port}"
        hint = "leave it out for this machine alone" if port == 0 else "leave it out for a free one"
        raise UserError(f"{key}: cannot be used ({error.strerror}); {hint}") from None


def say_address(console: Console, server: LocalServer, host: str, what_others_can: str) -> None:
    if not is_loopback(host):
        console.warn(f"--host {host}: whoever has the address below can {what_others_can}, over a connection that is not encrypted")
    console.say(f"Open {server.url}")
    console.say("Ctrl-C ends it.")


def open_browser(url: str) -> bool:
    """Opens the page if there is surely a browser with a window; a text browser would take the terminal."""
    has_display = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not has_display or not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    try:
        browser = webbrowser.get()
        return type(browser) is not webbrowser.GenericBrowser and browser.open(url)
    except (webbrowser.Error, OSError):
        return False


def serve(server: LocalServer, console: Console) -> int:
    """Until Ctrl-C."""
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        console.say("\nStopped.")
    server.server_close()
    if server.is_busy:  # what is being computed cannot be stopped, and would be waited for
        sys.stderr.flush()
        os._exit(EXIT_DONE)
    return EXIT_DONE
