"""The formats of labelling tools: COCO, LabelMe and YOLO; and tables of run lengths.

Of each format, `parse_*` lists classes, images and entries of one file, and `*_shape` turns an entry into pixels when
its mask is drawn. An annotation file is anyone's: what is not as its tool writes it fails where it is used, and
`inside` says in which entry. A box alone is no mask.
"""

import base64
import contextlib
import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, get_args

import cv2
import numpy as np

from unet_trainer.config.safe_yaml import YamlError, parse_yaml
from unet_trainer.datasets import rasterize as raster
from unet_trainer.datasets.pairs import Part, first_few
from unet_trainer.datasets.rasterize import EMPTY, Patch, box_outline, circle_outline, fill_polygon
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels, picture_size
from unet_trainer.system import input_files
from unet_trainer.system.console import counted, first_line

MAX_FILE_BYTES, MAX_LABEL_BYTES = 2**30, 2**26  # of a file, and of one with the labels of an image
MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_NAME = 100  # characters
MAX_SHOWN = 100  # characters of what Python says of a wrong value
NO_MASK = "a box without an outline, and a box is no mask; export polygons or masks, or remove it"
# What a value of a wrong type, or one that is missing, raises where it is used.
MALFORMED: tuple[type[Exception], ...] = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)
MALFORMED += (cv2.error, csv.Error)

LINE, RECTANGLE, IN_CROWD = "line", "rectangle", "crowd"  # what is said of a shape

Shape = tuple[Patch, str]  # the pixels of an object, and one of the above or ""
NO_SHAPE: Shape = EMPTY, ""


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
    part: Part | None = None
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
def inside(name: object) -> Iterator[None]:
    """Names the file or the entry in an error, which becomes a DataError of one sentence."""
    try:
        yield
    except (DataError, YamlError) as error:
        raise DataError(f"{name}: {error}") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: it is not UTF-8 text, as some programs save it; save it as UTF-8") from None
    except MALFORMED as error:
        reason = first_line(error)[:MAX_SHOWN]
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        elif isinstance(error, (TypeError, AttributeError)):  # in Python's words: 'NoneType' object is not iterable
            reason = "a value has the wrong type, such as null in place of a list"
        raise DataError(
            f"{name}: {reason}; was it cut off, or edited by hand? Correct it, or export it again"
        ) from None


def path_pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them."""
    return [piece for piece in PurePosixPath(name.replace("\\", "/")).parts if piece not in ("/", ".", "..")]


def as_name(value: object, what: str = "the name of a class") -> str:
    """The name of a class: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ReadError(f"{what} is {value!r:.60}; need a text of 1 to {MAX_NAME} characters")
    return name


def as_numbers(values: Any) -> Pixels:
    """float64; none of them is NaN or so large that nothing can be drawn."""
    try:
        numbers = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise ReadError(f"coordinates are {values!r:.60}; need numbers, as many for each point") from None
    if not (np.abs(numbers) <= MAX_COORDINATE).all():
        raise ReadError(f"a coordinate that is no number, or beyond {MAX_COORDINATE:.0f} pixels")
    return numbers


def as_size(height: Any, width: Any) -> tuple[int, int] | None:
    """Height and width, as numbers or as text; None if there is neither."""
    if height is None and width is None:
        return None
    if not all(re.fullmatch(r"[0-9]{1,9}(\.0+)?", str(side)) for side in (height, width)):
        raise ReadError(f"height is {height!r:.60} and width {width!r:.60}; need whole numbers of pixels")
    return int(float(height)), int(float(width))


def as_points(value: Any, count: int | None = None) -> Pixels:
    """N,2 from [[x, y], ...] or [x, y, x, y, ...]. `count`: how many there must be."""
    numbers = as_numbers(value)
    if numbers.ndim == 1 and numbers.size % 2 == 0:
        numbers = numbers.reshape(-1, 2)
    if numbers.ndim != 2 or numbers.shape[1] < 2:
        raise ReadError(f"{counted(numbers.size, 'number')}, {value!r:.60}; need x and y for each point")
    if count not in (None, len(numbers)):
        raise ReadError(f"{counted(len(numbers), 'point')}; need {count}")
    return numbers[:, :2]


