"""A place with data, as formats are asked for the pairs in it: its folders are listed once, and what a format has to
say besides its pairs is kept here."""

from dataclasses import dataclass, field
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
    """data_dir, and what the format that reads it says of its pairs: see FoundPairs."""

    data_dir: Path
    checkpoint_dir: Path
    console: Console | None = None
    listing: Listing = field(default_factory=Listing)
    shared: dict[str, Any] = field(default_factory=dict)  # what one format reads for others
    rule: str = ""
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    class_names: tuple[str, ...] | None = None
    class_file: tuple[str, str] | None = None
    folders: tuple[str, str] | None = None
    unused: list[Pair] = field(default_factory=list)

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
        """The pairs of what is read for runs too, a table or shards; what else was found is kept."""
        self.rule, self.class_names, self.class_file = found.rule, found.class_names, found.class_file
        self.problems, self.notices, self.unused = [*found.problems], [*found.notices], [*found.unused]
        return [*found.pairs, *found.test]

    def found(self, pairs: list[Pair]) -> FoundPairs:
        """The pairs that a format gave, with what it said."""
        used, test = (tuple(pair for pair in pairs if (pair.part == "test") is is_test) for is_test in (False, True))
        said = tuple(self.problems), test, tuple(self.unused), tuple(self.notices)
        return FoundPairs(used, self.rule, *said, self.class_names, self.class_file, self.folders)
