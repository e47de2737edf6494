"""What does not stop training and the user should know: images like their neighbours, dropped alpha, identical images."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.datasets.class_statistics import class_ids
from unet_trainer.datasets.dataset_report import DatasetReport
from unet_trainer.datasets.neighbour_notes import describe_neighbours, describe_neighbours_across
from unet_trainer.datasets.neighbours import Reader, find_neighbours, find_neighbours_across
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.system.console import Console, counted
from unet_trainer.system.resources import count_cores


def look_at_neighbours(report: DatasetReport, config: Config, console: Console) -> None:
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


def add_notices(report: DatasetReport) -> None:
    """Adds what does not stop training and the user should know."""
    alpha = sum(image.has_alpha for image in report.images)
    turned = sum(image.is_turned for image in report.images)
    grey = sum(image.channels == 1 for image in report.images)
    in_alpha = sum(mask.is_alpha for mask in report.masks)
    masks, images = counted(len(report.masks), "mask"), counted(len(report.images), "image")
    if in_alpha:
        report.notices.append(f"the alpha channel of {in_alpha} of {masks} is the mask; their colour is the same everywhere")
    if alpha:
        report.notices.append(f"the alpha channel of {alpha} of {images} is dropped")
    if turned:
        report.notices.append(f"{turned} of {images} {_is(turned)} rotated by the EXIF orientation")
    if report.kind is not None and grey and report.kind.channels > 1:
        report.notices.append(f"{grey} of {images} {_is(grey)} grey; each gets {report.kind.channels} equal channels")
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
        report.notices.append(f"{counted(len(differing), 'set')} of identical images with masks that differ: {first_few(names)}")


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
