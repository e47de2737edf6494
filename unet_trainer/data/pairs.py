"""A pair: an image and its mask. The pairs of a dataset, and what is wrong with it: problems with their files and
fixes, and questions with the settings that answer them, as lines for a config. Opens no file."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import to_plain
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import counted, one_line

NUM_NAMED = 10  # files or lines of one problem in a message
UNREADABLE = "file", "that cannot be used"


@dataclass(frozen=True)
class Problem:
    """One kind of problem: a line for each file that has it, and the fix."""

    kind: str  # identifies it in the JSON report: unreadable, sizes, ...
    noun: str  # of one that has it: "file"
    what: str  # it is: "that cannot be read"
    lines: tuple[str, ...]  # "path: reason"
    fix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # that solve it, if some do

    @property
    def title(self) -> str:
        return f"{counted(len(self.lines), self.noun)} {self.what}"


@dataclass(frozen=True)
class Choice:
    """An answer to a question: what it means, and the settings to put into the config."""

    meaning: str
    settings: Mapping[str, Any]

    def lines(self) -> list[str]:
        return [*([f"# {self.meaning}"] if self.meaning else []), *setting_lines(self.settings)]


class Question(DataError):
    """What only the user knows, and its answers, the most likely first. As an error it goes on with `table`, what was
    found, and ends with the lines that answer it."""

    def __init__(self, text: str, *choices: Mapping[str, Any] | Choice, table: Sequence[str] = ()) -> None:
        self.text, self.table = text, table
        self.choices = tuple(choice if isinstance(choice, Choice) else Choice("", choice) for choice in choices)
        found = "\n  ".join([text, *table])
        blocks = ["\n".join(f"  {line}" for line in choice.lines()) for choice in self.choices]
        between = "\n\n" if "\n" in "".join(blocks) else "\n"
        asked = "set one of these" if len(blocks) > 1 else "set"
        asked = f"\n{asked.capitalize()}" if "\n" in found else f"; {asked}"
        super().__init__(f"{found}{asked}:\n{between.join(blocks)}" if blocks else found)


def setting_lines(settings: Mapping[str, Any]) -> list[str]:
    """Settings as lines of YAML."""
    return [f"{name}: {value_text(to_plain(value))}" for name, value in settings.items()]


def describe_problems(problems: Sequence[Problem], most: int = NUM_NAMED, where: str = "") -> str:
    """Every problem with its fix and its first `most` lines; `where` says where the others are."""
    lines: list[str] = []
    for problem in problems:
        lines += [f"{problem.title}:", *([f"  Fix: {problem.fix}"] if problem.fix else [])]
        lines += [f"  {one_line(line)}" for line in problem.lines[:most]]
        lines += [f"  … and {len(problem.lines) - most} more{where}"] if len(problem.lines) > most else []
    return "\n".join(lines)


def first_few(items: Iterable[object], most: int = 5) -> str:
    """The first `most` items, and the number of the others."""
    texts = [one_line(str(item)) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


Part = Literal["train", "val", "test"]
SKIP = Choice("", {"unpaired": "skip"})


class Box(NamedTuple):
    """A part of an image and its mask: the files, and the first row and column and those behind the last."""

    image: Path
    mask: Path
    top: int
    left: int
    bottom: int
    right: int

    @property
    def place(self) -> str:
        return f"rows {self.top} to {self.bottom - 1}, columns {self.left} to {self.right - 1}"

    def pair(self, name: str, part: Part | None, group: str = "", content: str = "") -> "Pair":
        """The pair of this block of an image, which converted.cut_blocks has yet to cut out."""
        image, mask = (f"{path}, {self.place}" for path in (self.image, self.mask))
        return Pair(name, self.image, self.mask, part, group, image, mask, content, box=self)

    def overlaps(self, other: "Box") -> bool:
        """Whether they share a pixel, if they are of one image."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not is_beside and self.top < other.bottom and other.top < self.bottom

    def name_in(self, name: str) -> str:
        """Of the block, where its image has this name; they sort."""
        return f"{name}/y{self.top:05d}-{self.bottom:05d}_x{self.left:05d}-{self.right:05d}"


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
    # Digest of both files as they were read; of a resumed run, when it began.
    content: str = field(default="", compare=False)
    box: Box | None = field(default=None, kw_only=True)  # that both files were cut out of

    @property
    def shown_image(self) -> str:
        """How messages name the image."""
        return self.image_origin or str(self.image)

    @property
    def shown_mask(self) -> str:
        return self.mask_origin or str(self.mask)

    @property
    def user_files(self) -> tuple[Path, Path]:
        """Image and mask, or those that a block was cut out of."""
        return (self.image, self.mask) if self.box is None else (self.box.image, self.box.mask)

    def files_in(self, data_dir: Path) -> tuple[str, str]:
        """Image and mask as tables of scores name them, by their paths in data_dir; of a block with its rows and
        columns."""
        rows = f"[{box.top}:{box.bottom}, {box.left}:{box.right}]" if (box := self.box) else ""
        image, mask = (f"{path_in(data_dir, file)}{rows}" for file in self.user_files)
        return image, mask

    def block(self, part: Part, sides: tuple[int, int, int, int]) -> "Pair":
        """Top, left, bottom and right of it, as a pair of its own."""
        box = Box(self.image, self.mask, *sides)
        return box.pair(box.name_in(self.name), part)

    def path_in(self, data_dir: Path) -> str:
        """The image's path inside data_dir, by which patterns know it; a page of a stack has one below that of the
        stack."""
        return composed(f"{self.name}{self.image.suffix}" if self.image_origin else path_in(data_dir, self.image))


