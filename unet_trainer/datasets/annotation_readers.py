"""The formats of labelling tools: COCO, LabelMe, Supervisely, CVAT, Label Studio and YOLO; and tables of run lengths.

Of each format, `parse_*` lists classes, images and entries of one file, and `*_shape` turns an entry into pixels when its mask is
drawn. Both raise ReadError, the reason alone: an annotation file is anyone's, and every value is checked where it is used. A box
alone is no mask.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote
from xml.etree import ElementTree

import cv2
import numpy as np

from unet_trainer.config.safe_yaml import YamlError, parse_yaml
from unet_trainer.datasets import rasterize as raster
from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.pairs import first_few
from unet_trainer.datasets.rasterize import EMPTY, Patch, box_outline, ellipse_outline, fill_polygon
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, Pixels, picture_size
from unet_trainer.system import input_files
from unet_trainer.system.console import counted

MAX_FILE_BYTES = 2**30
MAX_PIXELS = 2**30
MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_NAME = 100  # characters
NO_MASK = "a box without an outline, and a box is no mask; export polygons or masks, or remove it"
PART_WORDS = {word: part for word, part in PARTS.items() if len(word) > 2}  # "tr" and "ts" mean little in a file's name

# What is said of a shape; only the first is not drawn.
LEFT_OUT, LINE, RECTANGLE, IN_CROWD = "left_out", "line", "rectangle", "crowd"

Value = TypeVar("Value")
Shape = tuple[Patch | None, str]  # the pixels of an object, None if it has none, and one of the above or ""
NO_SHAPE: Shape = None, LEFT_OUT


class Entry(NamedTuple):
    """An object as its file has it: its class, how messages name it, and what `read_shape` of the format reads."""

    label: str
    name: str
    content: Any
    has_area: bool = True


class AnnotatedImage(NamedTuple):
    """An image that an annotation file lists."""

    name: str  # of the image file, with folders before it if the annotation has them
    entries: Sequence[Entry]
    size: tuple[int, int] | None = None  # height and width that the annotation states
    part: str = ""  # train, val or test
    image: Path = Path()  # the file that is meant, once it is found
    source: Path | None = None  # the annotation file, if it has one
    where: str = ""  # names the entry in a message: "instances.json, image 'a.jpg'"


# What one annotation file holds: names of the classes in their order, images, and notices.
Parsed = tuple[list[str], list[AnnotatedImage], list[str]]


class Format(NamedTuple):
    """How files of a tool are read. One file for each image, or one for many."""

    parse: Callable[[Path, Any], Parsed]
    read_shape: Callable[[Any, int, int], Shape]  # content of an entry, height and width; raises DataError
    is_one_each: bool
    class_order: str
    overlap_rule: str  # "the smaller object is on top", else the later one is


# Checks of what is in a file


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Names the file in an error, which becomes a DataError of one sentence."""
    try:
        yield
    except (DataError, YamlError) as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ElementTree.ParseError, csv.Error, LookupError, ValueError) as error:  # LookupError: an unknown encoding
        raise DataError(f"{path} is not valid {kind} ({str(error)[:100]}); was it cut off?") from None


def part_in(names: Iterable[str]) -> str:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg; else ""."""
    found = {PART_WORDS[word] for name in names for word in re.findall("[a-z]+", name.lower()) if word in PART_WORDS}
    return found.pop() if len(found) == 1 else ""


def path_pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them."""
    return [piece for piece in PurePosixPath(name.replace("\\", "/")).parts if piece not in ("/", ".", "..")]


def show(value: object, most: int = 60) -> str:
    """A value for a message, on one line and not long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of a million digits
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check(value: object, kind: type[Value], what: str) -> Value:
    """The value, if it is a list, dict or str as it has to be."""
    if not isinstance(value, kind) or value == "":
        needed = "a list" if kind is list else "an object with keys" if kind is dict else "a text"
        raise ReadError(f"{what} is {show(value)}; need {needed}")
    return value


def as_name(value: object, what: str) -> str:
    """The name of a class: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ReadError(f"{what} is {show(value)}; need a text of 1 to {MAX_NAME} characters")
    return name


