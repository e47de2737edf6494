"""What the formats of annotations share: images with their objects, the classes of these, and masks of class ids that
are drawn of them: 0 is the background, 1 the first class."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import AnnotatedFolder, File, annotated_folder, inside
from unet_trainer.data.converted import Conversion
from unet_trainer.data.names import part_in
from unet_trainer.data.pairs import Pair, Part, Problem, describe_problems, divided, first_few, path_in
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError, ReadError, naming
from unet_trainer.images.image_decoding import Pixels, read_image
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.system.console import counted

MAX_CLASSES = 253  # 0 is the background; 254 and 255 are taken
MAX_NAME = 100  # characters
UNCLAIMED, BELOW_ALL = 2**31 - 1, 2**30  # sizes of no object, and added to that of a crowd region
IGNORE_NAME = "__ignore__"  # LabelMe's name for pixels that are ignored
SMALLER_ON_TOP = "the smaller object is on top"
NO_MASK = "a box without an outline, and a box is no mask; export polygons or masks, or remove it"
NO_AREA = "left out, without an area (a point, a line) or outside of the image"
FIX = "correct these entries, or their image files, or remove them"


class Shape(NamedTuple):
    """An object of an image: its class, how messages name it, and what adds it to a canvas."""

    label: str
    name: str
    draw: Callable[[Pixels], None]  # on a canvas, H,W bool; raises DataError
    is_crowd: bool = False  # of COCO: below all others
    has_area: bool = True


class AnnotatedImage(NamedTuple):
    """An image that an annotation file lists."""

    file: Path
    shapes: Sequence[Shape]
    part: Part | None
    source: Path  # the annotation file
    where: str = ""  # names the image in a message: "instances.json, image 'a.jpg'"
    size: tuple[Any, Any] = (None, None)  # height and width that the annotation states


@dataclass
class Annotations:
    """What the annotation files of a tool say of the images in a folder."""

    place: Place
    config: Config
    tool: str
    class_order: str
    overlap_rule: str  # SMALLER_ON_TOP, else the later one is
    one_each: str = ""  # noun of the files, if each holds one image
    shown: str = ""  # the files, for people
    classes: list[str] = field(default_factory=list)  # in their order; others that occur follow
    images: dict[Path, AnnotatedImage] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def folder(self) -> AnnotatedFolder:
        return annotated_folder(self.place, self.config)

    def read(self, parse: Callable[["Annotations", Path, Any], None], files: Sequence[File] | None = None) -> bool:
        """Let `parse` add the images and classes of each file, by default those of the tool. Whether there are any."""
        if not (files := self.folder.files_of(self.tool) if files is None else files):
            return False
        for path, content in files:
            with inside(path):
                parse(self, path, content)
        self.shown = ", ".join(path_in(self.folder.data_dir, path) for path, _ in files)
        if self.one_each:
            self.shown = f"{counted(len(files), self.one_each)} such as {files[0][0].name}"
        if not self.images:
            what = f"none of their images is in {self.folder.root} ({first_few(self.missing)})"
            raise DataError(f"{self.shown} ({self.tool}): {what}; set image_dir to their folder")
        self.note("image", self.missing, f"of {self.shown} without a readable file left out")
        return True

    def add(self, source: Path, name: str, shapes: Sequence[Shape], size: tuple[Any, Any] = (None, None)) -> None:
        """An image that a file lists, by its name and the folders before it; without a file it is left out."""
        where = path_in(self.folder.data_dir, source)
        part = part_in(where.split("/")[:-1] if source.is_relative_to(self.folder.data_dir) else [])
        names = [name, source.stem] if self.one_each else [name]
        if not self.one_each:
            where, part = f"{where}, image {name!r:.250}", part_in([source.stem]) or part
        file = next(filter(None, (self.folder.find_image(each, source.parent, part) for each in names)), None)
        if file is None:
            self.missing.append(name or source.name)
        elif file in self.images:
            twice = f"{file} is annotated twice: {self.images[file].where} and {where}"
            raise DataError(f"{twice}; remove one of them, or set mask_dir to the annotations that count")
        else:
            self.images[file] = AnnotatedImage(file, shapes, part or self.folder.part_of(file), source, where, size)

    def note(self, noun: str, names: Iterable[str], what: str) -> None:
        if names := [*names]:
            number = counted(len(names), noun, "classes" if noun == "class" else None)
            self.notices.append(f"{number} {what}: {first_few(names)}")

    def draw(self) -> list[Pair]:
        """The pairs of annotated images and drawn masks. Raises DataError."""
        root, images, classes = self.folder.root, [*self.images.values()], self.choose_classes()
        of_test = [image for image in images if image.part == "test"]
        if not any(image.shapes for image in of_test) and len(of_test) < len(images):
            # Test images without a single object were not annotated: all of them background would be a wrong truth.
            images = [image for image in images if image.part != "test"]
            self.note("test image", (image.file.name for image in of_test), "left out, none has any annotation")
        empty = (image.file.name for image in images if not image.shapes)
        self.note("image", empty, "without any annotation, all background")
        others = (path_in(root, path) for path in self.folder.images if path not in self.images)
        self.note("image file", others, "that no annotation names left out")
        conversions = []
        for image in images:
            make = partial(_draw_mask, image, classes, self.overlap_rule)
            conversions.append(Conversion(path_in(root, image.file).lstrip("/"), [image.source, image.file], make))
        settings, label = [classes, self.overlap_rule], "Drawing masks from annotations:"
        masks = self.place.converter.write(self.tool.lower(), settings, conversions, label)
        pairs, lost, bad = list[Pair](), list[str](), list[str]()
        for image, mask in zip(images, masks, strict=True):
            if mask.problem:  # in a test image, it stops no training
                (lost if image.part == "test" else bad).append(f"{image.where}: {mask.problem}")
            else:
                name = path_in(root, image.file.with_suffix(""))
                pairs.append(Pair(name, image.file, mask.path, image.part, mask_origin=image.where))
        self.note("test image", lost, "left out")
        problem = Problem("annotations", "annotation", "that cannot be used", tuple(bad), FIX)
        if len(bad) == len(masks):
            raise DataError(describe_problems([problem]))
        overlap = f"in objects of several classes; {self.overlap_rule}"
        for noun, what in (("object", NO_AREA), ("pixel", overlap)):
            found = [(image.file.name, mask.facts.get(noun, 0)) for image, mask in zip(images, masks, strict=True)]
            if number := sum(number for _, number in found):
                where = first_few((name for name, number in found if number), 3)
                self.notices.append(f"{counted(number, noun)} {what}: in {where}")
        rule = f"{self.shown} ({self.tool}), drawn as masks, classes {self.class_order}"
        class_names = classes if len(classes) == 1 else ("background", *classes)
        notices = (*self.notices, *self.folder.notices)
        return self.place.take(divided(pairs, rule, [problem], class_names=class_names, notices=notices))

    def choose_classes(self) -> tuple[str, ...]:
        """The classes that occur, in the order of class_names (which may name more) or in their own."""
        used = {shape.label for image in self.images.values() for shape in image.shapes if shape.has_area}
        declared, wanted = (
            [name for name in names if name != IGNORE_NAME and name.lower().strip("_") != "background"]
            for names in (dict.fromkeys([*self.classes, *sorted(used)]), self.config.class_names or ())
        )
        classes = tuple(name for name in declared if name in used)
        if not 0 < len(classes) <= MAX_CLASSES:
            there = f"objects of {counted(len(classes), 'class', 'classes')}; need 1 to {MAX_CLASSES}"
            raise DataError(f"{self.shown} ({self.tool}) has {there}")
        self.note("class", [name for name in declared if name not in used], "without any object left out")
        if not wanted or len(wanted) == len(classes) == 1:
            return classes
        if others := [name for name in classes if name not in wanted]:
            fix = f"leave it out, or list {first_few(['background', *classes], 40)}"
            raise DataError(f"class_names: it lacks {first_few(others)} of {self.shown}; {fix}")
        return tuple(wanted)


def as_name(value: object) -> str:
    """The name of a class: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ReadError(f"the name of a class is {value!r:.60}; need a text of 1 to {MAX_NAME} characters")
    return name


