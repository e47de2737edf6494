"""A pair: an image and its mask. And the pairs of a dataset, however they were found. Opens no file."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unet_trainer.datasets.problems import Choice, Problem

Part = Literal["train", "val", "test"]
SKIP = Choice("", {"unpaired": "skip"})


@dataclass(frozen=True)
class Pair:
    """One image and its mask. The name is the image's path inside its folder, without extension."""

    name: str
    image: Path
    mask: Path
    part: Part | None = None  # None: the data is not divided
    group: str = ""  # pairs of one group stay on one side of the split
    image_origin: str = ""  # of a file that was made from others: what the user knows it by
    mask_origin: str = ""
    content: str = field(default="", compare=False)  # digest of both files as they were read; of a resumed run, when it began

    @property
    def shown_image(self) -> str:
        """How messages name the image."""
        return self.image_origin or str(self.image)

    @property
    def shown_mask(self) -> str:
        return self.mask_origin or str(self.mask)

    def path_in(self, data_dir: Path) -> str:
        """The image's path inside data_dir, by which patterns know it; a page of a stack has one below that of the stack."""
        return composed(f"{self.name}{self.image.suffix}" if self.image_origin else path_in(data_dir, self.image))


@dataclass(frozen=True)
class FoundPairs:
    """The pairs of a dataset, how they were found, and the files without a partner."""

    pairs: tuple[Pair, ...]  # to train and validate on
    rule: str
    blocking_message: str = ""  # why they cannot be trained on; empty if every file has its partner
    problems: tuple[Problem, ...] = ()  # the same, file by file
    test: tuple[Pair, ...] = ()  # for `evaluate`; training does not touch them
    unused: tuple[Pair, ...] = ()  # that a run's split.csv leaves out
    notices: tuple[str, ...] = ()  # what the user should know: what was left out, what overlaps
    class_names: tuple[str, ...] | None = None  # by class id, if what the masks were made from says them
    num_classes: int | None = None  # likewise
    class_file: tuple[str, str] | None = None  # name and text of the file that names the classes, where shards hold it

    @property
    def suggested(self) -> dict[str, Any]:
        """Settings that solve its problems."""
        return {name: value for problem in self.problems for name, value in problem.settings.items()}

    @property
    def is_divided(self) -> bool:
        """Whether the data itself is divided into train and val."""
        return any(pair.part == "val" for pair in self.pairs)


def path_in(data_dir: Path, path: Path) -> str:
    """The path relative to data_dir, with slashes; the whole path if it is outside."""
    return (path.relative_to(data_dir) if path.is_relative_to(data_dir) else path).as_posix()


def composed(text: str) -> str:
    """The form in which names are compared (NFC): ä is one letter, not an a and its dots, as archives made on macOS hold it."""
    return unicodedata.normalize("NFC", text)