def as_number(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not -MAX_COORDINATE <= value <= MAX_COORDINATE:
        raise ReadError(f"{what} is {show(value)}; need a number of pixels")
    return float(value)


def as_size(height: object, width: object) -> tuple[int, int] | None:
    """Height and width; None if there is neither."""
    if height is None and width is None:
        return None
    sides = [as_number(height, "height"), as_number(width, "width")]
    if not all(side.is_integer() and side > 0 for side in sides) or sides[0] * sides[1] > MAX_PIXELS:
        raise ReadError(f"width is {show(width)} and height {show(height)}; need whole numbers, at most {MAX_PIXELS} pixels")
    return int(sides[0]), int(sides[1])


def as_points(value: object, what: str, count: int | None = None) -> Pixels:
    """N,2 float64 from [[x, y], ...] or [x, y, x, y, ...]."""
    items = check(value, list, what)
    if any(isinstance(item, list) for item in items):
        if any(not isinstance(item, list) or len(item) < 2 for item in items):
            raise ReadError(f"{what} is {show(value)}; need points as [x, y]")
        items = [number for item in items for number in item[:2]]
    if len(items) % 2 or count not in (None, len(items) // 2):
        needed = "x and y for each point" if count is None else f"those of {counted(count, 'point')}"
        raise ReadError(f"{what} holds {len(items)} numbers; need {needed}")
    return np.array([as_number(number, f"a coordinate of {what}") for number in items], np.float64).reshape(-1, 2)


def decode_base64(text: object, what: str) -> bytes:
    try:
        return base64.b64decode(check(text, str, what), validate=True)
    except ValueError:  # binascii.Error is one
        raise ReadError(f"{what} is not base64") from None


def paste_picture(data: bytes, what: str, left: float, top: float, height: int, width: int) -> Shape:
    """A PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent."""
    size = picture_size(data)
    if size is not None and (size[0] > height or size[1] > width):
        raise ReadError(f"{what} is {size[1]}×{size[0]} pixels, larger than its image")
    bitmap: Any = None
    with contextlib.suppress(cv2.error):
        bitmap = None if size is None else cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if bitmap is None:
        raise ReadError(f"{what} is not a picture that can be decoded")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.any(axis=2)
    return raster.paste(bitmap.astype(np.bool_), int(left), int(top), height, width), ""


def _entries(items: list[Any], noun: str, key: str, has_area: Callable[[Any], bool]) -> list[Entry]:
    """Objects of JSON or XML; `key` holds their class."""
    entries = []
    for number, item in enumerate(check(items, list, f"each {noun}"), start=1):
        name = f"{noun or item.tag} {number}"
        item = item if isinstance(item, ElementTree.Element) else check(item, dict, name)
        label = as_name(item.get(key), f"{key} of {name}")
        entries.append(Entry(label, f"{name} ({label})", item, has_area(item)))
    return entries


def _outline(points: Pixels, height: int, width: int, note: str = "") -> Shape:
    return (fill_polygon(points, height, width), note) if len(points) > 2 else NO_SHAPE


# COCO JSON, also of CVAT, Roboflow, Label Studio and others. An object is polygons, which are joined, or run lengths.


def parse_coco(path: Path, content: Mapping[str, Any]) -> Parsed:
    categories, groups = {}, set()  # id → name; names of supercategories
    for category, what in _with_ids(content["categories"], "category"):
        categories[category["id"]] = as_name(category.get("name"), f"name of {what}")
        groups.add(str(category.get("supercategory")))
    by_image: dict[Any, list[Entry]] = defaultdict(list)
    for number, value in enumerate(check(content["annotations"], list, "annotations"), start=1):
        annotation, what = check(value, dict, f"annotation {number}"), f"annotation {number}"
        category_id, image_id = (annotation.get(key) for key in ("category_id", "image_id"))
        if type(category_id) not in (int, str) or category_id not in categories:
            raise ReadError(f"category_id of {what} is {show(category_id)}; need one of {first_few(categories)}")
        if type(image_id) not in (int, str):
            raise ReadError(f"image_id of {what} is {show(image_id)}; need an id")
        by_image[image_id].append(Entry(categories[category_id], f"annotation {show(annotation.get('id'))}", annotation))
    used = {entry.label for entries in by_image.values() for entry in entries}
    images = []
    for image, what in _with_ids(content["images"], "image"):
        name = check(image.get("file_name"), str, f"file_name of {what}")
        images.append(AnnotatedImage(name, by_image.pop(image["id"], []), as_size(image.get("height"), image.get("width"))))
    orphans = sum(map(len, by_image.values()))
    notices = [f"{counted(orphans, 'annotation')} in {path.name} of images that it does not list, left out"] if orphans else []
    # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
    in_order = sorted(categories.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return [name for key, name in in_order if key != 0 or name in used or name not in groups], images, notices


def _with_ids(values: object, noun: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each object, whose id no other may have, and how messages name it."""
    seen = set()
    for number, value in enumerate(check(values, list, f"each {noun}"), start=1):
        item, what = check(value, dict, f"{noun} {number}"), f"{noun} {number}"
        identity = item.get("id")
        if type(identity) not in (int, str) or identity in seen:
            raise ReadError(f"id of {what} is {show(identity)}; need an id that no other has")
        seen.add(identity)
        yield item, what


def coco_shape(annotation: Mapping[str, Any], height: int, width: int) -> Shape:
    segmentation = annotation.get("segmentation")
    if not segmentation:
        raise ReadError(NO_MASK)
    note = IN_CROWD if annotation.get("iscrowd") in (1, True) else ""
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if size != [height, width]:
            raise ReadError(f"its run lengths are for the size {show(size)}; need [{height}, {width}], height and width")
        runs = raster.decompress_runs(counts) if isinstance(counts, str) else check(counts, list, "counts")
        return raster.crop(raster.unroll(runs, width, height).T), note  # down the columns
    polygons = check(segmentation, list, "segmentation")
    if not isinstance(polygons[0], list):  # one polygon without the list around it
        polygons = [polygons]
    outlines = [as_points(polygon, "a polygon") for polygon in polygons]
    patches = [fill_polygon(outline, height, width) for outline in outlines if len(outline) > 2]
    return (raster.join(patches), note) if patches else NO_SHAPE


# LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them.

LINE_WIDTH = 10.0


def parse_labelme(path: Path, content: Mapping[str, Any]) -> Parsed:
    entries = _entries(content["shapes"], "shape", "label", lambda shape: shape.get("shape_type") not in ("point", "points"))
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    return [], [AnnotatedImage(name, entries, as_size(content.get("imageHeight"), content.get("imageWidth")))], []


def labelme_shape(shape: Mapping[str, Any], height: int, width: int) -> Shape:
    kind = shape.get("shape_type") or "polygon"  # old files have no shape_type
    if kind in ("point", "points"):
        return NO_SHAPE
    if kind not in ("polygon", "rotation", "line", "linestrip", "rectangle", "circle", "mask"):  # rotation: a turned rectangle
        raise ReadError(f"shape_type {show(kind)} is not known; need polygon, rectangle, circle, line, linestrip, mask or point")
    points = as_points(shape.get("points"), "points")
    if kind in ("line", "linestrip"):
        return (raster.draw_line(points, LINE_WIDTH, height, width), LINE) if len(points) > 1 else NO_SHAPE
    if kind in ("polygon", "rotation") or (kind == "rectangle" and len(points) == 4):  # some tools write all four corners
        return _outline(points, height, width, RECTANGLE if kind == "rectangle" else "")
    if len(points) != 2:
        raise ReadError(f"a {kind} of {counted(len(points), 'point')}; need 2")
    (x0, y0), (x1, y1) = points.tolist()
    if kind == "rectangle":
        return _outline(box_outline(x0, y0, x1, y1), height, width, RECTANGLE)
    if kind == "circle":
        radius = math.hypot(x1 - x0, y1 - y0)
        return _outline(ellipse_outline(x0, y0, radius, radius), height, width)
    return paste_picture(decode_base64(shape.get("mask"), "mask"), "mask", x0, y0, height, width)


# Supervisely: meta.json with the classes, and for each image ann/NAME.json. Coordinates are those of pixels, not of their corners:
# a polygon includes the pixels that it passes through, as in Supervisely's own library.


def parse_supervisely(path: Path, content: Mapping[str, Any]) -> Parsed:
    """Of an image, or of meta.json."""
    if "objects" not in content:
        classes = [check(item, dict, "a class") for item in check(content.get("classes"), list, "classes")]
        return [as_name(item.get("title"), "title of a class") for item in classes], [], []
    kinds = ("polygon", "bitmap", "rectangle")
    entries = _entries(content["objects"], "object", "classTitle", lambda item: item.get("geometryType") in kinds)
    size = check(content["size"], dict, "size")
    return [], [AnnotatedImage(path.stem, entries, as_size(size.get("height", 0), size.get("width", 0)))], []


def supervisely_shape(item: Mapping[str, Any], height: int, width: int) -> Shape:
    kind = item.get("geometryType")
    if kind == "bitmap":
        bitmap = check(item.get("bitmap"), dict, "bitmap")
        ((left, top),) = as_points(bitmap.get("origin"), "origin", 1).tolist()
        inflater = zlib.decompressobj()
        try:
            # At most a picture of the whole image without compression.
            data = inflater.decompress(decode_base64(bitmap.get("data"), "data"), 4 * height * width + 2**16)
        except zlib.error:
            raise ReadError("data is not compressed with zlib") from None
        if not inflater.eof:
            raise ReadError("data is cut off, or larger than its image")
        return paste_picture(data, "data", left, top, height, width)
    if kind not in ("polygon", "rectangle"):
        return NO_SHAPE
    points = check(item.get("points"), dict, "points")
    exterior = as_points(points.get("exterior"), "exterior", 2 if kind == "rectangle" else None)
    if kind == "rectangle":
        return _fill_with_outline(box_outline(*exterior.ravel().tolist()), [], height, width), RECTANGLE
    holes = [as_points(hole, "interior") for hole in check(points.get("interior", []), list, "interior")]
    if len(exterior) < 3:
        return NO_SHAPE
    return _fill_with_outline(exterior, [hole for hole in holes if len(hole) > 2], height, width), ""


def _fill_with_outline(exterior: Pixels, holes: Sequence[Pixels], height: int, width: int) -> Patch:
    """OpenCV's polygon: rounded to pixels, with the pixels of its outline; without those of holes."""
    corners = np.rint(exterior).astype(np.int64)
    left, top = corners.min(axis=0).clip(0)
    right, bottom = np.minimum(corners.max(axis=0) + 1, (width, height))
    if top >= bottom or left >= right:
        return EMPTY
    canvas = np.zeros((bottom - top, right - left), np.uint8)
    for points, value in ((exterior, 1), *((hole, 0) for hole in holes)):
        cv2.fillPoly(canvas, [(np.rint(points) - (left, top)).astype(np.int32)], value)
    return Patch(int(top), int(left), canvas.astype(np.bool_))


# CVAT for images, XML 1.1. A document with a DTD is refused before anything in it is read: CVAT writes none, and entities that
# expand without end, or that name other files, are declared there. Boxes are filled, as in CVAT's own mask export.

CVAT_FILLED = frozenset(["polygon", "box", "ellipse", "mask"])
CVAT_SHAPES = CVAT_FILLED | {"polyline", "points", "cuboid", "skeleton"}


class _WithoutDtd(ElementTree.TreeBuilder):
    def doctype(self, *_: object) -> None:
        raise DataError("a document type declaration (DTD), which CVAT never writes; it is not read")


def read_xml(path: Path) -> ElementTree.Element:
    """The first element of an XML file; raises DataError."""
    with reading(path, "XML"), input_files.open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise DataError(f"larger than {MAX_FILE_BYTES // 2**30} GiB; export fewer images at a time")
        return ElementTree.parse(file, ElementTree.XMLParser(target=_WithoutDtd())).getroot()


def parse_cvat(path: Path, root: ElementTree.Element) -> Parsed:
    if root.find("track") is not None:
        raise ReadError("an export of CVAT for video 1.1, with tracks; export CVAT for images 1.1, or COCO 1.0")
    images = []
    for number, image in enumerate(root.iter("image"), start=1):
        name = image.get("name") or ""
        try:
            size = as_size(*_numbers(image, "height", "width"))
            shapes = (shape for shape in image if shape.tag in CVAT_SHAPES)
            in_order = sorted(shapes, key=lambda shape: _numbers(shape, z_order=0))
            entries = _entries(in_order, "", "label", lambda shape: shape.tag in CVAT_FILLED)
            check(name, str, "its name")
        except ReadError as error:
            raise ReadError(f"image {show(name, 250) if name else f'number {number}'}: {error}") from None
        images.append(AnnotatedImage(name, entries, size, part_in([image.get("subset", "")])))
    return [as_name(label.text, "the name of a label") for label in root.iterfind(".//labels/label/name")], images, []


def cvat_shape(shape: ElementTree.Element, height: int, width: int) -> Shape:
    if shape.tag == "box":
        return _outline(box_outline(*_numbers(shape, "xtl", "ytl", "xbr", "ybr", rotation=0)), height, width, RECTANGLE)
    if shape.tag == "ellipse":
        return _outline(ellipse_outline(*_numbers(shape, "cx", "cy", "rx", "ry", rotation=0)), height, width)
    if shape.tag == "mask":
        left, top, *size = _numbers(shape, "left", "top", "height", "width")
        rows, columns = as_size(*size) or (0, 0)
        if rows > height or columns > width:
            raise ReadError(f"{columns}×{rows} pixels, larger than its image")
        bitmap = raster.unroll(_split_numbers(shape, "rle", int), rows, columns)
        return raster.paste(bitmap, int(left), int(top), height, width), ""
    if shape.tag == "polygon":
        return _outline(as_points(_split_numbers(shape, "points", float), "points"), height, width)
    return NO_SHAPE


def _split_numbers(shape: ElementTree.Element, name: str, kind: Callable[[str], float]) -> list[Any]:
    """Those of x,y;x,y;... or 1,2,3."""
    text = shape.get(name, "")
    try:
        return [kind(word) for word in re.split("[,;]", text)] if text.strip() else []
    except ValueError:
        raise ReadError(f"{name} is {show(text)}; need numbers with commas between them") from None


def _numbers(shape: ElementTree.Element, *names: str, **defaults: float) -> list[float]:
    """The attributes of these names; those of `defaults` may be missing."""
    found = []
    for name in (*names, *defaults):
        text = shape.get(name, str(defaults.get(name, "")))
        try:
            found.append(as_number(float(text), name))
        except ValueError:
            raise ReadError(f"{name} is {show(text)}; need a number") from None
    return found


# YOLO segmentation: a text file for each image, a line for each object: class x1 y1 x2 y2 ..., in shares of width and height. The
# names of the classes come from data.yaml (or classes.txt). An image without a label file, or with an empty one, is all background,
# as Ultralytics has it.

CLASS_NUMBER = re.compile(r"[0-9]{1,4}")
NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
BOX_NUMBERS = 4
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


class YoloNames(NamedTuple):
    """The names of the classes, the file that has them, and the folders of train, val and test in it; empty without one."""

    names: Sequence[str] = ()
    file: str = ""
    folders: Mapping[str, Sequence[str]] = {}

    def part_of(self, image: str) -> str:
        """The part of whose folders, such as ../train/images, one stands in this order above the image; "" if none does, or those
        of several."""
        above = f"/{image.rpartition('/')[0]}/"
        wanted = {part: ["/".join(path_pieces(value)) for value in values] for part, values in self.folders.items()}
        found = {part for part, values in wanted.items() if any(value and f"/{value}/" in above for value in values)}
        return found.pop() if len(found) == 1 else ""


def parse_yolo(path: Path, known: YoloNames) -> Parsed:
    with reading(path, "UTF-8"):
        lines = input_files.read_text(path, 64 * 2**20, "utf-8-sig").splitlines()
    entries, used = [], set()
    for number, line in enumerate(lines, start=1):
        if not (words := line.split()):
            continue
        if not CLASS_NUMBER.fullmatch(words[0]) or (known.names and int(words[0]) >= len(known.names)):
            needed = f"a number below {len(known.names)}, the number of names in {known.file}" if known.names else "a class number"
            raise ReadError(f"line {number}: class {show(words[0])}; need {needed}")
        used.add(int(words[0]))
        entries.append(Entry(known.names[int(words[0])] if known.names else f"class {words[0]}", f"line {number}", line))
    # images/train/a.jpg for labels/train/a.txt, or beside it
    *folders, name = path.with_suffix("").parts
    below = folders[len(folders) - [*reversed(folders), "labels"].index("labels") :] if "labels" in folders else []
    declared = [*known.names] or [f"class {number}" for number in sorted(used)]
    return declared, [AnnotatedImage("/".join([*below, name]), entries)], []


def looks_like_labels(path: Path) -> bool:
    """Whether the first line is a class number and coordinates."""
    try:
        with input_files.open_file(path) as file:
            head = file.read(2**16).decode("utf-8-sig", "ignore").lstrip()
        words = head.partition("\n")[0].split()[:100]
        return len(words) > BOX_NUMBERS and bool(CLASS_NUMBER.fullmatch(words[0])) and bool([*map(float, words)])
    except (OSError, ValueError):
        return False


def yolo_shape(line: str, height: int, width: int) -> Shape:
    words = line.split()[1:]
    if len(words) == BOX_NUMBERS:
        raise ReadError(NO_MASK)
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ReadError(f"{show(line)}; need a class and numbers") from None
    points = as_points(numbers, "the line")
    if points.size and abs(points).max() > FURTHEST:
        raise ReadError(f"{abs(points).max():g} is no share of the image; need numbers from 0 to 1, not pixels")
    return _outline((points * (width, height)).round(6), height, width)  # 0.7 × 10 is 7, not 6.999…


def read_names(data_dir: Path, label_folders: Sequence[Path]) -> YoloNames:
    """From the YAML file in data_dir, or from a list of names there or beside the labels."""
    yamls = [path for pattern in ("*.yaml", "*.yml") for path in data_dir.glob(pattern)]
    for path in sorted(yamls, key=lambda path: (path.stem not in ("data", "dataset"), path.name)):
        with reading(path, "YAML"):
            content = parse_yaml(input_files.read_text(path, 2**20, "utf-8-sig"))
            if isinstance(content, dict) and (names := content.get("names")):
                if isinstance(names, dict):  # with the numbers from 0 as its keys
                    wanted = [str(number) for number in range(len(names))]
                    if set(names) != set(wanted):
                        raise ReadError(f"names has the keys {first_few(names)}; need the numbers from 0 to {len(names) - 1}")
                    names = [names[number] for number in wanted]
                folders = {}
                for part in ("train", "val", "test"):
                    values = content.get(part)
                    folders[part] = [item for item in (values if isinstance(values, list) else [values]) if isinstance(item, str)]
                return YoloNames([as_name(name, "a name") for name in check(names, list, "names")], path.name, folders)
    for folder in dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)]):
        for path in (folder / name for name in NAME_FILES if (folder / name).is_file()):
            with reading(path, "UTF-8"):
                lines = [line.strip() for line in input_files.read_text(path, 2**20, "utf-8-sig").splitlines()]
                return YoloNames([as_name(line, "a name") for line in lines if line], path.name)
    return YoloNames()


# Label Studio, its JSON export: tasks, each with annotations of which the last that was not cancelled counts. Coordinates are
# percents. A brush is RGBA bytes, packed by the bit: runs of one byte, and blocks of single ones.

STUDIO_SHAPES = frozenset(["polygon", "rectangle", "ellipse", "brush"])
UPLOAD_ID = re.compile(r"[0-9a-f]{8}-(?=.)")  # that it puts before the names of uploaded files


def parse_label_studio(path: Path, content: Any) -> Parsed:
    images, num_several = [], 0
    for number, value in enumerate(content if isinstance(content, list) else [content], start=1):
        task = check(value, dict, f"task {number}")
        files = [text for text in check(task.get("data"), dict, f"data of task {number}").values() if isinstance(text, str)]
        names = [name for name in map(_uploaded_name, files) if PurePosixPath(name).suffix.lower() in IMAGE_EXTENSIONS]
        if not names:
            raise ReadError(f"data of task {number} is {show(task.get('data'))}; need the name of an image file")
        found = [check(one, dict, f"an annotation of task {number}") for one in check(task.get("annotations"), list, "annotations")]
        done = [one for one in found if not one.get("was_cancelled")]
        num_several += len(done) > 1
        if not done:
            continue
        results = [check(item, dict, "a result") for item in check(done[-1].get("result"), list, f"result of task {number}")]
        labels = {item.get("id"): label for item in results if (label := _studio_label(item))}
        size, entries = None, []
        for place, item in enumerate(results, start=1):
            shape = str(item.get("type", "")).removesuffix("labels")
            if shape in STUDIO_SHAPES or shape == "keypoint":
                what = f"result {place} of task {number}"
                if turn := item.get("image_rotation"):
                    raise ReadError(f"image_rotation of {what} is {show(turn)}; need 0: it was turned in the tool")
                label = as_name(_studio_label(item) or labels.get(item.get("id")), f"the label of {what}")
                size = as_size(item.get("original_height"), item.get("original_width"))
                entries.append(Entry(label, f"{what} ({label})", item, shape in STUDIO_SHAPES))
        images.append(AnnotatedImage(names[0], entries, size))
    several = f"{counted(num_several, 'image')} in {path.name} with several annotations: the last counts"
    return [], images, [several] if num_several else []


def _studio_label(item: Mapping[str, Any]) -> Any:
    """The first label of a result; None if it has none."""
    value = item.get("value")
    lists = [value.get(key) for key in (item.get("type"), "labels") if isinstance(key, str)] if isinstance(value, dict) else []
    return next((labels[0] for labels in lists if isinstance(labels, list) and labels), None)


def _uploaded_name(text: str) -> str:
    """/data/upload/1/0a1b2c3d-a.jpg, /data/local-files/?d=set/a.jpg, s3://bucket/a.jpg → the file."""
    before, _, query = text.partition("?")
    named = re.search(r"(?:^|&)d=([^&]*)", query)
    return unquote(named[1]) if named else PurePosixPath(unquote(before)).name


def without_upload_id(name: str) -> str:
    return UPLOAD_ID.sub("", PurePosixPath(name).name, count=1)


def label_studio_shape(item: Mapping[str, Any], height: int, width: int) -> Shape:
    value, kind = check(item.get("value"), dict, "value"), str(item.get("type")).removesuffix("labels")
    if kind == "keypoint":
        return NO_SHAPE
    if kind == "brush":
        return raster.crop(raster.unpack_brush(check(value.get("rle"), list, "rle"), height, width)), ""
    scale = np.array([width, height]) / 100
    if kind == "polygon":
        return _outline((as_points(value.get("points"), "points") * scale).round(6), height, width)
    x, y, turn = (as_number(value.get(key, 0), key) for key in ("x", "y", "rotation"))
    sides = [as_number(value.get(key), key) for key in (("width", "height") if kind == "rectangle" else ("radiusX", "radiusY"))]
    (x, y), (across, down) = (np.array([x, y]) * scale).tolist(), (np.array(sides) * scale).tolist()
    if kind == "ellipse":
        return _outline(ellipse_outline(x, y, across, down, turn), height, width)
    corners = raster.turned(box_outline(x, y, x + across, y + down), [x, y], turn)  # around its first corner
    return _outline(corners.round(6), height, width, RECTANGLE)


# Tables of run lengths, as of Kaggle: a row for each object, or for each class of an image, with the name of the image and
# "start length start length ...". An empty cell is an image without that object.

RUN_COLUMNS = {  # in lower case, without separators → whether its runs go down the columns; in two competitions they do not
    **dict.fromkeys(("encodedpixels", "rle", "rlemask", "maskrle", "encoding", "rleencoding", "encodedrle"), True),
    "annotation": False, "segmentation": False,
}  # fmt: skip
IMAGE_COLUMNS = ("imageid", "image", "imagename", "filename", "imagefile", "file", "img", "imgid", "id")
CLASS_COLUMNS = ("classid", "class", "classname", "categoryid", "category", "label", "defecttype")
JOINED_COLUMNS = frozenset(image + label for image in IMAGE_COLUMNS for label in CLASS_COLUMNS)  # ImageId_ClassId: a.jpg_1
NO_RUNS = frozenset(["", "-1", "nan", "none", "null"])
ONE_CLASS = "object"


def find_run_columns(path: Path) -> dict[str, str] | None:
    """The columns for image, runs, label and joined (image and label) of a CSV file; None if it is not one of run lengths."""
    with io.TextIOWrapper(input_files.open_file(path), "utf-8-sig", errors="replace") as file:
        header = next(csv.reader([file.readline(2**14)]), [])
    names = {re.sub(r"[\W_]", "", cell.lower()): cell for cell in header}
    roles = {"image": IMAGE_COLUMNS, "runs": RUN_COLUMNS, "label": CLASS_COLUMNS, "joined": JOINED_COLUMNS}
    found = {role: names[name] for role, wanted in roles.items() for name in reversed([*wanted]) if name in names}
    return found if "runs" in found and ("image" in found or "joined" in found) else None


def parse_runs(path: Path, columns: Mapping[str, str]) -> Parsed:
    down_columns = RUN_COLUMNS[re.sub(r"[\W_]", "", columns["runs"].lower())]
    by_image: dict[str, list[Entry]] = defaultdict(list)
    labels: set[str] = set()
    before = csv.field_size_limit(MAX_FILE_BYTES)
    try:
        with reading(path, "CSV"):
            text = input_files.read_text(path, MAX_FILE_BYTES, "utf-8-sig")
            rows = csv.DictReader(io.StringIO(text, newline=""))
            table = [(rows.line_num, {role: (row[column] or "").strip() for role, column in columns.items()}) for row in rows]
    finally:
        csv.field_size_limit(before)
    for line, row in ((line, row) for line, row in table if any(row.values())):
        name, label = row["joined"].rpartition("_")[::2] if "joined" in row else (row["image"], row.get("label", ""))
        by_image[check(name, str, f"the image in line {line}")] += []
        has_runs = row["runs"].lower() not in NO_RUNS
        if ("joined" in row or "label" in row) and (label or has_runs):
            label = as_name(f"class {label}" if label.isdecimal() else label, f"the class in line {line}")
            labels.add(label)
        if has_runs:
            by_image[name].append(Entry(label or ONE_CLASS, f"line {line}", (row["runs"], down_columns)))
    declared = sorted(labels, key=lambda name: [int(word) if word.isdecimal() else 0 for word in name.split()[-1:]] + [name])
    notices = [] if down_columns else [f"the run lengths of {path.name} are read along the rows, not down the columns"]
    return declared, [AnnotatedImage(name, entries) for name, entries in by_image.items()], notices


def runs_shape(content: tuple[str, bool], height: int, width: int) -> Shape:
    return raster.fill_runs(content[0], height, width, content[1]), ""


FORMATS = {
    "COCO": Format(parse_coco, coco_shape, False, "by category id", "the smaller object is on top"),
    "LabelMe": Format(parse_labelme, labelme_shape, True, "in alphabetical order", "the later shape is on top"),
    "Supervisely": Format(parse_supervisely, supervisely_shape, True, "in the order of meta.json", "the later object is on top"),
    "CVAT": Format(
        parse_cvat, cvat_shape, False, "in the order of the labels", "the higher z_order, then the later shape, is on top"
    ),
    "Label Studio": Format(parse_label_studio, label_studio_shape, False, "in alphabetical order", "the later result is on top"),
    "YOLO": Format(parse_yolo, yolo_shape, True, "by number", "the smaller object is on top"),
    "run lengths": Format(parse_runs, runs_shape, False, "by number or name", "the later row is on top"),
}
