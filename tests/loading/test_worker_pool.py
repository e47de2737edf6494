"""Workers that fill batches: the same bytes for any plan and number of workers; death, hang and failure are reported; all start or
none, and they end with the training process."""

import multiprocessing
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch

from helpers.samples import build_dataset, epoch_digest, keep, make_loader
from unet_trainer.loading import worker_pool
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.worker_pool import WorkerError, WorkerPool

FORK = multiprocessing.get_context("fork")  # its events and counters work in threads as well
MAIN_PID = os.getpid()
KINDS = pytest.mark.parametrize("with_threads", [False, True], ids=["processes", "threads"])


def build_pair(data, num_workers=2, **options):
    """Loaders of training and validation that share their workers."""
    pool = WorkerPool(num_workers, **options)
    return Loader(build_dataset(data), 2, True, pool), Loader(build_dataset(data, "none"), 4, False, pool), pool


def expected_digest(dataset, batch_size, epoch):
    """Of an epoch that is read in this process."""
    return epoch_digest(make_loader(dataset, batch_size, 0, shuffle=True), epoch)


def in_worker():
    """Not in the training process, nor in the thread in which that reads."""
    thread = threading.current_thread()
    return os.getpid() != MAIN_PID or not (thread.name == "reading" or thread is threading.main_thread())


def patch_samples(monkeypatch, before):
    """Calls `before` with the index of each sample before it is read."""
    timed_sample = SegmentationDataset.timed_sample

    def patched(self, key):
        before(key[1])
        return timed_sample(self, key)

    monkeypatch.setattr(SegmentationDataset, "timed_sample", patched)


@pytest.mark.parametrize(("num_workers", "with_threads"), [(1, False), (5, False), (3, True)])
def test_workers_of_any_kind_and_number_give_the_same_bytes(tiny_data, num_workers, with_threads):
    loader = make_loader(build_dataset(tiny_data, "strong"), 4, num_workers, shuffle=True, with_threads=with_threads)
    for epoch in (0, 1):
        assert epoch_digest(loader, epoch) == expected_digest(loader.dataset, 4, epoch)
    assert (loader.pool.num_failed, loader.pool.failure_reason) == (0, "")
    loader.pool.close()


def test_dropped_plans_keep_no_buffer_and_leave_no_trace(tiny_data):
    train, val, pool = build_pair(tiny_data, 3)
    for number in range(12):
        train.prepare(number)
        val.prepare(0)
        batches = train.epoch(number)
        for _ in range(number % 4):
            next(batches)
        batches.close()
        if number % 3 == 0:
            next(val.epoch(0))
    assert epoch_digest(train, 7) == expected_digest(train.dataset, 2, 7)
    for number in range(100):  # on a busy machine a worker may still be at a piece that was dropped
        if pool.incomplete:
            epoch_digest(train, number)
    assert pool.incomplete == {}
    assert sorted(pool.free) == list(range(len(pool.buffers.arrays)))
    assert (pool.num_failed, pool.failure_reason) == (0, "")  # what was handed back unfilled did not fail


def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(tiny_data, monkeypatch):
    monkeypatch.setattr(worker_pool, "MAX_BUFFER_BYTES", 0)
    train, _, _ = build_pair(tiny_data)
    expected = keep(make_loader(train.dataset, 2, 0, shuffle=True).epoch(0))
    for batch, own in zip(train.epoch(0), expected, strict=True):
        time.sleep(0.03)  # the workers fill all other buffers meanwhile
        assert torch.equal(batch.images, own.images)
        assert torch.equal(batch.masks, own.masks)


