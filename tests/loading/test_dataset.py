"""Samples and batches: pure functions of (seed, epoch, index), whatever reads them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from unet_trainer.config.resolve import choose_num_workers
from unet_trainer.datasets.pairs import Pair, find_pairs
from unet_trainer.images.image_files import DataError, read_image, write_image
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.images.mask_coding import IGNORED, MaskCoding
from unet_trainer.images.tiling import RandomCrops, WholeImages, tile_images
from unet_trainer.loading import dataset as dataset_room
from unet_trainer.loading.augmentation import build_augmentation
from unet_trainer.loading.dataset import EpochBatches, SegmentationDataset
from unet_trainer.loading.loader import Loader


def build_dataset(data_dir, augmentation="default", seed=3):
    pairs = find_pairs(data_dir / "images", data_dir / "masks")[:10]
    framing = WholeImages((32, 32), len(pairs))
    return SegmentationDataset(pairs, MaskCoding((0, 255)), RGB_8BIT, framing, build_augmentation(augmentation), seed)


def write_array_pair(folder, image, mask):
    np.save(folder / "a.npy", image)
    write_image(folder / "a_mask.png", mask)
    return Pair("a", folder / "a.npy", folder / "a_mask.png")


def deep_form(channels):
    return ImageSpec(channels, False, (33000.0,) * channels, (200.0,) * channels, 32000.0, 34000.0)


def count_reads(monkeypatch):
    read = []
    for name in ("read_image", "read_mask"):
        original = getattr(dataset_room, name)
        monkeypatch.setattr(dataset_room, name, lambda path, *more, original=original: read.append(path) or original(path, *more))
    return read


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
        keys = [key for batch in range(len(batches)) for key in batches.keys(epoch, batch)]
        assert {of_epoch for of_epoch, _ in keys} == {epoch}
        orders.append([index for _, index in keys])
    assert len(batches) == 2  # the last three do not fill a batch
    assert all(len(set(order)) == 8 for order in orders)
    assert orders[0] != orders[1]


def test_validation_sees_every_image_in_order():
    batches = EpochBatches(num_samples=5, batch_size=2, seed=0, shuffle=False)
    assert [[index for _, index in batches.keys(0, batch)] for batch in range(len(batches))] == [[0, 1], [2, 3], [4]]


def test_a_mask_that_changed_since_the_start_is_named(tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    dataset.coding = MaskCoding((0, 1))  # 255 is no class here
    with pytest.raises(DataError, match="changed since the run began"):
        dataset[0, 0]


@pytest.mark.parametrize("change", ["channels", "depth", "size"])
def test_an_image_that_changed_since_the_start_is_named(tiny_data, tmp_path, change):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    pair = dataset.pairs[0]
    changed = {
        "channels": np.zeros((64, 64, 4), np.uint8),
        "depth": np.zeros((64, 64, 3), np.uint16),
        "size": np.zeros((64, 65, 3), np.uint8),
    }[change]
    with pair.image.open("wb") as file:
        np.save(file, changed)
    with pytest.raises(DataError) as caught:
        dataset[0, 0]
    named = pair.mask if change == "size" else pair.image
    assert str(caught.value) == f"{named}: changed since the run began"


@pytest.mark.parametrize("shape", [(16, 16), (96, 96)], ids=["smaller", "larger"])
def test_a_pair_of_another_size_than_its_windows_cover_is_named(shape, tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    dataset = build_dataset(tmp_path / "data")
    pair = dataset.pairs[0]
    dataset.framing = tile_images([read_image(one.image).shape[:2] for one in dataset.pairs], (32, 32))
    dataset[0, 0]
    dataset._last = None
    with pair.image.open("wb") as file:
        np.save(file, np.zeros((*shape, 3), np.uint8))
    with pair.mask.open("wb") as file:
        np.save(file, np.zeros(shape, np.uint8))
    with pytest.raises(DataError) as caught:
        dataset[0, 3]
    assert str(caught.value) == f"{pair.image}: changed since the run began"


def test_8_bit_images_where_others_were_expected_are_named(tmp_path):
    pair = write_array_pair(tmp_path, np.zeros((8, 8, 2), np.uint8), np.zeros((8, 8), np.uint8))
    dataset = SegmentationDataset([pair], MaskCoding((0, 1)), deep_form(2), WholeImages((8, 8), 1), None, 0)
    with pytest.raises(DataError, match="changed since the run began"):
        dataset[0, 0]


def test_a_grey_image_among_colours_gets_equal_channels(tmp_path):
    pair = write_array_pair(tmp_path, np.full((8, 8), 7, np.uint8), np.zeros((8, 8), np.uint8))
    image, _ = SegmentationDataset([pair], MaskCoding((0, 1)), RGB_8BIT, WholeImages((8, 8), 1), None, 0)[0, 0]
    assert image.shape == (8, 8, 3)
    assert (image == 7).all()


def test_deep_images_of_many_channels_reach_the_batch_in_their_own_units(tmp_path):
    image = np.random.default_rng(0).integers(32000, 34000, (40, 50, 5)).astype(np.uint16)
    pair = write_array_pair(tmp_path, image, np.ones((40, 50), np.uint8))
    dataset = SegmentationDataset([pair], MaskCoding((0, 1)), deep_form(5), WholeImages((40, 50), 1), None, 0)
    batch = Loader(dataset, 2, shuffle=False).read(0, 0)
    assert (batch.images.dtype, batch.images.shape) == (torch.float32, (2, 40, 50, 5))
    assert np.array_equal(batch.images[0].numpy(), image.astype(np.float32))
    assert batch.masks.dtype == torch.uint8
    assert (batch.masks[1] == IGNORED).all()
    assert not batch.images[1].any()


def test_8_bit_batches_stay_small(tiny_data):
    assert Loader(build_dataset(tiny_data), 2, shuffle=False).read(0, 0).images.dtype == torch.uint8


def test_a_smaller_mask_is_brought_to_its_images_size_when_asked_for(tmp_path):
    mask = np.array([[0, 1], [2, 255]], np.uint8)
    pair = write_array_pair(tmp_path, np.zeros((8, 8, 3), np.uint8), mask)
    options = (MaskCoding((0, 1, 2), 0, 255), RGB_8BIT, WholeImages((8, 8), 1), None, 0)
    _, ids = SegmentationDataset([pair], *options, resize_masks=True)[0, 0]
    assert np.array_equal(ids, mask.repeat(4, 0).repeat(4, 1))
    with pytest.raises(DataError) as caught:
        SegmentationDataset([pair], *options)[0, 0]
    assert str(caught.value) == f"{pair.mask}: changed since the run began"


def test_the_windows_of_an_image_share_one_reading(tmp_path, monkeypatch):
    image = np.random.default_rng(0).integers(0, 256, (100, 150, 3), np.uint8)
    (tmp_path / "other").mkdir()
    pairs = [write_array_pair(folder, image, image[:, :, 0] // 128) for folder in (tmp_path, tmp_path / "other")]
    framing = tile_images([(100, 150)] * 2, (64, 64))
    dataset = SegmentationDataset(pairs, MaskCoding((0, 1)), RGB_8BIT, framing, None, 0)
    read = count_reads(monkeypatch)
    samples = [dataset[0, index] for index in range(len(dataset))]
    assert len(samples) == 12
    assert read == [path for pair in pairs for path in (pair.image, pair.mask)]
    owned = sum(int((ids != IGNORED).sum()) for _, ids in samples)
    assert owned == 2 * 100 * 150
    for index, (part, _) in enumerate(samples):
        window = framing.windows[index]
        assert np.array_equal(part, image[window.top : window.top + 64, window.left : window.left + 64])


def test_random_crops_are_cut_and_augmented_by_key(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (100, 150, 3), np.uint8)
    pair = write_array_pair(tmp_path, image, image[:, :, 0] // 128)

    def build():
        framing = RandomCrops((32, 48), 1, 6, ((1,),), 0.5, 9)
        return SegmentationDataset([pair], MaskCoding((0, 1)), RGB_8BIT, framing, build_augmentation("default"), 9)

    first, second = build(), build()
    assert len(first) == 6
    samples = {key: first[key] for key in [(epoch, index) for epoch in range(3) for index in range(6)]}
    assert all(part.shape == (32, 48, 3) and ids.shape == (32, 48) for part, ids in samples.values())
    for key in reversed(samples):
        assert second[key][0].tobytes() == samples[key][0].tobytes()
    assert len({part.tobytes() for part, _ in samples.values()}) == 18


def test_a_crop_in_the_users_list_is_brought_back_to_the_size_of_the_batch(tmp_path):
    pair = write_array_pair(tmp_path, np.zeros((64, 64, 3), np.uint8), np.ones((64, 64), np.uint8))
    crop = build_augmentation([{"RandomCrop": {"height": 16, "width": 24}}], size=(64, 64))
    image, ids = SegmentationDataset([pair], MaskCoding((0, 1)), RGB_8BIT, WholeImages((64, 64), 1), crop, 0)[0, 0]
    assert (image.shape, ids.shape) == ((64, 64, 3), (64, 64))


def test_workers_follow_the_machine():
    assert choose_num_workers("auto", 16, on_cpu=False) == 15
    assert choose_num_workers("auto", 64, on_cpu=False) == 16
    assert choose_num_workers("auto", 1, on_cpu=False) == 1
    assert choose_num_workers("auto", 2, on_cpu=True) == 1
    assert choose_num_workers(7, 2, on_cpu=True) == 7


def test_a_worker_of_its_own_shares_the_pairs_and_not_the_pipeline(tiny_data):
    """albumentations' transforms hold the generator that they draw from."""
    dataset = build_dataset(tiny_data, "strong")
    own = dataset.own()
    assert own.pairs is dataset.pairs
    assert own.augmentation is not dataset.augmentation
    assert np.array_equal(own[2, 3][0], dataset[2, 3][0])


def test_the_order_of_an_epoch_is_made_once(monkeypatch):
    made = []
    order = EpochBatches._order
    monkeypatch.setattr(EpochBatches, "_order", lambda self, epoch: (made.append(epoch), order(self, epoch))[1])
    batches = EpochBatches(num_samples=9, batch_size=3, seed=0, shuffle=True)
    first = [batches.keys(4, batch) for batch in range(3)]
    assert [batches.keys(4, batch) for batch in range(3)] == first
    assert made == [4]
    assert sorted(index for batch in first for _, index in batch) == list(range(9))
