"""What the values of the masks mean where mask_values is open: five rules are asked in order, and the first answer is
taken. A class file names the values. Ids run from 0 or 1 to n, unless they look like those of objects, or the last one
like void. Two values, or greys around two, are background and foreground. Indices of a palette are classes, whatever
their numbers. So are a few exact colours. Where no rule answers, the user is asked which reading it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unet_trainer.config.load import class_contradictions
from unet_trainer.config.schema import Config, implied_num_classes
from unet_trainer.data.class_files import is_background, is_void
from unet_trainer.data.mask_evidence import EDGE_WIDTH, MAX_LISTED, VOID, MaskEvidence
from unet_trainer.data.pairs import Choice
from unet_trainer.images import mask_decoding as masks
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding, show_value

MAX_CLASSES, MAX_CHOICES = 254, 3  # ids 254 and 255 have a meaning of their own; readings that are offered
MIN_TOLERANCE = 8  # JPEG changes values by more
BLACK, WHITE = 0, 255  # in a palette


@dataclass(frozen=True)
class ChosenClasses:
    """The classes of a dataset, and why."""

    coding: MaskCoding
    num_classes: int
    num_classes_reason: str = ""
    class_names: tuple[str, ...] | None = None  # from a class file, or what the masks were made from


def choose_classes(config: Config, evidence: MaskEvidence) -> ChosenClasses | None:
    """The classes, if there is only one way to read the masks, else None. Raises DataError for wrong settings."""
    asked = implied_num_classes(config) if config.num_classes == "auto" else config.num_classes
    if config.mask_values == "auto":
        num_ids = None if asked is None else max(2, asked)
        codings = (rule(asked, evidence) for rule in RULES if len(evidence.seen) >= 2)
        coding = next((each for each in codings if each is not None and num_ids in (None, each.num_ids)), None)
    else:
        coding = masks.given_coding(config.mask_values)
    if coding is None:
        return None
    reason = coding.reason + ("; 255 beside them is taken as void" if coding.ignored == evidence.void != () else "")
    ignored = (*sorted(evidence.ignored), *coding.ignored)
    coding = replace(coding, ignore_value=ignored[0] if len(ignored) == 1 else ignored or None)
    tolerance = _jpeg_tolerance(coding, evidence) if config.mask_tolerance == "auto" else config.mask_tolerance
    if tolerance and config.mask_tolerance == "auto":
        how = f"the nearest value, if it is within {tolerance}; pixels between two are ignored"
        reason += f"; masks saved as JPEG: {how}"
    if coding.values is not None and tolerance > (most := masks.largest_tolerance(coding.known_values)):
        need = f"need at most {most}: with more, a value is close to two classes"
        raise DataError(f"mask_tolerance: got {tolerance}; {need}")
    coding = replace(coding, tolerance=tolerance, ignores_unknown=config.unknown_values == "ignore", reason=reason)
    number = asked or (1 if coding.num_ids == 2 else coding.num_ids)
    keys = [key for key in ("class_names", "class_weights") if isinstance(getattr(config, key), tuple)]
    reason = f"the masks hold {reason}" if asked is None else f"by {[*keys, 'mask_values'][0]}"
    named = {} if config.class_names else _names_by_value(evidence)
    names = [named.get(value, "void") for value in coding.values or [-1]]
    # A class file has to name every class; of one class, the name is the foreground's.
    return ChosenClasses(coding, number, reason, None if any(map(is_void, names)) else tuple(names[-number:]))


def _jpeg_tolerance(coding: MaskCoding, evidence: MaskEvidence) -> int:
    """What masks need that were saved as JPEG; 0 if they do not, or if values are too close to each other for it."""
    is_exact = coding.values is None or not evidence.is_lossy or set(evidence.seen) <= set(coding.known_values)
    return 0 if is_exact else _tolerance(coding.known_values)


def _tolerance(values: Sequence[int]) -> int:
    """Pixels between two classes may look like a third one; where there is none, each goes to the nearest."""
    tolerance = min(127 if len(values) == 2 else EDGE_WIDTH, masks.largest_tolerance(values))
    return tolerance if tolerance >= MIN_TOLERANCE else 0


# The rules. `asked`: num_classes, None if it is open


def _by_class_file(asked: int | None, evidence: MaskEvidence) -> MaskCoding | None:
    """The classes that a file names, if it names all values that occur. One named void is ignored; where it is most of
    the pixels, it may be the background. Colours that no mask has would be learnt from nothing."""
    named, near = _names_by_value(evidence), MIN_TOLERANCE if evidence.is_lossy else 0
    if VOID in evidence.counts and not evidence.has_colours:
        named.setdefault(VOID, "void")
    void = tuple(value for value, name in named.items() if is_void(name) and value in evidence.counts)
    classes = [value for value, name in named.items() if not is_void(name)]
    if evidence.has_colours:
        classes = [value for value in classes if any(masks.distance(value, each) <= near for each in evidence.seen)]
    if len(classes) == 2 and asked != 2:
        classes.sort(key=lambda value: (not is_background(named[value]), value != 0))
    if evidence.class_file is None or evidence.share(*void) > 0.5 or len(classes) < 2:
        return None
    coding = MaskCoding(tuple(classes), 0, void, reason=f"{len(classes)} classes in {evidence.class_file.path.name}")
    return coding if set(evidence.seen) <= named.keys() or _jpeg_tolerance(coding, evidence) else None


def _names_by_value(evidence: MaskEvidence) -> dict[int, str]:
    """The names of the class file by the value that they have in the masks, in its order; empty if it does not fit."""
    if (file := evidence.class_file) is None:
        return {}
    names, seen, by_value = file.names, set(evidence.seen), dict(zip(file.values, file.names, strict=False))
    if file.has_colours and evidence.palette:  # the masks hold indices, and their palette the colours
        indices = {colour: index for index, colour in evidence.palette.items()}
        by_index = {indices[colour]: name for colour, name in by_value.items() if colour in indices}
        if seen <= {*by_index, VOID}:
            return by_index
    if by_value and (evidence.has_colours or not file.has_colours or seen <= by_value.keys()):
        return by_value
    # Names alone, in the order of the ids: with the background first, some of the last may occur in no mask.
    ids, has_background = sorted(seen - {VOID}), is_background(names[0])
    if has_background and len(names) == len(seen) == 2:
        return dict(zip(evidence.seen, names, strict=True))
    if ids[-1] >= len(names) or (ids[-1] < len(names) - 1 and not has_background):
        return {}
    return {value: names[value] for value in ids} if len(ids) == 2 else dict(enumerate(names))


def _by_ids(asked: int | None, evidence: MaskEvidence) -> MaskCoding | None:
    """Ids of classes from 0 (or 1) to n, with or without 255 as void; ids beyond 255 are those of objects."""
    seen, high = evidence.seen, evidence.seen[-1]
    ids = [value for value in seen if value not in evidence.void]
    if seen[0] == 0 and 255 < high < COLOUR and (evidence.are_objects or len(seen) > MAX_LISTED):
        return MaskCoding(None, reason=f"object ids up to {high}: any value but 0 is foreground")
    first = min(1, ids[0]) if asked is None and len(ids) > 2 else 0
    all_ids = tuple(range(first, first + (len(ids) if asked is None else max(2, asked))))
    is_clear = asked is not None or len(ids) == 2 or _are_classes(evidence, ids)
    if len(ids) < 2 or len(seen) == len(all_ids) == 2 or not set(ids) <= set(all_ids) or not is_clear:
        return None
    return MaskCoding(all_ids, ignore_value=evidence.void, reason=f"ids {first} to {all_ids[-1]}")


def _by_two_values(_: int | None, evidence: MaskEvidence) -> MaskCoding | None:
    """0 and any other value or colour, or black and white in a palette; or greys that soft edges or JPEG make of two
    values. Of two others, either may be the background."""
    low, high = evidence.seen[0], evidence.seen[-1]
    if len(evidence.seen) > 2:
        halves = MaskCoding(None, (low + high) // 2, reason=f"greys around {low} and {high}")
        return halves if evidence.has_two_clusters() else None
    shown = [evidence.palette.get(value) for value in evidence.seen]
    if shown == [WHITE, BLACK]:
        return MaskCoding((high, low), reason=f"two values, of which {high} is black")
    return MaskCoding((low, high), reason="two values") if low == 0 or shown == [BLACK, WHITE] else None


def _by_palette(_: int | None, evidence: MaskEvidence) -> MaskCoding | None:
    """Indices with gaps, as VOC's: whoever gave them colours meant classes."""
    ids = [value for value in evidence.seen if value not in evidence.void]
    if len(ids) < 3 or not evidence.palette.keys() >= set(evidence.seen) or not _are_classes(evidence, ids):
        return None
    return MaskCoding(tuple(ids), ignore_value=evidence.void, reason=f"{len(ids)} indices of a palette")


