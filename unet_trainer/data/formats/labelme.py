"""LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them."""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from unet_trainer.data.formats.objects import IGNORE_NAME, AnnotatedFolder, AnnotatedImage, Annotations, Entry
from unet_trainer.data.formats.shapes import EMPTY, Patch, draw_line, fill_polygon, paste
from unet_trainer.data.formats.values import as_name, as_points, as_size, has_keys, inside, plain
from unet_trainer.data.pairs import first_few
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import EncodedImage
from unet_trainer.system.console import counted

LINE_WIDTH = 10.0
POINTS = "point", "points"


def find(place: AnnotatedFolder) -> Annotations | None:
    """Labels are typed in LabelMe: those that differ only in case or spaces are one class, with the name that
    class_names has, or that most objects have. Several names of class_names stay apart."""
    annotations = Annotations("LabelMe", "in alphabetical order", "the later shape is on top")
    files = [file for file in place.contents if has_keys(file[1], "shapes imagePath")]
    if not annotations.collect(place, files, _parse, one_each="JSON file"):
        return None
    labels = Counter(sorted(entry.label for image in annotations.images for entry in image.entries))
    names = {name: name for name in (IGNORE_NAME, *place.class_names)}  # label → name of its class
    first = {plain(name): name for name in reversed(place.class_names)}
    for label, _ in labels.most_common():
        names.setdefault(label, first.setdefault(plain(label), label))
    for name in sorted({*names.values()}):
        spellings = [f"{label!r} ({number})" for label, number in labels.items() if names[label] == name]
        what = f"labels that differ only in case are one class, {name}: {first_few(spellings)}"
        annotations.notices += [what] if len(spellings) > 1 else []
    for number, image in enumerate(annotations.images):
        entries = [entry._replace(label=names[entry.label]) for entry in image.entries]
        annotations.images[number] = image._replace(entries=entries)
    return annotations


def _parse(_: Annotations, path: Path, content: Mapping[str, Any]) -> Sequence[AnnotatedImage]:
    entries = []
    for number, shape in enumerate(content["shapes"], start=1):
        with inside(f"shape {number}"):
            label, has_area = as_name(shape.get("label"), "label"), shape.get("shape_type") not in POINTS
            entries.append(Entry(label, f"shape {number} ({label})", partial(_draw, shape), has_area))
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    return [AnnotatedImage(name, entries, as_size(content.get("imageHeight"), content.get("imageWidth")))]


def _draw(shape: Mapping[str, Any], height: int, width: int) -> Patch:
    kind, points = shape.get("shape_type") or "polygon", as_points(shape["points"])  # old files have no shape_type
    if kind in POINTS:
        return EMPTY
    if kind in ("line", "linestrip"):
        return draw_line(points, LINE_WIDTH, height, width)
    if kind in ("polygon", "rotation") or (kind == "rectangle" and len(points) == 4):  # some tools write all corners
        return fill_polygon(points, height, width)
    if kind not in ("rectangle", "circle", "mask"):
        need = "need polygon, rectangle, circle, line, linestrip, mask or point"
        raise ReadError(f"shape_type {kind!r:.60} is not known; {need}")
    if len(points) != 2:
        raise ReadError(f"{counted(len(points), 'point')}; need 2")
    (x0, y0), (x1, y1) = points.tolist()
    if kind == "rectangle":
        return fill_polygon(np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]), height, width)
    if kind == "circle":
        return draw_line(points[[0, 0]], 2 * math.hypot(x1 - x0, y1 - y0), height, width)
    # A PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent.
    data = base64.b64decode(shape["mask"], validate=True)
    bitmap: Any = None
    if (size := EncodedImage(data).stored_size) is not None and size[0] <= height and size[1] <= width:
        bitmap = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if bitmap is None:
        raise ReadError("a mask that is no picture, or larger than its image")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.any(axis=2)
    return paste(bitmap.astype(np.bool_), int(x0), int(y0), height, width)
