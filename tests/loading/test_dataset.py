"""Samples and batches depend on (seed, epoch, index) alone; a file that changed during the run is refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.samples import build_dataset, keep, make_dataset, make_loader
from unet_trainer.data.pairs import Pair
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import write_image
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import IGNORED, MaskCoding, read_mask
from unet_trainer.images.tiling import RandomCrops, WholeImages, tile_images
from unet_trainer.loading.augmentation import build_augmentation
from unet_trainer.loading.dataset import EpochBatches, SegmentationDataset
from unet_trainer.loading.loader import Loader

BINARY = MaskCoding((0, 1))


def write_pair(folder, image, mask, extension=".npy"):
    pair = Pair("a", folder / f"a{extension}", folder / "a_mask.png")
    if extension == ".npy":
        np.save(pair.image, image)
    else:
        write_image(pair.image, image)
    write_image(pair.mask, mask)
    return pair


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.fixture
def own_data(tiny_data, tmp_path):
    """A dataset whose files a test may change, built before they change."""
    shutil.copytree(tiny_data, tmp_path / "data")
    return build_dataset(tmp_path / "data")


def test_random_crops_are_cut_and_augmented_by_key(tmp_path):
    image = noise(100, 150, 3)
    pair = write_pair(tmp_path, image, image[:, :, 0] // 128)

    def build(seed=9):
        tiling = RandomCrops((32, 48), 1, 6, ((1,),), 0.5, seed)
        augmentation = build_augmentation("default", (32, 48), RGB_8BIT)
        return make_dataset([pair], BINARY, tiling, augmentation=augmentation, seed=seed)

    first, second, other = build(), build(), build(seed=8)
    assert len(first) == 6
    samples = {key: first[key] for key in [(epoch, index) for epoch in range(3) for index in range(6)]}
    assert all(part.shape == (32, 48, 3) and ids.shape == (32, 48) for part, ids in samples.values())
    for key in reversed(samples):
        assert second[key][0].tobytes() == samples[key][0].tobytes()
    assert len({part.tobytes() for part, _ in (*samples.values(), other[0, 0])}) == 19


def test_a_crop_in_the_users_list_is_resized_to_the_batch_and_a_smaller_mask_to_its_image_when_asked_for(tmp_path):
    pair = write_pair(tmp_path, np.zeros((64, 64, 3), np.uint8), np.ones((64, 64), np.uint8))
    crop = build_augmentation([{"RandomCrop": {"height": 16, "width": 24}}], (64, 64), RGB_8BIT)
    image, ids = make_dataset([pair], BINARY, WholeImages((64, 64), 1), augmentation=crop)[0, 0]
    assert (image.shape, ids.shape) == ((64, 64, 3), (64, 64))
    mask = np.array([[0, 1], [2, 255]], np.uint8)
    pair = write_pair(tmp_path, np.zeros((8, 8, 3), np.uint8), mask)
    coding = MaskCoding((0, 1, 2), 0, 255)
    _, ids = make_dataset([pair], coding, WholeImages((8, 8), 1), resize_masks=True)[0, 0]
    assert np.array_equal(ids, mask.repeat(4, 0).repeat(4, 1))


CHANGED = "changed since the run began"


def assert_refused(dataset, path, reason=CHANGED):
    with pytest.raises(DataError) as caught:
        dataset[0, 0]
    assert str(caught.value) == f"{path}: {reason}"


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("mask", np.full((64, 64), 7, np.uint8), CHANGED),  # a value that is no class
        ("image", np.zeros((64, 64, 4), np.uint8), "4 channels; the model was trained on images of 3"),
        ("image", np.zeros((64, 64, 3), np.uint16), "16-bit values; the model was trained on 8-bit images"),
        ("image", np.zeros((64, 65, 3), np.uint8), CHANGED),
    ],
)
def test_a_file_that_has_become_one_of_another_kind_is_refused(own_data, kind, changed, reason):
    path = getattr(own_data.pairs[0], kind)
    with path.open("wb") as file:
        np.save(file, changed)
    assert_refused(own_data, path, reason)


def test_a_grey_image_among_those_of_many_channels_is_repeated_as_the_scan_takes_it(tmp_path):
    spec = replace(RGB_8BIT, channels=4, mean=(0.0,) * 4, std=(1.0,) * 4)
    pair = write_pair(tmp_path, grey := noise(64, 64), grey // 128)
    image, _ = make_dataset([pair], BINARY, WholeImages((64, 64), 1), image_spec=spec)[0, 0]
    assert np.array_equal(image, np.dstack([grey] * 4))


TILINGS = {
    "whole images": WholeImages((32, 32), 1),
    "random crops": RandomCrops((32, 32), 1, 4, ((1,),), 0.5, 0),
    "tiles": tile_images([(256, 256)], (32, 32)),
}


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("extension", "mask_changes"), [(".png", False), (".jpg", True)])
def test_a_pair_replaced_by_one_of_another_size_is_refused(tiling, extension, mask_changes, tmp_path):
    """Also a JPEG that is decoded at a fraction: at 32×32, one of 256 and one of 128 pixels are both decoded at 64×64."""
    image = noise(256, 256, 3)
    pair = write_pair(tmp_path, image, image[:, :, 0] // 128, extension)
    dataset = make_dataset([pair], BINARY, TILINGS[tiling])
    assert dataset.clone_for_worker()[0, 0][0].shape == (32, 32, 3)
    image = noise(128, 128, 3)
    write_image(pair.image, image)
    if mask_changes:
        write_image(pair.mask, image[:, :, 0] // 128)
    assert_refused(dataset, pair.mask if mask_changes else pair.image)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_native_masks_are_padded_to_a_size_that_holds_them_all(num_workers, tmp_path):
    """Also in buffers that held other masks before; images are those of a dataset with resized masks."""
    sizes, pairs = [(40, 50), (64, 20), (8, 8)], []
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).mkdir()
        image = noise(*size, 3)
        pairs.append(write_pair(tmp_path / str(number), image, image[:, :, 0] // 128))
    resized = make_dataset(pairs, BINARY, WholeImages((32, 32), 3))
    native = make_dataset(pairs, BINARY, WholeImages((32, 32), 3, native_masks=True))
    loader = make_loader(native, 2, num_workers, shuffle=False)
    for epoch in range(6):
        for number, batch in enumerate(keep(loader.epoch(epoch))):
            assert (batch.images.shape, batch.masks.shape) == ((2, 32, 32, 3), (2, 64, 50))
            assert batch.mask_sizes == tuple(sizes[2 * number : 2 * number + 2])
            assert torch.equal(batch.images, Loader(resized, 2, shuffle=False).read(0, number).images)
            for pair, size, ids in zip(pairs[2 * number :], batch.mask_sizes, batch.masks, strict=False):
                assert np.array_equal(ids[: size[0], : size[1]], read_mask(pair.mask))
                assert (ids[size[0] :] == IGNORED).all()
                assert (ids[:, size[1] :] == IGNORED).all()
    assert (batch.num_images, batch.mask_sizes) == (1, ((8, 8),))  # the short batch has sizes of its own images alone
    assert (batch.masks[1] == IGNORED).all()
    assert (batch.images[1] == 0).all()


def test_an_image_is_decoded_once_for_its_crops_in_a_batch(tmp_path, monkeypatch):
    pairs = []
    for number, size in enumerate([(60, 50), (64, 70)]):
        (tmp_path / str(number)).mkdir()
        pairs.append(write_pair(tmp_path / str(number), noise(*size, 3), noise(*size) // 128))
    dataset = make_dataset(pairs, BINARY, RandomCrops((32, 32), 2, 4, ((1,), (1,)), 0.5, 0))
    order = [index for _, index in Loader(dataset, 8, shuffle=True).assembler.batches.keys(0, 0)]
    alone = [dataset[0, index] for index in order]
    decoded, read = [], SegmentationDataset._read
    monkeypatch.setattr(SegmentationDataset, "_read", lambda self, pair: (decoded.append(pair), read(self, pair))[1])
    dataset._last_read = None
    batch = Loader(dataset, 8, shuffle=True).read(0, 0)
    assert decoded == [0, 1]
    for image, mask, (expected, ids) in zip(batch.images, batch.masks, alone, strict=True):
        assert np.array_equal(image, expected)
        assert np.array_equal(mask, ids)


def test_epochs_that_share_a_pass_hold_every_sample_once():
    batches = EpochBatches(np.arange(12), 2, seed=3, shuffle=True, epochs_per_pass=3)
    assert len(batches) == 2
    seen, later = (
        [index for epoch in epochs for batch in range(2) for _, index in batches.keys(epoch, batch)]
        for epochs in (range(3), range(3, 6))
    )
    assert sorted(seen) == sorted(later) == list(range(12))
    assert later != seen
    assert {epoch for epoch, _ in batches.keys(4, 0)} == {4}


@pytest.mark.parametrize("epochs_per_pass", [1, 2])
def test_processes_divide_each_step_of_the_seeds_order(epochs_per_pass):
    """Two processes with batches of 3 see in each step what one with batches of 6 sees."""
    one = EpochBatches(np.arange(40), 6, seed=3, shuffle=True, epochs_per_pass=epochs_per_pass)
    options = {"seed": 3, "shuffle": True, "epochs_per_pass": epochs_per_pass, "world_size": 2}
    two = [EpochBatches(np.arange(40), 3, rank=rank, **options) for rank in range(2)]
    assert len(one) == len(two[0]) == len(two[1]) == 40 // epochs_per_pass // 6
    for epoch in range(3):
        for batch in range(len(one)):
            assert one.keys(epoch, batch) == two[0].keys(epoch, batch) + two[1].keys(epoch, batch)
