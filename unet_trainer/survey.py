"""All that is known of a dataset before the first step: pairs, contents of every file, classes, form, split, and what is wrong.

Training and check look at data through this one door: what check passes, training takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unet_trainer.config import Config, class_names
from unet_trainer.console import Console
from unet_trainer.forms import ImageForm, Kind, build_form, choose_kind, misfit
from unet_trainer.images import DataError
from unet_trainer.masks import IGNORED, UNKNOWN, MaskCoding, build_coding, show_value
from unet_trainer.pairs import Found, Pair, add_groups, find_in_folders
from unet_trainer.problems import Problem, describe_problems, some
from unet_trainer.scan import (
    ImageFacts,
    MaskFacts,
    PairFacts,
    class_ids,
    class_shares,
    count_cores,
    memory_of,
    scan_pairs,
    total_counts,
    where_values_are,
)
from unet_trainer.splits import Split, divide
from unet_trainer.tables import read_table

NUM_NAMED = 20  # files of one problem that training's message names; check names more


@dataclass
class Survey:
    """What was found. `pairs`, `images` and `masks` are those of the pairs that can be used, in one order."""

    found: Found
    pairs: list[Pair] = field(default_factory=list)
    images: list[ImageFacts] = field(default_factory=list)
    masks: list[MaskFacts] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)  # questions that only the user can answer
    notices: list[str] = field(default_factory=list)
    kind: Kind | None = None
    coding: MaskCoding | None = None
    form: ImageForm | None = None
    form_reason: str = ""
    split: Split | None = None

    @property
    def refusal(self) -> str:
        """All that keeps the data from being trained on, in words; empty when nothing does."""
        others = [problem for problem in self.problems if problem not in self.found.problems]
        return "\n".join(text for text in (self.found.refusal, describe_problems(others, NUM_NAMED), *self.undecided) if text)

    def facts_of(self, pairs: Sequence[Pair]) -> tuple[list[ImageFacts], list[MaskFacts]]:
        """The facts of some of the pairs, in their order."""
        places = {pair.image: index for index, pair in enumerate(self.pairs)}
        indices = [places[pair.image] for pair in pairs]
        return [self.images[index] for index in indices], [self.masks[index] for index in indices]


def find_dataset(config: Config) -> Found:
    """The pairs of data_dir, as its folders or split_file tell; raises DataError where they cannot be told."""
    data_dir = Path(config.data_dir)
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")
    if config.split_file is None:
        found = find_in_folders(config, data_dir)
    else:
        found = read_table(_find_table(config.split_file, data_dir), data_dir)
        if config.group_pattern and any(pair.group for pair in found.pairs):
            raise DataError(f"group_pattern: {config.split_file} has groups of its own; leave out the pattern, or the column")
    return replace(found, pairs=add_groups(found.pairs, config.group_pattern, data_dir)) if config.group_pattern else found


def build_survey(config: Config, console: Console, found: Found | None = None) -> Survey:
    """Finds the pairs (unless they are given), reads every file and decides; raises DataError where no pair can be told."""
    survey = Survey(found or find_dataset(config))
    memory = memory_of(Path(config.data_dir), Path(config.checkpoint_dir))
    with console.bar("Reading every pair once:", len(survey.found.pairs), keep=False) as bar:
        facts = scan_pairs(survey.found.pairs, count_cores(), bar.tick, memory)
    survey.problems += survey.found.problems
    _keep_readable(survey, facts, config.resize_masks)
    if not survey.pairs:
        return survey
    _choose_kind(survey, config)
    _choose_coding(survey, config)
    _divide(survey, config, config.num_folds if found is None else None)  # a run that goes on has its split
    _notice(survey)
    return survey


def _find_table(split_file: str, data_dir: Path) -> Path:
    places = list(dict.fromkeys([Path(split_file), data_dir / split_file]))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"split_file: no file {' or '.join(str(place) for place in places)}")
    return found


def _keep_readable(survey: Survey, facts: Sequence[PairFacts], resize_masks: bool) -> None:
    unreadable: list[str] = []
    sizes: list[str] = []
    num_resized = 0
    can_be_resized = False
    for pair, found in zip(survey.found.pairs, facts, strict=True):
        if isinstance(found.image, str):
            unreadable.append(f"{pair.image}: {found.image}")
        if isinstance(found.mask, str):
            unreadable.append(f"{pair.mask}: {found.mask}")
        if isinstance(found.image, str) or isinstance(found.mask, str):
            continue
        if found.image.size != found.mask.size:
            fits = _same_shape(found.image.size, found.mask.size)
            if not (fits and resize_masks):
                can_be_resized |= fits
                sizes.append(_size_line(pair, found.image, found.mask))
                continue
            num_resized += 1
        survey.pairs.append(pair)
        survey.images.append(found.image)
        survey.masks.append(found.mask)
    if unreadable:
        fix = "mend the files or take them away, with their partners"
        survey.problems.append(Problem("unreadable", "files that cannot be used", tuple(unreadable), fix))
    if sizes:
        fix = "resize_masks: true brings masks of the same shape to the size of their images" if can_be_resized else ""
        if any("EXIF" in line for line in sizes):
            fix = "turn the masks as well, or save the images without their EXIF orientation"
        title = "masks that are not of their image's size"
        survey.problems.append(Problem("sizes", title, tuple(sizes), fix or "sizes in a pair must agree"))
    if num_resized:
        survey.notices.append(f"{num_resized} masks are brought to the size of their images (resize_masks)")


def _same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether one is the other at another scale, to within a pixel."""
    return abs(first[0] * second[1] - first[1] * second[0]) <= max(*first, *second)


