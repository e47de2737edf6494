"""Worker processes: started all or none, deaf to signals, gone when the training process is; and messages that never wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.project import ROOT
from helpers.samples import build_dataset, epoch_digest, keep, make_loader
from unet_trainer.loading import worker_backends as room
from unet_trainer.loading.dataset import MAX_PIECES, SegmentationDataset
from unet_trainer.loading.worker_backends import RESULT, TASK, WorkerError
from unet_trainer.loading.worker_pool import MAX_OPEN_PIECES

PIPE_BYTES = 65536  # that Linux holds for a reader


def test_signals_are_the_training_process_own_affair(tiny_data):
    """A terminal or a cluster sends them to all processes at once; the step is still to be finished."""
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    batches = loader.epoch(0)
    next(batches)
    workers = loader.pool.hands.workers
    time.sleep(0.2)
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
    assert len(list(batches)) == 4
    assert len(keep(loader.epoch(1))) == 5
    assert all(worker.is_alive() for worker in workers)


def test_workers_end_when_the_training_process_is_killed(tiny_data):
    script = (
        "import multiprocessing, sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; from helpers.samples import build_dataset; from test_loader import load\n"
        "loader = make_loader(build_dataset(Path(sys.argv[3])), 2, 2, shuffle=True)\n"
        "next(loader.epoch(0)); print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "batches = loader.epoch(1); next(batches); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(ROOT), str(ROOT / "tests"), str(tiny_data)], stdout=subprocess.PIPE, text=True
    )
    workers = [int(word) for word in child.stdout.readline().split()]
    assert len(workers) == 2
    child.kill()
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() and "Z" not in state(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives the training process"
        time.sleep(0.05)


def state(worker):
    try:
        return Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_messages_never_wait_for_room():
    """A full pipe at both ends would be the end of it."""
    assert MAX_OPEN_PIECES * max(TASK.size, RESULT.size) < PIPE_BYTES
    assert MAX_PIECES * max(TASK.size, RESULT.size) < 4096  # what a pipe holds when a user has very many of them
    assert max(TASK.size, RESULT.size) <= 4096 // 2  # whole or not there


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BlockingIOError(11, "Resource temporarily unavailable")])
def test_workers_that_could_be_started_are_not_left_over_when_others_could_not(error, tiny_data, monkeypatch):
    start, started = multiprocessing.context.ForkProcess.start, []

    def start_two(self):
        if len(started) == 2:
            raise error
        start(self)
        started.append(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start_two)
    loader = make_loader(build_dataset(tiny_data), 2, 4, shuffle=True)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else WorkerError
    with pytest.raises(expected) as caught:
        loader.prepare(0)
    assert expected is KeyboardInterrupt or "worker process 3 of 4 could not be started (Resource" in str(caught.value)
    assert len(started) == 2
    assert not any(worker.is_alive() for worker in started)
    monkeypatch.undo()
    assert epoch_digest(loader, 0) == epoch_digest(make_loader(loader.dataset, 2, 0, shuffle=True), 0)
    assert sorted(loader.pool.free) == list(range(len(loader.pool.slots.arrays)))


def test_a_worker_that_cannot_be_killed_does_not_keep_the_process(tiny_data, monkeypatch):
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True)
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: time.sleep(3600))
    loader.prepare(0)
    (worker,) = loader.pool.hands.workers
    pid = worker.pid
    time.sleep(0.2)
    monkeypatch.setattr(type(worker), "kill", lambda self: None)
    monkeypatch.setattr(room, "CLOSE_SECONDS", 0.1)
    loader.pool.close()
    assert worker not in multiprocessing.active_children()  # nobody waits for it any more
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_in_a_process_that_may_have_none_threads_do_the_work(tiny_data, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    assert epoch_digest(loader, 0) == epoch_digest(make_loader(loader.dataset, 2, 0, shuffle=True), 0)
    assert isinstance(loader.pool.hands, room.ThreadBackend)
    loader.pool.close()
