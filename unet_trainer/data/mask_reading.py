"""Decides what the values of the masks mean, and how many classes there are, where the config does not: by a class
file, ids from 0 to n, two values or two clusters of greys, a palette, few exact colours, in this order. Everything else
is the question of mask_question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unet_trainer.config.schema import Config, implied_num_classes
from unet_trainer.data.class_files import is_background, is_void
from unet_trainer.data.mask_evidence import MAX_LISTED, VOID, MaskEvidence
from unet_trainer.images import mask_decoding as masks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding, given_coding
from unet_trainer.images.mask_shapes import EDGE_WIDTH

MAX_CLASSES = 254  # ids 254 and 255 have a meaning of their own
MIN_TOLERANCE, MAX_TOLERANCE = 8, 127  # JPEG changes values by more than the first
MAX_NAMED_VOID = 0.5  # share of pixels of a class named void; with more it may be the background
BLACK, WHITE = 0x000000, 0xFFFFFF  # in a palette
AND_VOID = "; 255 beside them is taken as void"


@dataclass(frozen=True)
class ChosenClasses:
    """The classes of a dataset, and why."""

    coding: MaskCoding
    num_classes: int
    num_classes_reason: str = ""
    class_names: tuple[str, ...] | None = None  # from a class file, or what the masks were made from


def choose_classes(config: Config, evidence: MaskEvidence) -> ChosenClasses | None:
    """The classes, if there is only one way to read the masks, else None. Raises DataError for wrong settings."""
    number = implied_num_classes(config) if config.num_classes == "auto" else config.num_classes
    keys = [key for key in ("class_names", "class_weights") if isinstance(getattr(config, key), tuple)]
    reason = f"by {[*keys, 'mask_values'][0]}" if number is not None else ""
    if config.mask_values != "auto":
        assert number is not None
        coding = given_coding(config.mask_values, config.ignore_value)
        is_open = config.mask_tolerance == "auto"
        chosen = ChosenClasses(_with_jpeg_tolerance(coding, evidence) if is_open else coding, number, reason)
    else:
        readings = (rule(number, evidence) for rule in RULES if len(evidence.seen) >= 2)
        reading = next((each for each in readings if each is not None), None)
        if reading is None:
            return None
        names = None if config.class_names else reading.class_names
        chosen = replace(reading, num_classes_reason=reason or reading.num_classes_reason, class_names=names)
    coding = replace(chosen.coding, ignores_unknown=config.unknown_values == "ignore")
    if config.mask_tolerance != "auto":
        coding = replace(coding, tolerance=config.mask_tolerance)
    if coding.values is not None and coding.tolerance > (most := masks.largest_tolerance(coding.known_values)):
        need = f"need at most {most}: with more, a value is close to two classes"
        raise DataError(f"mask_tolerance: got {coding.tolerance}; {need}")
    return replace(chosen, coding=coding)


def of_each(
    evidence: MaskEvidence, values: Sequence[int] | None, reason: str, number: int | None = None, **others: Any
) -> ChosenClasses:
    """A class for each value, in this order; two are background and foreground. `others`: of the coding, with `void`
    for what is ignored besides ignore_value."""
    ignored = (*sorted(evidence.ignored), *others.pop("void", ()))
    coding = MaskCoding(
        None if values is None else tuple(values),
        ignore_value=ignored[0] if len(ignored) == 1 else ignored or None,
        reason=reason,
        **others,
    )
    number = number or (1 if coding.num_ids == 2 else coding.num_ids)
    return ChosenClasses(coding, number, f"the masks hold {reason}")


def jpeg_tolerance(values: Sequence[int]) -> int:
    """Pixels between two classes may look like a third one; where there is none, each goes to the nearest."""
    return min(MAX_TOLERANCE if len(values) == 2 else EDGE_WIDTH, masks.largest_tolerance(values))


def _with_jpeg_tolerance(coding: MaskCoding, evidence: MaskEvidence) -> MaskCoding:
    """With a tolerance if the masks need one and the values are far enough from each other for it."""
    if coding.values is None or not evidence.is_lossy or set(evidence.seen) <= set(coding.known_values):
        return coding
    tolerance = jpeg_tolerance(coding.known_values)
    how = f"masks saved as JPEG: the nearest value, if it is within {tolerance}; pixels between two are ignored"
    reason = how if coding.reason == "mask_values" else f"{coding.reason}; {how}"
    return replace(coding, tolerance=tolerance, reason=reason) if tolerance >= MIN_TOLERANCE else coding


# The rules. `asked`: num_classes, None if it is open


def _by_class_file(asked: int | None, evidence: MaskEvidence) -> ChosenClasses | None:
    """The classes that a file names, if all values that occur are among them."""
    file, named = evidence.class_file, names_by_value(evidence)
    void = [value for value, name in named.items() if is_void(name) and value in evidence.counts]
    classes = {value: name for value, name in named.items() if not is_void(name)}
    num_named = len(classes)
    if file is not None and file.has_colours and evidence.has_colours:  # what no mask has would be learnt from nothing
        near = MIN_TOLERANCE if evidence.is_lossy else 0
        seen = {value for value in classes if any(masks.distance(value, each) <= near for each in evidence.seen)}
        classes = {value: name for value, name in classes.items() if value in seen}
    number = 1 if len(classes) == 2 and asked in (None, 1) else len(classes)
    if file is None or evidence.share(*void) > MAX_NAMED_VOID or len(classes) < 2 or asked not in (None, number):
        return None
    beyond = set(evidence.seen) - set(named)
    void += [VOID] if beyond == {VOID} and not evidence.has_colours else []
    order = list(classes)
    if number == 1:
        order.sort(key=lambda value: (not is_background(classes[value]), value != 0))
    coding = of_each(evidence, order, f"by {file.path.name}", number, void=void).coding
    coding = _with_jpeg_tolerance(coding, evidence)
    if beyond - set(void) and not coding.tolerance:
        return None
    absent = f", {num_named - len(classes)} more occur in no mask" if num_named > len(classes) else ""
    names = tuple(classes[value] for value in order[number == 1 :])
    return ChosenClasses(coding, number, f"{len(classes)} classes in {file.path.name}{absent}", names)


def names_by_value(evidence: MaskEvidence) -> dict[int, str]:
    """The names of the class file by the value that they have in the masks, in its order; empty if it does not fit."""
    if (file := evidence.class_file) is None:
        return {}
    names, seen, by_value = file.names, evidence.seen, dict(zip(file.values, file.names, strict=False))
    if file.has_colours and evidence.shown:  # the masks hold indices, and their palette the colours
        in_palette = sorted(evidence.shown.items(), reverse=True)
        indices = {masks.as_number(masks.channels_of(COLOUR + colour)): index for index, colour in in_palette}
        by_index = {indices[value]: name for value, name in by_value.items() if value in indices}
        if set(seen) <= {*by_index, VOID}:
            return by_index
    if by_value and (evidence.has_colours or not file.has_colours or set(seen) <= set(by_value)):
        return by_value
    # Names alone, in the order of the ids: with the background first, some of the last may occur in no mask.
    ids, has_background = [value for value in seen if value != VOID], is_background(names[0])
    if has_background and len(names) == len(seen) == 2:
        return dict(zip(seen, names, strict=True))
    is_whole = bool(ids) and ids[-1] == len(names) - 1
    if evidence.has_colours or not (is_whole or (has_background and ids and ids[-1] < len(names))):
        return {}
    return {value: names[value] for value in ids} if len(ids) == 2 else dict(enumerate(names))


def _by_ids(asked: int | None, evidence: MaskEvidence) -> ChosenClasses | None:
    """Ids of classes from 0 (or 1) to n, with or without 255 as void; ids beyond 255 are those of objects."""
    seen, high = evidence.seen, evidence.seen[-1]
    are_objects = evidence.are_objects or len(seen) > MAX_LISTED
    if asked in (None, 1) and seen[0] == 0 and 255 < high < COLOUR and are_objects:
        return of_each(evidence, None, f"object ids up to {high}: any value but 0 is foreground")
    ids, void = _without_void(evidence)
    first = min(1, ids[0]) if asked is None and len(ids) > 2 else 0
    all_ids = range(first, first + (len(ids) if asked is None else max(2, asked)))
    is_clear = asked is not None or (len(ids) == 2 and void) or _are_classes(evidence, ids)
    has_two_values = len(seen) == len(all_ids) == 2
    if len(ids) < 2 or has_two_values or not set(ids) <= set(all_ids) or not is_clear:
        return None
    return of_each(evidence, all_ids, f"ids {first} to {all_ids[-1]}{AND_VOID if void else ''}", asked, void=void)


def _without_void(evidence: MaskEvidence) -> tuple[list[int], tuple[int, ...]]:
    """The values, and 255 as void if it is in masks of others and nothing is ignored yet."""
    has_void = evidence.seen[-1] == VOID and not evidence.ignored and evidence.is_beside_classes(VOID)
    return (evidence.seen[:-1], (VOID,)) if has_void else (evidence.seen, ())


def _are_classes(evidence: MaskEvidence, values: Sequence[int]) -> bool:
    """Whether values are those of classes, and the last one is a class too: none numbers objects or is void."""
    are_objects = evidence.are_objects or 2 * len(evidence.in_one_mask) >= len(values) - (0 in values)
    is_void_known = evidence.ignored or evidence.seen[-1] != values[-1]
    if are_objects or evidence.is_lossy or not evidence.has_regions or len(values) > MAX_CLASSES:
        return False
    return bool(is_void_known) or not evidence.last_may_be_void


def _by_two_values(asked: int | None, evidence: MaskEvidence) -> ChosenClasses | None:
    """0 and any other value or colour, or black and white in a palette; or greys that soft edges or JPEG make of two
    values. Of two others, either may be the background."""
    seen, low, high = evidence.seen, evidence.seen[0], evidence.seen[-1]
    if len(seen) == 2 and asked in (None, 1, 2):
        shown = {evidence.shown.get(value): value for value in seen}
        if shown.keys() == {BLACK, WHITE} and shown[BLACK] == high:
            return of_each(evidence, [high, low], f"two values, of which {high} is black", asked)
        is_clear = low == 0 or shown.keys() == {BLACK, WHITE}
        return of_each(evidence, seen, "two values", asked) if is_clear else None
    if asked not in (None, 1) or not evidence.has_two_clusters():
        return None
    return of_each(evidence, None, f"greys around {low} and {high}", threshold=(low + high) // 2)


def _by_palette(asked: int | None, evidence: MaskEvidence) -> ChosenClasses | None:
    """Indices with gaps, as VOC's: whoever gave them colours meant classes."""
    ids, void = _without_void(evidence)
    have_colours = len(ids) > 2 and evidence.shown.keys() >= set(evidence.seen)
    if not have_colours or asked not in (None, len(ids)) or not _are_classes(evidence, ids):
        return None
    return of_each(evidence, ids, f"{len(ids)} indices of a palette{AND_VOID if void else ''}", asked, void=void)


def _by_colours(asked: int | None, evidence: MaskEvidence) -> ChosenClasses | None:
    """Few exact colours, a class for each: all fill areas, in several masks, and none is close to another. Greys, if
    there are as many as num_classes. Colours that a class file names otherwise are asked about."""
    seen = evidence.seen
    if asked is not None and asked > 1 and len(seen) == asked and seen[-1] < COLOUR:
        return of_each(evidence, seen, f"{asked} values, in their order", asked)
    if evidence.class_file is not None or asked not in (None, len(seen)) or not 2 < len(seen) <= MAX_LISTED:
        return None
    are_exact = not evidence.only_in_edges and not evidence.in_one_mask and len(evidence.groups) == len(seen)
    are_colours = evidence.has_colours and are_exact and _are_classes(evidence, seen)
    return of_each(evidence, seen, f"{len(seen)} colours") if are_colours else None


RULES = (_by_class_file, _by_ids, _by_two_values, _by_palette, _by_colours)