def _by_colours(asked: int | None, evidence: MaskEvidence) -> MaskCoding | None:
    """Few exact colours, a class for each: all fill areas, in several masks, and none is close to another. Greys, if
    there are as many as num_classes. Colours that a class file names otherwise are asked about."""
    seen = tuple(evidence.seen)
    if asked == len(seen) and not evidence.has_colours:
        return MaskCoding(seen, reason=f"{asked} values, in their order")
    are_few = evidence.class_file is None and 2 < len(seen) <= MAX_LISTED and len(evidence.distinct) == len(seen)
    are_areas = all(evidence.solid[value] for value in seen) and not evidence.in_one_mask
    are_colours = evidence.has_colours and are_few and are_areas and _are_classes(evidence, seen)
    return MaskCoding(seen, reason=f"{len(seen)} colours") if are_colours else None


RULES = (_by_class_file, _by_ids, _by_two_values, _by_palette, _by_colours)


def _are_classes(evidence: MaskEvidence, values: Sequence[int]) -> bool:
    """Whether values are those of classes, and the last one is a class too: none numbers objects or is void."""
    are_rare = 2 * len(evidence.in_one_mask) >= len(values) - (0 in values)
    is_void = not evidence.ignored and evidence.seen[-1] == values[-1] and evidence.last_may_be_void
    is_other = is_void or are_rare or evidence.are_objects or evidence.is_lossy or evidence.look_like_photographs
    return not is_other and len(values) <= MAX_CLASSES


