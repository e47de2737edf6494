"""Worker processes: all start or none, ignore signals, end with the training process; their messages never block."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.samples import build_dataset, epoch_digest, keep, make_loader
from unet_trainer.loading import worker_pool
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.worker_pool import WorkerError

PIPE_BYTES = 65536  # capacity of a pipe on Linux


def wait_until(is_true):
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, "waited for 30 s"
        time.sleep(0.01)


def ignores_sigterm(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_workers_ignore_signals(tiny_data):
    """A terminal or a scheduler sends them to the whole process group; the training process still needs batches."""
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    batches = loader.epoch(0)
    next(batches)
    workers = loader.pool.backend.workers
    wait_until(lambda: all(ignores_sigterm(worker.pid) for worker in workers))
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
    assert len(list(batches)) == 4
    assert len(keep(loader.epoch(1))) == 5
    assert all(worker.is_alive() for worker in workers)


def take_batches_for_ever(data, pids):
    loader = make_loader(build_dataset(data), 2, 2, shuffle=True)
    batches = loader.epoch(0)
    next(batches)
    pids.send([worker.pid for worker in loader.pool.backend.workers])
    time.sleep(600)


def test_workers_end_when_the_training_process_is_killed(tiny_data):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    trainer = context.Process(target=take_batches_for_ever, args=(tiny_data, sender))
    trainer.start()
    try:
        assert receiver.poll(30)
        workers = receiver.recv()
        assert len(workers) == 2
        assert all(state(worker) != "Z" for worker in workers)
    finally:
        trainer.kill()
        trainer.join()
    try:
        wait_until(lambda: all(state(worker) == "Z" for worker in workers))
    finally:
        for worker in workers:
            if state(worker) != "Z":
                os.kill(worker, signal.SIGKILL)


def state(worker):
    """Letter of the process state; Z for one that has ended."""
    try:
        return Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BlockingIOError(11, "Resource temporarily unavailable")])
def test_started_workers_end_when_another_cannot_be_started(error, tiny_data, monkeypatch):
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
    assert sorted(loader.pool.free) == list(range(len(loader.pool.buffers.arrays)))


def test_a_worker_that_cannot_be_killed_does_not_block_the_exit(tiny_data, monkeypatch):
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True)
    monkeypatch.setattr(SegmentationDataset, "timed_sample", lambda self, key: time.sleep(3600))
    loader.prepare(0)
    (worker,) = loader.pool.backend.workers
    pid = worker.pid
    wait_until(lambda: loader.pool.buffers.in_progress[0, 0] >= 0)
    monkeypatch.setattr(type(worker), "kill", lambda self: None)
    monkeypatch.setattr(worker_pool, "JOIN_SECONDS", 0.1)
    loader.pool.close()
    assert worker not in multiprocessing.active_children()  # the interpreter would join it when it exits
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_daemonic_process_uses_threads(tiny_data, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    assert epoch_digest(loader, 0) == epoch_digest(make_loader(loader.dataset, 2, 0, shuffle=True), 0)
    assert isinstance(loader.pool.backend, worker_pool.ThreadBackend)
    loader.pool.close()


def test_a_signal_while_a_worker_starts_reaches_this_process_only(monkeypatch, capfd):
    """The worker has this process's handler until it ignores signals."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(prctl=lambda *given: os.kill(os.getpid(), signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, lambda *given: os.write(2, b"handled"))
    try:
        backend = worker_pool.ForkBackend(1, lambda receive, send, number: send(b"12345678"))
        assert backend.receive(60) == b"12345678"
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        backend.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err == "handled"
