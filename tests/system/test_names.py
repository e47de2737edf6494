"""Names of files with anything in them: shown harmlessly, and read back from tables as they were."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

from unet_trainer.system.names import csv_line, encodable, json_text, one_line, readable

NASTY = [
    " lead",
    "trail ",
    "cr\rname",
    "nl\nname",
    'qu"ote',
    "com,ma",
    "esc\x1b[31mred",
    os.fsdecode(b"bad\xe4name"),
    "ß→😀",
    "",
    '"',
]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\rb", "a\\rb"),
        ("bell\x07 back\x08", "bell\\x07 back\\x08"),
        ("csi\x9b31m", "csi\\x9b31m"),
        ("exe\u202egnp.", "exe\\u202egnp."),
        (os.fsdecode(b"bad\xe4name"), "bad\\xe4name"),
        ("lone\ud83dhalf", "lone\\ud83dhalf"),
        ("two\nlines\tand ✓ → ×", "two\nlines\tand ✓ → ×"),
    ],
)
def test_a_message_does_nothing_to_a_terminal(text, shown):
    assert readable(text) == shown
    shown.encode()


def test_a_name_stays_on_its_line():
    assert one_line("nl\nname\ttab") == "nl\\nname\\ttab"
    assert readable(one_line("nl\n\x1b")) == "nl\\n\\x1b"


def test_bars_keep_their_carriage_return():
    assert encodable("\r50%\x1b[A" + os.fsdecode(b"\xe4")) == "\r50%\x1b[A\\xe4"


def test_names_come_back_from_a_table():
    text = "".join(csv_line([name, index]) for index, name in enumerate(NASTY))
    stored = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    rows = list(csv.reader(io.StringIO(stored, newline="")))
    assert rows == [[name, str(index)] for index, name in enumerate(NASTY)]


def test_names_come_back_from_json_that_is_utf8():
    text = json_text({"names": NASTY}, indent=2)
    assert json.loads(text.encode()) == {"names": NASTY}
    assert "ß→😀" in text
