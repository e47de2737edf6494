"""Tables of run lengths, as of Kaggle: a row for each object, or for each class of an image, with the name of the image
and "start length start length ...", counted from 1, down the columns. An empty cell is an image without that object."""

from collections import defaultdict
from functools import partial
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import find_columns, inside
from unet_trainer.data.csv_tables import read_table
from unet_trainer.data.formats.objects import Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import fill_runs
from unet_trainer.data.pairs import Pair
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import Pixels

NO_RUNS = ("", "-1", "nan", "none", "null")
ONE_CLASS = "object"


def find(place: Place, config: Config) -> list[Pair] | None:
    annotations = Annotations(place, config, "run lengths", "by number or name", "the later row is on top")
    return annotations.draw() if annotations.read(_parse) else None


def _parse(annotations: Annotations, path: Path, _: None) -> None:
    header, rows = read_table(path, "it", "strict")
    columns, labels = find_columns(header), set[str]()
    by_image: dict[str, list[Shape]] = defaultdict(list)
    for line, cells in rows:
        row = {role: cells.get(column, "").strip() for role, column in columns.items()}
        name, label = row["joined"].rpartition("_")[::2] if "joined" in row else (row["image"], row.get("label", ""))
        if not cells.keys() >= {*columns.values()} or len(name.splitlines()) != 1:
            raise ReadError(f"line {line} has too few cells, no name of an image, or a quote that is not closed")
        shapes, has_runs = by_image[name], row["runs"].lower() not in NO_RUNS
        with inside(f"line {line}"):
            if not {"joined", "label"}.isdisjoint(row) and (label or has_runs):
                labels.add(label := as_name(f"class {label}" if label.isdecimal() else label))
            if has_runs:
                shapes.append(Shape(label or ONE_CLASS, f"line {line}", partial(_draw, row["runs"])))
    annotations.classes += sorted(labels, key=lambda name: (max(0, _number(name.split()[-1])), name))
    for name, shapes in by_image.items():
        annotations.add(path, name, shapes)


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else -1


def _draw(text: str, canvas: Pixels) -> None:
    numbers = [_number(word) for word in text.split()]
    starts, lengths = numbers[::2], numbers[1::2]
    if len(starts) != len(lengths) or min(numbers) < 0:
        raise ReadError(f"run lengths {text!r:.60}; need pairs of start and length")
    ends = [0, *map(sum, zip(starts, lengths, strict=True))]  # with the first pixel behind each run
    if ends[-1] > canvas.size + 1 or any(start < max(1, end) for start, end in zip(starts, ends, strict=False)):
        need = f"need runs that follow each other, counted from the first of {canvas.size} pixels"
        raise ReadError(f"run lengths {text!r:.60}; {need}; objects that overlap need a row each")
    fill_runs(canvas, [start - 1 for start in starts], lengths)
