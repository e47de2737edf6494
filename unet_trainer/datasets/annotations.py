"""Annotated images → pairs: the shapes of each image are drawn into a mask of class ids, once, and kept under checkpoint_dir.

0 is the background, 1 the first class. Only files in the folder of images can be meant, whatever path an annotation
names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.datasets.converted import Conversion, Converted, Converter
from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, composed, path_in
from unet_trainer.datasets.problems import Problem, describe_problems, first_few
from unet_trainer.datasets.rasterize import Canvas, Patch
from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import DataError, ReadError, read_bytes
from unet_trainer.images.image_files import Pixels, decode_image, refuse_bomb
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.system.console import counted

MAX_CLASSES = 253  # 0 is the background; 254 and 255 are taken
BACKGROUND_NAMES = frozenset(["background", "_background_", "__background__"])  # these are class 0
IGNORE_NAME = "__ignore__"  # LabelMe's name for pixels that count nowhere
PART_WORDS = {word: part for word, part in PARTS.items() if len(word) > 2}  # "tr" and "ts" mean little in a file's name

# Shapes that are not drawn as their outline, or not at all: for one and for several, and what is done with them.
SHORT, NO_AREA, LINE, RECTANGLE, IN_CROWD, NO_PIXEL = "short", "no_area", "line", "rectangle", "crowd", "no_pixel"
OVERLAP = "overlap"  # pixels that shapes of different classes claim
NOTES: Mapping[str, tuple[str, str, str]] = {
    SHORT: ("outline", "outlines", "of fewer than 3 points left out"),
    NO_AREA: ("point, line or box in space", "points, lines or boxes in space", "left out: without an area"),
    LINE: ("line", "lines", "drawn 10 pixels wide, as the tool does"),
    RECTANGLE: ("rectangle", "rectangles", "filled, as the tool does: the mask has its corners, not the object's outline"),
    IN_CROWD: ("crowd region (iscrowd)", "crowd regions (iscrowd)", "drawn as part of its class, below all objects"),
    NO_PIXEL: ("object", "objects", "without a pixel: smaller than one, or outside of the image"),
}


class EntryError(DataError):
    """An entry of an annotation file that cannot be used: the message is the reason; the caller adds file and entry."""


class Shape(NamedTuple):
    """The pixels of an object, None if it has none to draw; `note` is one of the above."""

    patch: Patch | None
    note: str = ""


class Entry(NamedTuple):
    """An object as its file has it: its class, how messages name it, and what `read_shape` of the format reads."""

    label: str
    name: str
    content: Any
    has_area: bool = True


@dataclass(frozen=True)
class AnnotatedImage:
    """An image that an annotation file lists."""

    name: str  # of the image file, with folders before it if the annotation has them
    entries: Sequence[Entry]
    size: tuple[int, int] | None = None  # height and width that the annotation states
    part: str = ""  # train, val or test
    image: Path = Path()  # the file that is meant, once it is found
    sources: tuple[Path, ...] = ()  # the annotation file
    where: str = ""  # names the entry in a message: "instances.json, image 'a.jpg'"


@dataclass
class Annotations:
    """What a reader found in the annotation files of a dataset."""

    tool: str  # "COCO", "LabelMe", ...
    files: str  # what was read, for people: "annotations/instances_train.json"
    declared: list[str]  # names of the classes, in their order
    class_order: str  # "by category id"
    overlap_rule: str  # "the smaller object is on top", else the later one is
    read_shape: Callable[[Any, int, int], Shape]  # content of an entry, height and width; raises DataError
    images: list[AnnotatedImage]
    notices: list[str] = field(default_factory=list)


# Which image is meant


def part_in(names: Iterable[str]) -> str:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg; else ""."""
    found = {PART_WORDS[word] for name in names for word in re.findall("[a-z]+", name.lower()) if word in PART_WORDS}
    return found.pop() if len(found) == 1 else ""


