"""Everything known of a dataset before the first step: pairs, facts of every file, classes, image spec, split, problems.

Training and `check` both use this report: a dataset that passes check can be trained on.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.config.dump import to_plain
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.facts import DatasetFacts, Measurements
from unet_trainer.config.load import class_contradictions
from unet_trainer.config.mask_classes import split_values
from unet_trainer.config.schema import Config, id_names
from unet_trainer.datasets.changed_content import with_content
from unet_trainer.datasets.class_files import find_class_file
from unet_trainer.datasets.class_statistics import class_ids, class_shares
from unet_trainer.datasets.coding_choice import VOID, ChosenClasses, choose_classes, present_classes
from unet_trainer.datasets.coding_question import Choice, ask_for_classes
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import ImageKind, build_image_spec, choose_kind, mismatch
from unet_trainer.datasets.mask_evidence import MaskEvidence, swapped_palettes
from unet_trainer.datasets.neighbour_notes import describe_neighbours, describe_neighbours_across
from unet_trainer.datasets.neighbours import Reader, find_neighbours, find_neighbours_across
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import Problem, describe_problems, first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, PairFacts, ScanCache, open_scan_cache, scan_pairs
from unet_trainer.datasets.splits import Split, split_pairs
from unet_trainer.images.image_files import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, as_number, given_coding, show_value
from unet_trainer.system.console import Console, counted
from unet_trainer.system.resources import count_cores

NUM_NAMED = 20  # files of one problem in training's message; check lists more


@dataclass
class DatasetReport:
    """What was found. `pairs`, `images` and `masks` hold the usable pairs only, in the same order."""

    found: FoundPairs
    pairs: list[Pair] = field(default_factory=list)
    images: list[ImageFacts] = field(default_factory=list)
    masks: list[MaskFacts] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)  # what the user must decide
    notices: list[str] = field(default_factory=list)
    kind: ImageKind | None = None
    coding: MaskCoding | None = None
    image_spec: ImageSpec | None = None
    statistics_reason: str = ""
    split: Split | None = None
    classes: ChosenClasses | None = None  # its coding, and how many classes there are
    choices: Sequence[Choice] = ()  # of the question what the mask values mean
    advised: dict[str, Any] = field(default_factory=dict)  # settings for a better split, which a notice explains

    @property
    def blocking_message(self) -> str:
        """All reasons why the data cannot be trained on; empty if it can."""
        others = [problem for problem in self.problems if problem not in self.found.problems]
        parts = (self.found.blocking_message, describe_problems(others, NUM_NAMED), *self.questions)
        return "\n".join(text for text in parts if text)

    def decided(self, config: Config) -> Config:
        """The config with the number and the names of the classes that were found."""
        if self.classes is None:
            return config
        names = config.class_names or self.classes.class_names
        return replace(config, num_classes=self.classes.num_classes, class_names=names)

    def checked(self) -> CheckedDataset:
        """The dataset, if it can be trained on; raises DataError with all reasons why it cannot."""
        message = self.blocking_message
        if message or self.kind is None or self.classes is None or self.image_spec is None or self.split is None:
            raise DataError(message or "the dataset has no pair that can be used")
        return CheckedDataset(
            tuple(self.pairs),
            tuple(self.images),
            tuple(self.masks),
            self.kind,
            self.classes,
            self.image_spec,
            self.statistics_reason,
            self.split,
            tuple(self.notices),
        )


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset that can be trained on. `pairs`, `images` and `masks` are in the same order."""

    pairs: Sequence[Pair]
    images: Sequence[ImageFacts]
    masks: Sequence[MaskFacts]
    kind: ImageKind
    classes: ChosenClasses
    image_spec: ImageSpec
    statistics_reason: str
    split: Split
    notices: Sequence[str]

    @property
    def coding(self) -> MaskCoding:
        return self.classes.coding

    @property
    def num_ids(self) -> int:
        return max(2, self.classes.num_classes)

    def facts_of(self, pairs: Sequence[Pair]) -> tuple[list[ImageFacts], list[MaskFacts]]:
        """The scanned facts of some of the pairs, in their order."""
        return _facts_of(pairs, self.pairs, self.images, self.masks)

    def facts(self, measurements: Measurements | None = None) -> DatasetFacts:
        """The facts from which `resolve` decides."""
        images, _ = self.facts_of(self.split.train)
        val_images, _ = self.facts_of(self.split.val)
        return DatasetFacts(
            channels=self.image_spec.channels,
            mean=self.image_spec.mean,
            std=self.image_spec.std,
            statistics_reason=self.statistics_reason,
            mask_values=self.coding.mask_values,
            ignore_value=self.coding.written_ignore_value,
            mask_reason=self.coding.reason,
            class_shares=class_shares(self.masks, self.coding, self.num_ids),
            train_sizes=[image.size for image in images],
            val_sizes=[image.size for image in val_images],
            bytes_per_value=1 if self.image_spec.is_8bit else 4,
            measurements=measurements,
            num_classes=self.classes.num_classes,
            num_classes_reason=self.classes.num_classes_reason,
            class_names=self.classes.class_names,
            class_names_reason=self.classes.class_names_reason,
            mask_tolerance=self.coding.tolerance,
        )


