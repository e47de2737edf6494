"""What a dataset's report says: its findings, problems and questions in words. Decides nothing: the modules that do
hand over plain values."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config, to_plain
from unet_trainer.data.file_facts import ImageFacts, MaskFacts
from unet_trainer.data.mask_evidence import MaskEvidence, class_table, encode_values, ignored_share
from unet_trainer.data.pairs import UNREADABLE, Choice, Pair, Problem, Question, first_few, setting_lines
from unet_trainer.images.mask_decoding import COLOUR, UNKNOWN, MaskCoding, show_value, show_values
from unet_trainer.system.console import counted

TOO_GOOD, MORE = "val_iou is too good", "add images with them, or choose with split_file=FILE.csv"
COPIES = "(re-encoded, resized, flipped or turned)"
ALIKE = "images are like their neighbours {} ({{}}): the most similar image is a neighbour"
# How images are alike, with some examples.
WAYS = {
    "original": "images of one original are of the same subject by their names ({})",
    "number": "images of one number are of the same subject by their names ({})",
    "numbering": ALIKE.format("in the numbering"),
    "name": ALIKE.format("by name"),
    "overlap": "images are tiles that overlap ({})",
}
OTHER_SIZE, OTHER_KIND = ("mask", "of another size than the image"), ("image", "of another kind than the others")
PLACES = "save the masks in colour, or all with the same palette: their values are places in it"
# By kind: what has it, what is wrong, and the fix.
PROBLEMS = {
    "unreadable": (*UNREADABLE, "repair these files, or remove them together with their partners"),
    "sizes": (*OTHER_SIZE, "an image and its mask must have the same size"),
    "sizes of one shape": (*OTHER_SIZE, "resize_masks: true resizes masks with the aspect ratio of their images"),
    "kind": (*OTHER_KIND, "all images of a dataset must have the same depth and channels: convert or remove these"),
    "kind that is set": (*OTHER_KIND, "in_channels does not fit them; leave it out, or convert the images"),
    "palettes": ("mask", "with a palette in another order", PLACES),
}
NUM_CLASSES, NUM_ROWS = 8, 12  # in the line that describes the classes, and in the table of a question
SOLUTIONS = {"sizes of one shape": {"resize_masks": True}}  # settings that solve a problem


class Finding:
    """What does not stop training and the user should know: its kind, and the values that its sentence is made of. The
    first says what or how many have it; if there are none, nothing was found."""

    def __init__(self, kind: str, *values: Any) -> None:
        self.kind, self.values = kind, values

    def __bool__(self) -> bool:
        return bool(self.values[0])

    def __str__(self) -> str:
        return _sentence(self.kind, *self.values)


def _sentence(kind: str, *values: Any) -> str:
    match kind, *values:
        case "changed", files:
            what = f"{counted(len(files), 'file')} changed since the run began: {first_few(files)}"
            return f"{what}; scores from before and after are not of the same data"
        case "resized", number:
            return f"{counted(number, 'mask')} resized to the size of the image (resize_masks)"
        case "alpha kept", number, total, fix:
            return f"the last channel of {number} of {counted(total, 'image')}, tagged as alpha, is kept as a band{fix}"
        case "alpha dropped", number, total, fix:
            return f"the alpha channel of {number} of {counted(total, 'image')} is dropped{fix}"
        case "no data", number, total, share, marks, fix:
            what = f"{number} of {counted(total, 'image')} have no data in {share:.2%} of their values ({marks})"
            return f"{what}: left out of the statistics, and filled with the mean{fix}"
        case "large foreground", shown, share, settings:
            what = f"the foreground ({shown}) is {share:.0%} of the pixels; if it is the background, set:"
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
            what = f"the alpha channel of {number} of {counted(total, 'mask')} is the mask"
            return f"{what}; their colour is the same everywhere"
        case "rotated", number, total:
            what = f"{number} of {counted(total, 'image')} {'is' if number == 1 else 'are'} rotated by the EXIF"
            fix = "if masks lie wrong, rotate them too, or save the images without it"
            return f"{what} orientation, a mask only by one of its own: {fix}"
        case "grey", number, total:
            some = f"{number} of {counted(total, 'image')} {'is' if number == 1 else 'are'}"
            return f"{some} grey, whose channel is repeated"
        case "units of 0 to 1", *_:
            return "image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1"
        case "other masks", sets:
            shown = first_few(" = ".join(images[:3]) for images in sets)
            return f"{counted(len(sets), 'set')} of identical images with masks that differ: {shown}"
        case "class file", name, num_names, num_values:
            what = f"it names {num_names} classes, and the masks hold {num_values} values that do not fit them"
            return f"{name} is not used: {what}, or its void is most of the pixels; correct it, or set class_names"
        case "identical", sets:
            shown = first_few((" = ".join(images[:3]) for images in sets), 2)
            what = f"{sum(map(len, sets))} images are identical to another one"
            return f"{what}; identical images stay on one side: {shown}"
        case "also validate", images:
            what = f"{counted(len(images), 'training image')} left out, identical to a validation image"
            return f"{what}: {first_few(images)}"
        case "gaps", number:
            return f"{counted(number, 'pair')} between the blocks of train and val left out, as a gap"
        case "copies across", pairs, num_val:
            share = f"{len({one for one, _ in pairs})} of {counted(num_val, 'validation image')}"
            shown = first_few((f"{one} ≈ {other}" for one, other in pairs), 3)
            return f"{share} nearly the same as training images {COPIES}: {shown}; {TOO_GOOD}"
        case "copies", pairs:
            what = (
                f"{len({image for pair in pairs for image in pair})} images are nearly the same as another one {COPIES}"
            )
            return f"{what}; they stay on one side: {first_few((f'{one} ≈ {other}' for one, other in pairs), 3)}"
        case "series", examples, series, num_across, num_val:
            what = f"images with near numbers are of one object ({', '.join(examples)})"
            alike = f"{series.alike_within:.0%} of those up to {series.distance} apart are alike"
            effect = f"{len({*series.groups})} groups stay on one side, unless group_pattern or split_file sets others"
            if num_across:
                share = f"{num_across} of {num_val} validation images"
                effect = f"{share} have such a one in train, and {TOO_GOOD}"
            return f"{what}: {alike}, {series.alike_beyond:.0%} of others; {effect}"
        case "alike", way, examples, measured, sizes, settings:
            why = WAYS[way].format(", ".join(Path(path).stem for path in examples))
            if len(measured) == 2:
                why += " in {:.0%} of cases (chance: {:.0%})".format(*measured)
            elif measured:
                why += f": {measured[0]:.0%} share pixels with another one"
            fix = "blocks of the sequence can validate, with a gap"
            if sizes:
                each = f"{sizes[-1]} to {sizes[0]}" if sizes[-1] < sizes[0] else sizes[0]
                fix = f"{len(sizes)} groups of {each} images can stay together"
            lines = "\n".join(f"  {line}" for line in setting_lines(settings))
            return f"{why}. A random split puts them into train and val, and {TOO_GOOD}; {fix}:\n{lines}"
        case "versions across", names:
            what = f"{counted(len(names), 'image')} with versions in train and in val by their names"
            return f"{what}: {first_few(names, 3)}; {TOO_GOOD}"
        case "tiles across", share:
            return f"{share:.0%} of the validation images are tiles that share pixels with training images: {TOO_GOOD}"
        case "neighbours across", (share, chance):
            what = "validation images are like their neighbours in train: the most similar training image is the one "
            what += f"before or after in the numbering in {share:.0%} of cases (chance: {chance:.0%})"
            return f"{what}; val_iou shows how well the model knows these sequences, not new ones"
    raise AssertionError(f"no sentence for {kind}")


def problem(kind: str, lines: Sequence[str]) -> Problem:
    noun, what, fix = PROBLEMS[kind]
    return Problem(kind.partition(" ")[0], noun, what, tuple(lines), fix, SOLUTIONS.get(kind, {}))


def describe_size(shown_mask: str, image: ImageFacts, mask: MaskFacts) -> str:
    """The line of a mask of another size than its image."""
    line = f"{shown_mask}: {mask.width}×{mask.height}, its image is {image.width}×{image.height}"
    is_turned = image.is_turned and mask.size == image.size[::-1]
    return f"{line} (rotated by its EXIF orientation; the mask is not)" if is_turned else line


def describe_reading(
    images: Sequence[ImageFacts], channels: int, tags: Sequence[float], nodata: float | str, can_be_set: bool = True
) -> list[Finding]:
    """What is done with alpha channels and with missing data, and the settings for other ways."""
    alpha = [image.channels + 1 for image in images if image.alpha]
    drop, keep = f" (in_channels: {channels - 1} drops it)", f" (in_channels: {max(alpha, default=0)} keeps it)"
    missing = [read for image in images if sum((read := image.as_read(channels)).missing)]
    share = sum(sum(image.missing) for image in missing) / max(1, sum(image.num_values for image in missing))
    marks = ", ".join(dict.fromkeys(mark for image in missing for mark in image.marks))
    how = "; these pixels are ignored" if nodata == "ignore" else ""
    if can_be_set and nodata in ("fill", "keep"):
        how = "; nodata: ignore ignores these pixels"
    if can_be_set and isinstance(nodata, str) and tags:
        how += f"; nodata: keep takes {', '.join(f'{tag:g}' for tag in tags)} as any other value"
    num_kept = alpha.count(channels)
    return [
        Finding("alpha kept", num_kept, len(images), drop * can_be_set),
        Finding("alpha dropped", len(alpha) - num_kept, len(images), keep * can_be_set),
        Finding("no data", len(missing), len(images), share, marks, how),
    ]


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
    lines: dict[str, str] = {}
    for pair, value, colour in (
        (pair, *item) for pair, its in zip(pairs, palettes, strict=True) for item in its.items()
    ):
        if value != (other := usual[colour].most_common(1)[0][0]):
            text = f"{pair.shown_mask}: {show_value(COLOUR + colour)} is {value}, in most it is {other}"
            lines.setdefault(pair.shown_mask, text)
    return problem("palettes", [*lines.values()])


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {counted(len(sizes) - most, 'more size')}" if len(sizes) > most else "")


def describe_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> str:
    """The classes in one line, with the ignored share and the reason for the coding."""
    table = [f"{row.values} → {row.name} {row.share:.1%}" for row in class_table(masks, coding, names)]
    text = ", ".join(table[:NUM_CLASSES]) + (", …" if len(table) > NUM_CLASSES else "") + " of pixels"
    if share := ignored_share(masks, coding):
        text += f"; ignored: {describe_ignored(coding)}, {share:.1%} of all pixels"
    return text + (f" ({coding.reason})" if coding.reason != "mask_values" else "")


def describe_ignored(coding: MaskCoding) -> str:
    """The values that are ignored."""
    named = [show_values(coding.ignored)] if coding.ignored else []
    return " and ".join([*named, "other values"] if coding.ignores_unknown or coding.tolerance else named)


def ask_for_classes(evidence: MaskEvidence, names: Sequence[str], readings: Sequence[Choice]) -> Question:
    """What the values in the masks mean. `names` are what messages call the masks."""
    hint = str(unused_class_file(evidence) or _describe_values(evidence))
    text = "mask_values: auto cannot tell what the values in the masks mean" + (f"\n  {hint}" if hint else "")
    return Question(text, *readings, table=() if evidence.look_like_photographs else _value_table(evidence, names))


def unused_class_file(evidence: MaskEvidence) -> Finding:
    """That the classes of the class file are not used, if there is one."""
    file = evidence.class_file
    return Finding("class file", file and file.path.name, len(file.names if file else ()), len(evidence.seen))


def _describe_values(evidence: MaskEvidence) -> str:
    """What they look like, and what to ask then."""
    if evidence.look_like_photographs:
        photo = "They look like those of photographs; is mask_dir the folder of the masks?"
        return f"{photo} Of cut-outs, save the alpha channel as the mask"
    if evidence.are_objects:
        return "They look like ids of objects: each is one piece, or masks with more of them hold those of the others"
    if evidence.is_lossy:
        return "They are saved as JPEG or lossy WebP, which changes values beside edges: export PNG"
    if len(evidence.seen) == 2:
        return "Which of the two is the background?"
    last = show_value(evidence.seen[-1])
    is_void = evidence.last_may_be_void or last == "255"
    return f"{last} may be void (pixels to ignore), or a class: which is it?" if is_void else ""


def _value_table(evidence: MaskEvidence, names: Sequence[str]) -> list[str]:
    """The values that are in one mask only, with its name, then the most frequent ones."""
    first, rows = evidence.in_one_mask[: NUM_ROWS // 2], [("value", "share of pixels", "in masks")]
    for value in sorted(evidence.distinct, key=lambda value: (value not in first, -evidence.counts[value]))[:NUM_ROWS]:
        holders = [name for name, mask in zip(names, evidence.masks, strict=True) if value in mask.counts]
        in_masks = holders[0] if value in evidence.in_one_mask else f"{len(holders)} of {len(names)}"
        rows.append((show_value(value), f"{evidence.share(value):.2%}", in_masks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    more = [f"… {len(evidence.seen)} values in all (check --json FILE lists them)"]
    return [" | ".join(map(str.rjust, row, widths)) for row in rows] + more * (len(rows) <= len(evidence.seen))


def nothing_to_learn(num_masks: int, seen: Sequence[int], config: Config, only: str = "") -> Question:
    """Every pixel has one value, or is of one class, `only`."""
    every = only or show_values(seen) or f"ignored (ignore_value: {to_plain(config.ignore_value)})"
    masks = "the only mask" if num_masks == 1 else f"all {num_masks} masks"
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
