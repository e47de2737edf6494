"""Who gets an answer from a local page, and what an error looks like. tests/inference/test_try_server.py has the attacks."""

from http import HTTPStatus

import pytest

from helpers.ports import running
from helpers.try_page import ask, refusal
from unet_trainer.config.errors import UserError
from unet_trainer.system.local_server import LocalHandler, LocalServer, RequestRefused


class Handler(LocalHandler):
    def get(self, path):
        if path == "user":
            raise UserError("mend it")
        if path == "fault":
            raise ZeroDivisionError
        if path == "memory":
            raise MemoryError
        if path:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "nothing here")
        self.send(b"hello", "text/plain")

    def explain(self, error):
        return (HTTPStatus.INSUFFICIENT_STORAGE, "too large") if isinstance(error, MemoryError) else None


@pytest.fixture(scope="module")
def server():
    with running(LocalServer(("127.0.0.1", 0), Handler)) as found:
        found.handle_error = lambda *_: None  # the terminal shows a fault; not that of a test
        yield found


def test_who_knows_the_key_gets_an_answer_that_nobody_keeps_or_frames(server):
    status, headers, content = ask(server, "GET", "")
    assert (status, content) == (200, b"hello")
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.key}/"
    assert not server.is_busy


def test_others_are_refused(server):
    assert [ask(server, "GET", path)[0] for path in ("/", "/wrong/")] == [403, 403]
    assert ask(server, "GET", "", Origin="http://evil.example")[0] == 403


def test_errors_have_a_status_and_a_sentence(server):
    assert refusal(ask(server, "GET", "user")) == (422, "mend it")
    assert refusal(ask(server, "GET", "memory")) == (507, "too large")
    assert refusal(ask(server, "GET", "elsewhere")) == (404, "nothing here")
    assert refusal(ask(server, "GET", "fault")) == (
        500,
        "a fault of the program (ZeroDivisionError); the terminal shows it",
    )
