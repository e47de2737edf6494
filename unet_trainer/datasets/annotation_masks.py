"""Annotated images → pairs: the shapes of each image are drawn into a mask of class ids, once, and kept under checkpoint_dir.

0 is the background, 1 the first class. Everything after this sees masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.datasets.annotations import (
    IGNORE_NAME,
    IN_CROWD,
    LINE,
    NO_AREA,
    NO_PIXEL,
    RECTANGLE,
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    is_background,
)
from unet_trainer.datasets.converted import Conversion, Converted, ConvertedFiles
from unet_trainer.datasets.image_lookup import ImageIndex
from unet_trainer.datasets.layouts import Part
from unet_trainer.datasets.pairs import FoundPairs, Pair, path_in
from unet_trainer.datasets.problems import Problem, describe_problems, first_few
from unet_trainer.datasets.rasterize import Canvas
from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import DataError, ReadError, read_bytes
from unet_trainer.images.image_files import Pixels, decode_image, refuse_bomb
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.system.console import Console, counted
from unet_trainer.system.resources import count_cores

OVERLAP = "overlap"  # pixels that shapes of different classes claim
FIX = "correct these entries, or their image files, or remove them"
# Shapes in words, for one and for several, and what is done with them.
NOTES: Mapping[str, tuple[str, str, str]] = {
    SHORT: ("outline", "outlines", "of fewer than 3 points left out"),
    NO_AREA: ("point, line or box in space", "points, lines or boxes in space", "left out: without an area"),
    LINE: ("line", "lines", "drawn 10 pixels wide, as the tool does"),
    RECTANGLE: ("rectangle", "rectangles", "filled, as the tool does: the mask has its corners, not the object's outline"),
    IN_CROWD: ("crowd region (iscrowd)", "crowd regions (iscrowd)", "drawn as part of its class, below all objects"),
    NO_PIXEL: ("object", "objects", "without a pixel: smaller than one, or outside of the image"),
}


def draw_masks(
    annotations: Annotations,
    index: ImageIndex,
    data_dir: Path,
    checkpoint_dir: Path,
    class_names: Sequence[str] | None = None,
    console: Console | None = None,
) -> FoundPairs:
    """The pairs of annotated images and drawn masks. `class_names` is the setting, if it is set. Raises DataError."""
    _refuse_twice(annotations.images)
    images = _without_empty_test(annotations.images)
    classes = order_by_setting(annotations, class_names)
    drawn = _draw(annotations, images, classes, index, data_dir, checkpoint_dir, console)
    parts = {image.part for image in images}
    is_divided, has_test = {"train", "val"} <= parts, "test" in parts and len(parts) > 1
    pairs: list[Pair] = []
    test: list[Pair] = []
    problems: list[str] = []
    test_problems: list[str] = []
    for image, mask in zip(images, drawn, strict=True):
        is_test = has_test and image.part == "test"
        if mask.problem:
            (test_problems if is_test else problems).append(f"{image.where}: {mask.problem}")
            continue
        divided: Part = "val" if image.part == "val" else "train"
        part: Part | None = "test" if is_test else divided if is_divided else None
        name = str(Path(path_in(index.root, image.image)).with_suffix(""))
        (test if is_test else pairs).append(Pair(name, image.image, mask.path, part, mask_origin=image.where))
    titles = "annotation that cannot be used", "annotations that cannot be used"
    found = (Problem("annotations", *titles, tuple(problems), FIX),) if problems else ()
    if not pairs:
        raise DataError(describe_problems(found) or f"{annotations.files} has no image to train on")
    notices = [*annotations.notices, *_notices(annotations, images, drawn, index)]
    if test_problems:
        notices.append(f"{counted(len(test_problems), 'test image')} left out: {first_few(test_problems, 3)}")
    text = f"{annotations.files} ({annotations.tool}), drawn as masks, classes {annotations.class_order}"
    return FoundPairs(
        tuple(sorted(_unique_names(pairs), key=lambda pair: pair.name)),
        f"{text}; as they are divided into train and val" if is_divided else text,
        describe_problems(found),
        found,
        test=tuple(sorted(_unique_names(test), key=lambda pair: pair.name)),
        class_names=classes if len(classes) == 1 else ("background", *classes),
        num_classes=1 if len(classes) == 1 else len(classes) + 1,
        notices=tuple(notices),
    )


def _without_empty_test(images: Sequence[AnnotatedImage]) -> list[AnnotatedImage]:
    """Test images without a single object were not annotated: all of them background would be a wrong truth."""
    has_objects = any(image.num_shapes for image in images if image.part == "test")
    others = [image for image in images if image.part != "test"]
    return list(images) if has_objects or not others else others


def _draw(
    annotations: Annotations,
    images: Sequence[AnnotatedImage],
    classes: tuple[str, ...],
    index: ImageIndex,
    data_dir: Path,
    checkpoint_dir: Path,
    console: Console | None,
) -> list[Converted]:
    """The mask of each image, or why there is none."""
    ids = {name: number for number, name in enumerate(classes, start=1)}
    # split.csv names these files: absolute, because its paths are seen from data_dir.
    files = ConvertedFiles(data_dir, checkpoint_dir.absolute(), annotations.tool.lower(), [classes, annotations.smaller_on_top])
    conversions = [
        Conversion(
            path_in(index.root, image.image).lstrip("/"),
            (*image.sources, image.image),
            partial(draw_mask, image, ids, annotations.smaller_on_top),
        )
        for image in images
    ]
    if console is None:
        return files.write_many(conversions, count_cores(), lambda: None)
    with console.bar("Drawing masks from annotations:", len(conversions), keep=False) as bar:
        return files.write_many(conversions, count_cores(), bar.tick)


def order_by_setting(annotations: Annotations, class_names: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in the order of class_names, which may name more; else in their own. Raises DataError if it has other names.

    A single class may have any name, because its id is clear.
    """
    wanted = [name for name in class_names or () if not is_background(name)]
    if not wanted or (len(wanted) == len(annotations.classes) == 1):
        return annotations.classes
    others = [name for name in annotations.classes if name not in wanted]
    if others:
        raise DataError(
            f"class_names: {first_few(others)} of {annotations.files} {'is' if len(others) == 1 else 'are'} not in it; "
            f"leave it out, or list the names of the annotations: {first_few(['background', *annotations.classes], 40)}"
        )
    return tuple(wanted)


