"""COCO JSON: images, annotations and categories in one file; as COCO itself, CVAT, Roboflow, Label Studio and others write it.

An object is polygons (those of one object are joined) or run lengths, compressed or not. Boxes alone are no masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.datasets.annotations import (
    IN_CROWD,
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    Shape,
    as_dict,
    as_list,
    as_name,
    as_size,
    check_points,
    choose_classes,
    entry_name,
    relative,
    show,
)
from unet_trainer.datasets.image_lookup import ImageIndex, part_of_file
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import fill_polygon, join
from unet_trainer.datasets.rle import decompress_runs, fill_runs
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import counted

MIN_NUMBERS = 6  # of a polygon: three points


def is_coco(content: object) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return False
    annotations = content.get("annotations")
    if not isinstance(annotations, list) or not isinstance(content.get("categories"), list):
        return False
    return not (annotations and isinstance(annotations[0], dict) and "segments_info" in annotations[0])  # COCO panoptic


def read_coco(files: Sequence[tuple[Path, Mapping[str, Any]]], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations of one or several COCO files; raises DataError."""
    names = ", ".join(relative(path, data_dir) for path, _ in files)
    declared: dict[str, None] = {}
    used: set[str] = set()
    images: list[AnnotatedImage] = []
    notices: list[str] = []
    missing: list[str] = []
    for path, content in files:
        read = _CocoFile(path, content)
        declared |= dict.fromkeys(read.declared)
        used |= {read.categories[identity] for identity in read.used}
        found, not_found = read.find_images(index, data_dir)
        images += found
        missing += not_found
        notices += read.notices
    if not images:
        raise DataError(
            f"{names} (COCO) lists {counted(len(missing), 'image')}, and no such file is in {index.root}: {first_few(missing)}; "
            "put the images there, or set image_dir to their folder"
        )
    if missing:
        notices.append(f"{counted(len(missing), 'image')} of {names} without a readable file left out: {first_few(missing)}")
    classes, unused = choose_classes(declared, used, "COCO", names)
    return Annotations("COCO", names, classes, "by category id", images, True, "the smaller object is on top", notices + unused)


