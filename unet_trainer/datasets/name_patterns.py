"""What names say about neighbours: the sequences that their numbers form, and the patterns that group them. Opens no file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

NUMBER = re.compile(r"\d+")
MIN_RUN = 3  # images in a row that make a sequence
MIN_SHARE = 0.6  # of the images that a pattern must put together with another one
MAX_GROUP = 0.8  # of the images may be in one group: the others have to train or validate
# By what stands before the last underscore, the last number, the first, second and third separator, the second number.
NAME_PATTERNS = (
    r"([^/]+)_[^/_]+$",
    r"([^/]+)[-_. ]\d+\.[^./]+$",
    r"([^/]*[^/\d])\d+\.[^./]+$",
    r"(?:^|/)([^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^-_. /]+[-_. ][^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)((?:[^-_. /]+[-_. ]){2}[^-_. /]+)[-_. ][^/]*$",
    r"(?:^|/)([^/\d]*\d+)[^/\d][^/]*$",
)
LEFT_AND_RIGHT = r"(?i)([^/]*\d)[-_. ]?(?:L|R|left|right|OD|OS)\.[^./]+$"
SIDE = re.compile(r"(?i)(L|R|left|right|OD|OS)\.[^./]+$")


class Place(NamedTuple):
    """Where an image lies among its neighbours. Sorted, places are in the order in which the images were taken."""

    sequence: tuple[tuple[int, int | str], ...]  # sortable; equal for the images of one sequence
    number: int


class Grouping(NamedTuple):
    """A group_pattern, and the group that it gives to each path."""

    pattern: str
    groups: list[str]


def places_of(names: Sequence[str]) -> list[Place]:
    """The sequence and number of each name. Of several numbers in a name, the one that forms the longest runs counts."""
    by_template: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        by_template[NUMBER.sub("#", _stem(name))].append(index)
    places: list[Place] = [Place((), 0)] * len(names)
    for members in by_template.values():
        numbers = {index: [int(found) for found in NUMBER.findall(_stem(names[index]))] for index in members}
        position = _counter_position(list(numbers.values()))
        for index in members:
            counter = numbers[index][position] if position is not None else 0
            places[index] = Place(_without_number(names[index], position), counter)
    return places


def _stem(name: str) -> str:
    return PurePosixPath(name).name


def _counter_position(numbers: Sequence[Sequence[int]]) -> int | None:
    """Which of the numbers counts: with the others fixed, it has runs of MIN_RUN or more; the last one if several are alike."""
    best, position = -1, None
    for candidate in range(len(numbers[0])):
        runs = Counter((*found[:candidate], *found[candidate + 1 :]) for found in numbers)
        in_runs = sum(count for count in runs.values() if count >= MIN_RUN)
        if in_runs >= best:
            best, position = in_runs, candidate
    return position


def _without_number(name: str, position: int | None) -> tuple[tuple[int, int | str], ...]:
    """The name in parts that sort as people count (2 before 10), without one of the numbers of its last part."""
    folder, stem = str(PurePosixPath(name).parent), _stem(name)
    count = 0

    def drop(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return "#" if count - 1 == position else found.group()

    parts = [part for text in (folder, "/", NUMBER.sub(drop, stem)) for part in re.split(r"(\d+)", text) if part]
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def in_order(places: Sequence[Place]) -> list[int]:
    """Indices in the order of the places."""
    return sorted(range(len(places)), key=lambda index: places[index])


def share_in_runs(places: Sequence[Place]) -> float:
    """Share of the images in sequences of MIN_RUN or more."""
    counts = Counter(place.sequence for place in places)
    return sum(count for count in counts.values() if count >= MIN_RUN) / max(1, len(places))


def find_groupings(paths: Sequence[str]) -> list[Grouping]:
    """The patterns that put most of the paths into groups of several, each way of grouping once; and the groups."""
    depth = min(path.count("/") for path in paths)
    patterns = [r"^([^/]+)/", *(rf"^(?:[^/]+/){{{level}}}([^/]+)/" for level in range(1, depth))] if depth else []
    found: dict[tuple[str, ...], Grouping] = {}
    for pattern in (*patterns, *NAME_PATTERNS):
        groups = groups_by(pattern, paths)
        if groups is not None and _puts_together(groups):
            numbering: dict[str, str] = {}
            found.setdefault(tuple(numbering.setdefault(group, str(len(numbering))) for group in groups), Grouping(pattern, groups))
    return list(found.values())


def find_left_and_right(paths: Sequence[str]) -> Grouping | None:
    """The left and the right one of each number, such as the eyes of a person: 21_L and 21_R, Image_01L and Image_01R."""
    groups = groups_by(LEFT_AND_RIGHT, paths)
    if groups is None:
        return None
    sides: dict[str, set[str]] = defaultdict(set)
    for group, path in zip(groups, paths, strict=True):
        found = SIDE.search(path)
        assert found is not None  # the end of the pattern that gave the group
        sides[group].add(found.group(1).lower())
    num_paired = sum(len(sides[group]) == 2 for group in groups)
    return Grouping(LEFT_AND_RIGHT, groups) if len(sides) > 1 and num_paired >= MIN_SHARE * len(paths) else None


def groups_by(pattern: str, paths: Sequence[str]) -> list[str] | None:
    """What the first bracket matches in each path; None if it matches nothing in one of them."""
    matches = [re.search(pattern, path) for path in paths]
    groups = [match.group(1) for match in matches if match is not None and match.group(1)]
    return groups if len(groups) == len(paths) else None


def _puts_together(groups: Sequence[str]) -> bool:
    counts = Counter(groups)
    together = sum(count for count in counts.values() if count > 1)
    return len(counts) > 1 and together >= MIN_SHARE * len(groups) and max(counts.values()) <= MAX_GROUP * len(groups)
