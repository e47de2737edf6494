"""Which files and folders of a dataset are searched: no hidden ones, and none that this program writes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.system.console import counted

CHECKPOINT_DIR_HOLDS = frozenset((".scan", ".converted"))  # one of them
RUN_FOLDER_HOLDS = frozenset(("config.yaml", "split.csv"))  # both
SHEETS = "check"  # in a checkpoint_dir, beside .scan


def walk(folder: Path, without: Collection[Path] = ()) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it, each with the names of its files, sorted; without hidden ones, those of this program and
    `without`."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if here != folder and _is_ours(folders, files):
            folders.clear()
            continue
        hides_sheets = _holds_sheets(here, folders)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not (hides_sheets and name == SHEETS) and here / name not in without
        )
        yield here, sorted(name for name in files if not name.startswith("."))


def list_files(folder: Path, without: Collection[Path] = ()) -> list[Path]:
    """The image files of a folder and its subfolders, sorted, without hidden files and without the files and folders `without`."""
    left_out = set(without)
    found = [
        path
        for here, names in walk(folder, left_out)
        for name in names
        if (path := here / name).suffix.lower() in IMAGE_EXTENSIONS and path not in left_out and _is_file_or_broken_link(path)
    ]
    return sorted(found)


def holds_images(folder: Path) -> bool:
    """Whether image files lie in the folder itself."""
    _, names = next(walk(folder), (folder, []))
    return any(Path(name).suffix.lower() in IMAGE_EXTENSIONS for name in names)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones and those that this program writes."""
    try:
        entries = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
    hides_sheets = _holds_sheets(folder, [path.name for path in entries])
    return [
        path
        for path in entries
        if not path.name.startswith(".") and not (hides_sheets and path.name == SHEETS) and not _is_ours(*_names_in(path))
    ]


def _is_ours(folders: Collection[str], files: Collection[str]) -> bool:
    """Whether a folder that holds these is a checkpoint_dir or a run's folder: their pictures are no data."""
    return not CHECKPOINT_DIR_HOLDS.isdisjoint(folders) or RUN_FOLDER_HOLDS.issubset(files)


def _holds_sheets(folder: Path, folders: Collection[str]) -> bool:
    """Whether `check` in this folder is ours: it is a checkpoint_dir, or holds runs beside it."""
    is_checkpoint_dir = not CHECKPOINT_DIR_HOLDS.isdisjoint(folders)
    return is_checkpoint_dir or (SHEETS in folders and any(_is_ours(*_names_in(folder / name)) for name in folders))


def _names_in(folder: Path) -> tuple[set[str], set[str]]:
    """Those of our own names that the folder holds, as folders and as files."""
    folders = {name for name in CHECKPOINT_DIR_HOLDS if (folder / name).is_dir()}
    return folders, {name for name in RUN_FOLDER_HOLDS if (folder / name).is_file()}


def resolved(path: Path) -> Path:
    """As Path.resolve, which raises for links that lead in a circle, and for a NUL in the name."""
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def _is_file_or_broken_link(path: Path) -> bool:
    """Broken links count as files, so that they are reported as missing."""
    return path.is_file() or (path.is_symlink() and not path.exists())


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
