"""What the values of all masks of a dataset look like together: soft edges, ids of objects, void, groups of colours,
noise; and how often each class occurs.

Each answer of MaskEvidence is for one question of mask_reading, which decides.
"""

import contextlib
import csv
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, MaskCoding, as_number, channels_of, show_values
from unet_trainer.images.mask_shapes import EDGE_WIDTH, MIN_EDGE, piece_stride
from unet_trainer.system.input_files import parse_json, read_text

MANY_VALUES = 8  # as many distinct greys in masks of two classes come from soft edges or compression
MIN_BRIGHT = 3  # as many of them are near the brightest; 255 alone beside ids is void
MIN_CLEAR_SHARE = (
    0.9  # share of pixels that must be within EDGE_WIDTH of an end; with fewer, a grey between may be a class
)
MIN_BESIDE_BOTH = 0.8  # share of the greys between that must lie beside both ends: in all masks together,
FEW = 0.01  # and in each mask in which they are a larger share of its pixels than this
MAX_PIECES = 1.5  # connected pieces of an id of an object, on average
MANY_SIZES = (
    6  # where masks hold 1 to n for so many different n, these are ids of objects, however many pieces they have
)
NUM_SCATTERED = 20  # ids of objects that begin anywhere are as many at least
NESTED_SHARE = 0.95  # of the masks whose ids of objects are 1 to n
MAX_VOID_SHARE = 0.1  # void is rare,
MIN_VOID_BORDER = 0.3  # thin,
THINNER = 2  # thinner than other classes by this factor,
VOID_HOLDERS = 0.9  # and in nearly all masks
VOID = 255  # beside ids
OUTLYING = 4  # times the widest gap between ids: void is farther from the last of them
MAX_TOUCHING = 0.1  # of the edges of a trimap, those between foreground and background
MAX_BORDER_WIDTH = 0.1  # of the border of a trimap, as a share of the side of the mask
MAX_CHANNEL_ID = 64  # colours that differ in one channel only, none of them brighter, are ids
NUM_FREQUENT, FEW_COVERED = 12, 0.5  # so many values have a smaller share of the pixels of photographs
COVERED = 0.95  # of the pixels: rarer values are edges, noise or small objects
MIN_PICTURE = 6  # values of a picture with few colours,
MORE_VALUES, MORE_EDGES = 1.5, 2  # times as many as its mask has
MIN_REGION = 16  # pixels of a connected piece of a class, on average, in the smaller mask in which pieces are counted
NOISE_SHARE = 1e-3  # of all pixels: rarer values that occur in a single mask are noise
MIN_MASKS = 4  # with fewer, that a value occurs in one mask says nothing
CHANNELS = ("red", "green", "blue")
GROUP_WIDTH = (
    12  # colours within this distance of a more frequent one are shown with it; EDGE_WIDTH of masks saved as JPEG
)
MAX_GROUPS = 64
UNNAMED = "class 0"
BACKGROUND_NAMES = (
    "background",
    "bg",
    "back",
    "none",
    "nothing",
    "unlabeled",
    "unlabelled",
    "void",
    "other",
    "others",
    "rest",
)
NUM_SHOWN = 8  # classes in the line that describes them


@dataclass(frozen=True)
class ValueGroup:
    """A frequent value and those close to it."""

    value: int
    num_values: int
    pixels: int


