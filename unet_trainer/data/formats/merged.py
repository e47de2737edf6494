"""Masks of several files, one for each object or class of an image; and images with a file for each channel."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from unet_trainer.data.converted import Conversion, Converted, Converter
from unet_trainer.data.formats.stacks import read_pages
from unet_trainer.data.names import MASK_WORDS, SEPARATOR, File, masks_by_ending, match_names
from unet_trainer.data.pairs import Part, first_few
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, ReadError, naming
from unet_trainer.images.image_decoding import VOLUME_EXTENSIONS, Pixels
from unet_trainer.images.mask_decoding import read_mask

READERS = re.compile(
    r"annotator|annotation|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)",
    re.IGNORECASE,
)
NO_CLASS = re.compile(f"instance|color|colour|polygon|overlay|vis|edge|boundary|{READERS.pattern}", re.IGNORECASE)
CHANNEL = re.compile(r"_\d{4}$")  # of nnU-Net: case_0000.png is the first channel of the case whose label is case.png
NUM_LOOKED_AT = 3  # masks of each class
FOREGROUND = 255
SOFT_EDGE = 127  # of a file with greys, pixels above this belong to the object

MaskParts = dict[File, list[tuple[str, File]]]  # image → the files of its mask, each with its class; objects have none


def find_object_files(images: list[File], masks: list[File], is_in_sequences: bool) -> MaskParts:
    """The mask files of each image where each object has a file of its own: in a folder with the image
    (ID/images/x.png, ID/masks/*.png), or in one of the image's name (masks/x/*.png). Else empty."""
    places = {(image.part, image.folder if is_in_sequences else f"{image.name}/"): image for image in images}
    if len(places) < len(images) or any((mask.part, mask.folder) not in places for mask in masks):
        return {}
    return _by_image((places[mask.part, mask.folder], "", mask) for mask in masks)


def find_class_files(images: list[File], masks: list[File]) -> MaskParts:
    """The mask files of each image where each class has a folder of masks: masks/sea/a.png, masks/whale/a.png. Else
    empty, also for folders that are named after readers. An image may lack the masks of some classes."""
    by_class: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        name, _, rest = mask.folder.partition("/")
        by_class[name].append(mask._replace(folder=rest))
    is_folder_of_images = any(image.folder.partition("/")[0] in by_class for image in images)
    if "" in by_class or is_folder_of_images or any(map(READERS.search, by_class)):
        return {}
    matches = {name: match_names(images, files) for name, files in sorted(by_class.items())}
    if any(match.masks for match in matches.values()):
        return {}
    return _by_image((image, name, mask) for name, match in matches.items() for image, mask in match.pairs)


def find_ending_files(images: list[File], masks: list[File]) -> MaskParts:
    """The mask files of each image whose names end in its class or in the number of an object: s0_head.png and
    s0_tail.png, s0_mask.png and s0_mask_1.png. Empty unless the endings are clear: several, of classes with several
    images, none of a reader or a view of one mask; and the masks hold two values at most."""
    by_name: dict[str, list[tuple[File, File]]] = defaultdict(list)  # class or number of the object → images and masks
    are_objects = are_classes = True
    for ending, its in sorted(masks_by_ending(images, masks).items()):
        words = [word for word in SEPARATOR.split(ending) if not re.fullmatch(MASK_WORDS, word, re.IGNORECASE)]
        name = "_".join(filter(None, words))
        are_objects &= "mask" in ending.lower() and (not name or name.isdecimal())
        are_classes &= len(its) > 1 and bool(re.fullmatch(r"[^\W\d]{2,}", name)) and not NO_CLASS.search(name)
        by_name[name] += its.items()
    pairs = [pair for its in by_name.values() for pair in its]
    all_belong = len(pairs) == len(masks) and all(mask.name.startswith(image.name) for image, mask in pairs)
    most_have = 2 * len({image for image, _ in pairs}) > len(images)
    if len(by_name) < 2 or not all_belong or not most_have or not (are_objects or are_classes):
        return {}
    if not all(_holds_two_values(mask) for its in by_name.values() for _, mask in its[:NUM_LOOKED_AT]):
        return {}
    return _by_image((image, "" if are_objects else name, mask) for name, its in by_name.items() for image, mask in its)


def hold_two_values(parts: MaskParts) -> bool:
    """Whether the first masks of each class, or of the objects, hold two values at most: those of a class do."""
    by_name: dict[str, list[File]] = defaultdict(list)
    for name, mask in (part for files in parts.values() for part in files):
        by_name[name].append(mask)
    for mask in (mask for its in by_name.values() for mask in its[:NUM_LOOKED_AT]):
        with contextlib.suppress(ReadError):  # which is reported where it is merged
            if len(np.unique(read_mask(mask.path))) > 2:
                return False
    return True


def _by_image(parts: Iterable[tuple[File, str, File]]) -> MaskParts:
    found: MaskParts = defaultdict(list)
    for image, name, mask in parts:
        found[image].append((name, mask))
    return dict(sorted(found.items()))


def _holds_two_values(mask: File) -> bool:
    """At most. False for what cannot be read."""
    with contextlib.suppress(ReadError):
        return len(np.unique(read_mask(mask.path))) < 3
    return False


def merge_masks(converter: Converter, parts: MaskParts, classes: Sequence[str]) -> list[Converted]:
    """One mask for each image: of its classes, or of its objects if there are no classes."""
    conversions = []
    for image, files in parts.items():
        name, paths = f"{image.part or 'train'}/{image.name}", [file.path for _, file in files]
        conversions.append(Conversion(name, paths, partial(_merge, files, classes)))
    kind = "classes" if classes else "objects"
    return converter.write(kind, [*classes], conversions, "Merging the masks of each image:")


def name_files(files: Sequence[tuple[str, File]]) -> str:
    """How messages name the mask that is made of these files."""
    return f"{files[0][1].path}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def describe_overlap(masks: Sequence[Converted], classes: Sequence[str]) -> list[str]:
    """A notice of the pixels that belong to several classes."""
    overlaps = [mask.facts["overlap"] for mask in masks if not mask.problem]
    holders = f"{sum(map(bool, overlaps))} of {len(overlaps)} masks"
    wins = f"the later of {', '.join(classes)} wins (class_names sets another order)"
    return [f"{sum(overlaps)} pixels in {holders} belong to several classes: {wins}"] if any(overlaps) else []


def _merge(files: Sequence[tuple[str, File]], classes: Sequence[str]) -> tuple[Pixels, dict[str, int]]:
    """The mask, and how many pixels there are of what."""
    merged, overlap = np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.bool_)
    for name, file in sorted(files, key=lambda item: classes.index(item[0])) if classes else files:
        with naming(path := file.path):
            mask = read_mask(path)
        if not merged.size:
            merged, overlap = np.zeros(mask.shape, np.uint8), np.zeros(mask.shape, np.bool_)
        if mask.shape != merged.shape:
            (height, width), (first_height, first_width) = mask.shape, merged.shape
            raise DataError(f"{path}: {width}×{height}, the other masks of this image are {first_width}×{first_height}")
        is_object, highest = mask > 0, int(mask.max())
        if mask.dtype == np.uint8 and highest > SOFT_EDGE and (is_object != (mask == highest)).any():
            is_object = mask > SOFT_EDGE
        overlap |= (merged > 0) & is_object
        merged[is_object] = 1 + classes.index(name) if classes else FOREGROUND
    counts = {"overlap": overlap, "background": merged == 0} if classes else {}
    return merged, {name: int(np.count_nonzero(pixels)) for name, pixels in counts.items()}


def join_channels(
    converter: Converter, images: list[File], masks: list[File]
) -> tuple[list[File], dict[Path, str], list[str]]:
    """The images, where the channels of each are files of their own (nnU-Net: a_0000.png and a_0001.png for the mask
    a.png) joined; what messages call these; and what cannot be read. Raises DataError where channels are missing."""
    if not all(CHANNEL.search(image.stem) for image in images):
        return images, {}, []
    cases: dict[tuple[Part | None, str], list[File]] = defaultdict(list)
    for image in images:
        cases[image.part, CHANNEL.sub("", image.name)].append(image)
    names, channels = {(mask.part, mask.name) for mask in masks}, sorted({image.name[-5:] for image in images})
    if channels[:1] != ["_0000"] or names.isdisjoint(cases) or any((each.part, each.name) in names for each in images):
        return images, {}, []
    conversions = []
    for (part, name), files in cases.items():
        files.sort(key=lambda file: file.name)
        if [file.name for file in files] != [f"{name}{channel}" for channel in channels]:
            there = first_few(file.file_name for file in files)
            what = f"has {len(channels)} channel files for others, and for {name} {there}"
            need = first_few(f"{name}{channel}" for channel in channels)
            raise DataError(f"image_dir: {files[0].place} {what}; need {need}")
        paths = [file.path for file in files]
        conversions.append(Conversion(f"{part or 'train'}/{name}", paths, partial(_join, paths), ".npy"))
    cut = [files[0]._replace(stem=CHANNEL.sub("", files[0].stem)) for files in cases.values()]
    if len(channels) == 1:
        return cut, {}, []
    written = converter.write("channels", None, conversions, "Joining the channels of each image:")
    made = {
        file._replace(place=one.path.parent, file_name=one.path.name): f"{file.path} and {len(channels) - 1} more"
        for file, one in zip(cut, written, strict=True)
        if not one.problem
    }
    return (
        [*made],
        {file.path: origin for file, origin in made.items()},
        [one.problem for one in written if one.problem],
    )


def _join(paths: Sequence[Path]) -> tuple[Pixels, dict[str, int]]:
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
