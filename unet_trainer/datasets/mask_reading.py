"""Decides what the values of the masks mean, and how many classes there are, where the config leaves it open.

Rules decide what is clear (choose_classes): a class file, a palette, ids from 0, two values or two clusters of greys,
few exact colours. Everything else is one question (ask_for_classes): a table of the values, and the lines of YAML for
each of the two or three readings that are possible. Every choice that is offered was tried on the masks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from unet_trainer.config.load import class_contradictions
from unet_trainer.config.parsers import MaskValues
from unet_trainer.config.schema import Config, implied_num_classes
from unet_trainer.datasets.mask_evidence import (
    MAX_LISTED,
    VOID,
    ClassFile,
    MaskEvidence,
    NamedClass,
    ValueGroup,
    class_ids,
    is_background,
)
from unet_trainer.datasets.pairs import Choice, Question, first_few
from unet_trainer.images import mask_decoding as masks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import (
    COLOUR,
    IGNORED,
    MaskCoding,
    as_written,
    given_coding,
    show_value,
    show_values,
)
from unet_trainer.images.mask_shapes import EDGE_WIDTH
from unet_trainer.system.console import counted

MAX_CLASSES = 254  # ids 254 and 255 have a meaning of their own
MIN_TOLERANCE, MAX_TOLERANCE = 8, 127  # JPEG changes values by more than the first
MAX_VOID = 0.5  # share of pixels of a class named void; with more it may be the background
MAX_BLURRED = 0.05  # share of pixels between the colours of masks saved as JPEG
BLACK, WHITE = 0x000000, 0xFFFFFF  # in a palette
EDGE_RARITY = 200  # one of so many pixels: the share of a colour that edges make
MAX_CHOICES, NUM_SHOWN = 3, 12  # readings that are offered, rows of the table


@dataclass(frozen=True)
class ChosenClasses:
    """The classes of a dataset, and why."""

    coding: MaskCoding
    num_classes: int
    num_classes_reason: str = ""
    class_names: tuple[str, ...] | None = None  # from a class file
    class_names_reason: str = ""


@dataclass(frozen=True)
class Reading:
    """What the values of the masks mean: mask_values as the config writes them, and what is ignored besides."""

    values: MaskValues
    num_classes: int
    reason: str  # or, of a choice, what it means
    num_classes_reason: str = ""
    ignored: tuple[int, ...] = ()
    tolerance: int = 0
    names: tuple[str, ...] | None = None
    ignores_others: bool = False

    def choice(self, ignored: frozenset[int]) -> Choice:
        """The settings for it, besides the user's ignore_value. Ids from 0 need no mask_values."""
        is_plain = self.values == tuple(range(len(self.values))) and not self.ignores_others
        settings: dict[str, Any] = {"num_classes": self.num_classes}
        settings |= {} if is_plain else {"mask_values": self.values}
        settings |= {"ignore_value": as_written(sorted({*ignored, *self.ignored}))} if self.ignored else {}
        settings |= {"unknown_values": "ignore"} if self.ignores_others else {}
        settings |= {"mask_tolerance": self.tolerance} if self.tolerance else {}
        return Choice(self.reason, settings)


def _of_each(values: Sequence[int], reason: str, num_classes: int | None = None, **others: Any) -> Reading:
    """A class for each value, in this order; two are background and foreground."""
    listed = tuple(as_written([value]) for value in values)
    return Reading(listed, num_classes or (1 if len(values) == 2 else len(values)), reason, **others)


