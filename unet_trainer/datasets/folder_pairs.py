"""The pairs of a dataset, found in its folders: those of train, val and test, or of the lists that divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.layouts import Folders, Part, find_layout
from unet_trainer.datasets.name_matching import Rule
from unet_trainer.datasets.pairing import SKIP, UNPAIRED, list_images, ways_out
from unet_trainer.datasets.pairs import FoundPairs, Pair, path_in
from unet_trainer.datasets.part_pairs import PartPairs, Search, class_names, describe_counts, pair_part
from unet_trainer.datasets.problems import Problem, with_choices
from unet_trainer.datasets.split_lists import PLACE, SplitLists, find_split_lists
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console, counted


def find_in_folders(config: Config, data_dir: Path, console: Console | None = None) -> FoundPairs:
    """The pairs in the folders of data_dir; raises DataError where images and masks cannot be told apart."""
    layout = find_layout(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    search = Search(config, data_dir, console)
    lists = None if layout.val else find_split_lists(layout.train)
    train = pair_part(search, layout.train, "train", lists=lists)
    if lists is not None:
        return _divide_by_lists(search, layout.phrase, train, lists)
    rule, parts = f"{layout.phrase}, {train.rule}", [train]
    pairs = train.pairs
    if layout.val:
        val = pair_part(search, layout.val, "val", train.match.rule)
        has_same_rule = (train.rule == "same names") == (val.rule == "same names")
        rule += f"{'' if has_same_rule else f', val {val.rule}'}; {layout.parts}"
        pairs = [*_in_part("train", train.pairs), *_in_part("val", val.pairs)]
        parts.append(val)
    return _found(search, pairs, rule, parts, _find_test(search, layout.test, train.match.rule))


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names belong together, sorted by name; one folder may hold both. Raises DataError."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        raise DataError(f"no folder {' and no folder '.join(missing)}; set image_dir and mask_dir to the folders' names")
    search = Search(Config(mask_suffix=mask_suffix), image_folder.parent)
    part = pair_part(search, (Folders(image_folder, mask_folder),), "train")
    found = _found(search, part.pairs, part.rule, [part], ())
    if found.blocking_message:
        raise DataError(found.blocking_message)
    return part.pairs


def _in_part(part: Part, pairs: Sequence[Pair]) -> list[Pair]:
    return [replace(pair, part=part) for pair in pairs]


def _found(search: Search, pairs: Sequence[Pair], rule: str, parts: Sequence[PartPairs], test: Sequence[Pair]) -> FoundPairs:
    """All parts together; what to do about unpaired files is said once."""
    messages = [part.message for part in parts if part.message]
    unpaired = [part.match for part in parts if part.message and not part.match.is_complete]
    problems = [problem for part in parts for problem in part.problems]
    if unpaired:
        both = unpaired[0]._replace(
            images=[image for match in unpaired for image in match.images],
            masks=[mask for match in unpaired for mask in match.masks],
        )
        advice, choices = ways_out(len(pairs), describe_counts(both))
        messages.append(with_choices(f"  {advice}", choices))
        if choices:
            problems = [_can_be_skipped(problem) if problem.kind in UNPAIRED else problem for problem in problems]
    names = class_names(search)
    return FoundPairs(
        tuple(pairs),
        rule,
        "\n".join(messages),
        tuple(problems),
        test=tuple(test),
        notices=tuple(search.notices),
        class_names=names,
        num_classes=len(names) if names else None,
    )


def _can_be_skipped(problem: Problem) -> Problem:
    return replace(problem, fix=f"{problem.fix}; unpaired: skip leaves them out", settings=SKIP.settings)


def _find_test(search: Search, folders: Sequence[Folders], rule: Rule) -> list[Pair]:
    """The pairs that neither train nor validate. What is wrong with them is said, and stops no training."""
    if not folders:
        return []
    place = path_in(search.data_dir, folders[0].images.parent.parent if folders[0].name else folders[0].images)
    if not any(each.masks.is_dir() for each in folders):
        search.notices.append(f"{counted(len(list_images(folders)), 'test image')} without masks in {place}/")
        return []
    own = replace(search, notices=[])
    try:
        part = pair_part(own, folders, "test", rule)
    except DataError as error:
        search.notices.append(f"{place}/ cannot be used by evaluate: {error}")
        return []
    if part.message:
        search.notices.append(f"{describe_counts(part.match)} in {place}/, left out" if part.match.images else part.message)
    return _in_part("test", part.pairs)


def _divide_by_lists(search: Search, phrase: str, part: PartPairs, lists: SplitLists) -> FoundPairs:
    """The parts that ImageSets/Segmentation gives; images in no list are left out."""
    part_of = {pair: lists.part_of(pair.name) for pair in part.pairs}
    pairs = [replace(pair, part=its) for pair, its in part_of.items() if its != "test"]
    test = _in_part("test", [pair for pair, its in part_of.items() if its == "test"])
    if lists.num_unlisted:
        search.notices.append(f"{counted(lists.num_unlisted, 'image')} in no list of {PLACE.as_posix()} left out")
    found = _found(search, pairs, f"{phrase}, {part.rule}; {lists.describe()}", [part], test)
    missing = lists.missing()
    if missing and search.config.unpaired == "skip":
        return replace(
            found, notices=(*found.notices, f"{counted(len(missing), 'listed name')} without an image left out (unpaired: skip)")
        )
    if not missing:
        return found
    one, many = (f"{names} in {PLACE.as_posix()} without an image" for names in ("name", "names"))
    problem = Problem("no_image", one, many, tuple(missing), "unpaired: skip leaves them out", SKIP.settings)
    text = f"{counted(len(missing), 'name')} in {PLACE.as_posix()} without an image, e.g. {missing[0]}"
    message = "\n".join(text for text in (found.blocking_message, with_choices(text, [SKIP])) if text)
    return replace(found, blocking_message=message, problems=(*found.problems, problem))