def paste_picture(data: bytes, left: float, top: float, height: int, width: int) -> Shape:
    """A PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent."""
    size = picture_size(data)
    bitmap: Any = None
    if size is not None and size[0] <= height and size[1] <= width:
        bitmap = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if bitmap is None:
        raise ReadError("a mask that is no picture, or larger than its image")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.any(axis=2)
    return raster.paste(bitmap.astype(np.bool_), int(left), int(top), height, width), ""


def _entries(items: Iterable[Any], noun: str, key: str, has_area: Callable[[Any], bool]) -> list[Entry]:
    """Objects of JSON; `key` holds their class."""
    entries = []
    for number, item in enumerate(items, start=1):
        name = f"{noun} {number}"
        with inside(name):
            label = as_name(item.get(key), key)
            entries.append(Entry(label, f"{name} ({label})", item, has_area(item)))
    return entries


# COCO JSON, which most tools export. An object is polygons, which are joined, or run lengths.


def parse_coco(path: Path, content: Mapping[str, Any]) -> Parsed:
    categories: dict[Any, str] = {}  # id → name
    groups: set[str] = set()  # names of supercategories
    for number, category in enumerate(content["categories"], start=1):
        with inside(f"category {number}"):
            if category["id"] in categories:
                raise ReadError(f"id {category['id']!r:.60} is used twice")
            categories[category["id"]] = as_name(category["name"], "name")
            groups.add(str(category.get("supercategory")))
    by_image: dict[Any, list[Entry]] = defaultdict(list)
    for number, annotation in enumerate(content["annotations"], start=1):
        with inside(f"annotation {number}"):
            if (category_id := annotation["category_id"]) not in categories:
                raise ReadError(f"category_id is {category_id!r:.60}; need one of {first_few(categories)}")
            entry = Entry(categories[category_id], f"annotation {annotation.get('id', number)!r:.60}", annotation)
            by_image[annotation["image_id"]].append(entry)
    used = {entry.label for entries in by_image.values() for entry in entries}
    images: dict[Any, AnnotatedImage] = {}  # by id
    for number, image in enumerate(content["images"], start=1):
        with inside(f"image {number}"):
            if image["id"] in images:
                raise ReadError(f"id {image['id']!r:.60} is used twice")
            size = as_size(image.get("height"), image.get("width"))
            images[image["id"]] = AnnotatedImage(str(image["file_name"]), by_image.pop(image["id"], []), size)
    orphans = sum(map(len, by_image.values()))
    notices = (
        [f"{counted(orphans, 'annotation')} in {path.name} of images that it does not list, left out"]
        if orphans
        else []
    )
    # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
    in_order = sorted(categories.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return (
        [name for key, name in in_order if key != 0 or name in used or name not in groups],
        [*images.values()],
        notices,
    )


def coco_shape(annotation: Mapping[str, Any], height: int, width: int) -> Shape:
    segmentation = annotation.get("segmentation")
    if not segmentation:
        raise ReadError(NO_MASK)
    note = IN_CROWD if annotation.get("iscrowd") in (1, True) else ""
    if isinstance(segmentation, dict):
        size, counts = segmentation["size"], segmentation["counts"]
        if size != [height, width]:
            raise ReadError(
                f"its run lengths are for the size {size!r:.60}; need [{height}, {width}], height and width"
            )
        runs = raster.decompress_runs(counts) if isinstance(counts, str) else counts
        return raster.crop(raster.unroll(runs, width, height).T), note  # down the columns
    polygons = (
        segmentation if isinstance(segmentation[0], list) else [segmentation]
    )  # or one without the list around it
    return raster.join([fill_polygon(as_points(polygon), height, width) for polygon in polygons]), note


# LabelMe JSON: one file for each image. Lines are ten pixels wide, as LabelMe's own converters draw them.

LINE_WIDTH = 10.0


def parse_labelme(path: Path, content: Mapping[str, Any]) -> Parsed:
    entries = _entries(
        content["shapes"], "shape", "label", lambda shape: shape.get("shape_type") not in ("point", "points")
    )
    name = content["imagePath"] if isinstance(content["imagePath"], str) else ""
    return [], [AnnotatedImage(name, entries, as_size(content.get("imageHeight"), content.get("imageWidth")))], []


def labelme_shape(shape: Mapping[str, Any], height: int, width: int) -> Shape:
    kind, points = shape.get("shape_type") or "polygon", as_points(shape["points"])  # old files have no shape_type
    if kind in ("point", "points"):
        return NO_SHAPE
    if kind in ("line", "linestrip"):
        return raster.draw_line(points, LINE_WIDTH, height, width), LINE
    if kind in ("polygon", "rotation") or (
        kind == "rectangle" and len(points) == 4
    ):  # some tools write all four corners
        return fill_polygon(points, height, width), ""
    if kind not in ("rectangle", "circle", "mask"):
        raise ReadError(
            f"shape_type {kind!r:.60} is not known; need polygon, rectangle, circle, line, linestrip, mask or point"
        )
    (x0, y0), (x1, y1) = as_points(shape["points"], 2).tolist()
    if kind == "rectangle":
        return fill_polygon(box_outline(x0, y0, x1, y1), height, width), RECTANGLE
    if kind == "circle":
        radius = math.hypot(x1 - x0, y1 - y0)
        return fill_polygon(circle_outline(x0, y0, radius), height, width), ""
    return paste_picture(base64.b64decode(shape["mask"], validate=True), x0, y0, height, width)


# YOLO segmentation: a text file for each image, a line for each object: class x1 y1 x2 y2 ..., in shares of width and
# height. The names of the classes come from data.yaml (or classes.txt). An image without a label file, or with an empty
# one, is all background, as Ultralytics has it.

CLASS_NUMBER = re.compile(r"[0-9]{1,4}")
NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
BOX_NUMBERS = 4
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


class YoloNames(NamedTuple):
    """The names of the classes, the file that has them, and the folders of train, val and test in it, or the lines of
    the lists that it names, by the name of the image; empty without one."""

    names: Sequence[str] = ()
    file: str = ""
    folders: Sequence[tuple[Part, str]] = ()
    lists: Mapping[str, Sequence[tuple[Part, str]]] = {}

    def part_of(self, image: str) -> Part | None:
        """The part that lists the image, with more or fewer folders before it: val before test, and what either lists
        must not train. Or the one of whose folders, such as ../train/images, one stands in this order above it; None if
        none does, or those of several."""
        above, path = f"/{image.rpartition('/')[0]}/", f"/{image}"
        lines = self.lists.get(PurePosixPath(image).name, ())
        listed = {part for part, line in lines if path.endswith(f"/{line}") or f"/{line}".endswith(path)}
        found = {part for part, folder in self.folders if folder and f"/{folder}/" in above}
        return max(listed, key=("train", "test", "val").index) if listed else found.pop() if len(found) == 1 else None


def parse_yolo(path: Path, content: tuple[YoloNames, str]) -> Parsed:
    """`content`: the names, and the text of the file."""
    (names, file, *_), text = content
    entries, used = [], set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.split()):
            continue
        if not CLASS_NUMBER.fullmatch(words[0]) or (names and int(words[0]) >= len(names)):
            needed = f"a number below {len(names)}, the number of names in {file}" if names else "a class number"
            raise ReadError(f"line {number}: class {words[0]!r:.60}; need {needed}")
        used.add(int(words[0]))
        entries.append(Entry(names[int(words[0])] if names else f"class {words[0]}", f"line {number}", line))
    # images/train/a.jpg for labels/train/a.txt, or beside it
    *folders, name = path.with_suffix("").parts
    below = folders[len(folders) - [*reversed(folders), "labels"].index("labels") :] if "labels" in folders else []
    declared = [*names] or [f"class {number}" for number in sorted(used)]
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
    points = as_points(words)
    if points.size and abs(points).max() > FURTHEST:
        raise ReadError(f"{abs(points).max():g} is no share of the image; need numbers from 0 to 1, not pixels")
    return fill_polygon((points * (width, height)).round(6), height, width), ""  # 0.7 × 10 is 7, not 6.999…