def choose_classes(config: Config, evidence: MaskEvidence, class_file: ClassFile | None = None) -> ChosenClasses | None:
    """The classes, if there is only one way to read the masks; None where the user must be asked. `evidence` is without
    the values of ignore_value. Raises DataError for settings that the masks contradict."""
    implied = implied_num_classes(config)
    asked = implied if config.num_classes == "auto" else config.num_classes
    ignores_unknown = config.unknown_values == "ignore"
    tolerance = 0 if config.mask_tolerance == "auto" else config.mask_tolerance
    if config.mask_values != "auto":
        assert asked is not None
        coding = given_coding(config.mask_values, config.ignore_value, ignores_unknown, tolerance)
        if config.mask_tolerance == "auto" and coding.values is not None and evidence.is_lossy:
            tolerance = _jpeg_tolerance(coding.known_values)
            if tolerance >= MIN_TOLERANCE and not set(evidence.seen) <= set(coding.known_values):
                coding = replace(coding, tolerance=tolerance, reason=_tolerance_reason(tolerance))
        _check_tolerance(coding, evidence)
        reason = "one for each of mask_values" if asked > 2 else "mask_values tells two classes apart"
        return ChosenClasses(coding, asked, reason)
    reading = _by_class_file(asked, evidence, class_file)
    if reading is None and len(evidence.seen) >= 2:
        rules = RULES if class_file is None else RULES[:-1]  # colours that a file names otherwise are asked about
        reading = next((found for rule in rules if (found := rule(asked, evidence)) is not None), None)
    if reading is None:
        return None
    ignored = (*sorted(evidence.ignored), *reading.ignored)
    tolerance = reading.tolerance if config.mask_tolerance == "auto" else tolerance
    written = as_written(ignored) if ignored else None
    coding = given_coding(reading.values, written, ignores_unknown, tolerance, reading.reason)
    _check_tolerance(coding, evidence)
    reason = reading.num_classes_reason
    if config.class_names or isinstance(config.class_weights, tuple):
        reason = f"one for each of {'class_names' if config.class_names else 'class_weights'}"
    names = None if config.class_names else reading.names
    return ChosenClasses(coding, reading.num_classes, reason, names, reading.reason if names else "")


def other_way_round(coding: MaskCoding, evidence: MaskEvidence) -> dict[str, Any] | None:
    """Of foreground and background, the settings that exchange them; None for ids of objects, which have no other
    way."""
    ends, tolerance = (evidence.seen[-1], evidence.seen[0]), coding.tolerance
    if coding.values is not None:
        values = tuple(as_written(coding.values_of(class_id)) for class_id in (1, 0))
    elif coding.threshold:
        values, tolerance = ends, masks.largest_tolerance(ends)
    else:
        return None
    ignored = {"ignore_value": coding.written_ignore_value} if coding.ignored else {}
    return {"mask_values": values, **ignored, **({"mask_tolerance": tolerance} if tolerance else {})}


# Masks saved as JPEG


def _jpeg_tolerance(values: Sequence[int]) -> int:
    """Pixels between two classes may look like a third one; where there is none, each goes to the nearest."""
    return min(MAX_TOLERANCE if len(values) == 2 else EDGE_WIDTH, masks.largest_tolerance(values))


def _tolerance_reason(tolerance: int) -> str:
    return f"masks saved as JPEG: the nearest value, if it is within {tolerance}; pixels between two are ignored"


def _check_tolerance(coding: MaskCoding, evidence: MaskEvidence) -> None:
    """Refuses a tolerance with which a value would belong to two classes, or many pixels to none."""
    if not coding.tolerance or coding.values is None:
        return
    if coding.tolerance > (most := masks.largest_tolerance(coding.known_values)):
        need = f"need at most {most}: with more, a value is close to two classes"
        raise DataError(f"mask_tolerance: got {coding.tolerance}; {need}")
    ids = coding.encode(np.array(evidence.seen, np.int64)).tolist()
    far = {value for value, class_id in zip(evidence.seen, ids, strict=True) if class_id == IGNORED}
    far -= set(coding.ignored)
    if (share := evidence.share(*far)) > MAX_BLURRED:
        named = show_values([group.value for group in evidence.groups if group.value in far][:4])
        fix = f"{named}; add these to mask_values or ignore_value, or save the masks as PNG"
        near = f"within {coding.tolerance} (mask_tolerance) of no class"
        raise DataError(f"mask_values: {share:.1%} of the pixels are {near}, most of them near {fix}")


# The rules. `asked`: num_classes, None if it is open


