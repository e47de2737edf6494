"""Samples and batches: pure functions of (seed, epoch, index), whatever reads them."""

from __future__ import annotations

import hashlib
import shutil
import time

import numpy as np
import pytest
import torch

from unet_trainer.augment import build_augmentation
from unet_trainer.config import load_config
from unet_trainer.dataset import (
    Collate,
    EpochBatches,
    Loader,
    SegmentationDataset,
    choose_num_workers,
    resize_pair,
)
from unet_trainer.images import DataError
from unet_trainer.masks import IGNORED, MaskCoding
from unet_trainer.pairs import build_split


def build_dataset(data_dir, augmentation="default", seed=3):
    split = build_split(load_config({"data_dir": data_dir}))
    return SegmentationDataset(split.train, MaskCoding((0, 255)), (32, 32), build_augmentation(augmentation), seed)


def digest(loader, epoch):
    """Of every byte an epoch delivers, in order."""
    total = hashlib.sha256()
    for batch in loader.epoch(epoch):
        total.update(batch.images.numpy().tobytes())
        total.update(batch.masks.numpy().tobytes())
    return total.hexdigest()


def test_any_number_of_workers_gives_the_same_bytes(tiny_data):
    digests = {}
    for num_workers in (0, 1, 2, 4):
        loader = Loader(build_dataset(tiny_data, "strong"), 2, num_workers, shuffle=True, pin_memory=False)
        digests[num_workers] = [digest(loader, epoch) for epoch in (0, 1, 2)]
    assert digests[0] == digests[1] == digests[2] == digests[4]
    assert len(set(digests[0])) == 3  # no two epochs alike


def test_an_epoch_can_be_repeated_and_begun_anywhere(tiny_data):
    loader = Loader(build_dataset(tiny_data), 2, 0, shuffle=True, pin_memory=False)
    straight = [digest(loader, epoch) for epoch in (0, 1, 2)]
    assert [digest(loader, epoch) for epoch in (2, 0, 1)] == [straight[2], straight[0], straight[1]]


def test_a_sample_differs_between_epochs_and_seeds_but_not_between_reads(tiny_data):
    dataset = build_dataset(tiny_data)
    first = dataset[0, 5][0]
    assert np.array_equal(first, dataset[0, 5][0])
    assert not np.array_equal(first, dataset[1, 5][0])
    assert not np.array_equal(first, build_dataset(tiny_data, seed=4)[0, 5][0])


def test_every_training_image_is_seen_at_most_once_an_epoch_and_the_order_changes():
    batches = EpochBatches(num_samples=11, batch_size=4, seed=0, shuffle=True)
    orders = []
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        keys = [key for batch in batches for key in batch]
        assert {of_epoch for of_epoch, _ in keys} == {epoch}
        orders.append([index for _, index in keys])
    assert len(batches) == 2  # the last three do not fill a batch
    assert all(len(set(order)) == 8 for order in orders)
    assert orders[0] != orders[1]


def test_validation_sees_every_image_in_order():
    batches = EpochBatches(num_samples=5, batch_size=2, seed=0, shuffle=False)
    assert [[index for _, index in batch] for batch in batches] == [[0, 1], [2, 3], [4]]


def test_a_short_batch_is_filled_with_pixels_that_count_nowhere():
    sample = (np.full((4, 6, 3), 9, np.uint8), np.ones((4, 6), np.uint8))
    batch = Collate(3)([sample])
    assert batch.images.shape == (3, 4, 6, 3)
    assert batch.masks.shape == (3, 4, 6)
    assert batch.num_images == 1
    assert (batch.masks[0] == 1).all()
    assert (batch.masks[1:] == IGNORED).all()


