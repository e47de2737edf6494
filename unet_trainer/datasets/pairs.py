"""Which mask belongs to which image: files are paired by name, or by the rows of split_file. Opens no image.

A rule of pairing is used only if it leaves no image and no mask over; otherwise the error shows how far the best one got.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unet_trainer.config.schema import Config
from unet_trainer.datasets.layouts import Folders, find_layout, list_files, mask_marks
from unet_trainer.datasets.name_matching import CHANNEL, File, Match, Rule, best_match, is_channel_folder
from unet_trainer.datasets.problems import Problem, first_few
from unet_trainer.images.image_files import IMAGE_EXTENSIONS, DataError

Part = Literal["train", "val"]

NUM_NAMED = 5  # files named in a message before "and N more"


@dataclass(frozen=True)
class Pair:
    """One image and its mask. The name is the image's path inside its folder, without extension."""

    name: str
    image: Path
    mask: Path
    part: Part | None = None  # where the data says so itself
    group: str = ""  # pairs of one group stay on one side


@dataclass(frozen=True)
class FoundPairs:
    """The pairs of a dataset, how they were found, and what keeps them from being trained on."""

    pairs: tuple[Pair, ...]
    rule: str
    blocking_message: str = ""  # why training refuses; empty when all is paired
    problems: tuple[Problem, ...] = ()  # the same, file by file

    @property
    def is_divided(self) -> bool:
        """Whether the data says itself what validates."""
        return any(pair.part == "val" for pair in self.pairs)


def find_in_folders(config: Config, data_dir: Path) -> FoundPairs:
    """The pairs in the folders of data_dir; raises DataError where they cannot be told."""
    layout = find_layout(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    train = _pair_files(layout.train, config.mask_suffix)
    if layout.val is None:
        return replace(train, rule=f"{layout.phrase}, {train.rule}")
    val = _pair_files(layout.val, config.mask_suffix)
    same = (train.rule == "same names") == (val.rule == "same names")
    return FoundPairs(
        tuple(replace(pair, part="train") for pair in train.pairs) + tuple(replace(pair, part="val") for pair in val.pairs),
        f"{layout.phrase}, {train.rule}{'' if same else f', val {val.rule}'}; {layout.parts}",
        "\n".join(blocking_message for blocking_message in (train.blocking_message, val.blocking_message) if blocking_message),
        train.problems + val.problems,
    )


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names tell that they belong together, sorted by name; one folder may hold both."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        raise DataError(f"no folder {' and no folder '.join(missing)}; set image_dir and mask_dir to the folders' names")
    found = _pair_files(Folders(image_folder, mask_folder), mask_suffix)
    if found.blocking_message:
        raise DataError(found.blocking_message)
    return list(found.pairs)


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path) -> tuple[Pair, ...]:
    """The group of each pair, from its image's path inside data_dir: what the pattern's first bracket matches, or all of it."""
    grouped, strangers = [], []
    for pair in pairs:
        path = path_in(data_dir, pair.image)
        match = re.search(pattern, path)
        if match is None:
            strangers.append(path)
        else:
            grouped.append(replace(pair, group=match.group(1 if match.re.groups else 0) or ""))
    if strangers:
        raise DataError(
            f"group_pattern: {pattern!r} matches nothing in {len(strangers)} of {len(pairs)} paths, such as {first_few(strangers)}"
        )
    return tuple(grouped)


def path_in(data_dir: Path, path: Path) -> str:
    """The path as seen from data_dir, in slashes; as it is where it lies elsewhere."""
    return (path.relative_to(data_dir) if path.is_relative_to(data_dir) else path).as_posix()


def _pair_files(folders: Folders, mask_suffix: str) -> FoundPairs:
    """The pairs, sorted by name, and a phrase for the rule that made them."""
    if folders.images == folders.masks:
        images, masks = _side_by_side(folders, mask_suffix)
    else:
        images, masks = _two_folders(folders, mask_suffix)
    match = best_match(images, masks, folders.images)
    blocking_message = ""
    if not match.is_complete:
        _refuse_channels(images, masks, folders)
        blocking_message = _refusal(match, folders, mask_suffix)
    pairs = [Pair(f"{image.folder}{image.path.stem}", image.path, mask.path) for image, mask in match.pairs]
    pairs.sort(key=lambda pair: pair.name)
    same = match.rule == Rule() and all(pair.image.stem == pair.mask.stem for pair in pairs)
    rule = "same names" if same or not pairs else f"paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}"
    return FoundPairs(tuple(pairs), rule, blocking_message, _leftovers(match, folders) if blocking_message else ())


