"""The question about masks that no rule of mask_reading decides: a table of their values, and the lines of YAML for the
two or three readings that are possible."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from unet_trainer.config.load import class_contradictions
from unet_trainer.config.schema import Config
from unet_trainer.data import mask_reading
from unet_trainer.data.mask_evidence import MAX_LISTED, VOID, MaskEvidence
from unet_trainer.data.mask_reading import ChosenClasses, of_each
from unet_trainer.data.pairs import Choice, Question
from unet_trainer.images.mask_decoding import show_value
from unet_trainer.system.console import counted

MAX_CHOICES, NUM_ROWS = 3, 12
MAX_BLURRED = 0.05  # share of pixels between the colours of masks saved as JPEG
MIN_MAIN = 0.5  # share of pixels of the values that are classes beside noise


def ask_for_classes(config: Config, evidence: MaskEvidence, names: Sequence[str]) -> Question:
    """The question where choose_classes has no answer. `names` are what messages call the masks."""
    readings = () if evidence.look_like_photographs else _possible_readings(evidence)
    choices = list[Choice]()
    for reading in readings:
        settings = _settings(reading, evidence)
        is_new = all(settings != choice.settings for choice in choices)
        if is_new and not any(class_contradictions(replace(config, **settings))):
            choices.append(Choice(reading.coding.reason, settings))
    if (number := config.num_classes) != "auto":
        choices.sort(key=lambda choice: choice.settings["num_classes"] != number and not evidence.are_objects)
    text = "mask_values: auto cannot tell what the values in the masks mean"
    hint = describe_misfit(evidence) or _describe_values(evidence)
    table = [] if evidence.look_like_photographs else _table(evidence, names)
    return Question(f"{text}\n  {hint}" if hint else text, *choices[:MAX_CHOICES], table=table)


def describe_misfit(evidence: MaskEvidence) -> str:
    """Why the classes of the class file are not used, and what to do; empty if there is none."""
    if (file := evidence.class_file) is None:
        return ""
    what = f"it names {len(file.names)} classes, and the masks hold {len(evidence.seen)} values that do not fit them"
    return f"{file.path.name} is not used: {what}, or its void is most of the pixels; correct it, or set class_names"


def _describe_values(evidence: MaskEvidence) -> str:
    """What they look like, and what to ask then."""
    if evidence.look_like_photographs:
        photo = "They look like those of photographs; is mask_dir the folder of the masks?"
        return f"{photo} Of cut-outs, save the alpha channel as the mask"
    if evidence.are_objects:
        return "They look like ids of objects: each is one piece, or masks with more of them hold those of the others"
    if evidence.is_lossy:
        return "They are saved as JPEG or lossy WebP, which changes values beside edges: export PNG if you can"
    if evidence.last_may_be_void or evidence.seen[-1] == VOID:
        return f"{show_value(evidence.seen[-1])} may be void (pixels to ignore), or a class: which is it?"
    return "Which of the two is the background?" if len(evidence.seen) == 2 else ""


def _table(evidence: MaskEvidence, names: Sequence[str]) -> list[str]:
    """The most frequent values, each with those close to it; the mask of a value that no other mask holds."""
    each = {value: [value] for value, _ in evidence.counts.most_common()}
    groups = [*(evidence.groups if evidence.is_lossy or len(each) > NUM_ROWS else each).items()][:NUM_ROWS]
    rows = [("value", "share of pixels", "in masks")]
    for value, group in groups:
        shown = show_value(value) + (f" and {counted(len(group) - 1, 'value')} close to it" if len(group) > 1 else "")
        in_masks = f"{evidence.holders[value]} of {len(names)}"
        if value in evidence.in_one_mask:
            in_masks = next(name for name, mask in zip(names, evidence.masks, strict=True) if value in mask.counts)
        rows.append((shown, f"{evidence.share(*group):.2%}", in_masks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(str.rjust, row, widths)) for row in rows]
    is_whole = sum(len(group) for _, group in groups) == len(each)
    return lines if is_whole else [*lines, f"… {len(each)} values in all (check --json FILE lists them)"]


def _settings(reading: ChosenClasses, evidence: MaskEvidence) -> dict[str, Any]:
    """What differs from the config. Ids from 0 need no mask_values."""
    coding, num_ids = reading.coding, reading.coding.num_ids
    is_plain = coding.values == tuple(range(num_ids)) and not coding.ignores_unknown
    settings: dict[str, Any] = {"num_classes": reading.num_classes}
    settings |= {} if is_plain else {"mask_values": coding.mask_values}
    settings |= {"ignore_value": coding.written_ignore_value} if set(coding.ignored) - evidence.ignored else {}
    settings |= {"unknown_values": "ignore"} if coding.ignores_unknown else {}
    return settings | ({"mask_tolerance": coding.tolerance} if coding.tolerance else {})


def _possible_readings(evidence: MaskEvidence) -> Iterator[ChosenClasses]:
    """Every reading that a person may mean, the most likely first."""
    seen, high = evidence.seen, evidence.seen[-1]
    nonzero = "every object is foreground" if evidence.are_objects else "any value but 0 is foreground"
    are_two_codings = len(seen) == 3 and high == VOID and not evidence.is_beside_classes(VOID)
    if seen[0] == 0 and (evidence.are_objects or are_two_codings):
        yield of_each(evidence, None, nonzero)
    are_ids = len(seen) <= mask_reading.MAX_CLASSES and seen == list(range(len(seen)))
    yield from () if are_ids or evidence.are_objects else _of_main_values(evidence)
    if len(seen) == 2:
        yield from _either_order(evidence, *seen)
    elif evidence.last_may_be_void or (high == VOID and seen[-2] < VOID // 2):
        if len(seen) == 3 and seen[0] != 0:
            yield from _either_order(evidence, *seen)
        yield of_each(evidence, seen[:-1], f"{show_value(high)} is ignored", void=[high])
    if are_ids:
        yield of_each(evidence, seen, f"ids of {len(seen)} classes")
    elif len(seen) <= MAX_LISTED:
        yield of_each(evidence, seen, "a class for each, in an order that you may change")
    if seen[0] == 0 and not evidence.is_lossy:  # JPEG makes values next to 0 of it
        yield of_each(evidence, None, nonzero)


def _either_order(evidence: MaskEvidence, one: int, other: int, *void: int) -> Iterator[ChosenClasses]:
    """Two values, the more frequent one as the background first."""
    often, seldom = sorted((one, other), key=lambda value: -evidence.counts[value])
    beyond = f", {show_value(void[0])} is ignored" if void else ""
    for low, high in ((often, seldom), (seldom, often)):
        meaning = f"{show_value(low)} is background, {show_value(high)} is foreground{beyond}"
        yield of_each(evidence, [low, high], meaning, void=void)


def _of_main_values(evidence: MaskEvidence) -> Iterator[ChosenClasses]:
    """A class for each value that fills areas in several masks, or many pixels; the others are soft edges or noise."""
    are_mixed = evidence.is_lossy or evidence.has_colours or len(evidence.seen) > MAX_LISTED
    groups = evidence.groups if are_mixed else {value: [value] for value in evidence.seen}
    doubtful = {*evidence.only_in_edges, *evidence.in_one_mask}
    main = [each for each, group in groups.items() if each not in doubtful or evidence.share(*group) > MAX_BLURRED]
    others, tolerance = set(evidence.seen) - set(main), mask_reading.jpeg_tolerance(main)
    if not 2 <= len(main) <= MAX_LISTED or not others:
        return
    if others > set(evidence.in_one_mask) and tolerance >= mask_reading.MIN_TOLERANCE:
        meaning = f"a class for each of {len(main)} values, in an order that you may change; others go to the nearest"
        yield of_each(evidence, sorted(main), meaning, tolerance=0 if evidence.is_lossy else tolerance)  # known of JPEG
    elif evidence.share(*main) >= MIN_MAIN:
        are_ignored = f"{counted(len(others), 'value')} in one mask only or in few pixels: ignored"
        yield of_each(evidence, sorted(main), are_ignored, ignores_unknown=True)
