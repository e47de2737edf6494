"""The question about mask values that only the user can answer: what was found, and choices of a few lines of YAML.

Every choice that is offered was tried on the values of the masks: it trains as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from unet_trainer.config.dump import to_plain, value_text
from unet_trainer.config.load import class_contradictions
from unet_trainer.config.mask_classes import MaskClass
from unet_trainer.config.schema import Config
from unet_trainer.datasets.class_files import ClassFile
from unet_trainer.datasets.coding_choice import MAX_CLASSES, VOID, choose_classes, present_classes
from unet_trainer.datasets.mask_evidence import MANY_VALUES, MaskEvidence, ValueGroup
from unet_trainer.datasets.problems import Choice, Question, first_few
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import COLOUR
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, as_written, given_coding, show_value, show_values
from unet_trainer.system.console import counted

MAX_LISTED = 40  # values that are offered as classes
MAX_CHOICES = 5
EDGE_RARITY = 200  # one of so many pixels: the share of a colour that edges make
NUM_CUTS = 2  # between frequent colours and those of edges, in masks saved as JPEG
NUM_SHOWN = 12  # values in the table
NUM_NOISE_SHOWN, NUM_NOISE_MASKS = 6, 3  # values of noise of a mask, and masks
FEW_COVERED = 0.5  # share of the pixels that the values shown have: if less, the masks look like photographs


def ask_for_classes(config: Config, evidence: MaskEvidence, names: Sequence[str], class_file: ClassFile | None) -> Question:
    """The question where choose_classes has no answer. `names` are what messages call the masks."""
    choices: dict[str, Choice] = {}
    for proposed in _propose(evidence, None if config.class_names else class_file):
        choice = _with_given_void(proposed, evidence)
        if _trains(config, evidence, choice):
            choices.setdefault(value_text(to_plain(dict(choice.settings))), choice)
    found = list(choices.values())
    if config.num_classes != "auto" and not evidence.are_objects:
        found.sort(key=lambda choice: choice.settings["num_classes"] != config.num_classes)
    message = "mask_values: auto cannot tell what the values in the masks mean"
    if config.num_classes != "auto":
        message += f"; num_classes: {config.num_classes} accepts {_accepted(config.num_classes)}"
    lines = [*_table(evidence, names), *_hints(evidence)]
    return Question("\n  ".join([message, *lines]), *found[:MAX_CHOICES])


def _with_given_void(choice: Choice, evidence: MaskEvidence) -> Choice:
    """What a choice ignores is ignored besides the user's ignore_value."""
    if "ignore_value" not in choice.settings:
        return choice
    ignored = given_coding("nonzero", choice.settings["ignore_value"]).ignored
    return replace(choice, settings={**choice.settings, "ignore_value": as_written(sorted(evidence.ignored | set(ignored)))})


def _accepted(num_classes: int) -> str:
    if num_classes == 1:
        return "{0, 1}, {0, 255} or 0 and any other value"
    return f"the ids 0 to {num_classes - 1} or any {num_classes} greys"


def _trains(config: Config, evidence: MaskEvidence, choice: Choice) -> bool:
    """Whether the config with this choice decides the masks: every value has a meaning, and two classes occur."""
    answered = replace(config, **choice.settings)
    if class_contradictions(answered):
        return False
    ignored = given_coding("nonzero", answered.ignore_value).ignored
    counted_values = evidence if evidence.ignored == set(ignored) else MaskEvidence(evidence.masks, ignored)
    try:
        chosen = choose_classes(answered, counted_values)
    except DataError:
        return False
    if chosen is None:
        return False
    present = present_classes(chosen.coding, counted_values)
    return UNKNOWN not in present and len(present - {IGNORED}) >= 2


# What was found


