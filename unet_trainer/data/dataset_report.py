"""Everything known of a dataset before the first step. build_dataset_report decides one thing after the other: pairs,
facts of their files, kind of the images, classes, split, leaks. What it finds on the way are plain values, of which
dataset_notices makes sentences. Training and `check` both use it: a dataset that passes check can be trained on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import class_contradictions
from unet_trainer.config.schema import Config, id_names, to_plain
from unet_trainer.data import dataset_notices as notices
from unet_trainer.data import leakage, mask_reading, scan
from unet_trainer.data.class_files import find_class_file
from unet_trainer.data.converted import Converter
from unet_trainer.data.dataset_notices import Finding
from unet_trainer.data.find import find_dataset
from unet_trainer.data.formats.large_image import cut_blocks
from unet_trainer.data.mask_evidence import MIN_PICTURE, VOID, MaskEvidence, class_ids, class_shares
from unet_trainer.data.mask_reading import ChosenClasses
from unet_trainer.data.pairs import FoundPairs, Pair, Problem, Question, describe_problems
from unet_trainer.data.scan import ImageFacts, ImageKind, MaskFacts, ScanCache
from unet_trainer.data.splits import OF_ONE_IMAGE, Split, build_split, choose_image_blocks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import (
    IGNORED,
    UNKNOWN,
    MaskCoding,
    as_written,
    given_coding,
    largest_tolerance,
    read_mask,
)
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.console import Console

NUM_COMPARED = 8  # pairs of which the image is read as a mask
NUM_DIGITS = 16  # of a file's digest in split.csv
LARGE_FOREGROUND = 0.75  # share of the pixels from which it may be the background

Copies = list[tuple[int, int]]  # indices of two images that are nearly the same


@dataclass
class DatasetReport:
    """What was decided, None where it could not be, and what was found. `pairs`, `images` and `masks` hold the usable
    pairs only, in the same order."""

    found: FoundPairs
    pairs: Sequence[Pair] = ()
    images: Sequence[ImageFacts] = ()
    masks: Sequence[MaskFacts] = ()
    findings: tuple[Problem | Question | Finding | str, ...] = ()  # words are those of a format
    kind: ImageKind | None = None
    nodata: tuple[float, ...] = ()  # values of the images that mark missing data
    classes: ChosenClasses | None = None  # its coding, and how many classes there are
    split: Split | None = None
    image_spec: ImageSpec | None = None
    statistics_reason: str = ""

    def plus(self, *findings: Problem | Question | Finding | str, **decided: Any) -> "DatasetReport":
        """The report with more findings and decisions. A problem that no file has is none."""
        new = [each for each in findings if (each.lines if isinstance(each, Problem) else each)]
        return replace(self, findings=(*self.findings, *new), **decided)

    @property
    def problems(self) -> list[Problem]:
        return [each for each in self.findings if isinstance(each, Problem)]

    @property
    def questions(self) -> list[Question]:
        """What the user must decide."""
        return [each for each in self.findings if isinstance(each, Question)]

    @property
    def notices(self) -> list[str]:
        """What does not stop training and the user should know."""
        return [str(each) for each in self.findings if isinstance(each, Finding | str)]

    @property
    def advised(self) -> Mapping[str, Any]:
        """Settings for a better split, which a notice explains."""
        return next(
            (each.values[-1] for each in self.findings if isinstance(each, Finding) and each.kind == "alike"), {}
        )

    @property
    def blocking_message(self) -> str:
        """All reasons why the data cannot be trained on; empty if it can."""
        return "\n".join(text for text in (describe_problems(self.problems), *map(str, self.questions)) if text)

    @property
    def coding(self) -> MaskCoding | None:
        return None if self.classes is None else self.classes.coding

    def decided(self, config: Config) -> Config:
        """The config with the number and the names of the classes that were found."""
        if self.classes is None:
            return config
        names = config.class_names or self.classes.class_names
        return replace(config, num_classes=self.classes.num_classes, class_names=names)

    def checked(self) -> "CheckedDataset":
        """The dataset, if it can be trained on; raises DataError with all reasons why it cannot."""
        message = self.blocking_message
        if message or self.split is None:
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

    def ids_in(self, pairs: Sequence[Pair]) -> set[int]:
        """The class ids in their masks."""
        return set().union(*_ids_of_each(self.facts_of(pairs)[1], self.coding))


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
    def class_shares(self) -> list[float]:
        return class_shares(self.masks, self.coding, self.coding.num_ids)


def build_dataset_report(
    config: Config, console: Console, found: FoundPairs | None = None, is_resumed: bool = False
) -> DatasetReport:
    """Read every file of the pairs and decide. A resumed run keeps its split, and gets no note that it is too easy.
    Raises DataError if no pairs can be found."""
    found = found or find_dataset(config, console)
    cache = scan.open_scan_cache(Path(config.data_dir), Path(config.checkpoint_dir), config.nodata)
    report = read_every_pair(config, found, cache, console)
    report = _choose_kind(report, config) if report.pairs else report
    if not report.pairs:
        return report
    report = _choose_classes(report, config)
    if not is_resumed:
        report = _compare_images_with_masks(report, config, console)
        report = _cut_into_blocks(report, config, cache, console)
    if len(found.pairs) > 1 or not report.blocking_message:  # else there is nothing to divide yet
        report = _choose_split(report, config, is_resumed)
    if not is_resumed:
        report = _compare_neighbours(report, config, console)
    return report.plus(*_unusual_files(report))


def read_every_pair(config: Config, found: FoundPairs, cache: ScanCache | None, console: Console) -> DatasetReport:
    """A report with the facts of every pair that can be read, and the problems of the others; nothing is decided yet.
    Masks that resize_masks would resize are kept, whether it is set or not. Pairs get the digests of their files."""
    usable = list[tuple[Pair, ImageFacts, MaskFacts]]()
    unreadable, resizable, others, changed = list[str](), list[str](), list[str](), list[str]()
    facts = scan.scan_pairs(found.pairs, console, cache, config.worker_timeout)
    for pair, (image, mask) in zip(found.pairs, facts, strict=True):
        if isinstance(image, str) or isinstance(mask, str):
            both = (pair.shown_image, image), (pair.shown_mask, mask)
            unreadable += [f"{shown}: {reason}" for shown, reason in both if isinstance(reason, str)]
            continue
        # to within a pixel
        has_its_shape = abs(image.height * mask.width - image.width * mask.height) <= max(*image.size, *mask.size)
        if image.size != mask.size:
            (resizable if has_its_shape else others).append(notices.describe_size(pair.shown_mask, image, mask))
        if has_its_shape:
            digests = {pair.shown_image: image.digest[:NUM_DIGITS], pair.shown_mask: mask.digest[:NUM_DIGITS]}
            changed += [shown for shown, its in digests.items() if pair.content and its not in pair.content]
            usable.append((replace(pair, content="".join(digests.values())), image, mask))
    pairs, images, masks = zip(*usable, strict=True) if usable else ((), (), ())
    report = DatasetReport(found, pairs, images, masks).plus(*found.problems, *found.notices)
    report = report.plus(Finding("changed", changed), notices.problem("unreadable", unreadable))
    resized = Finding("resized", len(resizable)) if config.resize_masks else None
    return report.plus(resized or notices.problem("sizes of one shape", resizable), notices.problem("sizes", others))


def _choose_kind(report: DatasetReport, config: Config) -> DatasetReport:
    """Channels and depth that most images have; the others cannot be used."""
    kind, nodata = scan.choose_kind(report.images, config.in_channels), scan.choose_nodata(report.images, config.nodata)
    reading = notices.describe_reading(report.images, kind.channels, nodata, config.nodata)
    images = [image.as_read(kind.channels) for image in report.images]
    reasons = [scan.mismatch(image, kind) for image in images]
    others = [f"{pair.shown_image}: {why}" for pair, why in zip(report.pairs, reasons, strict=True) if why]
    fits = [not reason for reason in reasons]
    usable = {
        name: [*compress(its, fits)]
        for name, its in (("pairs", report.pairs), ("images", images), ("masks", report.masks))
    }
    report = report.plus(*reading, kind=kind, nodata=nodata, **usable)
    return report.plus(notices.problem("kind" if config.in_channels == "auto" else "kind that is set", others))


def _choose_classes(report: DatasetReport, config: Config) -> DatasetReport:
    """What the values in the masks mean, or the question to answer first."""
    report = report.plus(notices.palettes_in_another_order(report.pairs, report.masks))
    is_open = config.mask_values == "auto"
    class_file = find_class_file(Path(config.data_dir), report.pairs, report.found.class_file) if is_open else None
    evidence = MaskEvidence(report.masks, given_coding("nonzero", config.ignore_value).ignored, class_file)
    if is_open and len(evidence.seen) < 2:
        return report.plus(notices.nothing_to_learn(len(report.masks), evidence.seen, config))
    try:
        classes = _known_classes(report.found, config, evidence) or mask_reading.choose_classes(config, evidence)
    except DataError as error:
        return report.plus(_as_question(error))
    if classes is None:
        readings = mask_reading.possible_readings(config, evidence)
        return report.plus(notices.ask_for_classes(evidence, [pair.shown_mask for pair in report.pairs], readings))
    report, coding = report.plus(classes=classes), classes.coding
    decided = report.decided(config)
    if problems := list(class_contradictions(decided)):
        raise ConfigError("\n".join(problems))
    present = class_ids(evidence.counts, coding).keys() - {IGNORED, UNKNOWN}
    if len(present) < 2:
        only = id_names(decided)[present.pop()] if present else "ignored or of no class"
        only = f"{only} (mask_values: {to_plain(coding.mask_values)})"
        report = report.plus(notices.nothing_to_learn(len(report.masks), evidence.seen, config, only))
    if config.class_names is None and classes.class_names is None:
        report = report.plus(notices.unused_class_file(evidence))
    if is_open and classes.num_classes == 1 and report.found.num_classes is None:
        report = report.plus(_large_foreground(coding, evidence))
    return report.plus(notices.values_of_no_class(report.pairs, report.masks, coding))


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


def _large_foreground(coding: MaskCoding, evidence: MaskEvidence) -> Finding:
    """Masks with the foreground in black are common, and only its share shows it: settings that exchange the two."""
    values, tolerance, share = coding.values, coding.tolerance, class_shares(evidence.masks, coding, 2)[1]
    is_large = LARGE_FOREGROUND <= share < 1 and coding.mask_values != "nonzero"
    if values is None:  # above a threshold
        values = evidence.seen[0], evidence.seen[-1]
        tolerance = largest_tolerance(values)
    others = {"mask_tolerance": tolerance or None, "ignore_value": coding.written_ignore_value}
    settings = {"mask_values": [as_written([value]) for value in values[::-1]], **others}
    settings = {name: value for name, value in settings.items() if value is not None}
    return Finding("large foreground", is_large and coding.describe(1), share, settings)


def _compare_images_with_masks(report: DatasetReport, config: Config, console: Console) -> DatasetReport:
    """Ask whether the folders are swapped if they look so; only a note where the masks have a clear meaning."""
    step, folders = -(-len(report.pairs) // NUM_COMPARED), report.found.folders
    few = report.masks[::step]
    if folders is None or config.mask_values != "auto" or MaskEvidence(few).num_covering < MIN_PICTURE:
        return report
    read = scan.read_each(scan.scan_as_mask, report.pairs[::step], console, "Comparing images with masks:")
    images = MaskEvidence([image for image in read if image is not None])
    masks = MaskEvidence([mask for image, mask in zip(read, few, strict=True) if image is not None])
    if not images.looks_swapped_with(masks):
        return report
    question = notices.ask_for_folders(*folders, images.num_covering, masks.num_covering)
    if report.classes is not None:
        return report.plus(Finding("folders look swapped", question))
    others = [each for each in report.findings if not isinstance(each, Question)]
    return replace(report, findings=(*others, question))


def _cut_into_blocks(report: DatasetReport, config: Config, cache: ScanCache, console: Console) -> DatasetReport:
    """Replaces the only pair by blocks of it, if it is large enough; some of them validate."""
    coding, is_alone = report.coding, len(report.found.pairs) == 1 and config.num_folds is None
    if not is_alone or report.problems or coding is None:
        return report
    (pair,), (image,) = report.pairs, report.images
    try:
        ids = resize_mask(coding.encode(read_mask(pair.mask)), image.size)
        if (found_blocks := choose_image_blocks(ids, config.val_fraction, config.seed)) is None:
            return report
        blocks, (height, width), gap = found_blocks
        uncut = [pair.block(part, sides) for part, its in blocks.items() for sides in its]
        cut = cut_blocks(Converter(Path(config.data_dir), Path(config.checkpoint_dir), console), uncut)
    except DataError as error:
        return report.plus(_as_question(error))
    rule = f"{report.found.rule}; blocks of about {width}×{height} of one image, {gap} pixels between train and val"
    found = replace(report.found, pairs=tuple(cut), rule=rule, notices=(OF_ONE_IMAGE,))
    scanned = read_every_pair(config, found, cache, console)
    images = [each.as_read(image.channels) for each in scanned.images]
    return report.plus(*scanned.findings, found=found, pairs=scanned.pairs, images=images, masks=scanned.masks)


def _choose_split(report: DatasetReport, config: Config, is_resumed: bool) -> DatasetReport:
    """What trains and what validates, and the statistics of what trains. A resumed run keeps its split."""
    kind, are_blocks = report.kind, any(pair.box for pair in report.pairs)
    assert kind is not None
    copies, series = ([], None) if is_resumed or are_blocks else _find_same_objects(report, config)
    if series is not None and not report.found.is_divided:
        grouped = zip(report.pairs, series.groups, strict=True)
        report = report.plus(pairs=[replace(pair, group=group) for pair, group in grouped])
    if is_resumed or are_blocks:
        config = replace(config, split="random", num_folds=None if is_resumed else config.num_folds)
    both = [*zip(report.pairs, report.images, strict=True)]
    # Volumes share their empty slices, which are no reason to keep them together.
    contents = ["" if pair.group and image.low == image.high else image.content for pair, image in both]
    found, ids = replace(report.found, pairs=tuple(report.pairs)), _ids_of_each(report.masks, report.coding)
    try:
        split = build_split(config, found, ids, contents, copies)
    except DataError as error:
        return report.plus(_as_question(error))
    spec, reason = scan.build_image_spec(config, kind, report.facts_of(split.train)[0], report.nodata)
    report = report.plus(*split.notices, split=split, image_spec=spec, statistics_reason=reason)
    report = report.plus(*_same_objects(report, split, copies, series))
    return report.plus(*_weak_points(report, split, config, is_resumed))


def _find_same_objects(report: DatasetReport, config: Config) -> tuple[Copies, leakage.Series | None]:
    """Near-duplicates, and the series of one object if no groups are given."""
    views = leakage.build_views([image.thumbnail for image in report.images])
    copies = leakage.find_near_duplicates(views)
    if config.split == "blocks" or any(pair.group for pair in report.pairs):
        return copies, None
    mask_views = leakage.build_views([mask.thumbnail for mask in report.masks], are_masks=True)
    series = leakage.find_series([pair.name for pair in report.pairs], [views, mask_views])
    return copies, series if series is not None and len({*series.groups}) >= (config.num_folds or 0) else None


def _same_objects(
    report: DatasetReport, split: Split, copies: Copies, series: leakage.Series | None
) -> Sequence[Finding]:
    """The near-duplicates that are neither identical nor of one group, and the series; of data that is divided, those
    in train and in val."""
    pairs, images, is_divided = report.pairs, report.images, report.found.is_divided
    part_of = {pair.image: part for part, side in (("train", split.train), ("val", split.val)) for pair in side}
    parts, names = [part_of.get(pair.image) for pair in pairs], [pair.shown_image for pair in pairs]
    new = [
        (a, b)
        for a, b in copies
        if not pairs[a].group == pairs[b].group != "" and images[a].content != images[b].content
    ]
    across = [(a, b) if parts[a] == "val" else (b, a) for a, b in new if {parts[a], parts[b]} == {"train", "val"}]
    near = [(names[a], names[b]) for a, b in across or ([] if is_divided else new)]
    found = Finding("copies across", near, parts.count("val")) if across else Finding("copies", near)
    if series is None:
        return [found]
    in_train = {group for group, part in zip(series.groups, parts, strict=True) if part == "train"}
    val = [group for group, part in zip(series.groups, parts, strict=True) if part == "val" and group in in_train]
    in_both = {*val}
    shown = Counter(group for group in series.groups if not is_divided or group in in_both)
    middle = sorted(shown, key=shown.__getitem__)[len(shown) // 2 :]  # begins with one of the usual size
    examples = [name for group, name in zip(series.groups, names, strict=True) if group in middle[:1]][:3]
    return [found, Finding("series", examples, series, len(val) if is_divided else 0, parts.count("val"))]


def _weak_points(report: DatasetReport, split: Split, config: Config, is_resumed: bool) -> list[Finding]:
    """Why scores on this split may say little."""
    is_alone = len(split.val) == 1 and split.val[0].box is None and config.num_folds is None and not is_resumed
    is_divided, is_grouped = report.found.is_divided, any(pair.group for pair in split.train)
    num_folds = 0 if is_divided or is_grouped else min(5, len(split.train) + 1)
    tested, trained = ({pair.group for pair in side} - {""} for side in (split.test, split.train))
    train, val = report.ids_in(split.train), report.ids_in(split.val)
    names = id_names(report.decided(config)) if report.classes else []
    return [
        Finding("one validates", is_alone and split.val[0].shown_image, num_folds, is_divided),
        Finding("groups in test", sorted(tested & trained)),
        Finding("not validated", [names[class_id] for class_id in sorted(train - val)]),
        Finding("not trained", [names[class_id] for class_id in sorted(val - train)]),
    ]


def _compare_neighbours(report: DatasetReport, config: Config, console: Console) -> DatasetReport:
    """Find out whether the split separates images that are almost the same; it may change while a question is open."""
    split, is_grouped = report.split, any(pair.group or pair.box for pair in report.pairs)
    is_open = any(each.choices for each in report.questions) or any(each.settings for each in report.problems)
    if split is None or is_open or is_grouped or config.split == "blocks":
        return report
    if report.found.is_divided:
        images, _ = report.facts_of((*split.train, *split.val))
        return report.plus(leakage.find_neighbours_across(split.train, split.val, images, console))
    return report.plus(leakage.find_neighbours(config, report.pairs, report.images, console))


def _unusual_files(report: DatasetReport) -> list[Finding]:
    images, spec, total = report.images, report.image_spec, len(report.pairs)
    is_grey = [image.channels == 1 for image in images] if report.kind and report.kind.channels > 1 else []
    is_given = spec is not None and spec.is_8bit and report.statistics_reason == "as given"
    same: dict[str, dict[str, str]] = {}  # digest of an image → names of its images → digests of their masks
    for pair, image, mask in zip(report.pairs, images, report.masks, strict=True):
        same.setdefault(image.digest, {})[pair.shown_image] = mask.digest
    return [
        Finding("in alpha", sum(mask.is_alpha for mask in report.masks), total),
        Finding("rotated", sum(image.is_turned for image in images), total),
        Finding("grey", sum(is_grey), total),
        Finding("units of 0 to 1", spec is not None and is_given and max(*spec.mean, *spec.std) <= 1),
        Finding("other masks", [[*masks] for masks in same.values() if len({*masks.values()}) > 1]),
    ]


def _ids_of_each(masks: Sequence[MaskFacts], coding: MaskCoding | None) -> list[set[int]]:
    """The class ids in each mask; none where the values have no meaning yet."""
    return [set() if coding is None else {*class_ids(mask.counts, coding)} - {IGNORED, UNKNOWN} for mask in masks]


def _as_question(error: DataError) -> Question:
    return error if isinstance(error, Question) else Question(str(error))
