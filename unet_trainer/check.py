"""python train_unet.py check: reads every file of a dataset and says in one report what it holds and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from unet_trainer.atomic import write_text_atomically
from unet_trainer.config import DEMO_DIR, Config, UserError, as_dict, class_names, image_shape
from unet_trainer.console import Console
from unet_trainer.demo import ensure_demo
from unet_trainer.forms import show_depth, show_kind
from unet_trainer.images import DataError, read_image, read_mask, write_image
from unet_trainer.masks import IGNORED
from unet_trainer.pairs import Found
from unet_trainer.pictures import contact_sheet, to_display
from unet_trainer.problems import describe_problems
from unet_trainer.scan import class_ids, class_shares
from unet_trainer.survey import Survey, absent_classes, build_survey, class_table, describe_classes, show_sizes

NUM_NAMED = 50  # files of one problem that the terminal shows; the JSON file has all
NUM_PICTURES = 24
RARE_SHARE = 0.05  # of the pixels: a class below it asks for class_weights
# Settings of the data that are repeated among the lines to paste where they are not the defaults.
DATA_KEYS = (
    "image_dir", "mask_dir", "mask_suffix", "split_file", "group_pattern", "val_fraction", "num_folds", "fold", "fit",
    "crops_per_image", "rare_class_crops", "resize_masks", "in_channels", "image_mean", "image_std", "class_names",
)  # fmt: skip
LARGE = 1.5  # times image_size: resizing would throw away much of such an image


def check_data(config: Config, console: Console, json_file: Path | None) -> bool:
    """Prints the report and writes the contact sheet; returns whether the data can be trained on. Raises UserError."""
    data_dir = Path(config.data_dir)
    if data_dir == Path(DEMO_DIR) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    try:
        survey = build_survey(config, console)
    except DataError as error:  # no pair can be told
        if json_file is not None:
            _write_json(json_file, config, Survey(Found((), ""), undecided=[str(error)]), False, None, [])
        raise
    console.say(f"Dataset {data_dir}")
    _tell_contents(config, survey, console)
    sheet = _draw_sheet(config, survey)
    if sheet is not None:
        console.fact("Pictures", f"{sheet} (the rarest classes first)")
    absent = [] if survey.coding is None else absent_classes(config, survey)
    if absent:
        survey.notices.append(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")
    for notice in survey.notices:
        console.note(notice)
    if survey.problems:
        console.say()
        console.say(describe_problems(survey.problems, NUM_NAMED))
    for question in survey.undecided:
        console.say()
        console.say(question)
    is_good = not survey.refusal
    lines = config_lines(config, survey)
    console.say()
    if is_good:
        console.say("Nothing stands in the way of training. The settings for this data:")
    else:
        num_files = sum(len(problem.lines) for problem in survey.problems)
        console.say(f"This data cannot be trained on yet: {num_files} problems with files, {len(survey.undecided)} open questions.")
        console.say("Once they are settled, with these settings:")
    for line in lines:
        console.say(f"  {line}")
    if json_file is not None:
        _write_json(json_file, config, survey, is_good, sheet, lines)
    return is_good


def _tell_contents(config: Config, survey: Survey, console: Console) -> None:
    console.fact("Pairs", f"{len(survey.found.pairs)} ({survey.found.rule})")
    if not survey.images:
        return
    assert survey.kind is not None
    depths = Counter(f"{show_depth(image.dtype)} with {image.channels} channels" for image in survey.images)
    console.fact("Images", f"{show_kind(survey.kind)}; {show_sizes(survey.images, 9)}")
    if len(depths) > 1:
        console.fact("", ", ".join(f"{count} {depth}" for depth, count in depths.most_common()))
    if survey.form is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (survey.form.mean, survey.form.std))
        console.fact("Statistics", f"mean {mean}; std {std} ({survey.form_reason})")
    if survey.coding is not None:
        console.fact("Masks", describe_classes(config, survey))
        ids = [set(class_ids(mask, survey.coding)) for mask in survey.masks]
        table = class_table(config, survey)
        width = max(len(name) for _, name, _ in table)
        for class_id, (values, name, share) in enumerate(table):
            holders = sum(class_id in held for held in ids)
            console.say(f"      {name:<{width}}  {values:>8}  {share:8.3%} of pixels, in {holders} of {len(ids)} masks")
    if survey.split is not None:
        console.fact("Split", f"{len(survey.split.train)} train, {len(survey.split.val)} val ({survey.split.rule})")


def config_lines(config: Config, survey: Survey) -> list[str]:
    """What to paste into a config for this data."""
    lines = [f"data_dir: {json.dumps(config.data_dir, ensure_ascii=False)}"]
    given, defaults = as_dict(config), as_dict(Config())
    lines += [f"{name}: {json.dumps(given[name], ensure_ascii=False)}" for name in DATA_KEYS if given[name] != defaults[name]]
    lines.append(f"num_classes: {config.num_classes}")
    if survey.coding is not None:
        lines.append(f"mask_values: {json.dumps(survey.coding.mask_values).replace(chr(34), '')}")
        if survey.coding.ignore_value is not None:
            lines.append(f"ignore_value: {survey.coding.ignore_value}")
        shares = class_shares(survey.masks, survey.coding, max(2, config.num_classes))
        rarest = min((share for share in shares if share > 0), default=1.0)
        if rarest < RARE_SHARE:
            lines.append(f"class_weights: auto  # the rarest class has {rarest:.2%} of the pixels")
    if survey.images:
        height, width = image_shape(config)
        middle = np.median([image.height * image.width for image in survey.images])
        if config.fit == "resize" and middle > LARGE**2 * height * width:
            lines.append(f"fit: crop  # the images are larger than image_size: {width}×{height}")
    return lines


def _draw_sheet(config: Config, survey: Survey) -> Path | None:
    """Overlays of the pairs with the rarest classes first, under checkpoint_dir."""
    if survey.coding is None or not survey.pairs:
        return None
    pictures, labels = [], []
    for index, class_id in _rarest_first(survey, max(2, config.num_classes))[:NUM_PICTURES]:
        pair = survey.pairs[index]
        image = to_display(read_image(pair.image))
        ids = survey.coding.encode(read_mask(pair.mask))
        if ids.shape != image.shape[:2]:  # resize_masks
            ids = cv2.resize(ids, image.shape[1::-1], interpolation=cv2.INTER_NEAREST_EXACT)
        pictures.append((image, ids))
        names = ["background", *class_names(config)] if config.num_classes == 1 else class_names(config)
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


def _rarest_first(survey: Survey, num_ids: int) -> list[tuple[int, int]]:
    """Index of a pair and the class it is shown for: by turns the pairs of each class but the most common, rarest class first.

    Of each class, pairs with much of it and with little, spread over all that hold it.
    """
    assert survey.coding is not None
    held = [class_ids(mask, survey.coding) for mask in survey.masks]
    shares = class_shares(survey.masks, survey.coding, num_ids)
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


def _write_json(path: Path, config: Config, survey: Survey, is_good: bool, sheet: Path | None, lines: Sequence[str]) -> None:
    split = survey.split
    report = {
        "ok": is_good,
        "data_dir": config.data_dir,
        "rule": survey.found.rule,
        "num_pairs": len(survey.found.pairs),
        "num_train": None if split is None else len(split.train),
        "num_val": None if split is None else len(split.val),
        "sizes": [
            [height, width, count] for (height, width), count in Counter(image.size for image in survey.images).most_common()
        ],
        "dtypes": dict(Counter(image.dtype for image in survey.images)),
        "channels": {str(count): number for count, number in Counter(image.channels for image in survey.images).items()},
        "mean": None if survey.form is None else list(survey.form.mean),
        "std": None if survey.form is None else list(survey.form.std),
        "classes": []
        if survey.coding is None
        else [{"values": values, "name": name, "share": share} for values, name, share in class_table(config, survey)],
        "problems": [dataclasses.asdict(problem) for problem in survey.problems],
        "undecided": survey.undecided,
        "notices": survey.notices,
        "contact_sheet": None if sheet is None else str(sheet),
        "config": list(lines),
    }
    try:
        write_text_atomically(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--json: {shlex.quote(str(path))} cannot be written ({error.strerror})") from None
