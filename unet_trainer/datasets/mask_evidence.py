"""What the values of all masks of a dataset look like together: soft edges, ids of objects, void, groups of colours,
noise; how often each class occurs; and the files that name the classes.

Each answer of MaskEvidence is for one rule of mask_reading, which decides.
"""

import contextlib
import csv
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.mask_decoding import COLOUR, IGNORED, MaskCoding, as_number, channels_of, show_values
from unet_trainer.images.mask_shapes import EDGE_WIDTH, MIN_EDGE, piece_stride
from unet_trainer.system.input_files import parse_json, read_text

VOID = 255  # beside ids
MIN_GREYS, MIN_BRIGHT = 8, 3  # two clusters: fewer greys, or a 255 alone beside ids, are classes
MIN_CLEAR_SHARE = 0.9  # of the pixels are near one end; else a grey between may be a class
MIN_BESIDE_BOTH, FEW = 0.8, 0.01  # share of the greys between that lie beside both ends, in masks with more than FEW
MAX_PIECES = 1.5  # connected pieces of an id of an object, on average: others may cover it
NUM_SCATTERED = 20  # ids that begin anywhere are as many at least: fewer may be classes in few masks
MAX_VOID_SHARE, MIN_VOID_BORDER, VOID_HOLDERS = 0.15, 0.3, 0.9  # void is rare, thin and in nearly all masks,
THINNER = 2  # and thinner than the classes: poles and vessels are thin too
NUM_FREQUENT, MIN_REGION = 12, 16  # of photographs, so many values have less than half; pixels of a piece of a class
COVERED = 0.95  # of the pixels: rarer values are edges, noise or small objects
MIN_PICTURE = 6  # values of a picture with few colours,
MORE_VALUES, MORE_EDGES = 1.5, 2  # times as many as its mask has
NOISE_SHARE, MIN_MASKS = 1e-3, 4  # rarer values in one mask only are noise, if there are so many masks
MAX_SPECKS = 10  # pieces of a colour in a mask, on average: anti-aliased edges have 20 and more, classes 3
MAX_LISTED = 40  # colours that are classes: more are soft edges, or objects
GROUP_WIDTH = 12  # colours this close to a more frequent one are listed with it
UNNAMED = "class 0"
BACKGROUND_NAME = re.compile("background|bg|back|none|nothing|unlabell?ed|void|others?|rest")
NUM_SHOWN = 8  # classes in the line that describes them


class ValueGroup(NamedTuple):
    """A frequent value and those close to it."""

    value: int
    num_values: int
    pixels: int


