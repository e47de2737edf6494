"""Finds the pairs of a dataset: asks the formats in their order. A format of somebody's own is a module with
`find(place, config)`, which gives the pairs or None, and one line in FORMATS."""

import gc
from collections.abc import Callable
from dataclasses import replace

from unet_trainer.config.schema import Config
from unet_trainer.data import annotations, shards
from unet_trainer.data.formats import coco, demo, folders, labelme, rle_table, table, yolo
from unet_trainer.data.pairs import FoundPairs, Pair, Question
from unet_trainer.data.place import Place
from unet_trainer.data.splits import add_groups
from unet_trainer.system.console import Console

Find = Callable[[Place, Config], list[Pair] | None]
FORMATS: tuple[Find, ...] = (
    demo.find, shards.find, table.find, folders.find,
    coco.find, labelme.find, yolo.find, rle_table.find, annotations.find,
)  # fmt: skip


def find_dataset(config: Config, console: Console | None = None) -> FoundPairs:
    """The pairs of data_dir, by the first format that finds any; the demo is made where it is missing. A format that
    has a question is passed over if another has none. Raises DataError."""
    is_collecting = gc.isenabled()
    gc.disable()  # going over a million files again and again, it would take a third of the time and free nothing
    place, questions = Place.of(config, console), list[Question]()
    try:
        for find in FORMATS:
            try:
                pairs = find(place, config)
            except Question as question:
                questions.append(question)
                continue
            if pairs is not None:
                found, pattern = place.said.with_pairs(pairs), config.group_pattern
                return replace(found, pairs=add_groups(found.pairs, pattern, place.data_dir)) if pattern else found
        raise next((question for question in questions if question.choices), questions[-1])
    finally:
        if is_collecting:
            gc.enable()
