"""Which mask belongs to which image: files are paired by name. Opens no image.

A pairing rule is used only if it leaves no image and no mask unpaired; otherwise the error shows what the best rule pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unet_trainer.config.schema import Config
from unet_trainer.datasets.layouts import Folders, find_layout, find_test_folders, list_files, mask_marks
from unet_trainer.datasets.name_matching import CHANNEL, File, Match, Rule, best_match, is_channel_folder
from unet_trainer.datasets.problems import Problem, first_few
from unet_trainer.images.image_files import IMAGE_EXTENSIONS, DataError
from unet_trainer.system.console import counted

Part = Literal["train", "val", "test"]

NUM_NAMED = 5  # files named in a message before "and N more"


@dataclass(frozen=True)
class Pair:
    """One image and its mask. The name is the image's path inside its folder, without extension."""

    name: str
    image: Path
    mask: Path
    part: Part | None = None  # None: the data is not divided
    group: str = ""  # pairs of one group stay on one side of the split


@dataclass(frozen=True)
class FoundPairs:
    """The pairs of a dataset, how they were found, and the files without a partner."""

    pairs: tuple[Pair, ...]
    rule: str
    blocking_message: str = ""  # why they cannot be trained on; empty if every file has its partner
    problems: tuple[Problem, ...] = ()  # the same, file by file

    @property
    def is_divided(self) -> bool:
        """Whether the data itself is divided into train and val."""
        return any(pair.part == "val" for pair in self.pairs)


