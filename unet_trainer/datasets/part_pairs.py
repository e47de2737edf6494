"""The pairs of one part of a dataset (train, val or test), by its folders.

Masks that are not one file for each image (a file for each object or class, pages of a stack) are made into such files here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.converted import ConvertedFiles
from unet_trainer.datasets.layouts import Folders, Part
from unet_trainer.datasets.merged_masks import (
    READERS,
    MaskMerger,
    MaskParts,
    class_parts,
    find_class_files,
    find_object_files,
    order_classes,
)
from unet_trainer.datasets.name_matching import File, Match, Rule, best_match, composed, mask_kinds
from unet_trainer.datasets.pairing import collect_files, describe_unpaired, refuse_channels, unpaired_problems
from unet_trainer.datasets.pairs import Pair, path_in
from unet_trainer.datasets.problems import UNREADABLE, Problem, Question, describe_problems, first_few, setting_lines
from unet_trainer.datasets.split_lists import SplitLists
from unet_trainer.datasets.stacks import count_pages, has_pages, split_into_pages
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import Console, counted


@dataclass
class Search:
    """What the parts of a dataset share while they are searched, and what is to be said at the end."""

    config: Config
    data_dir: Path
    console: Console | None = None
    notices: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # where each class has its files: their names, without the background
    has_background: bool = False  # some pixels belong to none of them

    def converted(self, kind: str, settings: object = None) -> ConvertedFiles:
        checkpoint_dir = Path(self.config.checkpoint_dir).absolute()  # split.csv names these files
        return ConvertedFiles(self.data_dir, checkpoint_dir, kind, settings)

    @contextlib.contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[], object]]:
        """What to call after each of `total` steps."""
        if self.console is None:
            yield lambda: None
            return
        with self.console.bar(label, total, keep=False) as bar:
            yield bar.tick

    def names_are_given(self, classes: Sequence[str]) -> bool:
        """Whether class_names says that these are classes."""
        given = list(self.config.class_names or ())
        return bool(given) and sorted(classes) in (sorted(given), sorted(given[1:]))


@dataclass
class PartPairs:
    """The pairs of one part, sorted by name, and how its names were matched."""

    folders: Sequence[Folders]
    match: Match
    pairs: list[Pair]
    rule: str
    message: str = ""  # what is wrong with it, if anything is
    problems: tuple[Problem, ...] = ()


def pair_part(
    search: Search, folders: Sequence[Folders], part: Part, preferred: Rule | None = None, lists: SplitLists | None = None
) -> PartPairs:
    """The pairs of a part. `preferred` is the rule of the training names; of what is in none of `lists` nothing is taken.

    Raises DataError where there is a question to answer first.
    """
    images, masks = collect_files(folders, search.config.mask_suffix)
    match = best_match(images, masks, folders[0].images, preferred)
    if lists is not None:
        match = lists.restrict(match)
    if match.is_complete:
        return _plain(search, folders, match, part)
    refuse_channels(images, masks, folders[0].images)
    if folders[0].images == folders[0].masks or search.config.mask_suffix:
        return _plain(search, folders, match, part)
    objects = find_object_files(images, masks, folders)
    if objects is not None:
        return _from_objects(search, folders, images, objects, part)
    classes = find_class_files(images, masks, folders[0].images)
    if classes:
        return _from_class_folders(search, folders, images, classes, part)
    return _plain(search, folders, _choose_kind(search, folders, images, masks, match), part)


def _choose_kind(search: Search, folders: Sequence[Folders], images: Sequence[File], masks: Sequence[File], match: Match) -> Match:
    """The match without further kinds of masks, if each image has a mask of its own name; raises Question for several others."""
    kinds, place = mask_kinds(images, masks), folders[0].masks
    if kinds and "" not in kinds:
        listing = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        raise Question(
            f"mask_suffix: {place} holds {len(kinds)} kinds of masks for the same images: {listing}",
            *({"mask_suffix": kind} for kind in kinds),
        )
    if not kinds or match.rule != Rule() or match.images:
        return match
    left_out = ", ".join(kind for kind in kinds if kind)
    search.notices.append(
        f"{counted(len(match.masks), 'other mask')} in {place} left out ({left_out}); mask_suffix chooses another kind"
    )
    return match._replace(masks=[])


def _plain(search: Search, folders: Sequence[Folders], match: Match, part: Part) -> PartPairs:
    """Each mask is a file of its own, or a page of a stack."""
    pairs = [Pair(f"{image.folder}{image.stem}", image.path, mask.path) for image, mask in match.pairs]
    pairs.sort(key=lambda pair: pair.name)
    same = match.rule == Rule() and all(composed(pair.image.stem) == composed(pair.mask.stem) for pair in pairs)
    rule = "same names" if same or not pairs else f"paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}"
    if same and pairs and folders[0].images == folders[0].masks:
        rule = f"paired like {pairs[0].image.name} ↔ {pairs[0].mask.name}"
    stacks = [pair for pair in pairs if has_pages(pair.mask) and count_pages(pair.mask) > 1]
    if stacks:
        pages = _split_stacks(search, stacks, part)
        pairs = sorted([*(pair for pair in pairs if pair not in stacks), *pages], key=lambda pair: pair.name)
        rule += f", {counted(len(pages), 'page')} of {counted(len(stacks), 'stack')}"
    found = PartPairs(folders, match, pairs, rule)
    _describe_unpaired(search, found)
    return found


def _split_stacks(search: Search, stacks: Sequence[Pair], part: Part) -> list[Pair]:
    files, found = search.converted("pages"), []
    with search.bar("Splitting stacks into pages:", len(stacks)) as tick:
        for stack in stacks:
            for number, image, mask in split_into_pages(files, f"{part}/{stack.name}", stack.image, stack.mask):
                origins = (f"{path}, page {int(number)}" for path in (stack.image, stack.mask))
                found.append(Pair(f"{stack.name}/{number}", image, mask, None, "", *origins))
            tick()
    files.save_index()
    return found


def _from_objects(
    search: Search, folders: Sequence[Folders], images: Sequence[File], parts: Sequence[MaskParts], part: Part
) -> PartPairs:
    """A folder with the masks of each image: one for each object, one for each class by its name, or a single one."""
    classes = sorted({name for each in parts for name, _ in each.files if name})
    if classes:
        return _merge_classes(search, folders, images, parts, classes, part)
    if all(len(each.files) == 1 for each in parts):
        pairs = [(each.image, each.image._replace(path=each.files[0][1])) for each in parts]
        return _plain(search, folders, _match_of(images, pairs), part)
    found = _merge(search, folders, images, parts, [], part)
    found.rule = f"a mask file for each object, {sum(len(each.files) for each in parts)} files merged"
    return found


def _from_class_folders(
    search: Search,
    folders: Sequence[Folders],
    images: Sequence[File],
    classes: Mapping[str, Sequence[tuple[File, File]]],
    part: Part,
) -> PartPairs:
    """Folders of masks that are classes (as in the training data), readers, or batches: then no image has a mask in two of them."""
    names, parts, place = sorted(classes), class_parts(classes), folders[0].masks
    if search.classes or search.names_are_given(names):
        return _merge_classes(search, folders, images, parts, names, part)
    if all(len(each.files) == 1 for each in parts):
        if len(names) > 1:
            lines = "\n".join(f"  {line}" for line in setting_lines(_as_classes(names)))
            listing = first_few((f"{name}/" for name in names), 10)
            search.notices.append(
                f"the folders in {place} are taken as parts of one set: {listing}; if they are classes, set:\n{lines}"
            )
        return _plain(search, folders, _match_of(images, [pair for pairs in classes.values() for pair in pairs]), part)
    if any(READERS.search(name) for name in names):
        raise _ask_readers(search, names, place, f"mask_dir: {place} holds masks of several readers: {', '.join(names)}")
    return _merge_classes(search, folders, images, parts, names, part)


def _merge_classes(
    search: Search,
    folders: Sequence[Folders],
    images: Sequence[File],
    parts: Sequence[MaskParts],
    names: Sequence[str],
    part: Part,
) -> PartPairs:
    search.classes = search.classes or order_classes(names, search.config.class_names)
    unknown = sorted(set(names) - set(search.classes))
    if unknown:
        raise DataError(f"{folders[0].masks} holds classes that the training masks do not have: {first_few(unknown)}")
    found = _merge(search, folders, images, parts, search.classes, part)
    found.rule = f"a mask file for each class: {', '.join(search.classes)}"
    return found


def _merge(
    search: Search,
    folders: Sequence[Folders],
    images: Sequence[File],
    parts: Sequence[MaskParts],
    classes: Sequence[str],
    part: Part,
) -> PartPairs:
    """Pairs whose masks are merged from several files: of classes, or of objects if there are no classes."""
    merger = MaskMerger(search.converted("classes" if classes else "objects", list(classes)), classes)
    pairs = []
    with search.bar("Merging the masks of each image:", len(parts)) as tick:
        for each in parts:
            name = f"{each.image.folder}{each.image.stem}"
            merged = merger.merge(f"{part}/{name}", each)
            if merged is not None:
                first, others = each.files[0][1], len(each.files) - 1
                pairs.append(
                    Pair(name, each.image.path, merged, mask_origin=f"{first} and {others} more" if others else str(first))
                )
            tick()
    merger.save()
    search.has_background |= merger.has_background
    search.notices += merger.notices()
    readings = merger.two_readings()
    if readings is not None and not search.names_are_given(classes):
        text = "mask_dir: {}/ and {}/ in {} mark the same pixels (IoU {:.2f}); two readings of one thing?"
        raise _ask_readers(search, classes, folders[0].masks, text.format(*readings[:2], folders[0].masks, readings[2]))
    match = _match_of(images, [(each.image, each.image) for each in parts])
    found = PartPairs(folders, match, sorted(pairs, key=lambda pair: pair.name), "")
    _describe_unpaired(search, found)
    if merger.unreadable:
        problem = Problem("unreadable", *UNREADABLE, tuple(merger.unreadable), "repair these files")
        found.problems += (problem,)
        found.message = "\n".join(text for text in (found.message, describe_problems([problem])) if text)
    return found


def class_names(search: Search) -> tuple[str, ...] | None:
    """By class id, where each class has its files."""
    if not search.classes:
        return None
    return ("background", *search.classes) if search.has_background else tuple(search.classes)


def _as_classes(names: Sequence[str]) -> dict[str, object]:
    return {"num_classes": len(names) + 1, "class_names": ["background", *names]}


def _ask_readers(search: Search, names: Sequence[str], place: Path, text: str) -> Question:
    value = path_in(search.data_dir, place)
    return Question(text, *({"mask_dir": f"{value}/{name}"} for name in names), _as_classes(names))


def _match_of(images: Sequence[File], pairs: Sequence[tuple[File, File]]) -> Match:
    """A match of these pairs; the other images are without a mask."""
    paired = {image for image, _ in pairs}
    return Match(Rule(), list(pairs), [image for image in images if image not in paired], [])


def _describe_unpaired(search: Search, found: PartPairs) -> None:
    """Adds the message about files without a partner; with unpaired: skip, they are counted and left out."""
    match, (images, masks) = found.match, _shown(found.folders)
    if match.is_complete:
        return
    if search.config.unpaired == "skip" and found.pairs:
        files = [*match.images, *match.masks]
        search.notices.append(f"{describe_counts(match)} left out (unpaired: skip), e.g. {files[0].path}")
        return
    found.message = describe_unpaired(match, images, masks, search.config.mask_suffix)
    found.problems = unpaired_problems(match, images, masks)


def _shown(folders: Sequence[Folders]) -> tuple[Path, Path]:
    """How messages name the folders of images and masks: those of several sequences with a star."""
    first = folders[0]
    if len(folders) == 1:
        return first.images, first.masks
    around = first.images.parent.parent
    return around / "*" / first.images.name, around / "*" / first.masks.name


def describe_counts(match: Match) -> str:
    sides = (
        (match.images, "image without a mask", "images without a mask"),
        (match.masks, "mask without an image", "masks without an image"),
    )
    return " and ".join(counted(len(files), one, many) for files, one, many in sides if files)
