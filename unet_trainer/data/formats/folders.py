"""The pairs in folders of images and masks: explicit keys first (image_dir, mask_dir, mask_suffix); else the usual
names of folders; in them the same names of files, else names that differ by one prefix and one suffix a side, the same
for all pairs. What that leaves unpaired, or could be meant in several ways, is asked, with the settings that decide."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from unet_trainer.config.schema import Config
from unet_trainer.data import names
from unet_trainer.data.annotations import describe_other_files
from unet_trainer.data.formats import merged, stacks, voc_lists
from unet_trainer.data.formats.layouts import KEYS, Layout, find_layout
from unet_trainer.data.formats.table import describe_unread_tables
from unet_trainer.data.listing import describe_results, refuse_missing
from unet_trainer.data.names import SAME_NAMES, File, Match, match_names
from unet_trainer.data.pairs import SKIP, FoundPairs, Pair, Problem, Question, first_few, path_in
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import counted

SET = (
    "set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, or "
    "split_file to a CSV with the columns image and mask"
)
UNPAIRED = ("no_mask", "no_image")  # kinds of problems that `unpaired: skip` solves
NUM_NAMED = 3  # files of each side
MAX_ENDINGS = 5  # in a question


def find(place: Place, config: Config) -> list[Pair]:
    """The pairs in the folders of data_dir. Raises Question where images and masks cannot be told apart."""
    refuse_missing(place.data_dir, [config.image_dir, config.mask_dir], place.listing)
    unread = describe_unread_tables(place.data_dir, place.listing)
    try:
        found = _find_pairs(place, config)
    except Question as question:
        if question.choices:  # there are masks, and the user has to choose
            raise
        unread += describe_other_files(place.data_dir, place.listing)
        raise Question("\n  ".join([question.text, *unread])) from None
    unread += describe_other_files(place.data_dir, place.listing) if found.problems else []
    problems = [each for each in found.problems if each.kind not in UNPAIRED or config.unpaired != "skip"]
    skipped = (each for each in found.problems if each not in problems)
    skips = [f"{each.title} left out (unpaired: skip), e.g. {each.lines[0]}" for each in skipped]
    return place.take(replace(found, problems=tuple(problems), notices=(*found.notices, *skips, *unread)))


def _find_pairs(place: Place, config: Config) -> FoundPairs:
    """Where not everything pairs up, it is tried without the results of predict among the files (looking for those
    opens every file), and then without the test part, which stops no training."""
    layout = find_layout(place.data_dir, config, place.listing)
    found = _try(place, config, layout)
    if _is_whole(found):
        return found
    sides = [{*files} for files in (layout.images, layout.masks)]
    results = {file for file in set.union(*sides) if is_result(file.path)}
    # Where a folder has nothing else, they stay: training may be meant to use its masks.
    if results := {file for side in sides if not side <= results for file in side & results}:
        layout, what = layout.without(results), describe_results(sorted(file.path for file in results))
        found = _try(place, config, layout)
        found = found if isinstance(found, DataError) else replace(found, notices=(what, *found.notices))
    test = {file for file in (*layout.images, *layout.masks) if file.part == "test"}
    if test and not _is_whole(found) and _is_whole(rest := _try(place, config, layout.without(test))):
        where = path_in(place.data_dir, layout.places["test"])
        why = str(found) if isinstance(found, DataError) else found.blocking_message
        return replace(rest, notices=(*rest.notices, f"{where}/ cannot be used by evaluate: {why}"))
    if isinstance(found, DataError):
        raise found
    return found


def _try(place: Place, config: Config, layout: Layout) -> FoundPairs | DataError:
    try:
        return _Pairing(place, config, layout).find()
    except DataError as error:
        return error


def _is_whole(found: FoundPairs | DataError) -> TypeGuard[FoundPairs]:
    return isinstance(found, FoundPairs) and not found.problems


class _Pairing:
    """Pairs the files of a layout, and keeps what there is to say of the others."""

    def __init__(self, place: Place, config: Config, layout: Layout) -> None:
        self.place, self.config, self.layout = place, config, layout
        self.problems: list[Problem] = []
        self.notices: list[str] = []

    def find(self) -> FoundPairs:
        """Raises DataError, which is a Question where the user has to choose."""
        layout, config, lists, division = self.layout, self.config, voc_lists.Lists(), self.layout.division
        images, masks = self._choose_sides()
        images = self._drop_test_without_masks(images, masks)
        if not division:
            lists, division = voc_lists.read_lists(layout.image_dir, self.place.listing, images)
            images = self._keep_listed(images, lists) if lists else images
        images, origins, problems = merged.join_channels(self.place.converter, images, masks)
        self.problems += problems
        match, parts, classes = match_names(images, masks), merged.MaskParts(), list[str]()
        if lists:  # masks of other images, and test images without one, do not matter
            listed = [(image._replace(part=lists[image.name]), mask) for image, mask in match.pairs]
            match = Match(match.rule, listed, [image for image in match.images if lists[image.name] != "test"], [])
        if not match.is_complete and not config.mask_suffix:
            parts = merged.find_parts(images, masks, layout.is_one_folder, "*" in layout.image_dir.parts)
        if parts:
            classes = self._classes_of(parts, bool(division))
            single = [] if classes else [(image, files[0][1]) for image, files in parts.items()]
            match = Match(SAME_NAMES, single, [image for image in images if image not in parts], [])
        has_train = any(image.part in (None, "train") for image, _ in match.pairs)
        if not (has_train or parts or self.problems):
            if layout.is_one_folder:
                self._propose_folders()
            where = " and ".join(map(str, dict.fromkeys([layout.image_dir, layout.mask_dir])))
            text = f"images and masks in {where} do not pair up: {_count_unpaired(match.images, match.masks)}"
            raise _ask_for_suffix(text, match.images or images, match.masks or masks)
        if classes:
            found = merged.merge_masks(self.place.converter, parts, classes)
        else:
            found = self._take_plain(match, origins)
        pairs = found.pairs
        if division or config.split == "blocks" or len({pair.group for pair in pairs}) < 2:
            pairs = tuple(replace(pair, group="") if pair.group else pair for pair in pairs)
        self._describe_unpaired(match, sum(pair.part != "test" for pair in pairs))
        is_free = not layout.is_one_folder and config.image_dir is None and config.mask_dir is None
        said = replace(
            found,
            rule=f"{layout.rule}, {found.rule}" + (f"; {division}" if division else ""),
            problems=(*found.problems, *self.problems),
            notices=(*self.notices, *found.notices),
            folders=layout.values if is_free else None,
        )
        return said.with_pairs(sorted(pairs, key=lambda pair: (pair.part or "", pair.name)))

    def _choose_sides(self) -> tuple[list[File], list[File]]:
        """Images and masks: by mask_suffix or by their folders; of one folder by the marks of masks (such as _mask), or
        by endings that are classes or objects. Raises Question."""
        layout, files, suffix = self.layout, self.layout.images, self.config.mask_suffix
        if suffix:
            images, masks = names.split_by_suffix(files, layout.masks, suffix)
            if images and masks:
                return images, masks
            text = f"mask_suffix: {'every' if masks else 'no'} name in {layout.mask_dir} ends in {suffix!r}"
            sides = names.split_by_endings(files) if layout.is_one_folder else (files, layout.masks)
            raise _ask_for_suffix(text, *sides)
        if not layout.is_one_folder:
            return files, layout.masks
        by_mark, by_ending = names.split_by_marks(files), names.split_by_endings(files)
        if not match_names(*by_mark).is_complete and merged.find_ending_files(*by_ending):
            return by_ending
        if by_mark[1]:
            return by_mark
        self._propose_folders()
        why = "no folder of masks (masks, labels, ...), and no file is named like a mask (X_mask, gt_X, ...)"
        text = f"cannot tell images from masks in {self.layout.image_dir}: {why}; {self.layout.search.contents()}"
        raise _ask_for_suffix(text, *by_ending)

    def _propose_folders(self) -> None:
        """Raises Question where two folders that are not named for images and masks hold files that pair up."""
        if choices := self.layout.search.propose_folders():
            there = self.layout.search.contents()
            raise Question(f"cannot tell the folder of images from that of masks: {there}", *choices)

    def _drop_test_without_masks(self, images: list[File], masks: list[File]) -> list[File]:
        """The images; those of test may lack masks, which stops no training, those of val may not."""
        layout, data_dir = self.layout, self.place.data_dir
        missing = {image.part for image in images} - {mask.part for mask in masks} - {None, "train"}
        if "val" in missing:
            there = f"no masks of {layout.places['val']}; {layout.search.contents(data_dir)}"
            folders = zip(KEYS.values(), (layout.image_dir, layout.mask_dir), strict=True)
            settings = {key: path_in(data_dir, folder) for key, folder in folders}
            raise Question(f"{there}; add them, or to train and validate on one folder", settings)
        if not missing:
            return images
        kept = [image for image in images if image.part != "test"]
        where, number = path_in(data_dir, layout.places["test"]), counted(len(images) - len(kept), "test image")
        self.notices.append(f"{number} without masks in {where}/")
        return kept

    def _keep_listed(self, images: list[File], lists: voc_lists.Lists) -> list[File]:
        """The images that a list names; others do not belong to the dataset."""
        listed = {image.name: image for image in images if image.name in lists}
        if others := len(images) - len(listed):
            self.notices.append(f"{counted(others, 'image')} in no list of {voc_lists.LISTS} left out")
        if missing := tuple(name for name, part in lists.items() if part != "test" and name not in listed):
            fix, what = "add the images, or remove the names from the lists", f"in {voc_lists.LISTS} without an image"
            self.problems.append(Problem("no_image", "name", what, missing, fix, SKIP.settings))
        return [*listed.values()]

    def _classes_of(self, parts: merged.MaskParts, is_divided: bool) -> list[str]:
        """The class of each mask file of an image, "" for objects; none if the one mask of each image is in one of
        several folders. Raises Question where the folders may be something else than classes."""
        mask_dir = self.layout.mask_dir
        found = {name for image, files in parts.items() if image.part in (None, "train") for name, _ in files}
        wanted = [*(self.config.class_names or ())]  # the first may be the background
        if order := next((order for order in (wanted, wanted[1:]) if {*order} == found), None):
            return order
        is_single = all(len(files) == 1 for files in parts.values())
        may_be_classes = merged.hold_two_values(chain(*parts.values()))
        if is_single and (len(found) == 1 or not may_be_classes):  # a folder around the masks, or batches of them
            return []
        if found == {""} or (may_be_classes and not is_single):
            return sorted(found)
        if is_single:
            text = f"each image has its mask in one of {mask_dir}/{', '.join(sorted(found))}; if these are classes"
            raise Question(text, {"class_names": ["background", *sorted(found)]})
        text = f"mask_dir: {mask_dir} holds several kinds of masks for the same images: {', '.join(sorted(found))}"
        above = "" if is_divided else f"{path_in(self.place.data_dir, mask_dir)}/"
        raise Question(text, *({"mask_dir": f"{above}{name}"} for name in sorted(found)))

    def _take_plain(self, match: Match, origins: dict[Path, str]) -> FoundPairs:
        """Each mask is a file of its own, or a page of a stack."""
        pairs, paged, how = list[Pair](), set[Pair](), "same names"
        for image, mask in match.pairs:
            path = image.path
            pair = Pair(image.name, path, mask.path, image.part, image_origin=origins[path] if origins else "")
            pairs.append(pair)
            if mask.file_name.lower().endswith(stacks.ENDINGS) and stacks.has_pages(pair.mask):
                paged.add(pair)
        if not pairs:
            return FoundPairs((), how)
        first = pairs[0]  # of train, if that has any
        if match.rule != SAME_NAMES or self.config.mask_suffix or self.layout.is_one_folder:
            how = f"paired like {first.image.name} ↔ {first.mask.name}"
        if match.is_complete and is_result(first.mask):
            what = f"masks in {self.layout.mask_dir} were written by predict, such as {first.mask.name}"
            self.notices.append(f"{what}: training learns from what a model saw")
        if paged:
            pages = stacks.split_into_pages(self.place.converter, sorted(paged, key=lambda pair: pair.name))
            pairs = [*pages, *(pair for pair in pairs if pair not in paged)]
            how += f", {counted(len(pages), 'page')} of {counted(len(paged), 'stack')}"
        return FoundPairs(tuple(pairs), how + (", the channels of each image joined" if origins else ""))

    def _describe_unpaired(self, match: Match, num_pairs: int) -> None:
        """Files without a partner, each with the fix; of test only a notice."""
        layout, sides = self.layout, (match.images, match.masks)
        if any(of_test := [[file for file in files if file.part == "test"] for files in sides]):
            where = path_in(self.place.data_dir, layout.places["test"])
            self.notices.append(f"{_count_unpaired(*of_test)} in {where}/, left out")
        left = [[file for file in files if file.part != "test"] for files in sides]
        images, masks = (tuple(sorted(str(file.path) for file in files)) for files in left)
        fix, settings = SET, dict[str, Any]()
        if num_pairs > 1 and len(images) == len(masks):  # those that do pair up may be wrong
            fix += "; if images and masks are numbered from different numbers, rename the masks"
        elif num_pairs > 1:
            fix += f"; or, to train on the {num_pairs} pairs and leave out the others, unpaired: skip"
            settings = {**SKIP.settings}
        fixes = f"add the masks; or {fix}", "add their images" if images else f"add the images; or {fix}"
        stems = Counter((file.place, file.stem) for files in left for file in files)
        if twice := [file.file_name for files in left for file in files if stems[file.place, file.stem] > 1]:
            what = f"{first_few(twice, NUM_NAMED)} have the same name: rename or remove those that have no partner"
            fixes, settings = (what, what), {}
        no_mask, no_image = f"without a mask in {layout.mask_dir}", f"without an image in {layout.image_dir}"
        problems = (
            Problem("no_mask", "image", no_mask, images, fixes[0], settings),
            Problem("no_image", "mask", no_image, masks, fixes[1], settings),
        )
        self.problems += [problem for problem in problems if problem.lines]


def _count_unpaired(images: Sequence[File], masks: Sequence[File]) -> str:
    return f"{counted(len(images), 'image')} without a mask, {counted(len(masks), 'mask')} without an image"


def _ask_for_suffix(text: str, images: list[File], masks: list[File]) -> Question:
    """Offers what follows the names of images in the most names of masks (Cityscapes' ids come first), or the
    extensions of one name."""
    by_ending, files = names.masks_by_ending(images, masks), masks or images
    most = max(map(len, by_ending.values()), default=0)
    endings = [ending for ending, its in by_ending.items() if ending and 2 * len(its) > most]
    endings.sort(key=lambda ending: ("trainids" not in ending.lower(), "labelids" not in ending.lower(), ending))
    if len({(file.part, file.name) for file in files}) < len(files):
        endings += sorted({file.extension for file in files})
    sides = ([file.folder + file.file_name for file in side] for side in (images, masks) if side)
    there = f"{text}; there is {' beside '.join(first_few(its, NUM_NAMED) for its in sides)}"
    return Question(
        there if endings else f"{there}; {SET}", *({"mask_suffix": ending} for ending in endings[:MAX_ENDINGS])
    )