# The readings that the question offers


def possible_readings(config: Config, evidence: MaskEvidence) -> list[Choice]:
    """What a person may mean by these masks, as settings that train, the most likely first."""
    if evidence.look_like_photographs:
        return []
    seen, high = evidence.seen, evidence.seen[-1]
    are_ids, are_objects = seen == list(range(len(seen))), evidence.are_objects
    has_two_codings = len(seen) == 3 and high == VOID and all(len(mask.counts) < 3 for mask in evidence.masks)
    areas = set(evidence.solid) - set(evidence.in_one_mask)
    main = sorted(value for value in evidence.distinct if value in areas or evidence.share(value) > 0.05)
    tolerance = 0 if set(seen) <= {*main, *evidence.in_one_mask} else _tolerance(main)  # others are edges
    of_others = {"mask_tolerance": tolerance} if tolerance else {"unknown_values": "ignore"}
    has_void = len(seen) > 2 and (evidence.last_may_be_void or (high == VOID and seen[-2] < VOID // 2))
    void, classes = ([high], seen[:-1]) if has_void else ([], seen)
    has_two_orders = len(classes) == 2 and (classes[0] != 0 or not has_void)
    by_share = sorted(classes, key=lambda value: -evidence.counts[value])
    meaning = f"{'every object' if are_objects else 'any value but 0'} is foreground"
    nonzero = Choice(meaning, {"num_classes": 1, "mask_values": "nonzero"})
    readings = [
        (seen[0] == 0 and (are_objects or has_two_codings), nonzero),
        (2 <= len(main) < min(len(seen), MAX_LISTED) and not are_ids and not are_objects, _choice(main, **of_others)),
        (has_two_orders, _choice(by_share, void)),
        (has_two_orders, _choice(by_share[::-1], void)),
        (has_void and len(seen) <= MAX_CLASSES, _choice(classes, void)),
        (len(seen) <= (MAX_CLASSES if are_ids else MAX_LISTED), _choice(seen)),
        (seen[0] == 0 and not evidence.is_lossy, nonzero),  # JPEG makes values next to 0 of it
    ]
    choices = [*{str(choice.settings): choice for is_possible, choice in readings if is_possible}.values()]
    choices = [choice for choice in choices if not any(class_contradictions(replace(config, **choice.settings)))]
    if not are_objects:
        choices.sort(key=lambda choice: config.num_classes not in ("auto", choice.settings["num_classes"]))
    return choices[:MAX_CHOICES]


def _choice(values: Sequence[int], void: Sequence[int] = (), **others: Any) -> Choice:
    """A class for each value, as settings. Ids from 0 need no mask_values."""
    settings: dict[str, Any] = {"num_classes": 1 if len(values) == 2 else len(values)}
    are_ids = list(values) == list(range(len(values)))
    if not are_ids or others:
        settings["mask_values"] = tuple(masks.as_written([value]) for value in values)
    settings |= {"ignore_value": masks.as_written(void)} if void else {}
    meaning = f"ids of {len(values)} classes" if are_ids else "a class for each, in an order that you may change"
    if len(values) == 2:
        meaning = f"{show_value(values[0])} is background, {show_value(values[1])} is foreground"
    elif void:
        meaning = f"{masks.show_values(void)} is ignored"
    rest = {"mask_tolerance": "; others go to the nearest", "unknown_values": "; others are ignored"}
    return Choice(meaning + "".join(rest[key] for key in others), settings | others)