def test_a_buffer_is_filled_again_only_after_it_was_copied_to_the_gpu(tiny_data, monkeypatch):
    copies, pinned = [], []

    def event():
        copies.append(mock.Mock(query=mock.Mock(return_value=False)))
        return copies[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(worker_pool, "copy_stream", lambda device: "copy stream")
    monkeypatch.setattr(worker_pool, "pin", lambda memory: pinned.append(memory.nbytes))
    monkeypatch.setattr(worker_pool, "MAX_BUFFER_BYTES", 0)
    loader = Loader(build_dataset(tiny_data), 1, True, WorkerPool(2, torch.device("cuda", 0)))
    batches = loader.epoch(0)
    for _ in range(worker_pool.MIN_BUFFERS):
        next(batches)
    assert pinned == [loader.pool.buffers.memory.nbytes]
    assert len(loader.pool.pending) == 0  # three buffers are being copied, the training loop has the fourth
    next(batches)  # nothing is left to do but to wait for the first copy
    copies[1].query.return_value = True
    next(batches)
    assert [copy.synchronize.called for copy in copies] == [True, True, False, False, False]
    copies[0].record.assert_called_once_with("copy stream")
    batches.close()


@KINDS
def test_a_piece_that_a_worker_failed_to_fill_is_read_in_the_training_process(tiny_data, with_threads, monkeypatch):
    """One worker: pieces of two samples, and two of them hold the three that fail. Of a long reason, the beginning is kept."""
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True, with_threads=with_threads)
    failing = [index for batch in (1, 2) for _, index in loader.batches.keys(0, batch)][:3]
    expected = expected_digest(loader.dataset, 2, 0)

    def fail(index):
        if in_worker() and index in failing:
            raise OSError("stale file handle" + " é" * 1000)

    patch_samples(monkeypatch, fail)
    assert epoch_digest(loader, 0) == expected
    assert loader.pool.num_failed == 2
    assert loader.pool.failure_reason.startswith("OSError: stale file handle é é")
    loader.pool.close()


def test_an_error_that_occurs_in_the_training_process_too_is_raised_as_it_is(tiny_data, monkeypatch):
    def fail(index):
        raise ZeroDivisionError(f"while reading {index}")

    with monkeypatch.context() as patch:
        patch_samples(patch, fail)
        loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
        first = min(index for _, index in loader.batches.keys(0, 0))  # a batch is read in the order of the images
        with pytest.raises(ZeroDivisionError, match=f"^while reading {first}$"):
            epoch_digest(loader, 0)
        assert loader.pool.num_failed == 0  # none was filled in its place
        assert loader.pool.failure_reason.startswith("ZeroDivisionError: while reading ")
        loader.pool.close()
    assert epoch_digest(loader, 0) == expected_digest(loader.dataset, 2, 0)
    loader.pool.close()


def test_a_dead_worker_is_reported_with_what_it_was_reading(tiny_data, monkeypatch):
    dataset = build_dataset(tiny_data)

    def die(index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch_samples(patch, die)
        loader = make_loader(dataset, 2, 2, shuffle=True)
        loader.prepare(0)
        workers = loader.pool.workers.processes
        with pytest.raises(WorkerError) as caught:
            epoch_digest(loader, 0)
    assert "died (SIGKILL)" in str(caught.value)
    assert str(caught.value).endswith(f"; it may have been reading {dataset.pairs[4].image}")
    assert not any(worker.is_alive() for worker in workers)
    assert epoch_digest(loader, 0) == expected_digest(dataset, 2, 0)  # new workers start when they are needed


def test_hanging_workers_are_given_up_with_the_file_they_hang_in(tiny_data, monkeypatch):
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", 0.05)
    dataset = build_dataset(tiny_data)
    loader = make_loader(dataset, 2, 2, shuffle=True, timeout=0.3)
    victim, is_hanging = loader.batches.keys(0, 0)[1][1], FORK.Event()

    def hang(index):
        if index == victim:
            is_hanging.set()
            time.sleep(3600)

    patch_samples(monkeypatch, hang)
    loader.prepare(0)
    workers = loader.pool.workers.processes
    assert is_hanging.wait(30)
    with pytest.raises(WorkerError, match=r"no batch in 0\.3 s \(worker_timeout\)") as caught:
        epoch_digest(loader, 0)
    assert str(caught.value).endswith(f"perhaps in reading {dataset.pairs[victim].image}")
    assert not any(worker.is_alive() for worker in workers)


def test_started_workers_end_when_another_cannot_be_started(tiny_data, monkeypatch):
    start, started = multiprocessing.context.ForkProcess.start, []

    def start_two(self):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(self)
        started.append(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start_two)
    loader = make_loader(build_dataset(tiny_data), 2, 4, shuffle=True)
    with pytest.raises(WorkerError, match=r"4 worker processes could not be started \(Resource"):
        loader.prepare(0)
    assert len(started) == 2
    assert not any(worker.is_alive() for worker in started)
    monkeypatch.undo()
    assert epoch_digest(loader, 0) == expected_digest(loader.dataset, 2, 0)
    assert sorted(loader.pool.free) == list(range(len(loader.pool.buffers.arrays)))
