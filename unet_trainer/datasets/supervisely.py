"""Supervisely projects: meta.json with the classes, and for each image ann/NAME.json with polygons, bitmaps and rectangles.

Coordinates are those of pixels, not of their corners: a polygon includes the pixels that it passes through, as in Supervisely's own
library. Objects are drawn in their order in the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from unet_trainer.datasets.annotations import (
    NO_AREA,
    RECTANGLE,
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    Shape,
    as_dict,
    as_list,
    as_name,
    as_number,
    as_points,
    as_size,
    choose_classes,
    decode_base64,
    decode_bitmap,
    read_shapes,
    relative,
    show,
)
from unet_trainer.datasets.image_lookup import ImageIndex, part_of_file
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import EMPTY, Patch, paste, without
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.system.console import counted

FIRST_NAMED = 3
FILLED = frozenset(["polygon", "bitmap", "rectangle"])


def is_supervisely(content: object) -> bool:
    return isinstance(content, dict) and isinstance(content.get("objects"), list) and isinstance(content.get("size"), dict)


def is_supervisely_meta(content: object) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("classes"), list):
        return False
    return all(isinstance(item, dict) and "title" in item and "shape" in item for item in content["classes"])


def read_supervisely(
    files: Sequence[tuple[Path, Mapping[str, Any]]],
    metas: Sequence[tuple[Path, Mapping[str, Any]]],
    index: ImageIndex,
    data_dir: Path,
) -> Annotations:
    """The annotations of a project; raises DataError."""
    declared: dict[str, None] = {}
    for path, content in metas:
        try:
            declared |= dict.fromkeys(as_name(item["title"], "title of a class") for item in content["classes"])
        except EntryError as error:
            raise DataError(f"{path}: {error}") from None
    images: list[AnnotatedImage] = []
    missing: list[str] = []
    used: set[str] = set()
    for path, content in files:
        where = relative(path, data_dir)
        try:
            objects = [as_dict(item, f"object {number + 1}") for number, item in enumerate(content["objects"])]
            labels = [as_name(item.get("classTitle"), f"classTitle of object {number + 1}") for number, item in enumerate(objects)]
            size = as_size(content["size"].get("height"), content["size"].get("width"))
        except EntryError as error:
            raise DataError(f"{where}: {error}") from None
        used |= {label for label, item in zip(labels, objects, strict=True) if item.get("geometryType") in FILLED}
        dataset = path.parent.parent
        part = part_of_file(path, data_dir, by_name=False)
        image = index.find(path.stem, dataset, part) or index.find(path.stem, dataset, part, by_stem=True)
        if image is None:
            missing.append(path.name)
            continue
        read = partial(read_shapes, _read_shape, "object", objects, labels)
        images.append(AnnotatedImage(image, part or index.part_of(image), (path,), where, size, len(objects), read))
    names = f"{counted(len(files), 'JSON file')} such as {files[0][0].name}"
    if not images:
        raise DataError(
            f"{names} (Supervisely), and none of their images is in {index.root}: {first_few(missing, FIRST_NAMED)}; "
            "export the project with its images, or set image_dir to their folder"
        )
    notices = []
    if missing:
        notices.append(f"{counted(len(missing), 'JSON file')} without an image file left out: {first_few(missing, FIRST_NAMED)}")
    classes, unused = choose_classes([*declared, *sorted(used)], used, "Supervisely", names)
    order = "in the order of meta.json" if metas else "in alphabetical order"
    return Annotations("Supervisely", names, classes, order, images, False, "the later object is on top", notices + unused)


def _read_shape(item: Mapping[str, Any], label: str, height: int, width: int) -> Shape:
    kind = item.get("geometryType")
    if kind == "bitmap":
        return Shape(label, _read_bitmap(as_dict(item.get("bitmap"), "bitmap"), height, width))
    if kind not in FILLED:
        return Shape(label, None, NO_AREA)
    points = as_dict(item.get("points"), "points")
    exterior = as_points(points.get("exterior"), "exterior")
    if kind == "rectangle":
        if len(exterior) != 2:
            raise EntryError(f"a rectangle with {counted(len(exterior), 'point')}; need 2")
        (x0, y0), (x1, y1) = exterior.min(axis=0), exterior.max(axis=0)
        return Shape(label, _fill(np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]), height, width), RECTANGLE)
    if len(exterior) < 3:
        return Shape(label, None, SHORT)
    holes = [as_points(hole, "interior") for hole in as_list(points.get("interior", []), "interior")]
    return Shape(label, without(_fill(exterior, height, width), [_fill(hole, height, width) for hole in holes if len(hole) > 2]))


def _fill(points: Pixels, height: int, width: int) -> Patch:
    """OpenCV's polygon: rounded to pixels, with the pixels of its outline."""
    corners = np.rint(points).astype(np.int64)
    (left, top), (right, bottom) = corners.min(axis=0).clip(0), corners.max(axis=0) + 1
    right, bottom = min(int(right), width), min(int(bottom), height)
    if top >= bottom or left >= right:
        return EMPTY
    canvas = np.zeros((bottom - int(top), right - int(left)), np.uint8)
    cv2.fillPoly(canvas, [(corners - (left, top)).astype(np.int32)], 1)
    return Patch(int(top), int(left), canvas.astype(np.bool_))


def _read_bitmap(bitmap: Mapping[str, Any], height: int, width: int) -> Patch:
    origin = as_list(bitmap.get("origin"), "origin")
    if len(origin) != 2:
        raise EntryError(f"origin is {show(origin)}; need [x, y]")
    left, top = (int(as_number(value, "origin")) for value in origin)
    inflater = zlib.decompressobj()
    limit = 4 * height * width + 2**16  # a picture of the whole image without compression
    try:
        data = inflater.decompress(decode_base64(bitmap.get("data"), "data"), limit)
    except zlib.error:
        raise EntryError("data is not compressed with zlib") from None
    if not inflater.eof:
        raise EntryError("data is cut off, or larger than its image")
    return paste(decode_bitmap(data, "data", height, width), left, top, height, width)