def _facts_of(
    wanted: Sequence[Pair], pairs: Sequence[Pair], images: Sequence[ImageFacts], masks: Sequence[MaskFacts]
) -> tuple[list[ImageFacts], list[MaskFacts]]:
    positions = {pair.image: index for index, pair in enumerate(pairs)}
    indices = [positions[pair.image] for pair in wanted]
    return [images[index] for index in indices], [masks[index] for index in indices]


def build_dataset_report(config: Config, console: Console, found: FoundPairs | None = None) -> DatasetReport:
    """Finds the pairs (unless they are given), reads every file, and decides kind, coding and split. Raises DataError if no pairs
    can be found."""
    cache = open_scan_cache(Path(config.data_dir), Path(config.checkpoint_dir))
    pairs = found or find_dataset(config, console)
    report = read_every_pair(pairs, config.resize_masks, cache, console, config.worker_timeout)
    if not report.pairs:
        return report
    _choose_kind(report, config)
    _choose_coding(report, config)
    _split(report, config, is_given=found is not None)
    if found is None:
        _look_at_neighbours(report, config, console)
    _add_notices(report)
    return report


def read_every_pair(
    found: FoundPairs, resize_masks: bool, cache: ScanCache | None, console: Console, timeout: float | None = None
) -> DatasetReport:
    """A report with the facts of every pair that can be read, and with the problems of the others; nothing is decided yet."""
    report = DatasetReport(found)
    with console.bar("Reading every pair once:", len(found.pairs), keep=False) as bar:
        facts = scan_pairs(found.pairs, count_cores(), bar.tick, cache, timeout)
    report.problems += found.problems
    report.notices += found.notices
    _keep_readable(report, facts, resize_masks)
    report.pairs, changed = with_content(report.pairs, report.images, report.masks)
    report.notices += changed
    return report


def _keep_readable(report: DatasetReport, facts: Sequence[PairFacts], resize_masks: bool) -> None:
    unreadable: list[str] = []
    sizes: list[str] = []
    num_resized = 0
    can_be_resized = False
    for pair, found in zip(report.found.pairs, facts, strict=True):
        if isinstance(found.image, str):
            unreadable.append(f"{pair.shown_image}: {found.image}")
        if isinstance(found.mask, str):
            unreadable.append(f"{pair.shown_mask}: {found.mask}")
        if isinstance(found.image, str) or isinstance(found.mask, str):
            continue
        if found.image.size != found.mask.size:
            has_same_shape = _same_shape(found.image.size, found.mask.size)
            if not (has_same_shape and resize_masks):
                can_be_resized |= has_same_shape
                sizes.append(_size_line(pair, found.image, found.mask))
                continue
            num_resized += 1
        report.pairs.append(pair)
        report.images.append(found.image)
        report.masks.append(found.mask)
    if unreadable:
        fix = "repair these files, or remove them together with their partners"
        report.problems.append(Problem("unreadable", "files that cannot be used", tuple(unreadable), fix))
    if sizes:
        fix = "an image and its mask must have the same size"
        if can_be_resized:
            fix = "resize_masks: true resizes masks with the aspect ratio of their images"
        if any("EXIF" in line for line in sizes):
            fix = "rotate the masks too, or save the images without EXIF orientation"
        report.problems.append(Problem("sizes", "masks of another size than their images", tuple(sizes), fix))
    if num_resized:
        report.notices.append(f"{counted(num_resized, 'mask')} resized to the size of the image (resize_masks)")


