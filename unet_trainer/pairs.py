"""Where images and masks are: finds the folders, pairs the files by name and splits the pairs. Opens no file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unet_trainer.config import Config
from unet_trainer.images import IMAGE_EXTENSIONS, DataError

NUM_NAMED = 5  # files named in a message before "and N more"
SPLIT_STREAM = 1  # keeps the split's random numbers apart from those of the batches


@dataclass(frozen=True)
class Pair:
    """One image and its mask. The name is the image's path inside its folder, without extension."""

    name: str
    image: Path
    mask: Path


@dataclass(frozen=True)
class Split:
    """Which pairs train and which validate, and the rule that said so."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    rule: str


def build_split(config: Config) -> Split:
    """The pairs of data_dir, split by its train/ and val/ folders or by val_fraction; raises DataError."""
    data_dir = Path(config.data_dir)
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")
    image_dir, mask_dir = config.image_dir or "images", config.mask_dir or "masks"
    train_folders = _folders(data_dir, image_dir, mask_dir, "train")
    val_folders = _folders(data_dir, image_dir, mask_dir, "val")
    if train_folders and val_folders:
        train = find_pairs(*train_folders, config.mask_suffix)
        val = find_pairs(*val_folders, config.mask_suffix)
        return Split(tuple(train), tuple(val), "folders train and val")
    folders = train_folders or (data_dir / image_dir, data_dir / mask_dir)
    pairs = find_pairs(*folders, config.mask_suffix)
    train, val = split_pairs(pairs, config.val_fraction, config.seed)
    return Split(tuple(train), tuple(val), f"val_fraction {config.val_fraction:g}, seed {config.seed}")


def _folders(data_dir: Path, image_dir: str, mask_dir: str, part: str) -> tuple[Path, Path] | None:
    """The folders of one part: data_dir/train/images or data_dir/images/train; None when there are none."""
    below = (data_dir / image_dir / part, data_dir / mask_dir / part)
    above = (data_dir / part / image_dir, data_dir / part / mask_dir)
    is_absolute = Path(image_dir).is_absolute()  # then `above` would be the same folder for train and val
    for images, masks in (below,) if is_absolute else (above, below):
        if images.is_dir():
            return images, masks
    return None


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names are equal but for the extension and mask_suffix, sorted by name."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        present = sorted(f"{path.name}/" for path in image_folder.parent.glob("*") if path.is_dir())
        there = f"; {image_folder.parent} holds {', '.join(present)}" if present else ""
        raise DataError(f"no folder {' and no folder '.join(missing)}{there}; set image_dir and mask_dir to the folders' names")
    problems: list[str] = []
    images = _files_by_name(image_folder, "", problems)
    masks = _files_by_name(mask_folder, mask_suffix, problems)
    if not images:
        raise DataError(f"no images in {image_folder}; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}")
    without_mask = [str(images[name]) for name in sorted(images.keys() - masks.keys())]
    without_image = [str(masks[name]) for name in sorted(masks.keys() - images.keys())]
    if without_mask:
        wanted = f"{Path(without_mask[0]).stem}{mask_suffix}.png"
        problems.append(
            f"{_count(without_mask, 'image')} without a mask in {mask_folder} (such as {wanted}): {_some(without_mask)}"
        )
    if without_image:
        problems.append(f"{_count(without_image, 'mask')} without an image in {image_folder}: {_some(without_image)}")
    if problems:
        fix = "" if images.keys() & masks.keys() else "\n  No name matches: is mask_suffix right?"
        raise DataError("images and masks do not pair up:\n  " + "\n  ".join(problems) + fix)
    return [Pair(name, images[name], masks[name]) for name in sorted(images)]


def _files_by_name(folder: Path, suffix: str, problems: list[str]) -> dict[str, Path]:
    """Name without extension and suffix → file, subfolders included. Hidden files and other extensions are no images."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if (
            path.suffix.lower() not in IMAGE_EXTENSIONS
            or any(part.startswith(".") for part in relative.parts)
            or not path.is_file()
        ):
            continue
        name = relative.with_suffix("").as_posix()
        if not name.endswith(suffix):
            problems.append(f"{path} does not end in mask_suffix {suffix!r}")
            continue
        name = name.removesuffix(suffix)
        if name in found:
            problems.append(f"{found[name]} and {path} have the same name; keep one")
        found[name] = path
    return found


def split_pairs(pairs: list[Pair], val_fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The same pairs and seed give the same split on every machine."""
    if len(pairs) < 2:
        raise DataError(f"only {len(pairs)} pair; need at least 2, one to train on and one to validate on")
    num_val = min(max(1, round(len(pairs) * val_fraction)), len(pairs) - 1)
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(pairs))
    held_out = set(order[:num_val].tolist())
    train = [pair for index, pair in enumerate(pairs) if index not in held_out]
    val = [pair for index, pair in enumerate(pairs) if index in held_out]
    return train, val


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:NUM_NAMED]) + (f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else "")
