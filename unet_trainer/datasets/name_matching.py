"""Which names belong together. A rule removes prefixes and suffixes from the names of images and masks and compares the rest.

The first rule that leaves nothing unpaired is used; equal names come first. Opens no file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from unet_trainer.datasets.layouts import MASK_WORDS

CHANNEL_FOLDER = "imagestr"  # nnU-Net: case_0000.png in imagesTr is the first channel of the case whose label is case.png
CHANNEL = re.compile(r"_\d{4}$")
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|training|train|validation|val|test"
# With a single file there is no common prefix or suffix to find; only these words are removed.
IMAGE_AFFIXES = re.compile(
    rf"(?P<prefix>(?:(?:{IMAGE_WORDS})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{IMAGE_WORDS})|))", re.I
)
MASK_AFFIXES = re.compile(
    rf"(?P<prefix>(?:(?:{MASK_WORDS})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{MASK_WORDS})|))", re.I
)


class File(NamedTuple):
    path: Path
    folder: str  # relative to the folder that was searched; ends in a slash, or is empty
    stem: str  # of a mask: without mask_suffix


class Rule(NamedTuple):
    """What is removed from names before they are compared: (prefix, suffix) of the images and of the masks."""

    image: tuple[str, str] = ("", "")
    mask: tuple[str, str] = ("", "")
    ignores_padding: bool = False  # 7 and 007 are equal
    drops_channel: bool = False  # the _0000 of nnU-Net

    def image_core(self, stem: str) -> str:
        return self._core(CHANNEL.sub("", stem) if self.drops_channel else stem, *self.image)

    def mask_core(self, stem: str) -> str:
        return self._core(stem, *self.mask)

    def _core(self, stem: str, prefix: str, suffix: str) -> str:
        core = stem.removeprefix(prefix).removesuffix(suffix)
        return NUMBER.sub(lambda number: number.group().lstrip("0") or "0", core) if self.ignores_padding else core


class Match(NamedTuple):
    """The pairs that a rule finds, and the files that it leaves unpaired."""

    rule: Rule
    pairs: list[tuple[File, File]]
    images: list[File]
    masks: list[File]

    @property
    def is_complete(self) -> bool:
        return not self.images and not self.masks


def best_match(images: Sequence[File], masks: Sequence[File], image_folder: Path) -> Match:
    """The match of the first rule that leaves nothing unpaired, else of the rule that pairs most."""
    rules = [Rule()]
    if is_channel_folder(image_folder) and len({_channel(image) for image in images}) == 1:
        rules.append(Rule(drops_channel=True))
    rules += _shared_affixes([file.stem for file in images], [file.stem for file in masks])
    rules += [rule._replace(ignores_padding=True) for rule in rules]
    matches = [match_names(images, masks, rule) for rule in rules]
    return next((match for match in matches if match.is_complete), max(matches, key=lambda match: len(match.pairs)))


def is_channel_folder(folder: Path) -> bool:
    return folder.name.lower() == CHANNEL_FOLDER


def _channel(image: File) -> str:
    found = CHANNEL.search(image.stem)
    return found.group() if found else ""


def match_names(images: Sequence[File], masks: Sequence[File], rule: Rule) -> Match:
    """Pairs one image with one mask if they are in the same subfolder and the rest of their names is equal."""
    found: dict[tuple[str, str], tuple[list[File], list[File]]] = defaultdict(lambda: ([], []))
    for image in images:
        found[image.folder, rule.image_core(image.stem)][0].append(image)
    for mask in masks:
        found[mask.folder, rule.mask_core(mask.stem)][1].append(mask)
    match = Match(rule, [], [], [])
    for its_images, its_masks in found.values():
        if len(its_images) == len(its_masks) == 1:
            match.pairs.append((its_images[0], its_masks[0]))
        else:
            match.images.extend(its_images)
            match.masks.extend(its_masks)
    return match


def _shared_affixes(images: Sequence[str], masks: Sequence[str]) -> list[Rule]:
    """Rules that remove the common prefix and suffix of all masks; then those of all images as well."""
    mask_affixes = _affixes(set(masks), MASK_AFFIXES)
    rules = (Rule(("", ""), mask_affixes), Rule(_affixes(set(images), IMAGE_AFFIXES), mask_affixes))
    return [rule for rule in rules if rule != Rule() and not _hides_numbers(rule)]


def _hides_numbers(rule: Rule) -> bool:
    """Whether the affixes hold numbers that may identify files: s1_a and s2_a. The 1 of 21_manual1 belongs to its word."""
    image_tokens, mask_tokens = [], []
    for image_affix, mask_affix in zip(rule.image, rule.mask, strict=True):
        if NUMBER.findall(image_affix) != NUMBER.findall(mask_affix):
            image_tokens += [token for token in SEPARATOR.split(image_affix) if NUMBER.search(token)]
            mask_tokens += [token for token in SEPARATOR.split(mask_affix) if NUMBER.search(token)]
    both = bool(image_tokens and mask_tokens)
    return both or any(token.isdigit() for token in (*image_tokens, *mask_tokens))


def _affixes(stems: set[str], affixes_of_one: re.Pattern[str]) -> tuple[str, str]:
    """The common prefix and suffix, never with part of a number: those of t000 and t001 share t, not t00."""
    if not stems:
        return "", ""
    if len(stems) == 1:
        found = affixes_of_one.fullmatch(next(iter(stems)))
        assert found is not None  # both affixes may be empty
        return found["prefix"], found["suffix"]
    prefix = re.sub(r"\d+$", "", _common_start(stems))
    backwards = {stem.removeprefix(prefix)[::-1] for stem in stems}
    return prefix, re.sub(r"^\d+", "", _common_start(backwards)[::-1])


def _common_start(texts: set[str]) -> str:
    first, last = min(texts), max(texts)  # all texts between the two in order share what these two share
    length = next((index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]