class _CocoFile:
    """One file: its categories, and its annotations by image."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path, self.content = path, content
        self.notices: list[str] = []
        self.categories: dict[int, str] = {}  # id → name
        groups: set[object] = set()  # names of supercategories
        for number, value in enumerate(content["categories"]):
            category = self._entry(value, "category", number)
            identity = category.get("id")
            if isinstance(identity, bool) or not isinstance(identity, int):
                raise self._error("category", number, f"id is {show(identity)}; need a whole number")
            if identity in self.categories:
                raise self._error("category", number, f"id {identity} is used twice")
            try:
                self.categories[identity] = as_name(category.get("name"), "name")
            except EntryError as error:
                raise self._error("category", number, str(error)) from None
            groups.add(category.get("supercategory") if isinstance(category.get("supercategory"), str) else None)
        self.used: set[int] = set()
        self.by_image: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        num_boxes = 0
        for number, value in enumerate(content["annotations"]):
            annotation = self._entry(value, "annotation", number)
            category_id, image_id = annotation.get("category_id"), annotation.get("image_id")
            if not _is_id(category_id) or category_id not in self.categories:
                known = first_few(sorted(self.categories))
                raise self._error("annotation", number, f"category_id is {show(category_id)}; need one of {known}")
            if not _is_id(image_id):
                raise self._error("annotation", number, f"image_id is {show(image_id)}; need the id of an image")
            self.used.add(category_id)
            self.by_image[image_id].append(annotation)
            num_boxes += _has_no_outline(annotation)
        if num_boxes and num_boxes == len(content["annotations"]):
            raise DataError(
                f"{path} (COCO) holds boxes only, {counted(num_boxes, 'box', 'boxes')} without an outline, and a box is no mask; "
                "export polygons or masks (in COCO: segmentation)"
            )
        # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
        self.declared = [
            name
            for identity, name in sorted(self.categories.items())
            if not (identity == 0 and name in groups and identity not in self.used)
        ]

    def find_images(self, index: ImageIndex, data_dir: Path) -> tuple[list[AnnotatedImage], list[str]]:
        """The images that there are, and the names of those without a file."""
        part = part_of_file(self.path, data_dir, by_name=True)
        found: list[AnnotatedImage] = []
        missing: list[str] = []
        listed: set[Any] = set()
        entries = [entry for entry in self.content["images"] if isinstance(entry, dict)]
        with_folders = index.knows_folders(entry["file_name"] for entry in entries if isinstance(entry.get("file_name"), str))
        for number, value in enumerate(self.content["images"]):
            entry = self._entry(value, "image", number)
            identity, name = entry.get("id"), entry.get("file_name")
            if not _is_id(identity) or identity in listed:
                problem = "is used twice" if _is_id(identity) else "is no id"
                raise self._error("image", number, f"id {show(identity)} {problem}")
            listed.add(identity)
            if not isinstance(name, str) or not name:
                raise self._error("image", number, f"file_name is {show(name)}; need a text")
            where = entry_name(self.path, data_dir, name)
            try:
                has_size = (entry.get("height"), entry.get("width")) != (None, None)
                size = as_size(entry.get("height"), entry.get("width")) if has_size else None
            except EntryError as error:
                raise DataError(f"{where}: {error}") from None
            image = index.find(name, self.path.parent, part, with_folders=with_folders)
            if image is None:
                missing.append(name)
                continue
            annotations = self.by_image.get(identity, [])
            read = partial(_read_shapes, annotations, self.categories)
            its_part = part or index.part_of(image)
            found.append(AnnotatedImage(image, its_part, (self.path,), where, size, len(annotations), read))
        orphans = sum(len(annotations) for identity, annotations in self.by_image.items() if identity not in listed)
        if orphans:
            self.notices.append(f"{counted(orphans, 'annotation')} in {self.path.name} of images that it does not list, left out")
        return found, missing

    def _entry(self, value: object, kind: str, number: int) -> dict[str, Any]:
        try:
            return as_dict(value, "it")
        except EntryError as error:
            raise self._error(kind, number, str(error)) from None

    def _error(self, kind: str, number: int, reason: str) -> DataError:
        return DataError(f"{self.path}, {kind} {number + 1}: {reason}")


def _is_id(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _has_no_outline(annotation: Mapping[str, Any]) -> bool:
    return not annotation.get("segmentation")


def _read_shapes(
    annotations: Sequence[Mapping[str, Any]], categories: Mapping[int, str], height: int, width: int
) -> Iterator[Shape]:
    for annotation in annotations:
        try:
            yield _read_shape(annotation, categories[annotation["category_id"]], height, width)
        except DataError as error:
            raise EntryError(f"annotation {show(annotation.get('id'))}: {error}") from None


def _read_shape(annotation: Mapping[str, Any], label: str, height: int, width: int) -> Shape:
    if _has_no_outline(annotation):
        raise EntryError("a box without an outline, and a box is no mask; draw its outline, or remove it")
    segmentation = annotation["segmentation"]
    note = IN_CROWD if annotation.get("iscrowd") in (1, True) else ""
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if size != [height, width]:
            raise EntryError(f"its run lengths are for the size {show(size)}; need [{height}, {width}], height and width")
        runs = decompress_runs(counts) if isinstance(counts, str) else as_list(counts, "counts")
        return Shape(label, fill_runs(runs, height, width), note)
    polygons = as_list(segmentation, "segmentation")
    if isinstance(polygons[0], int | float):  # one polygon without the list around it
        polygons = [polygons]
    outlines = [check_points(as_list(polygon, "a polygon"), "a polygon") for polygon in polygons]
    patches = [fill_polygon(outline, height, width) for outline in outlines if 2 * len(outline) >= MIN_NUMBERS]
    return Shape(label, join(patches), note) if patches else Shape(label, None, SHORT)
