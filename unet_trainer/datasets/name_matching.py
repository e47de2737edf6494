"""Which names belong together: the same names, else one prefix and one suffix of the images, and one of the masks, that
are the same for all pairs. Opens no file."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unet_trainer.datasets.pairs import composed
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS

# Words at the start or end of a name that mark a mask when images and masks are in one folder.
MASK_WORDS = (
    "masks?|labels?|labelids|labeltrainids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot"
    "|ann|targets?|manual[12]?|1stho|2ndho|trimap|matte"
)
MASK_MARK = re.compile(rf"(?:^|[-_. ])(?:{MASK_WORDS})$|^(?:{MASK_WORDS})[-_. ]", re.IGNORECASE)
CHANNEL_FOLDER = "imagestr"  # nnU-Net: case_0000.png there is the first channel of the case whose label is case.png
CHANNEL = re.compile(r"_\d{4}$")
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|volume|stack|training|train|validation|val|test"
# Of a single file there is no common prefix or suffix to find; only these words are removed.
IMAGE_AFFIXES, MASK_AFFIXES = (
    re.compile(rf"(?P<prefix>(?:(?:{words})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{words})|))", re.I)
    for words in (IMAGE_WORDS, MASK_WORDS)
)
READERS = re.compile(
    r"annotator|annotation|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)",
    re.I,
)
VIEWS = "instance|color|colour|polygon|overlay|vis|edge|boundary"  # of a mask: these are no classes

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
    drops_channel: bool = False  # the _0000 of nnU-Net

    def core(self, stem: str, is_mask: bool) -> str:
        prefix, suffix = self.mask if is_mask else self.image
        core = CHANNEL.sub("", stem) if self.drops_channel and not is_mask else stem
        return core.removeprefix(prefix).removesuffix(suffix)


class Match(NamedTuple):
    """The pairs that a rule finds, and the files that it leaves unpaired."""

    rule: Rule
    pairs: list[tuple[File, File]]
    images: list[File]
    masks: list[File]

    @property
    def is_complete(self) -> bool:
        return not self.images and not self.masks


def name_files(paths: Iterable[Path], folder: str) -> list[File]:
    """The files of one folder with their names: v0 for v0.png and v0.nii.gz."""
    folder = composed(folder)
    return [
        File(path, folder, composed(path.name.removesuffix(".gz").rpartition(".")[0] or path.name)) for path in paths
    ]


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
    for rule in dict.fromkeys(rules):
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
    """Rules that remove what all masks begin and end with, and all images or none; or one of both: masks of some of the
    images may share more than all images do."""
    image, mask = _affixes(images, IMAGE_AFFIXES), _affixes(masks, MASK_AFFIXES)
    for prefix, suffix in ((True, True), (False, True), (True, False)):
        of_mask = mask[0] * prefix, mask[1] * suffix
        for of_image in (("", ""), (image[0] * prefix, image[1] * suffix)):
            if not _hides_numbers(of_image, of_mask):
                yield Rule(of_image, of_mask)


def _affixes(stems: set[str], affixes_of_one: re.Pattern[str]) -> Affixes:
    """The common prefix and suffix, never with part of a number: those of t000 and t001 share t, not t00."""
    if len(stems) < 2:
        found = affixes_of_one.fullmatch("".join(stems))
        assert found is not None  # both affixes may be empty
        return found["prefix"], found["suffix"]
    prefix = re.sub(r"\d+$", "", os.path.commonprefix([*stems]))  # noqa: RUF071
    backwards = os.path.commonprefix([stem.removeprefix(prefix)[::-1] for stem in stems])  # noqa: RUF071
    return prefix, re.sub(r"^\d+", "", backwards[::-1])


def _hides_numbers(image: Affixes, mask: Affixes) -> bool:
    """Whether only one side has words with numbers that may identify files: s1_ and s2_. The 1 of _manual1 belongs to
    its word."""
    others = [
        [word for at in (0, 1) for word in SEPARATOR.split(own[at]) if word not in SEPARATOR.split(other[at])]
        for own, other in ((image, mask), (mask, image))
    ]
    with_numbers = [[word for word in words if NUMBER.search(word)] for words in others]
    return all(with_numbers) or any(word.isdigit() for words in with_numbers for word in words)


def masks_by_ending(images: Sequence[File], masks: Sequence[File]) -> dict[str, dict[File, File]]:
    """Ending → image → mask, where the names of masks are those of images and an ending ("" too). The last words may
    be missing in them, if all images have them: a_labelIds belongs to a_leftImg8bit."""
    _, suffix = _affixes({image.stem for image in images}, IMAGE_AFFIXES)
    by_name: dict[tuple[str, str], File] = {}
    for end in ("", *(suffix[found.start() :] for found in SEPARATOR.finditer(suffix))):
        for image in images:
            by_name.setdefault((image.folder, image.stem.removesuffix(end)), image)
    found: dict[str, dict[File, File]] = defaultdict(dict)
    for mask in masks:
        cuts = [len(mask.stem), *reversed([separator.start() for separator in SEPARATOR.finditer(mask.stem)])]
        cut = next((cut for cut in cuts if (mask.folder, mask.stem[:cut]) in by_name), None)
        if cut is not None:
            found[mask.stem[cut:]][by_name[mask.folder, mask.stem[:cut]]] = mask
    return found


def common_endings(by_ending: dict[str, dict[File, File]]) -> list[str]:
    """Those of masks_by_ending that are at least half as frequent as the most frequent; Cityscapes' ids come first."""
    most = max(map(len, by_ending.values()), default=0)
    common = [ending for ending, its in by_ending.items() if 2 * len(its) > most]
    return sorted(
        common, key=lambda ending: ("trainids" not in ending.lower(), "labelids" not in ending.lower(), ending)
    )


