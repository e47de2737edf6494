"""LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them."""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import inside, plain
from unet_trainer.data.formats.objects import IGNORE_NAME, Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import Canvas, as_points, draw_line, fill_polygon
from unet_trainer.data.pairs import Pair, first_few
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import EncodedImage, Pixels
from unet_trainer.system.console import counted

LINE_WIDTH = 10.0
POINTS = "point", "points"


def find(place: Place, config: Config) -> list[Pair] | None:
    annotations = Annotations(
        place, config, "LabelMe", "in alphabetical order", "the later shape is on top", "JSON file"
    )
    return _join_spellings(annotations).draw() if annotations.read(_parse) else None


def _join_spellings(annotations: Annotations) -> Annotations:
    """Labels are typed in LabelMe: those that differ only in case or spaces are one class, with the name that
    class_names has, or that most objects have. Several names of class_names stay apart."""
    class_names = annotations.config.class_names or ()
    labels = Counter(sorted(shape.label for image in annotations.images.values() for shape in image.shapes))
    names = {name: name for name in (IGNORE_NAME, *class_names)}  # label → name of its class
    first = {plain(name): name for name in reversed(class_names)}
    for label, _ in labels.most_common():
        names.setdefault(label, first.setdefault(plain(label), label))
    for name in sorted({*names.values()}):
        spellings = [f"{label!r} ({number})" for label, number in labels.items() if names[label] == name]
        what = f"labels that differ only in case are one class, {name}: {first_few(spellings)}"
        annotations.notices += [what] if len(spellings) > 1 else []
    for file, image in annotations.images.items():
        shapes = [shape._replace(label=names[shape.label]) for shape in image.shapes]
        annotations.images[file] = image._replace(shapes=shapes)
    return annotations


def _parse(annotations: Annotations, path: Path, content: Mapping[str, Any]) -> None:
    shapes = []
    for number, shape in enumerate(content["shapes"], start=1):
        with inside(f"shape {number}"):
            label, has_area = as_name(shape.get("label")), shape.get("shape_type") not in POINTS
            shapes.append(Shape(label, f"shape {number} ({label})", partial(_draw, shape), has_area=has_area))
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    annotations.add(path, name, shapes, (content.get("imageHeight"), content.get("imageWidth")))


def _draw(shape: Mapping[str, Any], canvas: Canvas) -> None:
    kind, points = shape.get("shape_type") or "polygon", as_points(shape["points"])  # old files have no shape_type
    if kind in POINTS:
        return
    if kind in ("line", "linestrip"):
        draw_line(canvas, points, LINE_WIDTH)
    elif kind in ("polygon", "rotation") or (kind == "rectangle" and len(points) == 4):  # some tools write all corners
        fill_polygon(canvas, points)
    elif kind not in ("rectangle", "circle", "mask"):
        need = "need polygon, rectangle, circle, line, linestrip, mask or point"
        raise ReadError(f"shape_type {kind!r:.60} is not known; {need}")
    elif len(points) != 2:
        raise ReadError(f"{counted(len(points), 'point')}; need 2")
    elif kind == "circle":
        draw_line(canvas, points[[0, 0]], 2 * math.dist(*points))
    elif kind == "rectangle":
        (x0, y0), (x1, y1) = points
        fill_polygon(canvas, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]))
    else:
        bitmap, (left, top) = _read_bitmap(shape["mask"], canvas), points[0].astype(int)
        canvas.add(top, left, bitmap)


def _read_bitmap(text: str, canvas: Canvas) -> Pixels:
    """Of a PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent."""
    data = base64.b64decode(text, validate=True)
    height, width = EncodedImage(data).stored_size or (math.inf, math.inf)
    bitmap: Any = None
    if height <= canvas.pixels.shape[0] and width <= canvas.pixels.shape[1]:
        bitmap = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if bitmap is None:
        raise ReadError("a mask that is no picture, or larger than its image")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.max(axis=2)
    return bitmap != 0