def _table(evidence: MaskEvidence, names: Sequence[str]) -> list[str]:
    """The most frequent values, those close to one of them with it, and those that occur in one mask only."""
    noise = [] if evidence.are_objects else evidence.noise
    others = evidence.without(noise)
    rows: dict[int, str] = {}
    if evidence.has_colours or evidence.is_lossy:
        groups = next(iter(_frequent_groups(others)), []) if evidence.is_lossy else others.groups
        for group in groups[:NUM_SHOWN]:
            near = f", with {counted(group.num_values - 1, 'value')} close to it" if group.num_values > 1 else ""
            rows[group.value] = f"{show_value(group.value)}: {group.pixels / evidence.total:.2%} of pixels{near}"
        num_shown = sum(group.num_values for group in groups[:NUM_SHOWN])
    else:
        shown = [value for value, _ in others.counts.most_common(NUM_SHOWN)]
        rows = {value: f"{show_value(value)}: {evidence.share(value):.2%} of pixels" for value in shown}
        num_shown = len(shown)
    num_masks = len(evidence.masks)
    lines = [f"{rows[value]}, in {evidence.holders[value]} of {counted(num_masks, 'mask')}" for value in sorted(rows)]
    if num_shown + len(noise) < len(evidence.seen):
        lines.append(f"… {len(evidence.seen)} values in all (check --json FILE lists them)")
    if noise:
        by_mask: dict[str, list[int]] = {}
        for value in noise:
            by_mask.setdefault(names[evidence.holder_of(value)], []).append(value)
        named = [f"{show_values(values[:NUM_NOISE_SHOWN])} in {name}" for name, values in by_mask.items()]
        lines.append(f"In one mask only, perhaps noise: {first_few(named, NUM_NOISE_MASKS)}")
    return lines


def _hints(evidence: MaskEvidence) -> list[str]:
    seen = evidence.seen
    covered = sum(pixels for _, pixels in evidence.counts.most_common(NUM_SHOWN))
    if evidence.are_objects:
        return ["They look like ids of objects: nearly each is one piece, and masks with more of them hold those of the others too"]
    if covered < FEW_COVERED * evidence.total and not evidence.has_regions:
        return ["They look like those of photographs; is mask_dir the folder of the masks?"]
    if seen[-1] == VOID and len(seen) > 2 and not evidence.is_beside_classes(VOID):
        return [f"{VOID} occurs only in masks that hold no class but 0: is it void, or another mark of the foreground?"]
    if len(seen) == 2:
        return ["Which of the two is the background?"]
    if seen[-1] < COLOUR and len(seen) > 2 and evidence.last_may_be_void:
        return [f"{seen[-1]} is rare, thin and beside other values: is it void (pixels that should count nowhere), or a class?"]
    return []


# Choices


def _propose(evidence: MaskEvidence, class_file: ClassFile | None) -> Iterator[Choice]:
    """Every reading that a person may mean, the most likely first."""
    if evidence.are_objects:
        yield _nonzero("every object is foreground")
    yield from _propose_class_file(evidence, class_file)
    yield from _propose_without_noise(evidence)
    if len(evidence.seen) == 2:
        yield from _propose_order(evidence, evidence.seen)
    elif len(evidence.seen) == 3:
        yield from _propose_for_three(evidence)
    if evidence.seen[-1] < COLOUR:
        yield from _propose_ids(evidence)
    yield from _propose_list(evidence)
    if 0 in evidence.counts and not evidence.is_lossy:  # JPEG makes values next to 0 of it
        yield _nonzero("any value but 0 is foreground")
    low, high = evidence.seen[0], evidence.seen[-1]
    if len(evidence.seen) >= MANY_VALUES and high <= 255 and not evidence.has_regions:
        yield Choice("brighter is foreground", {"num_classes": 1, "mask_values": f"above {(low + high) // 2}"})


def _nonzero(meaning: str) -> Choice:
    return Choice(meaning, {"num_classes": 1, "mask_values": "nonzero"})


def _listed(values: Sequence[int]) -> tuple[MaskClass, ...]:
    return tuple(as_written([value]) for value in values)


def _propose_order(evidence: MaskEvidence, values: Sequence[int], **others: Any) -> Iterator[Choice]:
    """Two values, the more frequent one as the background first."""
    background, foreground = sorted(values, key=lambda value: -evidence.counts[value])
    for order in ((background, foreground), (foreground, background)):
        beyond = f", {show_values(set(evidence.seen) - set(order))} counts nowhere" if others else ""
        meaning = f"{show_value(order[0])} is background, {show_value(order[1])} is foreground{beyond}"
        yield Choice(meaning, {"num_classes": 1, "mask_values": _listed(order), **others})


