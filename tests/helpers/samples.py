"""Datasets, loaders and the bytes that they deliver."""

import hashlib

from unet_trainer.config.load import load_config
from unet_trainer.data.find import find_dataset
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import MaskCoding, read_mask
from unet_trainer.images.tiling import WholeImages
from unet_trainer.loading.augmentation import build_augmentation
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.sample_reader import PairSize
from unet_trainer.loading.worker_pool import WorkerPool


def find_pairs(images, masks, mask_suffix=""):
    """The pairs of two folders; raises DataError where files are left unpaired."""
    folders = {"data_dir": str(images.parent), "image_dir": str(images.absolute()), "mask_dir": str(masks.absolute())}
    found = find_dataset(load_config({**folders, "mask_suffix": mask_suffix}))
    if found.blocking_message:
        raise DataError(found.blocking_message)
    return [*found.pairs]


def pair_sizes(pairs):
    """As a scan would have found them."""
    return [PairSize(read_image(pair.image).shape[:2], read_mask(pair.mask).shape) for pair in pairs]


def make_dataset(pairs, coding, tiling, image_spec=RGB_8BIT, augmentation=None, seed=0, resize_masks=False):
    return SegmentationDataset(pairs, pair_sizes(pairs), coding, image_spec, tiling, augmentation, seed, resize_masks)


def build_dataset(data_dir, augmentation="default", seed=3, native_masks=False):
    """The first ten pairs of a folder like tiny_data, at 32×32."""
    pairs = find_pairs(data_dir / "images", data_dir / "masks")[:10]
    pipeline = build_augmentation(augmentation, (32, 32), RGB_8BIT)
    tiling = WholeImages((32, 32), len(pairs), native_masks=native_masks)
    return make_dataset(pairs, MaskCoding((0, 255)), tiling, augmentation=pipeline, seed=seed)


def make_loader(dataset, batch_size, num_workers, shuffle, timeout=None, with_threads=False, cutmix=0.0):
    pool = WorkerPool(num_workers, with_threads=with_threads) if num_workers else None
    return Loader(dataset, batch_size, shuffle, pool, timeout, cutmix=cutmix)


def keep(batches):
    """Copies: the workers fill the memory of a batch again once the next one is asked for."""
    return [batch._replace(images=batch.images.clone(), masks=batch.masks.clone()) for batch in batches]


def epoch_digest(loader, epoch):
    """SHA-256 of every byte that an epoch delivers, in order."""
    total = hashlib.sha256()
    for batch in loader.epoch(epoch):
        total.update(batch.images.numpy().tobytes())
        total.update(batch.masks.numpy().tobytes())
    return total.hexdigest()
