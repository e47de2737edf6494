"""What `try` and `watch` share: the address, the browser, the end."""

from __future__ import annotations

import os
import socket
import webbrowser
from types import SimpleNamespace

import pytest

from unet_trainer.commands import local_pages
from unet_trainer.commands.local_pages import bind, check_port, open_browser, say_address, serve
from unet_trainer.config.errors import UserError
from unet_trainer.system.console import Console
from unet_trainer.system.local_server import LocalHandler, LocalServer

# The browser


class Window:
    """Of webbrowser's kind that opens a window and returns."""

    def __init__(self):
        self.opened = []

    def open(self, url):
        self.opened.append(url)
        return True


@pytest.fixture
def desktop(monkeypatch):
    """A terminal on a desktop with a browser."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(local_pages, "sys", SimpleNamespace(platform="linux", stdout=SimpleNamespace(isatty=lambda: True)))
    window = Window()
    monkeypatch.setattr(webbrowser, "get", lambda: window)
    return window


def test_on_a_desktop_the_page_is_opened(desktop):
    assert open_browser("http://127.0.0.1:1/") is True
    assert desktop.opened == ["http://127.0.0.1:1/"]


@pytest.mark.parametrize(("name", "value"), [("DISPLAY", ""), ("SSH_CONNECTION", "10.0.0.1 5 10.0.0.2 22")])
def test_without_a_screen_of_ones_own_it_is_not(desktop, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert open_browser("http://127.0.0.1:1/") is False
    assert desktop.opened == []


def test_a_text_browser_is_not_started(desktop, monkeypatch):
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("w3m"))
    assert open_browser("http://127.0.0.1:1/") is False


def test_output_that_is_read_by_a_program_opens_nothing(desktop, monkeypatch):
    monkeypatch.setattr(local_pages.sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert open_browser("http://127.0.0.1:1/") is False


def test_no_browser_is_no_error(desktop, monkeypatch):
    def get():
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", get)
    assert open_browser("http://127.0.0.1:1/") is False


# The end


def test_what_is_being_computed_does_not_delay_the_end(monkeypatch, capsys):
    server = LocalServer(("127.0.0.1", 0), LocalHandler)
    monkeypatch.setattr(server, "serve_forever", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(LocalServer, "is_busy", True)
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert serve(server, Console()) == 0
    assert codes == [0]
    assert capsys.readouterr().out == "\nStopped.\n"


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: cannot be used \(.*\); leave it out for a free one"):
            bind("127.0.0.1", port, lambda address: LocalServer(address, LocalHandler))


def test_an_address_that_is_not_this_machines_is_named():
    with pytest.raises(UserError, match=r"--host 192\.0\.2\.1: cannot be used"):
        bind("192.0.2.1", 0, lambda address: LocalServer(address, LocalHandler))


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_no_port_is_refused(port):
    with pytest.raises(UserError, match=f"--port: got {port}; need a number from 1 to 65535"):
        check_port(port)


def test_a_page_for_other_machines_is_warned_about(capsys):
    with bind("127.0.0.1", 0, lambda address: LocalServer(address, LocalHandler)) as server:
        say_address(Console(), server, "127.0.0.1", "see it")
        assert capsys.readouterr().out == f"Open {server.url}\nCtrl-C ends it.\n"
        say_address(Console(), server, "0.0.0.0", "see it")
        assert capsys.readouterr().out.startswith(
            "Warning: --host 0.0.0.0: whoever has the address below can see it, over a connection"
        )
