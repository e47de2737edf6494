"""Finds the pairs of a dataset: asks the formats in their order. A format of somebody's own is a module with
`find(place, config)`, which gives the pairs or None, and one line in FORMATS."""

from collections.abc import Callable
from dataclasses import replace

from unet_trainer.config.schema import Config
from unet_trainer.data import annotations, shards
from unet_trainer.data.annotations import UnknownAnnotations, describe_other_files
from unet_trainer.data.formats import coco, demo, folders, labelme, rle_table, table, yolo
from unet_trainer.data.pairs import FoundPairs, Pair, Question
from unet_trainer.data.place import Place
from unet_trainer.data.splits import add_groups
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console

Find = Callable[[Place, Config], list[Pair] | None]
FORMATS: tuple[Find, ...] = (
    demo.find, shards.find, table.find, folders.find,
    coco.find, labelme.find, yolo.find, rle_table.find, annotations.find,
)  # fmt: skip


def find_dataset(config: Config, console: Console | None = None) -> FoundPairs:
    """The pairs of data_dir, by the first format that finds any; the demo is made where it is missing. Raises
    DataError."""
    place = Place.of(config, console)
    refusal: DataError | None = None
    for find in FORMATS:
        attempt = place.fresh()
        try:
            pairs = find(attempt, config)
        except UnknownAnnotations as error:
            raise refusal if isinstance(refusal, Question) and refusal.choices else error from None
        except DataError as error:
            if find is not folders.find:
                raise
            refusal = error  # unless there are annotations
            continue
        if pairs is not None:
            found = attempt.found(pairs)
            if config.group_pattern:
                found = replace(found, pairs=add_groups(found.pairs, config.group_pattern, place.data_dir))
            return found
    assert refusal is not None
    others = [
        *table.describe_unread_tables(place.data_dir, place.listing),
        *describe_other_files(place.data_dir, place.listing),
    ]
    if not others or (isinstance(refusal, Question) and refusal.choices):  # there are masks, and the user has to choose
        raise refusal
    raise DataError("\n  ".join([str(refusal), *others]))
