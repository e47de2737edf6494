"""The pairs of a dataset, found in its folders: those of train, val and test, or of the lists that divide them.

Files pair up by their names; only those that may be results of predict are opened. What leaves files unpaired, or could be meant in
several ways, is described with the settings that decide it. Masks that are not one file for each image become such files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.datasets import converted, name_matching
from unet_trainer.datasets.file_tree import describe_results, list_files
from unet_trainer.datasets.layouts import Folders, find_layout, holds_masks_too
from unet_trainer.datasets.name_matching import File, Match, Rule, best_match, mask_marks, name_files
from unet_trainer.datasets.pairs import SKIP, FoundPairs, Pair, Part, composed, path_in
from unet_trainer.datasets.problems import (
    UNREADABLE,
    Choice,
    Problem,
    Question,
    describe_problems,
    first_few,
    setting_lines,
    with_choices,
)
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import Console, counted
from unet_trainer.system.input_files import read_text

NUM_NAMED = 5  # files named in a message before "and N more"
BY_CSV = "set split_file to a CSV with the columns image and mask"
LISTS = "ImageSets/Segmentation"  # of PASCAL VOC: train.txt, val.txt, test.txt, trainval.txt, a name in each line

SplitLists = dict[str, Part | None]  # name of a listed image → its part; None: it is to be divided


@dataclass
class Search:
    """What the parts of a dataset share while they are searched, and what is to be said at the end."""

    config: Config
    data_dir: Path
    converter: converted.Converter
    notices: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # where each class has its files: their names, without the background
    has_background: bool = False  # some pixels belong to none of them

    def names_are_given(self, classes: Sequence[str]) -> bool:
        """Whether class_names says that these are classes, with or without the background."""
        given = list(self.config.class_names or ())
        return bool(given) and sorted(classes) in (sorted(given), sorted(given[1:]))


@dataclass
class PartPairs:
    """The pairs of one part, sorted by name, and how its names were matched."""

    folders: Sequence[Folders]
    match: Match
    pairs: list[Pair]
    rule: str
    problems: list[Problem] = field(default_factory=list)
    message: str = ""  # what is wrong with it, if anything is


def find_in_folders(config: Config, data_dir: Path, console: Console | None = None) -> FoundPairs:
    """The pairs in the folders of data_dir; raises DataError where images and masks cannot be told apart."""
    layout = find_layout(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    search = Search(config, data_dir, converted.Converter(data_dir, Path(config.checkpoint_dir), console))
    lists, names = (None, "") if layout.val else _read_split_lists(layout.train)
    train = pair_part(search, layout.train, "train", lists=lists)
    rule, parts, pairs = f"{layout.phrase}, {train.rule}", [train], train.pairs
    if lists is not None:
        pairs = [replace(pair, part=lists[pair.name]) for pair in pairs]
        test = [pair for pair in pairs if pair.part == "test"]
        return _found(search, [pair for pair in pairs if pair.part != "test"], f"{rule}; {names}", parts, test)
    if layout.val:
        val = pair_part(search, layout.val, "val", train.match.rule)
        has_same_rule = (train.rule == "same names") == (val.rule == "same names")
        rule += f"{'' if has_same_rule else f', val {val.rule}'}; {layout.parts}"
        pairs = [*(replace(pair, part="train") for pair in pairs), *(replace(pair, part="val") for pair in val.pairs)]
        parts.append(val)
    return _found(search, pairs, rule, parts, _find_test(search, layout.test, train.match.rule))


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names belong together, sorted by name; one folder may hold both. Raises DataError."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        raise DataError(f"no folder {' and no folder '.join(missing)}; set image_dir and mask_dir to the folders' names")
    config = Config(mask_suffix=mask_suffix)
    search = Search(config, image_folder.parent, converted.Converter(image_folder.parent, Path(config.checkpoint_dir)))
    part = pair_part(search, (Folders(image_folder, mask_folder),), "train")
    found = _found(search, part.pairs, part.rule, [part], ())
    if found.blocking_message:
        raise DataError(found.blocking_message)
    return part.pairs


def _found(search: Search, pairs: Sequence[Pair], rule: str, parts: Sequence[PartPairs], test: Sequence[Pair]) -> FoundPairs:
    """All parts together; what to do about unpaired files is said once."""
    messages = [part.message for part in parts if part.message]
    unpaired = [part.match for part in parts if part.message and not part.match.is_complete]
    problems = [problem for part in parts for problem in part.problems]
    if unpaired:
        advice = "set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, or "
        advice += BY_CSV[4:]
        if len(pairs) < 2:
            messages.append(f"  {advice}")
        else:
            images, masks = (
                [file for match in unpaired for file in match.images],
                [file for match in unpaired for file in match.masks],
            )
            left_out = _describe_counts(unpaired[0]._replace(images=images, masks=masks))
            messages.append(with_choices(f"  {advice}; or, to train on the {len(pairs)} pairs and leave out {left_out}", [SKIP]))
            problems = [
                replace(problem, fix=f"{problem.fix}; unpaired: skip leaves them out", settings=SKIP.settings)
                if problem.kind in ("no_mask", "no_image")
                else problem
                for problem in problems
            ]
    names = (*(["background"] if search.has_background else []), *search.classes) if search.classes else None
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


def _find_test(search: Search, folders: Sequence[Folders], rule: Rule) -> list[Pair]:
    """The pairs that neither train nor validate. What is wrong with them is said, and stops no training."""
    if not folders:
        return []
    place = path_in(search.data_dir, folders[0].images.parent.parent if folders[0].name else folders[0].images)
    if not any(each.masks.is_dir() for each in folders):
        search.notices.append(f"{counted(len(_list_side(folders, 'images')), 'test image')} without masks in {place}/")
        return []
    try:
        part = pair_part(replace(search, notices=[]), folders, "test", rule)
    except DataError as error:
        search.notices.append(f"{place}/ cannot be used by evaluate: {error}")
        return []
    if part.message:
        search.notices.append(f"{_describe_counts(part.match)} in {place}/, left out" if part.match.images else part.message)
    return [replace(pair, part="test") for pair in part.pairs]


# The lists of PASCAL VOC


def _read_split_lists(folders: Sequence[Folders]) -> tuple[SplitLists | None, str]:
    """The lists beside the folders of images (one set for each folder, as in VOC2007/ and VOC2012/), and how messages name them;
    None if one has none. Images in no list do not belong to the dataset."""
    parts: SplitLists = {}
    names: dict[str, None] = {}
    for each in folders:
        place = each.images.parent / LISTS
        first = "train" if (place / "train.txt").is_file() else "trainval"
        files: list[tuple[Path, Part]] = [
            (place / f"{first}.txt", "train"),
            (place / "val.txt", "val"),
            (place / "test.txt", "test"),
        ]
        if not files[0][0].is_file():
            return None, ""
        for file, part in (each for each in files if each[0].is_file()):
            try:
                lines = read_text(file, errors="surrogateescape").splitlines()
            except OSError as error:
                raise DataError(f"{file} cannot be read ({error.strerror})") from None
            # The rest of a line, if any, says whether a class occurs. A name in two lists belongs to the later: it must not train.
            parts |= {composed(f"{each.name}{line.split()[0]}"): part for line in lines if line.strip()}
            names[file.name] = None
    if "val" not in parts.values():
        parts = {name: None if part == "train" else part for name, part in parts.items()}
    return parts, f"{LISTS}/{' and '.join(names)}"


def _restrict(search: Search, match: Match, lists: SplitLists) -> tuple[Match, list[Problem]]:
    """The match without the images in no list and without masks of others; and listed names without an image."""

    def name(image: File) -> str:
        return f"{image.folder}{image.stem}"

    images = [*(image for image, _ in match.pairs), *match.images]
    unlisted = sum(name(image) not in lists for image in images)
    if unlisted:
        search.notices.append(f"{counted(unlisted, 'image')} in no list of {LISTS} left out")
    there = {name(image) for image in images}
    missing = tuple(each for each, part in lists.items() if part != "test" and each not in there)
    match = match._replace(
        pairs=[(image, mask) for image, mask in match.pairs if name(image) in lists],
        images=[image for image in match.images if lists.get(name(image), "test") != "test"],
        masks=[],
    )
    if missing and search.config.unpaired == "skip":
        search.notices.append(f"{counted(len(missing), 'listed name')} without an image left out (unpaired: skip)")
    elif missing:
        titles = f"name in {LISTS} without an image", f"names in {LISTS} without an image"
        return match, [Problem("no_image", *titles, missing, "remove them from the lists, or set unpaired: skip", SKIP.settings)]
    return match, []


# The pairs of one part


def pair_part(
    search: Search, folders: Sequence[Folders], part: Part, preferred: Rule | None = None, lists: SplitLists | None = None
) -> PartPairs:
    """The pairs of a part. `preferred` is the rule of the training names; of what is in none of `lists` nothing is taken. Where
    files do not pair up, results of predict among them are left out: looking for those opens every file.

    Raises DataError where there is a question to answer first.
    """
    before = replace(search, notices=[*search.notices], classes=[*search.classes])
    found: PartPairs | DataError
    try:
        found = _pair_part(search, folders, part, preferred, lists)
    except DataError as error:
        found = error
    if isinstance(found, PartPairs) and found.match.is_complete:
        _tell_predicted_masks(search, found)
        return found
    results = _find_results(folders, search.config.mask_suffix)
    if results:
        search.notices, search.classes, search.has_background = before.notices, before.classes, before.has_background
        search.notices.append(describe_results(results))
        folders = [replace(each, without=(*each.without, *results)) for each in folders]
        return _pair_part(search, folders, part, preferred, lists)
    if isinstance(found, DataError):
        raise found
    return found


def _tell_predicted_masks(search: Search, found: PartPairs) -> None:
    """Says so where masks are results of predict; beside their images they are taken for masks only if mask_suffix says so."""
    mask = found.pairs[0].mask if found.pairs else None
    if mask is None or not is_result(mask):
        return
    written = f"masks in {found.folders[0].masks} were written by predict, such as {mask.name}"
    if found.folders[0].images == found.folders[0].masks and not search.config.mask_suffix:
        raise DataError(f"{written}; delete them, or set mask_suffix={mask.suffix} to train on what a model saw")
    search.notices.append(f"{written}: training learns from what a model saw")


def _find_results(folders: Sequence[Folders], mask_suffix: str) -> list[Path]:
    """Files that predict wrote among images, or beside masks that it did not write: training may be meant to use its masks."""
    images, masks = ([file.path for file in _list_side(folders, side)] for side in ("images", "masks"))
    found = [path for path in images if is_result(path)]
    if folders[0].images == folders[0].masks:
        others = [path for path in images if path not in set(found)]
        return found if holds_masks_too(others, mask_suffix) else []
    results = [path for path in masks if is_result(path)]
    return [*found, *(results if len(results) < len(masks) else [])]


def _pair_part(
    search: Search, folders: Sequence[Folders], part: Part, preferred: Rule | None, lists: SplitLists | None
) -> PartPairs:
    mask_suffix, place = search.config.mask_suffix, folders[0].masks
    is_one_folder = len(folders) == 1 and folders[0].images == place
    images, masks = _side_by_side(folders[0], mask_suffix) if is_one_folder else _two_folders(folders, mask_suffix)
    match = best_match(images, masks, folders[0].images, preferred)
    problems: list[Problem] = []
    if lists is not None:
        match, problems = _restrict(search, match, lists)
    if match.is_complete:
        return _plain(search, folders, match, part, problems)
    _refuse_channels(images, masks, folders[0].images)
    if (in_step := name_matching.offset_match(match)) is not None and search.config.unpaired != "skip":
        if search.config.unpaired == "error":
            raise _ask_about_offset(match, in_step)
        return _plain(search, folders, in_step, part)
    if not is_one_folder and not mask_suffix:
        parts = converted.find_object_files(images, masks, folders)
        if parts is None:
            parts = converted.find_class_files(images, masks, folders[0].images)
        if parts:
            return _from_several_files(search, folders, images, parts, part)
        match = _choose_kind(search, place, images, masks, match)
    return _plain(search, folders, match, part, problems)


def _from_several_files(
    search: Search, folders: Sequence[Folders], images: Sequence[File], parts: Sequence[converted.MaskParts], part: Part
) -> PartPairs:
    """Each image has files of objects or of classes; or one file, in a folder of its own or of its batch."""
    place = folders[0].masks
    names = sorted({name for each in parts for name, _ in each.files if name})
    paired = {each.image for each in parts}
    match = Match(Rule(), [], [image for image in images if image not in paired], [])
    as_classes: dict[str, Any] = {"num_classes": len(names) + 1, "class_names": ["background", *names]}
    is_one_each = all(len(each.files) == 1 for each in parts)
    if is_one_each and not (names and (search.classes or search.names_are_given(names))):
        if len(names) > 1:
            lines = "\n".join(f"  {line}" for line in setting_lines(as_classes))
            listing = first_few((f"{name}/" for name in names), 10)
            search.notices.append(
                f"the folders in {place} are taken as parts of one set: {listing}; if they are classes, set:\n{lines}"
            )
        pairs = [(each.image, each.image._replace(path=each.files[0][1])) for each in parts]
        return _plain(search, folders, match._replace(pairs=pairs), part)
    value = path_in(search.data_dir, place)
    one_of_them: list[dict[str, Any]] = [*({"mask_dir": f"{value}/{name}"} for name in names), as_classes]
    are_sure = bool(search.classes) or search.names_are_given(names)
    has_folders = all((place / name).is_dir() for name in names)
    if has_folders and not are_sure and any(converted.READERS.search(name) for name in names):
        raise Question(f"mask_dir: {place} holds masks of several readers: {', '.join(names)}", *one_of_them)
    if names and not search.classes:
        given = list(search.config.class_names or ())
        search.classes = next((order for order in (given, given[1:]) if sorted(order) == names), names)
    unknown = sorted(set(names) - set(search.classes))
    if unknown:
        raise DataError(f"{place} holds classes that the training masks do not have: {first_few(unknown)}")
    merged = converted.merge_masks(search.converter, part, parts, search.classes if names else [])
    search.has_background |= merged.has_background
    search.notices += merged.notices
    if merged.readings is not None and not search.names_are_given(names):
        first, second, iou = merged.readings
        same = f"mask_dir: {first}/ and {second}/ in {place} mark the same pixels (IoU {iou:.2f}); two readings of one thing?"
        raise Question(same, *one_of_them)
    rule = f"a mask file for each object, {sum(len(each.files) for each in parts)} files merged"
    rule = f"a mask file for each class: {', '.join(search.classes)}" if names else rule
    found = PartPairs(folders, match, sorted(merged.pairs, key=lambda pair: pair.name), rule)
    if merged.unreadable:
        found.problems.append(Problem("unreadable", *UNREADABLE, tuple(merged.unreadable), "repair these files"))
    return _with_message(search, found)


def _plain(search: Search, folders: Sequence[Folders], match: Match, part: Part, problems: Sequence[Problem] = ()) -> PartPairs:
    """Each mask is a file of its own, or a page of a stack."""
    pairs = [Pair(f"{image.folder}{image.stem}", image.path, mask.path) for image, mask in match.pairs]
    pairs.sort(key=lambda pair: pair.name)
    same = match.rule == Rule() and all(composed(pair.image.stem) == composed(pair.mask.stem) for pair in pairs)
    rule = "same names" if same or not pairs else f"paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}"
    if same and pairs and folders[0].images == folders[0].masks:
        rule = f"paired like {pairs[0].image.name} ↔ {pairs[0].mask.name}"
    stacks = [pair for pair in pairs if converted.has_pages(pair.mask) and len(converted.page_types(pair.mask)) > 1]
    if stacks:
        pages = converted.split_into_pages(search.converter, part, stacks)
        pairs = sorted([*(pair for pair in pairs if pair not in stacks), *pages], key=lambda pair: pair.name)
        rule += f", {counted(len(pages), 'page')} of {counted(len(stacks), 'stack')}"
    return _with_message(search, PartPairs(folders, match, pairs, rule, [*problems]))


def _with_message(search: Search, found: PartPairs) -> PartPairs:
    """With the message about its problems and about files without a partner; with unpaired: skip, those are left out."""
    match, messages = found.match, [describe_problems(found.problems)] if found.problems else []
    if not match.is_complete and search.config.unpaired == "skip" and found.pairs:
        files = [*match.images, *match.masks]
        search.notices.append(f"{_describe_counts(match)} left out (unpaired: skip), e.g. {files[0].path}")
    elif not match.is_complete:
        first, around = found.folders[0], found.folders[0].images.parent.parent / "*"
        places = (first.images, first.masks) if len(found.folders) == 1 else (around / first.images.name, around / first.masks.name)
        messages.insert(0, _describe_unpaired(match, *places, search.config.mask_suffix))
        fix = "add the partner, or set mask_suffix, image_dir and mask_dir so that they pair up"
        for kind, noun, files, what in (
            ("no_mask", "image", match.images, f"without a mask in {places[1]}"),
            ("no_image", "mask", match.masks, f"without an image in {places[0]}"),
        ):
            if files:
                lines = tuple(str(file.path) for file in sorted(files))
                found.problems.append(Problem(kind, f"{noun} {what}", f"{noun}s {what}", lines, fix))
    found.message = "\n".join(messages)
    return found


def _describe_unpaired(match: Match, image_folder: Path, mask_folder: Path, mask_suffix: str) -> str:
    """What the best rule pairs, and what it leaves unpaired."""
    images, masks, rule = sorted(match.images), sorted(match.masks), match.rule
    lines = ["images and masks do not pair up:"]
    if match.pairs:
        image, mask = min(match.pairs)
        num_images = len(match.pairs) + len(images)
        lines.append(f"the best rule pairs {len(match.pairs)} of {num_images} images, {image.path.name} with {mask.path.name}")
    else:
        lines.append("no rule pairs any of them (same names, a common prefix or suffix, zeros before numbers)")
    if images:
        ending = mask_suffix if mask_suffix.lower() in IMAGE_EXTENSIONS else f"{mask_suffix}.png"
        wanted = f"{rule.mask[0]}{rule.image_core(images[0].stem)}{rule.mask[1]}{ending}"
        paths = first_few(image.path for image in images)
        lines.append(f"{counted(len(images), 'image')} without a mask in {mask_folder} (such as {wanted}): {paths}")
    if masks:
        paths = first_few(mask.path for mask in masks)
        lines.append(f"{counted(len(masks), 'mask')} without an image in {image_folder}: {paths}")
    here, there = (sorted({file.folder or "./" for file in files}) for files in (images, masks))
    if images and masks and not set(here) & set(there):
        lines.append(
            f"a pair must be in one subfolder, but these images are in {first_few(here)} and these masks in {first_few(there)}"
        )
    return "\n  ".join(lines)


def _describe_counts(match: Match) -> str:
    sides = (
        (match.images, "image without a mask", "images without a mask"),
        (match.masks, "mask without an image", "masks without an image"),
    )
    return " and ".join(counted(len(files), one, many) for files, one, many in sides if files)


def _ask_about_offset(match: Match, in_step: Match) -> Question:
    (image, mask), (last_image, last_mask) = min(in_step.pairs), max(in_step.pairs)
    ranges = [f"{first.path.name} to {last.path.name}" for first, last in ((image, last_image), (mask, last_mask))]
    offset = Choice(f"{image.path.name} belongs to {mask.path.name}, and so on", {"unpaired": "offset"})
    skip = Choice(f"the numbers are right; {_describe_counts(match)} left out", {"unpaired": "skip"})
    return Question(
        f"images and masks are numbered differently: {ranges[0]}, and as many masks, {ranges[1]}",
        *([offset, skip] if len(match.pairs) > 1 else [offset]),
    )


def _choose_kind(search: Search, place: Path, images: Sequence[File], masks: Sequence[File], match: Match) -> Match:
    """The match without further kinds of masks, if each image has a mask of its own name; raises Question for several others."""
    kinds = name_matching.mask_kinds(images, masks)
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


def _refuse_channels(images: Sequence[File], masks: Sequence[File], image_folder: Path) -> None:
    """Raises DataError where each channel of an image is a file of its own, as in nnU-Net."""
    if not name_matching.is_channel_folder(image_folder):
        return
    cases: dict[str, list[str]] = {mask.folder + mask.stem: [] for mask in masks}
    for image in images:
        cases.get(image.folder + name_matching.CHANNEL.sub("", image.stem), []).append(image.path.name)
    case, files = max(cases.items(), key=lambda item: len(item[1]), default=("", []))
    if len(files) > 1:
        raise DataError(
            f"image_dir: {image_folder} has {len(files)} channel files for {case} ({first_few(files)}); "
            "an image must be one file: merge its channels, or set image_dir to a folder with one channel"
        )


# Which files are images and which are masks


def _list_side(folders: Sequence[Folders], side: str) -> list[File]:
    """The files of one of the two folders; if the other one is inside it, its files are not this one's."""
    found: list[File] = []
    for each in folders:
        folder, other = (each.images, each.masks) if side == "images" else (each.masks, each.images)
        inner = (other,) if other != folder and other.is_relative_to(folder) else ()
        found += name_files(list_files(folder, (*inner, *each.without)), folder, each.name)
    return found


