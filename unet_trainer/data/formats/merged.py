"""Masks of several files, one for each object or class of an image; and images with a file for each channel."""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.formats.stacks import read_pages
from unet_trainer.data.names import MASK_WORDS, SEPARATOR, File, masks_by_ending, match_names
from unet_trainer.data.pairs import UNREADABLE, FoundPairs, Pair, Part, Problem, first_few
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, ReadError, naming
from unet_trainer.images.image_decoding import VOLUME_EXTENSIONS, Pixels
from unet_trainer.images.mask_decoding import read_mask

READERS = re.compile(
    r"(?i)annotat|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)"
)
VIEWS = re.compile("(?i)instance|color|colour|polygon|overlay|vis|edge|boundary")  # of one mask
CHANNEL = re.compile(r"_\d{4}$")  # of nnU-Net: case_0000.png is the first channel of the case whose label is case.png
NUM_LOOKED_AT = 3  # masks of each class
FOREGROUND = 255
SOFT_EDGE = 127  # of a file with greys, pixels above this belong to the object

MaskParts = dict[File, list[tuple[str, File]]]  # image → the files of its mask, each with its class; objects have none
Parts = Sequence[tuple[File, str, File]]  # image, class and file


def find_parts(images: list[File], masks: list[File], is_one_folder: bool, is_in_sequences: bool) -> MaskParts:
    """The mask files of each image where it has several, or one in a folder of a class; else empty."""
    parts: Parts = []
    if not is_one_folder:
        parts = _find_object_files(images, masks, is_in_sequences) or _find_class_files(images, masks)
    found: MaskParts = defaultdict(list)
    for image, name, mask in parts or find_ending_files(images, masks):
        found[image].append((name, mask))
    return dict(sorted(found.items()))


def _find_object_files(images: list[File], masks: list[File], is_in_sequences: bool) -> Parts:
    """The mask files of each image where each object has a file of its own: in a folder with the image
    (ID/images/x.png, ID/masks/*.png), or in one of the image's name (masks/x/*.png). Else empty."""
    places = {(image.part, image.folder if is_in_sequences else f"{image.name}/"): image for image in images}
    if len(places) < len(images) or any((mask.part, mask.folder) not in places for mask in masks):
        return []
    return [(places[mask.part, mask.folder], "", mask) for mask in masks]


def _find_class_files(images: list[File], masks: list[File]) -> Parts:
    """The mask files of each image where each class has a folder of masks: masks/sea/a.png, masks/whale/a.png. Else
    empty, also for folders that are named after readers. An image may lack the masks of some classes."""
    by_class: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        name, _, rest = mask.folder.partition("/")
        by_class[name].append(mask._replace(folder=rest))
    is_folder_of_images = any(image.folder.partition("/")[0] in by_class for image in images)
    if "" in by_class or is_folder_of_images or any(map(READERS.search, by_class)):
        return []
    matches = {name: match_names(images, files) for name, files in sorted(by_class.items())}
    if any(match.masks for match in matches.values()):
        return []
    return [(image, name, mask) for name, match in matches.items() for image, mask in match.pairs]


def find_ending_files(images: list[File], masks: list[File]) -> Parts:
    """The mask files of each image whose names end in its class or in the number of an object: s0_head.png and
    s0_tail.png, s0_mask.png and s0_mask_1.png. Empty unless the endings are clear: several, of classes with several
    images, none of a reader or a view of one mask; and the masks hold two values at most."""
    found: list[tuple[File, str, File]] = []
    are_objects = are_classes = True
    for ending, its in sorted(masks_by_ending(images, masks).items()):
        words = [word for word in SEPARATOR.split(ending) if not re.fullmatch(MASK_WORDS, word, re.IGNORECASE)]
        name = "_".join(filter(None, words))
        are_objects &= "mask" in ending.lower() and (not name or name.isdecimal())
        is_word = re.fullmatch(r"[^\W\d]{2,}", name) and not VIEWS.search(name) and not READERS.search(name)
        are_classes &= len(its) > 1 and bool(is_word)
        found += [(image, name, mask) for image, mask in its.items()]
    all_belong = len(found) == len(masks) and all(mask.name.startswith(image.name) for image, _, mask in found)
    most_have = 2 * len({image for image, *_ in found}) > len(images)
    has_several = len({name for _, name, _ in found}) > 1
    are_clear = all_belong and most_have and has_several and (are_objects or are_classes)
    if not are_clear or not hold_two_values((name, mask) for _, name, mask in found):
        return []
    return [(image, "" if are_objects else name, mask) for image, name, mask in found]


