"""Which mask belongs to which image, and which pairs validate: files are paired by name and split. Opens no file.

A rule of pairing is used only if it leaves no image and no mask over; otherwise the error shows how far the best one got.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unet_trainer.config import Config
from unet_trainer.images import IMAGE_EXTENSIONS, DataError
from unet_trainer.layouts import MASK_WORDS, Folders, find_layout, list_files, mask_marks

NUM_NAMED = 5  # files named in a message before "and N more"
SPLIT_STREAM = 1  # keeps the split's random numbers apart from those of the batches
CHANNEL_FOLDER = "imagestr"  # nnU-Net: case_0000.png is the first channel of case.png
CHANNEL = re.compile(r"_\d{4}$")
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|training|train|validation|val|test"
# One name alone shows no part that all names share: these words may be taken off it.
IMAGE_AFFIXES = re.compile(
    rf"(?P<prefix>(?:(?:{IMAGE_WORDS})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{IMAGE_WORDS})|))", re.I
)
MASK_AFFIXES = re.compile(
    rf"(?P<prefix>(?:(?:{MASK_WORDS})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{MASK_WORDS})|))", re.I
)


@dataclass(frozen=True)
class Pair:
    """One image and its mask. The name is the image's path inside its folder, without extension."""

    name: str
    image: Path
    mask: Path


@dataclass(frozen=True)
class Split:
    """Which pairs train and which validate, and the rules that said so."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    rule: str


class _File(NamedTuple):
    path: Path
    folder: str  # inside the folder that was searched
    stem: str  # of a mask: without mask_suffix


class _Rule(NamedTuple):
    """What is taken off the names before they are compared: (prefix, suffix) of the images and of the masks."""

    image: tuple[str, str] = ("", "")
    mask: tuple[str, str] = ("", "")
    ignores_padding: bool = False
    drops_channel: bool = False

    def image_core(self, stem: str) -> str:
        return self._core(CHANNEL.sub("", stem) if self.drops_channel else stem, *self.image)

    def mask_core(self, stem: str) -> str:
        return self._core(stem, *self.mask)

    def _core(self, stem: str, prefix: str, suffix: str) -> str:
        core = stem.removeprefix(prefix).removesuffix(suffix)
        return NUMBER.sub(lambda number: number.group().lstrip("0") or "0", core) if self.ignores_padding else core


class _Match(NamedTuple):
    """What a rule pairs and what it leaves over."""

    rule: _Rule
    pairs: list[tuple[_File, _File]]
    images: list[_File]
    masks: list[_File]

    @property
    def is_complete(self) -> bool:
        return not self.images and not self.masks


def build_split(config: Config) -> Split:
    """The pairs of data_dir, split by its train and val folders or by val_fraction; raises DataError."""
    data_dir = Path(config.data_dir)
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")
    layout = find_layout(data_dir, config.image_dir, config.mask_dir, config.mask_suffix)
    train, phrase = _pair_files(layout.train, config.mask_suffix)
    if layout.val is not None:
        val, val_phrase = _pair_files(layout.val, config.mask_suffix)
        phrase += "" if (phrase == "same names") == (val_phrase == "same names") else f", val {val_phrase}"
        return Split(tuple(train), tuple(val), f"{layout.phrase}, {phrase}; {layout.parts}")
    train, val = split_pairs(train, config.val_fraction, config.seed)
    rule = f"{layout.phrase}, {phrase}; val_fraction {config.val_fraction:g}, seed {config.seed}"
    return Split(tuple(train), tuple(val), rule)


def find_pairs(image_folder: Path, mask_folder: Path, mask_suffix: str = "") -> list[Pair]:
    """Images and masks whose names tell that they belong together, sorted by name; one folder may hold both."""
    missing = [str(folder) for folder in (image_folder, mask_folder) if not folder.is_dir()]
    if missing:
        raise DataError(f"no folder {' and no folder '.join(missing)}; set image_dir and mask_dir to the folders' names")
    return _pair_files(Folders(image_folder, mask_folder), mask_suffix)[0]


def split_pairs(pairs: list[Pair], val_fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The same pairs and seed give the same split on every machine."""
    if len(pairs) < 2:
        raise DataError(f"only {len(pairs)} pair; need at least 2, one to train on and one to validate on")
    num_val = min(max(1, round(len(pairs) * val_fraction)), len(pairs) - 1)
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(len(pairs))
    held_out = set(order[:num_val].tolist())
    train = [pair for index, pair in enumerate(pairs) if index not in held_out]
    val = [pair for index, pair in enumerate(pairs) if index in held_out]
    return train, val


