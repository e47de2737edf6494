"""What the values of all masks of a dataset look like together, and how often each class occurs. Decides nothing: the
rules of mask_reading do."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from unet_trainer.data.class_files import ClassFile, is_background
from unet_trainer.data.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, MaskCoding, channels_of, show_values
from unet_trainer.images.mask_shapes import EDGE_WIDTH, MIN_EDGE, piece_stride

VOID = 255  # beside ids
MIN_GREYS = 3  # near the darkest and near the brightest value, of masks with soft edges; fewer are classes
MIN_CLEAR, MAX_STRAY = 0.9, 0.003  # share of pixels near one of the two; in a mask, of greys that are in no edge
MAX_PIECES = 1.5  # connected pieces of an id of an object, on average: others may cover it
NUM_SCATTERED, MIN_MASKS = 20, 4  # ids, or masks, from which it says something that most ids are in few masks
MAX_VOID, MIN_THIN, THINNER = 0.25, 0.2, 2  # void: its share, that of it beside other values, and against classes
PICTURE_VALUES, MIN_PIECE = 12, 16  # that have less than half of a photograph; pixels of a piece of a class
COVERED, MIN_PICTURE = 0.95, 6  # of the pixels of a mask are covered by fewer values than those of a picture
MORE_VALUES, MORE_BORDERS = 1.5, 2  # times as many a picture has as its mask
GROUP_WIDTH = 12  # colours this close to a more frequent one may be its soft edge
MAX_LISTED = 40  # values that are classes each: more are soft edges, or objects
UNNAMED = "class 0"
NUM_SHOWN = 8  # classes in the line that describes them


class MaskEvidence:
    """The values of all masks but those that are ignored."""

    def __init__(
        self, masks: Sequence[MaskFacts], ignored: Collection[int] = (), class_file: ClassFile | None = None
    ) -> None:
        self.masks, self.ignored, self.class_file = masks, frozenset(ignored), class_file
        self.structures = [(mask, mask.structure) for mask in masks if mask.structure is not None]
        self.counts = total_counts(masks)
        self.holders = Counter(value for mask in masks for value in mask.counts)  # masks that hold each value
        for value in self.ignored:
            del self.counts[value], self.holders[value]
        self.seen = sorted(self.counts)
        self.total = self.counts.total()
        self.has_colours = bool(self.seen) and self.seen[-1] >= COLOUR
        self.is_lossy = any(mask.is_lossy for mask in masks)
        self.num_pieces = sum(structure.num_pieces for _, structure in self.structures)

    def share(self, *values: int) -> float:
        return sum(self.counts[value] for value in values) / max(1, self.total)

    @cached_property
    def shown(self) -> dict[int, int]:
        """Of masks with a palette, the colour of each value, 0xRRGGBB."""
        return {value: colour for mask in self.masks for value, colour in (mask.palette or {}).items()}

    @cached_property
    def solid(self) -> Counter[int]:
        """Of each value, the pixels that are surrounded by it, in masks of three values or more."""
        return total_of(structure.solid for _, structure in self.structures)

    @cached_property
    def only_in_edges(self) -> list[int]:
        """Values that are surrounded by themselves nowhere, as those of soft edges and noise."""
        in_pairs = {value for mask in self.masks if mask.structure is None for value in mask.counts}
        return [value for value in self.seen if not self.solid[value] and value not in in_pairs]

    @cached_property
    def in_one_mask(self) -> list[int]:
        """Values but 0 that only one of several masks holds: noise, objects, or a class that cannot be validated."""
        return [value for value in self.seen if value and self.holders[value] == 1 and len(self.masks) >= MIN_MASKS]

    def has_two_clusters(self) -> bool:
        """Whether the values are greys around two ends, and those between lie in edges only."""
        low, high = self.seen[0], self.seen[-1]
        dark, bright = ([value for value in self.seen if abs(value - end) <= EDGE_WIDTH] for end in (low, high))
        if high > 255 or high - low < MIN_EDGE or min(len(dark), len(bright)) < MIN_GREYS:
            return False
        has_strays = any(its.stray > MAX_STRAY * mask.height * mask.width for mask, its in self.structures)
        return not has_strays and self.share(*dark, *bright) >= max(MIN_CLEAR, 1 - self.share(*bright))

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """The most frequent values, each with the values close to it."""
        groups: dict[int, list[int]] = {}
        values = np.array([value for value, _ in self.counts.most_common()])
        colours = np.array([channels_of(value) for value in values])
        width = EDGE_WIDTH if self.is_lossy else GROUP_WIDTH
        while len(values) and len(groups) <= MAX_LISTED:
            near = width if colours[0].max() <= 255 else 0  # a grey of more than 8 bits has none that is close
            is_close = np.abs(colours - colours[0]).max(axis=1) <= near
            groups[int(values[0])] = values[is_close].tolist()
            values, colours = values[~is_close], colours[~is_close]
        return groups

    @property
    def has_regions(self) -> bool:
        """Whether the values lie in regions, as classes do, and not in specks, as the greys of a photograph."""
        pixels = sum(mask.height * mask.width // piece_stride(mask.size) ** 2 for mask, _ in self.structures)
        return self.num_pieces * MIN_PIECE <= pixels

    @property
    def are_pieces(self) -> bool:
        """Whether each value is a region of one piece, as ids of objects are, whatever their numbers or colours."""
        return self.has_regions and self.num_pieces <= MAX_PIECES * sum(its.num_values for _, its in self.structures)

    @cached_property
    def are_objects(self) -> bool:
        """Whether the values but 0 number objects: each one piece, and k occurs where 1 to k-1 do, or in few masks."""
        sets = [held for mask in self.masks if (held := set(mask.counts) - self.ignored - {0})]
        order = sorted(set().union(*sets), key=lambda value: (-self.holders[value], value))
        num_held, sizes = sum(map(len, sets)), {len(held) for held in sets}
        if 0 not in self.counts or not self.structures or (max(sizes) < 3 and num_held > len(order)):
            return False
        # Nested: the n values of a mask are the n that most masks hold, but for a tenth of them.
        num_nested = sum(len(held - set(order[: len(held)])) <= len(held) // 10 for held in sets)
        is_scattered = len(order) >= NUM_SCATTERED and 2 * num_held <= len(order) * len(sets)
        is_nested = num_nested >= 0.95 * len(sets) and len(sizes) >= (3 if self.are_pieces else 6)
        return is_nested or (self.are_pieces and is_scattered)

    @cached_property
    def last_may_be_void(self) -> bool:
        """Whether the highest value is rare, in nearly all masks, and thinner than the classes that it lies beside."""
        last, most = self.seen[-1], max(self.counts, key=self.counts.__getitem__)
        pixels = total_of(mask.counts for mask, _ in self.structures)
        in_all = sum(last in mask.counts for mask, _ in self.structures) >= max(1, 0.9 * len(self.structures))
        thin, thin_others = (
            1 - sum(self.solid[value] for value in values) / max(1, sum(pixels[value] for value in values))
            for values in ([last], [value for value in self.seen if value not in (last, most)])
        )
        is_rare = in_all and last != most and self.share(last) <= MAX_VOID
        return is_rare and thin >= max(MIN_THIN, THINNER * thin_others)

    def is_beside_classes(self, value: int) -> bool:
        """Whether a value occurs in a mask that also holds another value but 0, or no mask holds such a value."""
        others = [(mask, set(mask.counts) - self.ignored - {0, value}) for mask in self.masks]
        return any(held for mask, held in others if value in mask.counts) or not any(held for _, held in others)

    @property
    def look_like_photographs(self) -> bool:
        """Whether the most frequent values have few of the pixels, and lie in specks."""
        covered = sum(pixels for _, pixels in self.counts.most_common(PICTURE_VALUES))
        return 2 * covered < self.total and not self.has_regions

    @property
    def num_covering(self) -> float:
        """Values that have nearly all pixels of a mask, on average."""
        counts = [np.cumsum(sorted(mask.counts.values(), reverse=True)) for mask in self.masks]
        return sum(1 + int(np.searchsorted(of, COVERED * of[-1])) for of in counts) / max(1, len(counts))

    def looks_swapped_with(self, masks: "MaskEvidence") -> bool:
        """Whether these images, read as masks, look like masks, and the masks like pictures: few values against many,
        with more borders. Line drawings have few values too, but more borders than the masks of what is in them."""
        borders, borders_of_masks = (
            sum(mask.height * mask.width for mask, _ in its.structures) - its.solid.total() for its in (self, masks)
        )
        has_more = masks.num_covering >= max(MIN_PICTURE, MORE_VALUES * self.num_covering)
        is_picture = has_more and borders_of_masks >= MORE_BORDERS * borders
        return is_picture and not masks.are_objects and not masks.are_pieces


def total_of(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    return total


def total_counts(masks: Sequence[MaskFacts]) -> Counter[int]:
    """Pixels of each value in all masks."""
    return total_of(mask.counts for mask in masks)


def class_ids(counts: Mapping[int, int], coding: MaskCoding) -> dict[int, int]:
    """Class id → number of pixels, from those of each value; includes IGNORED and UNKNOWN."""
    pixels: Counter[int] = Counter()
    values = tuple(sorted(counts))
    for value, class_id in zip(values, encode_values(values, coding), strict=True):
        pixels[class_id] += counts[value]
    return dict(pixels)


@lru_cache(maxsize=1024)
def encode_values(values: tuple[int, ...], coding: MaskCoding) -> tuple[int, ...]:
    """The class ids of values; most masks of a dataset hold the same ones."""
    return tuple(coding.encode(np.array(values)).tolist())


def class_shares(masks: Sequence[MaskFacts], coding: MaskCoding, num_ids: int) -> list[float]:
    """Share of each class id among the pixels that are not ignored."""
    total = class_ids(total_counts(masks), coding)
    per_class = [total.get(class_id, 0) for class_id in range(num_ids)]
    return [pixels / max(1, sum(per_class)) for pixels in per_class]


def ignored_share(masks: Sequence[MaskFacts], coding: MaskCoding) -> float:
    """Share of ignored pixels among all pixels."""
    counts = total_counts(masks)
    return class_ids(counts, coding).get(IGNORED, 0) / max(1, counts.total())


def has_background(names: Sequence[str], shares: Sequence[float]) -> bool:
    """Whether class 0 is the background: by its name, or, if it has none, because most pixels are of it."""
    return shares[0] == max(shares) if names[0] == UNNAMED else is_background(names[0])


class ClassRow(NamedTuple):
    """The file values that become a class, its name, and its share of the pixels that are not ignored."""

    values: str
    name: str
    share: float


def class_table(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[ClassRow]:
    """A row for each class id."""
    shares = class_shares(masks, coding, len(names))
    named = enumerate(zip(names, shares, strict=True))
    return [ClassRow(coding.describe(index), name, share) for index, (name, share) in named]


def describe_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> str:
    """The table in one line, with the ignored share and the reason for the coding."""
    table = [f"{row.values} → {row.name} {row.share:.1%}" for row in class_table(masks, coding, names)]
    text = ", ".join(table[:NUM_SHOWN]) + (", …" if len(table) > NUM_SHOWN else "") + " of pixels"
    if ignored := ignored_share(masks, coding):
        values = describe_ignored(coding)
        verb = "is" if values == show_values(coding.ignored[:1]) else "are"
        text += f"; {values} {verb} ignored, {ignored:.1%} of all pixels"
    return text + (f" ({coding.reason})" if coding.reason != "mask_values" else "")


def describe_ignored(coding: MaskCoding) -> str:
    """The values that are ignored."""
    named = [show_values(coding.ignored)] if coding.ignored else []
    return " and ".join([*named, "other values"] if coding.ignores_unknown or coding.tolerance else named)


def absent_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[str]:
    """Names of the classes without any pixel."""
    return [row.name for row in class_table(masks, coding, names) if row.share == 0]
