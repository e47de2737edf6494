"""What the formats of annotations share: images with their objects, how image files are found by their names, and the
pairs of images and drawn masks. Only files in the folder of images can be meant, whatever path an annotation names."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.data.converted import Conversion, Converter
from unet_trainer.data.formats.shapes import Patch
from unet_trainer.data.formats.values import inside, note, path_pieces, plain
from unet_trainer.data.names import part_in
from unet_trainer.data.pairs import FoundPairs, Pair, Part, Problem, divided, first_few, path_in
from unet_trainer.images.file_bytes import DataError, ReadError, naming
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system.console import counted

MAX_CLASSES = 253  # 0 is the background; 254 and 255 are taken
UNCLAIMED, BELOW_ALL = 2**31 - 1, 2**30  # sizes of no object, and added to that of a crowd region
IGNORE_NAME = "__ignore__"  # LabelMe's name for pixels that are ignored
# Counts of a drawn mask: objects and pixels.
NO_AREA, SHARED = "no area", "shared"

File = tuple[Path, Any]  # of annotations, and its content: JSON, the header of a CSV, or None


class Entry(NamedTuple):
    """An object of an image: its class, how messages name it, and what draws it, from height and width."""

    label: str
    name: str
    draw: Callable[[int, int], Patch]  # raises DataError
    has_area: bool = True
    is_crowd: bool = False  # of COCO: below all others


class AnnotatedImage(NamedTuple):
    """An image that an annotation file lists."""

    name: str  # of the image file, with folders before it if the annotation has them
    entries: Sequence[Entry]
    size: tuple[int, int] | None = None  # height and width that the annotation states
    part: Part | None = None
    image: Path = Path()  # the file that is meant, once it is found
    source: Path = Path()  # the annotation file
    where: str = ""  # names the image in a message: "instances.json, image 'a.jpg'"


@dataclass
class AnnotatedFolder:
    """A folder of data: the image files below `root`, and the content of the files that may be annotations."""

    data_dir: Path
    root: Path
    images: Sequence[Path]
    contents: Sequence[File]
    class_names: Sequence[str]  # the setting

    def __post_init__(self) -> None:
        self._by_name: dict[str, list[Path]] = defaultdict(list)  # with and without extension
        for path in self.images:
            for name in {plain(path.name), plain(path.stem)}:
                self._by_name[name].append(path)

    def part_of(self, path: Path) -> Part | None:
        """train, val or test by the folders above an image."""
        return part_in(path_in(self.root, path).split("/")[:-1])

    def knows(self, name: str) -> bool:
        """Whether there is an image file of this name, in all the folders that stand before it."""
        *folders, last = path_pieces(name) or [""]
        return any(self._num_shared(folders, path) == len(folders) for path in self._by_name.get(plain(last), ()))

    def _num_shared(self, folders: Sequence[str], path: Path) -> int:
        both = zip(plain(path_in(self.root, path)).split("/")[-2::-1], map(plain, reversed(folders)), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))

    def find_image(self, name: str, near: Path, part: Part | None) -> Path | None:
        """The file for a name, possibly with folders before it; None if there is none. Raises DataError if several are
        possible.

        Of several files with the same name, the one whose folders agree most, then one below `near`. A file of another
        part than `part` is none: val/1.png is not the 1.png of train."""
        *folders, last = path_pieces(name) or [""]
        part = part_in(folders) or part

        def rank(path: Path) -> tuple[int, ...]:
            return self._num_shared(folders, path), plain(path.name) == plain(last), path.is_relative_to(near)

        found = [path for path in self._by_name[plain(last)] if not part or self.part_of(path) in (None, part)]
        found = [path for path in found if rank(path) == max(map(rank, found))]
        if len(found) > 1:
            paths = first_few(path_in(self.root, path) for path in found)
            raise DataError(f"image_dir: {name} could be {paths}; set image_dir to the folder that is meant")
        return found[0] if found else None


@dataclass
class Annotations:
    """What the annotation files of a tool hold."""

    tool: str
    class_order: str
    overlap_rule: str  # "the smaller object is on top", else the later one is
    declared: list[str] = field(default_factory=list)  # names of classes, in their order; others that occur follow
    images: list[AnnotatedImage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    files: str = ""  # for people: "annotations/instances_train.json"

    def collect(
        self,
        place: AnnotatedFolder,
        files: Sequence[File],
        parse: Callable[..., Sequence[AnnotatedImage]],
        one_each: str = "",
    ) -> bool:
        """Add what the files hold, of the images that are there: `parse` lists those of a file, and adds the names of
        its classes. `one_each`: the noun of files that hold one image each. Return whether there are any files."""
        self.files = ", ".join(path_in(place.data_dir, path) for path, _ in files)
        if one_each and files:
            self.files = f"{counted(len(files), one_each)} such as {files[0][0].name}"
        missing: list[str] = []
        for path, content in files:
            with inside(path):
                listed = parse(self, path, content)
            where, is_inside = path_in(place.data_dir, path), path.is_relative_to(place.data_dir)
            part = (None if one_each else part_in([path.stem])) or part_in(where.split("/")[:-1] if is_inside else [])
            # If one of the names with folders is here with all of them, p2/1.png is not p1/1.png where p2 is missing.
            needs_folders = any(len(path_pieces(image.name)) > 1 and place.knows(image.name) for image in listed)
            for image in listed:
                names = [image.name] * (not needs_folders or place.knows(image.name)) + [path.stem] * bool(one_each)
                file = next(filter(None, (place.find_image(name, path.parent, part) for name in names)), None)
                shown = where if one_each else f"{where}, image {image.name!r:.250}"
                if file is None:
                    missing.append(image.name or path.name)
                else:
                    image_part = part or place.part_of(file)
                    self.images.append(image._replace(image=file, part=image_part, source=path, where=shown))
        if files and not self.images:
            what = f"none of their images is in {place.root} ({first_few(missing)})"
            raise DataError(f"{self.files} ({self.tool}): {what}; set image_dir to their folder")
        self.notices += note("image", missing, f"of {self.files} without a readable file left out")
        return bool(files)


def draw_masks(place: AnnotatedFolder, annotations: Annotations, converter: Converter) -> FoundPairs:
    """The pairs of annotated images and drawn masks. Raises DataError."""
    first: dict[Path, AnnotatedImage] = {}
    for image in annotations.images:
        if (other := first.setdefault(image.image, image)) is not image:
            twice = f"{image.image} is annotated twice: {other.where} and {image.where}"
            raise DataError(f"{twice}; remove one of them, or set mask_dir to the annotations that count")
    classes, notices, images = _choose_classes(annotations, place.class_names), annotations.notices, annotations.images
    of_test = [image for image in images if image.part == "test"]
    if not any(image.entries for image in of_test) and len(of_test) < len(images):
        # Test images without a single object were not annotated: all of them background would be a wrong truth.
        images = [image for image in images if image.part != "test"]
        notices += note("test image", [image.image.name for image in of_test], "left out, none has any annotation")
    names = [path_in(place.root, image.image) for image in images]
    smaller_on_top = annotations.overlap_rule.startswith("the smaller")
    conversions = [
        Conversion(name.lstrip("/"), [image.source, image.image], partial(_draw_mask, image, classes, smaller_on_top))
        for name, image in zip(names, images, strict=True)
    ]
    settings = [classes, annotations.overlap_rule]
    drawn = converter.write(annotations.tool.lower(), settings, conversions, "Drawing masks from annotations:")
    results = [*zip(names, images, drawn, strict=True)]
    pairs = [
        Pair(name.removesuffix(image.image.suffix), image.image, mask.path, image.part, mask_origin=image.where)
        for name, image, mask in results
        if not mask.problem
    ]
    bad = [(image.part, f"{image.where}: {mask.problem}") for _, image, mask in results if mask.problem]
    empty = (image.image.name for image in images if not image.entries)
    others = (path_in(place.root, path) for path in place.images if path not in first)
    notices += note("image", empty, "without any annotation, all background")
    notices += note("image file", others, "that no annotation names left out")
    notices += note("test image", [line for part, line in bad if part == "test"], "left out")  # stops no training
    for kind, noun, what in (
        (NO_AREA, "object", " left out, without an area (a point, a line) or outside of the image"),
        (SHARED, "pixel", f" in objects of several classes; {annotations.overlap_rule}"),
    ):
        holders = [image.image.name for _, image, mask in results if mask.facts.get(kind)]
        if holders:
            number = sum(mask.facts.get(kind, 0) for mask in drawn)
            notices.append(f"{counted(number, noun)}{what}: in {first_few(holders, 3)}")
    fix = "correct these entries, or their image files, or remove them"
    lines = tuple(line for part, line in bad if part != "test")
    problem = Problem("annotations", "annotation", "that cannot be used", lines, fix)
    rule = f"{annotations.files} ({annotations.tool}), drawn as masks, classes {annotations.class_order}"
    class_names = classes if len(classes) == 1 else ("background", *classes)
    result = divided(pairs, rule, [problem], class_names=class_names, notices=tuple(notices))
    if not result.pairs:
        raise DataError(result.blocking_message or f"{annotations.files} has no image to train on")
    return result


def _choose_classes(annotations: Annotations, class_names: Sequence[str]) -> tuple[str, ...]:
    """The classes that occur, in the order of class_names (which may name more) or in their own. Raises DataError."""
    used = {entry.label for image in annotations.images for entry in image.entries if entry.has_area}
    declared = dict.fromkeys([*annotations.declared, *sorted(used)])
    names, wanted = (
        [name for name in some if name != IGNORE_NAME and name.lower().strip("_") != "background"]
        for some in (declared, class_names)
    )
    classes = tuple(name for name in names if name in used)
    if not 0 < len(classes) <= MAX_CLASSES:
        none = "no object of any class, so that there is nothing to learn"
        there = f"{len(classes)} classes; need at most {MAX_CLASSES}" if classes else none
        raise DataError(f"{annotations.files} ({annotations.tool}) has {there}")
    annotations.notices += note("class", [name for name in names if name not in used], "without any object left out")
    if not wanted or len(wanted) == len(classes) == 1:
        return classes
    if others := [name for name in classes if name not in wanted]:
        fix = f"leave it out, or list {first_few(['background', *classes], 40)}"
        raise DataError(f"class_names: it lacks {first_few(others)} of {annotations.files}; {fix}")
    return tuple(wanted)


def _draw_mask(image: AnnotatedImage, classes: Sequence[str], smaller_on_top: bool) -> tuple[Pixels, Mapping[str, int]]:
    """H,W uint8 class ids of one image, and counts. Raises DataError without the image's name.

    With `smaller_on_top`, of two objects the one with fewer pixels is seen, whatever their order (of equal ones the
    later); without it, the later."""
    with naming(f"the file {image.image.name}"):
        height, width = size = read_image(image.image).shape[:2]
    if image.size is not None and image.size != size:
        turned = " (is it rotated by its EXIF orientation, and the annotation is not?)" * (image.size == size[::-1])
        annotated = f"annotated at {image.size[1]}×{image.size[0]}"
        raise ReadError(f"{annotated}, and the file {image.image.name} has {width}×{height} pixels{turned}")
    ids = {name: number for number, name in enumerate(classes, start=1)} | {IGNORE_NAME: IGNORED}
    mask, contested, sizes = np.zeros(size, np.uint8), np.zeros(size, np.bool_), np.full(size, UNCLAIMED, np.int32)
    counts = Counter[str]()
    for entry in image.entries:
        with inside(entry.name):
            patch = entry.draw(height, width)
            num_pixels = int(np.count_nonzero(patch.pixels))
            counts[NO_AREA] += num_pixels == 0
            class_id, there, size_there = ids.get(entry.label, 0), mask[patch.area], sizes[patch.area]
            contested[patch.area] |= patch.pixels & (there != 0) & (there != class_id) & (class_id != 0)
            rank = num_pixels + BELOW_ALL * entry.is_crowd if smaller_on_top else 0
            pixels = patch.pixels & (size_there >= rank)
            there[pixels], size_there[pixels] = class_id, rank
    counts[SHARED] = int(np.count_nonzero(contested))
    return mask, +counts
