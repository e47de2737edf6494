"""Tables of run lengths, as of Kaggle: a row for each object, or for each class of an image, with the name of the image
and "start length start length ...", counted from 1, down the columns. An empty cell is an image without that object."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from unet_trainer.data.csv_tables import read_table
from unet_trainer.data.formats.objects import AnnotatedFolder, AnnotatedImage, Annotations, Entry
from unet_trainer.data.formats.shapes import Patch, fill_runs
from unet_trainer.data.formats.values import as_name, inside
from unet_trainer.data.pairs import path_in
from unet_trainer.images.file_bytes import DataError, ReadError

# Names of columns, in lower case without separators.
IMAGE = ("imageid", "image", "imagename", "filename", "imagefile", "file", "img", "imgid", "id")
LABEL = ("classid", "class", "classname", "categoryid", "category", "label", "defecttype")
ROLES: Mapping[str, Sequence[str]] = {
    "image": IMAGE,
    "runs": ("encodedpixels", "rle", "rlemask", "maskrle", "encoding", "rleencoding", "encodedrle"),
    "label": LABEL,
    "joined": [image + label for image in IMAGE for label in LABEL],  # ImageId_ClassId: a.jpg_1
    "other runs": ["annotation", "segmentation"],  # of competitions whose runs go along the rows
}
NO_RUNS = ("", "-1", "nan", "none", "null")
ONE_CLASS = "object"


def find(place: AnnotatedFolder) -> Annotations | None:
    annotations = Annotations("run lengths", "by number or name", "the later row is on top")
    tables = [(path, find_columns(header)) for path, header in place.contents if path.suffix.lower() == ".csv"]
    tables = [(path, columns) for path, columns in tables if {"image", "joined"} & columns.keys()]
    files = [(path, columns) for path, columns in tables if "runs" in columns]
    for path, columns in tables if not files else ():
        column = columns.get("other runs", "")
        if any(re.fullmatch("[0-9 ]+", row.get(column, "")) for _, row in read_table(path, "it")[1]):
            what = f"{path_in(place.data_dir, path)}: the run lengths of a column {column!r} may go along the rows"
            raise DataError(f"{what}; need them down the columns, in a column EncodedPixels, or PNG masks")
    return annotations if annotations.collect(place, files, _parse) else None


def find_columns(header: Sequence[str]) -> dict[str, str]:
    """Role → name of the column."""
    columns = {re.sub(r"[\W_]", "", cell): cell for cell in reversed(header)}
    names = {role: next((name for name in wanted if name in columns), None) for role, wanted in ROLES.items()}
    return {role: columns[name] for role, name in names.items() if name is not None}


def _parse(annotations: Annotations, path: Path, columns: Mapping[str, str]) -> Sequence[AnnotatedImage]:
    by_image: dict[str, list[Entry]] = defaultdict(list)
    labels: set[str] = set()
    for line, cells in read_table(path, "it", "strict")[1]:
        row = {role: cells.get(column, "").strip() for role, column in columns.items()}
        name, label = row["joined"].rpartition("_")[::2] if "joined" in row else (row["image"], row.get("label", ""))
        if not cells.keys() >= {*columns.values()} or len(name.splitlines()) != 1:
            raise ReadError(f"line {line} has too few cells, no name of an image, or a quote that is not closed")
        has_runs = row["runs"].lower() not in NO_RUNS
        with inside(f"line {line}"):
            if ("joined" in row or "label" in row) and (label or has_runs):
                label = as_name(f"class {label}" if label.isdecimal() else label)
                labels.add(label)
        by_image[name] += [Entry(label or ONE_CLASS, f"line {line}", partial(_draw, row["runs"]))] if has_runs else []
    annotations.declared += sorted(labels, key=lambda name: (max(0, _number(name.split()[-1])), name))
    return [AnnotatedImage(name, entries) for name, entries in by_image.items()]


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else -1


def _draw(text: str, height: int, width: int) -> Patch:
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
    return fill_runs([start - 1 for start in starts], lengths, height, width)
