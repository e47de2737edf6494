"""The pairs of a dataset, found in its folders: those of train, val and test, or of the lists that divide them.

Files pair up by their names; only those that may be results of predict are opened. What leaves files unpaired, or could
be meant in several ways, is described with the settings that decide it. Masks that are not one file for each image
become such files."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from unet_trainer.config.schema import Config
from unet_trainer.datasets import converted, layouts, name_matching
from unet_trainer.datasets import pairs as pairing
from unet_trainer.datasets.layouts import PARTS, Group, Layout, Listing
from unet_trainer.datasets.name_matching import File, Match, Rule, best_match, mask_marks, with_ending
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, Problem, Question, composed, first_few, path_in
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS
from unet_trainer.images.row_writers import is_result
from unet_trainer.system import input_files
from unet_trainer.system.console import Console, counted

TO_FOLDERS = "image_dir and mask_dir to other folders"
TO_CSV = "split_file to a CSV with the columns image and mask"
LISTS = "ImageSets/Segmentation"  # of PASCAL VOC: train.txt, val.txt, test.txt, trainval.txt, a name in each line

SplitLists = dict[str, Part | None]  # name of a listed image → its part; None: it is to be divided


@dataclass
class Search:
    """What the parts of a dataset share while they are searched, and what is to be reported at the end."""

    config: Config
    converter: converted.Converter
    listing: Listing
    notices: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # names of those that have a file each, without the background
    has_background: bool = False  # some pixels belong to none of them
    origins: dict[Path, str] = field(default_factory=dict)  # what messages call images made from several files


@dataclass
class Paired:
    """The pairs of one part, sorted by name, and how its names were matched."""

    images: Group
    masks: Group
    match: Match
    pairs: list[Pair] = field(default_factory=list)
    rule: str = "same names"
    problems: list[Problem] = field(default_factory=list)

    @property
    def unpaired(self) -> str:
        """3 images without a mask and 1 mask without an image."""
        nouns = ("image without a mask", "images without a mask"), ("mask without an image", "masks without an image")
        sides = zip((self.match.images, self.match.masks), nouns, strict=True)
        return " and ".join(counted(len(files), *noun) for files, noun in sides if files)


def find_in_folders(
    config: Config, data_dir: Path, console: Console | None = None, listing: Listing | None = None
) -> FoundPairs:
    """The pairs in the folders of data_dir; raises DataError where images and masks cannot be told apart.

    Where files do not pair up, results of predict among them are left out: looking for those opens every file.
    """
    listing = listing or Listing()
    search = Search(config, converted.Converter(data_dir, Path(config.checkpoint_dir), console), listing)
    find_layout = partial(layouts.find_layout, data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    layout = find_layout(listing=listing)
    try:
        found, is_complete = _pair_parts(search, layout)
        if is_complete or not (results := _find_results(layout, config.mask_suffix)):
            return found
    except DataError:
        if not (results := _find_results(layout, config.mask_suffix)):
            raise
    again = Search(config, search.converter, listing, [layouts.describe_results(results)])
    return _pair_parts(again, find_layout({*results}, listing))[0]


def _pair_parts(search: Search, layout: Layout) -> tuple[FoundPairs, bool]:
    """The pairs of all parts, and whether every file has its partner."""
    is_divided, config = "val" in layout.parts, search.config
    lists, division = (None, layout.divided) if is_divided else _read_split_lists(search, layout.parts["train"][0])
    train = _pair_part(search, layout, "train", lists=lists)
    parts, pairs = [train], train.pairs
    if lists is not None:
        pairs = [replace(pair, part=_listed_part(pair.name, lists)) for pair in pairs]
    elif is_divided:
        val = _pair_part(search, layout, "val", train.match.rule)
        pairs = [*(replace(pair, part="train") for pair in pairs), *(replace(pair, part="val") for pair in val.pairs)]
        parts.append(val)
    elif unread := _find_unread_lists(search, pairs):
        fix = "to divide the images as they do, set split_file to a CSV with the columns image, mask and split"
        listing = " and ".join([str(unread[0]), *(file.name for file in unread[1:])])
        search.notices.append(f"{listing} {'is' if len(unread) == 1 else 'are'} not read; {fix}")
    if division or config.split == "blocks" or len({pair.group for pair in pairs}) < 2:
        pairs = [replace(pair, group="") for pair in pairs]  # else the slices of a volume stay on one side
    test, is_test_complete = [pair for pair in pairs if pair.part == "test"], True
    if lists is None and "test" in layout.parts:
        test, is_test_complete = _find_test(search, layout, train.match.rule)
    pairs = [pair for pair in pairs if pair.part != "test"]
    incomplete = [part for part in parts if not part.match.is_complete]
    problems = [problem for part in parts for problem in part.problems]
    if incomplete and config.unpaired == "skip" and pairs:
        for part in incomplete:
            example = [*part.match.images, *part.match.masks][0].path
            search.notices.append(f"{part.unpaired} left out (unpaired: skip), e.g. {example}")
    elif incomplete:
        problems += _describe_unpaired(incomplete, len(pairs))
    classes = (*(["background"] if search.has_background else []), *search.classes) if search.classes else None
    rule = f"{layout.phrase}, {train.rule}" + (f"; {division}" if division else "")
    is_open = train.masks is not train.images and config.image_dir is None and config.mask_dir is None
    folders = (train.images.value, train.masks.value) if is_open else None
    notices = tuple(search.notices)
    found = FoundPairs(tuple(pairs), rule, tuple(problems), tuple(test), (), notices, classes, folders=folders)
    return found, is_test_complete and not incomplete


def _describe_unpaired(parts: Sequence[Paired], num_pairs: int) -> list[Problem]:
    """Files without a partner, each with the fix; unpaired: skip is one if there are pairs to train on. As many images
    as masks without a partner are likely numbered from different numbers: then the pairs are wrong ones."""
    images = tuple(str(file.path) for file in sorted(file for part in parts for file in part.match.images))
    masks = tuple(str(file.path) for file in sorted(file for part in parts for file in part.match.masks))
    fix = f"set mask_suffix to what follows the image's name in the mask's name, {TO_FOLDERS}, or {TO_CSV}"
    settings = pairing.SKIP.settings if num_pairs > 1 and len(images) != len(masks) else {}
    if settings:
        fix += f"; or, to train on the {num_pairs} pairs and leave out the others, unpaired: skip"
    elif num_pairs > 1:
        fix += "; if images and masks are numbered from different numbers, rename the masks"
    match, how = parts[0].match, "no rule pairs any of them: same names, a common prefix or suffix"
    if match.pairs:
        (image, mask), total = min(match.pairs), len(match.pairs) + len(match.images)
        how = f"the best rule pairs {len(match.pairs)} of {total}, {image.path.name} with {mask.path.name}"
    no_mask = f"without a mask in {parts[0].masks.place} ({how})"
    no_image = f"without an image in {parts[0].images.place}"
    advice = "add their images" if images else f"add the images; or {fix}"
    problems = [Problem("no_mask", "image", no_mask, images, f"add the masks; or {fix}", settings)] if images else []
    return problems + ([Problem("no_image", "mask", no_image, masks, advice, settings)] if masks else [])


def _find_test(search: Search, layout: Layout, rule: Rule) -> tuple[list[Pair], bool]:
    """The pairs that neither train nor validate, and whether they are complete. What is wrong with them stops no
    training."""
    images, masks = layout.parts["test"]
    place = path_in(search.converter.data_dir, images.place)
    if masks is None:
        search.notices.append(f"{counted(len(images.files), 'test image')} without masks in {place}/")
        return [], True
    try:
        part = _pair_part(replace(search, notices=[]), layout, "test", rule)
    except DataError as error:
        search.notices.append(f"{place}/ cannot be used by evaluate: {error}")
        return [], False
    search.notices += [f"{part.unpaired} in {place}/, left out"] if part.unpaired else []
    search.notices += [pairing.describe_problems(part.problems)] if part.problems else []
    return [replace(pair, part="test") for pair in part.pairs], part.match.is_complete


def _find_results(layout: Layout, mask_suffix: str) -> list[Path]:
    """Files that predict wrote among images, or beside masks that it did not write: training may be meant to use its
    masks."""
    found: list[Path] = []
    for images, masks in layout.parts.values():
        results = [file for file in images.files if is_result(file.path)]
        others = [file for file in images.files if file not in {*results}]
        if images is masks and not layouts.holds_masks_too(others, mask_suffix):
            results = []
        if masks is not None and images is not masks:
            of_masks = [file for file in masks.files if is_result(file.path)]
            results += of_masks if len(of_masks) < len(masks.files) else []
        found += [file.path for file in results]
    return found


# Lists of names that divide the images


def _read_split_lists(search: Search, images: Group) -> tuple[SplitLists | None, str]:
    """The lists of VOC beside the folders of images (one set for each folder, as in VOC2007/ and VOC2012/), and how
    messages name them; None if one has none. Images in no list do not belong to the dataset."""
    parts: SplitLists = {}
    names: dict[str, None] = {}
    known = {f"{image.folder}{image.stem}" for image in images.files}
    for sequence, folder in images.folders.items():
        place = folder.parent / LISTS
        names_there = search.listing.entries(place).files if place.is_dir() else []
        texts = {Path(name).stem.lower(): name for name in names_there if name.endswith(".txt")}
        files = {PARTS[name]: text for name, text in texts.items() if name in PARTS}  # of CVAT: Validation.txt
        if "trainval" in texts:
            files.setdefault("train", texts["trainval"])
        if "train" not in files:
            return None, ""
        # A name in two lists belongs to the later part: it must not train.
        for part, text in sorted(files.items(), key=lambda item: get_args(Part).index(item[0])):
            try:
                lines = input_files.read_text(place / text, errors="surrogateescape").splitlines()
            except OSError as error:
                raise DataError(f"{place / text} cannot be read ({error.strerror})") from None
            # A line is a name, or its first word is: the rest then says whether a class occurs.
            for line in filter(None, map(str.strip, lines)):
                name = composed(f"{sequence}{line}")
                parts[name if name in known else composed(f"{sequence}{line.split()[0]}")] = part
            names[text] = None
    if "val" not in parts.values():
        parts = {name: None if part == "train" else part for name, part in parts.items()}
    return parts, f"{LISTS}/{' and '.join(names)}"


def _find_unread_lists(search: Search, pairs: Sequence[Pair]) -> list[Path]:
    """The first text file for each part that is named after it, and begins with the name of an image or is empty."""
    names = {name for pair in pairs for name in (pair.image.name, pair.image.stem)}
    found: dict[Part, Path] = {}
    for file in layouts.walk(search.converter.data_dir, listing=search.listing, endings=(".txt",)):
        part = layouts.part_in([file.stem])
        if part is not None and part not in found:
            with contextlib.suppress(OSError), input_files.open_file(file) as content:
                words = content.read(2**12).decode("utf-8-sig", "replace").split()[:1]
                if not words or words[0].replace("\\", "/").rpartition("/")[2] in names:
                    found[part] = file
    return [found[part] for part in get_args(Part) if part in found]


def _listed_part(name: str, lists: SplitLists) -> Part | None:
    """Of a pair whose image is in a list. The pages of a file are named below it."""
    return lists[name] if name in lists else _listed_part(name.rpartition("/")[0], lists)


def _keep_listed(search: Search, images: list[File], lists: SplitLists) -> tuple[list[File], list[Problem]]:
    """The images that a list names; and the problem of listed names without an image."""
    listed = {f"{image.folder}{image.stem}": image for image in images if f"{image.folder}{image.stem}" in lists}
    missing = tuple(name for name, part in lists.items() if part != "test" and name not in listed)
    kept, problems = [*listed.values()], list[Problem]()
    if len(kept) < len(images):
        search.notices.append(f"{counted(len(images) - len(kept), 'image')} in no list of {LISTS} left out")
    if missing and search.config.unpaired == "skip":
        search.notices.append(f"{counted(len(missing), 'listed name')} without an image left out (unpaired: skip)")
    elif missing:
        fix = "add the images, remove the names from the lists, or set unpaired: skip"
        what = f"in {LISTS} without an image"
        problems.append(Problem("no_image", "name", what, missing, fix, pairing.SKIP.settings))
    return kept, problems


# The pairs of one part


def _pair_part(
    search: Search, layout: Layout, part: Part, rule: Rule | None = None, lists: SplitLists | None = None
) -> Paired:
    """The pairs of a part. `rule`: that of the training names; images in none of `lists` are left out.

    Raises DataError where there is a question to answer first.
    """
    image_group, mask_group = layout.parts[part]
    assert mask_group is not None  # test without masks is not paired
    mask_suffix, is_one_folder = search.config.mask_suffix, image_group is mask_group
    problems: list[Problem] = []
    images, masks = image_group.files, mask_group.files
    if is_one_folder:
        images, masks = _one_folder(image_group, mask_suffix)
    elif mask_suffix and not (masks := with_ending(masks, mask_suffix)):
        text = f"mask_suffix: no name in {mask_group.place} ends in {mask_suffix!r}"
        raise _ask_for_suffix(text, images, mask_group.files)
    _refuse_same_names(images, masks)
    if lists is not None:
        images, problems = _keep_listed(search, images, lists)
    images, channels = _join_channels(search, images, masks, image_group.place, part, problems)
    match = best_match(images, masks, image_group.place, rule)
    if lists is not None:  # masks of other images, and test images without one, do not matter
        unpaired = [image for image in match.images if lists[image.folder + image.stem] != "test"]
        match = match._replace(images=unpaired, masks=[])
    found = Paired(image_group, mask_group, match, problems=problems)
    if not match.is_complete and not mask_suffix:
        parts = None
        if not is_one_folder:
            parts = converted.find_object_files(images, masks, image_group.is_in_sequences)
            parts = converted.find_class_files(images, masks, image_group.place) if parts is None else parts
        parts = parts or converted.find_ending_files(images, masks)
        if parts and _merge_files(search, found, images, parts, part):
            return found
        if not parts and not is_one_folder:
            _refuse_kinds(mask_group.place, images, masks)
    _take_plain(search, found, part)
    found.rule += channels
    return found


def _merge_files(search: Search, found: Paired, images: Sequence[File], parts: converted.MaskParts, part: Part) -> bool:
    """Merges the files of objects or of classes that each image has. Or each has one file, in a folder of its own or of
    its batch: then only the match is set, and False returned."""
    place, wanted = found.masks.place, list(search.config.class_names or ())
    names = sorted({name for files in parts.values() for name, _ in files if name})
    found.match = Match(Rule(), [], [image for image in images if image not in parts], [])
    as_classes: dict[str, Any] = {"num_classes": len(names) + 1, "class_names": ["background", *names]}
    named = next((order for order in (wanted, wanted[1:]) if names and sorted(order) == names), [])  # [0]: background
    is_sure = bool(search.classes or named)
    if all(len(files) == 1 for files in parts.values()) and not (names and is_sure):
        if len(names) > 1:
            lines = "\n".join(f"  {line}" for line in pairing.setting_lines(as_classes))
            listing = f"{first_few((f'{name}/' for name in names), 10)}; if they are classes, set:\n{lines}"
            search.notices.append(f"the folders in {place} are taken as parts of one set: {listing}")
        found.match.pairs.extend((image, image._replace(path=files[0][1])) for image, files in parts.items())
        return False
    has_folders = all((place / name).is_dir() for name in names)
    all_files = [] if has_folders else [(image, *file) for image, files in parts.items() for file in files]
    ends = {
        name: path.stem.removeprefix(image.path.stem) for image, name, path in all_files if name not in ("", path.stem)
    }
    if ends and not is_sure:
        listing = ", ".join(f"{ends[name]} ({name})" for name in names)
        what = f"masks in {place} are taken as those of classes by the endings of their names: {listing}"
        search.notices.append(f"{what}; to train on one of them alone, set mask_suffix: {ends[names[0]]}")
    search.classes = search.classes or named or names
    if unknown := sorted(set(names) - set(search.classes)):
        raise DataError(f"{place} holds classes that the training masks do not have: {first_few(unknown)}")
    merged = converted.merge_masks(search.converter, part, parts, search.classes if names else [], search.notices)
    search.has_background |= merged.has_background
    if not is_sure and (merged.are_alike or (has_folders and any(map(name_matching.READERS.search, names)))):
        text = f"{' and '.join(names)} in {place} look like readings of one thing"
        if has_folders:
            folders = [{"mask_dir": f"{path_in(search.converter.data_dir, place)}/{name}"} for name in names]
            raise Question(f"mask_dir: {text}", *folders, as_classes)
        raise Question(f"mask_suffix: {text}", *({"mask_suffix": ends[name]} for name in names if ends), as_classes)
    found.rule = f"a mask file for each object, {sum(map(len, parts.values()))} files merged"
    found.rule = f"a mask file for each class: {', '.join(search.classes)}" if names else found.rule
    found.pairs = sorted(merged.pairs, key=lambda pair: pair.name)
    if unreadable := tuple(merged.unreadable):
        found.problems.append(Problem("unreadable", *pairing.UNREADABLE, unreadable, "repair these files"))
    return True


def _take_plain(search: Search, found: Paired, part: Part) -> None:
    """Each mask is a file of its own, or a page of a stack. Those of predict, beside their images, only if mask_suffix
    says so."""
    pairs = [
        Pair(f"{image.folder}{image.stem}", image.path, mask.path, image_origin=search.origins.get(image.path, ""))
        for image, mask in found.match.pairs
    ]
    found.pairs = pairs = sorted(pairs, key=lambda pair: pair.name)
    if not pairs:
        return
    image, mask = pairs[0].image, pairs[0].mask
    if found.match.rule != Rule() or any(composed(pair.image.stem) != composed(pair.mask.stem) for pair in pairs):
        found.rule = f"paired like {image.stem} ↔ {mask.stem}"
    elif found.images is found.masks:
        found.rule = f"paired like {image.name} ↔ {mask.name}"
    if found.match.is_complete and is_result(mask):
        written = f"masks in {found.masks.place} were written by predict, such as {mask.name}"
        if found.images is found.masks and not search.config.mask_suffix:
            raise DataError(f"{written}; delete them, or set mask_suffix={mask.suffix} to train on what a model saw")
        search.notices.append(f"{written}: training learns from what a model saw")
    stacks = [pair for pair in pairs if converted.has_pages(pair.mask)]
    if stacks:
        pages = converted.split_into_pages(search.converter, part, stacks)
        found.pairs = sorted([*(pair for pair in pairs if pair not in stacks), *pages], key=lambda pair: pair.name)
        found.rule += f", {counted(len(pages), 'page')} of {counted(len(stacks), 'stack')}"


def _refuse_kinds(place: Path, images: Sequence[File], masks: Sequence[File]) -> None:
    """Raises Question where images have several masks, none of which has their name."""
    by_ending = name_matching.masks_by_ending(images, masks)
    kinds = name_matching.common_endings(by_ending)
    with_mask = {image for its in by_ending.values() for image in its}
    if "" not in kinds and sum(len(by_ending[kind]) for kind in kinds) > len(with_mask):
        listing = ", ".join(f"{kind} ({len(by_ending[kind])})" for kind in kinds)
        text = f"mask_suffix: {place} holds {len(kinds)} kinds of masks for the same images: {listing}"
        raise Question(text, *({"mask_suffix": kind} for kind in kinds))


def _join_channels(
    search: Search, images: list[File], masks: Sequence[File], place: Path, part: Part, problems: list[Problem]
) -> tuple[list[File], str]:
    """The images, those whose channels are files of their own (nnU-Net: a_0000.png, a_0001.png for the mask a.png)
    joined; and what the rule says of them. Raises DataError where an image lacks channels of others."""
    cases: dict[tuple[str, str], list[File]] = defaultdict(list)
    for image in sorted(images):
        cases[image.folder, name_matching.CHANNEL.sub("", image.stem)].append(image)
    most, stems = max(map(len, cases.values()), default=0), {(mask.folder, mask.stem) for mask in masks}
    is_of_cases = any(case in stems for case in cases) and not any((file.folder, file.stem) in stems for file in images)
    if most < 2 or not is_of_cases:
        return images, ""
    conversions = []
    for (folder, stem), files in cases.items():
        wanted = [f"{stem}_{number:04d}" for number in range(most)]
        if [file.stem for file in files] != wanted:
            has = f"has {most} channel files for others, and for {folder}{stem}"
            there = first_few(file.path.name for file in files)
            raise DataError(f"image_dir: {place} {has} {there}; need {first_few(wanted)}")
        paths = [file.path for file in files]
        make = partial(converted.join_channels, paths)
        conversions.append(converted.Conversion(f"{part}/{folder}{stem}", paths, make, ".npy"))
    joined = search.converter.write("channels", None, conversions, "Joining the channels of each image:")
    if unreadable := tuple(one.problem for one in joined if one.problem):
        problems.append(Problem("unreadable", *pairing.UNREADABLE, unreadable, "repair these files"))
    made = []
    for (case, files), one in zip(cases.items(), joined, strict=True):
        if not one.problem:
            made.append(File(one.path, *case))
            search.origins[one.path] = f"{files[0].path} and {len(files) - 1} more"
    return made, f", {most} files as the channels of each image"


# Images and masks of one folder


def _one_folder(group: Group, mask_suffix: str) -> tuple[list[File], list[File]]:
    """Images and masks of one folder: by mask_suffix, or by the one mark (such as _mask) or extension of masks that
    leaves no file unpaired. Of a.jpg and a.png, the JPEG is the image."""
    files = group.files
    if mask_suffix:
        return _by_suffix(files, group.place, mask_suffix)
    extensions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in files:
        extensions[file.folder, file.stem].add(_extension(file))
    kinds: dict[str, set[File]] = defaultdict(set)  # by the mark or extension that may make them masks
    for file in files:
        same, own = extensions[file.folder, file.stem], _extension(file)
        by_extension = ["beside a JPEG" if same == {".jpg", own} else own] if len(same) > 1 and own != ".jpg" else []
        for kind in (*mask_marks(file.stem), *by_extension):
            kinds[kind].add(file)
    by_kind = {
        kind: ([file for file in files if file not in masks], [file for file in files if file in masks])
        for kind, masks in sorted(kinds.items())
        if len(masks) < len(files)
    }
    complete = [kind for kind, sides in by_kind.items() if best_match(*sides, group.place).is_complete]
    if not complete and converted.find_ending_files(*(sides := name_matching.split_by_endings(files))):
        return sides
    if len(complete or by_kind) == 1:
        return by_kind[next(iter(complete or by_kind))]
    unclear = f"cannot tell images from masks in {group.place}"
    if not by_kind:
        text = f"{unclear}: no file is named like a mask (X_mask, X_label, gt_X, ...)"
        raise _ask_for_suffix(f"{text}; set {TO_FOLDERS}, mask_suffix, or {TO_CSV}", files, files)
    listing = ", ".join(f"{kind} ({len(masks)} files)" for kind, (_, masks) in by_kind.items())
    names = {kind: f"{masks[0].stem}{kind if kind in IMAGE_EXTENSIONS else ''}" for kind, (_, masks) in by_kind.items()}
    choices = ({"mask_suffix": name[-len(kind) :]} for kind, name in names.items() if name.lower().endswith(kind))
    raise Question(f"{unclear}: several kinds of names could be masks: {listing}", *choices)


def _by_suffix(files: Sequence[File], folder: Path, mask_suffix: str) -> tuple[list[File], list[File]]:
    masks = with_ending(files, mask_suffix)
    chosen, stems = {mask.path for mask in masks}, {(mask.folder, mask.stem) for mask in masks}

    def is_another_mask(file: File) -> bool:
        """Whether it is a second annotator's, of an image that has a mask already."""
        cores = [core for mark in mask_marks(file.stem) for core in (file.stem[: -len(mark)], file.stem[len(mark) :])]
        return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems

    images = [file for file in files if file.path not in chosen and not is_another_mask(file)]
    if not masks or not images:
        wrong = f"mask_suffix: {'every' if masks else 'no'} name in {folder} ends in {mask_suffix!r}"
        raise _ask_for_suffix(wrong, files, files)
    return images, masks


