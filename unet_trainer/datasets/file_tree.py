"""Which files and folders of a dataset are searched: no hidden ones, and none that this program writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.system.console import counted

CHECKPOINT_DIR_HOLDS = (".scan", ".converted")  # one of them
RUN_FOLDER_HOLDS = ("config.yaml", "split.csv")  # both
SHEETS = "check"  # in a checkpoint_dir, beside .scan or runs

Follows = Callable[[Path], bool]  # of a link to a folder


def walk(folder: Path, without: Collection[Path] = (), follows: Follows | None = None) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it, each with the names of its files, sorted; without hidden ones, those of this program and
    `without`, and links to folders unless `follows` says so: they may lead in a circle."""
    for place, folders, files in os.walk(folder, followlinks=follows is not None):
        here = Path(place)
        inner = [here / name for name in _searched(here, folders)]
        folders[:] = [
            path.name
            for path in inner
            if path not in without and not (path.is_symlink() and (follows is None or not follows(path)))
        ]
        yield here, sorted(name for name in files if not name.startswith("."))


def list_files(folder: Path, without: Collection[Path] = (), follows: Follows | None = None) -> list[Path]:
    """The image files of a folder and its subfolders, sorted, without hidden files and without the files and folders `without`.

    Broken links count as files, so that they are reported as missing."""
    left_out = set(without)
    paths = [here / name for here, names in walk(folder, left_out, follows) for name in names]
    images = [path for path in paths if path.suffix.lower() in IMAGE_EXTENSIONS and path not in left_out]
    return sorted(path for path in images if path.is_file() or (path.is_symlink() and not path.exists()))


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones and those that this program writes."""
    _, folders, _ = next(os.walk(folder), (folder, [], []))
    return [folder / name for name in _searched(folder, folders)]


def _searched(folder: Path, names: Sequence[str]) -> list[str]:
    """The folders in a folder that may hold data. A checkpoint_dir and a run's folder do not: their pictures are no data."""
    ours = {
        name
        for name in names
        if any((folder / name / inner).is_dir() for inner in CHECKPOINT_DIR_HOLDS)
        or all((folder / name / inner).is_file() for inner in RUN_FOLDER_HOLDS)
    }
    if ours or not set(names).isdisjoint(CHECKPOINT_DIR_HOLDS):
        ours.add(SHEETS)
    return sorted(name for name in names if not name.startswith(".") and name not in ours)


def resolved(path: Path) -> Path:
    """As Path.resolve, which raises for links that lead in a circle, and for a NUL in the name."""
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def describe_results(results: Sequence[Path]) -> str:
    return f"{counted(len(results), 'result')} of predict left out, such as {results[0]}"


def refuse_unreadable(data_dir: Path, others: Sequence[str | None] = ()) -> None:
    """Raises DataError for the first folder that this user may not list or search: it would look empty, and its images be missed.

    That is data_dir, one above it, one below it, or one of `others`, relative to it. Hidden folders are not searched.
    """
    fix = "need the permissions r and x on it (chmod u+rx), or another user"
    for folder in (data_dir, *(data_dir / other for other in others if other is not None)):
        above = [place for place in reversed(folder.absolute().parents) if place.is_dir()]
        closed = [place for place in above if not os.access(place, os.X_OK)]
        closed += [folder] if not closed and folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK) else []
        if closed:
            raise DataError(f"data_dir: {folder} cannot be read (Permission denied on {closed[0]}); {fix}")
    for place, folders, _ in os.walk(data_dir):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        closed = [Path(place, name) for name in folders if not os.access(Path(place, name), os.R_OK | os.X_OK)]
        if closed:
            raise DataError(f"data_dir: {closed[0]} cannot be read (Permission denied); {fix}")