def split_by_endings(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """Files of one folder as images and masks: a mask has the name of another file and more behind it, s0 and
    s0_head."""
    stems = {(file.folder, file.stem) for file in files}
    images, masks = list[File](), list[File]()
    for file in files:
        has_image = any((file.folder, file.stem[: end.start()]) in stems for end in SEPARATOR.finditer(file.stem))
        (masks if has_image else images).append(file)
    return images, masks


def classes_by_ending(images: Sequence[File], masks: Sequence[File]) -> dict[str, dict[File, File]]:
    """Class or object → image → mask, where masks have the name of their image and an ending: head and tail of s0_head,
    s0_tail; of objects 1, 2, ... and "" (s0_mask, s0_mask_1). Words for masks do not count. Empty unless the endings
    are clear: several, of classes with several images, and none for readers or for views of one mask."""
    by_ending = masks_by_ending(images, masks)
    names = {
        ending: "_".join(word for word in SEPARATOR.split(ending) if word and not re.fullmatch(MASK_WORDS, word, re.I))
        for ending in by_ending
    }
    found = {names[ending]: its for ending, its in sorted(by_ending.items(), key=lambda item: names[item[0]])}
    with_mask = {image for its in found.values() for image in its}
    all_belong = sum(map(len, by_ending.values())) == len(masks) and 2 * len(with_mask) > len(images)
    have_whole_names = all(mask.stem.startswith(image.stem) for its in found.values() for image, mask in its.items())
    if len(found) < max(2, len(by_ending)) or not all_belong or not have_whole_names:
        return {}
    are_objects = all((NUMBER.fullmatch(name) or not name) and "mask" in end.lower() for end, name in names.items())
    are_classes = all(re.fullmatch(r"[^\W\d]{2,}", name) and len(its) > 1 for name, its in found.items())
    are_views = any(re.search(f"{VIEWS}|{READERS.pattern}", name, re.I) for name in found)
    return found if are_objects or (are_classes and not are_views) else {}
