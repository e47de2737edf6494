"""A place with data, as formats are asked for the pairs in it: its folders are listed once for all of them."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.converted import Converter
from unet_trainer.data.listing import Listing
from unet_trainer.data.pairs import FoundPairs, Pair
from unet_trainer.system.console import Console

NOTHING = FoundPairs((), "")


@dataclass
class Place:
    data_dir: Path
    checkpoint_dir: Path
    console: Console | None = None
    listing: Listing = field(default_factory=Listing)
    shared: dict[str, Any] = field(default_factory=dict)  # what one format reads for others
    said: FoundPairs = NOTHING  # what the format that finds the pairs has to say of them

    @classmethod
    def of(cls, config: Config, console: Console | None = None) -> "Place":
        return cls(Path(config.data_dir), Path(config.checkpoint_dir), console)

    @cached_property
    def converter(self) -> Converter:
        """Writes what is no plain file as one, under checkpoint_dir."""
        return Converter(self.data_dir, self.checkpoint_dir, self.console)

    def take(self, found: FoundPairs) -> list[Pair]:
        """All pairs; what else was found is kept."""
        self.said = found
        return [*found.pairs, *found.test]
