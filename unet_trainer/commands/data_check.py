"""The report of `check`: what a dataset holds, what is wrong with it, its contact sheet and the settings for it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.config.dump import as_dict, to_plain, value_text
from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config, as_shape, id_names, is_demo_dir
from unet_trainer.datasets.class_statistics import (
    absent_classes,
    class_ids,
    class_shares,
    class_table,
    describe_classes,
    value_table,
)
from unet_trainer.datasets.dataset_report import DatasetReport, build_dataset_report, describe_sizes
from unet_trainer.datasets.demo import ensure_demo
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.problems import describe_problems
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.datasets.splits import describe_split
from unet_trainer.images.image_files import DataError, read_image, read_mask, write_image
from unet_trainer.images.image_spec import depth_name
from unet_trainer.images.mask_coding import IGNORED, MaskCoding, as_written
from unet_trainer.images.overlays import contact_sheet, to_display
from unet_trainer.images.tiling import resize_mask
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.console import Console, counted
from unet_trainer.system.names import json_text

NUM_NAMED = 50  # files of one problem that are printed; the JSON file has all
NUM_PICTURES = 24
# Settings of the data that are repeated in the lines to paste if they are not the defaults.
DATA_KEYS = (
    "image_dir", "mask_dir", "mask_suffix", "unpaired", "split", "split_file", "group_pattern", "val_fraction", "num_folds", "fold",
    "fit",
    "crops_per_image", "rare_class_crops", "resize_masks", "in_channels", "image_mean", "image_std", "class_names",
)  # fmt: skip
LARGE = 1.5  # times image_size: resizing would lose much of such an image


def check_data(config: Config, console: Console, json_file: Path | None) -> bool:
    """Prints the report and writes the contact sheet; returns whether the data can be trained on. Raises UserError."""
    data_dir = Path(config.data_dir)
    if is_demo_dir(data_dir) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    try:
        report = build_dataset_report(config, console)
    except DataError as error:  # no pairs can be found
        if json_file is not None:
            _write_json(json_file, config, DatasetReport(FoundPairs((), ""), questions=[str(error)]), False, None, [])
        raise
    given, config = config, report.decided(config)
    console.say(f"Dataset {data_dir}")
    _say_contents(config, report, console, is_open=given.num_classes == "auto")
    sheet = _draw_sheet(config, report)
    if sheet is not None:
        console.fact("Pictures", f"{sheet} (the rarest classes first)")
    absent = [] if report.coding is None else absent_classes(report.masks, report.coding, id_names(config))
    if absent:
        report.notices.append(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")
    for notice in report.notices:
        console.note(notice)
    if report.problems:
        console.say()
        console.say(describe_problems(report.problems, NUM_NAMED))
    for question in report.questions:
        console.say()
        console.say(question)
    is_good = not report.blocking_message
    lines = config_lines(given, report)
    console.say()
    if is_good:
        console.say("Nothing stands in the way of training. The settings for this data:")
    else:
        num_files = sum(len(problem.lines) for problem in report.problems)
        counts = f"{counted(num_files, 'problem')} with files, {counted(len(report.questions), 'open question')}"
        console.say(f"This data cannot be trained on yet: {counts}.")
        console.say("Once they are settled, with these settings:")
    for line in lines:
        console.say(f"  {line}")
    if json_file is not None:
        _write_json(json_file, config, report, is_good, sheet, lines)
    return is_good


def _say_contents(config: Config, report: DatasetReport, console: Console, is_open: bool) -> None:
    console.fact("Pairs", f"{len(report.found.pairs)} ({report.found.rule})")
    if report.kind is None:
        return
    depths = Counter(f"{depth_name(image.dtype)} with {image.channels} channels" for image in report.images)
    console.fact("Images", f"{report.kind}; {describe_sizes(report.images, 9)}")
    if len(depths) > 1:
        console.fact("", ", ".join(f"{count} {depth}" for depth, count in depths.most_common()))
    if report.image_spec is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (report.image_spec.mean, report.image_spec.std))
        console.fact("Statistics", f"mean {mean}; std {std} ({report.statistics_reason})")
    if report.coding is not None and report.classes is not None:
        console.fact("Masks", describe_classes(report.masks, report.coding, id_names(config)))
        if is_open:
            console.fact("Classes", f"num_classes: {config.num_classes} ({report.classes.num_classes_reason})")
        ids = [set(class_ids(mask, report.coding)) for mask in report.masks]
        table = class_table(report.masks, report.coding, id_names(config))
        width = max(len(name) for _, name, _ in table)
        for class_id, (values, name, share) in enumerate(table):
            holders = sum(class_id in held for held in ids)
            console.say(f"      {name:<{width}}  {values:>8}  {share:8.3%} of pixels, in {holders} of {len(ids)} masks")
    if report.split is not None:
        console.fact("Split", f"{describe_split(report.split)} ({report.split.rule})")


def config_lines(config: Config, report: DatasetReport) -> list[str]:
    """What to paste into a config for this data."""
    lines = [f"data_dir: {json.dumps(config.data_dir, ensure_ascii=False)}"]
    given, defaults = {**as_dict(config), **report.found.suggested}, as_dict(Config())
    lines += [f"{name}: {json.dumps(given[name], ensure_ascii=False)}" for name in DATA_KEYS if given[name] != defaults[name]]
    lines += [f"{name}: {value_text(to_plain(value))}" for name, value in _class_settings(config, report).items()]
    if report.images:
        height, width = (0, 0) if config.image_size == "auto" else as_shape(config.image_size)
        middle = np.median([image.height * image.width for image in report.images])
        if config.fit == "resize" and height and middle > LARGE**2 * height * width:
            lines = [line for line in lines if not line.startswith("fit: ")]
            lines.append(f"fit: crop  # the images are larger than image_size: {width}×{height}")
    return lines


def _class_settings(config: Config, report: DatasetReport) -> dict[str, Any]:
    """The classes that were found or given; while their question is open, those of the first choice."""
    if report.classes is None:
        first = report.choices[0].settings if report.choices else {}
        return {**({} if config.num_classes == "auto" else {"num_classes": config.num_classes}), **first}
    coding, names = report.classes.coding, report.classes.class_names
    settings: dict[str, Any] = {"num_classes": report.classes.num_classes}
    settings |= {"class_names": names} if names else {}
    settings["mask_values"] = coding.mask_values
    settings |= {"ignore_value": coding.written_ignore_value} if coding.ignored else {}
    settings |= {"unknown_values": "ignore"} if coding.ignores_unknown else {}
    return settings | ({"mask_tolerance": coding.tolerance} if coding.tolerance else {})


def _draw_sheet(config: Config, report: DatasetReport) -> Path | None:
    """Overlays of the pairs with the rarest classes first, under checkpoint_dir."""
    if report.coding is None or not report.pairs:
        return None
    pictures, labels = [], []
    for index, class_id in _rarest_first(report.masks, report.coding, len(id_names(config)))[:NUM_PICTURES]:
        pair = report.pairs[index]
        image = to_display(read_image(pair.image))
        ids = report.coding.encode(read_mask(pair.mask))
        if ids.shape != image.shape[:2]:  # resize_masks
            ids = resize_mask(ids, image.shape[:2])
        pictures.append((image, ids))
        names = id_names(config)
        labels.append(f"{pair.name}: {names[class_id]}" if class_id < len(names) else pair.name)
    folder = Path(config.checkpoint_dir) / "check"
    name = re.sub(r"[^\w.-]+", "_", Path(config.data_dir).resolve().name) or "data"
    path = folder / f"{name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_image(path, contact_sheet(pictures, labels))
    except OSError as error:
        raise UserError(f"checkpoint_dir: {path} cannot be written ({error.strerror})") from None
    return path


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


def _write_json(path: Path, config: Config, report: DatasetReport, is_good: bool, sheet: Path | None, lines: Sequence[str]) -> None:
    split = report.split
    content = {
        "ok": is_good,
        "data_dir": config.data_dir,
        "rule": report.found.rule,
        "num_pairs": len(report.found.pairs),
        "num_train": None if split is None else len(split.train),
        "num_val": None if split is None else len(split.val),
        "num_test": None if split is None else len(split.test),
        "advised": report.advised,
        "sizes": [
            [height, width, count] for (height, width), count in Counter(image.size for image in report.images).most_common()
        ],
        "dtypes": dict(Counter(image.dtype for image in report.images)),
        "channels": {str(count): number for count, number in Counter(image.channels for image in report.images).items()},
        "mean": None if report.image_spec is None else list(report.image_spec.mean),
        "std": None if report.image_spec is None else list(report.image_spec.std),
        "classes": []
        if report.coding is None
        else [
            {"values": values, "name": name, "share": share}
            for values, name, share in class_table(report.masks, report.coding, id_names(config))
        ],
        "values": [
            {"value": to_plain(as_written([row.value])), "share": row.share, "masks": row.num_masks}
            for row in value_table(report.masks)
        ],
        "choices": [{"meaning": choice.meaning, "settings": to_plain(dict(choice.settings))} for choice in report.choices],
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "questions": report.questions,
        "notices": report.notices,
        "contact_sheet": None if sheet is None else str(sheet),
        "config": list(lines),
    }
    try:
        write_text_atomically(path, json_text(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json: {shlex.quote(str(path))} cannot be written ({error.strerror})") from None
