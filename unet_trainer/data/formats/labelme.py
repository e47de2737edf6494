"""LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them."""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import inside, plain
from unet_trainer.data.formats.objects import IGNORE_NAME, Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import as_points, draw_line, fill_polygon, paste
from unet_trainer.data.pairs import Pair, first_few
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import Pixels, decode_image
from unet_trainer.system.console import counted

LINE_WIDTH = 10.0
POINTS, LINES, OUTLINES = ("point", "points"), ("line", "linestrip"), ("polygon", "rotation")
TWO_POINTS = ("rectangle", "circle", "mask")


def find(place: Place, config: Config) -> list[Pair] | None:
    rule = "the later shape is on top"
    annotations = Annotations(place, config, "LabelMe", "in alphabetical order", rule, "JSON file")
    if not annotations.read(_parse):
        return None
    _join_spellings(annotations, config.class_names or ())
    return annotations.draw()


def _join_spellings(annotations: Annotations, class_names: Sequence[str]) -> None:
    """Labels are typed in LabelMe: those that differ only in case or spaces are one class, with the name that
    class_names has, or that most objects have. Several names of class_names stay apart."""
    labels = Counter(sorted(shape.label for image in annotations.images.values() for shape in image.shapes))
    usual = {plain(name): name for name in reversed(class_names)}
    for label, _ in labels.most_common():
        usual.setdefault(plain(label), label)
    names = {label: label if label in (IGNORE_NAME, *class_names) else usual[plain(label)] for label in labels}
    for name in sorted({*names.values()}):
        spellings = [f"{label!r} ({number})" for label, number in labels.items() if names[label] == name]
        if len(spellings) > 1:
            what = f"labels that differ only in case are one class, {name}: {first_few(spellings)}"
            annotations.notices.append(what)
    for file, image in annotations.images.items():
        shapes = [shape._replace(label=names[shape.label]) for shape in image.shapes]
        annotations.images[file] = image._replace(shapes=shapes)


def _parse(annotations: Annotations, path: Path, content: Mapping[str, Any]) -> None:
    shapes = []
    for number, shape in enumerate(content["shapes"], start=1):
        with inside(f"shape {number}"):
            label, has_area = as_name(shape.get("label")), shape.get("shape_type") not in POINTS
            shapes.append(Shape(label, f"shape {number} ({label})", partial(_draw, shape), has_area=has_area))
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    annotations.add(path, name, shapes, (content.get("imageHeight"), content.get("imageWidth")))


def _draw(shape: Mapping[str, Any], canvas: Pixels) -> None:
    kind, points = shape.get("shape_type") or "polygon", as_points(shape["points"])  # old files have no shape_type
    if kind in LINES:
        draw_line(canvas, points, LINE_WIDTH)
    elif kind in OUTLINES or (kind == "rectangle" and len(points) == 4):  # some tools write all corners
        fill_polygon(canvas, points)
    elif kind in TWO_POINTS and len(points) != 2:
        raise ReadError(f"{counted(len(points), 'point')}; need 2")
    elif kind == "circle":
        draw_line(canvas, points[[0, 0]], 2 * math.dist(*points))
    elif kind == "rectangle":
        (x0, y0), (x1, y1) = points
        fill_polygon(canvas, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]))
    elif kind == "mask":  # a PNG of one object, which is not 0
        left, top = points[0].astype(int)
        paste(canvas, top, left, decode_image(base64.b64decode(shape["mask"], validate=True)).max(axis=2) > 0)
    elif kind not in POINTS:
        need = "need polygon, rectangle, circle, line, linestrip, mask or point"
        raise ReadError(f"shape_type {kind!r:.60} is not known; {need}")