def _propose_for_three(evidence: MaskEvidence) -> Iterator[Choice]:
    """A trimap, or two codings of one foreground, or three classes."""
    low, middle, high = evidence.seen
    if low == 0 and high == VOID and not evidence.is_beside_classes(VOID):
        meaning = f"{show_value(middle)} and {high} are both foreground"
        yield Choice(meaning, {"num_classes": 1, "mask_values": (0, as_written([middle, high]))})
        yield Choice(f"{high} counts nowhere", {"num_classes": 1, "mask_values": _listed([low, middle]), "ignore_value": high})
        return
    is_dense = high - low == 2
    if low != 0:
        yield from _propose_order(evidence, [low, middle], ignore_value=as_written([high]))
    elif high < COLOUR and (is_dense or evidence.last_may_be_void):
        yield from _propose_last_as_void(evidence)
    three = {"num_classes": 3, "mask_values": _listed(evidence.seen)}
    yield Choice("three classes", {"num_classes": 3} if is_dense and low == 0 else three)
    if low == 0 and not is_dense:
        for background, foreground, void in ((low, high, middle), (low, middle, high)):
            meaning = f"{show_value(foreground)} is foreground, {show_value(void)} counts nowhere"
            settings = {"mask_values": _listed([background, foreground]), "ignore_value": as_written([void])}
            yield Choice(meaning, {"num_classes": 1, **settings})


def _propose_last_as_void(evidence: MaskEvidence) -> Iterator[Choice]:
    """Ids, of which the last one counts nowhere."""
    *ids, last = evidence.seen
    if len(ids) < 2 or len(ids) > MAX_CLASSES:
        return
    num_classes = 1 if len(ids) == 2 else len(ids)
    settings: dict[str, Any] = {"num_classes": num_classes, "ignore_value": last}
    if ids != list(range(len(ids))):
        settings = {"num_classes": num_classes, "mask_values": tuple(ids), "ignore_value": last}
    yield Choice(f"{last} counts nowhere", settings)


def _propose_ids(evidence: MaskEvidence) -> Iterator[Choice]:
    """Ids of classes from 0, with 255 or the last one as void, or with ids that no mask has."""
    seen = evidence.seen
    ids = [value for value in seen if value != VOID]
    is_dense = ids == list(range(len(ids)))
    if is_dense and len(ids) > 2 and seen[-1] == VOID:
        yield Choice(f"ids of {len(ids)} classes; 255 counts nowhere", {"num_classes": len(ids), "ignore_value": VOID})
        return
    if evidence.last_may_be_void:
        yield from _propose_last_as_void(evidence)
    if is_dense and len(ids) > 2:
        yield Choice(f"ids of {len(ids)} classes", {"num_classes": len(ids)})
    elif len(ids) > 3 and ids[-1] < min(2 * len(ids), MAX_CLASSES) and not evidence.are_objects:
        absent = [value for value in range(ids[-1]) if value not in evidence.counts]
        void = {"ignore_value": VOID} if seen[-1] == VOID else {}
        meaning = f"ids of {ids[-1] + 1} classes; no mask has {show_values(absent[:8])}" + (" …" if len(absent) > 8 else "")
        yield Choice(meaning + ("; 255 counts nowhere" if void else ""), {"num_classes": ids[-1] + 1, **void})


def _propose_list(evidence: MaskEvidence) -> Iterator[Choice]:
    """A class for each value, or for each group of colours."""
    seen = evidence.seen
    if evidence.is_lossy:
        for groups in _frequent_groups(evidence):
            yield from _listed_choice(evidence, [group.value for group in groups])
    elif evidence.has_colours:
        yield from _listed_choice(evidence, [group.value for group in evidence.without(evidence.noise).groups[:MAX_LISTED]])
    elif len(seen) <= MAX_LISTED and seen != list(range(len(seen))):  # dense ids are offered as such
        yield from _listed_choice(evidence, seen)


