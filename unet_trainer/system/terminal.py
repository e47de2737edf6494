"""What a terminal can show: colours, and how many columns it has. Anything else than a terminal gets plain text."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Literal

Colour = Literal["red", "green", "yellow", "blue", "grey", "bold"]
CODES: dict[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "grey": "90", "bold": "1"}
USUAL_COLUMNS, MIN_COLUMNS = 100, 20


def has_colours(stream: Any) -> bool:
    """Whether colours may be written there: it is a terminal, a capable one, and NO_COLOR (no-color.org) is not set."""
    try:
        is_terminal = bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False
    kind = os.environ.get("TERM") or ("windows" if "WT_SESSION" in os.environ else "dumb")
    return is_terminal and kind != "dumb" and not os.environ.get("NO_COLOR")


def painted(text: str, colour: Colour, stream: Any) -> str:
    """In a colour, where the stream takes them."""
    return f"\033[{CODES[colour]}m{text}\033[0m" if has_colours(stream) else text


def num_columns(stream: Any) -> int:
    """Of the terminal that the stream is; elsewhere a usual width."""
    try:
        is_terminal = bool((stream or sys.stdout).isatty())
    except (AttributeError, ValueError):
        is_terminal = False
    return max(MIN_COLUMNS, shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns) if is_terminal else USUAL_COLUMNS
