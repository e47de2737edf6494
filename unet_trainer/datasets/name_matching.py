"""Which names belong together. A rule removes prefixes and suffixes from the names of images and masks and compares the
rest.

The first rule that leaves nothing unpaired is used; equal names come first. Opens no file.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from unet_trainer.datasets.pairs import composed
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS

# Words at the start or end of a name that mark a mask when images and masks are in one folder.
MASK_WORDS = (
    "masks?|labels?|labelids|labeltrainids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot|ann|targets?"
    "|manual[12]?|1stho|2ndho|trimap|matte"
)
MASK_MARK = re.compile(rf"(?:^|[-_. ])(?:{MASK_WORDS})$|^(?:{MASK_WORDS})[-_. ]", re.IGNORECASE)
CHANNEL_FOLDER = (
    "imagestr"  # nnU-Net: case_0000.png in imagesTr is the first channel of the case whose label is case.png
)
CHANNEL = re.compile(r"_\d{4}$")
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|volume|stack|training|train|validation|val|test"
# Of a single file there is no common prefix or suffix to find; only these words are removed.
IMAGE_AFFIXES, MASK_AFFIXES = (
    re.compile(rf"(?P<prefix>(?:(?:{words})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{words})|))", re.I)
    for words in (IMAGE_WORDS, MASK_WORDS)
)
# Of several kinds of masks, the ones to train on come first: what their names say of them.
BEST_KINDS = ("labeltrainids", "labelids", "label", "mask", "seg", "gt", "")
READERS = re.compile(
    r"annotator|annotation|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)",
    re.I,
)
LAST_KINDS = ("instance", "color", "colour", "polygon", "overlay", "vis", "edge", "boundary")

Affixes = tuple[str, str]  # prefix and suffix


class File(NamedTuple):
    """A file by its names, in Unicode's composed form."""

    path: Path
    folder: str  # relative to the folder that was searched; ends in a slash, or is empty
    stem: str  # of a mask: without mask_suffix


class Rule(NamedTuple):
    """What is removed from names before they are compared."""

    image: Affixes = ("", "")
    mask: Affixes = ("", "")
    ignores_padding: bool = False  # 7 and 007 are equal
    drops_channel: bool = False  # the _0000 of nnU-Net

    def core(self, stem: str, is_mask: bool) -> str:
        prefix, suffix = self.mask if is_mask else self.image
        core = CHANNEL.sub("", stem) if self.drops_channel and not is_mask else stem
        core = core.removeprefix(prefix).removesuffix(suffix)
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


def name_files(paths: Iterable[Path], root: Path, sequence: str = "") -> list[File]:
    """The files with their names inside `root`: v0 for v0.png and for v0.nii.gz. `sequence`: what stands before their
    folders."""
    files = []
    for path in paths:
        folder = path.relative_to(root).as_posix().removesuffix(path.name)
        stem = path.stem.removesuffix(".nii") if path.suffix == ".gz" else path.stem
        files.append(File(path, composed(f"{sequence}{folder}"), composed(stem)))
    return files


def with_ending(files: Iterable[File], mask_suffix: str) -> list[File]:
    """The files whose names end in mask_suffix, without it; it may also be an extension: .png."""
    if mask_suffix.lower() in IMAGE_EXTENSIONS:
        return [file for file in files if file.path.suffix.lower() == mask_suffix.lower()]
    suffix = composed(mask_suffix)
    return [file._replace(stem=file.stem.removesuffix(suffix)) for file in files if file.stem.endswith(suffix)]


def mask_marks(stem: str) -> list[str]:
    """The marks of a mask in a name, such as _mask in a_mask or gt_ in gt_a; in lower case."""
    return [found.group().lower() for found in MASK_MARK.finditer(stem)]


def best_match(
    images: Sequence[File], masks: Sequence[File], image_folder: Path, preferred: Rule | None = None
) -> Match:
    """The match of the first rule that leaves nothing unpaired, else of the rule that pairs most by whole words.

    `preferred`: the rule of the training pairs, which comes first for those of validation.
    """
    rules = [*([preferred] if preferred is not None else []), Rule()]
    is_of_channels = image_folder.name.lower() == CHANNEL_FOLDER
    if is_of_channels and len({"".join(CHANNEL.findall(image.stem)) for image in images}) == 1:
        rules.append(Rule(drops_channel=True))
    rules += _affix_rules({file.stem for file in images}, {file.stem for file in masks})
    partial = []
    for rule in (*rules, *(rule._replace(ignores_padding=True) for rule in rules)):
        match = _match_names(images, masks, rule)
        if match.is_complete:
            return match
        if _keeps_words_whole(match):
            partial.append(match)
    return max(partial, key=lambda match: len(match.pairs))


