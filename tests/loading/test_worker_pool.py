"""Workers that fill batches: any plan, any number of them, whatever dies, hangs or is dropped on the way."""

from __future__ import annotations

import os
import signal
import time
from typing import ClassVar

import numpy as np
import pytest
import torch

from helpers.samples import build_dataset, epoch_digest, keep, make_loader
from unet_trainer.images.tiling import Tile, Tiles
from unet_trainer.loading import worker_pool as room
from unet_trainer.loading.dataset import EpochBatches, SegmentationDataset, Source
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.loading.worker_pool import WorkerPool


def build_pair(data, num_workers=2, **options):
    """Loaders of training and validation that share their workers."""
    pool = WorkerPool(num_workers, **options)
    return Loader(build_dataset(data), 2, True, pool), Loader(build_dataset(data, "none"), 4, False, pool), pool


@pytest.mark.parametrize("with_threads", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize("num_workers", [1, 3, 7])
def test_workers_of_any_kind_and_number_give_the_same_bytes(tiny_data, num_workers, with_threads):
    alone = make_loader(build_dataset(tiny_data, "strong"), 4, 0, shuffle=True)
    pool = make_loader(build_dataset(tiny_data, "strong"), 4, num_workers, shuffle=True, with_threads=with_threads)
    for epoch in (0, 1, 2):
        assert epoch_digest(pool, epoch) == epoch_digest(alone, epoch)
    pool.pool.close()


@pytest.mark.parametrize("max_bytes", [0, 1 << 29], ids=["fewest slots", "many slots"])
def test_epochs_and_validation_follow_each_other_as_planned(tiny_data, max_bytes, monkeypatch):
    monkeypatch.setattr(room, "MAX_SLOT_BYTES", max_bytes)
    train, val, pool = build_pair(tiny_data)
    expected = {loader: [epoch_digest(make_loader(loader.dataset, size, 0, shuffle), epoch) for epoch in range(4)]
                for loader, size, shuffle in ((train, 2, True), (val, 4, False))}  # fmt: skip
    for epoch in range(4):
        train.prepare(epoch)
        val.prepare(0)
        train.prepare(epoch + 1)
        assert epoch_digest(train, epoch) == expected[train][epoch]
        assert epoch_digest(val, 0) == expected[val][0]
    assert len(pool.slots.arrays) == (room.MIN_SLOTS if max_bytes == 0 else room.SLOTS_AHEAD)


def test_the_workers_are_ahead_while_nobody_asks(tiny_data, monkeypatch):
    """What they will have read when the first batch is asked for: all that there are slots for, over the end of the epoch."""
    train, val, pool = build_pair(tiny_data)
    train.prepare(0)
    val.prepare(0)
    train.prepare(1)
    assert len(pool.orders) == room.SLOTS_AHEAD == 8  # five batches of training, three of validation
    batches = train.epoch(0)
    next(batches)
    assert len(pool.orders) == 7
    next(batches)
    assert [(order.source, order.batch) for order in pool.orders][-1] == (0, 0)  # a slot came free: the epoch after
    batches.close()


def test_plans_that_are_dropped_cost_no_slot_and_do_not_show(tiny_data):
    train, val, pool = build_pair(tiny_data, 3)
    straight = epoch_digest(make_loader(train.dataset, 2, 0, shuffle=True), 7)
    for number in range(12):
        train.prepare(number)
        val.prepare(0)
        batches = train.epoch(number)
        for _ in range(number % 4):
            next(batches)
        batches.close()
        if number % 3 == 0:
            next(val.epoch(0))
    assert epoch_digest(train, 7) == straight
    assert pool.open == {}
    assert sorted(pool.free) == list(range(len(pool.slots.arrays)))


def test_what_was_dropped_is_not_read_any_more(tiny_data, monkeypatch):
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: time.sleep(0.5))
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True)
    loader.prepare(0)
    loader.pool.abandon()
    before = time.monotonic()
    while loader.pool.open:
        loader.pool._note(loader.pool.hands.take(1.0))
    assert time.monotonic() - before < 1.5  # five batches of two would take five seconds


def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(tiny_data, monkeypatch):
    monkeypatch.setattr(room, "MAX_SLOT_BYTES", 0)
    train, _, _ = build_pair(tiny_data)
    expected = keep(make_loader(train.dataset, 2, 0, shuffle=True).epoch(0))
    for batch, own in zip(train.epoch(0), expected, strict=True):
        time.sleep(0.05)  # the workers fill all other slots meanwhile
        assert torch.equal(batch.images, own.images)
        assert torch.equal(batch.masks, own.masks)


