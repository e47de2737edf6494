"""SIGINT, SIGTERM and SIGHUP are recorded, in the main thread alone, and the handlers of the caller are restored."""

import os
import signal
import subprocess
import sys

import pytest

from helpers.project import ROOT
from unet_trainer.system.signals import Interrupted, Signals

EXIT = """
import atexit, sys, threading; from unet_trainer.system.concurrency import start_thread
from unet_trainer.system.signals import exit_process
has_begun = threading.Event()
def write(): has_begun.set(); sys.argv[1] == "stuck" and threading.Event().wait()
writing = start_thread(write, "writes", is_awaited=True); has_begun.wait()
if sys.argv[1] != "stuck": writing.result(); threading.Event().wait(0.2)
atexit.register(print, "torn down", flush=True)
print("out"); print("err", file=sys.stderr); exit_process(130)
"""


@pytest.mark.parametrize(("disk", "printed"), [("stuck", "out\n"), ("done", "out\ntorn down\n")])
def test_exit_does_not_tear_the_interpreter_down_while_a_file_is_written(disk, printed):
    """It would wait for the disk, and a thread inside torch would abort the process (134)."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT, disk], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "err\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_not_deferred_is_raised_at_once(number):
    with pytest.raises(Interrupted, match=number.name), Signals():
        os.kill(os.getpid(), number)


def test_a_sighup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
