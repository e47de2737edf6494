"""Masks of several files, one for each object or class of an image; and images with a file for each channel."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.formats.stacks import read_pages
from unet_trainer.data.names import READERS, File, best_match, classes_by_ending
from unet_trainer.data.pairs import Pair, Part
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, ReadError, naming
from unet_trainer.images.image_decoding import VOLUME_EXTENSIONS, Pixels
from unet_trainer.images.mask_decoding import read_mask

FOREGROUND = 255
SOFT_EDGE = 127  # of a file with greys, pixels above this belong to the object
NUM_LOOKED_AT = 3  # masks of each class


MaskParts = dict[File, list[tuple[str, Path]]]  # image → the files of its mask, each with its class; objects have none


def find_object_files(images: Sequence[File], masks: Sequence[File], is_in_sequences: bool) -> MaskParts | None:
    """The mask files of each image where each object has a file of its own: in a folder with the image
    (ID/images/x.png, ID/masks/*.png), or in one of the image's name (masks/x/*.png). Else None."""
    places = {image.folder if is_in_sequences else f"{image.folder}{image.stem}/": image for image in images}
    by_place: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        by_place[mask.folder].append(mask)
    if len(places) < len(images) or not by_place or not set(by_place) <= set(places):
        return None
    own = ((image, by_place[place]) for place, image in places.items() if place in by_place)
    return {image: [("", mask.path) for mask in its] for image, its in own}


def find_class_files(images: Sequence[File], masks: Sequence[File]) -> MaskParts | None:
    """The mask files of each image where each class has a folder of masks: masks/sea/a.png, masks/whale/a.png. Else
    None, also of folders that are named after readers. An image may lack the masks of some classes."""
    by_class: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        name, _, rest = mask.folder.partition("/")
        by_class[name].append(mask._replace(folder=rest))
    are_readers = any(map(READERS.search, by_class))
    if "" in by_class or are_readers or any(image.folder.partition("/")[0] in by_class for image in images):
        return None
    by_image: MaskParts = defaultdict(list)
    for name, files in sorted(by_class.items()):
        match = best_match(images, files)
        if match.masks:
            return None
        for image, mask in match.pairs:
            by_image[image].append((name, mask.path))
    return dict(sorted(by_image.items()))


def find_ending_files(images: Sequence[File], masks: Sequence[File]) -> MaskParts | None:
    """The mask files of each image whose names end in its class or in the number of an object: s0_head.png,
    s0_tail.png. None if they are named in another way, or hold more than two values."""
    by_ending = classes_by_ending(images, masks)
    first_masks = [mask.path for its in by_ending.values() for mask in list(its.values())[:NUM_LOOKED_AT]]
    if not by_ending or not all(map(_holds_two_values, first_masks)):
        return None
    are_objects = "" in by_ending or any(map(str.isdecimal, by_ending))
    found: MaskParts = defaultdict(list)
    for name, its in by_ending.items():
        for image, mask in its.items():
            found[image].append(("" if are_objects else name, mask.path))
    return found


def _holds_two_values(path: Path) -> bool:
    """At most. False for what cannot be read."""
    with contextlib.suppress(ReadError):
        return len(np.unique(read_mask(path))) < 3
    return False


class Merged(NamedTuple):
    """The pairs of images and merged masks, and the files that cannot be used."""

    pairs: list[Pair]
    unreadable: list[str]
    has_background: bool  # some pixels belong to no class


def merge_masks(
    converter: Converter, part: Part, parts: MaskParts, classes: Sequence[str], notices: list[str]
) -> Merged:
    """Writes one mask for each image: of its classes, or of its objects if there are no classes."""
    conversions = [
        Conversion(f"{part}/{image.folder}{image.stem}", [path for _, path in files], partial(_merge, files, classes))
        for image, files in parts.items()
    ]
    kind = "classes" if classes else "objects"
    written = converter.write(kind, list(classes), conversions, "Merging the masks of each image:")
    pairs = []
    for (image, files), mask in zip(parts.items(), written, strict=True):
        shown = f"{files[0][1]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        if not mask.problem:
            pairs.append(Pair(f"{image.folder}{image.stem}", image.path, mask.path, mask_origin=shown))
    facts = [Counter(mask.facts) for mask in written if not mask.problem]
    total = sum(facts, Counter())
    if total["overlap"]:
        holders = f"{sum(fact['overlap'] > 0 for fact in facts)} of {len(facts)} masks"
        wins = f"the later of {', '.join(classes)} wins (class_names sets another order)"
        notices.append(f"{total['overlap']} pixels in {holders} belong to several classes: {wins}")
    return Merged(pairs, [mask.problem for mask in written if mask.problem], total["background"] > 0)


def _merge(files: Sequence[tuple[str, Path]], classes: Sequence[str]) -> tuple[Pixels, dict[str, int]]:
    """The mask, and how many pixels there are of what."""
    merged: Pixels | None = None
    overlap: Any = False
    for name, path in sorted(files, key=lambda item: classes.index(item[0])) if classes else files:
        with naming(path):
            mask = read_mask(path)
        merged = np.zeros(mask.shape, np.uint8) if merged is None else merged
        if mask.shape != merged.shape:
            (height, width), (first_height, first_width) = mask.shape, merged.shape
            raise DataError(f"{path}: {width}×{height}, the other masks of this image are {first_width}×{first_height}")
        is_object, highest = mask > 0, int(mask.max())
        if mask.dtype == np.uint8 and highest > SOFT_EDGE and (is_object != (mask == highest)).any():
            is_object = mask > SOFT_EDGE
        overlap = overlap | ((merged > 0) & is_object)
        merged[is_object] = 1 + classes.index(name) if classes else FOREGROUND
    assert merged is not None  # there is a file
    facts = {"overlap": overlap, "background": merged == 0} if classes else {}
    return merged, {name: int(np.count_nonzero(pixels)) for name, pixels in facts.items()}


def join_channels(paths: Sequence[Path]) -> tuple[Pixels, dict[str, int]]:
    """Of an image or volume, the channels of its files in their order."""
    read: list[Pixels] = []
    for path in paths:
        with naming(path):
            is_volume = path.name.lower().endswith(VOLUME_EXTENSIONS)
            read.append(read_pages(path)[..., None] if is_volume else image_decoding.read_image(path))
        if read[-1].shape[:-1] != read[0].shape[:-1]:
            size, first = ("×".join(map(str, pixels.shape[-2::-1])) for pixels in (read[-1], read[0]))
            raise DataError(f"{path}: {size}, the other channels of this image are {first}")
    return np.concatenate(read, axis=-1), {}