def _size_line(pair: Pair, image: ImageFacts, mask: MaskFacts) -> str:
    line = f"{pair.mask}: {mask.width}×{mask.height}, its image {pair.image} is {image.width}×{image.height}"
    if image.is_turned and mask.size == image.size[::-1]:
        line += " (turned by its EXIF orientation; the mask is not)"
    return line


def _choose_kind(survey: Survey, config: Config) -> None:
    survey.kind = kind = choose_kind(survey.images, config.in_channels)
    reasons = [misfit(image, kind) for image in survey.images]
    lines = [f"{pair.image}: {reason}" for pair, reason in zip(survey.pairs, reasons, strict=True) if reason]
    if not lines:
        return
    fix = "all images of a dataset have the same depth and channels: convert these or take them away"
    if config.in_channels != "auto":
        fix = f"in_channels: {config.in_channels} is not what they have; leave it out, or convert them"
    survey.problems.append(Problem("form", "images unlike the others", tuple(lines), fix))
    survey.pairs = [pair for pair, reason in zip(survey.pairs, reasons, strict=True) if not reason]
    survey.masks = [mask for mask, reason in zip(survey.masks, reasons, strict=True) if not reason]
    survey.images = [image for image, reason in zip(survey.images, reasons, strict=True) if not reason]


def _choose_coding(survey: Survey, config: Config) -> None:
    if not survey.pairs:
        return
    try:
        counts, are_16bit = total_counts(survey.masks), all(mask.is_16bit for mask in survey.masks)
        coding = build_coding(config.mask_values, config.num_classes, config.ignore_value, counts, are_16bit)
    except DataError as error:
        survey.undecided.append(f"{error}\n  {where_values_are(survey.pairs, survey.masks)}")
        return
    survey.coding = coding
    present = [name for _, name, share in class_table(config, survey) if share > 0]
    if config.ignore_value is None and coding.ignore_value is not None and config.num_classes > 1 and len(present) < 2:
        void = coding.ignore_value
        survey.undecided.append(
            f"mask_values: with {void} as void, no class but {present[0] if present else 'none'} is left in any mask, and there is "
            f"nothing to learn. Set num_classes: 1 if {void} is the foreground, or mask_values to the values of the "
            f"{config.num_classes} classes\n  {where_values_are(survey.pairs, survey.masks)}"
        )
    elif config.ignore_value is None and coding.ignore_value is not None and not _stands_beside_classes(survey, coding):
        survey.undecided.append(
            f"mask_values: {coding.ignore_value} occurs only in masks that hold no class but 0. Void, or the foreground of "
            f"masks in {{0, {coding.ignore_value}}} among others in {{0, 1}}? Set ignore_value: {coding.ignore_value} if it is "
            f"void, or bring all masks to the same values\n  {where_values_are(survey.pairs, survey.masks)}"
        )
    lines = []
    for pair, mask in zip(survey.pairs, survey.masks, strict=True):
        if UNKNOWN not in class_ids(mask, coding):
            continue
        total = sum(mask.counts.values())
        strangers = [value for value in sorted(mask.counts) if UNKNOWN in class_ids(replace(mask, counts={value: 1}), coding)]
        shares = ", ".join(f"{show_value(value)} ({mask.counts[value] / total:.1%} of pixels)" for value in strangers[:6])
        lines.append(f"{pair.mask}: {shares}")
    if lines:
        classes = ", ".join(show_value(value) for value in coding.values or ())
        title = f"masks with values that are no class (classes have {classes})"
        fix = "mend the masks, or name the values in mask_values or ignore_value"
        survey.problems.append(Problem("values", title, tuple(lines), fix))


def _stands_beside_classes(survey: Survey, coding: MaskCoding) -> bool:
    """Whether the value that was taken as void occurs in one mask with a class other than 0."""
    for mask in survey.masks:
        held = set(class_ids(mask, coding))
        if IGNORED in held and held - {0, IGNORED, UNKNOWN}:
            return True
    return not any(set(class_ids(mask, coding)) - {0, IGNORED, UNKNOWN} for mask in survey.masks)