def _two_folders(folders: Sequence[Folders], mask_suffix: str) -> tuple[list[File], list[File]]:
    images, masks = (_list_side(folders, side) for side in ("images", "masks"))
    for noun, files, folder in (("images", images, folders[0].images), ("masks", masks, folders[0].masks)):
        if not files:
            others = sorted({path.suffix for path in folder.rglob("*") if path.suffix and path.is_file()})
            there = f"; it holds {first_few(others)} files" if others else ""
            raise DataError(f"no {noun} in {folder}; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}{there}")
    if mask_suffix:
        named = [mask for mask in masks if name_matching.has_ending(mask, mask_suffix)]
        if not named:
            raise _ask_for_suffix(f"mask_suffix: no name in {folders[0].masks} ends in {mask_suffix!r}", images, masks)
        masks = name_matching.without_ending(named, mask_suffix)
    _refuse_shared_names(images, masks)
    return images, masks


def _side_by_side(folders: Folders, mask_suffix: str) -> tuple[list[File], list[File]]:
    """Images and masks of one folder, told apart by mask_suffix, by their extensions if they share their names, or by the one mark
    (such as _mask) that leaves no file unpaired."""
    folder = folders.images
    files = name_files(list_files(folder, folders.without), folder)
    if mask_suffix:
        return _by_suffix(files, folder, mask_suffix)
    if _shared_names(files):
        return _by_extension(files, folder)
    counts = Counter(mark for file in files for mark in mask_marks(file.stem))
    by_mark: dict[str, tuple[list[File], list[File]]] = {  # images and masks by each mark
        mark: ([], []) for mark, count in sorted(counts.items()) if count < len(files)
    }
    for file in files:
        its_marks = mask_marks(file.stem)
        for mark, images_and_masks in by_mark.items():
            images_and_masks[mark in its_marks].append(file)
    complete = [mark for mark in by_mark if best_match(*by_mark[mark], folder).is_complete]
    if len(complete) == 1 or (not complete and len(by_mark) == 1):
        return by_mark[(complete or list(by_mark))[0]]
    unclear = f"cannot tell images from masks in {folder}"
    if not by_mark:
        text = f"{unclear}: no file is named like a mask (X_mask, X_label, gt_X, ...)"
        raise _ask_for_suffix(f"{text}; set image_dir and mask_dir to two folders, mask_suffix, or {BY_CSV[4:]}", files, files)
    listing = ", ".join(f"{mark} ({counts[mark]} files)" for mark in by_mark)
    endings = (next((file.stem[-len(mark) :] for file in files if file.stem.lower().endswith(mark)), None) for mark in by_mark)
    raise Question(
        f"{unclear}: several kinds of names could be masks: {listing}",
        *({"mask_suffix": ending} for ending in endings if ending),
    )


