"""Decides what the values of the masks mean, and how many classes there are, where the config leaves it open.

What is clear is taken, with its reason. Where two readings are possible the user is asked; coding_question writes the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unet_trainer.config.mask_classes import MaskValues, implied_num_classes
from unet_trainer.config.schema import Config
from unet_trainer.datasets.class_files import ClassFile, NamedClass
from unet_trainer.datasets.mask_evidence import MaskEvidence
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import COLOUR
from unet_trainer.images.mask_coding import (
    IGNORED,
    MaskCoding,
    as_written,
    channels_of,
    distance,
    given_coding,
    largest_tolerance,
    show_value,
    show_values,
)
from unet_trainer.images.mask_structure import EDGE_WIDTH

VOID = 255  # beside dense ids
MAX_CLASSES = 254  # ids 254 and 255 have a meaning of their own
MANY_IDS = 40  # more values, some of them beyond 255, are ids of objects
MIN_TOLERANCE, MAX_TOLERANCE = 8, 127  # JPEG changes values by more than the first
MAX_VOID = 0.5  # share of pixels of a class named void; with more it may be the background
MAX_BLURRED = 0.05  # share of pixels between the colours of masks saved as JPEG
LESS_FREQUENT = 5  # the first group of colours that is no class has fewer pixels than the last class by this factor
NEARLY_BLACK = 16


@dataclass(frozen=True)
class ChosenClasses:
    """The classes of a dataset, and why."""

    coding: MaskCoding
    num_classes: int
    num_classes_reason: str = ""
    class_names: tuple[str, ...] | None = None  # from a class file
    class_names_reason: str = ""


@dataclass(frozen=True)
class _Reading:
    """What the values of the masks mean: mask_values as the config writes them, and what is ignored besides."""

    values: MaskValues
    num_classes: int
    reason: str  # of the values
    num_classes_reason: str
    ignored: tuple[int, ...] = ()
    tolerance: int = 0
    names: tuple[str, ...] | None = None


def choose_classes(config: Config, evidence: MaskEvidence, class_file: ClassFile | None = None) -> ChosenClasses | None:
    """The classes, if there is only one way to read the masks; None where the user must be asked. `evidence` is without the values
    of ignore_value. Raises DataError for settings that the masks contradict."""
    implied = implied_num_classes(config.class_names, config.class_weights, config.mask_values)
    asked = implied if config.num_classes == "auto" else config.num_classes
    if config.mask_values != "auto":
        assert asked is not None
        reason = "one for each of mask_values" if asked > 2 else "mask_values tells two classes apart"
        return ChosenClasses(_given_coding(config, evidence), asked, reason)
    reading = _read_class_file(asked, evidence, class_file) or _decide(asked, evidence)
    if reading is None:
        return None
    ignored = (*sorted(evidence.ignored), *reading.ignored)
    tolerance = reading.tolerance if config.mask_tolerance == "auto" else config.mask_tolerance
    ignores_unknown = config.unknown_values == "ignore"
    coding = given_coding(reading.values, as_written(ignored) if ignored else None, ignores_unknown, tolerance, reading.reason)
    _check_tolerance(coding, evidence)
    reason = reading.num_classes_reason
    if config.class_names or isinstance(config.class_weights, tuple):
        reason = f"one for each of {'class_names' if config.class_names else 'class_weights'}"
    names = None if config.class_names else reading.names
    return ChosenClasses(coding, reading.num_classes, reason, names, reading.reason if names else "")


def present_classes(coding: MaskCoding, evidence: MaskEvidence) -> set[int]:
    """Ids of the classes that occur; IGNORED and UNKNOWN among them."""
    return set(coding.encode(np.array(evidence.seen, np.int64)).tolist()) if evidence.seen else set()


# Masks saved as JPEG


def _given_coding(config: Config, evidence: MaskEvidence) -> MaskCoding:
    """The coding that mask_values gives. For masks saved as JPEG it gets a tolerance."""
    ignores_unknown = config.unknown_values == "ignore"
    tolerance = 0 if config.mask_tolerance == "auto" else config.mask_tolerance
    coding = given_coding(config.mask_values, config.ignore_value, ignores_unknown, tolerance)
    if config.mask_tolerance == "auto" and coding.values is not None and evidence.is_lossy:
        known = _known_values(coding)
        wanted = _jpeg_tolerance(known)
        if wanted >= MIN_TOLERANCE and not set(evidence.seen) <= set(known):
            reason = _tolerance_reason(wanted)
            coding = given_coding(config.mask_values, config.ignore_value, ignores_unknown, wanted, reason)
    _check_tolerance(coding, evidence)
    return coding


def _jpeg_tolerance(values: Sequence[int]) -> int:
    """Pixels between two classes may look like a third one; where there is none, each goes to the nearest."""
    most = largest_tolerance(values)
    return min(MAX_TOLERANCE, most) if len(values) == 2 else min(EDGE_WIDTH, most)


def _tolerance_reason(tolerance: int) -> str:
    return f"masks saved as JPEG: the nearest value, if it is within {tolerance}; pixels between two count nowhere"


def _known_values(coding: MaskCoding) -> list[int]:
    assert coding.values is not None
    return [value for class_id in range(len(coding.values)) for value in coding.values_of(class_id)] + list(coding.ignored)


def _check_tolerance(coding: MaskCoding, evidence: MaskEvidence) -> None:
    """Refuses a tolerance with which a value would belong to two classes, or many pixels to none."""
    if not coding.tolerance or coding.values is None:
        return
    values = _known_values(coding)
    most = largest_tolerance(values)
    if coding.tolerance > most:
        pairs = [(other, one) for index, one in enumerate(values) for other in values[:index]]
        one, other = min(pairs, key=lambda pair: distance(*pair))
        raise DataError(
            f"mask_tolerance: got {coding.tolerance}; need at most {most}: {show_value(one)} and {show_value(other)} differ by "
            f"{distance(one, other)} only"
        )
    blurred = _far_share(coding, evidence)
    if blurred > MAX_BLURRED:
        far = [group.value for group in evidence.groups if min(distance(group.value, value) for value in values) > coding.tolerance]
        raise DataError(
            f"mask_values: {blurred:.1%} of the pixels are within {coding.tolerance} (mask_tolerance) of no class, most of them "
            f"near {show_values(far[:4])}; add these to mask_values or ignore_value, or save the masks as PNG"
        )


def _far_share(coding: MaskCoding, evidence: MaskEvidence) -> float:
    """Share of pixels farther than the tolerance from every value."""
    ids = coding.encode(np.array(evidence.seen, np.int64))
    far = [value for value, class_id in zip(evidence.seen, ids.tolist(), strict=True) if class_id == IGNORED]
    return evidence.share(*(value for value in far if value not in coding.ignored))


def _decide_by_groups(asked: int | None, evidence: MaskEvidence) -> _Reading | None:
    """Of masks saved as JPEG, the most frequent colours, if others are far less frequent and the order of the classes is clear."""
    num_ids = max(2, asked or 1)
    groups = evidence.groups
    if len(groups) < num_ids or (len(groups) > num_ids and LESS_FREQUENT * groups[num_ids].pixels > groups[num_ids - 1].pixels):
        return None
    values = sorted(group.value for group in groups[:num_ids])
    is_on_black = num_ids == 2 and max(channels_of(values[0])) <= NEARLY_BLACK
    if not is_on_black and (values[-1] >= COLOUR or asked is None or num_ids == 2):
        return None
    tolerance = _jpeg_tolerance(values)
    written = tuple(as_written([value]) for value in values)
    if tolerance < MIN_TOLERANCE or _far_share(given_coding(written, tolerance=tolerance), evidence) > MAX_BLURRED:
        return None
    return _Reading(written, asked or 1, _tolerance_reason(tolerance), f"the masks hold {show_values(values)}", tolerance=tolerance)


# Class files


def _read_class_file(asked: int | None, evidence: MaskEvidence, class_file: ClassFile | None) -> _Reading | None:
    """The classes that a file names, if all values that occur are among them."""
    if class_file is None:
        return None
    by_value = _values_of_file(class_file, evidence)
    if by_value is None:
        return None
    void = tuple(value for value, one in by_value.items() if one.is_void and value in evidence.counts)
    if evidence.share(*void) > MAX_VOID:
        return None
    classes = {value: one for value, one in by_value.items() if not one.is_void}
    num_named = len(classes)
    if class_file.has_colours and evidence.has_colours:  # colours that no mask has would be classes that nothing is learnt of
        classes = {value: one for value, one in classes.items() if _occurs(value, evidence)}
    beyond = set(evidence.seen) - set(by_value)
    if beyond == {VOID} and not evidence.has_colours:
        void = (*void, VOID)
    elif beyond and not evidence.is_lossy:
        return None
    if len(classes) == 2 and asked in (None, 1):
        order = sorted(classes, key=lambda value: (not classes[value].is_background, value != 0))
        num_classes, named = 1, order[1:]
    else:
        order, num_classes, named = list(classes), len(classes), list(classes)
    if not 2 <= len(classes) <= MAX_CLASSES or asked not in (None, num_classes):
        return None
    tolerance = 0
    if beyond - {VOID}:
        tolerance = _jpeg_tolerance([*order, *void])
        if tolerance < MIN_TOLERANCE:
            return None
    reason = f"by {class_file.path.name}" + (f"; {_tolerance_reason(tolerance)}" if tolerance else "")
    absent = f", {num_named - len(classes)} more occur in no mask" if num_named > len(classes) else ""
    written = tuple(as_written([value]) for value in order)
    count = f"{len(classes)} classes in {class_file.path.name}{absent}"
    return _Reading(written, num_classes, reason, count, void, tolerance, tuple(classes[value].name for value in named))


def _occurs(value: int, evidence: MaskEvidence) -> bool:
    if not evidence.is_lossy:
        return value in evidence.counts
    return any(distance(value, group.value) <= MIN_TOLERANCE for group in evidence.groups)


def _values_of_file(class_file: ClassFile, evidence: MaskEvidence) -> dict[int, NamedClass] | None:
    """The classes by the value that they have in the masks, in the order of the file."""
    classes, seen = class_file.classes, evidence.seen
    palette = {value: colour for mask in evidence.masks for value, colour in (mask.palette or {}).items()}
    if class_file.has_colours and palette:  # the masks hold indices, and their palette the colours
        indices = {as_colour_number(colour): value for value, colour in sorted(palette.items(), reverse=True)}
        by_index = {indices[one.value]: one for one in classes if one.value in indices}
        if set(seen) <= {*by_index, VOID}:
            return by_index
    if class_file.has_values and (evidence.has_colours or not class_file.has_colours or set(seen) <= _colours(class_file)):
        return {one.value: one for one in classes if one.value is not None}
    if not evidence.has_colours and max(set(seen) - {VOID}, default=0) == len(classes) - 1:  # ids in the order of the file
        return dict(enumerate(classes))
    return None


def _colours(class_file: ClassFile) -> set[int]:
    return {one.value for one in class_file.classes if one.value is not None}


def as_colour_number(colour: int) -> int:
    """0xRRGGBB → the number of the colour in a mask."""
    red, green, blue = channels_of(COLOUR + colour)
    return red if red == green == blue else COLOUR + colour


# Values alone


def _decide(asked: int | None, evidence: MaskEvidence) -> _Reading | None:
    """The reading if the values that occur allow only one. `asked` is num_classes, or None if it is open."""
    if len(evidence.seen) < 2:
        return None
    return (
        _decide_two_values(asked, evidence)
        or (_decide_foreground(evidence) if asked in (None, 1) else None)
        or _decide_ids(asked, evidence)
        or _decide_in_order(asked, evidence)
        or (_decide_by_groups(asked, evidence) if evidence.is_lossy else None)
    )


def _decide_ids(asked: int | None, evidence: MaskEvidence) -> _Reading | None:
    """Ids from 0, with or without 255 as void."""
    seen = evidence.seen
    has_void = seen[-1:] == [VOID] and not evidence.ignored
    ids = seen[:-1] if has_void else seen
    if len(ids) < 2 or (has_void and not evidence.is_beside_classes(VOID)):
        return None
    if asked is not None:
        num_ids, is_clear = max(2, asked), set(ids) <= set(range(max(2, asked)))
    else:
        num_ids, is_clear = len(ids), ids == list(range(len(ids))) and len(ids) <= MAX_CLASSES and _are_classes(evidence, ids)
    if not is_clear:
        return None
    num_classes = asked or (1 if num_ids == 2 else num_ids)
    what = "two values, 0 and 1" if num_ids == 2 else f"ids 0 to {num_ids - 1}"
    if has_void:
        return _Reading(
            tuple(range(num_ids)),
            num_classes,
            "class ids; 255 is taken as void",
            f"the masks hold {what}; 255 beside them is taken as void",
            (VOID,),
        )
    return _Reading(tuple(range(num_ids)), num_classes, "class ids", f"the masks hold {what}")


def _are_classes(evidence: MaskEvidence, ids: list[int]) -> bool:
    """Whether dense ids are those of classes, and the last one is a class too."""
    if len(ids) == 2:
        return True
    if evidence.are_objects or evidence.occur_once or evidence.is_lossy or not evidence.has_regions:
        return False
    has_void = bool(evidence.ignored) or evidence.seen[-1] != ids[-1]
    return has_void or not evidence.last_may_be_void


def _decide_two_values(asked: int | None, evidence: MaskEvidence) -> _Reading | None:
    """0 and any other value or colour. Of two others either may be the background."""
    seen = evidence.seen
    if len(seen) != 2 or seen[0] != 0 or asked not in (None, 1, 2):
        return None
    reason = f"0 and {show_value(seen[1])}"
    return _Reading((0, as_written([seen[1]])), asked or 1, reason, f"the masks hold two values, {reason}")


def _decide_in_order(asked: int | None, evidence: MaskEvidence) -> _Reading | None:
    """As many greys as classes are in the order of their brightness; so are ids from 1."""
    seen = evidence.seen
    if seen[-1] >= COLOUR:
        return None
    if asked is not None and asked > 1 and len(seen) == asked:
        return _Reading(tuple(seen), asked, f"{asked} values, in their order", "")
    is_from_1 = len(seen) > 3 and seen == list(range(1, len(seen) + 1))  # 1, 2, 3 may be a trimap
    if asked is None and is_from_1 and len(seen) <= MAX_CLASSES and _are_classes(evidence, seen):
        return _Reading(tuple(seen), len(seen), f"ids 1 to {len(seen)}, in their order", f"the masks hold ids 1 to {len(seen)}")
    return None


def _decide_foreground(evidence: MaskEvidence) -> _Reading | None:
    """Ids of objects beyond 255, and greys that soft edges or JPEG make of two values."""
    seen = evidence.seen
    if seen[0] == 0 and 255 < seen[-1] < COLOUR and (evidence.are_objects or len(seen) > MANY_IDS):
        reason = "16-bit object ids: any value but 0 is foreground"
        return _Reading("nonzero", 1, reason, f"the masks hold ids of objects, up to {seen[-1]}")
    threshold = evidence.edge_threshold()
    if threshold is None:
        return None
    reason = f"greys around {seen[0]} and {seen[-1]}, split at {threshold}"
    return _Reading(f"above {threshold}", 1, reason, f"the masks hold greys around {seen[0]} and {seen[-1]}")