def read_names(data_dir: Path, label_folders: Sequence[Path]) -> YoloNames:
    """From the YAML file in data_dir, or from a list of names there or beside the labels."""
    yamls = [path for pattern in ("*.yaml", "*.yml") for path in data_dir.glob(pattern)]
    for path in sorted(yamls, key=lambda path: (path.stem not in ("data", "dataset"), path.name)):
        with inside(path):
            content = parse_yaml(input_files.read_text(path, 2**20, "utf-8-sig"))
            if isinstance(content, dict) and (names := content.get("names")):
                if isinstance(names, dict):  # with the numbers from 0 as its keys
                    if set(names) != {str(number) for number in range(len(names))}:
                        raise ReadError(
                            f"names has the keys {first_few(names)}; need the numbers from 0 to {len(names) - 1}"
                        )
                    names = [names[str(number)] for number in range(len(names))]
                if not isinstance(names, list):
                    raise ReadError(f"names is {names!r:.60}; need a list")
                given = [(part, content.get(part)) for part in get_args(Part)]
                every = [
                    (part, item) for part, value in given for item in (value if isinstance(value, list) else [value])
                ]
                folders = [(part, "/".join(path_pieces(item))) for part, item in every if isinstance(item, str)]
                lists: dict[str, list[tuple[Part, str]]] = defaultdict(list)
                for part, name in folders:  # or a text file with the images of the part, a line each
                    if name.endswith(".txt") and (list_file := data_dir / name).is_file():
                        for line in input_files.read_text(list_file, MAX_LABEL_BYTES, "utf-8-sig").splitlines():
                            pieces = path_pieces(line.strip())
                            lists[pieces[-1] if pieces else ""].append((part, "/".join(pieces)))
                return YoloNames([as_name(name) for name in names], path.name, folders, lists)
    for folder in dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)]):
        for path in (folder / name for name in NAME_FILES if (folder / name).is_file()):
            with inside(path):
                lines = [line.strip() for line in input_files.read_text(path, 2**20, "utf-8-sig").splitlines()]
                return YoloNames([as_name(line) for line in lines if line], path.name)
    return YoloNames()


