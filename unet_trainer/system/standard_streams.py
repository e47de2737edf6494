"""Standard input, output and error, where whoever started the program has closed them (>&-).

The system gives the number of a closed stream to the next file that is opened: what a library prints would end up in a checkpoint.
"""

from __future__ import annotations

import os
import sys

MODES = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}


def open_closed_streams() -> None:
    """Closed ones lead nowhere from here on. Called before any file is opened for long."""
    for name, (number, mode) in MODES.items():
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
