"""Names of files as text: a name may hold any byte but / and NUL. On the terminal it is shown without acting on it, in tables and
JSON files it comes back as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

UNDECODED = re.compile("[\udc80-\udcff]")  # bytes of a file's name that are not UTF-8, as Python holds them
# What a terminal obeys instead of showing it (escapes, carriage returns, marks that turn the direction of text), but no line
# breaks and tabs; and what no encoding has.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
NEEDS_QUOTES = re.compile('[,"\r\n]')


def readable(text: str) -> str:
    """A message with what a terminal would obey as \\x1b, and with bytes that are not UTF-8 as \\xe4."""
    return UNSHOWABLE.sub(_escaped, text)


def encodable(text: str) -> str:
    """As readable, for text that moves the cursor on purpose, as progress bars do: only what no encoding has is changed."""
    return UNDECODED.sub(_escaped, text)


def one_line(name: str) -> str:
    """A name in a message of lines. What else cannot be shown is escaped when the message is printed."""
    return name.replace("\n", "\\n").replace("\t", "\\t")


def _escaped(found: re.Match[str]) -> str:
    number = ord(found.group())
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00
    return {0x0D: "\\r"}.get(number, f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")


def json_text(content: Any, **options: Any) -> str:
    """JSON in which a name that is not UTF-8 has escapes (\\udce4), from which json.loads makes the same name again."""
    return json.dumps(content, ensure_ascii=False, **options).encode("utf-8", "backslashreplace").decode()


def csv_line(cells: Iterable[object]) -> str:
    """A row with its line break. Before Python 3.13 the csv module does not quote a \\r, and then does not read it back."""
    return ",".join(_quoted(str(cell)) for cell in cells) + "\n"


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if NEEDS_QUOTES.search(cell) else cell
