"""A child that ends with its parent, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helpers.killed_runs import wait_until
from helpers.project import ROOT
from unet_trainer.system.parent_process import VARIABLE, end_with_parent, ending_with_this_process

PARENT = """
import os, subprocess, sys; from unet_trainer.system.parent_process import ending_with_this_process
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=ending_with_this_process(os.environ))
print(child.pid, flush=True); child.wait()
"""
CHILD = """
import os, time; from unet_trainer.system import parent_process
parent_process.POLL_SECONDS = 0.05; parent_process.end_with_parent(); assert parent_process.VARIABLE not in os.environ
time.sleep(600)
"""


def is_alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    try:  # a zombie, whose parent does not wait for it, is dead
        with open(f"/proc/{number}/stat") as file:  # noqa: PTH123
            return file.read().split(") ")[1][0] != "Z"
    except OSError:
        return True


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child))


TORCHRUN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True); print(child.pid, flush=True); child.wait()
"""
RANK = """
import time; from unet_trainer.system import parent_process
parent_process.POLL_SECONDS = 0.05; parent_process.end_with_parent(is_torchrun=True); print("watching", flush=True); time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_process_of_a_job_ends_when_torchrun_is_killed():
    with subprocess.Popen([sys.executable, "-c", TORCHRUN, RANK], stdout=subprocess.PIPE, text=True, cwd=ROOT) as agent:
        rank = int(agent.stdout.readline())
        assert agent.stdout.readline() == "watching\n"
        assert is_alive(rank)
        agent.kill()
    wait_until(lambda: not is_alive(rank))


def test_a_process_that_others_started_is_left_alone(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(__import__("threading").enumerate())
    end_with_parent()
    assert set(__import__("threading").enumerate()) == before
    assert ending_with_this_process({"A": "b"}) == {"A": "b", VARIABLE: str(os.getpid())}
