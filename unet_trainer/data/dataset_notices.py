"""The texts of a dataset's report: problems with their fixes, and what the user should know. Decides nothing."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from unet_trainer.config.schema import Config, to_plain
from unet_trainer.data.mask_evidence import MaskEvidence, class_shares, encode_values
from unet_trainer.data.near_duplicates import Series, describe_near_duplicates, describe_series
from unet_trainer.data.pairs import UNREADABLE, Choice, Pair, Problem, Question, first_few, setting_lines
from unet_trainer.data.scan import ImageFacts, MaskFacts
from unet_trainer.data.splits import Split
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import COLOUR, UNKNOWN, MaskCoding, as_written, largest_tolerance, show_value
from unet_trainer.system.console import counted

LARGE_FOREGROUND = 0.75  # share of the pixels from which it may be the background


def problems_with_files(unreadable: Sequence[str], resizable: Sequence[str], others: Sequence[str]) -> list[Problem]:
    """`resizable`, `others`: masks of another size than their images, with the same aspect ratio and without."""
    repair = "repair these files, or remove them together with their partners"
    resize = "resize_masks: true resizes masks with the aspect ratio of their images"
    same = "an image and its mask must have the same size"
    if any("EXIF" in line for line in others):
        same = "rotate the masks too, or save the images without EXIF orientation"
    size = "mask", "of another size than the image"
    problems = [
        Problem("unreadable", *UNREADABLE, tuple(unreadable), repair),
        Problem("sizes", *size, tuple(resizable), resize, {"resize_masks": True}),
        Problem("sizes", *size, tuple(others), same),
    ]
    return [problem for problem in problems if problem.lines]


def problem_of_kind(lines: Sequence[str], in_channels: int | str) -> Problem:
    fix = "all images of a dataset must have the same depth and channels: convert or remove these"
    if in_channels != "auto":
        fix = f"in_channels: {in_channels} does not fit them; leave it out, or convert the images"
    return Problem("kind", "image", "of another kind than the others", tuple(lines), fix)


def describe_size(shown_mask: str, image: ImageFacts, mask: MaskFacts) -> str:
    """The line of a mask of another size than its image."""
    line = f"{shown_mask}: {mask.width}×{mask.height}, its image is {image.width}×{image.height}"
    is_turned = image.is_turned and mask.size == image.size[::-1]
    return f"{line} (rotated by its EXIF orientation; the mask is not)" if is_turned else line


def problem_of_values(pairs: Sequence[Pair], masks: Sequence[MaskFacts], coding: MaskCoding) -> list[Problem]:
    lines = unknown_value_lines(pairs, masks, coding)
    classes = ", ".join(coding.describe(class_id) for class_id in range(coding.num_ids))
    what = f"with values that belong to no class (the classes are {classes})"
    fix = "correct the masks, or add the values to mask_values or ignore_value; unknown_values: ignore ignores them"
    return [Problem("values", "mask", what, tuple(lines), fix, {"unknown_values": "ignore"})] if lines else []


def unknown_value_lines(pairs: Sequence[Pair], masks: Sequence[MaskFacts], coding: MaskCoding) -> list[str]:
    """A line for each mask with values that belong to no class."""
    lines = []
    for pair, mask in zip(pairs, masks, strict=True):
        values = tuple(sorted(mask.counts))
        ids = zip(values, encode_values(values, coding), strict=True)
        unknown = [value for value, class_id in ids if class_id == UNKNOWN]
        total = mask.height * mask.width
        shares = [f"{show_value(value)} ({mask.counts[value] / total:.1%} of pixels)" for value in unknown[:6]]
        lines += [f"{pair.shown_mask}: {', '.join(shares)}"] if unknown else []
    return lines


def problem_of_palettes(pairs: Sequence[Pair], masks: Sequence[MaskFacts]) -> list[Problem]:
    """The values of masks with a palette are places in it: a colour with two places has two meanings."""
    places: dict[int, dict[int, list[str]]] = {}  # colour → its places in palettes → masks
    for pair, mask in zip(pairs, masks, strict=True):
        palette = mask.palette or {}
        if len(set(palette.values())) == len(palette):  # else a colour does not tell two values apart
            for value, colour in palette.items():
                places.setdefault(colour, {}).setdefault(value, []).append(pair.shown_mask)
    lines: dict[str, str] = {}
    for colour, masks_of in places.items():
        usual = max(masks_of, key=lambda value: len(masks_of[value]))
        for value in masks_of.keys() - {usual}:
            what = f"{show_value(COLOUR + colour)} is {value}, in {masks_of[usual][0]} it is {usual}"
            for shown in masks_of[value]:
                lines.setdefault(shown, f"{shown}: {what}")
    fix = "save the masks in colour, or all with the same palette: their values are places in it"
    what = "with a palette in another order"
    return [Problem("palettes", "mask", what, tuple(lines.values()), fix)] if lines else []


def nothing_to_learn(evidence: MaskEvidence, config: Config, only: str = "") -> Question:
    """Every pixel has one value, or is of one class, `only`."""
    seen = [show_value(value) for value in evidence.seen[:1]]
    every = only or (seen[0] if seen else f"ignored (ignore_value: {to_plain(config.ignore_value)})")
    masks = "the only mask" if len(evidence.masks) == 1 else f"all {len(evidence.masks)} masks"
    where = "are these the masks (mask_dir), and were they written right?"
    return Question(f"there is nothing to learn: every pixel of {masks} is {every}; {where}")


def describe_large_foreground(coding: MaskCoding, evidence: MaskEvidence) -> list[str]:
    """Masks with the foreground in black are common, and only its share shows it: settings that exchange the two."""
    share = class_shares(evidence.masks, coding, 2)[1]
    if not LARGE_FOREGROUND <= share < 1 or coding.mask_values == "nonzero":
        return []
    ends, settings = (evidence.seen[-1], evidence.seen[0]), dict[str, Any]()
    if coding.values is None:
        settings |= {"mask_values": ends, "mask_tolerance": largest_tolerance(ends)}
    else:
        settings["mask_values"] = tuple(as_written(coding.values_of(class_id)) for class_id in (1, 0))
        settings |= {"mask_tolerance": coding.tolerance} if coding.tolerance else {}
    settings |= {"ignore_value": coding.written_ignore_value} if coding.ignored else {}
    lines = "".join(f"\n  {line}" for line in setting_lines(settings))
    what = f"the foreground ({coding.describe(1)}) is {share:.0%} of the pixels"
    return [f"{what}; if it is the background, set:{lines}"]


def describe_changes(changed: Sequence[str], num_resized: int) -> list[str]:
    """`changed`: files that are not as they were when the run began."""
    what = f"{counted(len(changed), 'file')} changed since the run began: {first_few(changed)}"
    lines = [f"{what}; scores from before and after are not of the same data"] if changed else []
    resized = f"{counted(num_resized, 'mask')} resized to the size of the image (resize_masks)"
    return [*lines, resized] if num_resized else lines


def ask_for_folders(images: str, masks: str, few: float, many: float) -> tuple[Question, str]:
    """Whether the folders found for images and masks are swapped, as a question and as a note. `few`, `many`: values
    that cover an image and a mask."""
    values = f"{few:.0f} values each, as masks do, and those of {masks} {many:.0f}, as pictures do"
    text = f"image_dir and mask_dir look swapped: the files of {images} hold {values}"
    swapped = Choice(f"{masks} holds the images", {"image_dir": masks, "mask_dir": images})
    question = Question(text, swapped, Choice(f"{images} holds the images", {"image_dir": images, "mask_dir": masks}))
    return question, "\n  ".join([f"{text}; if they are, set:", *setting_lines(swapped.settings)])


def describe_same_objects(
    pairs: Sequence[Pair],
    images: Sequence[ImageFacts],
    split: Split,
    copies: Sequence[tuple[int, int]],
    series: Series | None,
    is_divided: bool,
) -> list[str]:
    """A line each on the series, and on the near-duplicates that are neither identical nor of one group."""
    train, val = ({pair.image for pair in side} for side in (split.train, split.val))
    parts = ["val" if pair.image in val else "train" if pair.image in train else "" for pair in pairs]
    groups, shown = [pair.group for pair in pairs], [pair.shown_image for pair in pairs]
    known = {(a, b) for a, b in copies if groups[a] == groups[b] != "" or images[a].content == images[b].content}
    lines = [describe_near_duplicates([pair for pair in copies if pair not in known], shown, parts, is_divided)]
    lines += [] if series is None else [describe_series(series, shown, parts, is_divided)]
    return [line for line in lines if line]


def describe_lone_val_image(split: Split, is_divided: bool) -> list[str]:
    if len(split.val) != 1 or split.val[0].box is not None:
        return []
    fix = "put more images into val" if is_divided else "add images, some dozens are a start"
    if not is_divided and not any(pair.group for pair in split.train):
        folds = min(5, len(split.train) + 1)
        fix += f"; or train with num_folds: {folds} and fold: 0 to {folds - 1}, to validate on each image once"
    what = f"only {split.val[0].shown_image} validates: val_iou, by which best.pt is chosen, is the score of one image"
    return [f"{what}; {fix}"]


def describe_groups_in_test(split: Split) -> list[str]:
    tested, trained = ({pair.group for pair in side} for side in (split.test, split.train))
    shared = sorted((tested & trained) - {""})
    what = f"{counted(len(shared), 'group')} in train and in test: {first_few(shared)}"
    return [f"{what}; the scores of evaluate --split test are too good for them"] if shared else []


def describe_missing_classes(train: Collection[int], val: Collection[int], names: Sequence[str]) -> list[str]:
    """`train`, `val`: the class ids that occur there."""
    lines = []
    for missing, where in (
        (set(train) - set(val), "validation mask (val_iou says nothing of them)"),
        (set(val) - set(train), "training mask (nothing teaches them)"),
    ):
        shown = first_few(names[class_id] for class_id in sorted(missing))
        fix = "add images with them, or choose with split_file=FILE.csv"
        lines += [f"classes in no {where}: {shown}; {fix}"] if missing else []
    return lines


def describe_files(
    pairs: Sequence[Pair],
    images: Sequence[ImageFacts],
    masks: Sequence[MaskFacts],
    num_channels: int,
    units: ImageSpec | None,
) -> list[str]:
    """What is unusual in the images and masks. `units`: the spec, if mean and standard deviation are the user's."""

    def some(number: int, what: str) -> str:
        return f"{number} of {counted(len(pairs), what)}"

    turned = sum(image.is_turned for image in images)
    grey = sum(image.channels == 1 for image in images) if num_channels > 1 else 0
    in_alpha = sum(mask.is_alpha for mask in masks)
    is_scaled = units is not None and units.is_8bit and max(*units.mean, *units.std) <= 1
    flat = [pair.shown_image for pair, image in zip(pairs, images, strict=True) if image.low == image.high]
    by_digest: dict[str, list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        by_digest[image.digest].append(index)
    differing = [same for same in by_digest.values() if len({masks[index].digest for index in same}) > 1]
    same_images = first_few(" = ".join(pairs[index].shown_image for index in same[:3]) for same in differing)
    exif = (
        "rotated by the EXIF orientation, a mask only by one of its own: if masks lie wrong, rotate them too, or save"
    )
    notices = [
        (in_alpha, f"the alpha channel of {some(in_alpha, 'mask')} is the mask; their colour is the same everywhere"),
        (turned, f"{some(turned, 'image')} {'is' if turned == 1 else 'are'} {exif} the images without it"),
        (grey, f"{some(grey, 'image')} {'is' if grey == 1 else 'are'} grey, whose channel is repeated"),
        (is_scaled, "image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1"),
        (flat, f"{counted(len(flat), 'image')} of a single colour: {first_few(flat)}"),
        (differing, f"{counted(len(differing), 'set')} of identical images with masks that differ: {same_images}"),
    ]
    return [text for holds, text in notices if holds]