def part_of_file(path: Path, data_dir: Path, by_name: bool = False) -> str:
    """The part of an annotation file: by its own name if that is asked for and tells, else by the folders above it."""
    folders = path.relative_to(data_dir).parts[:-1] if path.is_relative_to(data_dir) else ()
    return (part_in([path.stem]) if by_name else "") or part_in(folders)


class ImageIndex:
    """The image files of a folder, found by the names that annotations give them."""

    def __init__(self, root: Path, files: Iterable[Path]) -> None:
        self.root, self.files = root, list(files)
        self._folders = {path: PurePosixPath(path_in(root, path)).parts[:-1] for path in self.files}
        self._by_name: dict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            for name in {_plain(path.name), _plain(path.stem)}:
                self._by_name[name].append(path)

    def part_of(self, path: Path) -> str:
        """train, val or test by the folders above an image."""
        return part_in(self._folders[path])

    def knows_folders(self, names: Iterable[str]) -> bool:
        """Whether one of the names with folders is here with all of them. Then p2/1.png is not p1/1.png, if p2 is missing."""
        for name in names:
            *folders, last = path_pieces(name) or [""]
            if folders and any(self._agreement(folders, path) == len(folders) for path in self._by_name.get(_plain(last), [])):
                return True
        return False

    def find(self, name: str, near: Path, part: str, with_folders: bool) -> Path | None:
        """The file for a name, possibly with folders before it; None if there is none. Raises DataError if several are possible.

        Of several files with the same name, the one whose folders agree most, then those below `near`, then those of the part.
        A file of another part than `part` is none: val/1.png is not the 1.png of train. `with_folders`: all folders must agree.
        """
        *folders, last = path_pieces(name) or [""]
        part = part_in(folders) or part
        candidates = [
            path
            for path in self._by_name.get(_plain(last), [])
            if (not part or self.part_of(path) in ("", part))
            and (not with_folders or self._agreement(folders, path) == len(folders))
        ]
        for rank in (
            lambda path: _plain(path.name) == _plain(last),  # else a name without its extension
            lambda path: self._agreement(folders, path),
            lambda path: path.is_relative_to(near),
            lambda path: path.parent == near,
            lambda path: self.part_of(path) == part,
            lambda path: path.name == last,
        ):
            if len(candidates) > 1:
                best = max(map(rank, candidates))
                candidates = [path for path in candidates if rank(path) == best]
        if len(candidates) > 1:
            paths = first_few(path_in(self.root, path) for path in candidates)
            raise DataError(f"image_dir: {name} could be {paths}; set image_dir to the folder that is meant")
        return candidates[0] if candidates else None

    def _agreement(self, wanted: Sequence[str], path: Path) -> int:
        """How many of the folders above a file are those that are wanted, from the last backwards."""
        pairs = list(zip(reversed(wanted), reversed(self._folders[path]), strict=False))
        return next((number for number, (one, other) in enumerate(pairs) if _plain(one) != _plain(other)), len(pairs))