def _leftovers(match: Match, folders: Folders) -> tuple[Problem, ...]:
    fix = "add the partner, take the file away, or set mask_suffix, image_dir and mask_dir so that they pair up"
    found = (
        Problem("no_mask", f"images without a mask in {folders.masks}", _paths(match.images), fix),
        Problem("no_image", f"masks without an image in {folders.images}", _paths(match.masks), fix),
    )
    return tuple(problem for problem in found if problem.lines)


def _paths(files: Sequence[File]) -> tuple[str, ...]:
    return tuple(str(file.path) for file in sorted(files))


def _two_folders(folders: Folders, mask_suffix: str) -> tuple[list[File], list[File]]:
    """The files of both folders; a folder inside the other one is left out of it, and so are masks without the suffix."""
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
    """Images and masks of one folder, told apart by mask_suffix or by the one mark (such as _mask) that leaves nothing over."""
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
    readings: dict[str, tuple[list[File], list[File]]] = {mark: ([], []) for mark in marks}
    for file in files:
        its_marks = mask_marks(file.stem)
        for mark, reading in readings.items():
            reading[mark in its_marks].append(file)
    complete = [mark for mark in marks if best_match(*readings[mark], folders.images).is_complete]
    if len(complete) == 1 or (not complete and len(marks) == 1):
        return readings[(complete or marks)[0]]
    if not marks:
        raise DataError(
            f"cannot tell images from masks in {folder}: no name has what masks have (X_mask, X_label, gt_X, ...), "
            f"{_examples(files)}; set mask_suffix, or image_dir and mask_dir to two folders"
        )
    listing = ", ".join(f"{mark} ({counts[mark]} files)" for mark in marks)
    raise DataError(
        f"cannot tell images from masks in {folder}: several kinds of names could be masks: {listing}; "
        "set mask_suffix to one of them, or image_dir and mask_dir to two folders"
    )


def _is_another_mask(file: File, stems: set[tuple[str, str]]) -> bool:
    """A second annotator's mask of an image that has the chosen one."""
    marks = mask_marks(file.stem)
    cores = {file.stem[: -len(mark)] for mark in marks} | {file.stem[len(mark) :] for mark in marks}
    return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems


def _refuse_channels(images: Sequence[File], masks: Sequence[File], folders: Folders) -> None:
    """nnU-Net keeps the channels of an image in files of their own; one of them alone is not the image."""
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


def _refusal(match: Match, folders: Folders, mask_suffix: str) -> str:
    """How far the best rule got, what it leaves over and the keys to set."""
    images, masks, rule = sorted(match.images), sorted(match.masks), match.rule
    lines = ["images and masks do not pair up:"]
    if match.pairs:
        image, mask = min(match.pairs)
        num_images = len(match.pairs) + len(images)
        lines.append(f"the best rule pairs {len(match.pairs)} of {num_images} images, {image.path.name} with {mask.path.name}")
    else:
        lines.append("no rule pairs any (same names, a common prefix or suffix, zeros before numbers)")
    if images:
        wanted = f"{rule.mask[0]}{rule.image_core(images[0].stem)}{rule.mask[1]}{mask_suffix}.png"
        paths = [str(image.path) for image in images]
        lines.append(f"{_count(paths, 'image')} without a mask in {folders.masks} (such as {wanted}): {first_few(paths)}")
    if masks:
        paths = [str(mask.path) for mask in masks]
        lines.append(f"{_count(paths, 'mask')} without an image in {folders.images}: {first_few(paths)}")
    here, there = (sorted({file.folder or "./" for file in files}) for files in (images, masks))
    if images and masks and not set(here) & set(there):
        lines.append(
            f"a pair lies in one subfolder, but these images lie in {first_few(here)} and these masks in {first_few(there)}"
        )
    lines.append("set mask_suffix to what a mask's name has after its image's, or image_dir and mask_dir to folders that pair up")
    return "\n  ".join(lines)


def _examples(files: Sequence[File]) -> str:
    return f"such as {first_few([file.path.name for file in files])}"


def _count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