def draw_mask(image: AnnotatedImage, ids: Mapping[str, int], smaller_on_top: bool) -> tuple[Pixels, dict[str, int]]:
    """H,W uint8 class ids of one image, and how often something is worth a note. Raises DataError without the entry's name."""
    height, width = _image_size(image.image)
    if image.size is not None and image.size != (height, width):
        raise EntryError(_describe_sizes(image, (height, width)))
    canvas = Canvas(height, width, smaller_on_top)
    notes: Counter[str] = Counter()
    for shape in image.read_shapes(height, width):
        if shape.note:
            notes[shape.note] += 1
        if shape.patch is None:
            continue
        class_id = 0 if is_background(shape.label) else IGNORED if shape.label == IGNORE_NAME else ids[shape.label]
        if not canvas.draw(shape.patch, class_id, is_crowd=shape.note == IN_CROWD):
            notes[NO_PIXEL] += 1
    if canvas.num_contested:
        notes[OVERLAP] = canvas.num_contested
    return canvas.ids, dict(notes)


def _image_size(path: Path) -> tuple[int, int]:
    """Height and width as decode_image gives them."""
    try:
        data = read_bytes(path)
        refuse_bomb(data)
        is_plain = data.startswith((headers.JPEG_START, headers.PNG_START, headers.WEBP_START, headers.BMP_START))
        size = headers.displayed_size(data) if is_plain else None
        if size is not None:
            return size
        height, width, _ = decode_image(data).shape
    except ReadError as error:
        raise EntryError(f"the file {path.name}: {error}") from None
    return height, width


def _describe_sizes(image: AnnotatedImage, size: tuple[int, int]) -> str:
    assert image.size is not None
    text = f"annotated at {image.size[1]}×{image.size[0]}, and the file {image.image.name} has {size[1]}×{size[0]} pixels"
    if image.size == size[::-1] and headers.is_turned(read_bytes(image.image)):
        text += " (rotated by its EXIF orientation; the annotation is not)"
    return text


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


def _unique_names(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs of a.jpg and a.png have their extensions in their names."""
    counts = Counter(pair.name for pair in pairs)
    return [pair if counts[pair.name] == 1 else replace(pair, name=f"{pair.name}{pair.image.suffix}") for pair in pairs]


def _notices(
    annotations: Annotations, images: Sequence[AnnotatedImage], drawn: Sequence[Converted], index: ImageIndex
) -> list[str]:
    notices = []
    num_left_out = len(annotations.images) - len(images)
    if num_left_out:
        notices.append(f"{counted(num_left_out, 'test image')} left out: none has any annotation")
    empty = [image.image for image in images if not image.num_shapes and image.sources]
    if empty:
        names = first_few(path.name for path in empty)
        notices.append(f"{counted(len(empty), 'image')} without any annotation {_count_as(empty)} all background: {names}")
    annotated = {image.image for image in annotations.images}
    others = [path for path in index.files if path not in annotated]
    if others:
        names = first_few(path_in(index.root, path) for path in others)
        notices.append(f"{counted(len(others), 'image file')} that no annotation names left out: {names}")
    for note, (one, many, what) in NOTES.items():
        numbers = [(_facts(mask).get(note, 0), image) for image, mask in zip(images, drawn, strict=True)]
        total = sum(number for number, _ in numbers)
        if total:
            names = first_few((image.image.name for number, image in numbers if number), 3)
            notices.append(f"{counted(total, one, many)} {what}: in {names}")
    overlaps = [(_facts(mask).get(OVERLAP, 0), image) for image, mask in zip(images, drawn, strict=True)]
    total = sum(number for number, _ in overlaps)
    if total:
        holders = [image.image.name for number, image in overlaps if number]
        notices.append(
            f"{counted(total, 'pixel')} in {counted(len(holders), 'image')} in objects of several classes; "
            f"{annotations.overlap_rule}: {first_few(holders, 3)}"
        )
    return notices


def _count_as(items: Sequence[object]) -> str:
    return "counts as" if len(items) == 1 else "count as"


def _facts(mask: Converted) -> Mapping[str, Any]:
    return mask.facts if isinstance(mask.facts, dict) else {}
