"""Decides what the values of the masks mean, and how many classes there are, where the config leaves it open.

evidence → a reading that is clear, with its reason (choose_classes); else a question with the readings that a person
may mean, the most likely first, as a few lines of YAML (ask_for_classes). Every choice that is offered was tried on the
values of the masks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import numpy as np

from unet_trainer.config.load import class_contradictions
from unet_trainer.config.parsers import MaskValues
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import Config, implied_num_classes, to_plain
from unet_trainer.datasets.mask_evidence import (
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
MANY_IDS = 40  # more values, some of them beyond 255, are ids of objects
MIN_TOLERANCE, MAX_TOLERANCE = 8, 127  # JPEG changes values by more than the first
MAX_VOID = 0.5  # share of pixels of a class named void; with more it may be the background
MAX_BLURRED = 0.05  # share of pixels between the colours of masks saved as JPEG
BLACK, WHITE = 0x000000, 0xFFFFFF  # in a palette
MAX_LISTED = 40  # values that are offered as classes
MAX_CHOICES = 5
EDGE_RARITY = 200  # one of so many pixels: the share of a colour that edges make
MANY_MIXED, MIN_MIXED = (
    4,
    0.9,
)  # colours of soft edges: so many for each class, and the share of their pixels that mix two classes
NUM_CUTS = 2  # between frequent colours and those of edges, in masks saved as JPEG
NUM_SHOWN = 12  # values in the table


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
    if config.mask_values != "auto":
        assert asked is not None
        reason = "one for each of mask_values" if asked > 2 else "mask_values tells two classes apart"
        return ChosenClasses(_given_coding(config, evidence, ignores_unknown), asked, reason)
    reading = _by_class_file(asked, evidence, class_file)
    if reading is None and len(evidence.seen) >= 2:
        reading = next(_clear_readings(asked, evidence), None)
    if reading is None:
        return None
    ignored = (*sorted(evidence.ignored), *reading.ignored)
    tolerance = reading.tolerance if config.mask_tolerance == "auto" else config.mask_tolerance
    coding = given_coding(
        reading.values, as_written(ignored) if ignored else None, ignores_unknown, tolerance, reading.reason
    )
    _check_tolerance(coding, evidence)
    reason = reading.num_classes_reason
    if config.class_names or isinstance(config.class_weights, tuple):
        reason = f"one for each of {'class_names' if config.class_names else 'class_weights'}"
    names = None if config.class_names else reading.names
    return ChosenClasses(coding, reading.num_classes, reason, names, reading.reason if names else "")


def other_way_round(coding: MaskCoding, evidence: MaskEvidence) -> dict[str, Any] | None:
    """Of foreground and background, the settings that exchange them; None for ids of objects, which have no other
    way."""
    if coding.values is not None:
        values, tolerance = tuple(as_written(coding.values_of(class_id)) for class_id in (1, 0)), coding.tolerance
    elif coding.threshold:
        values, tolerance = (
            (evidence.seen[-1], evidence.seen[0]),
            masks.largest_tolerance([evidence.seen[0], evidence.seen[-1]]),
        )
    else:
        return None
    ignored = {"ignore_value": coding.written_ignore_value} if coding.ignored else {}
    return {"mask_values": values, **ignored, **({"mask_tolerance": tolerance} if tolerance else {})}


# Masks saved as JPEG


def _given_coding(config: Config, evidence: MaskEvidence, ignores_unknown: bool) -> MaskCoding:
    """The coding that mask_values gives. For masks saved as JPEG it gets a tolerance."""
    tolerance = 0 if config.mask_tolerance == "auto" else config.mask_tolerance
    coding = given_coding(config.mask_values, config.ignore_value, ignores_unknown, tolerance)
    if config.mask_tolerance == "auto" and coding.values is not None and evidence.is_lossy:
        tolerance = _jpeg_tolerance(coding.known_values)
        if tolerance >= MIN_TOLERANCE and not set(evidence.seen) <= set(coding.known_values):
            coding = replace(coding, tolerance=tolerance, reason=_tolerance_reason(tolerance))
    _check_tolerance(coding, evidence)
    return coding


def _jpeg_tolerance(values: Sequence[int]) -> int:
    """Pixels between two classes may look like a third one; where there is none, each goes to the nearest."""
    return min(MAX_TOLERANCE if len(values) == 2 else EDGE_WIDTH, masks.largest_tolerance(values))


def _tolerance_reason(tolerance: int) -> str:
    return f"masks saved as JPEG: the nearest value, if it is within {tolerance}; pixels between two are ignored"


def _check_tolerance(coding: MaskCoding, evidence: MaskEvidence) -> None:
    """Refuses a tolerance with which a value would belong to two classes, or many pixels to none."""
    if not coding.tolerance or coding.values is None:
        return
    most = masks.largest_tolerance(coding.known_values)
    if coding.tolerance > most:
        raise DataError(
            f"mask_tolerance: got {coding.tolerance}; need at most {most}: with more, a value is close to two classes"
        )
    ids = coding.encode(np.array(evidence.seen, np.int64)).tolist()
    far = {value for value, class_id in zip(evidence.seen, ids, strict=True) if class_id == IGNORED} - set(
        coding.ignored
    )
    if evidence.share(*far) > MAX_BLURRED:
        named = [group.value for group in evidence.groups if group.value in far][:4]
        fix = f"{show_values(named)}; add these to mask_values or ignore_value, or save the masks as PNG"
        near = f"within {coding.tolerance} (mask_tolerance) of no class"
        raise DataError(f"mask_values: {evidence.share(*far):.1%} of the pixels are {near}, most of them near {fix}")


# What is clear: by a class file


def _by_class_file(asked: int | None, evidence: MaskEvidence, class_file: ClassFile | None) -> Reading | None:
    """The classes that a file names, if all values that occur are among them."""
    by_value = None if class_file is None else _values_of_file(class_file, evidence)
    if class_file is None or by_value is None:
        return None
    void = tuple(value for value, one in by_value.items() if one.is_void and value in evidence.counts)
    classes = {value: one for value, one in by_value.items() if not one.is_void}
    num_named = len(classes)
    if (
        class_file.has_colours and evidence.has_colours
    ):  # colours that no mask has would be classes that nothing is learnt of
        seen = [group.value for group in evidence.groups] if evidence.is_lossy else evidence.seen
        limit = MIN_TOLERANCE if evidence.is_lossy else 0
        classes = {
            value: one for value, one in classes.items() if any(masks.distance(value, other) <= limit for other in seen)
        }
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
        tolerance = _jpeg_tolerance([*order, *void]) if evidence.is_lossy else 0
        if tolerance < MIN_TOLERANCE:
            return None
    name = class_file.path.name
    reason = f"by {name}" + (f"; {_tolerance_reason(tolerance)}" if tolerance else "")
    absent = f", {num_named - len(classes)} more occur in no mask" if num_named > len(classes) else ""
    names = tuple(classes[value].name for value in (order[1:] if num_classes == 1 else order))
    count = f"{len(classes)} classes in {name}{absent}"
    return _of_each(
        order, reason, num_classes, num_classes_reason=count, ignored=void, tolerance=tolerance, names=names
    )


def describe_misfit(class_file: ClassFile, evidence: MaskEvidence) -> str:
    """Why the classes of a file are not taken, and what to do."""
    by_value = _values_of_file(class_file, evidence) or {}
    void = {value: one.name for value, one in by_value.items() if one.is_void and value in evidence.counts}
    if (share := evidence.share(*void)) > MAX_VOID:
        names = " and ".join(void.values())
        return (
            f"{names} would be ignored, which is {share:.0%} of the pixels; if it is the background, name it "
            "background there"
        )
    what = (
        f"it names {len(class_file.classes)} classes, and the masks hold {len(evidence.seen)} values that do "
        "not fit them"
    )
    return f"{what}; correct it, or set class_names"


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


# What is clear: by the values alone


def _clear_readings(asked: int | None, evidence: MaskEvidence) -> Iterator[Reading]:
    """The readings that the values leave no doubt about, of which the first is taken. `asked`: num_classes, None if it
    is open."""
    seen, low, high, may_be_one = evidence.seen, evidence.seen[0], evidence.seen[-1], asked in (None, 1)
    # 0 and any other value or colour; black and white of a palette. Of two others either may be the background.
    if len(seen) == 2 and asked in (None, 1, 2):
        why = "the masks hold two values"
        by_shown = {evidence.shown.get(value): value for value in seen}
        if by_shown.keys() == {BLACK, WHITE} and by_shown[BLACK] != 0:
            reason = f"{by_shown[BLACK]} is black and {by_shown[WHITE]} white in their palette"
            yield _of_each([by_shown[BLACK], by_shown[WHITE]], reason, asked, num_classes_reason=f"{why}; {reason}")
        elif low == 0:
            yield _of_each(seen, "two values", asked, num_classes_reason=why)
    # Ids of objects that go beyond 8 bits.
    if may_be_one and low == 0 and 255 < high < COLOUR and (evidence.are_objects or len(seen) > MANY_IDS):
        reason = "16-bit object ids: any value but 0 is foreground"
        yield Reading("nonzero", 1, reason, f"the masks hold ids of objects, up to {high}")
    # Greys that soft edges or JPEG make of two values.
    if may_be_one and (threshold := evidence.edge_threshold()) is not None:
        greys = f"greys around {low} and {high}"
        yield Reading(f"above {threshold}", 1, f"{greys}, split at {threshold}", f"the masks hold {greys}")
    # Ids from 0, with or without 255 as void.
    has_void = high == VOID and not evidence.ignored
    ids = seen[:-1] if has_void else seen
    num_ids = len(ids) if asked is None else max(2, asked)
    if len(ids) >= 2 and set(ids) <= set(range(num_ids)) and (asked is not None or _are_classes(evidence, ids)):
        why = "the masks hold " + ("two values" if num_ids == 2 else f"ids 0 to {num_ids - 1}")
        if not has_void:
            yield _of_each(range(num_ids), "class ids", asked, num_classes_reason=why)
        elif evidence.is_beside_classes(VOID):
            why += "; 255 beside them is taken as void"
            yield _of_each(
                range(num_ids), "class ids; 255 is taken as void", asked, num_classes_reason=why, ignored=(VOID,)
            )
    # As many greys as classes, in the order of their brightness; so are ids from 1.
    if asked is not None and asked > 1 and len(seen) == asked and high < COLOUR:
        yield _of_each(seen, f"{asked} values, in their order", asked)
    is_from_1 = len(seen) > 2 and seen == list(range(1, len(seen) + 1)) and not evidence.may_be_trimap
    if asked is None and is_from_1 and _are_classes(evidence, seen):
        yield _of_each(seen, f"ids 1 to {high}, in their order", num_classes_reason=f"the masks hold ids 1 to {high}")


def _are_classes(evidence: MaskEvidence, ids: list[int]) -> bool:
    """Whether dense ids are those of classes, and the last one is a class too."""
    if len(ids) == 2:
        return True
    if (
        len(ids) > MAX_CLASSES
        or evidence.are_objects
        or evidence.occur_once
        or evidence.is_lossy
        or not evidence.has_regions
    ):
        return False
    has_void = bool(evidence.ignored) or evidence.seen[-1] != ids[-1]
    return has_void or not evidence.last_may_be_void


# What has to be asked


def ask_for_classes(config: Config, evidence: MaskEvidence, names: Sequence[str], hint: str = "") -> Question:
    """The question where choose_classes has no answer. `names` are what messages call the masks."""
    choices: dict[str, Choice] = {}
    for reading in _proposals(evidence):
        choice = reading.choice(evidence.ignored)
        if _trains(config, evidence, choice):
            choices.setdefault(value_text(to_plain(dict(choice.settings))), choice)
    found, lines = list(choices.values()), ["mask_values: auto cannot tell what the values in the masks mean"]
    if (number := config.num_classes) != "auto":
        if not evidence.are_objects:
            found.sort(key=lambda choice: choice.settings["num_classes"] != number)
        accepted = (
            f"the ids 0 to {number - 1} or any {number} greys"
            if number > 1
            else "{0, 1}, {0, 255} or 0 and any other value"
        )
        lines[0] += f"; num_classes: {number} accepts {accepted}"
    lines += [hint] if hint else [text for holds, text in _hints(evidence) if holds][:1]
    return Question("\n  ".join(lines), *found[:MAX_CHOICES], table=_table(evidence, names))


def _trains(config: Config, evidence: MaskEvidence, choice: Choice) -> bool:
    """Whether the config with this choice decides the masks: every value has a meaning, and two classes occur."""
    answered = replace(config, **choice.settings)
    if any(class_contradictions(answered)):
        return False
    ignored = given_coding("nonzero", answered.ignore_value).ignored
    counted_values = evidence if evidence.ignored == set(ignored) else MaskEvidence(evidence.masks, ignored)
    try:
        chosen = choose_classes(answered, counted_values)
    except DataError:
        return False
    present = {} if chosen is None else class_ids(counted_values.counts, chosen.coding)
    return masks.UNKNOWN not in present and len(present.keys() - {IGNORED}) >= 2


def _hints(evidence: MaskEvidence) -> Iterator[tuple[bool, str]]:
    """What the values look like, and what to ask then: the first that holds."""
    seen, last = evidence.seen, show_value(evidence.seen[-1])
    looks_like_objects = "nearly each is one piece, and masks with more of them hold those of the others too"
    yield evidence.are_objects, f"They look like ids of objects: {looks_like_objects}"
    is_photo = (
        "They look like those of photographs; is mask_dir the folder of the masks? Of cut-outs, save the "
        "alpha channel as the mask"
    )
    yield evidence.look_like_photographs, is_photo
    yield (
        evidence.is_lossy,
        "They are saved as JPEG or lossy WebP, which changes values beside edges: export PNG if you can",
    )
    is_alone = seen[-1] == VOID and len(seen) > 2 and not evidence.is_beside_classes(VOID)
    yield is_alone, "255 occurs only in masks that hold no class but 0: is it void, or another mark of the foreground?"
    yield len(seen) == 2, "Which of the two is the background?"
    void = "is it void (pixels to ignore), or a class?"
    yield evidence.has_outlying_void, f"255 is far from the other values: {void}"
    yield seen[-1] < COLOUR and evidence.last_may_be_void, f"{last} is rare, thin and beside other values: {void}"


def _table(evidence: MaskEvidence, names: Sequence[str]) -> list[str]:
    """The most frequent values, those close to one of them with it, and those that occur in one mask only; none of
    photographs."""
    if evidence.look_like_photographs:
        return []
    noise = [] if evidence.are_objects else evidence.noise
    others = evidence.without(noise)
    if evidence.is_lossy:
        groups = next(iter(_frequent_groups(others)), [])
    elif evidence.has_colours and evidence.id_channel is None:
        groups = others.groups
    else:
        groups = [ValueGroup(value, 1, pixels) for value, pixels in others.counts.most_common(NUM_SHOWN)]
    groups, num_masks, lines = groups[:NUM_SHOWN], counted(len(evidence.masks), "mask"), []
    for group in sorted(groups, key=lambda group: group.value):
        near = f", with {counted(group.num_values - 1, 'value')} close to it" if group.num_values > 1 else ""
        share = f"{group.pixels / evidence.total:.2%} of pixels{near}"
        lines.append(f"{show_value(group.value)}: {share}, in {evidence.holders[group.value]} of {num_masks}")
    if sum(group.num_values for group in groups) + len(noise) < len(evidence.seen):
        lines.append(f"… {len(evidence.seen)} values in all (check --json FILE lists them)")
    held = [
        (name, [value for value in noise if value in mask.counts])
        for name, mask in zip(names, evidence.masks, strict=True)
    ]
    named = [f"{show_values(values[:6])} in {name}" for name, values in held if values]
    return lines + ([f"In one mask only, perhaps noise: {first_few(named, 3)}"] if named else [])


def _proposals(evidence: MaskEvidence) -> Iterator[Reading]:
    """Every reading that a person may mean, the most likely first; none for photographs."""
    if evidence.look_like_photographs:
        return
    seen, high = evidence.seen, evidence.seen[-1]
    last_is_void = (
        [_of_each(seen[:-1], f"{show_value(high)} is ignored", ignored=(high,))]
        if 3 <= len(seen) <= MAX_CLASSES
        else []
    )
    if evidence.are_objects:
        yield Reading("nonzero", 1, "every object is foreground")
    elif soft := _soft_colours(evidence):
        meaning = (
            "a class for each of the most frequent, in an order that you may change; the others are their soft edges"
        )
        yield _of_each(soft, meaning, tolerance=_jpeg_tolerance(soft))
    yield from _without_noise(evidence)
    if evidence.has_outlying_void and last_is_void:
        yield replace(last_is_void[0], reason="a class for each id; 255 is ignored")
    if len(seen) == 2:
        yield from _either_order(evidence, seen)
    elif len(seen) == 3:
        yield from _of_three(evidence, last_is_void)
    if high < COLOUR:
        ids = [value for value in seen if value != VOID]
        void, is_dense = (VOID,) if high == VOID else (), ids == list(range(len(ids)))
        if evidence.last_may_be_void and not (is_dense and void):
            yield from last_is_void
        if is_dense and len(ids) > 2:
            yield _of_each(ids, f"ids of {len(ids)} classes{'; 255 is ignored' if void else ''}", ignored=void)
    elif evidence.id_channel and len(seen) <= MAX_LISTED:
        yield _of_each(seen, f"the {evidence.id_channel} channel holds ids of {len(seen)} classes")
    if evidence.is_lossy:
        for groups in _frequent_groups(evidence):
            yield from _class_for_each(evidence, [group.value for group in groups])
    elif evidence.has_colours:
        yield from _class_for_each(
            evidence, [group.value for group in evidence.without(evidence.noise).groups[:MAX_LISTED]]
        )
    elif len(seen) <= MAX_LISTED and seen != list(range(len(seen))):  # dense ids are offered as such
        yield from _class_for_each(evidence, seen)
    if 0 in evidence.counts and not evidence.is_lossy:  # JPEG makes values next to 0 of it
        yield Reading("nonzero", 1, "any value but 0 is foreground")


def _either_order(evidence: MaskEvidence, values: Sequence[int], *ignored: int) -> Iterator[Reading]:
    """Two values, the more frequent one as the background first."""
    beyond = f", {show_values(ignored)} is ignored" if ignored else ""
    for background, foreground in permutations(sorted(values, key=lambda value: -evidence.counts[value])):
        meaning = f"{show_value(background)} is background, {show_value(foreground)} is foreground{beyond}"
        yield _of_each([background, foreground], meaning, ignored=ignored)


def _of_three(evidence: MaskEvidence, last_is_void: Sequence[Reading]) -> Iterator[Reading]:
    """A trimap, or two codings of one foreground, or three classes."""
    low, middle, high = evidence.seen
    three = _of_each(evidence.seen, "three classes")
    if low == 0 and high == VOID and not evidence.is_beside_classes(VOID):
        yield Reading((0, as_written([middle, high])), 1, f"{show_value(middle)} and {high} are both foreground")
        yield from last_is_void
        return
    if low != 0:
        if not evidence.may_be_trimap:
            yield three
        yield from _either_order(evidence, [low, middle], high)
    elif high < COLOUR and (high == 2 or evidence.last_may_be_void):
        yield from last_is_void
    yield three
    if low == 0 and high != 2:
        for foreground, void in ((high, middle), (middle, high)):
            meaning = f"{show_value(foreground)} is foreground, {show_value(void)} is ignored"
            yield _of_each([low, foreground], meaning, ignored=(void,))


def _class_for_each(evidence: MaskEvidence, main: Sequence[int]) -> Iterator[Reading]:
    """A class for each of these values, and what becomes of the others, if there are any."""
    values, num_others = sorted(main), len(evidence.seen) - len(main)
    if len(values) < 2:
        return
    meaning = (
        f"{show_value(values[1])} is foreground"
        if len(values) == 2
        else "a class for each, in an order that you may change"
    )
    if num_others and evidence.is_lossy:
        meaning += "; values between them go to the nearest"
    elif num_others:
        meaning += f"; {counted(num_others, 'other value')} {'is' if num_others == 1 else 'are'} ignored"
    yield _of_each(values, meaning, ignores_others=bool(num_others) and not evidence.is_lossy)


def _soft_colours(evidence: MaskEvidence) -> list[int]:
    """The colours before a large drop in frequency, if the others are many, and nearly all of their pixels mix two of
    these."""
    if evidence.is_lossy or not evidence.has_colours:
        return []
    for groups in _frequent_groups(evidence):
        values = sorted(group.value for group in groups)
        others = sorted(set(evidence.seen) - set(values))
        if len(others) < MANY_MIXED * len(values):
            continue
        colours, is_mixed = np.array([masks.channels_of(value) for value in others], float), np.zeros(len(others), bool)
        for one, other in combinations(np.array([masks.channels_of(value) for value in values], float), 2):
            line = other - one
            shares = ((colours - one) @ line / (line @ line)).clip(0, 1)
            is_mixed |= np.abs(one + shares[:, None] * line - colours).max(axis=1) <= EDGE_WIDTH / 2
        if evidence.share(*np.array(others)[is_mixed].tolist()) > MIN_MIXED * evidence.share(*others):
            return values
    return []


def _frequent_groups(evidence: MaskEvidence) -> list[list[Any]]:
    """The groups before the largest drops in frequency, the likely cut first: of masks saved as JPEG, the others are
    the edges."""
    pixels = [group.pixels for group in evidence.groups[:MAX_LISTED]]
    pixels.append(
        max(1, evidence.total // EDGE_RARITY)
    )  # all of them may be classes, if the last is more than edges are
    drops = [(pixels[number - 1] / pixels[number], number) for number in range(2, len(pixels))]
    return [evidence.groups[:number] for _, number in sorted(drops, reverse=True)[:NUM_CUTS]]


def _without_noise(evidence: MaskEvidence) -> Iterator[Reading]:
    """What the masks mean if values that occur in one of them only are ignored."""
    noise, others = evidence.noise, evidence.without(evidence.noise)
    if not noise or evidence.are_objects or not 2 <= len(others.seen) <= MAX_LISTED:
        return
    chosen = choose_classes(Config(), others)
    meaning = f"{counted(len(noise), 'value')} in one mask only {'is' if len(noise) == 1 else 'are'} ignored"
    if chosen is None or isinstance(chosen.coding.mask_values, str):
        yield _of_each(others.seen, f"{meaning}; the order of the classes is yours", ignores_others=True)
    else:
        ignored = tuple(value for value in chosen.coding.ignored if value not in noise)
        yield Reading(chosen.coding.mask_values, chosen.num_classes, meaning, ignored=ignored, ignores_others=True)
