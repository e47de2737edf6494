"""What names mean, and which belong together: the same names, else those that differ by one prefix and one suffix of
the images and one of the masks, the same for all pairs. Opens no file."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from unet_trainer.data.pairs import Part, composed
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS

# Folder names, in lower case and without separators: img_dir is imgdir.
IMAGE_FOLDERS = (
    "image images img imgs imgdir imagedir imagefolder jpegimages pngimages input inputs frame frames photo photos "
    "picture pictures rgb leftimg8bit"
)
MASK_FOLDERS = (
    "mask masks maskdir label labels labeldir annotation annotations annot annots ann anns anndir annotationdir gt gts "
    "groundtruth groundtruths gtfine seg segs segmentation segmentations segmentationclass segmentationmask "
    "segmentationmasks target targets truth manual 1stmanual 2ndmanual trimap trimaps matte mattes"
)
Kind = Literal["image", "mask"]
KINDS: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_FOLDERS.split(), "image"),
    **dict.fromkeys(MASK_FOLDERS.split(), "mask"),
}
PARTS: dict[str, Part] = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test", "stage1train": "train", "stage1test": "test",
}  # fmt: skip
PART_NAME = re.compile(rf"^({'|'.join(PARTS)})(?:set|data|dataset|split|v\d|(?:19|20)\d\d)$")  # train_set, train2017

# Words at the start or end of a file's name that mark a mask.
MASK_WORDS = (
    "masks?|labels?|labelids|labeltrainids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot"
    "|ann|targets?|manual[12]?|1stho|2ndho|trimap|matte"
)
MASK_MARK = re.compile(rf"(?:^|[-_. ])(?:{MASK_WORDS})$|^(?:{MASK_WORDS})[-_. ]", re.IGNORECASE)
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|volume|stack|training|train|validation|val|test"
# A single name has no common prefix or suffix; only these words are removed from it.
IMAGE_AFFIXES, MASK_AFFIXES = (
    re.compile(rf"(?P<prefix>(?:(?:{words})[-_. ]|))(?P<core>.*?)(?P<suffix>(?:(?:^|[-_. ])(?:{words})|))", re.I)
    for words in (IMAGE_WORDS, MASK_WORDS)
)
READERS = re.compile(
    r"annotator|annotation|rater|expert|observer|reader|grader|doctor|manual|consensus|(?:^|\D)\d(?:st|nd|rd)(?:\D|$)",
    re.I,
)
VIEWS = "instance|color|colour|polygon|overlay|vis|edge|boundary"  # of a mask
NO_CLASS = re.compile(f"{VIEWS}|{READERS.pattern}", re.I)
CHANNEL = re.compile(r"_\d{4}$")  # of nnU-Net: case_0000.png is the first channel of the case whose label is case.png
NUMBER, SEPARATOR = re.compile(r"\d+"), re.compile(r"[-_. ]")
MOST_ENDINGS = 5  # in a question

Affixes = tuple[str, str]  # prefix and suffix


def folder_meaning(name: str) -> tuple[Part | None, Kind | None]:
    """Part and kind of a folder: train_masks → train, mask; imgs → None, image; val2017 → val, None."""
    word = PART_NAME.sub(r"\1", re.sub(r"[-_. ]", "", name.lower()))
    if word in KINDS or word in PARTS:
        return PARTS.get(word), KINDS.get(word)
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return None, None


def part_in(names: Iterable[str]) -> Part | None:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg."""
    words = [word for name in names for word in re.findall("[a-z]+", name.lower())]
    # "tr" and "ts" mean little in a file's name.
    found = {PARTS[word] for word in words if word in PARTS and len(word) > 2}
    return found.pop() if len(found) == 1 else None


class File(NamedTuple):
    """A file by its names, in Unicode's composed form."""

    path: Path
    folder: str  # relative to the folder that was searched; ends in a slash, or is empty
    stem: str  # of a mask: without mask_suffix

    @property
    def name(self) -> tuple[str, str]:
        return self.folder, self.stem


class Rule(NamedTuple):
    """What is removed from names before they are compared."""

    image: Affixes = ("", "")
    mask: Affixes = ("", "")


class Match(NamedTuple):
    """The pairs that a rule finds, and the files that it leaves unpaired."""

    rule: Rule
    pairs: list[tuple[File, File]]
    images: list[File]
    masks: list[File]

    @property
    def is_complete(self) -> bool:
        return not self.images and not self.masks


def name_files(folder: Path, names: Iterable[str], inner: str = "") -> list[File]:
    """Files of a folder: v0 for v0.png and v0.nii.gz. `inner`: the folder as names show it."""
    inner = composed(inner)
    return [File(folder / name, inner, composed(name.removesuffix(".gz").rpartition(".")[0] or name)) for name in names]


def with_ending(files: Iterable[File], mask_suffix: str) -> list[File]:
    """The files whose names end in mask_suffix, without it; it may also be an extension: .png."""
    if mask_suffix.lower() in IMAGE_EXTENSIONS:
        return [file for file in files if file.path.suffix.lower() == mask_suffix.lower()]
    suffix = composed(mask_suffix)
    return [file._replace(stem=file.stem.removesuffix(suffix)) for file in files if file.stem.endswith(suffix)]


def mask_marks(stem: str) -> list[str]:
    """The marks of a mask in a name, such as _mask in a_mask or gt_ in gt_a; in lower case."""
    return [found.group().lower() for found in MASK_MARK.finditer(stem)]


def without_marks(stem: str) -> list[str]:
    """The names of images that a name with marks may belong to."""
    return [rest for mark in mask_marks(stem) for rest in (stem[: -len(mark)], stem[len(mark) :])]