def _divide(survey: Survey, config: Config, num_folds: int | None) -> None:
    if not survey.pairs:
        return
    coding = survey.coding
    labels: list[set[int]] = [
        set() if coding is None else set(class_ids(mask, coding)) - {IGNORED, UNKNOWN} for mask in survey.masks
    ]
    digests = [image.digest for image in survey.images]
    try:
        survey.split = divide(
            replace(survey.found, pairs=tuple(survey.pairs)),
            labels,
            digests,
            val_fraction=config.val_fraction,
            seed=config.seed,
            num_folds=num_folds,
            fold=config.fold,
        )
    except DataError as error:
        survey.undecided.append(str(error))
        return
    survey.notices += survey.split.notices
    if survey.kind is not None:
        images, _ = survey.facts_of(survey.split.train)
        survey.form, survey.form_reason = build_form(survey.kind, images, config.image_mean, config.image_std)


def _notice(survey: Survey) -> None:
    """What training copes with and the user should know."""
    alpha = sum(image.has_alpha for image in survey.images)
    turned = sum(image.is_turned for image in survey.images)
    grey = sum(image.channels == 1 for image in survey.images)
    if alpha:
        survey.notices.append(f"alpha is left out of {alpha} of {len(survey.images)} images")
    if turned:
        survey.notices.append(f"{turned} of {len(survey.images)} images are turned as their EXIF orientation says")
    if survey.kind is not None and grey and survey.kind.channels > 1:
        survey.notices.append(f"{grey} of {len(survey.images)} images are grey; each gets {survey.kind.channels} equal channels")
    form = survey.form
    if form is not None and form.is_8bit and survey.form_reason == "as given" and max(*form.mean, *form.std) <= 1:
        survey.notices.append("image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1")
    groups = Counter(pair.group for pair in survey.pairs if pair.group)
    if len(groups) == len(survey.pairs) > 1:
        survey.notices.append("every group has one image alone; is group_pattern right?")
    flat = [pair.image for pair, image in zip(survey.pairs, survey.images, strict=True) if image.low == image.high]
    if flat:
        survey.notices.append(f"{len(flat)} images are of one colour throughout: {some(flat)}")
    if survey.coding is not None:
        ids = [class_ids(mask, survey.coding) for mask in survey.masks]
        void = [pair.mask for pair, held in zip(survey.pairs, ids, strict=True) if set(held) == {IGNORED}]
        if void:
            survey.notices.append(f"{len(void)} masks are ignored throughout and teach nothing: {some(void)}")
    lots: dict[str, list[int]] = defaultdict(list)
    for index, image in enumerate(survey.images):
        lots[image.digest].append(index)
    torn = [lot for lot in lots.values() if len({survey.masks[index].digest for index in lot}) > 1]
    if torn:
        names = (" = ".join(str(survey.pairs[index].image) for index in lot[:3]) for lot in torn)
        survey.notices.append(f"{len(torn)} lots of identical images have masks that differ: {some(names)}")


def class_table(config: Config, survey: Survey) -> list[tuple[str, str, float]]:
    """What of the files becomes each class, the class's name, and its share of the pixels that count."""
    assert survey.coding is not None
    names = class_names(config)
    shown = ["background", *names] if config.num_classes == 1 else names
    shares = class_shares(survey.masks, survey.coding, len(shown))
    return [(survey.coding.describe(index), name, share) for index, (name, share) in enumerate(zip(shown, shares, strict=True))]


def describe_classes(config: Config, survey: Survey) -> str:
    """The table in a line, with what is ignored and how the values were told apart."""
    assert survey.coding is not None
    table = [f"{values} → {name} {share:.1%}" for values, name, share in class_table(config, survey)]
    ignored = ignored_share(survey)
    ignores = f"; {show_value(survey.coding.ignore_value or 0)} is ignored, {ignored:.1%} of all pixels" if ignored else ""
    why = f" ({survey.coding.reason})" if survey.coding.reason != "mask_values" else ""
    return ", ".join(table[:8]) + (", …" if len(table) > 8 else "") + f" of pixels{ignores}{why}"


def ignored_share(survey: Survey) -> float:
    assert survey.coding is not None
    total = sum(sum(mask.counts.values()) for mask in survey.masks)
    return sum(class_ids(mask, survey.coding).get(IGNORED, 0) for mask in survey.masks) / max(1, total)


def absent_classes(config: Config, survey: Survey) -> list[str]:
    return [name for _, name, share in class_table(config, survey) if share == 0]


def show_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {len(sizes) - most} more sizes" if len(sizes) > most else "")
