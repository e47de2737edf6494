"""Masks that are several files for an image, one for each object or one for each class: found by their names, merged into one file.

Objects become foreground. Classes get ids from 1 on; where they overlap, the later one wins.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.datasets.layouts import Folders
from unet_trainer.datasets.name_matching import File, best_match
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_files import Pixels, read_mask
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.plain_content import from_plain

FOREGROUND = 255
SOFT_EDGE = 127  # of a file with greys, pixels above this belong to the object
SAME_THING = 0.6  # two folders of masks with a larger IoU are two readings of one thing, not two classes
READERS = re.compile(
    r"annotator|annotation|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)", re.I
)
NUMBERED = re.compile(r"\D*\d+\D*")


@dataclass(frozen=True)
class MaskParts:
    """The files that make up the mask of an image, each with the name of its class; objects have no name."""

    image: File
    files: tuple[tuple[str, Path], ...]


def find_object_files(images: Sequence[File], masks: Sequence[File], folders: Sequence[Folders]) -> list[MaskParts] | None:
    """The mask files of each image where each object has a file of its own: in a folder with the image (ID/images/x.png,
    ID/masks/*.png), or in one of the image's name (masks/x/*.png). None if the masks are laid out in another way."""
    if folders[0].name:
        places = {image.folder: image for image in images}
        is_one_each = len(places) == len(images)
    else:
        places = {f"{image.folder}{image.stem}/": image for image in images}
        is_one_each = True
    by_place: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        by_place[mask.folder].append(mask)
    if not is_one_each or not set(by_place) <= set(places) or not by_place:
        return None
    classes = _classes_by_stem(list(by_place.values()))
    return [
        MaskParts(image, tuple((mask.stem if classes else "", mask.path) for mask in by_place[place]))
        for place, image in places.items()
        if place in by_place
    ]


def _classes_by_stem(units: Sequence[Sequence[File]]) -> bool:
    """Whether the files of each image are named by their class: liver.png, tumour.png in many folders. Objects are numbered."""
    counts = Counter(mask.stem for unit in units for mask in unit)
    return (
        len(units) > 1
        and len(counts) > 1
        and all(2 * count > len(units) and not NUMBERED.fullmatch(stem) for stem, count in counts.items())
    )


def find_class_files(
    images: Sequence[File], masks: Sequence[File], image_folder: Path
) -> dict[str, list[tuple[File, File]]] | None:
    """The pairs of each class, where each class has a folder of masks: masks/sea/a.png, masks/whale/a.png.

    None if the masks are laid out in another way. An image may lack the masks of some classes.
    """
    by_class: dict[str, list[File]] = defaultdict(list)
    for mask in masks:
        name, _, rest = mask.folder.partition("/")
        by_class[name].append(mask._replace(folder=rest))
    if "" in by_class or any(image.folder.partition("/")[0] in by_class for image in images):
        return None
    found = {}
    for name, files in sorted(by_class.items()):
        match = best_match(images, files, image_folder)
        if match.masks:
            return None
        found[name] = match.pairs
    return found


def class_parts(pairs: Mapping[str, Sequence[tuple[File, File]]]) -> list[MaskParts]:
    by_image: dict[File, list[tuple[str, Path]]] = defaultdict(list)
    for name, matched in pairs.items():
        for image, mask in matched:
            by_image[image].append((name, mask.path))
    return [MaskParts(image, tuple(files)) for image, files in sorted(by_image.items())]


def order_classes(names: Sequence[str], class_names: Sequence[str] | None) -> list[str]:
    """The classes in the order of class_names if it names them (with or without the background), else sorted."""
    for given in (class_names or (), (class_names or ())[1:]):
        if sorted(given) == sorted(names):
            return list(given)
    return sorted(names)


@dataclass(frozen=True)
class _Counts:
    """What was counted when a mask was made of those of several classes; all in pixels but `grey`, which is files."""

    overlap: int
    grey: int
    background: int
    areas: dict[str, int]
    shared: dict[str, int]


class MaskMerger:
    """Writes merged masks and counts what the user should know of them, also of those that an earlier start has written."""

    def __init__(self, files: ConvertedFiles, classes: Sequence[str]) -> None:
        self.files = files
        self.ids = {name: index + 1 for index, name in enumerate(classes)}  # empty: objects
        self.unreadable: list[str] = []
        self._path = files.folder / "counts.json"
        self._counts: dict[str, dict[str, Any]] = {}  # name of a mask → what was counted when it was made
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for name, entry in json.loads(self._path.read_text(encoding="utf-8")).items():
                with contextlib.suppress(ValueError):  # a damaged entry is as good as none: the mask is made anew
                    self._counts[name] = asdict(from_plain(_Counts, entry))
        self._used: list[str] = []

    def merge(self, name: str, parts: MaskParts) -> Path | None:
        """The merged mask; None if one of its files cannot be used, which is then in `unreadable`."""
        if self.ids and name not in self._counts:
            self.files.forget(name)
        make = partial(self._merge_classes, name, parts.files) if self.ids else partial(self._merge_objects, parts.files)
        try:
            path = self.files.write(name, [path for _, path in parts.files], make)
        except _UnusableFile as error:
            self.unreadable.append(str(error))
            return None
        self._used.append(name)
        return path

    def save(self) -> None:
        self.files.save_index()
        with contextlib.suppress(OSError):  # then it is not said at the next start
            write_text_atomically(self._path, json.dumps(self._counts))

    def _merge_objects(self, files: Sequence[tuple[str, Path]]) -> Pixels:
        merged = _Canvas()
        for _, path in files:
            is_object, _ = merged.read(path)
            merged.pixels[is_object] = FOREGROUND
        return merged.pixels

    def _merge_classes(self, name: str, files: Sequence[tuple[str, Path]]) -> Pixels:
        merged, read, num_grey, overlap = _Canvas(), {}, 0, None
        for class_name, path in sorted(files, key=lambda item: self.ids[item[0]]):
            is_class, has_greys = merged.read(path)
            taken = merged.pixels > 0
            overlap = taken & is_class if overlap is None else overlap | (taken & is_class)
            merged.pixels[is_class] = self.ids[class_name]
            read[class_name] = is_class
            num_grey += has_greys
        shared = {f"{one}/{other}": int((read[one] & read[other]).sum()) for one, other in combinations(read, 2)}
        self._counts[name] = {
            "overlap": int(overlap.sum()) if overlap is not None else 0,
            "grey": num_grey,
            "background": int((merged.pixels == 0).sum()),
            "areas": {class_name: int(is_class.sum()) for class_name, is_class in read.items()},
            "shared": {pair: count for pair, count in shared.items() if count},
        }
        return merged.pixels

    @property
    def has_background(self) -> bool:
        """Whether some pixels belong to no class."""
        return any(self._counts.get(name, {}).get("background", 1) for name in self._used)

    def notices(self) -> list[str]:
        counted = [self._counts.get(name, {}) for name in self._used]
        overlaps = [count["overlap"] for count in counted if count.get("overlap")]
        num_grey = sum(count.get("grey", 0) for count in counted)
        found = []
        if overlaps:
            found.append(
                f"{sum(overlaps)} pixels in {len(overlaps)} of {len(counted)} masks belong to several classes: "
                f"the later of {', '.join(self.ids)} wins (class_names sets another order)"
            )
        if num_grey:
            found.append(f"{num_grey} files of classes hold greys: what is above {SOFT_EDGE} belongs to the class")
        return found

    def two_readings(self) -> tuple[str, str, float] | None:
        """Two classes that mark the same pixels, and their IoU over all masks; None if there are none."""
        areas: Counter[str] = Counter()
        shared: Counter[str] = Counter()
        for name in self._used:
            areas.update(self._counts.get(name, {}).get("areas", {}))
            shared.update(self._counts.get(name, {}).get("shared", {}))
        for one, other in combinations(self.ids, 2):
            both = shared[f"{one}/{other}"] + shared[f"{other}/{one}"]
            iou = both / max(1, areas[one] + areas[other] - both)
            if iou > SAME_THING:
                return one, other, iou
        return None


class _UnusableFile(DataError):
    """Names the file and what is wrong with it."""


class _Canvas:
    """The mask that is being made; its size is that of the first file."""

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((0, 0), np.uint8)

    def read(self, path: Path) -> tuple[Pixels, bool]:
        """Which pixels belong to the object or class, and whether the file holds greys; raises _UnusableFile."""
        try:
            mask = read_mask(path)
        except ReadError as error:
            raise _UnusableFile(f"{path}: {error}") from None
        if not self.pixels.size:
            self.pixels = np.zeros(mask.shape, np.uint8)
        if mask.shape != self.pixels.shape:
            (height, width), (first_height, first_width) = mask.shape, self.pixels.shape
            raise _UnusableFile(f"{path}: {width}×{height}, the other masks of this image are {first_width}×{first_height}")
        is_object = mask > 0
        highest = mask.max()
        has_greys = mask.dtype == np.uint8 and int(highest) > SOFT_EDGE and bool((is_object != (mask == highest)).any())
        return (mask > SOFT_EDGE if has_greys else is_object), has_greys