def path_pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them."""
    return [piece for piece in PurePosixPath(name.replace("\\", "/")).parts if piece not in ("/", ".", "..")]


def _plain(name: str) -> str:
    """Equal for names that differ in case or in the form of accents only: a name may come from another operating system."""
    return composed(name).casefold()


# Drawing


def is_background(name: str) -> bool:
    return name.lower() in BACKGROUND_NAMES


def draw_masks(annotations: Annotations, index: ImageIndex, converter: Converter, class_names: Sequence[str] | None) -> FoundPairs:
    """The pairs of annotated images and drawn masks. `class_names` is the setting, if it is set. Raises DataError."""
    _refuse_twice(annotations.images)
    classes, notices = choose_classes(annotations, class_names)
    ids = {name: number for number, name in enumerate(classes, start=1)}
    smaller_on_top = annotations.overlap_rule.startswith("the smaller")
    images = annotations.images
    if not any(image.entries for image in images if image.part == "test"):
        # Test images without a single object were not annotated: all of them background would be a wrong truth.
        images = [image for image in images if image.part != "test"] or images
    if len(images) < len(annotations.images):
        notices.append(f"{counted(len(annotations.images) - len(images), 'test image')} left out: none has any annotation")
    conversions = [
        Conversion(
            path_in(index.root, image.image).lstrip("/"),
            (*image.sources, image.image),
            partial(draw_mask, image, annotations.read_shape, ids, smaller_on_top),
        )
        for image in images
    ]
    label = "Drawing masks from annotations:"
    drawn = converter.write(annotations.tool.lower(), [classes, smaller_on_top], conversions, label)
    parts = {image.part for image in images}
    is_divided, has_test = {"train", "val"} <= parts, "test" in parts and len(parts) > 1
    counts = Counter(path_in(index.root, image.image.with_suffix("")) for image in images)
    pairs: list[Pair] = []
    problems: list[tuple[Part | None, str]] = []
    for image, mask in zip(images, drawn, strict=True):
        divided: Part = "val" if image.part == "val" else "train"
        part: Part | None = "test" if has_test and image.part == "test" else divided if is_divided else None
        if mask.problem:
            problems.append((part, f"{image.where}: {mask.problem}"))
            continue
        name = path_in(index.root, image.image.with_suffix(""))
        name += image.image.suffix if counts[name] > 1 else ""  # a.jpg and a.png
        pairs.append(Pair(name, image.image, mask.path, part, mask_origin=image.where))
    lines = tuple(text for part, text in problems if part != "test")
    titles = "annotation that cannot be used", "annotations that cannot be used"
    fix = "correct these entries, or their image files, or remove them"
    found = (Problem("annotations", *titles, lines, fix),) if lines else ()
    pairs.sort(key=lambda pair: pair.name)
    if all(pair.part == "test" for pair in pairs):
        raise DataError(describe_problems(found) or f"{annotations.files} has no image to train on")
    notices = [*annotations.notices, *notices, *_notices(annotations, images, drawn, index)]
    if len(problems) > len(lines):
        texts = [text for part, text in problems if part == "test"]
        notices.append(f"{counted(len(texts), 'test image')} left out: {first_few(texts, 3)}")
    rule = f"{annotations.files} ({annotations.tool}), drawn as masks, classes {annotations.class_order}"
    return FoundPairs(
        tuple(pair for pair in pairs if pair.part != "test"),
        f"{rule}; as they are divided into train and val" if is_divided else rule,
        describe_problems(found),
        found,
        test=tuple(pair for pair in pairs if pair.part == "test"),
        class_names=classes if len(classes) == 1 else ("background", *classes),
        num_classes=1 if len(classes) == 1 else len(classes) + 1,
        notices=tuple(notices),
    )


def choose_classes(annotations: Annotations, class_names: Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """The classes that occur, in the order of class_names (which may name more) or in their own; and notices. Raises DataError.

    A single class may have any name, because its id is clear.
    """
    used = {entry.label for image in annotations.images for entry in image.entries if entry.has_area}
    names = [name for name in dict.fromkeys(annotations.declared) if not is_background(name) and name != IGNORE_NAME]
    classes = tuple(name for name in names if name in used)
    what = f"{annotations.files} ({annotations.tool})"
    if not classes:
        raise DataError(f"{what} holds no object of any class, so that there is nothing to learn")
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{what} has {len(classes)} classes; need at most {MAX_CLASSES}")
    unused = [name for name in names if name not in used]
    notices = [f"{counted(len(unused), 'class', 'classes')} without any object left out: {first_few(unused)}"] if unused else []
    wanted = [name for name in class_names or () if not is_background(name)]
    if not wanted or len(wanted) == len(classes) == 1:
        return classes, notices
    others = [name for name in classes if name not in wanted]
    if others:
        raise DataError(
            f"class_names: {first_few(others)} of {annotations.files} {'is' if len(others) == 1 else 'are'} not in it; "
            f"leave it out, or list the names of the annotations: {first_few(['background', *classes], 40)}"
        )
    return tuple(wanted), notices


def draw_mask(
    image: AnnotatedImage, read_shape: Callable[[Any, int, int], Shape], ids: Mapping[str, int], smaller_on_top: bool
) -> tuple[Pixels, dict[str, int]]:
    """H,W uint8 class ids of one image, and how often something is worth a note. Raises DataError without the image's name."""
    height, width = size = _image_size(image.image)
    if image.size is not None and image.size != size:
        is_turned = image.size == size[::-1] and headers.is_turned(read_bytes(image.image))
        raise EntryError(
            f"annotated at {image.size[1]}×{image.size[0]}, and the file {image.image.name} has {width}×{height} pixels"
            + (" (rotated by its EXIF orientation; the annotation is not)" if is_turned else "")
        )
    canvas = Canvas(height, width, smaller_on_top)
    notes: Counter[str] = Counter()
    for entry in image.entries:
        try:
            shape = read_shape(entry.content, height, width)
            notes[shape.note] += 1
            if shape.patch is not None:
                class_id = 0 if is_background(entry.label) else IGNORED if entry.label == IGNORE_NAME else ids[entry.label]
                notes[NO_PIXEL] += not canvas.draw(shape.patch, class_id, is_crowd=shape.note == IN_CROWD)
        except DataError as error:
            raise EntryError(f"{entry.name}: {error}") from None
    notes[OVERLAP] = int(np.count_nonzero(canvas.contested))
    return canvas.ids, {note: number for note, number in notes.items() if note and number}


