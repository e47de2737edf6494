"""What the names of folders and files mean, and which files belong together by them. Opens no file.

Two names belong together if they are the same, or the same without one prefix and one suffix of all images and one of
all masks: 21_training and 21_manual1, t000 and man_seg000."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from unet_trainer.data.pairs import Part, composed
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS

Kind = Literal["image", "mask"]
# Names of folders, in lower case and without separators: img_dir is imgdir.
IMAGE_FOLDERS = (
    "image images img imgs imgdir imagedir imagefolder jpegimages pngimages input inputs frame frames photo photos "
    "picture pictures rgb leftimg8bit"
)
MASK_FOLDERS = (
    "mask masks maskdir label labels labeldir annotation annotations annot annots ann anns anndir annotationdir gt gts "
    "groundtruth groundtruths gtfine seg segs segmentation segmentations segmentationclass segmentationmask "
    "segmentationmasks target targets truth manual 1stmanual 2ndmanual trimap trimaps matte mattes"
)
KINDS: dict[str, Kind] = dict.fromkeys(IMAGE_FOLDERS.split(), "image")
KINDS.update(dict.fromkeys(MASK_FOLDERS.split(), "mask"))
PARTS: dict[str, Part] = {
    "train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test", "ts": "test", "stage1train": "train", "stage1test": "test",
}  # fmt: skip
PART_NAME = re.compile(rf"^({'|'.join(PARTS)})(?:set|data|dataset|split|v\d|(?:19|20)\d\d)$")  # train_set, train2017

# Words at the start or end of a file's name that mark a mask, and those that images have.
MASK_WORDS = (
    "masks?|labels?|labelids|labeltrainids|lbl|segs?|segmentations?|segmented|gt|ground_?truth|truth|annotations?|annot"
    "|ann|targets?|manual[12]?|1stho|2ndho|trimap|matte"
)
IMAGE_WORDS = "images?|imgs?|im|inputs?|photo|frame|rgb|sat|volume|stack|training|train|validation|val|test"
MASK_MARK, IMAGE_MARK = (
    re.compile(rf"(?:^|[-_. ])(?:{words})$|^(?:{words})[-_. ]", re.IGNORECASE) for words in (MASK_WORDS, IMAGE_WORDS)
)
SEPARATOR = re.compile(r"[-_. ]")

Affixes = tuple[str, str]  # prefix and suffix
Rule = tuple[Affixes, Affixes]  # what is removed from the names of images, and of masks, before they are compared
SAME_NAMES: Rule = ("", ""), ("", "")


def folder_meaning(name: str) -> tuple[Part | None, Kind | None]:
    """Part and kind of a folder: train_masks → train, mask; imgs → None, image; val2017 → val, None."""
    word = PART_NAME.sub(r"\1", SEPARATOR.sub("", name.lower()))
    if word in KINDS or word in PARTS:
        return PARTS.get(word), KINDS.get(word)
    for part_word, part in PARTS.items():
        for rest in (word.removeprefix(part_word), word.removesuffix(part_word)):
            if rest != word and rest in KINDS:
                return part, KINDS[rest]
    return None, None


def part_in(names: Iterable[str]) -> Part | None:
    """train, val or test, if the names hold words for one of them only: instances_train2017, train/a.jpg."""
    words = {word for name in names for word in re.findall("[a-z]{3,}", name.lower())}  # not "tr" and "ts"
    found = {PARTS[word] for word in words & PARTS.keys()}
    return found.pop() if len(found) == 1 else None


class File(NamedTuple):
    """A file by its names; those that are compared are in Unicode's composed form."""

    place: Path  # its folder
    file_name: str
    part: Part | None
    folder: str  # relative to the folder that was searched; ends in a slash, or is empty
    stem: str  # of a mask: without mask_suffix

    @property
    def path(self) -> Path:
        return self.place / self.file_name

    @property
    def name(self) -> str:
        return self.folder + self.stem

    @property
    def extension(self) -> str:
        extension = os.path.splitext(self.file_name)[1].lower()  # noqa: PTH122 # five times as fast
        return {".jpeg": ".jpg", ".tiff": ".tif"}.get(extension, extension)