def _pair_files(folders: Folders, mask_suffix: str) -> tuple[list[Pair], str]:
    """The pairs, sorted by name, and a phrase for the rule that made them."""
    problems: list[str] = []
    if folders.images == folders.masks:
        images, masks = _side_by_side(folders, mask_suffix)
    else:
        images, masks = _two_folders(folders, mask_suffix, problems)
    match = _best_match(images, masks, folders)
    if problems or not match.is_complete:
        _refuse_channels(images, masks, folders)
        raise DataError(_refusal(match, folders, mask_suffix, problems))
    pairs = [Pair(f"{image.folder}{image.path.stem}", image.path, mask.path) for image, mask in match.pairs]
    pairs.sort(key=lambda pair: pair.name)
    same = match.rule == _Rule() and all(pair.image.stem == pair.mask.stem for pair in pairs)
    return pairs, "same names" if same else f"paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}"


def _two_folders(folders: Folders, mask_suffix: str, problems: list[str]) -> tuple[list[_File], list[_File]]:
    """The files of both folders; a folder inside the other one is left out of it."""
    sides: list[list[_File]] = []
    for noun, folder, other in (("images", folders.images, folders.masks), ("masks", folders.masks, folders.images)):
        files = _name_files(list_files(folder, without=other if other.is_relative_to(folder) else None), folder)
        if not files:
            others = sorted({path.suffix for path in folder.rglob("*") if path.suffix and path.is_file()})
            there = f"; it holds {_some(others)} files" if others else ""
            raise DataError(f"no {noun} in {folder}; need files with one of {', '.join(sorted(IMAGE_EXTENSIONS))}{there}")
        sides.append(files)
    images, masks = sides
    same = [*_same_names(images), *_same_names(masks)]
    if same:
        raise DataError("images and masks do not pair up:\n  " + "\n  ".join(same))
    odd = [str(mask.path) for mask in masks if not mask.stem.endswith(mask_suffix)]
    if odd:
        problems.append(f"{_some(odd)} {'does' if len(odd) == 1 else 'do'} not end in mask_suffix {mask_suffix!r}")
    return images, _without_suffix([mask for mask in masks if mask.stem.endswith(mask_suffix)], mask_suffix)


def _side_by_side(folders: Folders, mask_suffix: str) -> tuple[list[_File], list[_File]]:
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
    readings: dict[str, tuple[list[_File], list[_File]]] = {mark: ([], []) for mark in marks}
    for file in files:
        its_marks = mask_marks(file.stem)
        for mark, reading in readings.items():
            reading[mark in its_marks].append(file)
    complete = [mark for mark in marks if _best_match(*readings[mark], folders).is_complete]
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


def _is_another_mask(file: _File, stems: set[tuple[str, str]]) -> bool:
    """A second annotator's mask of an image that has the chosen one."""
    marks = mask_marks(file.stem)
    cores = {file.stem[: -len(mark)] for mark in marks} | {file.stem[len(mark) :] for mark in marks}
    return any((file.folder, core) in stems for core in cores) and (file.folder, file.stem) not in stems


def _best_match(images: Sequence[_File], masks: Sequence[_File], folders: Folders) -> _Match:
    """By the first rule that leaves nothing over, else by the one that pairs most. Equal names are the strongest evidence."""
    rules = [_Rule()]
    if _is_channel_folder(folders.images) and len({_channel(image) for image in images}) == 1:
        rules.append(_Rule(drops_channel=True))
    rules += _shared_affixes([file.stem for file in images], [file.stem for file in masks])
    rules += [rule._replace(ignores_padding=True) for rule in rules]
    matches = [_match(images, masks, rule) for rule in rules]
    return next((match for match in matches if match.is_complete), max(matches, key=lambda match: len(match.pairs)))


def _is_channel_folder(folder: Path) -> bool:
    return folder.name.lower() == CHANNEL_FOLDER


def _channel(image: _File) -> str:
    found = CHANNEL.search(image.stem)
    return found.group() if found else ""


def _refuse_channels(images: Sequence[_File], masks: Sequence[_File], folders: Folders) -> None:
    """nnU-Net keeps the channels of an image in files of their own; one of them alone is not the image."""
    cases: dict[str, list[str]] = {mask.folder + mask.stem: [] for mask in masks}
    for image in images:
        cases.get(image.folder + CHANNEL.sub("", image.stem), []).append(image.path.name)
    case, files = max(cases.items(), key=lambda item: len(item[1]), default=("", []))
    if _is_channel_folder(folders.images) and len(files) > 1:
        raise DataError(
            f"image_dir: {folders.images} has {len(files)} channel files for {case} ({_some(files)}); an image must be one file: "
            "merge its channels, or set image_dir to a folder with one channel"
        )


def _match(images: Sequence[_File], masks: Sequence[_File], rule: _Rule) -> _Match:
    """Pairs are one image and one mask of the same core in the same subfolder."""
    found: dict[tuple[str, str], tuple[list[_File], list[_File]]] = defaultdict(lambda: ([], []))
    for image in images:
        found[image.folder, rule.image_core(image.stem)][0].append(image)
    for mask in masks:
        found[mask.folder, rule.mask_core(mask.stem)][1].append(mask)
    match = _Match(rule, [], [], [])
    for its_images, its_masks in found.values():
        if len(its_images) == len(its_masks) == 1:
            match.pairs.append((its_images[0], its_masks[0]))
        else:
            match.images.extend(its_images)
            match.masks.extend(its_masks)
    return match


