"""The settings for a dataset as one block of YAML that trains when it is pasted into a config, or written as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unet_trainer.config.dump import as_dict
from unet_trainer.config.schema import FIELDS, Config, as_shape
from unet_trainer.datasets.answered_report import Answer, AnsweredReport
from unet_trainer.datasets.dataset_report import DatasetReport
from unet_trainer.datasets.problems import setting_lines

LARGE = 1.5  # times image_size: resizing would lose much of such an image
CLASS_KEYS = ("num_classes", "class_names", "mask_values", "ignore_value", "unknown_values", "mask_tolerance")


def block_settings(answered: AnsweredReport) -> dict[str, Any]:
    """data_dir, the classes, and all that differs from the defaults."""
    given, defaults = as_dict(answered.config), as_dict(Config())
    values = {name: given[name] for name in FIELDS if given[name] != defaults[name] and name != "resume"}
    advised = {name: value for answer in _advise_fit(answered) for name, value in answer.settings.items()}
    return {"data_dir": answered.config.data_dir, **values, **_class_settings(answered.report), **advised}


def block_lines(answered: AnsweredReport, shorten: Callable[[str], str] = str) -> list[str]:
    """The block: what was answered stands with its reason, and with the other answers as comments.

    `shorten` makes the reasons shorter.
    """
    values, answers = block_settings(answered), [*answered.answers, *_advise_fit(answered)]
    groups = {name: answer for answer in answers for name in _keys_of(answer, values)}
    lines: list[str] = []
    for name in ("data_dir", *(name for name in FIELDS if name in values and name != "data_dir")):
        names = _keys_of(groups[name], values) if name in groups else [name]
        if name == names[0]:
            group = {each: values[each] for each in names}
            lines += _group_lines(group, groups[name], shorten) if name in groups else setting_lines(group)
    return lines


def _keys_of(answer: Answer, values: Mapping[str, Any]) -> list[str]:
    """The settings of an answer, in the order of the config; with one about the classes go all settings of the classes."""
    names = {*answer.settings, *(CLASS_KEYS if "num_classes" in answer.settings else ())}
    return [name for name in FIELDS if name in names and name in values]


def _group_lines(settings: Mapping[str, Any], answer: Answer, shorten: Callable[[str], str]) -> list[str]:
    reason = shorten(" ".join(answer.reason.split()))
    lines = setting_lines(settings)
    if len(lines) == 1 and not answer.others:
        return [f"{lines[0]}  # {reason}" if reason else lines[0]]
    place = "its place" if len(lines) == 1 else "their place"
    lines = [*([f"# {reason}"] if reason else []), *lines]
    for other in answer.others:
        lines += [
            f"# or in {place}{': ' if other.meaning else ''}{other.meaning}",
            *(f"#   {line}" for line in setting_lines(other.settings)),
        ]
    return lines


def _class_settings(report: DatasetReport) -> dict[str, Any]:
    """The classes that were found or given."""
    if report.classes is None:
        return {}
    coding, names = report.classes.coding, report.classes.class_names
    settings: dict[str, Any] = {"num_classes": report.classes.num_classes}
    settings |= {"class_names": names} if names else {}
    settings["mask_values"] = coding.mask_values
    settings |= {"ignore_value": coding.written_ignore_value} if coding.ignored else {}
    settings |= {"unknown_values": "ignore"} if coding.ignores_unknown else {}
    return settings | ({"mask_tolerance": coding.tolerance} if coding.tolerance else {})


def _advise_fit(answered: AnsweredReport) -> list[Answer]:
    """fit: crop for images that are far larger than the size that they are to be resized to."""
    config, report = answered.config, answered.report
    if config.fit != "resize" or config.image_size == "auto" or not report.images:
        return []
    height, width = as_shape(config.image_size)
    middle = np.median([image.height * image.width for image in report.images])
    if middle <= LARGE**2 * height * width:
        return []
    return [Answer({"fit": "crop"}, f"the images are larger than image_size: {width}×{height}")]
