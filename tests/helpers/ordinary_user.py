"""The script in processes of their own: as any user, or as one who may not read and write everything.

Root may, whatever the permissions of a file say, unless it gives up the two capabilities for it.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from helpers.killed_runs import HANG_SECONDS, leave_out_pictures, start
from helpers.project import ROOT

VERSION = 0x20080522  # of the kernel's interface for capabilities
POWERS = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


def is_root():
    return hasattr(os, "geteuid") and os.geteuid() == 0


def give_up_powers():
    """In a child process. Raises OSError where the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    # The sets are effective, permitted and inheritable; twice 32 bits.
    header, sets = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        sets[index] &= ~POWERS
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _run(words, log, folder, as_user):
    from train_unet import main

    os.chdir(folder)
    if as_user and is_root():
        try:
            give_up_powers()
        except (OSError, AttributeError):
            os._exit(99)
    sys.stdout = sys.stderr = open(log, "a", buffering=1, errors="replace")  # noqa: SIM115, PTH123 (for the life of the process)
    leave_out_pictures(setattr)
    code = 1
    try:
        code = main([str(word) for word in words])
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def run_in_child(*words, as_user=False):
    """Exit code and all that was printed. Skips where root cannot give its powers away."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        log.touch()
        process = start(_run, words, log, place, as_user)
        process.join(HANG_SECONDS)
        if process.exitcode is None:
            process.kill()
            pytest.fail(f"it hangs: {log.read_text()}")
        if process.exitcode == 99:
            pytest.skip("root may read and write everything, and cannot give that up here")
        return process.exitcode, log.read_text()


def run_script(*words, interpreter=()):
    """By a Python interpreter of its own; its exit code and what it printed."""
    command = [sys.executable, *interpreter, str(ROOT / "train_unet.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr
