"""Everything known of a dataset before the first step: pairs, facts of every file, classes, image spec, split, problems.

Training and `check` both use this report: a dataset that passes check can be trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unet_trainer.config.facts import DatasetFacts, Measurements
from unet_trainer.config.schema import Config, id_names
from unet_trainer.datasets.class_statistics import class_ids, class_shares, class_table, describe_rarest_values, total_counts
from unet_trainer.datasets.image_kind import ImageKind, build_image_spec, choose_kind, mismatch
from unet_trainer.datasets.pairs import FoundPairs, Pair, add_groups, find_in_folders
from unet_trainer.datasets.problems import Problem, describe_problems, first_few
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, PairFacts, ScanCache, open_scan_cache, scan_pairs
from unet_trainer.datasets.split_csv import read_split_csv
from unet_trainer.datasets.splits import Split, split_pairs
from unet_trainer.images.image_files import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, build_coding, show_value
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

    @property
    def blocking_message(self) -> str:
        """All reasons why the data cannot be trained on; empty if it can."""
        others = [problem for problem in self.problems if problem not in self.found.problems]
        parts = (self.found.blocking_message, describe_problems(others, NUM_NAMED), *self.questions)
        return "\n".join(text for text in parts if text)

    def checked(self) -> CheckedDataset:
        """The dataset, if it can be trained on; raises DataError with all reasons why it cannot."""
        message = self.blocking_message
        if message or self.kind is None or self.coding is None or self.image_spec is None or self.split is None:
            raise DataError(message or "the dataset has no pair that can be used")
        return CheckedDataset(
            tuple(self.pairs),
            tuple(self.images),
            tuple(self.masks),
            self.kind,
            self.coding,
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
    coding: MaskCoding
    image_spec: ImageSpec
    statistics_reason: str
    split: Split
    notices: Sequence[str]

    def facts_of(self, pairs: Sequence[Pair]) -> tuple[list[ImageFacts], list[MaskFacts]]:
        """The scanned facts of some of the pairs, in their order."""
        return _facts_of(pairs, self.pairs, self.images, self.masks)

    def facts(self, num_classes: int, measurements: Measurements | None = None) -> DatasetFacts:
        """The facts from which `resolve` decides."""
        images, _ = self.facts_of(self.split.train)
        val_images, _ = self.facts_of(self.split.val)
        return DatasetFacts(
            channels=self.image_spec.channels,
            mean=self.image_spec.mean,
            std=self.image_spec.std,
            statistics_reason=self.statistics_reason,
            mask_values=self.coding.mask_values,
            ignore_value=self.coding.ignore_value,
            mask_reason=self.coding.reason,
            class_shares=class_shares(self.masks, self.coding, max(2, num_classes)),
            train_sizes=[image.size for image in images],
            val_sizes=[image.size for image in val_images],
            bytes_per_value=1 if self.image_spec.is_8bit else 4,
            measurements=measurements,
        )


def _facts_of(
    wanted: Sequence[Pair], pairs: Sequence[Pair], images: Sequence[ImageFacts], masks: Sequence[MaskFacts]
) -> tuple[list[ImageFacts], list[MaskFacts]]:
    positions = {pair.image: index for index, pair in enumerate(pairs)}
    indices = [positions[pair.image] for pair in wanted]
    return [images[index] for index in indices], [masks[index] for index in indices]


def find_dataset(config: Config) -> FoundPairs:
    """The pairs of data_dir, by its folders or by split_file; raises DataError where they cannot be found."""
    data_dir = Path(config.data_dir)
    if not data_dir.is_dir():
        what = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data_dir: {data_dir} {what}; need a folder with images/ and masks/")
    if config.split_file is None:
        found = find_in_folders(config, data_dir)
    else:
        found = read_split_csv(find_split_file(config.split_file, data_dir), data_dir)
        if config.group_pattern and any(pair.group for pair in found.pairs):
            raise DataError(f"group_pattern: {config.split_file} has groups of its own; leave out the pattern, or the column")
    return replace(found, pairs=add_groups(found.pairs, config.group_pattern, data_dir)) if config.group_pattern else found


def build_dataset_report(config: Config, console: Console, found: FoundPairs | None = None) -> DatasetReport:
    """Finds the pairs (unless they are given), reads every file, and decides kind, coding and split. Raises DataError if no pairs
    can be found."""
    cache = open_scan_cache(Path(config.data_dir), Path(config.checkpoint_dir))
    report = read_every_pair(found or find_dataset(config), config.resize_masks, cache, console)
    if not report.pairs:
        return report
    _choose_kind(report, config)
    _choose_coding(report, config)
    _split(report, config, config.num_folds if found is None else None)  # a resumed run keeps its split
    _add_notices(report)
    return report


def read_every_pair(found: FoundPairs, resize_masks: bool, cache: ScanCache | None, console: Console) -> DatasetReport:
    """A report with the facts of every pair that can be read, and with the problems of the others; nothing is decided yet."""
    report = DatasetReport(found)
    with console.bar("Reading every pair once:", len(found.pairs), keep=False) as bar:
        facts = scan_pairs(found.pairs, count_cores(), bar.tick, cache)
    report.problems += found.problems
    _keep_readable(report, facts, resize_masks)
    return report


def find_split_file(split_file: str, data_dir: Path) -> Path:
    places = list(dict.fromkeys([Path(split_file), data_dir / split_file]))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"split_file: no file {' or '.join(str(place) for place in places)}")
    return found


def _keep_readable(report: DatasetReport, facts: Sequence[PairFacts], resize_masks: bool) -> None:
    unreadable: list[str] = []
    sizes: list[str] = []
    num_resized = 0
    can_be_resized = False
    for pair, found in zip(report.found.pairs, facts, strict=True):
        if isinstance(found.image, str):
            unreadable.append(f"{pair.image}: {found.image}")
        if isinstance(found.mask, str):
            unreadable.append(f"{pair.mask}: {found.mask}")
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
    line = f"{pair.mask}: {mask.width}×{mask.height}, its image {pair.image} is {image.width}×{image.height}"
    if image.is_turned and mask.size == image.size[::-1]:
        line += " (rotated by its EXIF orientation; the mask is not)"
    return line


def _choose_kind(report: DatasetReport, config: Config) -> None:
    report.kind = kind = choose_kind(report.images, config.in_channels)
    reasons = [mismatch(image, kind) for image in report.images]
    lines = [f"{pair.image}: {reason}" for pair, reason in zip(report.pairs, reasons, strict=True) if reason]
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
    try:
        counts, are_16bit = total_counts(report.masks), all(mask.is_16bit for mask in report.masks)
        coding = build_coding(config.mask_values, config.num_classes, config.ignore_value, counts, are_16bit)
    except DataError as error:
        report.questions.append(f"{error}\n  {describe_rarest_values(report.pairs, report.masks)}")
        return
    report.coding = coding
    present = [row.name for row in class_table(report.masks, coding, id_names(config)) if row.share > 0]
    if config.ignore_value is None and coding.ignore_value is not None and config.num_classes > 1 and len(present) < 2:
        void = coding.ignore_value
        report.questions.append(
            f"mask_values: with {void} as void, the masks hold no class but {present[0] if present else 'none'}, and there is "
            f"nothing to learn. Set num_classes: 1 if {void} is the foreground, or mask_values to the values of the "
            f"{config.num_classes} classes\n  {describe_rarest_values(report.pairs, report.masks)}"
        )
    elif config.ignore_value is None and coding.ignore_value is not None and not _void_occurs_beside_classes(report, coding):
        report.questions.append(
            f"mask_values: {coding.ignore_value} occurs only in masks that hold no class but 0. Is it void, or the foreground of "
            f"masks in {{0, {coding.ignore_value}}} among others in {{0, 1}}? Set ignore_value: {coding.ignore_value} if it is "
            f"void, or give all masks the same values\n  {describe_rarest_values(report.pairs, report.masks)}"
        )
    lines = unknown_value_lines(report, coding)
    if lines:
        classes = ", ".join(show_value(value) for value in coding.values or ())
        title = f"masks with values that belong to no class (the classes are {classes})"
        fix = "correct the masks, or add the values to mask_values or ignore_value"
        report.problems.append(Problem("values", title, tuple(lines), fix))


def unknown_value_lines(report: DatasetReport, coding: MaskCoding) -> list[str]:
    """A line for each mask with values that belong to no class."""
    lines = []
    for pair, mask in zip(report.pairs, report.masks, strict=True):
        if UNKNOWN not in class_ids(mask, coding):
            continue
        total = sum(mask.counts.values())
        unknown = [value for value in sorted(mask.counts) if UNKNOWN in class_ids(replace(mask, counts={value: 1}), coding)]
        shares = ", ".join(f"{show_value(value)} ({mask.counts[value] / total:.1%} of pixels)" for value in unknown[:6])
        lines.append(f"{pair.mask}: {shares}")
    return lines


def _void_occurs_beside_classes(report: DatasetReport, coding: MaskCoding) -> bool:
    """Whether the value taken as void occurs in a mask that also holds a class other than 0, or no mask holds such a class."""
    for mask in report.masks:
        held = set(class_ids(mask, coding))
        if IGNORED in held and held - {0, IGNORED, UNKNOWN}:
            return True
    return not any(set(class_ids(mask, coding)) - {0, IGNORED, UNKNOWN} for mask in report.masks)


def _split(report: DatasetReport, config: Config, num_folds: int | None) -> None:
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
            num_folds=num_folds,
            fold=config.fold,
        )
    except DataError as error:
        report.questions.append(str(error))
        return
    report.notices += report.split.notices
    if report.kind is not None:
        images, _ = _facts_of(report.split.train, report.pairs, report.images, report.masks)
        report.image_spec, report.statistics_reason = build_image_spec(report.kind, images, config.image_mean, config.image_std)


def _add_notices(report: DatasetReport) -> None:
    """Adds what does not stop training and the user should know."""
    alpha = sum(image.has_alpha for image in report.images)
    turned = sum(image.is_turned for image in report.images)
    grey = sum(image.channels == 1 for image in report.images)
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
    flat = [pair.image for pair, image in zip(report.pairs, report.images, strict=True) if image.low == image.high]
    if flat:
        report.notices.append(f"{counted(len(flat), 'image')} of a single colour: {first_few(flat)}")
    if report.coding is not None:
        ids = [class_ids(mask, report.coding) for mask in report.masks]
        void = [pair.mask for pair, held in zip(report.pairs, ids, strict=True) if set(held) == {IGNORED}]
        if void:
            report.notices.append(f"{counted(len(void), 'mask')} with ignored pixels only: {first_few(void)}")
    by_digest: dict[str, list[int]] = defaultdict(list)
    for index, image in enumerate(report.images):
        by_digest[image.digest].append(index)
    differing = [same for same in by_digest.values() if len({report.masks[index].digest for index in same}) > 1]
    if differing:
        names = (" = ".join(str(report.pairs[index].image) for index in same[:3]) for same in differing)
        report.notices.append(f"{len(differing)} sets of identical images have masks that differ: {first_few(names)}")


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {len(sizes) - most} more sizes" if len(sizes) > most else "")
