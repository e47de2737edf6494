"""What IMAGE, FOLDER, GLOB and CSV on the command line mean: the files to predict, and the name of each result."""

from __future__ import annotations

import csv
import glob
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.datasets.layouts import list_files
from unet_trainer.datasets.pairs import first_few
from unet_trainer.datasets.shards import open_shards
from unet_trainer.images.file_bytes import is_file
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import counted
from unet_trainer.system.input_files import read_text
from unet_trainer.training.run_folder import SPLIT_CSV

CSV_SUFFIX = ".csv"
MAX_CSV_BYTES = 256 * 2**20
NUM_NAMED = 5


class Input(NamedTuple):
    path: Path
    name: str  # of the result, with its folders, without extension: a/b for a/b.jpg


def find_inputs(words: Sequence[str], out: Path, note: Callable[[str], object] = lambda text: None) -> list[Input]:
    """The files in the order of the words, each once. Of a folder or pattern, files in `out` inside of it are left out, and results
    of other predictions too, which is told by `note`. Raises UserError.
    """
    alone = [Path(word) for word in words if _is_single(word)]
    base = Path(os.path.commonpath([_absolute(path).parent for path in alone])) if alone else Path()
    found: list[Input] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            found += _from_folder(path, list_files(path), out, f"{word} holds no image", note)
        elif path.suffix.lower() == CSV_SUFFIX and path.exists():
            found += _from_csv(path)
        elif path.exists():
            found.append(Input(path, _name(_absolute(path).relative_to(base))))
        elif glob.has_magic(word):
            found += _from_folder(_fixed_part(word), _matches(word), out, f"{word} matches no image", note)
        else:
            raise UserError(f"{word}: no such file or folder")
    return list(dict.fromkeys(found))


def refuse_same_names(inputs: Sequence[Input]) -> None:
    """Raises UserError if two inputs would write the same file, also where a file system ignores case."""
    first: dict[str, Path] = {}
    clashes = [(other, path, name) for path, name in inputs if (other := first.setdefault(name.casefold(), path)) != path]
    if clashes:
        other, path, _ = clashes[0]
        fix = "Name the folder above them, or predict them in two commands with different --out"
        if other.parent == path.parent:
            pattern = path.parent / f"*{path.suffix}"
            fix = f"Predict them in two commands with different --out; a pattern takes some of them: '{pattern}'"
        lines = [f"{other} and {path}: both would be {name}.png" for other, path, name in clashes[:NUM_NAMED]]
        more = [f"… and {len(clashes) - NUM_NAMED} more"] if len(clashes) > NUM_NAMED else []
        raise UserError("\n  ".join(["images whose results would have the same name:", *lines, *more, fix]))


def refuse_among_images(inputs: Sequence[Input], out: Path) -> None:
    """Raises UserError if a result would lie beside an image: what reads that folder next would take it for one."""
    folders = {folder.resolve() for folder in {path.parent for path, _ in inputs}}
    results = {(out / name).parent: out / f"{name}.png" for _, name in reversed(inputs)}  # the first of each folder
    beside = next((result for folder, result in results.items() if folder.resolve() in folders), None)
    if beside is not None:
        raise UserError(
            f"--out: got {out}; {beside} would lie among the images, and may be taken for one when they are read again. Choose "
            f"another folder, e.g. --out {out.parent / 'predictions'}, or add --among-images"
        )


def _is_single(word: str) -> bool:
    path = Path(word)
    return path.exists() and not path.is_dir() and path.suffix.lower() != CSV_SUFFIX


def _absolute(path: Path) -> Path:
    """Without resolving links: a result is named as the user named the image."""
    return Path(os.path.abspath(path))  # noqa: PTH100 # Path.absolute() keeps ..


def _name(relative: Path | PurePosixPath) -> str:
    return PurePosixPath(*relative.parts).with_suffix("").as_posix()


def _from_folder(folder: Path, files: Iterable[Path], out: Path, complaint: str, note: Callable[[str], object]) -> list[Input]:
    inside, parent = _absolute(out), _absolute(folder)
    may_hold_results = inside != parent and inside.is_relative_to(parent)
    images = [path for path in files if not (may_hold_results and _absolute(path).is_relative_to(inside))]
    results = [path for path in images if is_result(path)]
    left_out = set(results)
    found = [Input(path, _name(path.relative_to(folder))) for path in images if path not in left_out]
    if not found:
        but = f" but {counted(len(results), 'result')} of predict" if results else ""
        raise UserError(f"{complaint}{but}; known are {', '.join(sorted(IMAGE_EXTENSIONS))}")
    if results:
        note(f"{counted(len(results), 'result')} of an earlier predict in {folder} left out, such as {results[0]}")
    return found


def _matches(pattern: str) -> list[Path]:
    paths = [Path(found) for found in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 # Path.glob takes no absolute one
    return [path for path in paths if path.suffix.lower() in IMAGE_EXTENSIONS and path.is_file()]


def _fixed_part(pattern: str) -> Path:
    """The folder before the first part with a wildcard."""
    parts = Path(pattern).parts
    return Path(*parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])


def _from_csv(path: Path) -> list[Input]:
    """Of the column `image`; a path is relative to the folder of the CSV file, to that of its data in the split.csv of a run, or to
    where the command is given."""
    written = _image_column(path)
    bases = [*([_data_dir(path)] if path.name == SPLIT_CSV else []), path.parent, Path()]
    base = next((base for base in bases if base is not None and is_file(base / written[0])), path.parent)
    found = []
    for line in written:
        inside = PurePosixPath(Path(line).as_posix())
        is_inside = not Path(line).is_absolute() and ".." not in inside.parts
        found.append(Input(base / line, _name(inside if is_inside else PurePosixPath(inside.name))))
    missing = [str(image) for image, _ in found if not is_file(image)]
    if missing:
        raise UserError(f"{path}: {len(missing)} of its {len(found)} images are not there: {first_few(missing, NUM_NAMED)}")
    return found


def _image_column(path: Path) -> list[str]:
    try:
        text = read_text(path, MAX_CSV_BYTES, "utf-8-sig", "surrogateescape")
        separator = max(",;\t", key=text.split("\n", 1)[0].count)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)  # a name may hold a \r
        header = {name.strip().lower(): name for name in reader.fieldnames or () if name}
        found = [cell.strip(" \t") for row in reader if (cell := row.get(header.get("image", "")) or "").strip()]
    except (OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if "image" not in header:
        raise UserError(f"{path} has the columns {first_few(header, 10) or 'none'}; need one named image, with a path in each row")
    if not found:
        raise UserError(f"{path} names no image")
    return found


def _data_dir(split_csv: Path) -> Path | None:
    """That of the run whose split.csv it is; shards are open from then on."""
    file = split_csv.parent / "config.yaml"
    if not file.is_file():
        return None
    try:
        config = load_config(file)
        open_shards(config)
        return Path(config.data_dir)
    except UserError:
        return None
