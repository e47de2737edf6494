"""The batches of an epoch: the same whoever reads them, from anywhere on, in any order of asking."""

from __future__ import annotations

import hashlib
import shutil
import time

import pytest
import torch

from helpers.samples import build_dataset
from unet_trainer.images.image_files import DataError
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.pixel_cache import fill_cache
from unet_trainer.loading.worker_pool import WorkerPool


def make_loader(dataset, batch_size, num_workers, shuffle, timeout=None, with_threads=False):
    pool = WorkerPool(num_workers, with_threads=with_threads) if num_workers else None
    return Loader(dataset, batch_size, shuffle, pool, timeout)


def keep(batches):
    """Copies: the workers fill the memory of a batch again once the next one is asked for."""
    return [batch._replace(images=batch.images.clone(), masks=batch.masks.clone()) for batch in batches]


def epoch_digest(loader, epoch):
    """Of every byte an epoch delivers, in order."""
    total = hashlib.sha256()
    for batch in loader.epoch(epoch):
        total.update(batch.images.numpy().tobytes())
        total.update(batch.masks.numpy().tobytes())
    return total.hexdigest()


def test_any_number_of_workers_gives_the_same_bytes(tiny_data):
    digests = {}
    for num_workers in (0, 1, 2, 4):
        loader = make_loader(build_dataset(tiny_data, "strong"), 2, num_workers, shuffle=True)
        digests[num_workers] = [epoch_digest(loader, epoch) for epoch in (0, 1, 2)]
    assert digests[0] == digests[1] == digests[2] == digests[4]
    assert len(set(digests[0])) == 3  # no two epochs alike


def test_an_epoch_can_be_repeated_and_begun_anywhere(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 0, shuffle=True)
    straight = [epoch_digest(loader, epoch) for epoch in (0, 1, 2)]
    assert [epoch_digest(loader, epoch) for epoch in (2, 0, 1)] == [straight[2], straight[0], straight[1]]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_short_batch_is_filled_with_pixels_that_count_nowhere(tiny_data, num_workers):
    """Also where the workers left other pixels before: three batches of four are read twice."""
    loader = make_loader(build_dataset(tiny_data), 4, num_workers, shuffle=False)
    for epoch in range(6):
        batches = keep(loader.epoch(epoch))
        assert [batch.num_images for batch in batches] == [4, 4, 2]
        assert batches[2].images.shape == (4, 32, 32, 3)
        assert (batches[2].masks[:2] != IGNORED).all()
        assert (batches[2].masks[2:] == IGNORED).all()
        assert (batches[2].images[2:] == 0).all()


def test_a_pass_over_the_loader_leaves_the_global_random_state_alone(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 0, shuffle=False)
    before = torch.get_rng_state()
    epoch_digest(loader, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_goes_bad_during_training_is_named_with_the_reason(tiny_data, tmp_path, num_workers):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    victim = dataset.pairs[3].image
    victim.write_bytes(victim.read_bytes()[:300])
    with pytest.raises(DataError) as caught:
        epoch_digest(make_loader(dataset, 2, num_workers, shuffle=True), 0)
    assert str(caught.value) == f"{victim}: the file is cut off"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_can_be_begun_within_and_its_earlier_batches_are_not_read(tiny_data, num_workers):
    straight = keep(make_loader(build_dataset(tiny_data), 2, 0, shuffle=True).epoch(1))
    dataset = build_dataset(tiny_data)
    loader = make_loader(dataset, 2, num_workers, shuffle=True)
    skipped = {index for batch in range(3) for _, index in loader.batches.keys(1, batch)}
    dataset.pairs = [None if index in skipped else pair for index, pair in enumerate(dataset.pairs)]
    late = keep(loader.epoch(1, first_batch=3))
    assert len(late) == 2
    assert all(torch.equal(one.images, two.images) for one, two in zip(straight[3:], late, strict=True))


def test_one_batch_can_be_read_without_the_workers_and_its_files_named(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 0, shuffle=True)
    batches = list(loader.epoch(2))
    assert all(torch.equal(loader.read(2, number).images, batch.images) for number, batch in enumerate(batches))
    assert [file.suffix for file in loader.files(2, 1)] == [".jpg", ".jpg"]
    assert len({file for number in range(len(loader)) for file in loader.files(2, number)}) == 10


def test_an_epoch_that_was_left_does_not_show_in_the_next(tiny_data):
    loader = make_loader(build_dataset(tiny_data), 2, 2, shuffle=True)
    straight = epoch_digest(make_loader(build_dataset(tiny_data), 2, 0, shuffle=True), 1)
    batches = loader.epoch(0)
    next(batches)
    batches.close()
    assert epoch_digest(loader, 1) == straight


def test_a_loader_that_waits_ends_when_the_run_is_to_stop(tiny_data, monkeypatch):
    monkeypatch.setattr("unet_trainer.loading.worker_pool.POLL_SECONDS", 0.1)
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: time.sleep(3600))
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True)
    assert list(loader.epoch(0, is_stopping=lambda: True)) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_was_prepared_is_the_same_and_another_one_is_not_mistaken_for_it(tiny_data, num_workers):
    def fresh():
        return make_loader(build_dataset(tiny_data), 2, num_workers, shuffle=True)

    expected = [epoch_digest(fresh(), epoch) for epoch in (0, 1)]
    loader = fresh()
    loader.prepare(0)
    loader.prepare(0)
    assert epoch_digest(loader, 0) == expected[0]
    loader.prepare(1)
    assert epoch_digest(loader, 1) == expected[1]
    loader.prepare(1)
    assert epoch_digest(loader, 0) == expected[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_say_what_reading_and_augmenting_took(tiny_data, num_workers):
    loader = make_loader(build_dataset(tiny_data), 2, num_workers, shuffle=True)
    for batch in loader.epoch(0):
        assert all(0 < seconds < 10 for seconds in batch.stages)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("augmentation", ["none", "strong"])
def test_a_cache_changes_no_byte(tiny_data, tmp_path, num_workers, augmentation):
    plain = build_dataset(tiny_data, augmentation)
    cached = build_dataset(tiny_data, augmentation)
    shapes = [(32, 32, 3)] * 7  # of ten pairs: the others are read from their files
    cached.cache = fill_cache(shapes, 1, cached.decode, "ram", tmp_path, (), 2, lambda: None, 10**9)
    assert len(cached.cache) == 7
    loaders = [make_loader(dataset, 2, num_workers, shuffle=True) for dataset in (plain, cached)]
    assert epoch_digest(loaders[0], 1) == epoch_digest(loaders[1], 1)
