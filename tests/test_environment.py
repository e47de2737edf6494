"""What importing the trainer sets in the environment of the process, before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.project import ROOT


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "10000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE"),
    ],
)
def test_waiting_openmp_threads_give_up_their_core_soon_unless_the_user_says_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "import train_unet, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*found.split(), "False"]
