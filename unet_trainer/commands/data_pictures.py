"""The contact sheet of `check`: images with their masks drawn over them, rare classes first."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unet_trainer.config.schema import Config, id_names
from unet_trainer.datasets.class_statistics import class_ids, class_shares, has_background, total_counts
from unet_trainer.datasets.dataset_report import DatasetReport
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.image_files import encode_image, read_image, read_mask
from unet_trainer.images.mask_coding import IGNORED, MaskCoding, as_written, given_coding, show_value
from unet_trainer.images.overlays import COLOURS, contact_sheet, to_display
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.os_errors import cannot

NUM_PICTURES = 24


def draw_sheet(config: Config, report: DatasetReport) -> Path | None:
    """Writes the sheet under checkpoint_dir. Where nobody knows what the values mean, each is drawn as a class of its own."""
    if not report.pairs:
        return None
    if report.coding is not None:
        coding, names = report.coding, id_names(report.decided(config))
    else:
        coding, names = _values_as_classes(report.masks)
    is_background = has_background(names, class_shares(report.masks, coding, len(names)))
    pictures, labels = [], []
    for index, class_id in _rarest_first(report.masks, coding, len(names))[:NUM_PICTURES]:
        pair = report.pairs[index]
        image = to_display(read_image(pair.image))
        ids = resize_mask(coding.encode(read_mask(pair.mask)), (image.shape[0], image.shape[1]))  # resize_masks
        pictures.append((image, ids))
        labels.append(f"{pair.name}: {names[class_id]}" if class_id < len(names) else pair.name)
    path = Path(config.checkpoint_dir) / "check" / sheet_name(Path(config.data_dir))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet = contact_sheet(pictures, labels, names=names, has_background=is_background)
        write_bytes_atomically(path, encode_image(sheet, ".png"))
    except OSError as error:
        raise cannot(f"checkpoint_dir: {path}", "be written", error, path) from None
    return path


def sheet_name(data_dir: Path) -> str:
    """The name of the folder, and digits that differ for folders of the same name."""
    folder = data_dir.resolve()
    name = re.sub(r"[^\w.-]+", "_", folder.name, flags=re.ASCII) or "data"
    return f"{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]}.png"


def _values_as_classes(masks: Sequence[MaskFacts]) -> tuple[MaskCoding, list[str]]:
    """The most frequent values, as many as there are colours; the others are drawn as ignored."""
    values = sorted(value for value, _ in total_counts(masks).most_common(len(COLOURS)))
    return given_coding([as_written([value]) for value in values], None, True), [show_value(value) for value in values]


def _rarest_first(masks: Sequence[MaskFacts], coding: MaskCoding, num_ids: int) -> list[tuple[int, int]]:
    """Index of a pair and the class it is shown for: by turns the pairs of each class but the most common, rarest class first.

    Of each class, pairs with much of it and with little, spread over all that hold it.
    """
    held = [class_ids(mask, coding) for mask in masks]
    shares = class_shares(masks, coding, num_ids)
    classes = sorted((class_id for class_id in range(num_ids) if shares[class_id] > 0), key=lambda class_id: shares[class_id])
    rare, queues = classes[:-1] or classes, []
    for class_id in rare:
        holders = [index for index, its in enumerate(held) if class_id in its]
        holders.sort(key=lambda index: -held[index][class_id])
        spread = np.unique(np.linspace(0, len(holders) - 1, -(-NUM_PICTURES // len(rare))).round().astype(int))
        holders = [holders[place] for place in spread] + [index for place, index in enumerate(holders) if place not in spread]
        queues.append([(index, class_id) for index in holders])
    chosen: dict[int, int] = {}
    for turn in range(len(held)):
        for queue in queues:
            if turn < len(queue):
                chosen.setdefault(*queue[turn])
    for index in range(len(held)):
        chosen.setdefault(index, IGNORED)
    return list(chosen.items())
