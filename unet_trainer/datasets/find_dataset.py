"""The pairs of data_dir, however they lie there: masks in folders, annotations that masks are drawn from, the rows of a CSV, or
shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.annotations import UnknownAnnotations, describe_other_files, find_annotations
from unet_trainer.datasets.file_tree import refuse_unreadable
from unet_trainer.datasets.folder_pairs import find_in_folders
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.problems import Question
from unet_trainer.datasets.shards import find_in_shards
from unet_trainer.datasets.splits import add_groups, read_split_csv
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console


def find_dataset(config: Config, console: Console | None = None) -> FoundPairs:
    """The pairs of data_dir, by its folders, its annotations or split_file; raises DataError where they cannot be found.

    Masks that are not one file for each image are written as such under checkpoint_dir, with a progress bar if there is a console.
    """
    data_dir = Path(config.data_dir)
    stored = find_in_shards(config, console)
    if stored is None:
        refuse_unreadable(data_dir, [config.image_dir, config.mask_dir])
    if stored is None and not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")
    if config.split_file is None:
        found = stored or _find_masks_or_annotations(config, data_dir, console)
    else:
        found = read_split_csv(
            _find_split_file(config.split_file, data_dir), data_dir, [*stored.pairs, *stored.test] if stored else ()
        )
        if config.group_pattern and any(pair.group for pair in found.pairs):
            raise DataError(f"group_pattern: {config.split_file} has groups of its own; leave out the pattern, or the column")
    return replace(found, pairs=add_groups(found.pairs, config.group_pattern, data_dir)) if config.group_pattern else found


def _find_masks_or_annotations(config: Config, data_dir: Path, console: Console | None) -> FoundPairs:
    """Masks in folders come first; where there are none, annotations are looked for."""
    try:
        found = find_in_folders(config, data_dir, console)
    except DataError as error:
        has_answers = isinstance(error, Question) and bool(error.choices)  # there are masks, and the user has to choose
        try:
            drawn = find_annotations(config, data_dir, console)
        except UnknownAnnotations:
            if has_answers:
                raise error from None
            raise
        if drawn is not None:
            return drawn
        others = describe_other_files(data_dir)
        if not others or has_answers:
            raise
        raise DataError("\n  ".join([str(error), *others])) from None
    others = describe_other_files(data_dir) if found.blocking_message else []
    return replace(found, blocking_message="\n".join([*others, found.blocking_message])) if others else found


def _find_split_file(split_file: str, data_dir: Path) -> Path:
    places = list(dict.fromkeys([Path(split_file), data_dir / split_file]))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"split_file: no file {' or '.join(str(place) for place in places)}")
    return found
