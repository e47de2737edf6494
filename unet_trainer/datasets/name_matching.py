"""Which names belong together. A rule removes prefixes and suffixes from the names of images and masks and compares the rest.

The first rule that leaves nothing unpaired is used; equal names come first. Opens no file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from unet_trainer.datasets.pairs import composed
from unet_trainer.images.image_files import IMAGE_EXTENSIONS

# Words at the start or end of a name that mark a mask when images and masks are in one folder.
MASK_WORDS = (
    "masks?|labels?|labelids|labeltrainids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot|ann|targets?"
    "|manual[12]?|1stho|2ndho|trimap|matte"
)
MASK_MARK = re.compile(rf"(?:^|[-_. ])(?:{MASK_WORDS})$|^(?:{MASK_WORDS})[-_. ]", re.IGNORECASE)
CHANNEL_FOLDER = "imagestr"  # nnU-Net: case_0000.png in imagesTr is the first channel of the case whose label is case.png
CHANNEL = re.compile(r"_\d{4}$")
LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)")
MIN_NUMBERED = 4  # files of each kind: fewer numbers differ by the same by chance
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|volume|stack|training|train|validation|val|test"
# With a single file there is no common prefix or suffix to find; only these words are removed.
IMAGE_AFFIXES, MASK_AFFIXES = (
    re.compile(rf"(?P<prefix>(?:(?:{words})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{words})|))", re.I)
    for words in (IMAGE_WORDS, MASK_WORDS)
)
# Of several kinds of masks, the ones to train on come first: what their names say of them.
BEST_KINDS = ("labeltrainids", "labelids", "label", "mask", "seg", "gt", "")
LAST_KINDS = ("instance", "color", "colour", "polygon", "overlay", "vis", "edge", "boundary")


class File(NamedTuple):
    """A file by its names, in Unicode's composed form."""

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


def name_files(paths: Iterable[Path], root: Path, prefix: str = "") -> list[File]:
    """The files with their names inside `root`; `prefix` is put before the folder, e.g. the name of a sequence."""
    found = []
    for path in paths:
        folder = path.parent.relative_to(root).as_posix()
        found.append(File(path, composed(prefix if folder == "." else f"{prefix}{folder}/"), composed(path.stem)))
    return found


def has_ending(file: File, mask_suffix: str) -> bool:
    """Whether the name ends in mask_suffix, which may also be an extension: .png."""
    return file.path.suffix.lower() == mask_suffix.lower() or (
        not _is_extension(mask_suffix) and file.stem.endswith(composed(mask_suffix))
    )


def without_ending(masks: Iterable[File], mask_suffix: str) -> list[File]:
    suffix = "" if _is_extension(mask_suffix) else composed(mask_suffix)
    return [mask._replace(stem=mask.stem.removesuffix(suffix)) for mask in masks]


def _is_extension(mask_suffix: str) -> bool:
    return mask_suffix.lower() in IMAGE_EXTENSIONS


def mask_marks(stem: str) -> list[str]:
    """The marks of a mask in a name, such as _mask in a_mask or gt_ in gt_a; in lower case."""
    return [found.group().lower() for found in MASK_MARK.finditer(stem)]


def best_match(images: Sequence[File], masks: Sequence[File], image_folder: Path, preferred: Rule | None = None) -> Match:
    """The match of the first rule that leaves nothing unpaired, else of the rule that pairs most by whole words.

    `preferred`: the rule of the training pairs, which comes first for those of validation.
    """
    rules = [*([preferred] if preferred is not None else []), Rule()]
    if is_channel_folder(image_folder) and len({_channel(image) for image in images}) == 1:
        rules.append(Rule(drops_channel=True))
    rules += _shared_affixes([file.stem for file in images], [file.stem for file in masks])
    rules += [rule._replace(ignores_padding=True) for rule in rules]
    matches = [match_names(images, masks, rule) for rule in rules]
    complete = next((match for match in matches if match.is_complete), None)
    return complete or max((match for match in matches if _keeps_words_whole(match)), key=lambda match: len(match.pairs))


def _keeps_words_whole(match: Match) -> bool:
    """Whether the affixes are whole words, or end where a number begins, in all names. What a few masks have in common may be more:
    of a_mask and aa_mask, a is no prefix. A complete match shows that by itself."""
    sides = ((match.rule.image, [image for image, _ in match.pairs]), (match.rule.mask, [mask for _, mask in match.pairs]))
    return all(
        (not prefix or SEPARATOR.match(prefix[-1]) or file.stem.removeprefix(prefix)[:1].isdigit())
        and (not suffix or SEPARATOR.match(suffix[0]) or file.stem.removesuffix(suffix)[-1:].isdigit())
        for (prefix, suffix), files in sides
        for file in files
    )


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