def _by_class_file(asked: int | None, evidence: MaskEvidence, class_file: ClassFile | None) -> Reading | None:
    """The classes that a file names, if all values that occur are among them."""
    by_value = None if class_file is None else _values_of_file(class_file, evidence)
    if class_file is None or by_value is None:
        return None
    void = tuple(value for value, one in by_value.items() if one.is_void and value in evidence.counts)
    classes = {value: one for value, one in by_value.items() if not one.is_void}
    num_named, is_lossy = len(classes), evidence.is_lossy
    if class_file.has_colours and evidence.has_colours:  # a colour that no mask has would be learnt from nothing
        seen, limit = (
            [group.value for group in evidence.groups] if is_lossy else evidence.seen,
            MIN_TOLERANCE * is_lossy,
        )
        near = {value for value in classes if any(masks.distance(value, other) <= limit for other in seen)}
        classes = {value: one for value, one in classes.items() if value in near}
    num_classes = 1 if len(classes) == 2 and asked in (None, 1) else len(classes)
    if evidence.share(*void) > MAX_VOID or not 2 <= len(classes) <= MAX_CLASSES or asked not in (None, num_classes):
        return None
    order = list(classes)
    if num_classes == 1:
        order.sort(key=lambda value: (not is_background(classes[value].name), value != 0))
    beyond, tolerance = set(evidence.seen) - set(by_value), 0
    if beyond == {VOID} and not evidence.has_colours:
        void = (*void, VOID)
    elif beyond:
        tolerance = _jpeg_tolerance([*order, *void]) if is_lossy else 0
        if tolerance < MIN_TOLERANCE:
            return None
    name = class_file.path.name
    reason = f"by {name}" + (f"; {_tolerance_reason(tolerance)}" if tolerance else "")
    absent = f", {num_named - len(classes)} more occur in no mask" if num_named > len(classes) else ""
    names = tuple(classes[value].name for value in order[num_classes == 1 :])
    count = f"{len(classes)} classes in {name}{absent}"
    return _of_each(
        order, reason, num_classes, num_classes_reason=count, ignored=void, tolerance=tolerance, names=names
    )


def describe_misfit(class_file: ClassFile, evidence: MaskEvidence) -> str:
    """Why the classes of a file are not used, and what to do."""
    by_value = _values_of_file(class_file, evidence) or {}
    void = {value: one.name for value, one in by_value.items() if one.is_void and value in evidence.counts}
    if (share := evidence.share(*void)) > MAX_VOID:
        what = f"{' and '.join(void.values())} would be ignored, which is {share:.0%} of the pixels"
        return f"{what}; if it is the background, name it background there"
    what = f"it names {len(class_file.classes)} classes, and the masks hold {len(evidence.seen)} values"
    return f"{what} that do not fit them; correct it, or set class_names"


def _values_of_file(class_file: ClassFile, evidence: MaskEvidence) -> dict[int, NamedClass] | None:
    """The classes by the value that they have in the masks, in the order of the file."""
    classes, seen = class_file.classes, evidence.seen
    by_value = {one.value: one for one in classes if one.value is not None}
    if class_file.has_colours and evidence.shown:  # the masks hold indices, and their palette the colours
        in_palette = sorted(evidence.shown.items(), reverse=True)
        indices = {masks.as_number(masks.channels_of(COLOUR + colour)): index for index, colour in in_palette}
        by_index = {indices[value]: one for value, one in by_value.items() if value in indices}
        if set(seen) <= {*by_index, VOID}:
            return by_index
    if class_file.has_values and (evidence.has_colours or not class_file.has_colours or set(seen) <= set(by_value)):
        return by_value
    if evidence.has_colours:
        return None
    # Names alone, in the order of the ids: with the background first, some of the last may occur in no mask.
    ids, has_background = [value for value in seen if value != VOID], is_background(classes[0].name)
    if has_background and len(classes) == len(seen) == 2:
        return dict(zip(seen, classes, strict=True))
    if max(ids, default=0) != len(classes) - 1 and not (has_background and ids and ids[-1] < len(classes)):
        return None
    return {value: classes[value] for value in ids} if len(ids) == 2 else dict(enumerate(classes))


def _by_palette(asked: int | None, evidence: MaskEvidence) -> Reading | None:
    """Black and white, whatever their places; indices with gaps, as VOC's: whoever gave them colours meant classes."""
    by_shown = {evidence.shown.get(value): value for value in evidence.seen}
    if by_shown.keys() == {BLACK, WHITE} and by_shown[BLACK] != 0 and asked in (None, 1, 2):
        reason = f"{by_shown[BLACK]} is black and {by_shown[WHITE]} white in their palette"
        count = f"the masks hold two values; {reason}"
        return _of_each([by_shown[BLACK], by_shown[WHITE]], reason, asked, num_classes_reason=count)
    ids = [value for value in evidence.seen if value != VOID]
    has_void, has_gaps = len(ids) < len(evidence.seen), len(ids) > 2 and ids != list(range(len(ids)))
    if None in by_shown or not has_gaps or asked not in (None, len(ids)) or not _are_classes(evidence, ids):
        return None
    if has_void and not evidence.is_beside_classes(VOID):
        return None
    reason = "indices of a palette" + ("; 255 is taken as void" if has_void else "")
    count = f"the masks hold {len(ids)} indices of a palette" + ("; 255 beside them is taken as void" * has_void)
    return _of_each(ids, reason, asked, num_classes_reason=count, ignored=(VOID,) * has_void)