def best_match(images: Sequence[File], masks: Sequence[File], known: Rule | None = None) -> Match:
    """The match of the first rule that leaves nothing unpaired: `known` (of the training pairs), the same names, what
    the images and what the masks have in common. Else that which pairs most."""
    partial = []
    for rule in dict.fromkeys([*([known] if known else []), Rule(), *_common_rules(images, masks)]):
        match = _match_names(images, masks, rule)
        if match.is_complete:
            return match
        if _keeps_words_whole(match):
            partial.append(match)
    return max(partial, key=lambda match: len(match.pairs))


def _match_names(images: Sequence[File], masks: Sequence[File], rule: Rule) -> Match:
    """Pairs one image with one mask if they are in the same subfolder and the rest of their names is equal."""
    image_of, mask_of = (_files_by_name(files, *affixes) for files, affixes in zip((images, masks), rule, strict=True))
    pairs = [(image, mask) for name, image in image_of.items() if image and (mask := mask_of.get(name))]
    if 2 * len(pairs) == len(images) + len(masks):
        return Match(rule, pairs, [], [])
    paired = {id(file) for pair in pairs for file in pair}  # their hash would take longer
    left = ([file for file in files if id(file) not in paired] for files in (images, masks))
    return Match(rule, pairs, *left)


def _files_by_name(files: Sequence[File], prefix: str, suffix: str) -> dict[tuple[str, str], File | None]:
    """By subfolder and the name without affixes; None where several files have it."""
    found: dict[tuple[str, str], File | None] = {}
    for file in files:
        name = file.folder, file.stem.removeprefix(prefix).removesuffix(suffix)
        found[name] = None if name in found else file
    return found


def _keeps_words_whole(match: Match) -> bool:
    """Whether the affixes are whole words, or end where a number begins, in all names. What a few masks have in common
    may be more: of a_mask and aa_mask, a is no prefix. A complete match shows that by itself."""
    return all(
        (not prefix or SEPARATOR.match(prefix[-1]) or file.stem.removeprefix(prefix)[:1].isdigit())
        and (not suffix or SEPARATOR.match(suffix[0]) or file.stem.removesuffix(suffix)[-1:].isdigit())
        for pair in match.pairs
        for (prefix, suffix), file in zip(match.rule, pair, strict=True)
    )


def _common_rules(images: Sequence[File], masks: Sequence[File]) -> Iterator[Rule]:
    """What all images and what all masks begin and end with is removed; or the ends alone, since a few masks may begin
    with more than their images do."""
    image, mask = _common_affixes(images, IMAGE_AFFIXES), _common_affixes(masks, MASK_AFFIXES)
    ends = Rule(("", image[1]), ("", mask[1]))
    for rule in (Rule(image, mask), ends, Rule(mask=ends.mask)):
        if not _differ_in_numbers(*rule):
            yield rule


def _common_affixes(files: Sequence[File], affixes_of_one: re.Pattern[str] = IMAGE_AFFIXES) -> Affixes:
    """The common prefix and suffix, never with part of a number: those of t000 and t001 share t, not t00."""
    stems = {file.stem for file in files}
    if len(stems) < 2:
        found = affixes_of_one.fullmatch("".join(stems))
        assert found is not None  # both affixes may be empty
        return found["prefix"], found["suffix"]
    prefix = re.sub(r"\d+$", "", os.path.commonprefix([*stems]))  # noqa: RUF071
    backwards = os.path.commonprefix([stem.removeprefix(prefix)[::-1] for stem in stems])  # noqa: RUF071
    return prefix, re.sub(r"^\d+", "", backwards[::-1])


def _differ_in_numbers(image: Affixes, mask: Affixes) -> bool:
    """Whether each side has numbers that the other lacks, which may identify files: s1_ and s2_. A word with a number,
    such as _manual1, may belong to one side, a number alone may not."""
    image_words, mask_words = (
        {word for affix in affixes for word in SEPARATOR.split(affix) if NUMBER.search(word)}
        for affixes in (image, mask)
    )
    only_image, only_mask = image_words - mask_words, mask_words - image_words
    return bool(only_image and only_mask) or any(map(str.isdigit, only_image | only_mask))


def masks_by_ending(images: Sequence[File], masks: Sequence[File]) -> dict[str, dict[File, File]]:
    """Ending → image → mask, where the names of masks are those of images and an ending ("" too). The last words may
    be missing in them, if all images have them: a_labelIds belongs to a_leftImg8bit."""
    _, suffix = _common_affixes(images)
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
    common.sort(key=lambda ending: ("trainids" not in ending.lower(), "labelids" not in ending.lower(), ending))
    return common[:MOST_ENDINGS]


def split_by_endings(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """Images and masks of one folder: a mask has the name of another file and more behind it, s0 and s0_head."""
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
    found: dict[str, dict[File, File]] = {}
    are_objects = are_classes = True
    for ending, its in masks_by_ending(images, masks).items():
        words = [word for word in SEPARATOR.split(ending) if word and not re.fullmatch(MASK_WORDS, word, re.I)]
        name = "_".join(words)
        are_objects &= "mask" in ending.lower() and (not name or name.isdecimal())
        are_classes &= len(its) > 1 and bool(re.fullmatch(r"[^\W\d]{2,}", name)) and not NO_CLASS.search(name)
        found.setdefault(name, {}).update(its)
    with_mask = {image for its in found.values() for image in its}
    all_belong = sum(map(len, found.values())) == len(masks) and 2 * len(with_mask) > len(images)
    have_whole_names = all(mask.stem.startswith(image.stem) for its in found.values() for image, mask in its.items())
    is_clear = len(found) > 1 and all_belong and have_whole_names and (are_objects or are_classes)
    return dict(sorted(found.items())) if is_clear else {}