class Copy:
    """A CUDA event whose copy is done when the test says so."""

    made: ClassVar[list] = []

    def __init__(self):
        self.is_done = False
        self.was_waited_for = False
        Copy.made.append(self)

    def record(self, stream):
        assert stream == "copy stream"

    def query(self):
        return self.is_done

    def synchronize(self):
        self.was_waited_for = not self.is_done
        self.is_done = True


def test_a_slot_is_filled_again_only_when_it_was_copied_from(tiny_data, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "Event", Copy)
    monkeypatch.setattr(room, "copy_stream", lambda device: "copy stream")
    monkeypatch.setattr(room, "pin", lambda memory: pinned.append(memory.nbytes))
    monkeypatch.setattr(room, "MAX_SLOT_BYTES", 0)
    Copy.made.clear()
    loader = Loader(build_dataset(tiny_data), 1, True, WorkerPool(2, torch.device("cuda", 0)))
    batches = loader.epoch(0)
    for _ in range(room.MIN_SLOTS):
        next(batches)
    assert pinned == [loader.pool.slots.memory.nbytes]
    assert len(loader.pool.orders) == 0  # three slots are still copied from, one is held
    next(batches)  # nothing is left to do but to wait for the first copy
    assert [copy.was_waited_for for copy in Copy.made] == [True, False, False, False]
    Copy.made[1].is_done = True
    next(batches)
    assert [copy.was_waited_for for copy in Copy.made] == [True, False, False, False, False]
    batches.close()


def test_a_worker_that_dies_is_named_with_what_it_was_reading(tiny_data, monkeypatch):
    dataset = build_dataset(tiny_data)
    victim = dataset.pairs[4].image
    read = SegmentationDataset._read

    def die(self, index):
        if self.pairs[index].image == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, index)

    monkeypatch.setattr(SegmentationDataset, "_read", die)
    loader = make_loader(dataset, 2, 2, shuffle=True)
    loader.prepare(0)
    workers = loader.pool.hands.workers
    with pytest.raises(WorkerError) as caught:
        epoch_digest(loader, 0)
    assert "died (SIGKILL)" in str(caught.value)
    assert str(caught.value).endswith(f"; it may have been reading {victim}")
    assert not any(worker.is_alive() for worker in workers)
    monkeypatch.setattr(SegmentationDataset, "_read", read)
    assert epoch_digest(loader, 0) == epoch_digest(make_loader(dataset, 2, 0, shuffle=True), 0)  # others are started when asked for


def test_it_is_told_when_all_workers_are_dead(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    batches = loader.epoch(0)
    next(batches)
    for worker in loader.pool.hands.workers:
        worker.kill()
    batches.close()
    with pytest.raises(WorkerError, match=r"worker process \d+ died \(SIGKILL\); it may have been reading .*\.jpg"):
        list(loader.epoch(1))


def test_workers_that_hang_are_given_up_with_the_file_they_hang_in(tiny_data, monkeypatch):
    monkeypatch.setattr(room, "POLL_SECONDS", 0.1)
    dataset = build_dataset(tiny_data)
    victim = dataset.pairs[6].image
    read = SegmentationDataset._read
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, index: time.sleep(3600) if index == 6 else read(self, index))
    loader = make_loader(dataset, 2, 2, shuffle=True, timeout=0.5)
    loader.prepare(0)
    workers = loader.pool.hands.workers
    before = time.monotonic()
    with pytest.raises(WorkerError, match=r"no batch in 0\.5 s \(worker_timeout\)") as caught:
        epoch_digest(loader, 0)
    assert str(caught.value).endswith(f"perhaps in reading {victim}")
    assert time.monotonic() - before < 5
    assert not any(worker.is_alive() for worker in workers)


def test_what_a_worker_could_not_read_is_tried_again_before_it_is_an_error(tiny_data, monkeypatch):
    dataset = build_dataset(tiny_data)
    own, read = os.getpid(), SegmentationDataset._read

    def read_here_alone(self, pair):
        if os.getpid() != own and pair in dataset.pairs[2:5]:
            raise OSError("stale file handle")
        return read(self, pair)

    expected = epoch_digest(make_loader(dataset, 2, 0, shuffle=True), 0)
    monkeypatch.setattr(SegmentationDataset, "_read", read_here_alone)
    assert epoch_digest(make_loader(dataset, 2, 2, shuffle=True), 0) == expected


