"""LabelMe JSON: one file for each image, with polygons, rectangles, circles, lines and masks. The picture inside it is not used.

Shapes are drawn in their order in the file, and lines ten pixels wide, as LabelMe's own converters do. `_background_` is class 0,
and `__ignore__` counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.datasets.annotations import (
    LINE,
    NO_AREA,
    RECTANGLE,
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    Shape,
    as_dict,
    as_name,
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
from unet_trainer.datasets.rasterize import box_corners, draw_line, fill_ellipse, fill_polygon, paste
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.system.console import counted

LINE_WIDTH = 10.0  # pixels
WITHOUT_AREA = ("point", "points")
FIRST_NAMED = 3


def is_labelme(content: object) -> bool:
    return isinstance(content, dict) and isinstance(content.get("shapes"), list) and "imagePath" in content


def read_labelme(files: Sequence[tuple[Path, Mapping[str, Any]]], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations of LabelMe files; raises DataError."""
    images: list[AnnotatedImage] = []
    missing: list[str] = []
    used: set[str] = set()
    for path, content in files:
        where = relative(path, data_dir)
        try:
            shapes = [as_dict(shape, f"shape {number + 1}") for number, shape in enumerate(content["shapes"])]
            labels = [as_name(shape.get("label"), f"label of shape {number + 1}") for number, shape in enumerate(shapes)]
            has_size = (content.get("imageHeight"), content.get("imageWidth")) != (None, None)
            size = as_size(content.get("imageHeight"), content.get("imageWidth")) if has_size else None
        except EntryError as error:
            raise DataError(f"{where}: {error}") from None
        used |= {label for label, shape in zip(labels, shapes, strict=True) if shape.get("shape_type") not in WITHOUT_AREA}
        part = part_of_file(path, data_dir, by_name=False)
        name = content["imagePath"]
        image = index.find(name, path.parent, part) if isinstance(name, str) else None
        image = image or index.find(path.stem, path.parent, part, by_stem=True)
        if image is None:
            missing.append(f"{path.name} ({name if isinstance(name, str) else 'no imagePath'})")
            continue
        read = partial(read_shapes, _read_shape, "shape", shapes, labels)
        images.append(AnnotatedImage(image, part or index.part_of(image), (path,), where, size, len(shapes), read))
    names = f"{counted(len(files), 'JSON file')} such as {files[0][0].name}"
    if not images:
        raise DataError(
            f"{names} (LabelMe), and none of their images is in {index.root}: {first_few(missing, FIRST_NAMED)}; "
            "put the images there, or set image_dir to their folder"
        )
    notices = []
    if missing:
        notices.append(f"{counted(len(missing), 'JSON file')} without an image file left out: {first_few(missing, FIRST_NAMED)}")
    classes, _ = choose_classes(sorted(used), used, "LabelMe", names)
    return Annotations("LabelMe", names, classes, "in alphabetical order", images, False, "the later shape is on top", notices)


def _read_shape(shape: Mapping[str, Any], label: str, height: int, width: int) -> Shape:
    kind = shape.get("shape_type") or "polygon"  # old files have no shape_type
    points = as_points(shape.get("points"), "points")
    if kind in WITHOUT_AREA:
        return Shape(label, None, NO_AREA)
    if kind == "mask":
        _need(points, 2, kind)
        bitmap = decode_bitmap(decode_base64(shape.get("mask"), "mask"), "mask", height, width)
        return Shape(label, paste(bitmap, int(points[0, 0]), int(points[0, 1]), height, width))
    draw = DRAWN.get(kind) if isinstance(kind, str) else None
    if draw is None:
        raise EntryError(f"shape_type {show(kind)} is not known; need one of {', '.join(sorted(DRAWN))}, mask, point")
    return draw(label, points, height, width)


def _need(points: Pixels, number: int, kind: str) -> None:
    if len(points) != number:
        raise EntryError(f"a {kind} with {counted(len(points), 'point')}; need {number}")


def _polygon(label: str, points: Pixels, height: int, width: int) -> Shape:
    return Shape(label, fill_polygon(points, height, width)) if len(points) > 2 else Shape(label, None, SHORT)


def _rectangle(label: str, points: Pixels, height: int, width: int) -> Shape:
    if len(points) != 4:  # some tools write all four corners
        _need(points, 2, "rectangle")
        points = box_corners(*points.ravel().tolist())
    return Shape(label, fill_polygon(points, height, width), RECTANGLE)


def _circle(label: str, points: Pixels, height: int, width: int) -> Shape:
    _need(points, 2, "circle")
    (x0, y0), (x1, y1) = points.tolist()
    radius = math.hypot(x1 - x0, y1 - y0)
    return Shape(label, fill_ellipse((x0, y0), (radius, radius), height, width))


def _line(label: str, points: Pixels, height: int, width: int) -> Shape:
    return Shape(label, draw_line(points, LINE_WIDTH, height, width), LINE) if len(points) > 1 else Shape(label, None, SHORT)


DRAWN: dict[str, Callable[[str, Pixels, int, int], Shape]] = {
    "polygon": _polygon,
    "rotation": _polygon,  # a turned rectangle
    "rectangle": _rectangle,
    "circle": _circle,
    "line": _line,
    "linestrip": _line,
}
