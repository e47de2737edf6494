"""SIGINT, SIGTERM and SIGHUP are recorded, in the main thread alone, and the handlers of the caller are restored."""

import os
import signal
import subprocess
import sys

import pytest

from helpers.project import ROOT
from unet_trainer.system.signals import Interrupted, Signals

FORKING = """
import os, signal, sys, threading, time; from unet_trainer.system.concurrency import forked_map
from unet_trainer.system.signals import Interrupted, Signals
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # gets the signals that the main thread blocks
parent, (moment, number) = os.getpid(), sys.argv[1:]
os.register_at_fork(**{moment: lambda: os.getpid() == parent and (os.kill(parent, int(number)), time.sleep(0.02))})
with Signals():
    try: print("went on", list(forked_map(lambda item, read_stderr: item, [0, 1], 1)))
    except Interrupted as error: print(error)
"""

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


@pytest.mark.parametrize(
    ("moment", "number"),
    [("before", signal.SIGINT), ("after_in_parent", signal.SIGTERM), ("after_in_parent", signal.SIGHUP)],
)
def test_a_signal_during_a_fork_is_raised_after_it(moment, number):
    """What is raised among the functions that Python calls at a fork is ignored."""
    command = [sys.executable, "-c", FORKING, moment, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{number.name}\n", "")
