"""Streams that whoever started the program has closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.project import ROOT

OPEN = """
import os, sys; from unet_trainer.system.standard_streams import open_closed_streams
open_closed_streams()
path = sys.argv[1]
with open(path, "w") as file:
    assert file.fileno() > 2, file.fileno()
    os.write(1, b"out"); os.write(2, b"err"); print("printed", flush=True); print("printed", file=sys.stderr, flush=True)
    file.write("whole" + sys.stdin.read())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_is_printed_to_a_closed_stream_does_not_end_up_in_a_file(closed, tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "file"
    script.write_text(OPEN)
    command = f"PYTHONPATH={ROOT} exec {sys.executable} {script} {path} {closed}"
    done = subprocess.run(["/bin/sh", "-c", command], input="", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "whole"
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "outprinted\n")
