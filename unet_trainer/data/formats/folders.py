"""The pairs in folders of images and masks: explicit keys first (image_dir, mask_dir, mask_suffix); else the usual
names of folders; in them the same names of files, else names that differ by one prefix and one suffix a side, the same
for all pairs. What that leaves unpaired, or could be meant in several ways, is asked, with the settings that decide."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import describe_other_files
from unet_trainer.data.formats import merged, stacks, voc_lists
from unet_trainer.data.formats.layouts import KEYS, Layout, contents, find_layout, propose_folders
from unet_trainer.data.formats.table import describe_unread_lists, describe_unread_tables
from unet_trainer.data.listing import describe_results, refuse_missing
from unet_trainer.data.names import (
    SAME_NAMES,
    File,
    Match,
    masks_by_ending,
    match_names,
    split_by_endings,
    split_by_marks,
)
from unet_trainer.data.pairs import (
    SKIP,
    UNREADABLE,
    Pair,
    Part,
    Problem,
    Question,
    composed,
    describe_problems,
    first_few,
    path_in,
)
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import counted

SET = (
    "set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, or "
)
SET += "split_file to a CSV with the columns image and mask"
MAY_HAVE_PAGES = (".tif", ".gz", ".nii")
NUM_NAMED = 3  # files of each side
MAX_ENDINGS = 5  # in a question


def find(place: Place, config: Config) -> list[Pair]:
    """The pairs in the folders of data_dir. Raises Question where images and masks cannot be told apart."""
    refuse_missing(place.data_dir, [config.image_dir, config.mask_dir], place.listing)
    unread = describe_unread_tables(place.data_dir, place.listing)
    try:
        pairs = _find_pairs(place, config)
    except Question as question:
        if question.choices:  # there are masks, and the user has to choose
            raise
        unread += describe_other_files(place.data_dir, place.listing)
        raise Question("\n  ".join([question.text, *unread])) from None
    if place.problems or config.unpaired == "skip":
        unread += describe_other_files(place.data_dir, place.listing)
    place.notices += unread
    return pairs


def _find_pairs(place: Place, config: Config) -> list[Pair]:
    """The pairs of all parts; without test where that alone cannot be used, which stops no training."""
    layout, refusal, pairs = find_layout(place.data_dir, config, place.listing), None, list[Pair]()
    test = {file for file in (*layout.images, *layout.masks) if file.part == "test"}
    try:
        pairs = _search(place, config, layout).make_pairs()
    except DataError as error:
        refusal = error
    rest = place.fresh()
    if test and (refusal or place.problems):
        with contextlib.suppress(DataError):
            others = _search(rest, config, layout.without(test)).make_pairs()
            if not rest.problems:
                where = path_in(place.data_dir, layout.places["test"])
                why = str(refusal) if refusal else describe_problems(place.problems, NUM_NAMED)
                place.rule, place.class_names, place.folders = rest.rule, rest.class_names, rest.folders
                place.problems, place.notices = [], [*rest.notices, f"{where}/ cannot be used by evaluate: {why}"]
                return others
    if refusal:
        raise refusal
    return pairs


def _search(place: Place, config: Config, layout: Layout) -> "_Search":
    """Where files do not pair up, results of predict among them are left out: looking for those opens every file. Where
    a folder has nothing else, they stay: training may be meant to use its masks."""
    search, refusal = _Search(config, place, layout), None
    try:
        search.match_files()
        if search.is_complete:
            return search
    except Question as question:
        refusal = question
    sides = [{*files} for files in (layout.images, layout.masks)]
    found = {file for file in set.union(*sides) if is_result(file.path)}
    if results := {file for side in sides if not side <= found for file in side & found}:
        search = _Search(config, place, layout.without(results))
        search.notices.append(describe_results(sorted(file.path for file in results)))
        search.match_files()
    elif refusal:
        raise refusal
    return search


@dataclass
class _Search:
    """Images and masks that belong together by their names, what does not, and what is to be reported."""

    config: Config
    place: Place
    layout: Layout
    match: Match = field(default_factory=lambda: Match(SAME_NAMES, [], [], []))
    parts: merged.MaskParts = field(default_factory=dict)  # image → the files of its mask, where it has several
    classes: list[str] = field(default_factory=list)  # of these files, without the background; "": objects
    origins: dict[Path, str] = field(default_factory=dict)  # what messages call images made from several files
    division: str = ""  # how the images are divided into train and val, if they are
    unreadable: list[str] = field(default_factory=list)
    left_out_of_test: list[str] = field(default_factory=list)  # with what is wrong: it stops no training
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.match.images and not self.match.masks

    def match_files(self) -> None:
        """Finds which files belong together. Raises Question."""
        layout, mask_suffix, lists = self.layout, self.config.mask_suffix, voc_lists.Lists()
        images, masks = layout.images, layout.masks
        if layout.is_one_folder:
            images, masks = self._split_one_folder()
        elif mask_suffix and not (masks := _with_ending(masks, mask_suffix)):
            text = f"mask_suffix: no name in {layout.mask_dir} ends in {mask_suffix!r}"
            raise _ask_for_suffix(text, images, layout.masks)
        images = self._drop_test_without_masks(images, {mask.part for mask in masks})
        self.division = layout.division
        if not self.division:
            lists, self.division = voc_lists.read_lists(layout.image_dir, self.place.listing, images)
            images = self._keep_listed(images, lists) if lists else images
        images, self.origins, self.unreadable = merged.join_channels(self.place.converter, images, masks)
        self.match = match_names(images, masks)
        if lists:  # masks of other images, and test images without one, do not matter
            pairs = [(image._replace(part=lists[image.name]), mask) for image, mask in self.match.pairs]
            left = [image for image in self.match.images if lists[image.name] != "test"]
            self.match = Match(self.match.rule, pairs, left, [])
        if not self.is_complete and not mask_suffix:
            self._find_parts(images, masks)
        if not (self.match.pairs or self.parts or self.unreadable or self.problems):
            if layout.is_one_folder:
                self._ask_for_folders()
            where = " and ".join(map(str, dict.fromkeys([layout.image_dir, layout.mask_dir])))
            unpaired = _count_unpaired(self.match.images, self.match.masks)
            raise _ask_for_suffix(f"images and masks in {where} do not pair up: {unpaired}", images, masks)

    def _split_one_folder(self) -> tuple[list[File], list[File]]:
        """By mask_suffix, or by the one mark (such as _mask) or extension of masks that leaves no file unpaired."""
        files, mask_suffix, folder = self.layout.images, self.config.mask_suffix, self.layout.image_dir
        by_ending = split_by_endings(files)
        if mask_suffix:
            masks = _with_ending(files, mask_suffix)
            chosen, names = {mask.path for mask in masks}, {mask.name for mask in masks}
            rest = [file for file in files if file.path not in chosen]
            of_another_reader = {*split_by_endings(rest)[1]}
            images = [file for file in rest if file.name in names or file not in of_another_reader]
            if masks and images:
                return images, masks
            wrong = f"mask_suffix: {'every' if masks else 'no'} name in {folder} ends in {mask_suffix!r}"
            raise _ask_for_suffix(wrong, *by_ending)
        splits = split_by_marks(files)
        complete = [sides for sides in splits if not any(match_names(*sides)[2:])]
        if not complete and merged.find_ending_files(*by_ending):
            return by_ending
        if len(complete or splits) == 1:
            return (complete or splits)[0]
        why = "several kinds of names could be masks"
        if not splits:
            self._ask_for_folders()
            why = "no folder of masks (masks, labels, ...), and no file is named like a mask (X_mask, gt_X, ...)"
            why = f"{why}; {contents(self.layout.root, self.place.listing)}"
        raise _ask_for_suffix(f"cannot tell images from masks in {folder}: {why}", *by_ending)

    def _ask_for_folders(self) -> None:
        """Raises Question where two folders that are not named for images and masks hold files that pair up."""
        layout, place = self.layout, self.place
        if self.config.image_dir or self.config.mask_dir:
            return
        if choices := propose_folders(place.data_dir, layout.root, layout.folders):
            there = contents(layout.root, place.listing)
            raise Question(f"cannot tell the folder of images from that of masks: {there}", *choices)

    def _drop_test_without_masks(self, images: list[File], parts: set[Part | None]) -> list[File]:
        """The images; those of test may lack masks, which stops no training, those of val may not."""
        missing = [image for image in images if image.part not in {None, "train", *parts}]
        if any(image.part == "val" for image in missing):
            data_dir, val = self.place.data_dir, self.layout.places["val"]
            fix = f"{contents(data_dir, self.place.listing)}; add them, or to train and validate on one folder"
            folders = zip(KEYS.values(), (self.layout.image_dir, self.layout.mask_dir), strict=True)
            raise Question(f"no masks of {val}; {fix}", {key: path_in(data_dir, folder) for key, folder in folders})
        if missing:
            where = path_in(self.place.data_dir, self.layout.places["test"])
            self.notices.append(f"{counted(len(missing), 'test image')} without masks in {where}/")
        return [image for image in images if image.part != "test"] if missing else images

    def _keep_listed(self, images: list[File], lists: voc_lists.Lists) -> list[File]:
        """The images that a list names; others do not belong to the dataset."""
        listed = {image.name: image for image in images if image.name in lists}
        missing = tuple(name for name, part in lists.items() if part != "test" and name not in listed)
        if others := len(images) - len(listed):
            self.notices.append(f"{counted(others, 'image')} in no list of {voc_lists.LISTS} left out")
        if missing and self.config.unpaired == "skip":
            self.notices.append(f"{counted(len(missing), 'listed name')} without an image left out (unpaired: skip)")
        elif missing:
            fix, what = "add the images, or remove the names from the lists", f"in {voc_lists.LISTS} without an image"
            self.problems.append(Problem("no_image", "name", what, missing, fix, SKIP.settings))
        return [*listed.values()]

    def _find_parts(self, images: list[File], masks: list[File]) -> None:
        """Masks of several files: of objects, or of classes. Raises Question for several kinds of masks."""
        layout, parts = self.layout, merged.MaskParts()
        if not layout.is_one_folder:
            parts = merged.find_object_files(images, masks, "*" in layout.image_dir.parts)
            parts = parts or merged.find_class_files(images, masks)
        if not (parts := parts or merged.find_ending_files(images, masks)):
            by_ending = {} if layout.is_one_folder else masks_by_ending(images, masks)
            with_mask, endings = {image for its in by_ending.values() for image in its}, _common(by_ending)
            if "" not in endings and sum(len(by_ending[ending]) for ending in endings) > len(with_mask):
                text = f"mask_suffix: {layout.mask_dir} holds {len(endings)} kinds of masks for the same images"
                raise Question(text, *({"mask_suffix": ending} for ending in endings))
            return
        self.match = Match(SAME_NAMES, [], [image for image in images if image not in parts], [])
        names = sorted({name for image, files in parts.items() if image.part in (None, "train") for name, _ in files})
        wanted = [*(self.config.class_names or ())]  # the first may be the background
        self.classes = next((order for order in (wanted, wanted[1:]) if sorted(order) == names), names)
        is_single = all(len(files) == 1 for files in parts.values())
        may_be_classes = merged.hold_two_values(parts)
        if self.classes is not names or (not is_single and (names == [""] or may_be_classes)):
            self.parts = parts
        elif is_single and (len(names) == 1 or not may_be_classes):  # a folder around the masks, or batches of them
            self.match.pairs.extend((image, files[0][1]) for image, files in parts.items())
        elif is_single:
            text = f"each image has its mask in one of {layout.mask_dir}/{', '.join(names)}; if these are classes"
            raise Question(text, {"class_names": ["background", *names]})
        else:
            text = f"mask_dir: {layout.mask_dir} holds several kinds of masks for the same images: {', '.join(names)}"
            above = "" if self.division or layout.division else f"{path_in(self.place.data_dir, layout.mask_dir)}/"
            raise Question(text, *({"mask_dir": f"{above}{name}"} for name in names))

    def make_pairs(self) -> list[Pair]:
        """The pairs, with masks that are files of their own; the place keeps what there is to say of them."""
        place, layout, config = self.place, self.layout, self.config
        pairs, how = self._merge_parts() if self.parts else self._take_plain()
        if self.division or config.split == "blocks" or len({pair.group for pair in pairs}) < 2:
            pairs = [replace(pair, group="") if pair.group else pair for pair in pairs]
        if self.unreadable:
            self.problems.append(Problem("unreadable", *UNREADABLE, tuple(self.unreadable), "repair these files"))
        if bad := self.left_out_of_test:
            self.notices.append(f"{len(bad)} of test left out: {first_few(bad, NUM_NAMED)}")
        self._describe_unpaired(sum(pair.part != "test" for pair in pairs))
        if not self.division:
            self.notices += describe_unread_lists(place.data_dir, place.listing, pairs)
        if not layout.is_one_folder and config.image_dir is None and config.mask_dir is None:
            place.folders = layout.values
        place.rule = f"{layout.rule}, {how}" + (f"; {self.division}" if self.division else "")
        place.notices, place.problems = self.notices, self.problems
        return sorted(pairs, key=lambda pair: (pair.part or "", pair.name))

    def _take_plain(self) -> tuple[list[Pair], str]:
        """Each mask is a file of its own, or a page of a stack."""
        pairs, with_pages, how = list[Pair](), list[Pair](), "same names"
        for image, mask in self.match.pairs:
            pair = Pair(image.name, image.path, mask.path, image.part)
            if self.origins:
                pair = replace(pair, image_origin=self.origins.get(pair.image, ""))
            has_pages = mask.extension in MAY_HAVE_PAGES and stacks.has_pages(pair.mask)
            (with_pages if has_pages else pairs).append(pair)
        if not self.match.pairs:
            return [], how
        image, mask = min(self.match.pairs, key=lambda pair: (pair[0].part not in (None, "train"), pair[0].name))
        if self.match.rule != SAME_NAMES or self.config.mask_suffix or self.layout.is_one_folder:
            how = f"paired like {image.file_name} ↔ {mask.file_name}"
        if self.is_complete and is_result(mask.path):
            what = f"masks in {self.layout.mask_dir} were written by predict, such as {mask.file_name}"
            self.notices.append(f"{what}: training learns from what a model saw")
        for part in sorted({pair.part for pair in with_pages}, key=str):
            of_part = sorted((pair for pair in with_pages if pair.part == part), key=lambda pair: pair.name)
            try:
                pages = stacks.split_into_pages(self.place.converter, part or "train", of_part)
            except DataError as error:
                self._refuse(part, str(error))
                continue
            pairs += [replace(page, part=part) for page in pages]
            how += f", {counted(len(pages), 'page')} of {counted(len(of_part), 'stack')}"
        return pairs, how + (", the channels of each image joined" if self.origins else "")

    def _merge_parts(self) -> tuple[list[Pair], str]:
        """One mask for each image: of its classes, or of its objects if there are no classes."""
        classes, parts = [name for name in self.classes if name], dict[File, list[tuple[str, File]]]()
        for image, files in self.parts.items():
            if unknown := {name for name, _ in files} - {*self.classes}:
                what = f"{image.path} has masks of {first_few(sorted(unknown))}"
                self._refuse(image.part, f"{what}; need the classes that train has")
            else:
                parts[image] = files
        pairs, written = list[Pair](), merged.merge_masks(self.place.converter, parts, classes)
        for (image, files), mask in zip(parts.items(), written, strict=True):
            if not mask.problem:
                origin = merged.name_files(files)
                pairs.append(Pair(image.name, image.path, mask.path, image.part, mask_origin=origin))
            elif image.part == "test":
                self._refuse("test", mask.problem)
            else:
                self.unreadable.append(mask.problem)
        if not classes:
            return pairs, f"a mask file for each object, {sum(map(len, self.parts.values()))} files merged"
        self.notices += merged.describe_overlap(written, classes)
        has_background = any(mask.facts.get("background") for mask in written)
        self.place.class_names = (*(["background"] if has_background else []), *classes)
        return pairs, f"a mask file for each class: {', '.join(classes)}"

    def _refuse(self, part: Part | None, problem: str) -> None:
        """Raises DataError, but for a part that training does not touch."""
        if part != "test":
            raise DataError(problem)
        self.left_out_of_test.append(problem)

    def _describe_unpaired(self, num_pairs: int) -> None:
        """Files without a partner, each with the fix; of test only a notice."""
        layout, sides = self.layout, (self.match.images, self.match.masks)
        if any(of_test := [[file for file in files if file.part == "test"] for files in sides]):
            where = path_in(self.place.data_dir, layout.places["test"])
            self.notices.append(f"{_count_unpaired(*of_test)} in {where}/, left out")
        others = [[file for file in files if file.part != "test"] for files in sides]
        if any(others) and self.config.unpaired == "skip":
            example = [*others[0], *others[1]][0].path
            self.notices.append(f"{_count_unpaired(*others)} left out (unpaired: skip), e.g. {example}")
            return
        images, masks = (tuple(sorted(str(file.path) for file in files)) for files in others)
        fix, settings = SET, dict[str, Any]()
        if num_pairs > 1 and len(images) == len(masks):  # those that do pair up may be wrong
            fix += "; if images and masks are numbered from different numbers, rename the masks"
        elif num_pairs > 1:
            fix += f"; or, to train on the {num_pairs} pairs and leave out the others, unpaired: skip"
            settings = {**SKIP.settings}
        no_mask, no_image = f"without a mask in {layout.mask_dir}", f"without an image in {layout.image_dir}"
        fixes = f"add the masks; or {fix}", "add their images" if images else f"add the images; or {fix}"
        if twice := _same_names(others):
            fixes, settings = (f"{twice} have the same name: rename or remove those that have no partner",) * 2, {}
        problems = (
            Problem("no_mask", "image", no_mask, images, fixes[0], settings),
            Problem("no_image", "mask", no_image, masks, fixes[1], settings),
        )
        self.problems += [problem for problem in problems if problem.lines]


def _same_names(sides: Sequence[Sequence[File]]) -> str:
    """The files of a side that share their name with another one: a.jpg and a.png. Empty if there are none."""
    twice: list[str] = []
    for files in sides:
        counts = Counter((file.part, file.name) for file in files)
        twice += [file.file_name for file in files if counts[file.part, file.name] > 1]
    return first_few(twice, NUM_NAMED) if twice else ""


def _count_unpaired(images: Sequence[File], masks: Sequence[File]) -> str:
    return f"{counted(len(images), 'image')} without a mask, {counted(len(masks), 'mask')} without an image"


def _with_ending(files: list[File], mask_suffix: str) -> list[File]:
    """The files whose names end in mask_suffix, without it; it may also be an extension: .png."""
    if mask_suffix.lower() in IMAGE_EXTENSIONS:
        return [file for file in files if file.file_name.lower().endswith(mask_suffix.lower())]
    suffix = composed(mask_suffix)
    return [file._replace(stem=file.stem.removesuffix(suffix)) for file in files if file.stem.endswith(suffix)]


def _common(by_ending: dict[str, dict[File, File]]) -> list[str]:
    """The endings that are at least half as frequent as the most frequent; Cityscapes' ids come first."""
    most = max(map(len, by_ending.values()), default=0)
    common = [ending for ending, its in by_ending.items() if 2 * len(its) > most]
    common.sort(key=lambda ending: ("trainids" not in ending.lower(), "labelids" not in ending.lower(), ending))
    return common[:MAX_ENDINGS]


def _ask_for_suffix(text: str, images: list[File], masks: list[File]) -> Question:
    """Offers what follows the names of images in the most names of masks, or the extensions of one name."""
    files = masks or images
    share_names = len({(file.part, file.name) for file in files}) < len(files)
    extensions = sorted({file.extension for file in files}) if share_names else []
    endings = [ending for ending in (*_common(masks_by_ending(images, masks)), *extensions) if ending]
    sides = ([file.folder + file.file_name for file in side] for side in (images, masks) if side)
    there = f"{text}; there is {' beside '.join(first_few(names, NUM_NAMED) for names in sides)}"
    return Question(there if endings else f"{there}; {SET}", *({"mask_suffix": ending} for ending in endings))