def _image_size(path: Path) -> tuple[int, int]:
    """Height and width as decode_image gives them."""
    try:
        data = read_bytes(path)
        refuse_bomb(data)
        is_plain = data.startswith((headers.JPEG_START, headers.PNG_START, headers.WEBP_START, headers.BMP_START))
        size = headers.displayed_size(data) if is_plain else None
        return size or decode_image(data).shape[:2]
    except ReadError as error:
        raise EntryError(f"the file {path.name}: {error}") from None


def _refuse_twice(images: Sequence[AnnotatedImage]) -> None:
    """Raises DataError where two entries are the same image: which one counts?"""
    first: dict[Path, AnnotatedImage] = {}
    for image in images:
        other = first.setdefault(image.image, image)
        if other is not image:
            raise DataError(
                f"{image.image} is annotated twice: {other.where} and {image.where}; remove one of them, or set mask_dir to the "
                "annotations that count"
            )


def _notices(
    annotations: Annotations, images: Sequence[AnnotatedImage], drawn: Sequence[Converted], index: ImageIndex
) -> list[str]:
    notices = []
    empty = [image.image for image in images if not image.entries and image.sources]
    if empty:
        names, verb = first_few(path.name for path in empty), "counts as" if len(empty) == 1 else "count as"
        notices.append(f"{counted(len(empty), 'image')} without any annotation {verb} all background: {names}")
    annotated = {image.image for image in annotations.images}
    others = [path_in(index.root, path) for path in index.files if path not in annotated]
    if others:
        notices.append(f"{counted(len(others), 'image file')} that no annotation names left out: {first_few(others)}")
    for note in (*NOTES, OVERLAP):
        facts = [mask.facts.get(note, 0) for mask in drawn]
        holders = [image.image.name for number, image in zip(facts, images, strict=True) if number]
        names = first_few(holders, 3)
        if holders and note == OVERLAP:
            where = f"{counted(sum(facts), 'pixel')} in {counted(len(holders), 'image')}"
            notices.append(f"{where} in objects of several classes; {annotations.overlap_rule}: {names}")
        elif holders:
            one, many, what = NOTES[note]
            notices.append(f"{counted(sum(facts), one, many)} {what}: in {names}")
    return notices
