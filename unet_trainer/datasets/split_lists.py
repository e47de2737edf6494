"""The split of a dataset in the layout of PASCAL VOC: ImageSets/Segmentation/train.txt and val.txt, a name in each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unet_trainer.datasets.layouts import Folders, Part
from unet_trainer.datasets.name_matching import File, Match, composed
from unet_trainer.images.file_bytes import DataError

PLACE = Path("ImageSets/Segmentation")
FILES: tuple[tuple[str, Part], ...] = (("train.txt", "train"), ("val.txt", "val"), ("test.txt", "test"))
UNDIVIDED = "trainval.txt"


class SplitLists:
    """The part of each listed image, by its name. Images in no list do not belong to the dataset."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.parts: dict[str, Part | None] = {}  # None: listed, and to be divided
        self.num_unlisted = 0
        self._with_image: set[str] = set()

    def part_of(self, name: str) -> Part | None:
        return self.parts[name]

    def restrict(self, match: Match) -> Match:
        """The match without the images in no list, and without the masks of images that are in none."""
        images = [*(image for image, _ in match.pairs), *match.images]
        self._with_image = {_name(image) for image in images}
        self.num_unlisted = sum(_name(image) not in self.parts for image in images)
        return match._replace(
            pairs=[(image, mask) for image, mask in match.pairs if _name(image) in self.parts],
            images=[image for image in match.images if self.parts.get(_name(image), "test") != "test"],
            masks=[],
        )

    def missing(self) -> list[str]:
        """Listed names without an image, of those to train and validate on."""
        return [name for name, part in self.parts.items() if part != "test" and name not in self._with_image]

    def describe(self) -> str:
        return f"{PLACE.as_posix()}/{' and '.join(dict.fromkeys(file.name for file in self.files))}"


def _name(image: File) -> str:
    return f"{image.folder}{image.stem}"


def find_split_lists(folders: Sequence[Folders]) -> SplitLists | None:
    """The lists beside the folders of images (one set for each folder, as in VOC2007/ and VOC2012/); None if one has none."""
    found = SplitLists()
    for each in folders:
        place = each.images.parent / PLACE
        files = [(place / name, part) for name, part in FILES if (place / name).is_file()]
        if not any(part == "train" for _, part in files):
            files = [(place / UNDIVIDED, "train"), *files] if (place / UNDIVIDED).is_file() else []
        if not files:
            return None
        for file, part in files:  # what is in two lists belongs to the later one: it must not train
            found.parts |= dict.fromkeys((composed(f"{each.name}{stem}") for stem in _read_names(file)), part)
            found.files.append(file)
    if all(part != "val" for part in found.parts.values()):
        found.parts = {name: None if part == "train" else part for name, part in found.parts.items()}
    return found


def _read_names(path: Path) -> list[str]:
    """The first word of each line; the rest of a line, if any, says whether a class occurs."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    return [line.split()[0] for line in lines if line.strip()]