# Tables of run lengths, as of Kaggle: a row for each object, or for each class of an image, with the name of the image
# and "start length start length ...". An empty cell is an image without that object.

# in lower case, without separators → whether its runs go down the columns; in two competitions they do not
RUN_COLUMNS = {
    **dict.fromkeys(("encodedpixels", "rle", "rlemask", "maskrle", "encoding", "rleencoding", "encodedrle"), True),
    "annotation": False, "segmentation": False,
}  # fmt: skip
IMAGE_COLUMNS = ("imageid", "image", "imagename", "filename", "imagefile", "file", "img", "imgid", "id")
CLASS_COLUMNS = ("classid", "class", "classname", "categoryid", "category", "label", "defecttype")
JOINED_COLUMNS = frozenset(
    image + label for image in IMAGE_COLUMNS for label in CLASS_COLUMNS
)  # ImageId_ClassId: a.jpg_1
NO_RUNS = frozenset(["", "-1", "nan", "none", "null"])
ONE_CLASS = "object"


def read_header(path: Path) -> list[str]:
    """The names of the columns of a CSV file."""
    with io.TextIOWrapper(input_files.open_file(path), "utf-8-sig", errors="replace") as file:
        line = file.readline(2**14)
    return next(csv.reader([line], delimiter=_separator(line)), [])


def _separator(header: str) -> str:
    return max(",;\t", key=header.count)  # Excel writes semicolons where numbers have commas


