"""The pairs of a dataset, found in its folders by names. What leaves files unpaired, or could be meant several ways, is
described with the settings that decide it. Masks that are not one file for each image become such files."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

from unet_trainer.config.schema import Config
from unet_trainer.data import converted
from unet_trainer.data import names as file_names
from unet_trainer.data import pairs as pairing
from unet_trainer.data.annotations import describe_other_files, inside
from unet_trainer.data.formats import layouts, merged, stacks
from unet_trainer.data.formats.layouts import Group, Layout
from unet_trainer.data.formats.table import describe_unread_tables
from unet_trainer.data.listing import Listing, describe_results, refuse_missing, walk
from unet_trainer.data.names import CHANNEL, PARTS, File, Match, Rule, best_match, split_by_endings
from unet_trainer.data.pairs import FoundPairs, Pair, Part, Problem, Question, composed, first_few, path_in
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.row_writers import is_result
from unet_trainer.system import input_files
from unet_trainer.system.console import counted

TO_CSV = "split_file to a CSV with the columns image and mask"
TO_OTHERS = f"image_dir and mask_dir to other folders, or {TO_CSV}"
LISTS = "ImageSets/Segmentation"  # of PASCAL VOC: train.txt, val.txt, test.txt, trainval.txt, a name in each line
REPAIR = "repair these files"

SplitLists = Mapping[str, Part | None]  # name of a listed image → its part; None: it is to be divided


def find(place: Place, config: Config) -> list[Pair] | None:
    """The pairs in the folders of data_dir; raises DataError where images and masks cannot be told apart."""
    refuse_missing(place.data_dir, [config.image_dir, config.mask_dir], place.listing)
    found = _find_in_folders(config, place)
    others = describe_other_files(place.data_dir, place.listing) if found.problems or config.unpaired == "skip" else []
    pairs = place.take(found)
    place.notices += [*describe_unread_tables(place.data_dir, place.listing), *others]
    return pairs


def _find_in_folders(config: Config, place: Place) -> FoundPairs:
    """Where files do not pair up, results of predict among them are left out: looking for those opens every file."""
    data_dir, listing, converter = place.data_dir, place.listing, place.converter
    layout = layouts.find_layout(data_dir, config, listing)
    search = _Search(config, converter, listing, layout)
    try:
        found = search.find()
        if search.is_complete or not (results := _find_results(layout, config.mask_suffix)):
            return found
    except DataError:
        if not (results := _find_results(layout, config.mask_suffix)):
            raise
    layout = layouts.find_layout(data_dir, config, listing, without={*results})
    return _Search(config, converter, listing, layout, [describe_results(results)]).find()


def _find_results(layout: Layout, mask_suffix: str) -> list[Path]:
    """Files that predict wrote among images, or beside masks that it did not write: training may be meant to use its
    masks."""
    found: list[File] = []
    for images, masks in layout.parts.values():
        results = [file for file in images.files if is_result(file.path)]
        others = sorted({*images.files} - {*results})
        if images is not masks or layouts.holds_masks_too(others, mask_suffix):
            found += results
        if masks is not None and images is not masks:
            of_masks = [file for file in masks.files if is_result(file.path)]
            found += of_masks if len(of_masks) < len(masks.files) else []
    return [file.path for file in found]


@dataclass
class _Paired:
    """The pairs of one part, sorted by name, and how its names were matched."""

    images: Group
    masks: Group
    match: Match
    pairs: list[Pair] = field(default_factory=list)
    rule: str = "same names"
    problems: list[Problem] = field(default_factory=list)

    @property
    def unpaired(self) -> str:
        images, masks = len(self.match.images), len(self.match.masks)
        return f"{counted(images, 'image')} without a mask, {counted(masks, 'mask')} without an image"


@dataclass
class _Search:
    """The parts of a dataset while they are searched, what they share, and what is to be reported at the end."""

    config: Config
    converter: converted.Converter
    listing: Listing
    layout: Layout
    notices: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # names of those that have a file each, without the background
    has_background: bool = False  # some pixels belong to none of them
    origins: dict[Path, str] = field(default_factory=dict)  # what messages call images made from several files
    lists: SplitLists | None = None
    is_complete: bool = True  # every file has its partner

    def find(self) -> FoundPairs:
        """The pairs of all parts."""
        layout, config, division = self.layout, self.config, self.layout.divided
        if "val" not in layout.parts:
            self.lists, division = self._read_split_lists()
        parts = [train := self._pair_part("train")]
        if "val" in layout.parts:
            parts.append(self._pair_part("val", train.match.rule))
        pairs = [pair for part in parts for pair in part.pairs]
        if not division:
            self._name_unread_lists(pairs)
        incomplete = [part for part in parts if not part.match.is_complete]
        self.is_complete = not incomplete
        test = [pair for pair in pairs if pair.part == "test"]
        if self.lists is None and "test" in layout.parts:
            test = self._find_test(train.match.rule)
        pairs = [pair for pair in pairs if pair.part != "test"]
        if division or config.split == "blocks" or len({pair.group for pair in pairs}) < 2:
            pairs = [replace(pair, group="") if pair.group else pair for pair in pairs]
        problems = [problem for part in parts for problem in part.problems]
        if incomplete and config.unpaired == "skip" and pairs:
            for part in incomplete:
                example = [*part.match.images, *part.match.masks][0].path
                self.notices.append(f"{part.unpaired} left out (unpaired: skip), e.g. {example}")
        elif incomplete:
            problems += _describe_unpaired(incomplete, len(pairs))
        classes = (*(["background"] if self.has_background else []), *self.classes) if self.classes else None
        rule = f"{layout.phrase}, {train.rule}" + (f"; {division}" if division else "")
        is_open = train.masks is not train.images and config.image_dir is None and config.mask_dir is None
        folders = (train.images.value, train.masks.value) if is_open else None
        notices = tuple(self.notices)
        return FoundPairs(tuple(pairs), rule, tuple(problems), tuple(test), (), notices, classes, folders=folders)

    def _find_test(self, rule: Rule) -> list[Pair]:
        """The pairs that neither train nor validate. What is wrong with them stops no training."""
        images, masks = self.layout.parts["test"]
        place = path_in(self.converter.data_dir, images.place)
        if masks is None:
            self.notices.append(f"{counted(len(images.files), 'test image')} without masks in {place}/")
            return []
        try:
            part = replace(self, notices=[])._pair_part("test", rule)
        except DataError as error:
            self.notices.append(f"{place}/ cannot be used by evaluate: {error}")
            self.is_complete = False
            return []
        self.is_complete &= part.match.is_complete
        self.notices += [] if part.match.is_complete else [f"{part.unpaired} in {place}/, left out"]
        self.notices += [pairing.describe_problems(part.problems)] if part.problems else []
        return part.pairs

    def _read_split_lists(self) -> tuple[SplitLists | None, str]:
        """The lists of VOC beside the folders of images (one set for each folder, as in VOC2007/ and VOC2012/), and how
        messages name them; None if one has none. Images in no list do not belong to the dataset."""
        images, _ = self.layout.parts["train"]
        parts: dict[str, Part | None] = {}
        names: dict[str, None] = {}
        for sequence, folder in images.folders.items():
            place = folder.parent / LISTS
            names_there = self.listing.entries(place).files if place.is_dir() else []
            texts = {Path(name).stem.lower(): name for name in names_there if name.endswith(".txt")}
            files = {PARTS[name]: text for name, text in texts.items() if name in PARTS}  # of CVAT: Validation.txt
            if "trainval" in texts:
                files.setdefault("train", texts["trainval"])
            if "train" not in files:
                return None, ""
            known = {f"{image.folder}{image.stem}" for image in images.files}
            # A name in two lists belongs to the later part: it must not train.
            for part in (part for part in get_args(Part) if part in files):
                with inside(place / files[part]):
                    lines = input_files.read_text(place / files[part], errors="surrogateescape").splitlines()
                # A line is a name, or its first word is: the rest then says whether a class occurs.
                for line in filter(None, map(str.strip, lines)):
                    name = composed(f"{sequence}{line}")
                    parts[name if name in known else composed(f"{sequence}{line.split()[0]}")] = part
                names[files[part]] = None
        if "val" not in parts.values():
            parts = {name: None if part == "train" else part for name, part in parts.items()}
        return parts, f"{LISTS}/{' and '.join(names)}"

    def _keep_listed(self, images: list[File], lists: SplitLists, problems: list[Problem]) -> list[File]:
        """The images that a list names. Adds the problem of listed names without an image."""
        listed = {f"{image.folder}{image.stem}": image for image in images if f"{image.folder}{image.stem}" in lists}
        missing = tuple(name for name, part in lists.items() if part != "test" and name not in listed)
        if len(listed) < len(images):
            self.notices.append(f"{counted(len(images) - len(listed), 'image')} in no list of {LISTS} left out")
        if missing and self.config.unpaired == "skip":
            self.notices.append(f"{counted(len(missing), 'listed name')} without an image left out (unpaired: skip)")
        elif missing:
            fix = "add the images, remove the names from the lists, or set unpaired: skip"
            what = f"in {LISTS} without an image"
            problems.append(Problem("no_image", "name", what, missing, fix, pairing.SKIP.settings))
        return [*listed.values()]

    def _name_unread_lists(self, pairs: Sequence[Pair]) -> None:
        """Adds a notice of text files that are named after a part, and begin with the name of an image or are empty."""
        names: set[str] = set()
        unread: dict[Part, Path] = {}
        for file in walk(self.converter.data_dir, listing=self.listing, endings=(".txt",)):
            part = file_names.part_in([file.stem])
            if part is not None and part not in unread:
                names = names or {name for pair in pairs for name in (pair.image.name, pair.image.stem)}
                with contextlib.suppress(OSError), input_files.open_file(file) as content:
                    words = content.read(2**12).decode("utf-8-sig", "replace").split()[:1]
                    if not words or words[0].replace("\\", "/").rpartition("/")[2] in names:
                        unread[part] = file
        if unread:
            first, *others = (unread[part] for part in get_args(Part) if part in unread)
            files = " and ".join([str(first), *(file.name for file in others)])
            fix = "to divide the images as they do, set split_file to a CSV with the columns image, mask and split"
            self.notices.append(f"{files} {'are' if others else 'is'} not read; {fix}")

    def _pair_part(self, part: Part, known: Rule | None = None) -> _Paired:
        """The pairs of a part. `known`: the rule of the training names. Raises DataError where there is a question."""
        image_group, mask_group = self.layout.parts[part]
        assert mask_group is not None  # test without masks is not paired
        mask_suffix, is_one_folder = self.config.mask_suffix, image_group is mask_group
        images, masks = image_group.files, mask_group.files
        if is_one_folder:
            images, masks = _split_one_folder(image_group, mask_suffix)
        elif mask_suffix and not (masks := file_names.with_ending(masks, mask_suffix)):
            text = f"mask_suffix: no name in {mask_group.place} ends in {mask_suffix!r}"
            raise _ask_for_suffix(text, images, mask_group.files)
        _refuse_same_names(images, masks)
        problems: list[Problem] = []
        if self.lists is not None:
            images = self._keep_listed(images, self.lists, problems)
        images, channels = self._join_channels(images, masks, image_group.place, part, problems)
        match = best_match(images, masks, known)
        if self.lists is not None:  # masks of other images, and test images without one, do not matter
            unpaired = [image for image in match.images if self.lists[image.folder + image.stem] != "test"]
            match = match._replace(images=unpaired, masks=[])
        found = _Paired(image_group, mask_group, match, problems=problems)
        parts: merged.MaskParts | None = None  # the files of the objects or classes of each image
        if not match.is_complete and not mask_suffix:
            if not is_one_folder:
                parts = merged.find_object_files(images, masks, image_group.is_in_sequences)
                parts = merged.find_class_files(images, masks) if parts is None else parts
            parts = parts or merged.find_ending_files(images, masks)
            by_ending = {} if parts or is_one_folder else file_names.masks_by_ending(images, masks)
            endings = file_names.common_endings(by_ending)
            num_with_mask = len({image for its in by_ending.values() for image in its})
            if "" not in endings and sum(len(by_ending[ending]) for ending in endings) > num_with_mask:
                text = f"mask_suffix: {mask_group.place} holds {len(endings)} kinds of masks for the same images"
                raise Question(text, *({"mask_suffix": ending} for ending in endings))
        if not parts or not self._merge_files(found, images, parts, part):
            self._take_plain(found, part)
            found.rule += channels
        return found

    def _part_of(self, name: str, part: Part) -> Part | None:
        """Of a pair, where the data is divided. The pages of a file that is in a list are named below it."""
        if self.lists is None:
            return part if part == "test" or "val" in self.layout.parts else None
        return self.lists[name] if name in self.lists else self._part_of(name.rpartition("/")[0], part)

    def _merge_files(self, found: _Paired, images: Sequence[File], parts: merged.MaskParts, part: Part) -> bool:
        """Merges the files of objects or of classes that each image has. Or each has one file, in a folder of its own
        or of its batch: then only the match is set, and False returned."""
        place, wanted = found.masks.place, list(self.config.class_names or ())  # the first may be the background
        names = sorted({name for files in parts.values() for name, _ in files if name})
        found.match = Match(Rule(), [], [image for image in images if image not in parts], [])
        wanted = next((order for order in (wanted, wanted[1:]) if names and sorted(order) == names), [])
        if all(len(files) == 1 for files in parts.values()) and not (names and (self.classes or wanted)):
            if len(names) > 1:
                lines = pairing.setting_lines({"class_names": ["background", *names]})
                self.notices.append(f"the folders in {place} are parts of one set; if they are classes, set {lines[0]}")
            found.match.pairs.extend((image, image._replace(path=files[0][1])) for image, files in parts.items())
            return False
        self.classes = self.classes or wanted or names
        if unknown := sorted(set(names) - set(self.classes)):
            raise DataError(f"{place} holds classes that the training masks do not have: {first_few(unknown)}")
        merged_masks = merged.merge_masks(self.converter, part, parts, self.classes if names else [], self.notices)
        self.has_background |= merged_masks.has_background
        found.rule = f"a mask file for each object, {sum(map(len, parts.values()))} files merged"
        found.rule = f"a mask file for each class: {', '.join(self.classes)}" if names else found.rule
        pairs = [replace(pair, part=self._part_of(pair.name, part)) for pair in merged_masks.pairs]
        found.pairs = sorted(pairs, key=lambda pair: pair.name)
        if merged_masks.unreadable:
            found.problems.append(Problem("unreadable", *pairing.UNREADABLE, tuple(merged_masks.unreadable), REPAIR))
        return True

    def _take_plain(self, found: _Paired, part: Part) -> None:
        """Each mask is a file of its own, or a page of a stack."""
        plain, with_pages = list[Pair](), list[Pair]()
        for image, mask in found.match.pairs:
            name, origin = f"{image.folder}{image.stem}", self.origins.get(image.path, "")
            pair = Pair(name, image.path, mask.path, self._part_of(name, part), image_origin=origin)
            (with_pages if stacks.has_pages(mask.path) else plain).append(pair)
        if not plain and not with_pages:
            return
        first = min((*plain, *with_pages), key=lambda pair: pair.name)
        if found.match.rule != Rule() or composed(first.image.stem) != composed(first.mask.stem):
            found.rule = f"paired like {first.image.stem} ↔ {first.mask.stem}"
        elif found.images is found.masks:
            found.rule = f"paired like {first.image.name} ↔ {first.mask.name}"
        if found.match.is_complete and is_result(first.mask):
            what = f"masks in {found.masks.place} were written by predict, such as {first.mask.name}"
            self.notices.append(f"{what}: training learns from what a model saw")
        if with_pages:
            pages = stacks.split_into_pages(self.converter, part, sorted(with_pages, key=lambda pair: pair.name))
            plain += [replace(page, part=self._part_of(page.name, part)) for page in pages]
            found.rule += f", {counted(len(pages), 'page')} of {counted(len(with_pages), 'stack')}"
        found.pairs = sorted(plain, key=lambda pair: pair.name)

    def _join_channels(
        self, images: list[File], masks: Sequence[File], place: Path, part: Part, problems: list[Problem]
    ) -> tuple[list[File], str]:
        """The images, those whose channels are files of their own (nnU-Net: a_0000.png, a_0001.png for the mask a.png)
        joined; and what the rule says of them. Raises DataError where an image lacks channels of others."""
        if not all(CHANNEL.search(image.stem) for image in images):
            return images, ""
        cases: dict[tuple[str, str], list[File]] = defaultdict(list)
        for image in sorted(images):
            cases[image.folder, CHANNEL.sub("", image.stem)].append(image)
        names = {mask.name for mask in masks}
        if names.isdisjoint(cases) or not names.isdisjoint(image.name for image in images):
            return images, ""
        if (most := max(map(len, cases.values()))) == 1:
            is_first = all(image.stem.endswith("_0000") for image in images)
            return [file._replace(stem=stem) for (_, stem), (file,) in cases.items()] if is_first else images, ""
        conversions = []
        for (folder, stem), files in cases.items():
            wanted = [f"{stem}_{number:04d}" for number in range(most)]
            if [file.stem for file in files] != wanted:
                has = f"has {most} channel files for others, and for {folder}{stem}"
                there = first_few(file.path.name for file in files)
                raise DataError(f"image_dir: {place} {has} {there}; need {first_few(wanted)}")
            paths = [file.path for file in files]
            make = partial(merged.join_channels, paths)
            conversions.append(converted.Conversion(f"{part}/{folder}{stem}", paths, make, ".npy"))
        joined = self.converter.write("channels", None, conversions, "Joining the channels of each image:")
        if unreadable := tuple(one.problem for one in joined if one.problem):
            problems.append(Problem("unreadable", *pairing.UNREADABLE, unreadable, REPAIR))
        made = []
        for (case, files), one in zip(cases.items(), joined, strict=True):
            if not one.problem:
                made.append(File(one.path, *case))
                self.origins[one.path] = f"{files[0].path} and {len(files) - 1} more"
        return made, f", {most} files as the channels of each image"


def _describe_unpaired(parts: Sequence[_Paired], num_pairs: int) -> list[Problem]:
    """Files without a partner, each with the fix. As many of both kinds are likely numbered differently."""
    images = tuple(str(file.path) for file in sorted(file for part in parts for file in part.match.images))
    masks = tuple(str(file.path) for file in sorted(file for part in parts for file in part.match.masks))
    fix = f"set mask_suffix to what follows the image's name in the mask's name, {TO_OTHERS}"
    settings = pairing.SKIP.settings if num_pairs > 1 and len(images) != len(masks) else {}
    if settings:
        fix += f"; or, to train on the {num_pairs} pairs and leave out the others, unpaired: skip"
    elif num_pairs > 1:
        fix += "; if images and masks are numbered from different numbers, rename the masks"
    no_mask, no_image = f"without a mask in {parts[0].masks.place}", f"without an image in {parts[0].images.place}"
    advice = "add their images" if images else f"add the images; or {fix}"
    problems = [
        Problem("no_mask", "image", no_mask, images, f"add the masks; or {fix}", settings),
        Problem("no_image", "mask", no_image, masks, advice, settings),
    ]
    return [problem for problem in problems if problem.lines]


def _split_one_folder(group: Group, mask_suffix: str) -> tuple[list[File], list[File]]:
    """By mask_suffix, or by the one mark (such as _mask) or extension of masks that leaves no file unpaired."""
    files = group.files
    if mask_suffix:
        return _split_by_suffix(files, group.place, mask_suffix)
    extensions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in files:
        extensions[file.name].add(_extension(file))
    kinds: dict[str, set[File]] = defaultdict(set)  # by the mark or extension that may make them masks
    for file in files:
        same, own = extensions[file.name], _extension(file)
        by_extension = ["beside a JPEG" if ".jpg" in same else own] if len(same) > 1 and own != ".jpg" else []
        for kind in (*file_names.mask_marks(file.stem), *by_extension):
            kinds[kind].add(file)
    by_kind = {
        kind: ([file for file in files if file not in masks], [file for file in files if file in masks])
        for kind, masks in sorted(kinds.items())
        if len(masks) < len(files)
    }
    complete = [kind for kind, sides in by_kind.items() if best_match(*sides).is_complete]
    if not complete and merged.find_ending_files(*(sides := split_by_endings(files))):
        return sides
    if len(complete or by_kind) == 1:
        return by_kind[next(iter(complete or by_kind))]
    why = "several kinds of names could be masks" if by_kind else "no file is named like a mask (X_mask, gt_X, ...)"
    text = f"cannot tell images from masks in {group.place}: {why}"
    raise _ask_for_suffix(text, *split_by_endings(files), [kind for kind in by_kind if kind.startswith(".")])


def _split_by_suffix(files: Sequence[File], folder: Path, mask_suffix: str) -> tuple[list[File], list[File]]:
    masks = file_names.with_ending(files, mask_suffix)
    chosen, names = {mask.path for mask in masks}, {mask.name for mask in masks}
    images = []
    for file in files:
        is_of_another_reader = any((file.folder, rest) in names for rest in file_names.without_marks(file.stem))
        if file.path not in chosen and (file.name in names or not is_of_another_reader):
            images.append(file)
    if not masks or not images:
        wrong = f"mask_suffix: {'every' if masks else 'no'} name in {folder} ends in {mask_suffix!r}"
        raise _ask_for_suffix(wrong, *split_by_endings(files))
    return images, masks


def _refuse_same_names(images: Sequence[File], masks: Sequence[File]) -> None:
    """Raises Question where two images, or two masks, have the same name: a.png and a.bmp."""
    for files in (images, masks):
        counts = Counter(file.name for file in files)
        if twice := [file for file in files if counts[file.name] > 1]:
            text = f"images and masks do not pair up: {first_few(file.path for file in twice)} have the same name"
            extensions = sorted({_extension(file) for file in twice}) if files is masks else []
            if len(extensions) < 2:
                raise DataError(f"{text}; set {TO_CSV}, which says what belongs together")
            raise Question(text, *({"mask_suffix": extension} for extension in extensions))


def _extension(file: File) -> str:
    extension = file.path.suffix.lower()
    return {".jpeg": ".jpg", ".tiff": ".tif"}.get(extension, extension)


def _ask_for_suffix(
    text: str, images: Sequence[File], masks: Sequence[File], extensions: Sequence[str] = ()
) -> Question:
    """Offers what follows the names of images in the most names of masks."""
    endings = file_names.common_endings(file_names.masks_by_ending(images, masks))
    examples = first_few([mask.path.name for mask in (*images, *masks)])
    choices = [{"mask_suffix": ending} for ending in (*filter(None, endings), *extensions)]
    fix = "" if choices else f"; set mask_suffix, {TO_OTHERS}"
    return Question(f"{text}; there is {examples}{fix}", *choices)
