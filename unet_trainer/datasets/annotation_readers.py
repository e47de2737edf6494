"""The formats of labelling tools: COCO, LabelMe, Supervisely, CVAT and YOLO segmentation.

Of each format, `parse_*` lists classes, images and entries of one file, and `*_shape` turns an entry into pixels when its mask is
drawn. Both raise EntryError: an annotation file is anyone's, and every value is checked where it is used. A box alone is no mask.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np

from unet_trainer.config.safe_yaml import YamlError, parse_yaml
from unet_trainer.datasets import rasterize
from unet_trainer.datasets.annotations import (
    IN_CROWD,
    LINE,
    NO_AREA,
    RECTANGLE,
    SHORT,
    AnnotatedImage,
    Annotations,
    Entry,
    EntryError,
    ImageIndex,
    Shape,
    part_in,
    part_of_file,
    path_pieces,
)
from unet_trainer.datasets.pairs import path_in
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import EMPTY, Patch
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.image_headers import picture_size
from unet_trainer.system import input_files
from unet_trainer.system.console import counted

MAX_FILE_BYTES = 2**30
MAX_PIXELS = 2**30
MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_NAME = 100  # characters


# Checks of what is in a file


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises DataError with one sentence."""
    try:
        return input_files.read_json(path, MAX_FILE_BYTES)
    except OSError as error:
        fix = "; divide it, for example into train and val" if error.errno == errno.EFBIG else ""
        raise DataError(f"{path} cannot be read ({error.strerror or error}){fix}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); was it cut off?") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON that can be read ({str(error)[:100]})") from None