def find_in_folders(config: Config, data_dir: Path) -> FoundPairs:
    """The pairs in the folders of data_dir; raises DataError where images and masks cannot be told apart."""
    layout = find_layout(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    train = _pair_files(layout.train, config.mask_suffix)
    if layout.val is None:
        return replace(train, rule=f"{layout.phrase}, {train.rule}")
    val = _pair_files(layout.val, config.mask_suffix)
    same = (train.rule == "same names") == (val.rule == "same names")
    return FoundPairs(
        tuple(replace(pair, part="train") for pair in train.pairs) + tuple(replace(pair, part="val") for pair in val.pairs),
        f"{layout.phrase}, {train.rule}{'' if same else f', val {val.rule}'}; {layout.parts}",
        "\n".join(message for message in (train.blocking_message, val.blocking_message) if message),
        train.problems + val.problems,
    )


def find_test_pairs(config: Config, data_dir: Path) -> FoundPairs | None:
    """The pairs of the data's test folder, which no training uses; None if there is none with masks. Raises DataError."""
    folders = find_test_folders(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    if folders is None:
        return None
    found = _pair_files(folders, config.mask_suffix)
    where = " + ".join(dict.fromkeys(f"{path_in(data_dir, folder)}/" for folder in (folders.images, folders.masks)))
    return replace(found, pairs=tuple(replace(pair, part="test") for pair in found.pairs), rule=f"{where}, {found.rule}")


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names belong together, sorted by name; one folder may hold both. Raises DataError."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        raise DataError(f"no folder {' and no folder '.join(missing)}; set image_dir and mask_dir to the folders' names")
    found = _pair_files(Folders(image_folder, mask_folder), mask_suffix)
    if found.blocking_message:
        raise DataError(found.blocking_message)
    return list(found.pairs)


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path) -> tuple[Pair, ...]:
    """The pairs with their groups: what the pattern matches in the path inside data_dir, or its first bracket if it has one."""
    grouped, unmatched = [], []
    for pair in pairs:
        path = path_in(data_dir, pair.image)
        match = re.search(pattern, path)
        if match is None:
            unmatched.append(path)
        else:
            grouped.append(replace(pair, group=match.group(1 if match.re.groups else 0) or ""))
    if unmatched:
        raise DataError(
            f"group_pattern: {pattern!r} matches nothing in {len(unmatched)} of {len(pairs)} paths, such as {first_few(unmatched)}"
        )
    return tuple(grouped)


def path_in(data_dir: Path, path: Path) -> str:
    """The path relative to data_dir, with slashes; the whole path if it is outside."""
    return (path.relative_to(data_dir) if path.is_relative_to(data_dir) else path).as_posix()


def _pair_files(folders: Folders, mask_suffix: str) -> FoundPairs:
    """The pairs, sorted by name, and a description of the rule that pairs them."""
    if folders.images == folders.masks:
        images, masks = _side_by_side(folders, mask_suffix)
    else:
        images, masks = _two_folders(folders, mask_suffix)
    match = best_match(images, masks, folders.images)
    blocking_message = ""
    if not match.is_complete:
        _refuse_channels(images, masks, folders)
        blocking_message = _describe_unpaired(match, folders, mask_suffix)
    pairs = [Pair(f"{image.folder}{image.path.stem}", image.path, mask.path) for image, mask in match.pairs]
    pairs.sort(key=lambda pair: pair.name)
    same = match.rule == Rule() and all(pair.image.stem == pair.mask.stem for pair in pairs)
    rule = "same names" if same or not pairs else f"paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}"
    return FoundPairs(tuple(pairs), rule, blocking_message, _unpaired_files(match, folders) if blocking_message else ())


def _unpaired_files(match: Match, folders: Folders) -> tuple[Problem, ...]:
    fix = "add the partner, remove the file, or set mask_suffix, image_dir and mask_dir so that they pair up"
    found = (
        Problem("no_mask", f"images without a mask in {folders.masks}", _paths(match.images), fix),
        Problem("no_image", f"masks without an image in {folders.images}", _paths(match.masks), fix),
    )
    return tuple(problem for problem in found if problem.lines)


def _paths(files: Sequence[File]) -> tuple[str, ...]:
    return tuple(str(file.path) for file in sorted(files))


def _two_folders(folders: Folders, mask_suffix: str) -> tuple[list[File], list[File]]:
    """The files of both folders. If one folder is inside the other, its files are not the other's; masks need the suffix."""
    sides: list[list[File]] = []
    for noun, folder, other in (("images", folders.images, folders.masks), ("masks", folders.masks, folders.images)):
        files = _name_files(list_files(folder, without=other if other.is_relative_to(folder) else None), folder)
        if not files:
            others = sorted({path.suffix for path in folder.rglob("*") if path.suffix and path.is_file()})
            there = f"; it holds {first_few(others)} files" if others else ""
            raise DataError(f"no {noun} in {folder}; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}{there}")
        sides.append(files)
    images, masks = sides
    same = [*_same_names(images), *_same_names(masks)]
    if same:
        raise DataError("images and masks do not pair up:\n  " + "\n  ".join(same))
    named = [mask for mask in masks if mask.stem.endswith(mask_suffix)]
    if not named:
        raise DataError(f"mask_suffix: no name in {folders.masks} ends in {mask_suffix!r}; {_examples(masks)}")
    return images, _without_suffix(named, mask_suffix)


def _side_by_side(folders: Folders, mask_suffix: str) -> tuple[list[File], list[File]]:
    """Images and masks of one folder, told apart by mask_suffix or by the one mark (such as _mask) that leaves no file unpaired."""
    folder = folders.images
    files = _name_files(list_files(folder), folder)
    problems = _same_names(files)
    if problems:
        raise DataError(
            f"cannot tell images from masks in {folder}:\n  "
            + "\n  ".join(problems)
            + "\n  or put the masks into a folder of their own and set mask_dir to it"
        )
    if mask_suffix:
        masks = [file for file in files if file.stem.endswith(mask_suffix)]
        stems = {(file.folder, file.stem) for file in _without_suffix(masks, mask_suffix)}
        chosen = set(masks)
        images = [file for file in files if file not in chosen and not _is_another_mask(file, stems)]
        if not masks or not images:
            raise DataError(
                f"mask_suffix: {'no' if not masks else 'every'} name in {folder} ends in {mask_suffix!r}; {_examples(files)}"
            )
        return images, _without_suffix(masks, mask_suffix)
    counts = Counter(mark for file in files for mark in mask_marks(file.stem))
    marks = sorted(mark for mark, count in counts.items() if count < len(files))
    by_mark: dict[str, tuple[list[File], list[File]]] = {mark: ([], []) for mark in marks}  # images and masks by each mark
    for file in files:
        its_marks = mask_marks(file.stem)
        for mark, images_and_masks in by_mark.items():
            images_and_masks[mark in its_marks].append(file)
    complete = [mark for mark in marks if best_match(*by_mark[mark], folders.images).is_complete]
    if len(complete) == 1 or (not complete and len(marks) == 1):
        return by_mark[(complete or marks)[0]]
    if not marks:
        raise DataError(
            f"cannot tell images from masks in {folder}: no file is named like a mask (X_mask, X_label, gt_X, ...), "
            f"{_examples(files)}; set mask_suffix, or image_dir and mask_dir to two folders"
        )
    listing = ", ".join(f"{mark} ({counts[mark]} files)" for mark in marks)
    raise DataError(
        f"cannot tell images from masks in {folder}: several kinds of names could be masks: {listing}; "
        "set mask_suffix to one of them, or image_dir and mask_dir to two folders"
    )


def _is_another_mask(file: File, stems: set[tuple[str, str]]) -> bool:
    """Whether the file is another mask (a second annotator's) of an image that has a mask already."""
    marks = mask_marks(file.stem)
    cores = {file.stem[: -len(mark)] for mark in marks} | {file.stem[len(mark) :] for mark in marks}
    return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems


def _refuse_channels(images: Sequence[File], masks: Sequence[File], folders: Folders) -> None:
    """Raises DataError where each channel of an image is a file of its own, as in nnU-Net."""
    cases: dict[str, list[str]] = {mask.folder + mask.stem: [] for mask in masks}
    for image in images:
        cases.get(image.folder + CHANNEL.sub("", image.stem), []).append(image.path.name)
    case, files = max(cases.items(), key=lambda item: len(item[1]), default=("", []))
    if is_channel_folder(folders.images) and len(files) > 1:
        raise DataError(
            f"image_dir: {folders.images} has {len(files)} channel files for {case} ({first_few(files)}); "
            "an image must be one file: merge its channels, or set image_dir to a folder with one channel"
        )


def _name_files(paths: Iterable[Path], root: Path) -> list[File]:
    found = []
    for path in paths:
        folder = path.parent.relative_to(root).as_posix()
        found.append(File(path, "" if folder == "." else f"{folder}/", path.stem))
    return found


def _without_suffix(masks: Iterable[File], mask_suffix: str) -> list[File]:
    return [mask._replace(stem=mask.stem.removesuffix(mask_suffix)) for mask in masks]


def _same_names(files: Iterable[File]) -> list[str]:
    seen: dict[tuple[str, str], Path] = {}
    problems = []
    for file in files:
        first = seen.setdefault((file.folder, file.stem), file.path)
        if first != file.path:
            problems.append(f"{first} and {file.path} have the same name; keep one")
    return [*problems[:NUM_NAMED], *([f"and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else [])]


def _describe_unpaired(match: Match, folders: Folders, mask_suffix: str) -> str:
    """What the best rule pairs, what it leaves unpaired, and the keys to set."""
    images, masks, rule = sorted(match.images), sorted(match.masks), match.rule
    lines = ["images and masks do not pair up:"]
    if match.pairs:
        image, mask = min(match.pairs)
        num_images = len(match.pairs) + len(images)
        lines.append(f"the best rule pairs {len(match.pairs)} of {num_images} images, {image.path.name} with {mask.path.name}")
    else:
        lines.append("no rule pairs any of them (same names, a common prefix or suffix, zeros before numbers)")
    if images:
        wanted = f"{rule.mask[0]}{rule.image_core(images[0].stem)}{rule.mask[1]}{mask_suffix}.png"
        paths = [str(image.path) for image in images]
        lines.append(f"{counted(len(paths), 'image')} without a mask in {folders.masks} (such as {wanted}): {first_few(paths)}")
    if masks:
        paths = [str(mask.path) for mask in masks]
        lines.append(f"{counted(len(paths), 'mask')} without an image in {folders.images}: {first_few(paths)}")
    here, there = (sorted({file.folder or "./" for file in files}) for files in (images, masks))
    if images and masks and not set(here) & set(there):
        lines.append(
            f"a pair must be in one subfolder, but these images are in {first_few(here)} and these masks in {first_few(there)}"
        )
    lines.append("set mask_suffix to what follows the image's name in the mask's name, or image_dir and mask_dir to other folders")
    return "\n  ".join(lines)


def _examples(files: Sequence[File]) -> str:
    return f"such as {first_few([file.path.name for file in files])}"