def _same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two sizes have the same aspect ratio, to within a pixel."""
    return abs(first[0] * second[1] - first[1] * second[0]) <= max(*first, *second)


def _size_line(pair: Pair, image: ImageFacts, mask: MaskFacts) -> str:
    line = f"{pair.shown_mask}: {mask.width}×{mask.height}, its image {pair.shown_image} is {image.width}×{image.height}"
    if image.is_turned and mask.size == image.size[::-1]:
        line += " (rotated by its EXIF orientation; the mask is not)"
    return line


def _choose_kind(report: DatasetReport, config: Config) -> None:
    report.kind = kind = choose_kind(report.images, config.in_channels)
    reasons = [mismatch(image, kind) for image in report.images]
    lines = [f"{pair.shown_image}: {reason}" for pair, reason in zip(report.pairs, reasons, strict=True) if reason]
    if not lines:
        return
    fix = "all images of a dataset must have the same depth and channels: convert or remove these"
    if config.in_channels != "auto":
        fix = f"in_channels: {config.in_channels} does not fit them; leave it out, or convert the images"
    report.problems.append(Problem("kind", "images of another kind than the others", tuple(lines), fix))
    report.pairs = [pair for pair, reason in zip(report.pairs, reasons, strict=True) if not reason]
    report.masks = [mask for mask, reason in zip(report.masks, reasons, strict=True) if not reason]
    report.images = [image for image, reason in zip(report.images, reasons, strict=True) if not reason]


def _choose_coding(report: DatasetReport, config: Config) -> None:
    if not report.pairs:
        return
    _refuse_swapped_palettes(report)
    ignored = given_coding("nonzero", config.ignore_value).ignored
    evidence = MaskEvidence(report.masks, ignored)
    class_file = find_class_file(Path(config.data_dir), report.pairs) if config.mask_values == "auto" else None
    if len(evidence.seen) < 2 and config.mask_values == "auto":
        every = f"{show_value(evidence.seen[0])}" if evidence.seen else f"ignored (ignore_value: {to_plain(config.ignore_value)})"
        report.questions.append(_nothing_to_learn(len(report.masks), every))
        return
    try:
        chosen = _known_classes(report.found, config, evidence) or choose_classes(config, evidence, class_file)
    except DataError as error:
        report.questions.append(str(error))
        return
    if chosen is None:
        question = ask_for_classes(config, evidence, [pair.shown_mask for pair in report.pairs], class_file)
        report.questions.append(str(question))
        report.choices = question.choices
        return
    report.classes, report.coding = chosen, chosen.coding
    decided = report.decided(config)
    if problems := class_contradictions(decided):
        raise ConfigError("\n".join(problems))
    present = present_classes(chosen.coding, evidence) - {IGNORED, UNKNOWN}
    if len(present) < 2:
        names = id_names(decided)
        every = names[present.pop()] if present else "ignored or of no class"
        given = f"mask_values: {to_plain(chosen.coding.mask_values)}"
        report.questions.append(_nothing_to_learn(len(report.masks), f"{every} ({given})"))
    lines = unknown_value_lines(report, chosen.coding)
    if lines:
        classes = ", ".join(chosen.coding.describe(class_id) for class_id in range(chosen.coding.num_ids))
        title = f"masks with values that belong to no class (the classes are {classes})"
        report.problems.append(Problem("values", title, tuple(lines), _unknown_fix(config, evidence)))


def _known_classes(found: FoundPairs, config: Config, evidence: MaskEvidence) -> ChosenClasses | None:
    """Of masks that were made from files which say the classes: their values are ids, and 255 is void."""
    number = found.num_classes
    if number is None or config.mask_values != "auto" or config.num_classes not in ("auto", number):
        return None
    void = VOID if config.ignore_value is None and VOID in evidence.counts else config.ignore_value
    first = 1 if 0 not in evidence.counts and number in evidence.counts else 0  # classes that cover the images leave no background
    values = tuple(range(first, first + max(2, number)))
    coding = given_coding(values, void, config.unknown_values == "ignore", reason="class ids")
    reason = "as the files have that the masks are made from"
    names = found.class_names if config.class_names is None and len(found.class_names or ()) == number else None
    return ChosenClasses(coding, number, reason, names, reason if names else "")


def _nothing_to_learn(num_masks: int, every: str) -> str:
    return (
        f"there is nothing to learn: every pixel of all {counted(num_masks, 'mask')} is {every}; are these the masks (mask_dir), "
        "and were they written right?"
    )


def _refuse_swapped_palettes(report: DatasetReport) -> None:
    lines = []
    for index, (first, colour) in swapped_palettes(report.masks).items():
        here, there = (_index_of(report.masks[number].palette, colour) for number in (index, first))
        mask, other = report.pairs[index].shown_mask, report.pairs[first].shown_mask
        lines.append(f"{mask}: #{colour:06x} is {here}, in {other} it is {there}")
    if lines:
        fix = "save the masks in colour, or all with the same palette: their values are places in it"
        report.problems.append(Problem("palettes", "masks whose palette has another order", tuple(lines), fix))


def _index_of(palette: Mapping[int, int] | None, colour: int) -> int:
    return next(value for value, held in (palette or {}).items() if held == colour)


def unknown_value_lines(report: DatasetReport, coding: MaskCoding) -> list[str]:
    """A line for each mask with values that belong to no class."""
    lines = []
    for pair, mask in zip(report.pairs, report.masks, strict=True):
        values = sorted(mask.counts)
        ids = coding.encode(np.array(values, np.int64)).tolist()
        unknown = [value for value, class_id in zip(values, ids, strict=True) if class_id == UNKNOWN]
        if not unknown:
            continue
        total = sum(mask.counts.values())
        shares = ", ".join(f"{show_value(value)} ({mask.counts[value] / total:.1%} of pixels)" for value in unknown[:6])
        lines.append(f"{pair.shown_mask}: {shares}")
    return lines


def _unknown_fix(config: Config, evidence: MaskEvidence) -> str:
    """How to settle values of no class; three values that were written as a colour are named."""
    entries = [] if isinstance(config.mask_values, str) else list(config.mask_values)
    entries += [] if config.ignore_value is None else [config.ignore_value]
    for colour in (value for entry in entries for value in split_values(entry) if isinstance(value, tuple)):
        if as_number(colour) not in evidence.counts and set(colour) <= set(evidence.seen) and len(set(colour)) == len(colour):
            apart = [[channel] for channel in colour]
            return f"{list(colour)} is a colour, and no mask has it; three values that are one class are written {apart}"
    return "correct the masks, or add the values to mask_values or ignore_value; with unknown_values: ignore they count nowhere"


def _split(report: DatasetReport, config: Config, is_given: bool) -> None:
    """`is_given`: a resumed run keeps its split."""
    if not report.pairs:
        return
    coding = report.coding
    labels: list[set[int]] = [
        set() if coding is None else set(class_ids(mask, coding)) - {IGNORED, UNKNOWN} for mask in report.masks
    ]
    digests = [image.digest for image in report.images]
    try:
        report.split = split_pairs(
            replace(report.found, pairs=tuple(report.pairs)),
            labels,
            digests,
            val_fraction=config.val_fraction,
            seed=config.seed,
            num_folds=None if is_given else config.num_folds,
            fold=config.fold,
            in_blocks=config.split == "blocks" and not is_given,
        )
    except DataError as error:
        report.questions.append(str(error))
        return
    report.notices += report.split.notices
    if report.kind is not None:
        images, _ = _facts_of(report.split.train, report.pairs, report.images, report.masks)
        report.image_spec, report.statistics_reason = build_image_spec(report.kind, images, config.image_mean, config.image_std)


def _look_at_neighbours(report: DatasetReport, config: Config, console: Console) -> None:
    """Adds a notice if the split separates images that are almost the same."""
    split = report.split
    if split is None or config.split == "blocks" or any(pair.group for pair in report.pairs):
        return

    @contextlib.contextmanager
    def show_bar(total: int) -> Iterator[Callable[[], object]]:
        with console.bar("Comparing neighbours by name:", total, keep=False) as bar:
            yield bar.tick

    reader = Reader(count_cores(), show_bar, Path(config.checkpoint_dir) / ".cache")
    if report.found.is_divided:
        likeness = find_neighbours_across(split.train, split.val, reader)
        if likeness is not None:
            report.notices.append(describe_neighbours_across(likeness))
        return
    neighbours = find_neighbours(report.pairs, Path(config.data_dir), report.coding, reader)
    if neighbours is None:
        return
    note = describe_neighbours(neighbours, report.pairs, Path(config.data_dir), config.val_fraction, config.num_folds)
    if note is not None:
        report.notices.append(note.text)
        report.advised = note.settings


def _add_notices(report: DatasetReport) -> None:
    """Adds what does not stop training and the user should know."""
    alpha = sum(image.has_alpha for image in report.images)
    turned = sum(image.is_turned for image in report.images)
    grey = sum(image.channels == 1 for image in report.images)
    in_alpha = sum(mask.is_alpha for mask in report.masks)
    if in_alpha:
        report.notices.append(
            f"the alpha channel of {in_alpha} of {len(report.masks)} masks is the mask; their colour is the same everywhere"
        )
    if alpha:
        report.notices.append(f"the alpha channel of {alpha} of {len(report.images)} images is dropped")
    if turned:
        report.notices.append(f"{turned} of {len(report.images)} images are rotated by their EXIF orientation")
    if report.kind is not None and grey and report.kind.channels > 1:
        report.notices.append(f"{grey} of {len(report.images)} images are grey; each gets {report.kind.channels} equal channels")
    spec = report.image_spec
    if spec is not None and spec.is_8bit and report.statistics_reason == "as given" and max(*spec.mean, *spec.std) <= 1:
        report.notices.append("image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1")
    groups = Counter(pair.group for pair in report.pairs if pair.group)
    if len(groups) == len(report.pairs) > 1:
        report.notices.append("every group has only one image; is group_pattern right?")
    flat = [pair.shown_image for pair, image in zip(report.pairs, report.images, strict=True) if image.low == image.high]
    if flat:
        report.notices.append(f"{counted(len(flat), 'image')} of a single colour: {first_few(flat)}")
    if report.coding is not None:
        ids = [class_ids(mask, report.coding) for mask in report.masks]
        void = [pair.shown_mask for pair, held in zip(report.pairs, ids, strict=True) if set(held) == {IGNORED}]
        if void:
            report.notices.append(f"{counted(len(void), 'mask')} with ignored pixels only: {first_few(void)}")
    by_digest: dict[str, list[int]] = defaultdict(list)
    for index, image in enumerate(report.images):
        by_digest[image.digest].append(index)
    differing = [same for same in by_digest.values() if len({report.masks[index].digest for index in same}) > 1]
    if differing:
        names = (" = ".join(report.pairs[index].shown_image for index in same[:3]) for same in differing)
        report.notices.append(f"{len(differing)} sets of identical images have masks that differ: {first_few(names)}")


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {len(sizes) - most} more sizes" if len(sizes) > most else "")
