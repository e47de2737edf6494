"""Tables of run lengths, as of Kaggle: a row for each object, or for each class of an image, with the name of the image
and "start length start length ...", counted from 1. An empty cell is an image without that object."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from unet_trainer.datasets.formats.objects import AnnotatedImage, Annotations, Entry, Place, Shape
from unet_trainer.datasets.formats.shapes import fill_runs
from unet_trainer.datasets.formats.values import MAX_FILE_BYTES, as_name, as_size, inside
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.system import input_files

# Names of columns, in lower case without separators. Runs go down the columns, but for two competitions.
ALONG_ROWS = ("annotation", "segmentation")
RUNS = ("encodedpixels", "rle", "rlemask", "maskrle", "encoding", "rleencoding", "encodedrle", *ALONG_ROWS)
IMAGE = ("imageid", "image", "imagename", "filename", "imagefile", "file", "img", "imgid", "id")
LABEL = ("classid", "class", "classname", "categoryid", "category", "label", "defecttype")
ROLES: Mapping[str, Sequence[str]] = {
    "image": IMAGE,
    "runs": RUNS,
    "label": LABEL,
    "joined": [image + label for image in IMAGE for label in LABEL],  # ImageId_ClassId: a.jpg_1
    "height": ["height"],
    "width": ["width"],
}
NO_RUNS = ("", "-1", "nan", "none", "null")
ONE_CLASS = "object"


def find(place: Place) -> Annotations | None:
    annotations = Annotations("run lengths", "by number or name", "the later row is on top")
    headers = [(path, _find_columns(header)) for path, header in place.contents if path.suffix.lower() == ".csv"]
    files = [(path, columns) for path, columns in headers if "runs" in columns and {"image", "joined"} & {*columns}]
    if not annotations.collect(place, files, _parse):
        return None
    if not annotations.declared:
        annotations.class_order = "in alphabetical order"
    if any(columns["runs"][1] for _, columns in files):
        what = f"the run lengths of {annotations.files}"
        annotations.notices.append(f"{what} are read along the rows, not down the columns")
    return annotations


def read_header(path: Path) -> list[str]:
    """The names of the columns of a CSV file."""
    with io.TextIOWrapper(input_files.open_file(path), "utf-8-sig", errors="replace") as file:
        line = file.readline(2**14)
    return next(csv.reader([line], delimiter=_separator(line)), [])


def _separator(header: str) -> str:
    return max(",;\t", key=header.count)  # Excel writes semicolons where numbers have commas


def _find_columns(header: Sequence[str]) -> dict[str, tuple[int, bool]]:
    """Role → number of the column, and whether its name is that of runs along the rows."""
    names = [re.sub(r"[\W_]", "", cell.lower()) for cell in header]
    names_of = {role: next((name for name in wanted if name in names), "") for role, wanted in ROLES.items()}
    return {role: (names.index(name), name in ALONG_ROWS) for role, name in names_of.items() if name}


def _parse(annotations: Annotations, path: Path, columns: Mapping[str, tuple[int, bool]]) -> Sequence[AnnotatedImage]:
    text = input_files.read_text(path, MAX_FILE_BYTES, "utf-8-sig")
    before = csv.field_size_limit(MAX_FILE_BYTES)
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text[: 2**14].splitlines()[0]))
        table = [(rows.line_num, cells) for cells in rows]  # with the line in which a row ends
    finally:
        csv.field_size_limit(before)
    by_image: dict[str, list[Entry]] = defaultdict(list)
    sizes: dict[str, tuple[int, int] | None] = defaultdict(lambda: None)
    labels: set[str] = set()
    for line, cells in ((end + 1, cells) for (end, _), (_, cells) in pairwise(table) if any(cells)):
        row = {role: "".join(cells[number : number + 1]).strip() for role, (number, _) in columns.items()}
        name, label = row["joined"].rpartition("_")[::2] if "joined" in row else (row["image"], row.get("label", ""))
        if len(cells) <= max(columns.values())[0] or len(name.splitlines()) != 1:
            raise ReadError(f"line {line} has too few cells, no name of an image, or a quote that is not closed")
        has_runs = row["runs"].lower() not in NO_RUNS
        with inside(f"line {line}"):
            if "height" in row and "width" in row:
                sizes[name] = as_size(row["height"] or None, row["width"] or None) or sizes[name]
            if ("joined" in row or "label" in row) and (label or has_runs):
                label = as_name(f"class {label}" if label.isdecimal() else label)
                labels.add(label)
        draw = partial(_draw, row["runs"], not columns["runs"][1])
        by_image[name] += [Entry(label or ONE_CLASS, f"line {line}", draw)] if has_runs else []
    annotations.declared += sorted(labels, key=lambda name: (max(0, _number(name.split()[-1])), name))
    return [AnnotatedImage(name, entries, sizes[name]) for name, entries in by_image.items()]


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else -1


def _draw(text: str, down_columns: bool, height: int, width: int) -> Shape:
    numbers, area = [_number(word) for word in text.split()], height * width
    if len(numbers) % 2 or -1 in numbers:
        raise ReadError(f"run lengths {text!r:.60}; need pairs of start and length")
    starts, lengths = numbers[::2], numbers[1::2]
    num_back = sum(start < before for before, start in pairwise(starts))  # one for each further object, if joined
    if 4 * num_back > len(starts) > 3 and sum(numbers) <= area:  # as of SIIM-ACR
        need = "with starts counted from the run before; need them from the first pixel"
        raise ReadError(f"run lengths {text!r:.60}, {need}")
    if min(starts) < 1 or max(map(sum, zip(starts, lengths, strict=True))) > area + 1 or sum(lengths) > area:
        raise ReadError(f"run lengths beyond the {area} pixels of the image, {width}×{height}")
    return fill_runs([start - 1 for start in starts], lengths, height, width, down_columns), ""