def _draw_mask(image: AnnotatedImage, classes: Sequence[str], overlap_rule: str) -> tuple[Pixels, Mapping[str, int]]:
    """H,W uint8 class ids of one image; and how many objects are empty, and pixels are in objects of several classes.
    With SMALLER_ON_TOP, of two objects the one with fewer pixels is seen, of equal ones the later; else the later."""
    with naming(f"the file {image.file.name}"):
        height, width = size = read_image(image.file).shape[:2]
    if any(image.size) and image.size != size:
        turned = " (is it rotated by its EXIF orientation, and the annotation is not?)" * (image.size == size[::-1])
        annotated = f"annotated at {image.size[1]!r:.20}×{image.size[0]!r:.20}"
        raise ReadError(f"{annotated}, and the file {image.file.name} has {width}×{height} pixels{turned}")
    ids = {name: number for number, name in enumerate(classes, start=1)} | {IGNORE_NAME: IGNORED}
    mask, sizes = np.zeros(size, np.uint8), np.full(size, UNCLAIMED, np.int32)
    canvas, contested, num_empty = np.zeros(size, np.bool_), np.zeros(size, np.bool_), 0
    for shape in image.shapes:
        with inside(shape.name):
            shape.draw(canvas)
        left, top, width, height = cv2.boundingRect(canvas.view(np.uint8))
        area = slice(top, top + height), slice(left, left + width)
        pixels, canvas[area] = canvas[area].copy(), False
        there, size_there = mask[area], sizes[area]
        num_pixels, class_id = int(np.count_nonzero(pixels)), ids.get(shape.label, 0)
        num_empty += num_pixels == 0
        contested[area] |= pixels & (there != 0) & (there != class_id) & (class_id != 0)
        rank = num_pixels + BELOW_ALL * shape.is_crowd if overlap_rule == SMALLER_ON_TOP else 0
        pixels &= size_there >= rank
        there[pixels], size_there[pixels] = class_id, rank
    return mask, {"object": num_empty, "pixel": int(np.count_nonzero(contested))}
