"""Which files and folders of a dataset are searched: no hidden ones, and none that this program writes. Opens no file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from unet_trainer.images.image_files import IMAGE_EXTENSIONS

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
    """The image files of a folder and its subfolders, sorted, without hidden files and without the folders `without`."""
    found = [
        path
        for here, names in walk(folder, without)
        for name in names
        if (path := here / name).suffix.lower() in IMAGE_EXTENSIONS and _is_file_or_broken_link(path)
    ]
    return sorted(found)


def holds_images(folder: Path) -> bool:
    """Whether image files lie in the folder itself."""
    try:
        files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    except OSError:
        return False
    return any(path.suffix.lower() in IMAGE_EXTENSIONS for path in files)


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


def _is_file_or_broken_link(path: Path) -> bool:
    """Broken links count as files, so that they are reported as missing."""
    return path.is_file() or (path.is_symlink() and not path.exists())