def find_run_columns(header: Sequence[str]) -> dict[str, str] | None:
    """The columns for image, runs, label, joined (image and label), height and width of a CSV file, those that it has;
    None if it is not one of run lengths."""
    names = {re.sub(r"[\W_]", "", cell.lower()): cell for cell in header}
    roles = {"image": IMAGE_COLUMNS, "runs": RUN_COLUMNS, "label": CLASS_COLUMNS, "joined": JOINED_COLUMNS}
    if "height" in names and "width" in names:
        roles |= {"height": ("height",), "width": ("width",)}
    found = {role: names[name] for role, wanted in roles.items() for name in reversed([*wanted]) if name in names}
    return found if "runs" in found and ("image" in found or "joined" in found) else None


def parse_runs(path: Path, content: tuple[Mapping[str, str], str]) -> Parsed:
    """`content`: the columns, and the text of the file."""
    columns, text = content
    down_columns = RUN_COLUMNS[re.sub(r"[\W_]", "", columns["runs"].lower())]
    by_image: dict[str, list[Entry]] = defaultdict(list)
    sizes: dict[str, tuple[int, int]] = {}
    labels: set[str] = set()
    before = csv.field_size_limit(MAX_FILE_BYTES)
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text[: 2**14].splitlines()[0]))
        table = [(rows.line_num, cells) for cells in rows]  # with the line in which a row ends
    finally:
        csv.field_size_limit(before)
    places = {role: table[0][1].index(column) for role, column in columns.items()}
    for line, cells in ((end + 1, cells) for (end, _), (_, cells) in pairwise(table) if any(cells)):
        row = {role: "".join(cells[place : place + 1]).strip() for role, place in places.items()}
        name, label = row["joined"].rpartition("_")[::2] if "joined" in row else (row["image"], row.get("label", ""))
        if len(cells) <= max(places.values()) or len(name.splitlines()) != 1:
            raise ReadError(f"line {line} has too few cells, no name of an image, or a quote that is not closed")
        has_runs = row["runs"].lower() not in NO_RUNS
        with inside(f"line {line}"):
            if size := as_size(row.get("height") or None, row.get("width") or None):
                sizes[name] = size
            if ("joined" in row or "label" in row) and (label or has_runs):
                label = as_name(f"class {label}" if label.isdecimal() else label)
                labels.add(label)
        by_image[name] += [Entry(label or ONE_CLASS, f"line {line}", (row["runs"], down_columns))] if has_runs else []
    declared = sorted(
        labels, key=lambda name: [int(word) if word.isdecimal() else 0 for word in name.split()[-1:]] + [name]
    )
    return declared, [AnnotatedImage(name, entries, sizes.get(name)) for name, entries in by_image.items()], []


def runs_shape(content: tuple[str, bool], height: int, width: int) -> Shape:
    text, down_columns = content
    if len(text.split()) % 2 or not all(word.isdecimal() for word in text.split()):
        raise ReadError(f"run lengths {text!r:.60}; need pairs of start and length")
    numbers = [int(word) for word in text.split()]
    num_back = sum(
        start < before for before, start in pairwise(numbers[::2])
    )  # one for each further object, if they were joined
    if 4 * num_back > len(numbers[::2]) > 3 and sum(numbers) <= height * width:  # as of SIIM-ACR
        raise ReadError(
            f"run lengths {text!r:.60}, with starts counted from the run before; need them from the first pixel"
        )
    return raster.fill_runs(text, height, width, down_columns), ""


FORMATS = {
    "COCO": Format(parse_coco, coco_shape, False, "by category id", "the smaller object is on top"),
    "LabelMe": Format(parse_labelme, labelme_shape, True, "in alphabetical order", "the later shape is on top"),
    "YOLO": Format(parse_yolo, yolo_shape, True, "by number", "the smaller object is on top"),
    "run lengths": Format(parse_runs, runs_shape, False, "by number or name", "the later row is on top"),
}