def offset_match(match: Match) -> Match | None:
    """The match by numbers that are ahead of each other by the same in every pair, such as img_001 and mask_000; None if there is
    no such offset. One file that is left over at each end is its sign."""
    files = [(match.rule.image_core, [*(image for image, _ in match.pairs), *match.images])]
    files += [(match.rule.mask_core, [*(mask for _, mask in match.pairs), *match.masks])]
    images, masks = (sorted((file.folder, *_numbered(core(file.stem)), file) for file in side) for core, side in files)
    if len(images) != len(masks) or len(images) < MIN_NUMBERED:
        return None
    pairs = list(zip(images, masks, strict=True))
    offsets = {image[2] - mask[2] for image, mask in pairs}
    if any(image[:2] != mask[:2] for image, mask in pairs) or len(offsets) != 1 or 0 in offsets:
        return None
    return match._replace(pairs=[(image[3], mask[3]) for image, mask in pairs], images=[], masks=[])


def _numbered(core: str) -> tuple[str, int]:
    """The text around the last number of a name, and the number."""
    found = LAST_NUMBER.fullmatch(core)
    return (f"{found[1]}#{found[3]}", int(found[2])) if found else (core, 0)


def mask_kinds(images: Sequence[File], masks: Sequence[File]) -> dict[str, int]:
    """Endings of the masks' names, where an image has several masks: _labelIds and _color → the number of masks of each.

    Kinds that are common, those to train on first; empty if no image has several.
    """
    _, suffix = _affixes({image.stem for image in images}, IMAGE_AFFIXES)
    endings = [suffix[found.start() :] for found in SEPARATOR.finditer(suffix)]
    cores = {(image.folder, image.stem.removesuffix(ending)) for image in images for ending in ("", *endings)}
    counts: dict[str, int] = defaultdict(int)
    with_mask = set()
    for mask in masks:
        ends = [*(found.start() for found in SEPARATOR.finditer(mask.stem)), len(mask.stem)]
        end = next((end for end in reversed(ends) if (mask.folder, mask.stem[:end]) in cores), None)
        if end is not None:
            counts[mask.stem[end:]] += 1
            with_mask.add((mask.folder, mask.stem[:end]))
    common = {kind: count for kind, count in counts.items() if 2 * count > max(counts.values())}
    has_several = sum(common.values()) > len(with_mask)
    return dict(sorted(common.items(), key=lambda item: (_rank_kind(item[0]), item[0]))) if has_several else {}


def _rank_kind(kind: str) -> int:
    word = kind.lower()
    if any(last in word for last in LAST_KINDS):
        return len(BEST_KINDS)
    return next(rank for rank, best in enumerate(BEST_KINDS) if best in word)


def _shared_affixes(images: Sequence[str], masks: Sequence[str]) -> list[Rule]:
    """Rules that remove the common prefix and suffix of all masks; then those of all images as well."""
    mask_affixes = _affixes(set(masks), MASK_AFFIXES)
    both = Rule(_affixes(set(images), IMAGE_AFFIXES), mask_affixes)
    (image_prefix, image_suffix), (mask_prefix, mask_suffix) = both.image, both.mask
    rules = (
        Rule(("", ""), mask_affixes),
        both,
        _without_shared(both),
        # Suffixes only, and prefixes only: masks of some of the images may share more than all images do.
        Rule(("", ""), ("", mask_suffix)),
        Rule(("", image_suffix), ("", mask_suffix)),
        Rule(("", ""), (mask_prefix, "")),
        Rule((image_prefix, ""), (mask_prefix, "")),
    )
    return [rule for rule in dict.fromkeys(rules) if rule != Rule() and not _hides_numbers(rule)]


def _without_shared(rule: Rule) -> Rule:
    """The rule without what images and masks share: of x_000019_leftImg8bit and x_000019_gtFine, 000019 is not removed."""
    (image_prefix, image_suffix), (mask_prefix, mask_suffix) = rule.image, rule.mask
    start = _shared_words(image_suffix, mask_suffix)
    end = _shared_words(image_prefix[::-1], mask_prefix[::-1])
    image = image_prefix[: len(image_prefix) - end], image_suffix[start:]
    return Rule(image, (mask_prefix[: len(mask_prefix) - end], mask_suffix[start:]))


def _shared_words(one: str, other: str) -> int:
    """Length of the whole words with which both begin."""
    ends = [*(found.start() for found in SEPARATOR.finditer(one)), len(one)]
    return max([0, *(end for end in ends if other.startswith(one[:end]) and SEPARATOR.match(f"{other[end:]}_"))])


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