def _by_suffix(files: Sequence[File], folder: Path, mask_suffix: str) -> tuple[list[File], list[File]]:
    chosen = {file for file in files if name_matching.has_ending(file, mask_suffix)}
    masks = name_matching.without_ending((file for file in files if file in chosen), mask_suffix)
    stems = {(mask.folder, mask.stem) for mask in masks}

    def is_another_mask(file: File) -> bool:
        """Whether it is a second annotator's, of an image that has a mask already."""
        cores = [core for mark in mask_marks(file.stem) for core in (file.stem[: -len(mark)], file.stem[len(mark) :])]
        return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems

    images = [file for file in files if file not in chosen and not is_another_mask(file)]
    if not masks or not images:
        wrong = f"mask_suffix: {'every' if masks else 'no'} name in {folder} ends in {mask_suffix!r}"
        raise _ask_for_suffix(wrong, files, files)
    _refuse_shared_names(images, masks)
    return images, masks


def _by_extension(files: Sequence[File], folder: Path) -> tuple[list[File], list[File]]:
    """a.jpg is an image and a.png its mask, if all names that two files share are like this."""
    shared = [{_extension(file) for file in found} for found in _shared_names(files)]
    text = f"cannot tell images from masks in {folder}:\n  {_list_shared(files)}"
    others = sorted({extension for found in shared for extension in found} - {".jpg"})
    has_marks = 0 < sum(bool(mask_marks(file.stem)) for file in files) < len(files)
    if all(len(found) == 2 for found in shared) and (has_marks or any(".jpg" not in found for found in shared)):
        raise Question(text, *({"mask_suffix": extension} for extension in others))
    masks = [file for file in files if _extension(file) in others]
    images = [file for file in files if _extension(file) == ".jpg"]
    is_clear = len(masks) + len(images) == len(files) and not _shared_names(masks) and not _shared_names(images)
    if not is_clear or any(len(found) != 2 for found in shared):
        raise DataError(f"{text}\n  {BY_CSV}, which says what belongs together")
    return images, masks


