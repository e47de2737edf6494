"""The batches of an epoch: the same for any number of workers, first batch and order of epochs."""

import time

import pytest
import torch

from helpers.samples import build_dataset, epoch_digest, find_pairs, keep, make_dataset, make_loader
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.images.tiling import tile_images
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import EpochTimes, Loader, advise, cut_boxes, paste_pieces, samples_of
from unet_trainer.loading.pixel_cache import fill_cache
from unet_trainer.system.launch import Launch


def test_batches_of_cutmix_carry_their_rectangles_from_any_number_of_workers_and_others_in_each_process(tiny_data):
    dataset = build_dataset(tiny_data)
    loaders = [make_loader(dataset, 4, num_workers, shuffle=True, cutmix=1.0) for num_workers in (0, 2)]
    alone, pooled = ([batch.cut_boxes for batch in loader.epoch(1)] for loader in loaders)
    assert len(alone) == 2
    assert not torch.equal(*alone)
    assert all(torch.equal(one, other) for one, other in zip(alone, pooled, strict=True))
    assert (alone[0][:, 1] > alone[0][:, 0]).all()
    assert alone[0].max() <= 32
    assert torch.equal(next(loaders[0].epoch(1, first_batch=1)).cut_boxes, alone[1])  # as a resumed epoch has them
    assert make_loader(dataset, 4, 0, shuffle=True).read(0, 0).cut_boxes is None
    for rank in range(2):  # as the one process that reads all of it in turn
        launch = Launch(rank, 2, rank, 2, is_torchrun=True)
        of_job = Loader(dataset, 4, shuffle=True, cutmix=1.0, launch=launch).read(1, 0).cut_boxes
        assert torch.equal(of_job, alone[rank])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_can_begin_at_any_batch_and_earlier_ones_are_not_read(tiny_data, num_workers):
    straight = keep(make_loader(build_dataset(tiny_data), 2, 0, shuffle=True).epoch(1))
    dataset = build_dataset(tiny_data)
    loader = make_loader(dataset, 2, num_workers, shuffle=True)
    skipped = {index for batch in range(3) for _, index in loader.batches.keys(1, batch)}
    for index in skipped:
        dataset.pairs[index] = None  # reading it is an error
    late = keep(loader.epoch(1, first_batch=3))
    assert len(late) == 2
    assert all(torch.equal(one.images, two.images) for one, two in zip(straight[3:], late, strict=True))


def test_a_waiting_loader_ends_when_the_run_is_asked_to_stop(tiny_data, monkeypatch):
    monkeypatch.setattr("unet_trainer.loading.worker_pool.POLL_SECONDS", 0.1)
    monkeypatch.setattr(SegmentationDataset, "timed_sample", lambda self, key: time.sleep(3600))
    loader = make_loader(build_dataset(tiny_data), 2, 1, shuffle=True)
    assert list(loader.epoch(0, is_stopping=lambda: True)) == []


@pytest.mark.parametrize(
    ("num_workers", "augmentation", "place", "native_masks"),
    [(0, "none", "ram", True), (0, "none", "disk", True), (2, "strong", "ram", False)],
)
def test_a_cache_changes_no_byte(tiny_data, tmp_path, num_workers, augmentation, place, native_masks):
    """Images at 32×32, native masks at 64×64; the last three of ten pairs are read from their files."""
    plain, cached = (build_dataset(tiny_data, augmentation, native_masks=native_masks) for _ in range(2))
    path = None if place == "ram" else tmp_path / "a.pixels"
    sizes = cached.mask_sizes[:7] if native_masks else None
    cached.cache = fill_cache([(32, 32, 3)] * 7, 1, cached.decode, path, 2, lambda: None, 10**9, sizes)
    assert [pixels.shape for pixels in cached.cache.pair(6)] == [(32, 32, 3), (64, 64) if native_masks else (32, 32)]
    loaders = [make_loader(dataset, 2, num_workers, shuffle=True) for dataset in (plain, cached)]
    assert epoch_digest(loaders[0], 1) == epoch_digest(loaders[1], 1)


def test_tiles_of_an_image_are_validated_by_one_process(tiny_data):
    """Each would decode it otherwise."""
    pairs = find_pairs(tiny_data / "images", tiny_data / "masks")[:3]
    tiling = tile_images([(64, 64)] * 3, (32, 32))
    dataset = make_dataset(pairs, MaskCoding((0, 255)), tiling)
    owned = [samples_of(dataset, rank, 2) for rank in range(2)]
    assert sorted([*owned[0], *owned[1]]) == list(range(len(dataset)))
    images = [{tiling.pair_index(sample) for sample in samples} for samples in owned]
    assert images == [{0, 2}, {1}]


def test_rectangles_lie_in_the_image_and_have_a_fifth_to_seven_tenths_of_its_side():
    boxes = cut_boxes((0, 0, 0), 4000, (100, 200), 1.0)
    top, bottom, left, right = boxes.T
    assert boxes.min() >= 0
    assert (bottom.max() <= 100, right.max() <= 200) == (True, True)
    whole = (top > 0) & (bottom < 100) & (left > 0) & (right < 200)  # the others are cut off by the border
    heights, widths = (bottom - top)[whole], (right - left)[whole]
    assert whole.sum() > 500
    assert heights.min() in (20, 21)
    assert heights.max() in range(60, 71)
    assert ((widths - 2 * heights).abs() <= 2).all()  # the same share of both sides, rounded


def test_pieces_come_from_the_image_before_with_their_masks():
    images = torch.arange(3).view(3, 1, 1, 1).expand(3, 4, 5, 2).to(torch.uint8)
    masks = torch.arange(3).view(3, 1, 1).expand(3, 4, 5).to(torch.uint8) + 10
    boxes = torch.tensor([[1, 3, 2, 5], [0, 0, 0, 0], [0, 4, 0, 1]])
    mixed, mixed_masks = paste_pieces(images, masks, boxes)
    assert mixed[0, :, :, 0].tolist() == [[0, 0, 0, 0, 0], [0, 0, 2, 2, 2], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert torch.equal(mixed[1], images[1])
    assert torch.equal(mixed_masks[1], masks[1])
    assert mixed[2, :, :, 1].tolist() == [[1, 2, 2, 2, 2]] * 4
    assert torch.equal(mixed_masks, mixed[..., 0] + 10)
    assert mixed.dtype == mixed_masks.dtype == torch.uint8


def times(**changes):
    """Half of the time is spent waiting. A worker needs 8 ms for an image."""
    seconds = {"read_seconds": 0.006, "augment_seconds": 0.002}
    return EpochTimes(**{"images_per_second": 400.0, "data_wait": 0.5, **seconds, "num_workers": 4, **changes})


def test_the_setting_that_shortens_the_wait_is_named():
    assert advise(times(data_wait=0.10), 16, "none", on_cpu=False) is None  # so short a wait needs none
    assert advise(times(), 16, "none", on_cpu=False) == (
        "the model waits for data in 50% of the time (reading 6.0 ms and augmenting 2.0 ms an image, 4 workers); "
        "cache: ram would help"
    )
    assert advise(times(), 6, "ram", on_cpu=False).endswith("; num_workers: 5 would help")
    assert advise(times(), 4, "ram", on_cpu=False).endswith(
        "; a smaller image_size or a lighter augmentation would help"
    )