def _match_names(images: Sequence[File], masks: Sequence[File], rule: Rule) -> Match:
    """Pairs one image with one mask if they are in the same subfolder and the rest of their names is equal."""
    found: dict[tuple[str, str], tuple[list[File], list[File]]] = defaultdict(lambda: ([], []))
    for is_mask, files in enumerate((images, masks)):
        for file in files:
            found[file.folder, rule.core(file.stem, bool(is_mask))][is_mask].append(file)
    match = Match(rule, [], [], [])
    for its_images, its_masks in found.values():
        if len(its_images) == len(its_masks) == 1:
            match.pairs.append((its_images[0], its_masks[0]))
        else:
            match.images.extend(its_images)
            match.masks.extend(its_masks)
    return match


def _keeps_words_whole(match: Match) -> bool:
    """Whether the affixes are whole words, or end where a number begins, in all names. What a few masks have in common
    may be more: of a_mask and aa_mask, a is no prefix. A complete match shows that by itself."""
    return all(
        (not prefix or SEPARATOR.match(prefix[-1]) or file.stem.removeprefix(prefix)[:1].isdigit())
        and (not suffix or SEPARATOR.match(suffix[0]) or file.stem.removesuffix(suffix)[-1:].isdigit())
        for pair in match.pairs
        for (prefix, suffix), file in zip((match.rule.image, match.rule.mask), pair, strict=True)
    )


def _affix_rules(images: set[str], masks: set[str]) -> Iterator[Rule]:
    """Rules that remove the common prefix and suffix of the masks, and of the images; or one of them: masks of some of
    the images may share more than all images do."""
    (image_prefix, image_suffix), (mask_prefix, mask_suffix) = (
        _affixes(images, IMAGE_AFFIXES),
        _affixes(masks, MASK_AFFIXES),
    )
    seen = {Rule()}
    for has_prefix, has_suffix in ((True, True), (False, True), (True, False)):
        mask = mask_prefix * has_prefix, mask_suffix * has_suffix
        for image in (("", ""), (image_prefix * has_prefix, image_suffix * has_suffix)):
            rule = _without_shared(image, mask)
            if rule not in seen and not _hides_numbers(rule):
                yield rule
            seen.add(rule)


def _affixes(stems: set[str], affixes_of_one: re.Pattern[str]) -> Affixes:
    """The common prefix and suffix, never with part of a number: those of t000 and t001 share t, not t00."""
    if len(stems) < 2:
        found = affixes_of_one.fullmatch("".join(stems))
        assert found is not None  # both affixes may be empty
        return found["prefix"], found["suffix"]
    prefix = re.sub(r"\d+$", "", os.path.commonprefix([*stems]))  # noqa: RUF071
    backwards = os.path.commonprefix([stem.removeprefix(prefix)[::-1] for stem in stems])  # noqa: RUF071
    return prefix, re.sub(r"^\d+", "", backwards[::-1])


def _without_shared(image: Affixes, mask: Affixes) -> Rule:
    """Without the words that images and masks share: of x_000019_leftImg8bit and x_000019_gtFine, 000019 is not
    removed."""
    start = _shared_words(image[1], mask[1])
    image_end, mask_end = (len(prefix) - _shared_words(image[0][::-1], mask[0][::-1]) for prefix in (image[0], mask[0]))
    return Rule((image[0][:image_end], image[1][start:]), (mask[0][:mask_end], mask[1][start:]))


def _shared_words(one: str, other: str) -> int:
    """Length of the whole words with which both begin."""
    ends = [*(found.start() for found in SEPARATOR.finditer(one)), len(one)]
    return max([0, *(end for end in ends if other.startswith(one[:end]) and SEPARATOR.match(f"{other[end:]}_"))])


