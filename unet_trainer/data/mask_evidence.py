"""What the values of all masks of a dataset look like together, and how often each class occurs. Decides nothing: the
rules of mask_reading do."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from unet_trainer.data.class_files import ClassFile, is_background
from unet_trainer.data.file_facts import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, MaskCoding, as_number, channels_of, distance

Masks = Sequence[MaskFacts]
VOID = 255  # beside ids
MAX_LISTED = 40  # values that are classes each: more are soft edges, or objects
EDGE_WIDTH, COLOUR_WIDTH = 48, 12  # values this close to another one may be its edge: greys and JPEG, exact colours
MIN_PICTURE = 6  # values that have nearly all pixels of a picture in place of a mask


class MaskEvidence:
    """The values of all masks but those that are ignored."""

    def __init__(self, masks: Masks, ignored: Collection[int] = (), class_file: ClassFile | None = None) -> None:
        self.masks, self.ignored, self.class_file = masks, frozenset(ignored), class_file
        self.counts = total_counts(masks)
        self.solid = _total(mask.structure.solid if mask.structure else mask.counts for mask in masks)
        self.holders = Counter(value for mask in masks for value in mask.counts)  # masks that hold each value
        for value in self.ignored:
            del self.counts[value], self.solid[value], self.holders[value]
        self.seen, self.total = sorted(self.counts), self.counts.total()
        self.has_colours = bool(self.seen) and self.seen[-1] >= COLOUR
        self.is_lossy = any(mask.is_lossy for mask in masks)
        palettes = (mask.palette or {} for mask in masks)
        shown = {value: colour for palette in palettes for value, colour in palette.items()}
        self.palette = {value: as_number(channels_of(COLOUR + colour)) for value, colour in shown.items()}
        # Values but 0 that only one of several masks holds: noise, objects, or a class that cannot be validated.
        self.in_one_mask = [value for value in self.seen if value and self.holders[value] == 1 and len(masks) > 3]

    def share(self, *values: int) -> float:
        return sum(self.counts[value] for value in values) / max(1, self.total)

    def has_two_clusters(self) -> bool:
        """Whether the values are greys around two ends, with few pixels between them, and no peak: a third class."""
        low, high = self.seen[0], self.seen[-1]
        dark, bright = ([value for value in self.seen if abs(value - end) <= EDGE_WIDTH] for end in (low, high))
        if high > 255 or high - low < 4 * EDGE_WIDTH or min(len(dark), len(bright)) < 3:  # fewer are classes
            return False
        between = [value for value in self.seen if value not in (*dark, *bright)]
        share = self.share(*between)
        peak = max((self.share(*(value for value in between if abs(value - each) <= 8)) for each in between), default=0)
        return share <= min(0.1, self.share(*bright)) and peak <= max(0.001, share / 2)

    @cached_property
    def distinct(self) -> list[int]:
        """The most frequent values, of which none may be the soft edge of another one. Few greys all are distinct."""
        are_exact = not self.has_colours and len(self.seen) <= MAX_LISTED
        width = EDGE_WIDTH if self.is_lossy else 0 if are_exact else COLOUR_WIDTH
        distinct = list[int]()
        for value, _ in self.counts.most_common():
            if len(distinct) <= MAX_LISTED and all(distance(value, other) > width for other in distinct):
                distinct.append(value)
        return distinct

    @cached_property
    def look_like_photographs(self) -> bool:
        """Whether no few values have most of the pixels, and most have a neighbour of another value."""
        return 2 * max(self.solid.total(), sum(num for _, num in self.counts.most_common(12))) < self.total

    @cached_property
    def are_pieces(self) -> bool:
        """Whether each value is a region of one piece, or nearly so: an object may cover another one."""
        structures = [mask.structure for mask in self.masks if mask.structure is not None]
        num_values = sum(len(its.solid.keys() - {0}) for its in structures)
        are_few = sum(its.num_pieces for its in structures) <= 1.5 * num_values
        return bool(structures) and are_few and not self.look_like_photographs

    @cached_property
    def are_objects(self) -> bool:
        """Whether the values but 0 number objects: the n of a mask have the n values that most masks hold, as 1 to n;
        or there are many values, each is one piece and most are in few masks."""
        sets = [held for mask in self.masks if (held := set(mask.counts) - self.ignored - {0})]
        order, sizes = [value for value, _ in self.holders.most_common() if value], {*map(len, sets)}
        num_nested = sum(held <= set(order[: len(held)]) for held in sets)
        are_nested = num_nested >= 0.95 * len(sets) and len(sizes) >= (3 if self.are_pieces else 6)
        are_scattered = len(order) >= 20 and 2 * sum(map(len, sets)) <= len(order) * max(4, len(sets))
        return 0 in self.counts and not self.is_lossy and (are_nested or (self.are_pieces and are_scattered))

    @cached_property
    def last_may_be_void(self) -> bool:
        """Whether the highest value is in nearly all masks, and thinner than the classes that it lies beside."""
        last, most = self.seen[-1], max(self.counts, key=self.counts.__getitem__)
        thin = self.counts - self.solid
        others = [value for value in self.seen if value not in (last, most)]
        of_others = sum(thin[value] for value in others) / max(1, sum(self.counts[value] for value in others))
        is_everywhere = last != most and self.holders[last] >= 0.9 * len(self.masks)
        return is_everywhere and thin[last] >= max(0.2, 2 * of_others) * self.counts[last]

    @cached_property
    def void(self) -> tuple[int, ...]:
        """255, where it lies beside other ids but 0; but not if it is apart from them in most masks, as objects are."""
        beside = [mask for mask in self.masks if VOID in mask.counts and set(mask.counts) - self.ignored - {0, VOID}]
        num_apart = sum(mask.structure is not None and mask.structure.void_is_apart for mask in beside)
        is_void = beside and not self.ignored and self.seen[-1] == VOID and 2 * num_apart <= len(beside)
        return (VOID,) if is_void else ()

    @property
    def num_covering(self) -> float:
        """Values that have 95 % of the pixels of a mask, on average."""
        counts = [np.cumsum(sorted(mask.counts.values(), reverse=True)) for mask in self.masks]
        return sum(1 + int(np.searchsorted(of, 0.95 * of[-1])) for of in counts) / max(1, len(counts))

    def looks_swapped_with(self, masks: "MaskEvidence") -> bool:
        """Whether these images, read as masks, look like masks, and the masks like pictures: few values against many,
        with more borders. Line drawings have few values too, but more borders than the masks of what is in them."""
        has_more_values = masks.num_covering >= max(MIN_PICTURE, 1.5 * self.num_covering)
        has_more_borders = masks.total - masks.solid.total() >= 2 * (self.total - self.solid.total())
        return has_more_values and has_more_borders and not masks.are_objects and not masks.are_pieces


def _total(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    return total


def total_counts(masks: Masks) -> Counter[int]:
    """Pixels of each value in all masks."""
    return _total(mask.counts for mask in masks)


@lru_cache(maxsize=1024)
def encode_values(values: tuple[int, ...], coding: MaskCoding) -> tuple[int, ...]:
    """The class ids of values; most masks of a dataset hold the same ones."""
    return tuple(coding.encode(np.array(values)).tolist())


def class_ids(counts: Mapping[int, int], coding: MaskCoding) -> Counter[int]:
    """Class id → number of pixels, from those of each value; includes IGNORED and UNKNOWN."""
    values = tuple(sorted(counts))
    return _total({i: counts[v]} for v, i in zip(values, encode_values(values, coding), strict=True))


def class_shares(masks: Masks, coding: MaskCoding, num_ids: int) -> list[float]:
    """Share of each class id among the pixels that are not ignored."""
    total = class_ids(total_counts(masks), coding)
    num_pixels = sum(total[class_id] for class_id in range(num_ids))
    return [total[class_id] / max(1, num_pixels) for class_id in range(num_ids)]


def ignored_share(masks: Masks, coding: MaskCoding) -> float:
    """Share of ignored pixels among all pixels."""
    total = class_ids(total_counts(masks), coding)
    return total[IGNORED] / max(1, total.total())


def has_background(names: Sequence[str], shares: Sequence[float]) -> bool:
    """Whether class 0 is the background: by its name, or, if it has none, because most pixels are of it."""
    return shares[0] == max(shares) if names[0] == "class 0" else is_background(names[0])


class ClassRow(NamedTuple):
    """A class: the values in files that become it, its name, and its share of the pixels that are not ignored."""

    values: str
    name: str
    share: float


def class_table(masks: Masks, coding: MaskCoding, names: Sequence[str]) -> list[ClassRow]:
    shares = class_shares(masks, coding, len(names))
    return [ClassRow(coding.describe(index), name, shares[index]) for index, name in enumerate(names)]