def _by_ids(asked: int | None, evidence: MaskEvidence) -> Reading | None:
    """Ids of classes from 0 (or 1) to n, with or without 255 as void; of more than 8 bits, those of objects."""
    seen, low, high = evidence.seen, evidence.seen[0], evidence.seen[-1]
    if asked in (None, 1) and low == 0 and 255 < high < COLOUR and (evidence.are_objects or len(seen) > MAX_LISTED):
        reason = "16-bit object ids: any value but 0 is foreground"
        return Reading("nonzero", 1, reason, f"the masks hold ids of objects, up to {high}")
    void = (VOID,) if high == VOID and not evidence.ignored else ()
    ids = seen[:-1] if void else seen
    num_ids = len(ids) if asked is None else max(2, asked)
    is_clear = asked is not None or len(ids) == 2 or _are_classes(evidence, ids)
    if len(ids) >= 2 and set(ids) <= set(range(num_ids)) and is_clear:
        if void and not evidence.is_beside_classes(VOID):
            return None
        why = "the masks hold " + ("two values" if num_ids == 2 else f"ids 0 to {num_ids - 1}")
        why += "; 255 beside them is taken as void" if void else ""
        reason = "class ids" + ("; 255 is taken as void" if void else "")
        return _of_each(range(num_ids), reason, asked, num_classes_reason=why, ignored=void)
    if asked is not None and asked > 1 and len(seen) == asked and high < COLOUR:
        return _of_each(seen, f"{asked} values, in their order", asked)
    is_from_1 = len(seen) > 2 and seen == list(range(1, len(seen) + 1))
    if asked is None and is_from_1 and _are_classes(evidence, seen):
        return _of_each(seen, f"ids 1 to {high}, in their order", num_classes_reason=f"the masks hold ids 1 to {high}")
    return None


def _are_classes(evidence: MaskEvidence, values: Sequence[int]) -> bool:
    """Whether values are those of classes, and the last one is a class too: none numbers objects or is void."""
    are_few = len(values) <= MAX_CLASSES and not evidence.are_objects and not evidence.occur_once
    has_void = bool(evidence.ignored) or evidence.seen[-1] != values[-1]
    return are_few and not evidence.is_lossy and evidence.has_regions and (has_void or not evidence.last_may_be_void)


def _by_two_values(asked: int | None, evidence: MaskEvidence) -> Reading | None:
    """0 and any other value or colour; or greys that soft edges or JPEG make of two values. Of two values without 0,
    either may be the background."""
    seen, low, high = evidence.seen, evidence.seen[0], evidence.seen[-1]
    if len(seen) == 2 and low == 0 and asked in (None, 1, 2):
        return _of_each(seen, "two values", asked, num_classes_reason="the masks hold two values")
    if asked not in (None, 1) or (threshold := evidence.edge_threshold()) is None:
        return None
    greys = f"greys around {low} and {high}"
    return Reading(f"above {threshold}", 1, f"{greys}, split at {threshold}", f"the masks hold {greys}")


def _by_colours(asked: int | None, evidence: MaskEvidence) -> Reading | None:
    """Few exact colours, a class for each: none is so close to another that it may be its soft edge."""
    seen = evidence.seen
    is_open = asked in (None, len(seen)) and evidence.has_colours and 2 < len(seen) <= MAX_LISTED
    if not is_open or evidence.noise or evidence.has_soft_edges or not _are_classes(evidence, seen):
        return None
    return _of_each(seen, f"{len(seen)} colours", num_classes_reason=f"the masks hold {len(seen)} colours")


RULES = (_by_palette, _by_ids, _by_two_values, _by_colours)


# The question