def _hides_numbers(rule: Rule) -> bool:
    """Whether the affixes hold numbers that may identify files: s1_a and s2_a. The 1 of 21_manual1 belongs to its
    word."""
    sides: tuple[list[str], list[str]] = ([], [])
    for affixes in zip(rule.image, rule.mask, strict=True):
        if NUMBER.findall(affixes[0]) != NUMBER.findall(affixes[1]):
            for side, affix in zip(sides, affixes, strict=True):
                side += [token for token in SEPARATOR.split(affix) if NUMBER.search(token)]
    return all(sides) or any(token.isdigit() for side in sides for token in side)


def mask_kinds(images: Sequence[File], masks: Sequence[File]) -> dict[str, int]:
    """Endings of the masks' names, where an image has several masks: _labelIds and _color → the number of masks of
    each.

    Kinds that are common, those to train on first; empty if no image has several.
    """
    _, suffix = _affixes({image.stem for image in images}, IMAGE_AFFIXES)
    endings = ["", *(suffix[found.start() :] for found in SEPARATOR.finditer(suffix))]
    cores = {(image.folder, image.stem.removesuffix(ending)) for image, ending in product(images, endings)}
    ends = [(mask, end) for mask in masks if (end := _end_of_name(mask, cores)) is not None]
    counts, with_mask = (
        Counter(mask.stem[end:] for mask, end in ends),
        {(mask.folder, mask.stem[:end]) for mask, end in ends},
    )
    common = {kind: count for kind, count in counts.items() if 2 * count > max(counts.values())}

    def rank(kind: str) -> tuple[int, str]:
        word = kind.lower()
        is_last = any(last in word for last in LAST_KINDS)
        return len(BEST_KINDS) if is_last else next(
            place for place, best in enumerate(BEST_KINDS) if best in word
        ), kind

    return {kind: common[kind] for kind in sorted(common, key=rank)} if sum(common.values()) > len(with_mask) else {}


def _end_of_name(mask: File, names: Container[tuple[str, str]]) -> int | None:
    """Where the longest of the names, by folder and stem, ends in the stem of a mask; None if it begins with none of
    them."""
    ends = [len(mask.stem), *(found.start() for found in reversed([*SEPARATOR.finditer(mask.stem)]))]
    return next((end for end in ends if (mask.folder, mask.stem[:end]) in names), None)


def split_by_endings(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """Files of one folder as images and masks: a mask has the name of another file and more behind it, s0 and
    s0_head."""
    stems = {(file.folder, file.stem) for file in files}
    is_mask = [
        any((file.folder, file.stem[: sep.start()]) in stems for sep in SEPARATOR.finditer(file.stem)) for file in files
    ]
    images, masks = (
        [file for file, its in zip(files, is_mask, strict=True) if its == wanted] for wanted in (False, True)
    )
    return images, masks


def masks_by_ending(images: Sequence[File], masks: Sequence[File]) -> dict[str, dict[File, File]]:
    """Class or object → image → mask, where masks have the name of their image and an ending: head and tail of s0_head,
    s0_tail; of objects 1, 2, ... and "" (s0_mask, s0_mask_1). Words for masks do not count. Empty unless the endings
    are clear: several, of classes with several images, and none for readers or for views of one mask."""
    by_core = {(image.folder, image.stem): image for image in images}
    found: dict[str, dict[File, File]] = defaultdict(dict)
    endings: dict[str, set[str]] = defaultdict(set)
    for mask in masks:
        if (place := _end_of_name(mask, by_core)) is None:
            return {}
        words = [word for word in SEPARATOR.split(mask.stem[place:]) if word]
        name = "_".join(word for word in words if not re.fullmatch(MASK_WORDS, word, re.I))
        found[name][by_core[mask.folder, mask.stem[:place]]] = mask
        endings[name].add(mask.stem[place:])
    are_objects = all((NUMBER.fullmatch(name) or not name) and "mask" in min(endings[name]).lower() for name in found)
    are_classes = all(re.fullmatch(r"[^\W\d]{2,}", name) and len(its) > 1 for name, its in found.items())
    are_classes = are_classes and not any(
        re.search(f"{'|'.join(LAST_KINDS)}|{READERS.pattern}", name, re.I) for name in found
    )
    are_clear = len(found) > 1 and all(len(its) == 1 for its in endings.values()) and (are_objects or are_classes)
    with_mask = {image for its in found.values() for image in its}
    return dict(sorted(found.items())) if are_clear and 2 * len(with_mask) > len(images) else {}