@dataclass(frozen=True)
class FoundPairs:
    """The pairs of a dataset, how they were found, and the files without a partner."""

    pairs: tuple[Pair, ...]  # to train and validate on
    rule: str
    problems: tuple[Problem, ...] = ()  # why they cannot be trained on; none if every file has its partner
    test: tuple[Pair, ...] = ()  # for `evaluate`; training does not touch them
    unused: tuple[Pair, ...] = ()  # that a run's split.csv leaves out
    notices: tuple[str, ...] = ()  # what the user should know: what was left out, what overlaps
    class_names: tuple[str, ...] | None = None  # by class id, if what the masks were made from says them
    class_file: tuple[str, str] | None = None  # name and text of the file that names the classes, where shards hold it
    folders: tuple[str, str] | None = None  # image_dir and mask_dir that find them, where neither is set

    @property
    def num_classes(self) -> int | None:
        return None if self.class_names is None else len(self.class_names)

    @property
    def blocking_message(self) -> str:
        return describe_problems(self.problems)

    @property
    def is_divided(self) -> bool:
        """Whether the data itself is divided into train and val."""
        return any(pair.part == "val" for pair in self.pairs)

    def with_pairs(self, pairs: Iterable[Pair]) -> "FoundPairs":
        """These pairs, those of test apart from the others."""
        used, test = list[Pair](), list[Pair]()
        for pair in pairs:
            (test if pair.part == "test" else used).append(pair)
        return replace(self, pairs=tuple(used), test=tuple(test))


def divided(pairs: Sequence[Pair], rule: str, problems: Sequence[Problem] = (), **others: Any) -> FoundPairs:
    """Pairs that a table or annotations list, with their parts: train and val count if there are both, and then what is
    of no part trains; test counts beside any other. Names are made distinct."""
    parts, names = {pair.part for pair in pairs}, Counter(pair.name for pair in pairs)
    is_divided, has_test = {"train", "val"} <= parts, len(parts) > 1
    found = []
    for pair in sorted(pairs, key=lambda pair: pair.name):
        name = f"{pair.name}{pair.image.suffix}" if names[pair.name] > 1 else pair.name  # a.jpg and a.png
        part = pair.part if has_test and pair.part == "test" else (pair.part or "train") if is_divided else None
        found.append(replace(pair, name=name, part=part))
    rule += "; as they are divided into train and val" if is_divided else ""
    problems = tuple(problem for problem in problems if problem.lines)
    return FoundPairs((), rule, problems, **others).with_pairs(found)


def path_in(data_dir: Path, path: Path) -> str:
    """The path relative to data_dir, with slashes; the whole path if it is outside."""
    return (path.relative_to(data_dir) if path.is_relative_to(data_dir) else path).as_posix()


def composed(text: str) -> str:
    """The form in which names are compared (NFC): ä is one letter, not an a and its dots, as in archives of macOS."""
    return unicodedata.normalize("NFC", text)