def name_files(place: Path, names: Sequence[str], part: Part | None, inner: str) -> list[File]:
    """Files of a folder: v0 for v0.png and v0.nii.gz. `inner`: the folder as names show it."""
    inner = composed(inner)
    stems = [composed(name.removesuffix(".gz").rpartition(".")[0] or name) for name in names]
    return [File(place, name, part, inner, stem) for name, stem in zip(names, stems, strict=True)]


class Match(NamedTuple):
    """The pairs that a rule finds, and the files that it leaves unpaired."""

    rule: Rule
    pairs: list[tuple[File, File]]
    images: list[File]
    masks: list[File]

    @property
    def is_complete(self) -> bool:
        return not self.images and not self.masks


def match_names(images: Sequence[File], masks: Sequence[File]) -> Match:
    """The pairs of each part. Train comes first: another part may hold a single name, which follows its rule."""
    found = Match(SAME_NAMES, [], [], [])
    there = {file.part for file in images} | {file.part for file in masks}
    for part in (part for part in (None, *get_args(Part)) if part in there):
        of_part = [file for file in images if file.part == part], [file for file in masks if file.part == part]
        match = _match_part(*of_part, found.rule)
        rule = found.rule if found.pairs else match.rule
        found = Match(rule, found.pairs + match.pairs, found.images + match.images, found.masks + match.masks)
    return found


def _match_part(images: list[File], masks: list[File], known: Rule) -> Match:
    """By the first rule that leaves nothing unpaired, else by that which pairs most."""
    best = Match(SAME_NAMES, [], images, masks)
    for rule in _rules(images, masks, known):
        image_of, mask_of = (_by_rest(files, *affixes) for files, affixes in zip((images, masks), rule, strict=True))
        pairs = [(image, mask_of[name]) for name, image in image_of.items() if name in mask_of]
        if len(pairs) == len(images) == len(masks):
            return Match(rule, pairs, [], [])
        if len(pairs) > len(best.pairs):
            paired = {id(file) for pair in pairs for file in pair}  # their hash would take longer
            left = ([file for file in files if id(file) not in paired] for files in (images, masks))
            best = Match(rule, pairs, *left)
    return best


def _rules(images: list[File], masks: list[File], known: Rule) -> Iterator[Rule]:
    """The known one; the same names; without what all images and what all masks begin and end with; without the ends
    alone, since few masks may begin with more than their images do."""
    yield from dict.fromkeys([known, SAME_NAMES])
    image, mask = _common_affixes(images, IMAGE_MARK), _common_affixes(masks, MASK_MARK)
    for rule in ((image, mask), (("", image[1]), ("", mask[1]))):
        if not _differ_in_numbers(*rule):
            yield rule


def _by_rest(files: list[File], prefix: str, suffix: str) -> dict[str, File]:
    """By the name without affixes, but for names that several files have."""
    names = [folder + stem.removeprefix(prefix).removesuffix(suffix) for _, _, _, folder, stem in files]
    found = dict(zip(names, files, strict=True))
    if len(found) < len(files):
        for name, number in Counter(names).items():
            if number > 1:
                del found[name]
    return found


def _common_affixes(files: Sequence[File], mark: re.Pattern[str]) -> Affixes:
    """Of a single name only a word such as _mask: it has nothing in common with others."""
    stems = {file.stem for file in files}
    if len(stems) < 2:
        prefix, _, suffix = ("".join(stems)).partition(mark.sub("", "".join(stems)) or "/")
        return prefix, suffix
    prefix = _common_start(stems)
    return prefix, _common_start([stem.removeprefix(prefix)[::-1] for stem in stems])[::-1]


