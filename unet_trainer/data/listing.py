"""What lies in the folders of a dataset. Each folder is read once, and no file is opened; hidden files, and what this
program writes (runs, a checkpoint_dir), are left out."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unet_trainer.data.names import folder_meaning
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, VOLUME_EXTENSIONS
from unet_trainer.system.console import counted

CHECKPOINT_DIR_HOLDS = (".scan", ".converted", ".given", ".shards")  # one of them
RUN_FOLDER_HOLDS = ("config.yaml", "split.csv")  # both
PICTURES = ("check", "mlruns")  # folders of pictures in a checkpoint_dir, beside the above or runs

ENDINGS = tuple(IMAGE_EXTENSIONS)

Follows = Callable[[Path], bool]  # whether a link to a folder is


class Entries(NamedTuple):
    """The names in a folder, sorted: folders, each with whether it is a link, and files that are not hidden."""

    folders: dict[str, bool]
    files: list[str]


class Listing:
    """The folders that were listed: each is read once, when it is first asked for. One that cannot be read is empty."""

    def __init__(self) -> None:
        self._entries: dict[Path, Entries] = {}

    def entries(self, folder: Path) -> Entries:
        if folder not in self._entries:
            found: list[os.DirEntry[str]] = []
            with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            # A link is asked as a Path: it may lead in a circle.
            inner = [each for each in found if (Path(each) if each.is_symlink() else each).is_dir()]
            folders = {entry.name: entry.is_symlink() for entry in inner}
            files = [entry.name for entry in found if entry.name not in folders and not entry.name.startswith(".")]
            self._entries[folder] = Entries(folders, files)
        return self._entries[folder]

    def subfolders(self, folder: Path) -> list[Path]:
        """The folders in a folder that may hold data."""
        names = [name for name in self.entries(folder).folders if not name.startswith(".")]
        ours = {name for name in names if self._is_ours(folder / name)}
        if ours or not self.entries(folder).folders.keys().isdisjoint(CHECKPOINT_DIR_HOLDS):
            ours |= {*PICTURES}
        return [folder / name for name in names if name not in ours]

    def _is_ours(self, folder: Path) -> bool:
        """Whether it is a run's folder, or a checkpoint_dir and not the folder of the data too."""
        entries = self.entries(folder)
        if all(name in entries.files for name in RUN_FOLDER_HOLDS):
            return True
        if entries.folders.keys().isdisjoint(CHECKPOINT_DIR_HOLDS) or any(folder_meaning(folder.name)):
            return False
        return not any(folder_meaning(inner.name)[1] for inner in self.subfolders(folder))

    def walk_folders(self, folder: Path, follows: Follows | None = None) -> Iterator[Path]:
        """A folder and those below it, without links to folders unless `follows` says so: they may lead in a circle."""
        waiting = [folder]
        while waiting:
            yield (here := waiting.pop())
            are_links = self.entries(here).folders
            inner = [each for each in self.subfolders(here) if not are_links[each.name] or (follows and follows(each))]
            waiting += reversed(inner)

    def images(self, folder: Path, follows: Follows | None = None) -> Iterator[tuple[Path, list[str]]]:
        """Each folder with the names of its image files, or of its volumes if it has none."""
        for place in self.walk_folders(folder, follows):
            names = self.entries(place).files
            images = [name for name in names if name.lower().endswith(ENDINGS)]
            if found := images or [name for name in names if name.lower().endswith(VOLUME_EXTENSIONS)]:
                yield place, found


def walk(
    folder: Path, follows: Follows | None = None, listing: Listing | None = None, endings: tuple[str, ...] = ("",)
) -> Iterator[Path]:
    """The files with these endings (in lower case) in a folder and those below it, sorted in each."""
    listing = listing or Listing()
    for place in listing.walk_folders(folder, follows):
        yield from (place / name for name in listing.entries(place).files if name.lower().endswith(endings))


def list_files(folder: Path, follows: Follows | None = None, listing: Listing | None = None) -> list[Path]:
    """The image files of a folder and its subfolders, sorted in each."""
    return [*walk(folder, follows, listing, ENDINGS)]


def refuse_missing(data_dir: Path, others: Sequence[str | None], listing: Listing) -> None:
    """Raises DataError where data_dir is no folder, and for the first folder that this user may not list or search: it
    would look empty. That is data_dir, one above it, one below it, or one of `others`, relative to it."""
    named = [data_dir, *(data_dir / other for other in others if other is not None)]
    below = [inner for folder in listing.walk_folders(data_dir) for inner in listing.subfolders(folder)]  # links too
    modes = dict.fromkeys((above for folder in named for above in folder.absolute().parents), os.X_OK)
    for folder, mode in sorted((modes | dict.fromkeys([*named, *below], os.R_OK | os.X_OK)).items()):
        if folder.is_dir() and not os.access(folder, mode):
            fix = "need the permissions r and x on it (chmod u+rx), or another user"
            raise DataError(f"data_dir: {folder} cannot be read (Permission denied); {fix}")
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")


def is_run_folder(folder: Path) -> bool:
    return all((folder / inner).is_file() for inner in RUN_FOLDER_HOLDS)


def resolved(path: Path) -> Path:
    """As Path.resolve, which raises for links that lead in a circle, and for a NUL in the name."""
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def describe_results(results: Sequence[Path]) -> str:
    return f"{counted(len(results), 'result')} of predict left out, such as {results[0]}"