def read_text(path: Path, max_bytes: int) -> str:
    try:
        return input_files.read_text(path, max_bytes, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8'})") from None


def show(value: object, most: int = 60) -> str:
    """A value for a message, on one line and not long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of a million digits
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def as_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise EntryError(f"{what} is {show(value)}; need a list")
    return value


def as_dict(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EntryError(f"{what} is {show(value)}; need an object with keys")
    return value


def as_name(value: object, what: str) -> str:
    """The name of a class: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise EntryError(f"{what} is {show(value)}; need a text of 1 to {MAX_NAME} characters")
    return name


def as_number(value: object, what: str) -> float:
    if type(value) not in (int, float) or not -MAX_COORDINATE <= value <= MAX_COORDINATE:  # type: ignore[operator]
        raise EntryError(f"{what} is {show(value)}; need a number of pixels")
    return float(value)  # type: ignore[arg-type]


def as_size(height: object, width: object) -> tuple[int, int]:
    sides = [as_number(height, "height"), as_number(width, "width")]
    if not all(side.is_integer() and side > 0 for side in sides) or sides[0] * sides[1] > MAX_PIXELS:
        raise EntryError(f"width is {show(width)} and height {show(height)}; need whole numbers, at most {MAX_PIXELS} pixels")
    return int(sides[0]), int(sides[1])


def optional_size(height: object, width: object) -> tuple[int, int] | None:
    return None if height is None and width is None else as_size(height, width)


def as_points(value: object, what: str) -> Pixels:
    """N,2 float64 from [[x, y], ...] or [x, y, x, y, ...]."""
    items = as_list(value, what)
    if any(isinstance(item, list) for item in items):
        if any(not isinstance(item, list) or len(item) < 2 for item in items):
            raise EntryError(f"{what} is {show(value)}; need points as [x, y]")
        items = [number for item in items for number in item[:2]]
    if len(items) % 2:
        raise EntryError(f"{what} holds {len(items)} numbers; need x and y for each point")
    return np.array([as_number(number, f"a coordinate of {what}") for number in items], np.float64).reshape(-1, 2)


def decode_base64(text: object, what: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise EntryError(f"{what} is not base64") from None


def decode_bitmap(data: bytes, what: str, height: int, width: int) -> Pixels:
    """H,W bool of a PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent."""
    size = picture_size(data)
    if size is not None and (size[0] > height or size[1] > width):
        raise EntryError(f"{what} is {size[1]}×{size[0]} pixels, larger than its image")
    try:
        bitmap: Any = None if size is None else cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        bitmap = None
    if bitmap is None:
        raise EntryError(f"{what} is not a picture that can be decoded")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.any(axis=2)
    return bitmap.astype(np.bool_)


class Parsed(NamedTuple):
    """What one annotation file holds."""

    declared: list[str]  # names of the classes, in their order
    images: list[AnnotatedImage]
    notices: Sequence[str] = ()


def _outline(points: Pixels, height: int, width: int) -> Shape:
    return Shape(rasterize.fill_polygon(points, height, width)) if len(points) > 2 else Shape(None, SHORT)


# COCO JSON, also of CVAT, Roboflow, Label Studio and others. An object is polygons, which are joined, or run lengths.


def parse_coco(path: Path, content: Mapping[str, Any]) -> Parsed:
    categories: dict[Any, str] = {}  # id → name
    groups: set[object] = set()  # names of supercategories
    for number, value in enumerate(content["categories"], start=1):
        category = as_dict(value, f"category {number}")
        identity = _identity(category.get("id"), f"id of category {number}", taken=categories)
        categories[identity] = as_name(category.get("name"), f"name of category {number}")
        groups.add(str(category.get("supercategory")))
    by_image: dict[Any, list[Entry]] = defaultdict(list)
    num_boxes = 0
    for number, value in enumerate(content["annotations"], start=1):
        annotation = as_dict(value, f"annotation {number}")
        category_id = _identity(annotation.get("category_id"), f"category_id of annotation {number}", known=categories)
        image_id = _identity(annotation.get("image_id"), f"image_id of annotation {number}")
        by_image[image_id].append(Entry(categories[category_id], f"annotation {show(annotation.get('id'))}", annotation))
        num_boxes += not annotation.get("segmentation")
    if num_boxes and num_boxes == len(content["annotations"]):
        raise EntryError(
            f"it holds boxes only, {counted(num_boxes, 'box', 'boxes')} without an outline, and a box is no mask; "
            "export polygons or masks (in COCO: segmentation)"
        )
    images: dict[Any, AnnotatedImage] = {}
    for number, value in enumerate(content["images"], start=1):
        image = as_dict(value, f"image {number}")
        identity, name = _identity(image.get("id"), f"id of image {number}", taken=images), image.get("file_name")
        if not isinstance(name, str) or not name:
            raise EntryError(f"file_name of image {number} is {show(name)}; need a text")
        size = optional_size(image.get("height"), image.get("width"))
        images[identity] = AnnotatedImage(name, by_image.pop(identity, []), size)
    orphans = sum(map(len, by_image.values()))
    notices = [f"{counted(orphans, 'annotation')} in {path.name} of images that it does not list, left out"] if orphans else []
    used = {entry.label for image in images.values() for entry in image.entries} | {e.label for es in by_image.values() for e in es}
    # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
    declared = [
        name
        for identity, name in sorted(categories.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        if not (identity == 0 and name in groups and name not in used)
    ]
    return Parsed(declared, list(images.values()), notices)


def _identity(value: Any, what: str, taken: Mapping[Any, object] = {}, known: Mapping[Any, object] | None = None) -> Any:
    if type(value) not in (int, str) or (known is not None and value not in known):
        raise EntryError(f"{what} is {show(value)}; need {'an id' if known is None else f'one of {first_few(known)}'}")
    if value in taken:
        raise EntryError(f"{what}, {show(value)}, is used twice")
    return value


def coco_shape(annotation: Mapping[str, Any], height: int, width: int) -> Shape:
    segmentation = annotation.get("segmentation")
    if not segmentation:
        raise EntryError("a box without an outline, and a box is no mask; draw its outline, or remove it")
    note = IN_CROWD if annotation.get("iscrowd") in (1, True) else ""
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if size != [height, width]:
            raise EntryError(f"its run lengths are for the size {show(size)}; need [{height}, {width}], height and width")
        runs = rasterize.decompress_runs(counts) if isinstance(counts, str) else as_list(counts, "counts")
        return Shape(rasterize.crop(rasterize.unroll(runs, width, height).T), note)  # down the columns
    polygons = as_list(segmentation, "segmentation")
    if not isinstance(polygons[0], list):  # one polygon without the list around it
        polygons = [polygons]
    outlines = [as_points(polygon, "a polygon") for polygon in polygons]
    patches = [rasterize.fill_polygon(outline, height, width) for outline in outlines if len(outline) > 2]
    return Shape(rasterize.join(patches), note) if patches else Shape(None, SHORT)


# LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them.

LINE_WIDTH = 10.0


def parse_labelme(path: Path, content: Mapping[str, Any]) -> Parsed:
    entries = []
    for number, value in enumerate(content["shapes"], start=1):
        shape = as_dict(value, f"shape {number}")
        label = as_name(shape.get("label"), f"label of shape {number}")
        entries.append(Entry(label, f"shape {number} ({label})", shape, shape.get("shape_type") not in ("point", "points")))
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    size = optional_size(content.get("imageHeight"), content.get("imageWidth"))
    return Parsed([], [AnnotatedImage(name, entries, size)])


def labelme_shape(shape: Mapping[str, Any], height: int, width: int) -> Shape:
    kind = shape.get("shape_type") or "polygon"  # old files have no shape_type
    points = as_points(shape.get("points"), "points")
    if kind in ("point", "points"):
        return Shape(None, NO_AREA)
    if kind in ("polygon", "rotation"):  # the latter is a turned rectangle
        return _outline(points, height, width)
    if kind in ("line", "linestrip"):
        return Shape(rasterize.draw_line(points, LINE_WIDTH, height, width), LINE) if len(points) > 1 else Shape(None, SHORT)
    if kind == "rectangle" and len(points) == 4:  # some tools write all four corners
        return Shape(rasterize.fill_polygon(points, height, width), RECTANGLE)
    if kind not in ("rectangle", "circle", "mask"):
        raise EntryError(f"shape_type {show(kind)} is not known; need polygon, rectangle, circle, line, linestrip, mask or point")
    if len(points) != 2:
        raise EntryError(f"a {kind} with {counted(len(points), 'point')}; need 2")
    (x0, y0), (x1, y1) = points.tolist()
    if kind == "rectangle":
        return Shape(rasterize.fill_polygon(rasterize.box_corners(x0, y0, x1, y1), height, width), RECTANGLE)
    if kind == "circle":
        radius = math.hypot(x1 - x0, y1 - y0)
        return Shape(rasterize.fill_ellipse((x0, y0), (radius, radius), height, width))
    bitmap = decode_bitmap(decode_base64(shape.get("mask"), "mask"), "mask", height, width)
    return Shape(rasterize.paste(bitmap, int(x0), int(y0), height, width))


# Supervisely: meta.json with the classes, and for each image ann/NAME.json. Coordinates are those of pixels, not of their corners:
# a polygon includes the pixels that it passes through, as in Supervisely's own library.


def parse_supervisely(path: Path, content: Mapping[str, Any]) -> Parsed:
    """Of an image, or of meta.json."""
    if "classes" in content:
        return Parsed([as_name(item["title"], "title of a class") for item in content["classes"]], [])
    entries = []
    for number, value in enumerate(content["objects"], start=1):
        item = as_dict(value, f"object {number}")
        label = as_name(item.get("classTitle"), f"classTitle of object {number}")
        has_area = item.get("geometryType") in ("polygon", "bitmap", "rectangle")
        entries.append(Entry(label, f"object {number} ({label})", item, has_area))
    size = as_size(content["size"].get("height"), content["size"].get("width"))
    return Parsed([], [AnnotatedImage(path.stem, entries, size)])


def supervisely_shape(item: Mapping[str, Any], height: int, width: int) -> Shape:
    kind = item.get("geometryType")
    if kind == "bitmap":
        return Shape(_supervisely_bitmap(as_dict(item.get("bitmap"), "bitmap"), height, width))
    if kind not in ("polygon", "rectangle"):
        return Shape(None, NO_AREA)
    points = as_dict(item.get("points"), "points")
    exterior = as_points(points.get("exterior"), "exterior")
    if kind == "rectangle":
        if len(exterior) != 2:
            raise EntryError(f"a rectangle with {counted(len(exterior), 'point')}; need 2")
        return Shape(_fill_with_outline(rasterize.box_corners(*exterior.ravel().tolist()), height, width), RECTANGLE)
    if len(exterior) < 3:
        return Shape(None, SHORT)
    holes = [as_points(hole, "interior") for hole in as_list(points.get("interior", []), "interior")]
    filled = [_fill_with_outline(hole, height, width) for hole in holes if len(hole) > 2]
    return Shape(rasterize.without(_fill_with_outline(exterior, height, width), filled))


def _fill_with_outline(points: Pixels, height: int, width: int) -> Patch:
    """OpenCV's polygon: rounded to pixels, with the pixels of its outline."""
    corners = np.rint(points).astype(np.int64)
    left, top = corners.min(axis=0).clip(0)
    right, bottom = np.minimum(corners.max(axis=0) + 1, (width, height))
    if top >= bottom or left >= right:
        return EMPTY
    canvas = np.zeros((bottom - top, right - left), np.uint8)
    cv2.fillPoly(canvas, [(corners - (left, top)).astype(np.int32)], 1)
    return Patch(int(top), int(left), canvas.astype(np.bool_))


def _supervisely_bitmap(bitmap: Mapping[str, Any], height: int, width: int) -> Patch:
    origin = as_list(bitmap.get("origin"), "origin")
    if len(origin) != 2:
        raise EntryError(f"origin is {show(origin)}; need [x, y]")
    left, top = (int(as_number(value, "origin")) for value in origin)
    inflater = zlib.decompressobj()
    try:
        # At most a picture of the whole image without compression.
        data = inflater.decompress(decode_base64(bitmap.get("data"), "data"), 4 * height * width + 2**16)
    except zlib.error:
        raise EntryError("data is not compressed with zlib") from None
    if not inflater.eof:
        raise EntryError("data is cut off, or larger than its image")
    return rasterize.paste(decode_bitmap(data, "data", height, width), left, top, height, width)


# CVAT for images, XML 1.1. A document with a DTD is refused before anything in it is read: CVAT writes none, and entities that
# expand without end, or that name other files, are declared there. Boxes are filled, as in CVAT's own mask export.

CVAT_FILLED = frozenset(["polygon", "box", "ellipse", "mask"])
CVAT_SHAPES = CVAT_FILLED | {"polyline", "points", "cuboid", "skeleton"}


class _WithoutDtd(ElementTree.TreeBuilder):
    def doctype(self, *_: object) -> None:
        raise DataError("a document type declaration (DTD), which CVAT never writes; it is not read")


def read_xml(path: Path) -> ElementTree.Element:
    """The first element of an XML file; raises DataError."""
    try:
        with input_files.open_file(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                raise DataError(f"larger than {MAX_FILE_BYTES // 2**30} GiB; export fewer images at a time")
            return ElementTree.parse(file, ElementTree.XMLParser(target=_WithoutDtd())).getroot()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # the last two for an unknown encoding
        raise DataError(f"{path} is not valid XML ({error}); was it cut off?") from None


def parse_cvat(path: Path, root: ElementTree.Element) -> Parsed:
    if root.find("track") is not None:
        raise EntryError("an export of CVAT for video 1.1, with tracks; export CVAT for images 1.1, or COCO 1.0")
    images = []
    for number, image in enumerate(root.iter("image"), start=1):
        name = image.get("name") or ""
        try:
            size = as_size(_number(image, "height"), _number(image, "width"))
            shapes = sorted((shape for shape in image if shape.tag in CVAT_SHAPES), key=lambda shape: _number(shape, "z_order", 0))
            labels = [as_name(shape.get("label"), f"the label of a {shape.tag}") for shape in shapes]
            if not name:
                raise EntryError("it has no name")
        except EntryError as error:
            raise EntryError(f"image {show(name, 250) if name else f'number {number}'}: {error}") from None
        entries = [
            Entry(label, f"{shape.tag} {count} ({label})", shape, shape.tag in CVAT_FILLED)
            for count, (shape, label) in enumerate(zip(shapes, labels, strict=True), start=1)
        ]
        images.append(AnnotatedImage(name, entries, size, part_in([image.get("subset", "")])))
    return Parsed([as_name(label.text, "the name of a label") for label in root.iterfind(".//labels/label/name")], images)


def cvat_shape(shape: ElementTree.Element, height: int, width: int) -> Shape:
    if shape.tag == "box":
        x0, y0, x1, y1 = (_number(shape, name) for name in ("xtl", "ytl", "xbr", "ybr"))
        corners = rasterize.box_corners(x0, y0, x1, y1, _number(shape, "rotation", 0))
        return Shape(rasterize.fill_polygon(corners, height, width), RECTANGLE)
    if shape.tag == "ellipse":
        cx, cy, rx, ry = (_number(shape, name) for name in ("cx", "cy", "rx", "ry"))
        return Shape(rasterize.fill_ellipse((cx, cy), (rx, ry), height, width, _number(shape, "rotation", 0)))
    if shape.tag == "mask":
        rows, columns = as_size(_number(shape, "height"), _number(shape, "width"))
        if rows > height or columns > width:
            raise EntryError(f"{columns}×{rows} pixels, larger than its image")
        bitmap = rasterize.unroll(_split_numbers(shape, "rle", int), rows, columns)
        return Shape(rasterize.paste(bitmap, int(_number(shape, "left")), int(_number(shape, "top")), height, width))
    if shape.tag == "polygon":
        return _outline(as_points(_split_numbers(shape, "points", float), "points"), height, width)
    return Shape(None, NO_AREA)


def _split_numbers(shape: ElementTree.Element, name: str, kind: Callable[[str], float]) -> list[Any]:
    """Those of x,y;x,y;... or 1,2,3."""
    text = shape.get(name, "")
    try:
        return [kind(word) for word in re.split("[,;]", text)] if text.strip() else []
    except ValueError:
        raise EntryError(f"{name} is {show(text)}; need numbers with commas between them") from None


def _number(shape: ElementTree.Element, name: str, default: float | None = None) -> float:
    text = shape.get(name, "" if default is None else str(default))
    try:
        number = float(text)
    except ValueError:
        raise EntryError(f"{name} is {show(text)}; need a number") from None
    return as_number(number, name)


# YOLO segmentation: a text file for each image, a line for each object: class x1 y1 x2 y2 ..., in shares of width and height. The
# names of the classes come from data.yaml (or classes.txt). An image without a label file, or with an empty one, is all background,
# as Ultralytics has it.

CLASS_NUMBER = re.compile(r"[0-9]{1,4}")
NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
BOX_NUMBERS = 4
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


def looks_like_labels(path: Path) -> bool:
    """Whether the first line is a class number and coordinates."""
    most = 2**16  # characters
    try:
        with io.TextIOWrapper(input_files.open_file(path), "utf-8-sig") as file:
            line = next((line for line in iter(lambda: file.readline(most), "") if line.strip()), "")
        words = line.split()[: -1 if len(line) == most else None]  # without a number that is cut off
        return len(words) > BOX_NUMBERS and bool(CLASS_NUMBER.fullmatch(words[0])) and bool([*map(float, words)])
    except (OSError, ValueError):
        return False


def find_labels(texts: Sequence[Path], index: ImageIndex, data_dir: Path) -> dict[Path, list[Path]]:
    """Image → its label file: the same name beside it, or in labels/ in place of images/; else all texts of that name."""
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for path in texts:
        by_stem[path.stem].append(path)
    labels = {}
    for image in index.files:
        candidates = [path for path in by_stem.get(image.stem, []) if part_of_file(path, data_dir) in ("", index.part_of(image))]
        in_labels = re.sub(r"(?i)^(.*/)images(/|$)", r"\1labels\2", image.parent.as_posix())  # the last images/
        usual = [path for path in candidates if path.parent in (image.parent, Path(in_labels))]
        if candidates:
            labels[image] = usual or candidates
    return labels


def read_yolo(found: Mapping[Path, Sequence[Path]], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations in the label files that find_labels has found; raises DataError."""
    for image, paths in found.items():
        if len(paths) > 1:
            raise DataError(f"mask_dir: {image} could have the labels {first_few(paths)}; set mask_dir to their folder")
    labels = {image: paths[0] for image, paths in found.items()}
    names, names_file, folders = _read_names(data_dir, sorted({path.parent for path in labels.values()}))
    parts = {image: _part_by_yaml(path_in(data_dir, image), folders) or index.part_of(image) for image in index.files}
    labelled = {parts[image] for image in labels}  # images of a part without any label file are left out
    used: set[int] = set()
    num_boxes = num_lines = 0
    images = []
    for image in (image for image in index.files if parts[image] in labelled):
        path, entries = labels.get(image), []
        for number, line in enumerate(read_text(path, 64 * 2**20).splitlines() if path else [], start=1):
            words = line.split()
            if not words:
                continue
            if not CLASS_NUMBER.fullmatch(words[0]) or (names and int(words[0]) >= len(names)):
                known = f"a number below {len(names)}, the number of names in {names_file}" if names else "a class number"
                raise DataError(f"{path}, line {number}: class {show(words[0])}; need {known}")
            used.add(int(words[0]))
            num_boxes += len(words) == BOX_NUMBERS + 1
            entries.append(Entry(names[int(words[0])] if names else f"class {int(words[0])}", f"line {number}", line))
        num_lines += len(entries)
        sources, where = () if path is None else (path,), path_in(data_dir, path or image)
        images.append(AnnotatedImage(image.name, entries, None, parts[image], image, sources, where))
    files = f"{counted(len(labels), 'text file')} such as {min(labels.values()).name}"
    if num_lines and num_lines == num_boxes:
        raise DataError(
            f"{files} (YOLO) hold boxes only, {counted(num_boxes, 'line')} of class, x, y, width and height, and a box is no mask; "
            "export the segmentation format (YOLO-seg: class x1 y1 x2 y2 ...)"
        )
    notices = [] if names else ["no data.yaml or classes.txt with the names of the classes: they are numbers"]
    background = [image.name for image in images if not image.sources]
    if background:
        count = counted(len(background), "image")
        notices.append(f"all background, as in YOLO: {count} without a label file, {first_few(background)}")
    declared = names or [f"class {number}" for number in sorted(used)]
    order, rule = f"in the order of {names_file}" if names else "by number", "the smaller object is on top"
    return Annotations("YOLO", files, declared, order, rule, yolo_shape, images, notices)


def yolo_shape(line: str, height: int, width: int) -> Shape:
    words = line.split()[1:]
    if len(words) == BOX_NUMBERS:
        raise EntryError("four numbers, a box, among polygons, and a box is no mask; draw its outline, or remove it")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise EntryError(f"{show(line)}; need a class and numbers") from None
    points = as_points(numbers, "the line")
    if points.size and abs(points).max() > FURTHEST:
        raise EntryError(f"{abs(points).max():g} is no share of the image; need numbers from 0 to 1, not pixels")
    return _outline((points * (width, height)).round(6), height, width)  # 0.7 × 10 is 7, not 6.999…


def _read_names(data_dir: Path, label_folders: Sequence[Path]) -> tuple[list[str], str, dict[str, list[str]]]:
    """The names of the classes, the file that has them, and the folders of train, val and test in it; empty without one."""
    yamls = [path for pattern in ("*.yaml", "*.yml") for path in data_dir.glob(pattern)]
    for path in sorted(yamls, key=lambda path: (path.stem not in ("data", "dataset"), path.name)):
        try:
            content = parse_yaml(read_text(path, 2**20))
        except YamlError as error:
            raise DataError(f"{path}: {error}") from None
        if isinstance(content, dict) and content.get("names"):
            given = {part: content.get(part) for part in ("train", "val", "test")}
            lists = {part: value if isinstance(value, list) else [value] for part, value in given.items()}
            folders = {part: [item for item in values if isinstance(item, str)] for part, values in lists.items()}
            return _checked_names(content["names"], path), path.name, folders
    for folder in dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)]):
        for name in NAME_FILES:
            if (folder / name).is_file():
                lines = [line.strip() for line in read_text(folder / name, 2**20).splitlines()]
                return _checked_names([line for line in lines if line], folder / name), name, {}
    return [], "", {}


def _checked_names(names: object, path: Path) -> list[str]:
    """The list of names; a dict has the numbers from 0 as its keys."""
    if isinstance(names, dict):
        wanted = [str(number) for number in range(len(names))]
        if set(names) != set(wanted):
            raise DataError(f"{path}: names has the keys {first_few(names)}; need the numbers from 0 to {len(names) - 1}")
        names = [names[number] for number in wanted]
    try:
        return [as_name(name, f"name {number}") for number, name in enumerate(as_list(names, "names"))]
    except EntryError as error:
        raise DataError(f"{path}: {error}") from None


def _part_by_yaml(image: str, folders: Mapping[str, Sequence[str]]) -> str:
    """The part of whose folders in data.yaml, such as ../train/images, one stands in this order above the image; "" if none does,
    or those of several."""
    above = f"/{image.rpartition('/')[0]}/"
    wanted = {part: ["/".join(path_pieces(value)) for value in values] for part, values in folders.items()}
    found = {part for part, values in wanted.items() if any(value and f"/{value}/" in above for value in values)}
    return found.pop() if len(found) == 1 else ""