def _refuse_same_names(images: Sequence[File], masks: Sequence[File]) -> None:
    """Raises Question where two images, or two masks, have the same name: a.png and a.bmp."""
    for files in (images, masks):
        counts = Counter((file.folder, file.stem) for file in files)
        if twice := [file for file in files if counts[file.folder, file.stem] > 1]:
            text = f"images and masks do not pair up: {first_few(file.path for file in twice)} have the same name"
            extensions = sorted({_extension(file) for file in twice}) if files is masks else []
            if len(extensions) < 2:
                raise DataError(f"{text}; set {TO_CSV}, which says what belongs together")
            raise Question(text, *({"mask_suffix": extension} for extension in extensions))


def _extension(file: File) -> str:
    extension = file.path.suffix.lower()
    return {".jpeg": ".jpg", ".tiff": ".tif"}.get(extension, extension)


def _ask_for_suffix(text: str, images: Sequence[File], masks: Sequence[File]) -> Question:
    """Offers what follows the name of an image in at least half as many names of masks as the most frequent ending
    does."""
    sides = name_matching.split_by_endings(masks) if images is masks else (images, masks)
    by_ending = name_matching.masks_by_ending(*sides)
    endings = name_matching.common_endings({ending: its for ending, its in by_ending.items() if ending})
    examples = first_few([mask.path.name for mask in masks])
    return Question(f"{text}; there is {examples}", *({"mask_suffix": ending} for ending in endings))