def _listed_choice(evidence: MaskEvidence, main: Sequence[int]) -> Iterator[Choice]:
    if len(main) < 2:
        return
    values = sorted(main)
    settings: dict[str, Any] = {"num_classes": 1 if len(values) == 2 else len(values), "mask_values": _listed(values)}
    meaning = "a class for each, in an order that you may change" if len(values) > 2 else f"{show_value(values[1])} is foreground"
    if len(main) == len(evidence.seen):
        yield Choice(meaning, settings)
    elif evidence.is_lossy:
        each = f"a class for each of the {len(values)} most frequent"
        yield Choice(f"{meaning.replace('a class for each', each)}; values between them go to the nearest", settings)
    else:
        others = counted(len(evidence.seen) - len(main), "other value")
        yield Choice(f"{meaning}; {others} count nowhere", {**settings, "unknown_values": "ignore"})


def _frequent_groups(evidence: MaskEvidence) -> list[list[ValueGroup]]:
    """The groups before the largest drops in frequency, the likely cut first: of masks saved as JPEG, the others are the edges."""
    pixels = [group.pixels for group in evidence.groups[:MAX_LISTED]]
    pixels.append(max(1, evidence.total // EDGE_RARITY))  # all of them may be classes, if the last is more than edges are
    drops = [(pixels[number - 1] / pixels[number], number) for number in range(2, len(pixels))]
    numbers = [number for _, number in sorted(drops, reverse=True)[:NUM_CUTS]]
    return [evidence.groups[:number] for number in numbers]


def _propose_without_noise(evidence: MaskEvidence) -> Iterator[Choice]:
    """What the masks mean if values that occur in one of them only count nowhere."""
    noise = evidence.noise
    main = [value for value in evidence.seen if value not in noise]
    if not noise or evidence.are_objects or evidence.is_lossy or not 2 <= len(main) <= MAX_LISTED:
        return
    chosen = choose_classes(Config(), evidence.without(noise))
    meaning = f"{counted(len(noise), 'value')} in one mask only count{'s' if len(noise) == 1 else ''} nowhere"
    if chosen is None or isinstance(chosen.coding.mask_values, str):
        settings: dict[str, Any] = {"num_classes": 1 if len(main) == 2 else len(main), "mask_values": _listed(main)}
        meaning += "; the order of the classes is yours"
    else:
        settings = {"num_classes": chosen.num_classes, "mask_values": chosen.coding.mask_values}
        ignored = [value for value in chosen.coding.ignored if value not in noise]
        settings |= {"ignore_value": as_written(ignored)} if ignored else {}
    yield Choice(meaning, {**settings, "unknown_values": "ignore"})


def _propose_class_file(evidence: MaskEvidence, class_file: ClassFile | None) -> Iterator[Choice]:
    """The classes of the file, if only some of the values are among them; the others count nowhere."""
    if class_file is None or not class_file.has_values:
        return
    present = [one for one in class_file.classes if one.value in evidence.counts]
    classes = [one for one in present if not one.is_void]
    if len(classes) < 3 or evidence.share(*(one.value for one in present if one.value is not None)) < FEW_COVERED:
        return
    is_all = len(present) == len(evidence.seen)
    beyond = {} if is_all else {"unknown_values": "ignore"}
    void = [one for one in present if one.is_void]
    for counted_classes in (present, classes) if void else (classes,):
        settings: dict[str, Any] = {
            "num_classes": len(counted_classes),
            "class_names": tuple(one.name for one in counted_classes),
            "mask_values": _listed([one.value for one in counted_classes if one.value is not None]),
        }
        ignored = [one.value for one in void if one not in counted_classes and one.value is not None]
        settings |= {"ignore_value": as_written(ignored)} if ignored else {}
        nowhere = [one.name for one in void if one not in counted_classes] + ([] if is_all else ["other values"])
        meaning = f"the classes of {class_file.path.name}"
        meaning += f"; what counts nowhere: {', '.join(nowhere)}" if nowhere else ""
        yield Choice(meaning, {**settings, **beyond})
