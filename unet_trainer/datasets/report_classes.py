"""What the values in the masks of a dataset mean: the classes that were found, or the question to answer first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from unet_trainer.config.dump import to_plain
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import class_contradictions
from unet_trainer.config.mask_classes import split_values
from unet_trainer.config.schema import Config, id_names
from unet_trainer.datasets.class_files import find_class_file, parse_class_file
from unet_trainer.datasets.coding_choice import VOID, ChosenClasses, choose_classes, present_classes
from unet_trainer.datasets.coding_question import ask_for_classes
from unet_trainer.datasets.dataset_report import DatasetReport
from unet_trainer.datasets.mask_evidence import MaskEvidence, swapped_palettes
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.problems import Problem, Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding, as_number, given_coding, show_value


def choose_coding(report: DatasetReport, config: Config) -> None:
    if not report.pairs:
        return
    _refuse_swapped_palettes(report)
    ignored = given_coding("nonzero", config.ignore_value).ignored
    evidence = MaskEvidence(report.masks, ignored)
    class_file = None
    if config.mask_values == "auto":
        stored = report.found.class_file
        class_file = find_class_file(Path(config.data_dir), report.pairs) if stored is None else parse_class_file(*stored)
    if len(evidence.seen) < 2 and config.mask_values == "auto":
        every = f"{show_value(evidence.seen[0])}" if evidence.seen else f"ignored (ignore_value: {to_plain(config.ignore_value)})"
        report.questions.append(_nothing_to_learn(len(report.masks), every))
        return
    try:
        chosen = _known_classes(report.found, config, evidence) or choose_classes(config, evidence, class_file)
    except DataError as error:
        report.questions.append(error if isinstance(error, Question) else Question(str(error)))
        return
    if chosen is None:
        report.questions.append(ask_for_classes(config, evidence, [pair.shown_mask for pair in report.pairs], class_file))
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
        one, many = (f"{masks} with values that belong to no class (the classes are {classes})" for masks in ("mask", "masks"))
        fix, settings = _unknown_fix(config, evidence)
        report.problems.append(Problem("values", one, many, tuple(lines), fix, settings))


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


def _nothing_to_learn(num_masks: int, every: str) -> Question:
    masks = "the only mask" if num_masks == 1 else f"all {num_masks} masks"
    return Question(
        f"there is nothing to learn: every pixel of {masks} is {every}; are these the masks (mask_dir), "
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
        titles = "mask whose palette has another order", "masks whose palette has another order"
        report.problems.append(Problem("palettes", *titles, tuple(lines), fix))


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


def _unknown_fix(config: Config, evidence: MaskEvidence) -> tuple[str, dict[str, str]]:
    """How to settle values of no class, and the settings for it; three values that were written as a colour are named."""
    entries = [] if isinstance(config.mask_values, str) else list(config.mask_values)
    entries += [] if config.ignore_value is None else [config.ignore_value]
    for colour in (value for entry in entries for value in split_values(entry) if isinstance(value, tuple)):
        if as_number(colour) not in evidence.counts and set(colour) <= set(evidence.seen) and len(set(colour)) == len(colour):
            apart = [[channel] for channel in colour]
            return f"{list(colour)} is a colour, and no mask has it; three values that are one class are written {apart}", {}
    fix = "correct the masks, or add the values to mask_values or ignore_value; with unknown_values: ignore they count nowhere"
    return fix, {"unknown_values": "ignore"}
