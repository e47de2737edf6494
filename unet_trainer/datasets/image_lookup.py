"""Which image file an annotation means. Only files that are in the folder can be the answer, whatever path the annotation names."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.file_bytes import DataError

WORD = re.compile(r"[a-z]+")
PART_WORDS = {word: part for word, part in PARTS.items() if len(word) > 2}  # "tr" and "ts" mean little in a file's name


def part_in(names: Iterable[str]) -> str:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg; else ""."""
    found = {PART_WORDS[word] for name in names for word in WORD.findall(name.lower()) if word in PART_WORDS}
    return found.pop() if len(found) == 1 else ""


def part_of_file(path: Path, data_dir: Path, by_name: bool) -> str:
    """The part of an annotation file: by its own name if that is asked for and tells, else by the folders above it."""
    folders = path.relative_to(data_dir).parts[:-1] if path.is_relative_to(data_dir) else ()
    return (part_in([path.stem]) if by_name else "") or part_in(folders)


class ImageIndex:
    """The image files of a folder, found by the names that annotations give them."""

    def __init__(self, root: Path, files: Iterable[Path]) -> None:
        self.root = root
        self.files = list(files)
        self._parts = {path: path.relative_to(root).parts if path.is_relative_to(root) else path.parts for path in self.files}
        self._by_name: dict[str, list[Path]] = defaultdict(list)
        self._by_stem: dict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            self._by_name[_plain(path.name)].append(path)
            self._by_stem[_plain(path.stem)].append(path)

    def part_of(self, path: Path) -> str:
        """train, val or test by the folders above an image."""
        return part_in(self._parts[path][:-1])

    def knows_folders(self, names: Iterable[str]) -> bool:
        """Whether one of the names with folders is here with all of them. Then p2/1.png is not p1/1.png, if p2 is missing."""
        for name in names:
            *folders, last = [_plain(piece) for piece in _pieces(name)] or [""]
            if folders and any(self._agreement(folders, path) == len(folders) for path in self._by_name.get(last, [])):
                return True
        return False

    def find(self, name: str, near: Path, part: str = "", by_stem: bool = False, with_folders: bool = False) -> Path | None:
        """The file for a name, possibly with folders before it; None if there is none. Raises DataError if several are possible.

        Of several files with the same name, the one whose folders agree most, then those below `near`, then those of the part.
        A file of another part than `part` is none: val/1.png is not the 1.png of train. `with_folders`: all folders must agree.
        """
        folders = _pieces(name)
        if not folders:
            return None
        wanted = [_plain(piece) for piece in folders]
        candidates = self._by_stem.get(wanted[-1], []) if by_stem else self._by_name.get(wanted[-1], [])
        if with_folders:
            candidates = [path for path in candidates if self._agreement(wanted[:-1], path) == len(wanted) - 1]
        part = part_in(folders[:-1]) or part
        if part:
            candidates = [path for path in candidates if self.part_of(path) in ("", part)]
        for rank in (
            lambda path: self._agreement(wanted[:-1], path),
            lambda path: path.is_relative_to(near),
            lambda path: path.parent == near,
            lambda path: self.part_of(path) == part,
            lambda path: path.name == folders[-1],
        ):
            if len(candidates) > 1:
                best = max(map(rank, candidates))
                candidates = [path for path in candidates if rank(path) == best]
        if len(candidates) > 1:
            paths = first_few("/".join(self._parts[path]) for path in candidates)
            raise DataError(f"image_dir: {name} could be {paths}; set image_dir to the folder that is meant")
        return candidates[0] if candidates else None

    def _agreement(self, wanted: Sequence[str], path: Path) -> int:
        """How many of the folders above a file are those that are wanted, from the last backwards."""
        folders = [_plain(piece) for piece in self._parts[path][:-1]]
        pairs = zip(reversed(wanted), reversed(folders), strict=False)
        return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(wanted), len(folders)))


def _pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them."""
    return [piece for piece in PurePosixPath(name.replace("\\", "/")).parts if piece not in ("/", ".", "..")]


def _plain(name: str) -> str:
    """Equal for names that differ in case or in the form of accents only: a name may come from another operating system."""
    return unicodedata.normalize("NFC", name).casefold()
