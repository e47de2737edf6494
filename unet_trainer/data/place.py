"""A place with data, as formats are asked for the pairs in it: its folders are listed once, and what a format has to
say besides its pairs is kept here."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.converted import Converter
from unet_trainer.data.listing import Listing
from unet_trainer.data.pairs import FoundPairs, Pair, Problem
from unet_trainer.system.console import Console


@dataclass
class Place:
    """data_dir, and what the format that reads it says of its pairs."""

    data_dir: Path
    checkpoint_dir: Path
    console: Console | None = None
    listing: Listing = field(default_factory=Listing)
    shared: dict[str, Any] = field(default_factory=dict)  # what one format reads for others
    rule: str = ""  # how the pairs were found
    problems: list[Problem] = field(default_factory=list)  # why they cannot be trained on
    notices: list[str] = field(default_factory=list)  # what the user should know
    class_names: tuple[str, ...] | None = None  # by class id, if what the masks were made from says them
    class_file: tuple[str, str] | None = None  # name and text of the file that names the classes, where shards hold it
    folders: tuple[str, str] | None = None  # image_dir and mask_dir that find the pairs, where neither is set
    unused: list[Pair] = field(default_factory=list)  # that a run's split.csv leaves out

    @classmethod
    def of(cls, config: Config, console: Console | None = None) -> "Place":
        return cls(Path(config.data_dir), Path(config.checkpoint_dir), console)

    @cached_property
    def converter(self) -> Converter:
        """Writes what is no plain file as one, under checkpoint_dir."""
        return Converter(self.data_dir, self.checkpoint_dir, self.console)

    def fresh(self) -> "Place":
        """The same place, of which nothing has been said."""
        return Place(self.data_dir, self.checkpoint_dir, self.console, self.listing, self.shared)

    def take(self, found: FoundPairs) -> list[Pair]:
        """The pairs; what else was found is kept."""
        self.rule, self.class_names, self.class_file, self.folders = (
            found.rule, found.class_names, found.class_file, found.folders,
        )  # fmt: skip
        self.problems += found.problems
        self.notices += found.notices
        self.unused += found.unused
        return [*found.pairs, *found.test]

    def found(self, pairs: list[Pair]) -> FoundPairs:
        """The pairs that a format gave, with what it said."""
        used, test = (tuple(pair for pair in pairs if (pair.part == "test") is is_test) for is_test in (False, True))
        result = FoundPairs(used, self.rule, tuple(self.problems), test, tuple(self.unused), tuple(self.notices))
        return replace(result, class_names=self.class_names, class_file=self.class_file, folders=self.folders)
