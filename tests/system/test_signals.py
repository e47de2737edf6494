"""SIGINT and SIGTERM are noted, in the main thread alone, and what listened before listens again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from helpers.project import ROOT
from unet_trainer.system.signals import Interrupted, Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_raised_where_it_is_asked_for(number):
    with Signals() as signals, signals.patiently():
        signals.check()
        assert not signals.is_stopping()
        os.kill(os.getpid(), number)
        assert signals.is_stopping()
        with pytest.raises(Interrupted, match=number.name) as caught:
            signals.check()
    assert caught.value.signal_number == number
    assert isinstance(caught.value, KeyboardInterrupt)  # what a notebook expects


def test_a_second_sigint_does_not_wait():
    with Signals() as signals, signals.patiently():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.is_stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_after_sigint_still_lets_the_step_finish():
    with Signals() as signals, signals.patiently():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.is_stopping()


def test_handlers_of_the_caller_come_back():
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_leaves_the_handlers_alone():
    seen = []

    def enter():
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGINT), signals.is_stopping()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGINT), False)]


@pytest.mark.parametrize("is_saving", [False, True])
def test_leaving_does_not_wait_for_the_disk_nor_end_in_an_abort(is_saving):
    """A thread inside torch would abort the process (134) while the interpreter is torn down."""
    script = (
        "import sys, threading; from pathlib import Path; import torch\n"
        "from unet_trainer.runs.checkpoint_file import write_checkpoint; from unet_trainer.system.background_writer import BackgroundWriter; from unet_trainer.system.signals import leave\n"
        "saver, state = BackgroundWriter(), {'config': {}, 'model': {str(n): torch.zeros(10_000) for n in range(3000)}}\n"
        "begun = threading.Event()\n"
        "def write():\n"
        "    begun.set()\n"
        "    for n in range(200): write_checkpoint(Path(sys.argv[1]) / f'{n}.pt', state)\n"
        "saver.submit({'last': write} if sys.argv[2] == 'True' else {'last': begun.set}); begun.wait()\n"
        "if sys.argv[2] == 'False': saver.wait()\n"
        "print('out', flush=False); leave(130)"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script, folder, str(is_saving)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (130, "out\n", "")


def test_an_interpreter_that_ends_lets_a_save_end(tmp_path):
    script = (
        "import sys, threading, time; from pathlib import Path; from unet_trainer.system.background_writer import BackgroundWriter\n"
        "begun = threading.Event()\n"
        "def write(): begun.set(); time.sleep(0.5); Path(sys.argv[1]).write_text('whole')\n"
        "BackgroundWriter().submit({'last': write}); begun.wait(); raise ValueError('of another part')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ValueError: of another part" in done.stderr
    assert (tmp_path / "file").read_text() == "whole"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_outside_of_training_a_signal_ends_what_is_under_way(number):
    with pytest.raises(Interrupted, match=number.name), Signals():
        os.kill(os.getpid(), number)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