def hold_two_values(masks: Iterable[tuple[str, File]]) -> bool:
    """Whether the first masks of each class, or of the objects, hold two values at most: those of a class do."""
    num_seen = Counter[str]()
    for name, mask in masks:
        num_seen[name] += 1
        with contextlib.suppress(ReadError):  # which is reported where it is merged
            if num_seen[name] <= NUM_LOOKED_AT and len(np.unique(read_mask(mask.path))) > 2:
                return False
    return True


def merge_masks(converter: Converter, parts: MaskParts, names: Sequence[str]) -> FoundPairs:
    """One mask for each image: of its classes, or of its objects where the name is ""."""
    classes, conversions = [name for name in names if name], []
    for image, files in parts.items():
        if unknown := {name for name, _ in files} - {*names}:
            what = f"{image.path} has masks of {first_few(sorted(unknown))}"
            raise DataError(f"{what}; need the classes that train has")
        make = partial(_merge, files, classes)
        conversions.append(Conversion(f"{image.part or 'train'}/{image.name}", [file.path for _, file in files], make))
    kind, label = "classes" if classes else "objects", "Merging the masks of each image:"
    written = converter.write(kind, classes, conversions, label)
    pairs, bad = list[Pair](), tuple(mask.problem for mask in written if mask.problem)
    for (image, files), mask in zip(parts.items(), written, strict=True):
        origin = f"{files[0][1].path}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        if not mask.problem:
            pairs.append(Pair(image.name, image.path, mask.path, image.part, mask_origin=origin))
    problems = (Problem("unreadable", *UNREADABLE, bad, "repair these files"),) if bad else ()
    if not classes:
        number = sum(map(len, parts.values()))
        return FoundPairs(tuple(pairs), f"a mask file for each object, {number} files merged", problems)
    overlaps = [mask.facts["overlap"] for mask in written if not mask.problem]
    what = f"{sum(overlaps)} pixels in {sum(map(bool, overlaps))} of {len(overlaps)} masks belong to several classes"
    notice = f"{what}: the later of {', '.join(classes)} wins (class_names sets another order)"
    has_background = any(mask.facts.get("background") for mask in written)
    return FoundPairs(
        tuple(pairs),
        f"a mask file for each class: {', '.join(classes)}",
        problems,
        notices=(notice,) if any(overlaps) else (),
        class_names=(*(["background"] if has_background else []), *classes),
    )


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
    return merged, {"overlap": int(overlap.sum()), "background": int((merged == 0).sum())}


def join_channels(
    converter: Converter, images: list[File], masks: list[File]
) -> tuple[list[File], dict[Path, str], list[Problem]]:
    """The images, where the channels of each are files of their own (nnU-Net: a_0000.png and a_0001.png for the mask
    a.png) joined; what messages call these; and what cannot be read. Raises DataError where channels are missing."""
    if not all(CHANNEL.search(image.stem) for image in images):
        return images, {}, []
    cases: dict[tuple[Part | None, str], list[File]] = defaultdict(list)
    for image in sorted(images, key=lambda image: image.name):
        cases[image.part, CHANNEL.sub("", image.name)].append(image)
    names, channels = {(mask.part, mask.name) for mask in masks}, sorted({image.name[-5:] for image in images})
    if channels[:1] != ["_0000"] or names.isdisjoint(cases) or any((each.part, each.name) in names for each in images):
        return images, {}, []
    conversions, cut = [], []
    for (part, name), files in cases.items():
        wanted = [f"{name}{channel}" for channel in channels]
        if [file.name for file in files] != wanted:
            there = first_few(file.file_name for file in files)
            what = f"has {len(channels)} channel files for others, and for {name} {there}"
            raise DataError(f"image_dir: {files[0].place} {what}; need {first_few(wanted)}")
        paths = [file.path for file in files]
        conversions.append(Conversion(f"{part or 'train'}/{name}", paths, partial(_join, paths), ".npy"))
        cut.append(files[0]._replace(stem=CHANNEL.sub("", files[0].stem)))
    if len(channels) == 1:
        return cut, {}, []
    joined, origins, bad = list[File](), dict[Path, str](), list[str]()
    written = converter.write("channels", None, conversions, "Joining the channels of each image:")
    for file, one in zip(cut, written, strict=True):
        if one.problem:
            bad.append(one.problem)
            continue
        joined.append(file._replace(place=one.path.parent, file_name=one.path.name))
        origins[one.path] = f"{file.path} and {len(channels) - 1} more"
    return joined, origins, [Problem("unreadable", *UNREADABLE, tuple(bad), "repair these files")] if bad else []


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