def ask_for_classes(config: Config, evidence: MaskEvidence, names: Sequence[str], hint: str = "") -> Question:
    """The question where choose_classes has no answer. `names` are what messages call the masks."""
    choices = list[Choice]()
    for reading in _possible_readings(evidence):
        choice = reading.choice(evidence.ignored)
        if all(choice.settings != other.settings for other in choices) and _trains(config, evidence, choice):
            choices.append(choice)
    text = "mask_values: auto cannot tell what the values in the masks mean"
    if (number := config.num_classes) != "auto":
        if not evidence.are_objects:
            choices.sort(key=lambda choice: choice.settings["num_classes"] != number)
        two = "{0, 1}, {0, 255} or 0 and any other value"
        text += (
            f"; num_classes: {number} accepts {two if number == 1 else f'the ids 0 to {number - 1} or {number} greys'}"
        )
    why = hint or next((text for holds, text in _hints(evidence) if holds), "")
    return Question(f"{text}\n  {why}" if why else text, *choices[:MAX_CHOICES], table=_table(evidence, names))


def _trains(config: Config, evidence: MaskEvidence, choice: Choice) -> bool:
    """Whether the config with this choice decides the masks: every value has a meaning, and two classes occur."""
    answered = replace(config, **choice.settings)
    remaining = MaskEvidence(evidence.masks, given_coding("nonzero", answered.ignore_value).ignored)
    try:
        chosen = None if any(class_contradictions(answered)) else choose_classes(answered, remaining)
    except DataError:
        return False
    present = {} if chosen is None else class_ids(remaining.counts, chosen.coding)
    return masks.UNKNOWN not in present and len(present.keys() - {IGNORED}) >= 2


def _hints(evidence: MaskEvidence) -> Iterator[tuple[bool, str]]:
    """What the values look like, and what to ask then: the first that holds."""
    pieces = "nearly each is one piece, and masks with more of them hold those of the others too"
    yield evidence.are_objects, f"They look like ids of objects: {pieces}"
    photo = "They look like those of photographs; is mask_dir the folder of the masks?"
    yield evidence.look_like_photographs, f"{photo} Of cut-outs, save the alpha channel as the mask"
    lossy = "They are saved as JPEG or lossy WebP, which changes values beside edges: export PNG if you can"
    yield evidence.is_lossy, lossy
    yield len(evidence.seen) == 2, "Which of the two is the background?"
    last = show_value(evidence.seen[-1])
    is_void = evidence.seen[-1] == VOID or evidence.last_may_be_void
    yield is_void, f"{last} may be void (pixels to ignore), or a class: which is it?"


def _table(evidence: MaskEvidence, names: Sequence[str]) -> list[str]:
    """The most frequent values, each with those close to it, and those that occur in one mask only; none of
    photographs."""
    if evidence.look_like_photographs:
        return []
    others = MaskEvidence(evidence.masks, evidence.ignored, evidence.noise)
    groups = [ValueGroup(value, 1, pixels) for value, pixels in others.counts.most_common(NUM_SHOWN)]
    if evidence.has_soft_edges:
        groups = next(iter(_frequent_groups(others)), [])[:NUM_SHOWN]
    rows = [("value", "share of pixels", "in masks")]
    for value, num_values, pixels in groups:
        shown = show_value(value) + (f" and {counted(num_values - 1, 'value')} close to it" if num_values > 1 else "")
        in_masks = f"{evidence.holders[value]} of {len(evidence.masks)}"
        rows.append((shown, f"{pixels / evidence.total:.2%}", in_masks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(str.rjust, row, widths)) for row in rows]
    if sum(group.num_values for group in groups) + len(evidence.noise) < len(evidence.seen):
        lines.append(f"… {len(evidence.seen)} values in all (check --json FILE lists them)")
    held = [(name, set(evidence.noise) & mask.counts.keys()) for name, mask in zip(names, evidence.masks, strict=True)]
    named = [f"{show_values(sorted(values)[:6])} in {name}" for name, values in held if values]
    return lines + ([f"In one mask only, perhaps noise: {first_few(named, 3)}"] if named else [])


