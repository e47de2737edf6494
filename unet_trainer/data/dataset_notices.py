"""What a dataset's report says: its findings, problems and questions in words. Decides nothing: dataset_report does,
and hands over plain values."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from unet_trainer.config.schema import Config, to_plain
from unet_trainer.data.mask_evidence import MaskEvidence, encode_values
from unet_trainer.data.near_duplicates import Series, describe_near_duplicates, describe_series
from unet_trainer.data.pairs import UNREADABLE, Choice, Pair, Problem, Question, first_few, setting_lines
from unet_trainer.data.scan import ImageFacts, MaskFacts
from unet_trainer.data.splits import Split
from unet_trainer.images.mask_decoding import COLOUR, UNKNOWN, MaskCoding, show_value
from unet_trainer.system.console import counted

MORE = "add images with them, or choose with split_file=FILE.csv"
OTHER_SIZE, OTHER_KIND = ("mask", "of another size than the image"), ("image", "of another kind than the others")
OTHER_PALETTE = "mask", "with a palette in another order"
# By kind: what has it, what is wrong, and the fix.
PROBLEMS = {
    "unreadable": (*UNREADABLE, "repair these files, or remove them together with their partners"),
    "sizes": (*OTHER_SIZE, "an image and its mask must have the same size"),
    "sizes of one shape": (*OTHER_SIZE, "resize_masks: true resizes masks with the aspect ratio of their images"),
    "kind": (*OTHER_KIND, "all images of a dataset must have the same depth and channels: convert or remove these"),
    "kind that is set": (*OTHER_KIND, "in_channels does not fit them; leave it out, or convert the images"),
    "palettes": (
        *OTHER_PALETTE,
        "save the masks in colour, or all with the same palette: their values are places in it",
    ),
}
SOLUTIONS = {"sizes of one shape": {"resize_masks": True}}  # settings that solve a problem


class Finding:
    """What does not stop training and the user should know: its kind, and the values that its sentence is made of. The
    first says what or how many have it; if there are none, nothing was found."""

    def __init__(self, kind: str, *values: Any) -> None:
        self.kind, self.values = kind, values

    def __bool__(self) -> bool:
        return bool(self.values[0])

    def __str__(self) -> str:
        match self.kind, *self.values:
            case "changed", files:
                what = f"{counted(len(files), 'file')} changed since the run began: {first_few(files)}"
                return f"{what}; scores from before and after are not of the same data"
            case "resized", number:
                return f"{counted(number, 'mask')} resized to the size of the image (resize_masks)"
            case "large foreground", values, share, settings:
                what = f"the foreground ({values}) is {share:.0%} of the pixels; if it is the background, set:"
                return "\n  ".join([what, *setting_lines(settings)])
            case "folders look swapped", question:
                return "\n  ".join([f"{question.text}; if they are, set:", *question.choices[0].lines()[1:]])
            case "one validates", image, num_folds, is_divided:
                what = f"only {image} validates: val_iou, by which best.pt is chosen, is the score of one image"
                fix = "put more images into val" if is_divided else "add images, some dozens are a start"
                folds = f"num_folds: {num_folds} and fold: 0 to {num_folds - 1}"
                folds = f"; or train with {folds}, to validate on each image once" if num_folds else ""
                return f"{what}; {fix}{folds}"
            case "groups in test", groups:
                what = f"{counted(len(groups), 'group')} in train and in test: {first_few(groups)}"
                return f"{what}; the scores of evaluate --split test are too good for them"
            case "not validated", classes:
                return f"classes in no validation mask (val_iou says nothing of them): {first_few(classes)}; {MORE}"
            case "not trained", classes:
                return f"classes in no training mask (nothing teaches them): {first_few(classes)}; {MORE}"
            case "in alpha", number, total:
                some = f"{number} of {counted(total, 'mask')}"
                return f"the alpha channel of {some} is the mask; their colour is the same everywhere"
            case "rotated", number, total:
                some = f"{number} of {counted(total, 'image')} {'is' if number == 1 else 'are'}"
                fix = "if masks lie wrong, rotate them too, or save the images without it"
                return f"{some} rotated by the EXIF orientation, a mask only by one of its own: {fix}"
            case "grey", number, total:
                some = f"{number} of {counted(total, 'image')} {'is' if number == 1 else 'are'}"
                return f"{some} grey, whose channel is repeated"
            case "units of 0 to 1", *_:
                return "image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1"
            case "other masks", sets:
                shown = first_few(" = ".join(images[:3]) for images in sets)
                return f"{counted(len(sets), 'set')} of identical images with masks that differ: {shown}"
        raise AssertionError(f"no sentence for {self.kind}")


def problem(kind: str, lines: Sequence[str]) -> Problem:
    noun, what, fix = PROBLEMS[kind]
    return Problem(kind.partition(" ")[0], noun, what, tuple(lines), fix, SOLUTIONS.get(kind, {}))


def describe_size(shown_mask: str, image: ImageFacts, mask: MaskFacts) -> str:
    """The line of a mask of another size than its image."""
    line = f"{shown_mask}: {mask.width}×{mask.height}, its image is {image.width}×{image.height}"
    is_turned = image.is_turned and mask.size == image.size[::-1]
    return f"{line} (rotated by its EXIF orientation; the mask is not)" if is_turned else line


def values_of_no_class(pairs: Sequence[Pair], masks: Sequence[MaskFacts], coding: MaskCoding) -> Problem:
    classes = ", ".join(coding.describe(class_id) for class_id in range(coding.num_ids))
    what = f"with values that belong to no class (the classes are {classes})"
    fix = "correct the masks, or add the values to mask_values or ignore_value; unknown_values: ignore ignores them"
    lines = unknown_value_lines(pairs, masks, coding)
    return Problem("values", "mask", what, tuple(lines), fix, {"unknown_values": "ignore"})


def unknown_value_lines(pairs: Sequence[Pair], masks: Sequence[MaskFacts], coding: MaskCoding) -> list[str]:
    """A line for each mask with values that belong to no class."""
    lines = []
    for pair, mask in zip(pairs, masks, strict=True):
        values, num_pixels = tuple(sorted(mask.counts)), mask.height * mask.width
        ids = zip(values, encode_values(values, coding), strict=True)
        unknown = [value for value, class_id in ids if class_id == UNKNOWN][:6]
        shares = [f"{show_value(value)} ({mask.counts[value] / num_pixels:.1%} of pixels)" for value in unknown]
        lines += [f"{pair.shown_mask}: {', '.join(shares)}"] if unknown else []
    return lines


def palettes_in_another_order(pairs: Sequence[Pair], masks: Sequence[MaskFacts]) -> Problem:
    """The values of masks with a palette are places in it: a colour with two places has two meanings."""
    palettes, usual = [mask.palette or {} for mask in masks], defaultdict[int, Counter[int]](Counter)
    # Where two places have one colour, it does not tell their values apart.
    palettes = [palette if len({*palette.values()}) == len(palette) else {} for palette in palettes]
    for value, colour in (item for palette in palettes for item in palette.items()):
        usual[colour][value] += 1
    lines = []
    for pair, palette in zip(pairs, palettes, strict=True):
        for value, colour in palette.items():
            if value != (other := usual[colour].most_common(1)[0][0]):
                lines.append(f"{pair.shown_mask}: {show_value(COLOUR + colour)} is {value}, in most it is {other}")
                break
    return problem("palettes", lines)


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {counted(len(sizes) - most, 'more size')}" if len(sizes) > most else "")


def describe_same_objects(
    pairs: Sequence[Pair],
    images: Sequence[ImageFacts],
    split: Split,
    copies: Sequence[tuple[int, int]],
    series: Series | None,
) -> list[str]:
    """A line each on the series, and on the near-duplicates that are neither identical nor of one group."""
    part_of = {pair.image: part for part, side in (("train", split.train), ("val", split.val)) for pair in side}
    parts, shown = [part_of.get(pair.image, "") for pair in pairs], [pair.shown_image for pair in pairs]
    is_divided, groups = any(pair.part == "val" for pair in pairs), [pair.group for pair in pairs]
    new = [(a, b) for a, b in copies if not groups[a] == groups[b] != "" and images[a].content != images[b].content]
    lines = [describe_near_duplicates(new, shown, parts, is_divided)]
    return lines if series is None else [*lines, describe_series(series, shown, parts, is_divided)]


def nothing_to_learn(evidence: MaskEvidence, config: Config, only: str = "") -> Question:
    """Every pixel has one value, or is of one class, `only`."""
    every = only or next(map(show_value, evidence.seen), f"ignored (ignore_value: {to_plain(config.ignore_value)})")
    masks = "the only mask" if len(evidence.masks) == 1 else f"all {len(evidence.masks)} masks"
    where = "are these the masks (mask_dir), and were they written right?"
    return Question(f"there is nothing to learn: every pixel of {masks} is {every}; {where}")


def ask_for_folders(images: str, masks: str, few: float, many: float) -> Question:
    """Whether the folders found for images and masks are swapped. `few`, `many`: values that cover a file of each."""
    values = f"{few:.0f} values each, as masks do, and those of {masks} {many:.0f}, as pictures do"
    return Question(
        f"image_dir and mask_dir look swapped: the files of {images} hold {values}",
        Choice(f"{masks} holds the images", {"image_dir": masks, "mask_dir": images}),
        Choice(f"{images} holds the images", {"image_dir": images, "mask_dir": masks}),
    )
