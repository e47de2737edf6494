"""What IMAGE, FOLDER, GLOB and CSV of predict mean: the files, and the name of each result. Imports no torch."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.data.annotations import describe_other_files
from unet_trainer.data.formats.layouts import images_of_dataset
from unet_trainer.data.formats.table import read_table
from unet_trainer.data.listing import list_files, resolved
from unet_trainer.data.pairs import first_few
from unet_trainer.data.shards import open_shards
from unet_trainer.images.file_bytes import is_file
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS
from unet_trainer.images.row_writers import is_result
from unet_trainer.runs.folder import CONFIG_YAML, SPLIT_CSV
from unet_trainer.system.console import counted

CSV_SUFFIX = ".csv"
Note = Callable[[str], object]


class Input(NamedTuple):
    path: Path
    name: str  # of the result, with its folders, without extension: a/b for a/b.jpg


def find_inputs(words: Sequence[str], out: Path, note: Note = lambda text: None) -> list[Input]:
    """The files in the order of the words, each once. Of a folder or pattern, results of predict are left out; `note`
    reports those that do not lie in `out`. Raises UserError."""
    paths = [Path(word) for word in words]
    alone = [path for path in paths if path.exists() and not path.is_dir() and path.suffix.lower() != CSV_SUFFIX]
    base = _common_folder(alone)
    inputs: list[Input] = []
    for word, path in zip(words, paths, strict=True):
        if not word.strip():  # Path("") would be the current folder
            raise UserError("got an empty name; need images, folders, patterns or CSV files (is a variable not set?)")
        if path.is_dir():
            for unread in describe_other_files(path):
                note(f"left out of {word}: {unread}")
            files = list_files(path, follows=_leads_elsewhere(path))
            files = _without_results(files, out, f"{word} holds no image", note)
            images = images_of_dataset(path, files)
            if others := sorted(set(files) - set(images)):
                is_dataset = f"{path} is a dataset: {counted(len(images), 'image')} in it"
                note(f"{is_dataset}; {counted(len(others), 'other file')} left out, such as {others[0]}")
            inputs += _named(images, path)
        elif path.suffix.lower() == CSV_SUFFIX and path.exists():
            inputs += _from_csv(path)
        elif path.exists():
            inputs.append(Input(path, _absolute(path).relative_to(base).with_suffix("").as_posix()))
        elif glob.has_magic(word):
            matches = map(Path, sorted(glob.glob(word, recursive=True)))  # noqa: PTH207 # Path.glob takes no absolute one
            files = [match for match in matches if match.suffix.lower() in IMAGE_EXTENSIONS and match.is_file()]
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            inputs += _named(_without_results(files, out, f"{word} matches no image", note), fixed)
        else:
            raise UserError(f"{word}: no such file or folder")
    return list(dict.fromkeys(inputs))


def refuse_among_images(inputs: Sequence[Input], out: Path) -> None:
    """Raises UserError if a result would lie beside an image: what reads that folder next would take it for one."""
    folders = {folder.resolve() for folder in {path.parent for path, _ in inputs}}
    results = {(out / name).parent: out / f"{name}.png" for _, name in reversed(inputs)}  # the first of each folder
    beside = next((result for folder, result in results.items() if folder.resolve() in folders), None)
    if beside is not None:
        where = f"{beside} would lie among the images, and may be taken for one when they are read again"
        fix = f"Choose another folder, e.g. --out {out.parent / 'predictions'}, or add --among-images"
        raise UserError(f"--out: got {out}; {where}. {fix}")


def _named(files: Iterable[Path], folder: Path) -> list[Input]:
    return [Input(path, path.relative_to(folder).with_suffix("").as_posix()) for path in files]


def _leads_elsewhere(folder: Path) -> Callable[[Path], bool]:
    """Links to folders beside this one, each folder once: links may lead in a circle."""
    seen = {resolved(folder)}

    def follows(link: Path) -> bool:
        target = resolved(link)
        if any(target.is_relative_to(other) or other.is_relative_to(target) for other in seen):
            return False
        seen.add(target)
        return True

    return follows


def _common_folder(files: Sequence[Path]) -> Path:
    """The lowest one that holds them all."""
    return Path(os.path.commonpath([_absolute(path).parent for path in files])) if files else Path()


def _absolute(path: Path) -> Path:
    """Without resolving links: a result is named as the user named the image."""
    return Path(os.path.abspath(path))  # noqa: PTH100 # Path.absolute() keeps ..


def _without_results(files: Sequence[Path], out: Path, complaint: str, note: Note) -> list[Path]:
    """The files that predict did not write."""
    results = set(filter(is_result, files))
    others = [path for path in files if path in results and not _absolute(path).is_relative_to(_absolute(out))]
    if len(results) == len(files):
        but = f" but {counted(len(others), 'result')} of predict" if others else ""
        raise UserError(f"{complaint}{but}; known are {', '.join(sorted(IMAGE_EXTENSIONS))}")
    if others:
        note(f"{counted(len(others), 'result')} of an earlier predict left out, such as {others[0]}")
    return [path for path in files if path not in results]


def _from_csv(path: Path) -> list[Input]:
    """Of the column `image`; a path is relative to the folder of the CSV file, to the data of the run whose split.csv
    it is, or to the current folder."""
    header, rows = read_table(path, str(path))
    listed = [Path(cell) for _, row in rows if (cell := row.get("image", "").strip(" \t"))]
    if not listed:
        raise UserError(f"{path} names no image; need a column image with a path in each row, has {', '.join(header)}")
    bases, shards = [path.parent, Path()], None
    if path.name == SPLIT_CSV:
        with contextlib.suppress(UserError):  # also where there is no config
            config = load_config(path.parent / CONFIG_YAML)
            bases, shards = [Path(config.data_dir), *bases], open_shards(config)

    def locate(base: Path, image: Path) -> Path:
        file = shards.find((base / image).as_posix()) if shards is not None else None
        return file or base / image

    base = next((base for base in bases if is_file(locate(base, listed[0]))), path.parent)
    outside = {image for image in listed if image.is_absolute() or ".." in image.parts}
    above = _common_folder([base / image for image in outside])
    inputs = []
    for image in listed:
        name = _absolute(base / image).relative_to(above) if image in outside else image
        inputs.append(Input(locate(base, image), name.with_suffix("").as_posix()))
    if missing := [str(image) for image, _ in inputs if not is_file(image)]:
        raise UserError(f"{path}: {len(missing)} of its {len(inputs)} images are not there: {first_few(missing)}")
    return inputs