def test_a_pass_over_the_loader_leaves_the_global_random_state_alone(tiny_data):
    loader = Loader(build_dataset(tiny_data), 2, 0, shuffle=False, pin_memory=False)
    before = torch.get_rng_state()
    digest(loader, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_goes_bad_during_training_is_named_with_the_reason(tiny_data, tmp_path, num_workers):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    victim = dataset.pairs[3].image
    victim.write_bytes(victim.read_bytes()[:300])
    with pytest.raises(DataError) as caught:
        digest(Loader(dataset, 2, num_workers, shuffle=True, pin_memory=False), 0)
    assert str(caught.value) == f"{victim}: the file is cut off"


def test_a_mask_that_changed_since_the_start_is_named(tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    dataset.coding = MaskCoding((0, 1))  # 255 is no class here
    with pytest.raises(DataError, match="changed since the run began"):
        dataset[0, 0]


def test_masks_are_resized_without_new_values():
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    mask = np.random.default_rng(1).choice(np.array([0, 7, 255], np.uint8), (50, 70))
    for size in ((32, 32), (96, 128), (64, 32)):
        resized, ids = resize_pair(image, mask, size)
        assert resized.shape == (*size, 3)
        assert ids.shape == size
        assert set(np.unique(ids)) <= {0, 7, 255}


def test_image_and_mask_stay_aligned_when_resized():
    """A square that fills the left half fills the left half afterwards, in both."""
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :32] = 255
    mask = (image[:, :, 0] > 0).astype(np.uint8)
    for size in ((32, 32), (128, 128)):
        resized, ids = resize_pair(image, mask, size)
        assert np.array_equal(resized[:, :, 0] > 127, ids == 1)


def test_workers_follow_the_machine():
    assert choose_num_workers("auto", 16, on_cpu=False) == 15
    assert choose_num_workers("auto", 64, on_cpu=False) == 16
    assert choose_num_workers("auto", 1, on_cpu=False) == 1
    assert choose_num_workers("auto", 2, on_cpu=True) == 1
    assert choose_num_workers(7, 2, on_cpu=True) == 7


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_can_be_begun_within_and_its_earlier_batches_are_not_read(tiny_data, num_workers):
    straight = list(Loader(build_dataset(tiny_data), 2, 0, shuffle=True, pin_memory=False).epoch(1))
    dataset = build_dataset(tiny_data)
    loader = Loader(dataset, 2, num_workers, shuffle=True, pin_memory=False)
    skipped = {index for batch in range(3) for _, index in loader.batches.keys(1, batch)}
    dataset.pairs = [None if index in skipped else pair for index, pair in enumerate(dataset.pairs)]
    late = list(loader.epoch(1, first_batch=3))
    assert len(late) == 2
    assert all(torch.equal(one.images, two.images) for one, two in zip(straight[3:], late, strict=True))


def test_one_batch_can_be_read_without_the_workers_and_its_files_named(tiny_data):
    loader = Loader(build_dataset(tiny_data), 2, 0, shuffle=True, pin_memory=False)
    batches = list(loader.epoch(2))
    assert all(torch.equal(loader.read(2, number).images, batch.images) for number, batch in enumerate(batches))
    assert [file.suffix for file in loader.files(2, 1)] == [".jpg", ".jpg"]
    assert len({file for number in range(len(loader)) for file in loader.files(2, number)}) == 10


def test_an_epoch_that_was_left_does_not_show_in_the_next(tiny_data):
    loader = Loader(build_dataset(tiny_data), 2, 2, shuffle=True, pin_memory=False)
    straight = digest(Loader(build_dataset(tiny_data), 2, 0, shuffle=True, pin_memory=False), 1)
    batches = loader.epoch(0)
    next(batches)
    batches.close()
    assert digest(loader, 1) == straight


def test_a_loader_that_waits_ends_when_the_run_is_to_stop(tiny_data, monkeypatch):
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: time.sleep(3600))
    loader = Loader(build_dataset(tiny_data), 2, 1, shuffle=True, pin_memory=False)
    assert list(loader.epoch(0, is_stopping=lambda: True)) == []
