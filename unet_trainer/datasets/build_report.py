"""Builds the report of a dataset: finds the pairs, reads every file, and decides kind, classes and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.changed_content import with_content
from unet_trainer.datasets.class_statistics import class_ids
from unet_trainer.datasets.dataset_report import DatasetReport, facts_of
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import build_image_spec, choose_kind, mismatch
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import UNREADABLE, Problem, Question
from unet_trainer.datasets.report_classes import choose_coding
from unet_trainer.datasets.report_notices import add_notices, look_at_neighbours
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, PairFacts, ScanCache, open_scan_cache, scan_pairs
from unet_trainer.datasets.splits import split_pairs
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN
from unet_trainer.system.console import Console, counted
from unet_trainer.system.resources import count_cores


def build_dataset_report(config: Config, console: Console, earlier: FoundPairs | None = None) -> DatasetReport:
    """Finds the pairs, unless those of an `earlier` start are given, reads every file, and decides kind, coding and split. Raises
    DataError if no pairs can be found."""
    return report_on(earlier or find_dataset(config, console), config, console, is_resumed=earlier is not None)


def report_on(found: FoundPairs, config: Config, console: Console, is_resumed: bool = False) -> DatasetReport:
    """The report on pairs that were found. A resumed run keeps its split, and is not told again that it is too easy."""
    cache = open_scan_cache(Path(config.data_dir), Path(config.checkpoint_dir))
    report = read_every_pair(found, config.resize_masks, cache, console, config.worker_timeout)
    if not report.pairs:
        return report
    _choose_kind(report, config)
    choose_coding(report, config)
    _split(report, config, is_resumed)
    if not is_resumed and not report.has_answers:  # neighbours are looked at once the questions are answered
        look_at_neighbours(report, config, console)
    add_notices(report)
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
    """Masks that resize_masks would resize are kept, whether it is set or not: what follows is judged as if it were."""
    unreadable: list[str] = []
    resizable: list[str] = []
    others: list[str] = []
    for pair, found in zip(report.found.pairs, facts, strict=True):
        if isinstance(found.image, str):
            unreadable.append(f"{pair.shown_image}: {found.image}")
        if isinstance(found.mask, str):
            unreadable.append(f"{pair.shown_mask}: {found.mask}")
        if isinstance(found.image, str) or isinstance(found.mask, str):
            continue
        if found.image.size != found.mask.size:
            can_be_resized = _same_shape(found.image.size, found.mask.size)
            (resizable if can_be_resized else others).append(_size_line(pair, found.image, found.mask))
            if not can_be_resized:
                continue
        report.pairs.append(pair)
        report.images.append(found.image)
        report.masks.append(found.mask)
    if unreadable:
        fix = "repair these files, or remove them together with their partners"
        report.problems.append(Problem("unreadable", *UNREADABLE, tuple(unreadable), fix))
    titles = "mask of another size than its image", "masks of another size than their images"
    if resizable and resize_masks:
        report.notices.append(f"{counted(len(resizable), 'mask')} resized to the size of the image (resize_masks)")
    elif resizable:
        fix = "resize_masks: true resizes masks with the aspect ratio of their images"
        report.problems.append(Problem("sizes", *titles, tuple(resizable), fix, {"resize_masks": True}))
    if others:
        fix = "an image and its mask must have the same size"
        if any("EXIF" in line for line in others):
            fix = "rotate the masks too, or save the images without EXIF orientation"
        report.problems.append(Problem("sizes", *titles, tuple(others), fix))


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
    titles = "image of another kind than the others", "images of another kind than the others"
    report.problems.append(Problem("kind", *titles, tuple(lines), fix))
    report.pairs = [pair for pair, reason in zip(report.pairs, reasons, strict=True) if not reason]
    report.masks = [mask for mask, reason in zip(report.masks, reasons, strict=True) if not reason]
    report.images = [image for image, reason in zip(report.images, reasons, strict=True) if not reason]


def _split(report: DatasetReport, config: Config, is_resumed: bool) -> None:
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
            num_folds=None if is_resumed else config.num_folds,
            fold=config.fold,
            in_blocks=config.split == "blocks" and not is_resumed,
        )
    except DataError as error:
        report.questions.append(error if isinstance(error, Question) else Question(str(error)))
        return
    report.notices += report.split.notices
    if report.kind is not None:
        images, _ = facts_of(report.split.train, report.pairs, report.images, report.masks)
        report.image_spec, report.statistics_reason = build_image_spec(report.kind, images, config.image_mean, config.image_std)