def _refuse_shared_names(images: Sequence[File], masks: Sequence[File]) -> None:
    problems = [_list_shared(files) for files in (images, masks) if _shared_names(files)]
    if not problems:
        return
    text = "images and masks do not pair up:\n  " + "\n  ".join(problems)
    extensions = sorted({_extension(file) for found in _shared_names(masks) for file in found})
    if len(extensions) > 1 and not _shared_names(images):
        raise Question(text, *({"mask_suffix": extension} for extension in extensions))
    raise DataError(f"{text}\n  {BY_CSV}, which says what belongs together")


def _extension(file: File) -> str:
    extension = file.path.suffix.lower()
    return {".jpeg": ".jpg", ".tiff": ".tif"}.get(extension, extension)


def _shared_names(files: Iterable[File]) -> list[list[File]]:
    """The files of each name that several have."""
    by_name: dict[tuple[str, str], list[File]] = defaultdict(list)
    for file in files:
        by_name[file.folder, file.stem].append(file)
    return [found for found in by_name.values() if len(found) > 1]


def _list_shared(files: Iterable[File]) -> str:
    lines = [f"{' and '.join(str(file.path) for file in found)} have the same name" for found in _shared_names(files)]
    return "\n  ".join([*lines[:NUM_NAMED], *([f"and {len(lines) - NUM_NAMED} more"] if len(lines) > NUM_NAMED else [])])


def _ask_for_suffix(text: str, images: Sequence[File], masks: Sequence[File]) -> Question:
    """Offers what follows the name of an image in at least half as many names of masks as the most frequent ending does."""
    names = {(image.folder, image.stem) for image in images}
    counts = Counter(
        mask.stem[found.start() :]
        for mask in masks
        for found in name_matching.SEPARATOR.finditer(mask.stem)
        if (mask.folder, mask.stem[: found.start()]) in names
    )
    most = max(counts.values(), default=0)
    endings = [ending for ending, count in counts.most_common() if 2 * count > most]
    examples = first_few([mask.path.name for mask in masks])
    return Question(f"{text}; there is {examples}", *({"mask_suffix": ending} for ending in endings))
