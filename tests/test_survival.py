"""Whatever kills a run, it goes on where it was and ends with the same bits as a run that nobody touched."""

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from helpers.killed_runs import HANG_SECONDS, NUM_MOMENTS, start, train_once
from helpers.runs import assert_same_run
from unet_trainer.system.atomic_files import DRAFT
from unet_trainer.training.checkpoint import read_run

# Saves after every step, with all that has a state: averages, accumulation, clipping, warm-up.
BUSY = {"ema_decay": 0.9, "grad_clip": 1.0, "warmup_epochs": 1, "batch_size": 2, "checkpoint_minutes": 1e-6}


@pytest.fixture
def config(tiny_config):
    return {**tiny_config, **BUSY, "accumulation_steps": 2, "num_epochs": 2, "resume": "auto", "run_name": "run"}


def finish(process):
    process.join(HANG_SECONDS)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


train_small = partial(train_once, with_small_network=True)


def run_straight(config, tmp_path):
    """The folder of a run that nobody touched."""
    log = tmp_path / "straight.log"
    assert finish(start(train_small, {**config, "run_name": "straight"}, log)) == 0, log.read_text()
    return Path(config["checkpoint_dir"]) / "straight"


def position(folder):
    """Epochs and batches that are in the state, which must be whole."""
    content = read_run(folder, lambda text: None)
    return content["epoch"], content["batch"]


def assert_same(folder, straight):
    assert_same_run(folder, straight)
    assert not [path for path in folder.rglob(".*") if DRAFT.fullmatch(path.name)], "a draft was left behind"


@pytest.mark.parametrize(
    "moments",
    [
        range(4, NUM_MOMENTS + 1, 4),
        pytest.param(range(1, NUM_MOMENTS + 1), marks=pytest.mark.soak),
    ],
    ids=["some", "all"],
)
def test_a_crash_at_any_moment_of_a_save_loses_nothing(moments, config, tmp_path):
    """One run, crashed at each moment in turn, first without and then with an earlier checkpoint."""
    straight = run_straight(config, tmp_path)
    log = tmp_path / "crashed.log"
    folder = straight.parent / "run"
    reached = (0, 0)
    for moment in [3, 12, *moments]:  # 12: the last one when there is no earlier file to keep
        assert finish(start(train_small, config, log, moment)) == 9, log.read_text()
        if reached > (0, 0) or (folder / "last.pt").exists():  # what was once saved is never gone
            assert position(folder) >= reached
            reached = position(folder)
    assert reached > (0, 0)
    assert finish(start(train_small, config, log)) == 0, log.read_text()
    assert_same(folder, straight)


def test_kills_at_random_moments_change_no_bit(config, tmp_path):
    """See test_soak.py for more of them."""
    config |= {"use_amp": True, "num_workers": 1}
    straight = run_straight(config, tmp_path)
    log, chooser = tmp_path / "killed.log", random.Random(5)
    for _ in range(4):
        process = start(train_small, config, log)
        time.sleep(chooser.uniform(0.1, 1.0))
        process.kill()
        assert finish(process) in (-signal.SIGKILL, 0)
    assert finish(start(train_small, config, log)) == 0, log.read_text()
    assert_same(straight.parent / "run", straight)