class MaskEvidence:
    """The values of all masks, without those that are ignored or set aside."""

    def __init__(
        self, masks: Sequence[MaskFacts], ignored: Collection[int] = (), set_aside: Collection[int] = ()
    ) -> None:
        self.masks = masks
        self.structures = [(mask, mask.structure) for mask in masks if mask.structure is not None]
        self.ignored = frozenset(ignored)  # by ignore_value
        self.left_out = self.ignored | set(set_aside)
        self.counts = total_counts(masks)
        self.holders = Counter(value for mask in masks for value in mask.counts)  # masks that hold each value
        for value in self.left_out:
            del self.counts[value], self.holders[value]

    @cached_property
    def seen(self) -> list[int]:
        return sorted(self.counts)

    @cached_property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def has_colours(self) -> bool:
        return bool(self.seen) and self.seen[-1] >= COLOUR

    @property
    def is_lossy(self) -> bool:
        return any(mask.is_lossy for mask in self.masks)

    def share(self, *values: int) -> float:
        return sum(self.counts[value] for value in values) / max(1, self.total)

    def without(self, values: Collection[int]) -> "MaskEvidence":
        """The same masks as if they had no pixel of these values."""
        return MaskEvidence(self.masks, self.ignored, values)

    @cached_property
    def shown(self) -> dict[int, int]:
        """Of masks with a palette, the colour of each value, 0xRRGGBB."""
        return {value: colour for mask in self.masks for value, colour in (mask.palette or {}).items()}

    # Soft edges

    def edge_threshold(self) -> int | None:
        """The middle between the darkest and the brightest value if the greys between are soft edges, or a mask saved
        as JPEG."""
        low, high = self.seen[0], self.seen[-1]
        if len(self.seen) < MANY_VALUES or high > 255 or high - low < MIN_EDGE:
            return None
        bright = [value for value in self.seen if high - value <= EDGE_WIDTH]
        top, bottom = self.share(*bright), self.share(*(value for value in self.seen if value - low <= EDGE_WIDTH))
        if (
            len(bright) < MIN_BRIGHT or top + bottom < MIN_CLEAR_SHARE or 2 * top + bottom < 1
        ):  # fewer bright pixels than between
            return None
        all_between = all_beside = 0
        for mask in self.masks:
            between = sum(n for value, n in mask.counts.items() if low + EDGE_WIDTH < value < high - EDGE_WIDTH)
            structure = mask.structure
            beside = (
                round(between * structure.beside_both / structure.between) if structure and structure.between else 0
            )
            if between > FEW * mask.height * mask.width and beside < MIN_BESIDE_BOTH * between:
                return None
            all_between += between
            all_beside += beside
        is_edge = all_beside >= MIN_BESIDE_BOTH * all_between or all_between < NOISE_SHARE * self.total
        return (low + high) // 2 if is_edge else None

    # Ids of objects

    @cached_property
    def are_objects(self) -> bool:
        """Whether the values but 0 are numbers of objects: each is one piece, and k occurs where 1 to k-1 do, or in few
        masks."""
        sets = [held for mask in self.masks if (held := set(mask.counts) - self.left_out - {0})]
        sizes = {len(held) for held in sets}
        num_values = sum(structure.num_values for _, structure in self.structures)
        are_numbered_through = sum(map(len, sets)) == len(set().union(*sets))  # none occurs in two masks
        if 0 not in self.counts or not num_values or (max(sizes, default=0) < 3 and not are_numbered_through):
            return False
        # Nested: the n values of a mask are the n values that most masks hold, but for a tenth of them.
        order = sorted(set().union(*sets), key=lambda value: (-self.holders[value], value))
        num_nested = sum(len(held - set(order[: len(held)])) <= len(held) // 10 for held in sets)
        is_nested = len(sizes) >= 3 and num_nested >= NESTED_SHARE * len(sets)
        is_one_piece = sum(structure.num_pieces for _, structure in self.structures) <= MAX_PIECES * num_values
        if is_nested or not is_one_piece:
            return is_nested and (is_one_piece or len(sizes) >= MANY_SIZES)
        return len(order) >= NUM_SCATTERED and 2 * sum(map(len, sets)) <= len(order) * len(sets)

    @property
    def occur_once(self) -> bool:
        """Whether half of the values but 0 occur in one mask only, so that they can hardly be classes."""
        held = [self.holders[value] for value in self.seen if value != 0]
        return len(self.masks) >= MIN_MASKS and 2 * held.count(1) >= len(held)

    @property
    def has_regions(self) -> bool:
        """Whether the values lie in regions, as classes do, and not in specks, as the greys of a photograph."""
        pieces = sum(structure.num_pieces for _, structure in self.structures)
        return pieces * MIN_REGION <= sum(
            mask.height * mask.width // piece_stride(mask.size) ** 2 for mask, _ in self.structures
        )

    @cached_property
    def look_like_photographs(self) -> bool:
        """Whether the most frequent values have few of the pixels, and lie in specks."""
        covered = sum(pixels for _, pixels in self.counts.most_common(NUM_FREQUENT))
        return covered < FEW_COVERED * self.total and not self.has_regions and not self.are_objects

    @property
    def num_covering(self) -> float:
        """Values that have nearly all pixels of a mask, on average."""
        return sum(map(_num_covering, self.masks)) / max(1, len(self.masks))

    @property
    def num_edges(self) -> int:
        return sum(structure.edges for _, structure in self.structures)

    @property
    def are_pieces(self) -> bool:
        """Whether each value is a region of one piece, as ids of objects are, whatever their numbers or colours."""
        values, pieces = (
            sum(getattr(one, name) for _, one in self.structures) for name in ("num_values", "num_pieces")
        )
        return self.has_regions and pieces <= MAX_PIECES * values

    # Void

    @cached_property
    def last_may_be_void(self) -> bool:
        """Whether the highest value is rare, thin, beside other values and in nearly all masks."""
        last = self.seen[-1]
        with_last = [(mask, structure) for mask, structure in self.structures if max(mask.counts) == last]
        if len(with_last) < max(1, VOID_HOLDERS * len(self.structures)) or self.share(last) > MAX_VOID_SHARE:
            return False
        border = pixels = border_of_others = others = 0
        for mask, structure in with_last:
            most = max(mask.counts, key=mask.counts.__getitem__)  # large regions of a background say nothing
            if most != last:
                border += structure.border_of_last
                pixels += mask.counts[last]
                border_of_others += structure.border - structure.border_of_last - structure.border_of_most
                others += mask.height * mask.width - mask.counts[last] - mask.counts[most]
        is_thin = border >= MIN_VOID_BORDER * max(1, pixels)
        return is_thin and border * others >= THINNER * border_of_others * pixels

    @cached_property
    def may_be_trimap(self) -> bool:
        """Whether the highest of three values is a thin border between the other two, which hardly touch each other."""
        holding = [(mask, structure) for mask, structure in self.structures if self.seen[-1] in mask.counts]
        edges = sum(structure.edges for _, structure in holding)
        of_last = sum(structure.edges_of_last for _, structure in holding)
        pixels = sum(mask.counts[self.seen[-1]] for mask, _ in holding)
        side = sum(min(mask.size) for mask, _ in holding) / max(1, len(holding))
        is_between = edges - of_last <= MAX_TOUCHING * of_last
        return len(self.seen) == 3 and of_last > 0 and is_between and 2 * pixels <= MAX_BORDER_WIDTH * side * of_last

    @cached_property
    def has_outlying_void(self) -> bool:
        """Whether the highest value is 255, beside others that are close together: ids, and no greys."""
        *ids, last = self.seen
        widest = max((after - before for before, after in pairwise(ids)), default=0)
        return bool(widest) and last == VOID > ids[-1] + OUTLYING * widest and self.is_beside_classes(VOID)

    def is_beside_classes(self, value: int) -> bool:
        """Whether a value occurs in a mask that also holds another value but 0, or no mask holds such a value."""
        others = [set(mask.counts) - self.left_out - {0, value} for mask in self.masks]
        return any(held for held, mask in zip(others, self.masks, strict=True) if value in mask.counts) or not any(
            others
        )

    # Noise and groups

    @cached_property
    def id_channel(self) -> str | None:
        """The only channel of the colours that is not 0, if it holds small numbers: ids, as CARLA writes them."""
        if not self.has_colours or len(self.seen) < 3:
            return None
        most = np.max([channels_of(value) for value in self.seen], axis=0)
        return CHANNELS[int(most.argmax())] if np.count_nonzero(most) == 1 and most.max() < MAX_CHANNEL_ID else None

    @cached_property
    def noise(self) -> list[int]:
        """Rare values that occur in one mask only, and are not in a row with the others. JPEG makes many that mean
        nothing."""
        if len(self.masks) < MIN_MASKS or self.is_lossy or self.seen == list(range(len(self.seen))):
            return []
        return [value for value in self.seen if value and self.holders[value] == 1 and self.share(value) < NOISE_SHARE]

    @cached_property
    def groups(self) -> list[ValueGroup]:
        """The most frequent values, each with the values close to it, by their number of pixels."""
        values = [value for value, _ in self.counts.most_common()]
        wide = [value for value in values if 255 < value < COLOUR]  # greys of more than 8 bits: each by itself
        narrow = [value for value in values if not 255 < value < COLOUR]
        colours = np.array([channels_of(value) for value in narrow], np.int16).reshape(-1, 3)
        pixels = np.array([self.counts[value] for value in narrow], np.int64)
        is_free = np.ones(len(narrow), bool)
        found = [ValueGroup(value, 1, self.counts[value]) for value in wide[:MAX_GROUPS]]
        while is_free.any() and len(found) < MAX_GROUPS:
            first = int(np.argmax(is_free))  # the most frequent that belongs to none yet
            close = is_free & (
                np.abs(colours - colours[first]).max(axis=1) <= (EDGE_WIDTH if self.is_lossy else GROUP_WIDTH)
            )
            found.append(ValueGroup(narrow[first], int(np.count_nonzero(close)), int(pixels[close].sum())))
            is_free &= ~close
        return sorted(found, key=lambda group: -group.pixels)


def look_swapped(images: MaskEvidence, masks: MaskEvidence) -> bool:
    """Whether the images, read as masks, look like masks, and the masks like pictures: few values against many, with
    more edges between them. Line drawings have few values too, but more edges than the masks of what is in them."""
    few, many = images.num_covering, masks.num_covering
    is_richer = many >= max(MIN_PICTURE, MORE_VALUES * few) and masks.num_edges >= MORE_EDGES * images.num_edges
    return is_richer and not masks.are_objects and not masks.are_pieces


def _num_covering(mask: MaskFacts) -> int:
    pixels = np.cumsum(sorted(mask.counts.values(), reverse=True))
    return 1 + int(np.searchsorted(pixels, COVERED * pixels[-1]))


# How often each class occurs


def total_counts(masks: Sequence[MaskFacts]) -> Counter[int]:
    """Pixels of each value in all masks."""
    total: Counter[int] = Counter()
    for mask in masks:
        total.update(mask.counts)
    return total


def class_ids(counts: Mapping[int, int], coding: MaskCoding) -> dict[int, int]:
    """Class id → number of pixels, from those of each value; includes IGNORED and UNKNOWN."""
    pixels: Counter[int] = Counter()
    values = tuple(sorted(counts))
    for value, class_id in zip(values, _encoded(values, coding), strict=True):
        pixels[class_id] += counts[value]
    return dict(pixels)


@lru_cache(maxsize=1024)
def _encoded(values: tuple[int, ...], coding: MaskCoding) -> tuple[int, ...]:
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
    return class_ids(counts, coding).get(IGNORED, 0) / max(1, sum(counts.values()))


def has_background(names: Sequence[str], shares: Sequence[float]) -> bool:
    """Whether class 0 is what no class is: by its name, or, if it has none, because most pixels are of it."""
    if names[0] != UNNAMED:
        return is_background(names[0])
    return shares[0] == max(shares)


def is_background(name: str) -> bool:
    return name.lower().strip("_ ") in BACKGROUND_NAMES


class ClassRow(NamedTuple):
    """The file values that become a class, its name, and its share of the pixels that are not ignored."""

    values: str
    name: str
    share: float


def class_table(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[ClassRow]:
    """A row for each class id."""
    shares = class_shares(masks, coding, len(names))
    return [
        ClassRow(coding.describe(index), name, share)
        for index, (name, share) in enumerate(zip(names, shares, strict=True))
    ]


def describe_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> str:
    """The table in one line, with the ignored share and the reason for the coding."""
    table = [f"{row.values} → {row.name} {row.share:.1%}" for row in class_table(masks, coding, names)]
    text = ", ".join(table[:NUM_SHOWN]) + (", …" if len(table) > NUM_SHOWN else "") + " of pixels"
    if ignored := ignored_share(masks, coding):
        values = describe_ignored(coding)
        text += (
            f"; {values} {'is' if values == show_values(coding.ignored[:1]) else 'are'} ignored, "
            f"{ignored:.1%} of all pixels"
        )
    return text + (f" ({coding.reason})" if coding.reason != "mask_values" else "")


def describe_ignored(coding: MaskCoding) -> str:
    """The values that are ignored."""
    named = [show_values(coding.ignored)] if coding.ignored else []
    return " and ".join([*named, "other values"] if coding.ignores_unknown or coding.tolerance else named)


def absent_classes(masks: Sequence[MaskFacts], coding: MaskCoding, names: Sequence[str]) -> list[str]:
    """Names of the classes without any pixel."""
    return [row.name for row in class_table(masks, coding, names) if row.share == 0]


# Files that name the classes


MAX_BYTES = 256 * 1024
VOID_NAMES = frozenset(["void", "unlabeled", "unlabelled", "unlabel", "ignore", "ignored", "dontcare", "unannotated"])
NO_ID = "__ignore__"  # the first line of LabelMe's list; the ids begin with the line behind it
COLOUR_OF = r"(?P<r>\d{1,3})[\s,]+(?P<g>\d{1,3})[\s,]+(?P<b>\d{1,3})"
FORMS = {  # of every line
    "label_colors.txt": rf"{COLOUR_OF}[\s,]+(?P<name>\S.*)",  # 9 9 9 Animal
    "labelmap.txt": rf"(?P<name>[^:]+):{COLOUR_OF}(:.*)?",  # name:r,g,b:parts:actions
}
COLUMNS = {
    "class_dict.csv": ["name", "r", "g", "b"],
    "_classes.csv": ["value", "name"],
}  # of CSV files: the first of the header
SPELLINGS = {"class": "name", "label": "name", "pixel value": "value"}
# {"background": 0, "tumour": 1} or {"0": "background"}: of nnU-Net, as `labels` in it, and of Hugging Face.
JSON_NAMES = ("dataset.json", "id2label.json")
NAMES = (*JSON_NAMES, "label_colors.txt", *COLUMNS, "labelmap.txt", "class_names.txt", "codes.txt", "classes.txt")


@dataclass(frozen=True)
class NamedClass:
    """A class of a file. `value` is its number in a mask, a colour where `is_colour`; None: the file gives names
    only."""

    name: str
    value: int | None
    is_colour: bool = False

    @property
    def is_void(self) -> bool:
        return re.sub(r"[\W_]+", "", self.name).lower() in VOID_NAMES


@dataclass(frozen=True)
class ClassFile:
    path: Path
    classes: tuple[NamedClass, ...]

    @property
    def has_values(self) -> bool:
        return all(one.value is not None for one in self.classes)

    @property
    def has_colours(self) -> bool:
        return any(one.is_colour for one in self.classes)


def find_class_file(data_dir: Path, pairs: Sequence[Pair], stored: tuple[str, str] | None = None) -> ClassFile | None:
    """The first file of a known name and form, nearest to the masks; one with values before one with names only.
    `stored`: name and text of the one that shards hold."""
    if stored is not None:
        return parse_class_file(*stored)
    places = {Path(pair.mask_origin or pair.mask).parent for pair in pairs}
    above = {place for folder in places for place in (folder, *folder.parents)}
    inside = [place for place in above if data_dir in place.parents]
    folders = [*sorted(inside, key=lambda place: (-len(place.parts), str(place))), data_dir]
    found = []
    for path in (folder / name for folder in folders for name in NAMES):
        with contextlib.suppress(OSError, ValueError):
            file = parse_class_file(path, read_text(path, MAX_BYTES, "utf-8-sig"))
            found += [] if file is None else [file]
    return next((file for file in found if file.has_values), found[0] if found else None)


def parse_class_file(path: str | Path, text: str) -> ClassFile | None:
    """A file of a known name, by its text."""
    path = Path(path)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    try:
        classes = (
            _parse_labels(text) if path.name in JSON_NAMES else _parse(path.name, lines) if path.name in NAMES else []
        )
    except (ValueError, csv.Error):
        return None
    values = [one.value for one in classes if one.value is not None]
    are_distinct = len({one.name for one in classes}) == len(classes) and len(set(values)) == len(values)
    return ClassFile(path, tuple(classes)) if 2 <= len(classes) <= 256 and are_distinct else None


def _parse(name: str, lines: Sequence[str]) -> list[NamedClass]:
    """Empty for another form; raises ValueError for a line that cannot be read."""
    if name in COLUMNS:
        separator = ";" if ";" in "".join(lines[:1]) else ","
        read = csv.reader(lines, skipinitialspace=True, delimiter=separator)
        columns, rows = COLUMNS[name], [[cell.strip() for cell in row] for row in read]
        header = [SPELLINGS.get(cell.lower(), cell.lower()) for cell in rows[0]] if rows else []
        if header[: len(columns)] != columns:
            return []
        records = [dict(zip(columns, row, strict=False)) if len(row) >= len(columns) else {} for row in rows[1:]]
    elif name in FORMS:
        matches = [re.fullmatch(FORMS[name], line) for line in lines if not line.startswith("#")]
        records = [match.groupdict() if match is not None else {} for match in matches]
    else:
        # A name per line, in the order of the ids. Names without a background are those of objects in boxes.
        classes = [NamedClass(line, None) for line in lines if line != NO_ID]
        return classes if any(is_background(one.name) or one.is_void for one in classes) else []
    found = []
    for held in records:
        label, *numbers = held.pop("name", "").strip(), *held.values()
        is_colour, limit = (True, 256) if len(numbers) == 3 else (False, 2**16)
        if not label or not all(re.fullmatch(r"\d{1,5}", number) and int(number) < limit for number in numbers):
            raise ValueError(label)
        value = as_number((int(numbers[0]), int(numbers[1]), int(numbers[2]))) if is_colour else int(numbers[0])
        found.append(NamedClass(label, value, is_colour))
    return found


def _parse_labels(text: str) -> list[NamedClass]:
    content = parse_json(text)
    labels = content.get("labels", content) if isinstance(content, dict) else None
    if not isinstance(labels, dict):
        return []
    items = [
        (one, other) if isinstance(one, str) and one.isdecimal() else (other, one) for one, other in labels.items()
    ]
    if not all(str(number).isdecimal() and isinstance(name, str) and int(number) < 2**16 for number, name in items):
        return []
    return [NamedClass(name, int(number)) for number, name in sorted(items, key=lambda item: str(item[0]).zfill(9))]