def _possible_readings(evidence: MaskEvidence) -> Iterator[Reading]:
    """Every reading that a person may mean, the most likely first; none for photographs."""
    seen, high, noise = evidence.seen, evidence.seen[-1], evidence.noise
    if evidence.look_like_photographs:
        return
    if evidence.are_objects:
        yield Reading("nonzero", 1, "every object is foreground")
    others = MaskEvidence(evidence.masks, evidence.ignored, noise)
    if noise and 2 <= len(others.seen) <= MAX_LISTED:
        meaning = f"{counted(len(noise), 'value')} in one mask only {'is' if len(noise) == 1 else 'are'} ignored"
        clear = next((found for rule in RULES if (found := rule(None, others)) is not None), None)
        rest = clear or _of_each(others.seen, "")
        yield replace(rest, reason=meaning, ignores_others=True) if rest.values != "nonzero" else rest
    ids = [value for value in seen if value != VOID]
    is_dense, void = ids == list(range(len(ids))), (VOID,) if high == VOID else ()
    if void and 2 <= len(ids) <= MAX_LISTED and ids[-1] < VOID // 2 and evidence.is_beside_classes(VOID):
        yield _of_each(ids, "a class for each id; 255 is ignored", ignored=void)
    if len(seen) == 2:
        yield from _either_order(evidence, seen)
    elif len(seen) == 3:
        yield from _of_three(evidence)
    elif len(seen) <= MAX_CLASSES and evidence.last_may_be_void and not (is_dense and void):
        yield _of_each(seen[:-1], f"{show_value(high)} is ignored", ignored=(high,))
    if is_dense and len(ids) > 2:
        yield _of_each(ids, f"ids of {len(ids)} classes{'; 255 is ignored' if void else ''}", ignored=void)
    if evidence.has_soft_edges:
        for groups in _frequent_groups(evidence):
            yield from _of_frequent(evidence, [group.value for group in groups])
    if len(seen) <= MAX_LISTED and not is_dense:
        yield _of_each(seen, "a class for each, in an order that you may change")
    if 0 in evidence.counts and not evidence.is_lossy:  # JPEG makes values next to 0 of it
        yield Reading("nonzero", 1, "any value but 0 is foreground")


def _either_order(evidence: MaskEvidence, values: Sequence[int], *ignored: int) -> Iterator[Reading]:
    """Two values, the more frequent one as the background first."""
    beyond = f", {show_values(ignored)} is ignored" if ignored else ""
    for background, foreground in permutations(sorted(values, key=lambda value: -evidence.counts[value])):
        meaning = f"{show_value(background)} is background, {show_value(foreground)} is foreground{beyond}"
        yield _of_each([background, foreground], meaning, ignored=ignored)


def _of_three(evidence: MaskEvidence) -> Iterator[Reading]:
    """A trimap, or two codings of one foreground, or three classes."""
    low, middle, high = evidence.seen
    if low == 0 and high == VOID and not evidence.is_beside_classes(VOID):
        yield Reading((0, as_written([middle, high])), 1, f"{show_value(middle)} and {high} are both foreground")
    if low == 0 and (high == 2 or (high == VOID and middle < VOID // 2) or evidence.last_may_be_void):
        yield _of_each([low, middle], f"{show_value(high)} is ignored", ignored=(high,))
    if low != 0 and evidence.last_may_be_void:
        yield from _either_order(evidence, [low, middle], high)
    yield _of_each(evidence.seen, "three classes")
    if low == 0:
        for foreground, void in ((high, middle), (middle, high)):
            meaning = f"{show_value(foreground)} is foreground, {show_value(void)} is ignored"
            yield _of_each([low, foreground], meaning, ignored=(void,))


def _of_frequent(evidence: MaskEvidence, values: Sequence[int]) -> Iterator[Reading]:
    """A class for each of these values; the others are their soft edges."""
    if len(values) < 2:
        return
    values = sorted(values)
    is_pair = len(values) == 2
    meaning = (
        f"{show_value(values[1])} is foreground" if is_pair else "a class for each, in an order that you may change"
    )
    tolerance = 0 if evidence.is_lossy else _jpeg_tolerance(values)  # mask_tolerance: auto knows JPEG
    yield _of_each(values, f"{meaning}; values between them go to the nearest", tolerance=tolerance)


def _frequent_groups(evidence: MaskEvidence) -> list[list[ValueGroup]]:
    """The groups before the two largest drops in frequency: the others are the edges. All of them may be classes, if
    the last is more than edges are."""
    pixels = [*(group.pixels for group in evidence.groups[:MAX_LISTED]), max(1, evidence.total // EDGE_RARITY)]
    drops = [(pixels[number - 1] / pixels[number], number) for number in range(2, len(pixels))]
    return [evidence.groups[:number] for _, number in sorted(drops, reverse=True)[:2]]