def _common_start(stems: Collection[str]) -> str:
    """Up to the end of a word, or to where a number begins in all: t of t000 and t001, nothing of a_b and aa_b."""
    start = os.path.commonprefix([*stems]).rstrip("0123456789")  # noqa: RUF071
    if all(map(str.isdigit, {stem[len(start) : len(start) + 1] for stem in stems})):
        return start
    return start[: max((found.end() for found in SEPARATOR.finditer(start)), default=0)]


def _differ_in_numbers(image: Affixes, mask: Affixes) -> bool:
    """Whether each side has numbers that the other lacks, which may identify files: s1_ and s2_. A word with a number,
    such as _manual1, may belong to one side, a number alone may not."""
    of_images, of_masks = (
        {word for affix in affixes for word in SEPARATOR.split(affix) if re.search(r"\d", word)}
        for affixes in (image, mask)
    )
    return bool(of_images - of_masks and of_masks - of_images) or any(map(str.isdigit, of_images ^ of_masks))


def split_by_marks(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """Images and masks of one folder: a mask has a mark that not all files have (_mask, gt_), or is beside a JPEG."""
    marks = {file: {mark.group().lower() for mark in MASK_MARK.finditer(file.stem)} for file in files}
    of_all = set[str]().union(*marks.values()).intersection(*marks.values())
    jpegs = {(file.part, file.name) for file in files if file.extension == ".jpg"}
    beside = (file for file in files if file.extension != ".jpg" and (file.part, file.name) in jpegs)
    masks = {file for file in files if marks[file] - of_all} or {*beside}
    return [file for file in files if file not in masks], [file for file in files if file in masks]


def split_by_endings(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """Images and masks of one folder: a mask has the name of another file and more behind it, s0 and s0_head."""
    names = {file.name for file in files}
    masks = {file for file in files if not names.isdisjoint(_starts(file))}
    return [file for file in files if file not in masks], [file for file in files if file in masks]


def split_by_suffix(images: list[File], masks: list[File], suffix: str) -> tuple[list[File], list[File]]:
    """Images, and the masks whose names end in a suffix, without it; it may also be an extension: .png. Of one folder
    those with another ending are neither."""
    if suffix.lower() in IMAGE_EXTENSIONS:
        chosen = [file for file in masks if file.file_name.lower().endswith(suffix.lower())]
    else:
        ending = composed(suffix)
        chosen = [file._replace(stem=file.stem.removesuffix(ending)) for file in masks if file.stem.endswith(ending)]
    if images is not masks:
        return images, chosen
    are_masks, names = {mask.file_name for mask in chosen}, {mask.name for mask in chosen}
    rest = [file for file in images if file.file_name not in are_masks]
    others = {*split_by_endings(rest)[1]}
    return [file for file in rest if file.name in names or file not in others], chosen


def _starts(file: File) -> list[str]:
    """The name without its last word, the last two, ..."""
    return [file.folder + file.stem[: found.start()] for found in SEPARATOR.finditer(file.stem)][::-1]


def masks_by_ending(images: Sequence[File], masks: Sequence[File]) -> dict[str, dict[File, File]]:
    """Ending → image → mask, where the names of masks are those of images and an ending ("" too). The last words may
    be missing in them, if all images have them: a_labelIds belongs to a_leftImg8bit."""
    _, suffix = _common_affixes(images, IMAGE_MARK)
    by_name: dict[tuple[Part | None, str], File] = {}
    for end in ("", *(suffix[found.start() :] for found in SEPARATOR.finditer(suffix))):
        for image in images:
            by_name.setdefault((image.part, image.name.removesuffix(end)), image)
    found: dict[str, dict[File, File]] = defaultdict(dict)
    for mask in masks:
        if start := next((start for start in (mask.name, *_starts(mask)) if (mask.part, start) in by_name), ""):
            found[mask.name[len(start) :]][by_name[mask.part, start]] = mask
    return found
