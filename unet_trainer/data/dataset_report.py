"""Everything known of a dataset before the first step: pairs, facts of every file, classes, image spec, split,
problems.

Training and `check` both use this report: a dataset that passes check can be trained on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.facts import DatasetFacts, Measurements
from unet_trainer.config.load import class_contradictions
from unet_trainer.config.schema import Config, id_names, to_plain
from unet_trainer.data import dataset_notices as notices
from unet_trainer.data import mask_evidence, scan
from unet_trainer.data.class_files import find_class_file
from unet_trainer.data.converted import Converter
from unet_trainer.data.find import find_dataset
from unet_trainer.data.formats.large_image import cut_blocks
from unet_trainer.data.mask_evidence import MIN_PICTURE, VOID, MaskEvidence, class_ids
from unet_trainer.data.mask_reading import ChosenClasses, ask_for_classes, choose_classes, describe_misfit
from unet_trainer.data.near_duplicates import Series, build_views, find_near_duplicates, find_series
from unet_trainer.data.neighbours import find_neighbours, find_neighbours_across
from unet_trainer.data.pairs import FoundPairs, Pair, Problem, Question, describe_problems
from unet_trainer.data.scan import ImageFacts, ImageKind, MaskFacts, ScanCache
from unet_trainer.data.splits import OF_ONE_IMAGE, Split, build_split, choose_image_blocks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, given_coding, read_mask
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.console import Console, counted

NUM_COMPARED = 8  # pairs of which the image is read as a mask
NUM_DIGITS = 16  # of a file's digest in split.csv


@dataclass
class DatasetReport:
    """What was found. `pairs`, `images` and `masks` hold the usable pairs only, in the same order."""

    found: FoundPairs
    pairs: list[Pair] = field(default_factory=list)
    images: list[ImageFacts] = field(default_factory=list)
    masks: list[MaskFacts] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)  # what the user must decide
    notices: list[str] = field(default_factory=list)  # what does not stop training and the user should know
    val_ids: set[int] = field(default_factory=set)  # class ids in validation masks
    untaught_ids: set[int] = field(default_factory=set)  # class ids in validation masks and in no training mask
    kind: ImageKind | None = None
    nodata: tuple[float, ...] = ()  # values of the images that mark missing data
    image_spec: ImageSpec | None = None
    statistics_reason: str = ""
    split: Split | None = None
    classes: ChosenClasses | None = None  # its coding, and how many classes there are
    advised: dict[str, Any] = field(default_factory=dict)  # settings for a better split, which a notice explains

    @property
    def coding(self) -> MaskCoding | None:
        return None if self.classes is None else self.classes.coding

    @property
    def blocking_message(self) -> str:
        """All reasons why the data cannot be trained on; empty if it can."""
        return "\n".join(text for text in (describe_problems(self.problems), *map(str, self.questions)) if text)

    def decided(self, config: Config) -> Config:
        """The config with the number and the names of the classes that were found."""
        if self.classes is None:
            return config
        names = config.class_names or self.classes.class_names
        return replace(config, num_classes=self.classes.num_classes, class_names=names)

    def ask(self, error: DataError) -> None:
        self.questions.append(error if isinstance(error, Question) else Question(str(error)))

    def checked(self) -> "CheckedDataset":
        """The dataset, if it can be trained on; raises DataError with all reasons why it cannot."""
        message = self.blocking_message
        if message or self.kind is None or self.classes is None or self.image_spec is None or self.split is None:
            raise DataError(message or f"no pair to train on (and {len(self.found.test)} test pairs, for evaluate)")
        return CheckedDataset(**vars(self))

    def facts_of(self, pairs: Sequence[Pair]) -> tuple[list[ImageFacts], list[MaskFacts]]:
        """The scanned facts of some of the pairs, in their order."""
        positions = {pair.image: index for index, pair in enumerate(self.pairs)}
        indices = [positions[pair.image] for pair in pairs]
        return [self.images[index] for index in indices], [self.masks[index] for index in indices]

    def sizes_of(self, pairs: Sequence[Pair]) -> list[tuple[int, int]]:
        """Of their images."""
        return [image.size for image in self.facts_of(pairs)[0]]


class CheckedDataset(DatasetReport):
    """A dataset that can be trained on."""

    kind: ImageKind
    classes: ChosenClasses
    image_spec: ImageSpec
    split: Split

    @property
    def coding(self) -> MaskCoding:
        return self.classes.coding

    @property
    def num_ids(self) -> int:
        return max(2, self.classes.num_classes)

    @property
    def class_shares(self) -> list[float]:
        return mask_evidence.class_shares(self.masks, self.coding, self.num_ids)

    def has_background(self, config: Config) -> bool:
        """Whether class 0 is what no class is. The config has the classes that were found."""
        return mask_evidence.has_background(id_names(config), self.class_shares)

    def facts(self, measurements: Measurements | None = None) -> DatasetFacts:
        """The facts from which `resolve` decides."""
        train_images, _ = self.facts_of(self.split.train)
        are_blocks = any(pair.box for pair in self.split.train)
        return DatasetFacts(
            channels=self.image_spec.channels,
            mean=self.image_spec.mean,
            std=self.image_spec.std,
            statistics_reason=self.statistics_reason,
            mask_values=self.coding.mask_values,
            ignore_value=self.coding.written_ignore_value,
            mask_reason=self.coding.reason,
            class_shares=self.class_shares,
            train_sizes=[image.size for image in train_images],
            val_sizes=self.sizes_of(self.split.val),
            bytes_per_value=1 if self.image_spec.is_8bit else 4,
            measurements=measurements,
            num_classes=self.classes.num_classes,
            num_classes_reason=self.classes.num_classes_reason,
            class_names=self.classes.class_names,
            class_names_reason=self.coding.reason,
            mask_tolerance=self.coding.tolerance,
            are_blocks=are_blocks,
            has_val_classes=bool(self.val_ids - ({0} if self.classes.num_classes == 1 else set())),
            # Blocks of one image have its light: what differs between them is what they show.
            brightness_share=0.0 if are_blocks else scan.brightness_share(train_images, self.image_spec.channels),
        )


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {counted(len(sizes) - most, 'more size')}" if len(sizes) > most else "")


def build_dataset_report(
    config: Config, console: Console, found: FoundPairs | None = None, is_resumed: bool = False
) -> DatasetReport:
    """Read every file of the pairs and decide kind, coding and split. A resumed run keeps its split, and gets no note
    that it is too easy. Raises DataError if no pairs can be found."""
    found = found or find_dataset(config, console)
    cache = scan.open_scan_cache(Path(config.data_dir), Path(config.checkpoint_dir), config.nodata)
    report = read_every_pair(config, found, cache, console)
    if not report.pairs:
        return report
    _choose_kind(report, config)
    if report.pairs:
        _choose_coding(report, config)
        if not is_resumed and config.mask_values == "auto":
            _compare_images_with_masks(report, console)
        is_alone = len(found.pairs) == 1 and config.num_folds is None and not is_resumed
        if is_alone and not report.problems and report.coding is not None:
            _cut_into_blocks(report, report.coding, config, cache, console)
        if not is_alone or not report.blocking_message:
            _split(report, config, is_resumed)
    is_open = any(question.choices for question in report.questions)
    if not is_resumed and not is_open and not any(problem.settings for problem in report.problems):
        _compare_neighbours(report, config, console)  # once the questions are answered
    units = report.image_spec if report.statistics_reason == "as given" else None
    num_channels = 0 if report.kind is None else report.kind.channels
    report.notices += notices.describe_files(report.pairs, report.images, report.masks, num_channels, units)
    return report


def read_every_pair(config: Config, found: FoundPairs, cache: ScanCache | None, console: Console) -> DatasetReport:
    """A report with the facts of every pair that can be read, and the problems of the others; nothing is decided yet.
    Masks that resize_masks would resize are kept, whether it is set or not. Pairs get the digests of their files.
    """
    report = DatasetReport(found, problems=[*found.problems], notices=[*found.notices])
    unreadable, resizable, others, changed = list[str](), list[str](), list[str](), list[str]()
    facts = scan.scan_pairs(found.pairs, console, cache, config.worker_timeout)
    for pair, (image, mask) in zip(found.pairs, facts, strict=True):
        if isinstance(image, str) or isinstance(mask, str):
            both = (pair.shown_image, image), (pair.shown_mask, mask)
            unreadable += [f"{shown}: {reason}" for shown, reason in both if isinstance(reason, str)]
            continue
        has_its_shape = abs(image.height * mask.width - image.width * mask.height) <= max(*image.size, *mask.size)
        if image.size != mask.size:
            (resizable if has_its_shape else others).append(notices.describe_size(pair.shown_mask, image, mask))
        if has_its_shape:  # to within a pixel
            digests = [each.digest[:NUM_DIGITS] for each in (image, mask)]
            shown = zip((pair.shown_image, pair.shown_mask), digests, strict=True)
            changed += [name for name, digest in shown if pair.content and digest not in pair.content]
            report.pairs.append(replace(pair, content="".join(digests)))
            report.images.append(image)
            report.masks.append(mask)
    num_resized = len(resizable) if config.resize_masks else 0
    report.notices += notices.describe_changes(changed, num_resized)
    report.problems += notices.problems_with_files(unreadable, [] if num_resized else resizable, others)
    return report


def _choose_kind(report: DatasetReport, config: Config) -> None:
    report.kind = kind = scan.choose_kind(report.images, config.in_channels)
    report.nodata = scan.choose_nodata(report.images, config.nodata)
    report.notices += scan.describe_reading(report.images, kind.channels, report.nodata, config.nodata)
    report.images = [image.as_read(kind.channels) for image in report.images]
    reasons = [scan.mismatch(image, kind) for image in report.images]
    lines = [f"{pair.shown_image}: {reason}" for pair, reason in zip(report.pairs, reasons, strict=True) if reason]
    if lines:
        report.problems.append(notices.problem_of_kind(lines, config.in_channels))
        kept = [reason is None for reason in reasons]
        report.pairs = [*compress(report.pairs, kept)]
        report.images = [*compress(report.images, kept)]
        report.masks = [*compress(report.masks, kept)]


def _cut_into_blocks(
    report: DatasetReport, coding: MaskCoding, config: Config, cache: ScanCache, console: Console
) -> None:
    """Replaces the only pair by blocks of it, if it is large enough; some of them validate."""
    (pair,), (image,), kind = report.pairs, report.images, report.kind
    assert kind is not None
    try:
        ids = resize_mask(coding.encode(read_mask(pair.mask)), image.size)
        found_blocks = choose_image_blocks(ids, config.val_fraction, config.seed)
        if found_blocks is None:
            return
        blocks, (height, width), gap = found_blocks
        uncut = [pair.block(part, sides) for part, its in blocks.items() for sides in its]
        cut = cut_blocks(Converter(Path(config.data_dir), Path(config.checkpoint_dir), console), uncut)
    except DataError as error:
        report.ask(error)
        return
    rule = f"{report.found.rule}; blocks of about {width}×{height} of one image, {gap} pixels between train and val"
    found = replace(report.found, pairs=tuple(cut), rule=rule, notices=(OF_ONE_IMAGE,))
    scanned = read_every_pair(config, found, cache, console)
    report.found, report.pairs, report.masks = found, scanned.pairs, scanned.masks
    report.images = [each.as_read(kind.channels) for each in scanned.images]
    report.problems += scanned.problems
    report.notices += scanned.notices


def _split(report: DatasetReport, config: Config, is_resumed: bool) -> None:
    """A resumed run keeps its split. Volumes share their empty slices, which are no reason to keep them together."""
    coding, is_divided = report.coding, report.found.is_divided
    digests = [
        "" if pair.group and image.low == image.high else image.digest if is_resumed else image.content
        for pair, image in zip(report.pairs, report.images, strict=True)
    ]
    labels = [set[int]() for _ in report.masks]
    if coding is not None:
        labels = [class_ids(mask.counts, coding).keys() - {IGNORED, UNKNOWN} for mask in report.masks]
    if is_resumed or any(pair.box for pair in report.pairs):
        config = replace(config, split="random", num_folds=None if is_resumed else config.num_folds)
    copies, series = ([], None) if is_resumed else _find_same_objects(report, config)
    if series is not None and not is_divided:
        report.pairs = [replace(pair, group=group) for pair, group in zip(report.pairs, series.groups, strict=True)]
    try:
        split = build_split(config, replace(report.found, pairs=tuple(report.pairs)), labels, digests, copies)
    except DataError as error:
        report.ask(error)
        return
    report.split = split
    held = dict(zip(report.pairs, labels, strict=True))
    train, val = (set().union(*(held[pair] for pair in side)) for side in (split.train, split.val))
    report.val_ids, report.untaught_ids = val, val - train
    report.notices += split.notices
    report.notices += notices.describe_same_objects(report.pairs, report.images, split, copies, series, is_divided)
    if not is_resumed and config.num_folds is None:
        report.notices += notices.describe_lone_val_image(split, is_divided)
    report.notices += notices.describe_groups_in_test(split)
    if coding is not None:
        report.notices += notices.describe_missing_classes(train, val, id_names(report.decided(config)))
    if report.kind is not None:
        images, _ = report.facts_of(split.train)
        report.image_spec, report.statistics_reason = scan.build_image_spec(config, report.kind, images, report.nodata)


def _find_same_objects(report: DatasetReport, config: Config) -> tuple[list[tuple[int, int]], Series | None]:
    """Near-duplicates, and the series of one object if no groups are given."""
    if any(pair.box for pair in report.pairs):
        return [], None
    views = build_views([image.thumbnail for image in report.images])
    copies = find_near_duplicates(views)
    if config.split == "blocks" or any(pair.group for pair in report.pairs):
        return copies, None
    names = [pair.name for pair in report.pairs]
    series = find_series(names, [views, build_views([mask.thumbnail for mask in report.masks], are_masks=True)])
    return copies, series if series is not None and len({*series.groups}) >= (config.num_folds or 0) else None


def _choose_coding(report: DatasetReport, config: Config) -> None:
    """What the values in the masks mean: the classes, or the question to answer first."""
    report.problems += notices.problem_of_palettes(report.pairs, report.masks)
    is_open = config.mask_values == "auto"
    class_file = find_class_file(Path(config.data_dir), report.pairs, report.found.class_file) if is_open else None
    evidence = MaskEvidence(report.masks, given_coding("nonzero", config.ignore_value).ignored, class_file)
    try:
        if is_open and len(evidence.seen) < 2:
            raise notices.nothing_to_learn(evidence, config)
        chosen = _known_classes(report.found, config, evidence) or choose_classes(config, evidence)
        if chosen is None:
            raise ask_for_classes(config, evidence, [pair.shown_mask for pair in report.pairs])
        report.classes = chosen
        decided, coding = report.decided(config), chosen.coding
        if problems := list(class_contradictions(decided)):
            raise ConfigError("\n".join(problems))
        present = class_ids(evidence.counts, coding).keys() - {IGNORED, UNKNOWN}
        if len(present) < 2:
            only = id_names(decided)[present.pop()] if present else "ignored or of no class"
            raise notices.nothing_to_learn(evidence, config, f"{only} (mask_values: {to_plain(coding.mask_values)})")
    except DataError as error:
        report.ask(error)
    if report.classes is None:
        return
    if class_file is not None and config.class_names is None and report.classes.class_names is None:
        report.notices.append(describe_misfit(evidence))
    if is_open and report.classes.num_classes == 1 and report.found.num_classes is None:
        report.notices += notices.describe_large_foreground(report.classes.coding, evidence)
    report.problems += notices.problem_of_values(report.pairs, report.masks, report.classes.coding)


def _compare_images_with_masks(report: DatasetReport, console: Console) -> None:
    """Ask whether the folders are swapped if they look so; only a note where the masks have a clear meaning."""
    step = -(-len(report.pairs) // NUM_COMPARED)
    few = report.masks[::step]
    if report.found.folders is None or MaskEvidence(few).num_covering < MIN_PICTURE:
        return
    read = scan.read_each(scan.scan_as_mask, report.pairs[::step], console, "Comparing images with masks:")
    images = MaskEvidence([image for image in read if image is not None])
    masks = MaskEvidence([mask for image, mask in zip(read, few, strict=True) if image is not None])
    if images.looks_swapped_with(masks):
        question, note = notices.ask_for_folders(*report.found.folders, images.num_covering, masks.num_covering)
        if report.classes is None:
            report.questions = [question]
        else:
            report.notices.append(note)


def _known_classes(found: FoundPairs, config: Config, evidence: MaskEvidence) -> ChosenClasses | None:
    """Of masks that were made from files which name the classes: their values are ids, and 255 is void."""
    number, reason = found.num_classes, "as in the files that the masks are made from"
    if number is None or config.mask_values != "auto" or config.num_classes not in ("auto", number):
        return None
    void = VOID if config.ignore_value is None and VOID in evidence.counts else config.ignore_value
    first = int(0 not in evidence.counts and number in evidence.counts)  # classes may leave no background
    ids = tuple(range(first, first + max(2, number)))
    coding = given_coding(ids, void, config.unknown_values == "ignore", reason=reason)
    return ChosenClasses(coding, number, reason, found.class_names if config.class_names is None else None)


def _compare_neighbours(report: DatasetReport, config: Config, console: Console) -> None:
    """Adds a notice if the split separates images that are almost the same."""
    split = report.split
    if split is None or config.split == "blocks" or any(pair.group or pair.box for pair in report.pairs):
        return
    if report.found.is_divided:
        images, _ = report.facts_of((*split.train, *split.val))
        text, report.advised = find_neighbours_across(split.train, split.val, images, console)
    else:
        text, report.advised = find_neighbours(config, report.pairs, report.images, console)
    report.notices += [text] if text else []