def test_an_error_of_a_worker_is_raised_as_what_it_is(tiny_data, monkeypatch):
    def fail(self, pair):
        raise ZeroDivisionError("in the midst of a worker")

    monkeypatch.setattr(SegmentationDataset, "_read", fail)
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    with pytest.raises(ZeroDivisionError, match="in the midst of a worker"):
        epoch_digest(loader, 0)
    monkeypatch.undo()
    loader.pool.close()
    assert epoch_digest(loader, 0) == epoch_digest(make_loader(loader.dataset, 2, 0, shuffle=True), 0)


def test_the_windows_of_an_image_stay_with_one_worker(tiny_data):
    def pieces(framing, batch_size, num_workers):
        dataset = build_dataset(tiny_data)
        dataset.framing = framing or dataset.framing
        return [len(piece) for piece in Source(dataset, EpochBatches(40, batch_size, 0, False)).pieces(num_workers)]

    windows = Tiles((32, 32), [Tile(index // 4, 0, 0, (0, 32), (0, 32)) for index in range(40)], [(64, 64)] * 10)
    assert pieces(None, 16, 15) == [2] * 8
    assert pieces(None, 16, 4) == [4] * 4
    assert pieces(None, 2, 15) == [1, 1]
    assert pieces(None, 7, 3) == [3, 3, 1]
    assert pieces(windows, 16, 15) == [4] * 4  # ten images of four windows each
    assert pieces(windows, 2, 15) == [2]
    assert len(pieces(None, 5000, 3000)) <= 64


def test_many_workers_with_small_pieces_get_through(tiny_data, monkeypatch):
    monkeypatch.setattr(room, "MAX_OPEN_PIECES", 5)
    loader = make_loader(build_dataset(tiny_data), 5, 4, shuffle=True)
    assert epoch_digest(loader, 3) == epoch_digest(make_loader(loader.dataset, 5, 0, shuffle=True), 3)


def test_a_slot_holds_images_of_every_kind(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 3, 0, shuffle=False)
    images, masks = loader.source.views(np.arange(loader.source.num_bytes, dtype=np.uint64).astype(np.uint8))
    assert (images.shape, masks.shape) == ((3, 32, 32, 3), (3, 32, 32))
    assert masks[0, 0, 0] == images.size % 256  # right behind the images, nothing shared
    assert loader.source.num_bytes == images.nbytes + masks.nbytes


def test_small_pipes_are_never_filled(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 5, 3, shuffle=True)
    loader.prepare(0)
    loader.pool.hands.capacity = 4
    most = 0
    give = loader.pool.hands.give

    def watched(message):
        nonlocal most
        give(message)
        most = max(most, sum(order.missing for order in loader.pool.open.values()))

    loader.pool.hands.give = watched
    for epoch in range(3):
        assert epoch_digest(loader, epoch) == epoch_digest(make_loader(loader.dataset, 5, 0, shuffle=True), epoch)
    assert 0 < most <= 4


def test_threads_that_are_closed_read_no_further(tiny_data, monkeypatch):
    read = []
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: (read.append(pair), time.sleep(0.1)))
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True, with_threads=True)
    loader.prepare(0)
    loader.pool.close()
    time.sleep(0.5)
    assert len(read) <= 2


def test_an_epoch_that_is_forgotten_does_not_disturb_the_one_after_it(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    forgotten = loader.epoch(0)
    next(forgotten)
    batches = loader.epoch(1)
    images = [next(batches).images.clone()]
    with pytest.raises(RuntimeError, match="another epoch was begun before this one was over"):
        next(forgotten)
    forgotten.close()
    images += [batch.images.clone() for batch in batches]
    expected = keep(make_loader(loader.dataset, 2, 0, shuffle=True).epoch(1))
    assert all(torch.equal(one, other.images) for one, other in zip(images, expected, strict=True))


def test_a_dead_worker_is_told_even_when_the_others_could_do_its_work(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    epoch_digest(loader, 0)
    first = loader.pool.hands.workers[0]
    first.kill()
    first.join()
    with pytest.raises(WorkerError, match=rf"worker process {first.pid} died \(SIGKILL\)"):
        epoch_digest(loader, 1)