class MaskEvidence:
    """The values of all masks, without those that are ignored or set aside."""

    def __init__(self, masks: Sequence[MaskFacts], ignored: Collection[int] = (), noise: Collection[int] = ()) -> None:
        self.masks = masks
        self.structures = [(mask, mask.structure) for mask in masks if mask.structure is not None]
        self.ignored = frozenset(ignored)  # by ignore_value
        self.left_out = self.ignored | set(noise)
        self.counts = total_counts(masks)
        self.holders = Counter(value for mask in masks for value in mask.counts)  # masks that hold each value
        for value in self.left_out:
            del self.counts[value], self.holders[value]
        self.seen = sorted(self.counts)
        self.total = sum(self.counts.values())
        self.has_colours = bool(self.seen) and self.seen[-1] >= COLOUR
        self.is_lossy = any(mask.is_lossy for mask in masks)

    def share(self, *values: int) -> float:
        return sum(self.counts[value] for value in values) / max(1, self.total)

    @cached_property
    def shown(self) -> dict[int, int]:
        """Of masks with a palette, the colour of each value, 0xRRGGBB."""
        return {value: colour for mask in self.masks for value, colour in (mask.palette or {}).items()}

    def edge_threshold(self) -> int | None:
        """The middle between the darkest and the brightest value if the greys between are soft edges, or those of
        JPEG."""
        low, high = self.seen[0], self.seen[-1]
        bright = [value for value in self.seen if high - value <= EDGE_WIDTH]
        if len(self.seen) < MIN_GREYS or high > 255 or high - low < MIN_EDGE or len(bright) < MIN_BRIGHT:
            return None
        top, bottom = self.share(*bright), self.share(*(value for value in self.seen if value - low <= EDGE_WIDTH))
        if top + bottom < max(MIN_CLEAR_SHARE, 1 - top):  # more pixels between than bright ones are no edges
            return None
        for mask, its in self.structures:
            if its.between > FEW * mask.height * mask.width and its.beside_both < MIN_BESIDE_BOTH * its.between:
                return None
        between = self._sum("between")
        is_edge = self._sum("beside_both") >= MIN_BESIDE_BOTH * between or between < NOISE_SHARE * self.total
        return (low + high) // 2 if is_edge else None

    # Ids of objects

    def _sum(self, name: str) -> int:
        return sum(getattr(structure, name) for _, structure in self.structures)

    @cached_property
    def are_objects(self) -> bool:
        """Whether the values but 0 number objects: each is one piece, and k occurs where 1 to k-1 do, or in few
        masks."""
        sets = [held for mask in self.masks if (held := set(mask.counts) - self.left_out - {0})]
        order = sorted(set().union(*sets), key=lambda value: (-self.holders[value], value))
        num_held, sizes = sum(map(len, sets)), {len(held) for held in sets}
        if 0 not in self.counts or not self._sum("num_values") or (max(sizes, default=0) < 3 and num_held > len(order)):
            return False
        # Nested: the n values of a mask are the n that most masks hold, but for a tenth of them.
        num_nested = sum(len(held - set(order[: len(held)])) <= len(held) // 10 for held in sets)
        is_nested = len(sizes) >= 3 and num_nested >= 0.95 * len(sets)
        if self._sum("num_pieces") > MAX_PIECES * self._sum("num_values"):
            return is_nested and len(sizes) >= 6  # 1 to n for so many n are objects, however many pieces they have
        return is_nested or (len(order) >= NUM_SCATTERED and 2 * num_held <= len(order) * len(sets))

    @property
    def occur_once(self) -> bool:
        """Whether half of the values but 0 occur in one mask only, so that they can hardly be classes."""
        held = [self.holders[value] for value in self.seen if value != 0]
        return len(self.masks) >= MIN_MASKS and 2 * held.count(1) >= len(held)

    @property
    def has_regions(self) -> bool:
        """Whether the values lie in regions, as classes do, and not in specks, as the greys of a photograph."""
        pixels = sum(mask.height * mask.width // piece_stride(mask.size) ** 2 for mask, _ in self.structures)
        return self._sum("num_pieces") * MIN_REGION <= pixels

    @cached_property
    def look_like_photographs(self) -> bool:
        """Whether the most frequent values have few of the pixels, and lie in specks."""
        covered = sum(pixels for _, pixels in self.counts.most_common(NUM_FREQUENT))
        return 2 * covered < self.total and not self.has_regions and not self.are_objects

    @property
    def num_covering(self) -> float:
        """Values that have nearly all pixels of a mask, on average."""
        counts = [np.cumsum(sorted(mask.counts.values(), reverse=True)) for mask in self.masks]
        return sum(1 + int(np.searchsorted(of, COVERED * of[-1])) for of in counts) / max(1, len(counts))

    @property
    def are_pieces(self) -> bool:
        """Whether each value is a region of one piece, as ids of objects are, whatever their numbers or colours."""
        return self.has_regions and self._sum("num_pieces") <= MAX_PIECES * self._sum("num_values")

    @property
    def num_edges(self) -> int:
        return self._sum("edges")

    # Void

    @cached_property
    def last_may_be_void(self) -> bool:
        """Whether the highest value is rare, thin, beside other values and in nearly all masks."""
        last = self.seen[-1]
        holding = [(mask, its) for mask, its in self.structures if max(mask.counts) == last]
        if len(holding) < max(1, VOID_HOLDERS * len(self.structures)) or self.share(last) > MAX_VOID_SHARE:
            return False
        border = pixels = border_of_others = others = 0
        for mask, its in holding:
            most = max(mask.counts, key=mask.counts.__getitem__)  # large regions of a background say nothing
            if most != last:
                border, pixels = border + its.border_of_last, pixels + mask.counts[last]
                border_of_others += its.border - its.border_of_last - its.border_of_most
                others += mask.height * mask.width - mask.counts[last] - mask.counts[most]
        is_thin = border >= MIN_VOID_BORDER * max(1, pixels)
        return is_thin and border * others >= THINNER * border_of_others * pixels

    def is_beside_classes(self, value: int) -> bool:
        """Whether a value occurs in a mask that also holds another value but 0, or no mask holds such a value."""
        others = [(mask, set(mask.counts) - self.left_out - {0, value}) for mask in self.masks]
        return any(held for mask, held in others if value in mask.counts) or not any(held for _, held in others)

    # Noise and groups

    @cached_property
    def noise(self) -> list[int]:
        """Rare values in one mask only that are not in a row with the others. JPEG makes many that mean nothing."""
        if len(self.masks) < MIN_MASKS or self.is_lossy or self.are_objects or self.seen == [*range(len(self.seen))]:
            return []
        return [value for value in self.seen if value and self.holders[value] == 1 and self.share(value) < NOISE_SHARE]

    @property
    def has_soft_edges(self) -> bool:
        """Whether values are changed beside edges: by JPEG, or colours that are close to others or lie in specks."""
        is_in_specks = self._sum("num_pieces") > MAX_SPECKS * self._sum("num_values")
        return self.is_lossy or (self.has_colours and (is_in_specks or len(self.groups) < len(self.seen)))

    @cached_property
    def groups(self) -> list[ValueGroup]:
        """The most frequent values, each with the values close to it, by their number of pixels."""
        values = [value for value, _ in self.counts.most_common()]
        colours = np.array([channels_of(value) for value in values], np.int64).reshape(-1, 3)
        pixels, is_free = np.array([self.counts[value] for value in values], np.int64), np.ones(len(values), bool)
        width, groups = EDGE_WIDTH if self.is_lossy else GROUP_WIDTH, list[ValueGroup]()
        while is_free.any() and len(groups) <= MAX_LISTED:
            first = int(np.argmax(is_free))  # the most frequent that belongs to none yet
            near = width if colours[first].max() <= 255 else 0  # a grey of more than 8 bits has none that is close
            close = is_free & (np.abs(colours - colours[first]).max(axis=1) <= near)
            groups.append(ValueGroup(values[first], int(np.count_nonzero(close)), int(pixels[close].sum())))
            is_free &= ~close
        return sorted(groups, key=lambda group: -group.pixels)


# How often each class occurs


def look_swapped(images: MaskEvidence, masks: MaskEvidence) -> bool:
    """Whether the images, read as masks, look like masks, and the masks like pictures: few values against many, with
    more edges between them. Line drawings have few values too, but more edges than the masks of what is in them."""
    few, many = images.num_covering, masks.num_covering
    is_richer = many >= max(MIN_PICTURE, MORE_VALUES * few) and masks.num_edges >= MORE_EDGES * images.num_edges
    return is_richer and not masks.are_objects and not masks.are_pieces


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
    """Whether class 0 is the background: by its name, or, if it has none, because most pixels are of it."""
    return shares[0] == max(shares) if names[0] == UNNAMED else is_background(names[0])


def is_background(name: str) -> bool:
    return BACKGROUND_NAME.fullmatch(name.lower().strip("_ ")) is not None


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


# Files that name the classes


MAX_BYTES = 256 * 1024
VOID_NAMES = frozenset(["void", "unlabeled", "unlabelled", "unlabel", "ignore", "ignored", "dontcare", "unannotated"])
NO_ID = "__ignore__"  # the first line of LabelMe's list; the ids begin with the line behind it
COLOUR_OF = r"(?P<r>\d+)[\s,]+(?P<g>\d+)[\s,]+(?P<b>\d+)"
# The forms of a line: `9 9 9 Animal`, `name:r,g,b:parts:actions`; of CSV files, the columns.
FORMS = {"label_colors.txt": rf"{COLOUR_OF}[\s,]+(?P<name>\S.*)", "labelmap.txt": rf"(?P<name>[^:]+):{COLOUR_OF}(:.*)?"}
COLUMNS = {"class_dict.csv": ["name", "r", "g", "b"], "_classes.csv": ["value", "name"]}
SPELLINGS = {"class": "name", "label": "name", "pixel value": "value"}
# {"background": 0, "tumour": 1} or {"0": "background"}: of nnU-Net, as `labels` in it, and of Hugging Face.
JSON_NAMES = ("dataset.json", "id2label.json")
NAMES = (*JSON_NAMES, *FORMS, *COLUMNS, "class_names.txt", "codes.txt", "classes.txt")


@dataclass(frozen=True)
class NamedClass:
    """A class of a file. `value` is its number in a mask, a colour where `is_colour`; None: the file has names only."""

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
    inside = {each for place in places for each in (place, *place.parents) if data_dir in each.parents}
    found: list[ClassFile] = []
    for folder in (*sorted(inside, key=lambda place: (-len(place.parts), str(place))), data_dir):
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError):
                file = parse_class_file(folder / name, read_text(folder / name, MAX_BYTES, "utf-8-sig"))
                found += [] if file is None else [file]
    return next((file for file in found if file.has_values), found[0] if found else None)


def parse_class_file(path: str | Path, text: str) -> ClassFile | None:
    """A file of a known name, by its text; None if it has another form."""
    path = Path(path)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    try:
        records = _parse_json(text) if path.name in JSON_NAMES else _parse_lines(path.name, lines)
        classes = tuple(_named_class(**record) for record in records)
    except (ValueError, TypeError, csv.Error):  # a cell too many, or a line in another form
        return None
    values = [one.value for one in classes if one.value is not None]
    are_distinct = len({one.name for one in classes}) == len(classes) and len(set(values)) == len(values)
    return ClassFile(path, classes) if 2 <= len(classes) <= 256 and are_distinct else None


def _named_class(name: str, value: str | None = None, **channels: str) -> NamedClass:
    numbers = [int(text) for text in (channels.values() if value is None else [value])]
    if not name or not all(0 <= number < (256 if channels else 2**16) for number in numbers):
        raise ValueError(name)
    if channels:
        return NamedClass(name, as_number((numbers[0], numbers[1], numbers[2])), True)
    return NamedClass(name, numbers[0] if numbers else None)


def _parse_lines(name: str, lines: Sequence[str]) -> list[dict[str, Any]]:
    """Name and value, or red, green and blue, of each class."""
    if name in COLUMNS:
        columns, separator = COLUMNS[name], ";" if ";" in "".join(lines[:1]) else ","
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True, delimiter=separator)]
        header = [SPELLINGS.get(cell.lower(), cell.lower()) for cell in rows[0]] if rows else []
        is_known = header[: len(columns)] == columns and all(len(row) >= len(columns) for row in rows)
        return [dict(zip(columns, row, strict=False)) for row in rows[1:]] if is_known else []
    if name in FORMS:
        matches = [re.fullmatch(FORMS[name], line) for line in lines if not line.startswith("#")]
        return [match.groupdict() for match in matches if match is not None] if all(matches) else []
    # A name per line, in the order of the ids. Names without a background are those of objects in boxes.
    names = [line for line in lines if line != NO_ID] if name in NAMES else []
    has_rest = any(is_background(each) or NamedClass(each, None).is_void for each in names)
    return [{"name": each} for each in names] if has_rest else []


def _parse_json(text: str) -> list[dict[str, Any]]:
    content = parse_json(text)
    labels = content.get("labels", content) if isinstance(content, dict) else None
    items = labels.items() if isinstance(labels, dict) else ()
    named = [(key, value) if key.isdecimal() else (value, key) for key, value in items]
    if not all(str(number).isdecimal() and isinstance(name, str) for number, name in named):
        return []
    return [{"name": name, "value": str(number)} for number, name in sorted(named, key=lambda item: int(item[0]))]