def _shared_affixes(images: Sequence[str], masks: Sequence[str]) -> list[_Rule]:
    """Rules that take off what all masks have in common at either end, and then what all images have."""
    mask_affixes = _affixes(set(masks), MASK_AFFIXES)
    rules = (_Rule(("", ""), mask_affixes), _Rule(_affixes(set(images), IMAGE_AFFIXES), mask_affixes))
    return [rule for rule in rules if rule != _Rule() and not _hides_numbers(rule)]


def _hides_numbers(rule: _Rule) -> bool:
    """Whether what is taken off holds numbers that may tell files apart: s1_a and s2_a. That of 21_manual1 belongs to its word."""
    image_tokens, mask_tokens = [], []
    for image_affix, mask_affix in zip(rule.image, rule.mask, strict=True):
        if NUMBER.findall(image_affix) != NUMBER.findall(mask_affix):
            image_tokens += [token for token in SEPARATOR.split(image_affix) if NUMBER.search(token)]
            mask_tokens += [token for token in SEPARATOR.split(mask_affix) if NUMBER.search(token)]
    both = bool(image_tokens and mask_tokens)
    return both or any(token.isdigit() for token in (*image_tokens, *mask_tokens))


def _affixes(stems: set[str], affixes_of_one: re.Pattern[str]) -> tuple[str, str]:
    """The prefix and suffix that all stems share, cut where a number begins or ends: t000 and t001 share t, not t00."""
    if len(stems) == 1:
        found = affixes_of_one.fullmatch(next(iter(stems)))
        assert found is not None  # both affixes may be empty
        return found["prefix"], found["suffix"]
    prefix = re.sub(r"\d+$", "", _common_start(stems))
    backwards = {stem.removeprefix(prefix)[::-1] for stem in stems}
    return prefix, re.sub(r"^\d+", "", _common_start(backwards)[::-1])


def _common_start(texts: set[str]) -> str:
    first, last = min(texts), max(texts)  # what these two share, all between them share
    length = next((index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _name_files(paths: Iterable[Path], root: Path) -> list[_File]:
    found = []
    for path in paths:
        folder = path.parent.relative_to(root).as_posix()
        found.append(_File(path, "" if folder == "." else f"{folder}/", path.stem))
    return found


def _without_suffix(masks: Iterable[_File], mask_suffix: str) -> list[_File]:
    return [mask._replace(stem=mask.stem.removesuffix(mask_suffix)) for mask in masks]


def _same_names(files: Iterable[_File]) -> list[str]:
    seen: dict[tuple[str, str], Path] = {}
    problems = []
    for file in files:
        first = seen.setdefault((file.folder, file.stem), file.path)
        if first != file.path:
            problems.append(f"{first} and {file.path} have the same name; keep one")
    return [*problems[:NUM_NAMED], *([f"and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else [])]


def _refusal(match: _Match, folders: Folders, mask_suffix: str, problems: Sequence[str]) -> str:
    """How far the best rule got, what it leaves over and the keys to set."""
    images, masks, rule = sorted(match.images), sorted(match.masks), match.rule
    lines = ["images and masks do not pair up:", *problems]
    if match.pairs:
        image, mask = min(match.pairs)
        num_images = len(match.pairs) + len(images)
        lines.append(f"the best rule pairs {len(match.pairs)} of {num_images} images, {image.path.name} with {mask.path.name}")
    else:
        lines.append("no rule pairs any (same names, a common prefix or suffix, zeros before numbers)")
    if images:
        wanted = f"{rule.mask[0]}{rule.image_core(images[0].stem)}{rule.mask[1]}{mask_suffix}.png"
        paths = [str(image.path) for image in images]
        lines.append(f"{_count(paths, 'image')} without a mask in {folders.masks} (such as {wanted}): {_some(paths)}")
    if masks:
        paths = [str(mask.path) for mask in masks]
        lines.append(f"{_count(paths, 'mask')} without an image in {folders.images}: {_some(paths)}")
    here, there = (sorted({file.folder or "./" for file in files}) for files in (images, masks))
    if images and masks and not set(here) & set(there):
        lines.append(f"a pair lies in one subfolder, but these images lie in {_some(here)} and these masks in {_some(there)}")
    lines.append("set mask_suffix to what a mask's name has after its image's, or image_dir and mask_dir to folders that pair up")
    return "\n  ".join(lines)


def _examples(files: Sequence[_File]) -> str:
    return f"such as {_some([file.path.name for file in files])}"


def _count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:NUM_NAMED]) + (f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else "")
