"""Masks: the file of a mask → its values → class ids. A value is a whole number as it is in the file. A colour is one
number too: a grey one is its brightness, any other is COLOUR + 0xRRGGBB."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from unet_trainer.config.parsers import MaskClass, MaskValue, MaskValues, join_values, split_values
from unet_trainer.images.file_bytes import ReadError, read_bytes
from unet_trainer.images.image_decoding import PNG_PALETTE, EncodedImage, Pixels, decode_array, mask_values_of
from unet_trainer.images.tiff_files import read_errors

COLOUR = 1 << 24  # a colour that is not grey is the number COLOUR + 0xRRGGBB
IGNORED = 255  # id of pixels that count in no loss and no metric: void, padding
UNKNOWN = 254  # id of values that belong to no class; never reaches a batch


def read_mask(path: Path) -> Pixels:
    """See decode_mask_or_alpha."""
    return decode_mask(read_bytes(path))


def decode_mask(data: bytes) -> Pixels:
    """See decode_mask_or_alpha."""
    return decode_mask_or_alpha(EncodedImage(data))[0]


def decode_mask_or_alpha(file: EncodedImage) -> tuple[Pixels, bool]:
    """H,W whole numbers as they are in the file: uint8 or uint16, of a palette the index; int32 for colours. And
    whether they are the alpha channel: they are, of a picture in one colour with holes in it."""
    with read_errors():
        mask = _decode_mask_values(file)
        if file.channels_with_alpha and (mask == mask.flat[0]).all():
            alpha = np.ascontiguousarray(file.decode(channels=file.channels_with_alpha)[:, :, -1])
            if alpha.min() < alpha.max() or alpha.max() == 0 != mask.flat[0]:  # all invisible: an image without objects
                return alpha, True
        return mask, False


def _decode_mask_values(file: EncodedImage) -> Pixels:
    if file.kind == "TIFF":
        mask = file.open_tiff().read_all(as_ids=True)
        return _palette_values(mask[:, :, 0], file) if file.palette else whole_numbers(mask)
    if file.kind == "NPY":
        return whole_numbers(np.squeeze(decode_array(file.data)))
    if file.kind == "GIF":  # each file has a palette of its own: the colour is the value, not the index
        return np.ascontiguousarray(_join_colours(file.with_pil("RGB")))
    if file.palette or file.png_colours == PNG_PALETTE:  # of a broken one, PIL says what is wrong
        return _palette_values(file.with_pil(), file)
    mask = file.with_opencv()  # applies EXIF rotation, as for images
    if file.png_bits in (2, 4):  # OpenCV scales values of few bits to 255
        mask = mask // (255 // (2**file.png_bits - 1))
    return whole_numbers(mask[:, :, ::-1] if mask.ndim == 3 else mask)


def _palette_values(indices: Pixels, file: EncodedImage) -> Pixels:
    values = mask_values_of(file.palette)
    return 1 - indices if values[:2] == [1, 0] and indices.max() <= 1 else indices


def whole_numbers(mask: Pixels) -> Pixels:
    """H,W or H,W,C → H,W uint8, uint16 or, for colours, int32; raises ReadError for anything else."""
    mask = mask.astype(np.uint8) if mask.dtype == np.bool_ else mask
    depth = mask.dtype
    if mask.ndim == 3 and mask.shape[2] in (1, 3):
        mask = mask[:, :, 0] if mask.shape[2] == 1 else _join_colours(mask)
    if mask.ndim != 2 or mask.size == 0:
        raise ReadError(f"an array of shape {mask.shape}; a mask has one value, or a colour, for each pixel")
    if mask.dtype == np.uint8 or mask.dtype != depth:  # colours
        return np.ascontiguousarray(mask)
    low, high = mask.min().item(), mask.max().item()
    if np.isnan(low):
        raise ReadError(f"{np.isnan(mask).sum():,} values are NaN; need whole numbers from 0 to 65535")
    if not (low >= 0 and high <= 65535 and (mask.dtype.kind in "ui" or (mask == np.floor(mask)).all())):
        raise ReadError(f"{mask.dtype} values from {low} to {high}; need whole numbers from 0 to 65535")
    return np.ascontiguousarray(mask.astype(np.uint8 if high <= 255 else np.uint16))


def _join_colours(channels: Pixels) -> Pixels:
    """H,W,3 RGB → H,W: the brightness of grey pixels, COLOUR + 0xRRGGBB for others."""
    red, green, blue = np.moveaxis(channels, 2, 0)
    is_grey = (blue == green) & (green == red)
    if is_grey.all():
        return blue
    if channels.dtype != np.uint8:
        raise ReadError(f"a colour mask of {channels.dtype}; need 8 bit")
    joined = COLOUR + (red.astype(np.int32) << 16) + (green.astype(np.int32) << 8) + blue
    return np.where(is_grey, blue, joined).astype(np.int32)


@dataclass(frozen=True)
class MaskCoding:
    """Value → class id: by the values of each class, or by a threshold (higher values are class 1)."""

    values: tuple[int, ...] | None  # by class id, the value that stands for the class; None: by threshold
    threshold: int = 0
    ignore_value: int | tuple[int, ...] | None = None
    merged: tuple[tuple[int, ...], ...] = ()  # by class id, its further values; empty: no class has any
    ignores_unknown: bool = False  # values that belong to no class are IGNORED, not UNKNOWN
    tolerance: int = 0  # a value this close to one of a class, in each channel, is of that class; others are IGNORED
    reason: str = field(default="mask_values", compare=False)

    @cached_property
    def lookup(self) -> Pixels:
        """256 ids, for 8-bit masks."""
        return self._encode(np.arange(256))

    @property
    def ignored(self) -> tuple[int, ...]:
        """All values that are ignored."""
        return (self.ignore_value,) if isinstance(self.ignore_value, int) else self.ignore_value or ()

    @property
    def num_ids(self) -> int:
        return 2 if self.values is None else len(self.values)

    def values_of(self, class_id: int) -> tuple[int, ...]:
        """All values of a class; only where classes are told by value."""
        assert self.values is not None
        return (self.values[class_id], *(self.merged and self.merged[class_id]))

    @property
    def known_values(self) -> list[int]:
        """Of all classes, and those that are ignored; only where classes are told by value."""
        return [*self._known]

    @cached_property
    def _known(self) -> dict[int, int]:
        """The id of every value that has a meaning; values are sorted."""
        ids = {value: class_id for class_id in range(self.num_ids) for value in self.values_of(class_id)}
        return dict(sorted((ids | dict.fromkeys(self.ignored, IGNORED)).items()))

    def encode(self, mask: Pixels) -> Pixels:
        """H,W values of a file → H,W uint8 ids, with IGNORED and UNKNOWN."""
        if mask.dtype == np.uint8 and mask.ndim == 2:
            return cv2.LUT(mask, self.lookup)  # ten times faster than indexing
        return self._encode(mask)

    def _encode(self, mask: Pixels) -> Pixels:
        if self.values is None:
            ids = (mask > self.threshold).astype(np.uint8)
            ids[np.isin(mask, self.ignored)] = IGNORED
            return ids
        if self.tolerance:
            return self._encode_nearby(mask.astype(np.int32))
        values, ids = np.array([*self._known]), np.array([*self._known.values()], np.uint8)
        position = np.searchsorted(values, mask).clip(max=len(values) - 1)
        return np.where(values[position] == mask, ids[position], np.uint8(IGNORED if self.ignores_unknown else UNKNOWN))

    def _encode_nearby(self, mask: Pixels) -> Pixels:
        colours = np.where(mask >= COLOUR, mask - COLOUR, np.minimum(mask, 255) * 0x010101)
        ids = _nearby_table(tuple(self._known.items()), self.tolerance)[colours]
        for value in np.unique(mask[(mask > 255) & (mask < COLOUR)]).tolist():  # close to itself alone
            ids[mask == value] = self._known.get(value, IGNORED)
        return ids

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint holds them."""
        return {item.name: as_lists(getattr(self, item.name)) for item in fields(self) if item.compare}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "MaskCoding":
        """Checkpoints of earlier versions hold the first three only."""
        return MaskCoding(**{name: as_tuples(value) for name, value in content.items()})

    @property
    def mask_values(self) -> MaskValues:
        """As the config writes it."""
        if self.values is not None:
            return tuple(as_written(self.values_of(class_id)) for class_id in range(len(self.values)))
        return "nonzero" if self.threshold == 0 else f"above {self.threshold}"

    @property
    def written_ignore_value(self) -> MaskClass | None:
        """As the config writes it."""
        return as_written(self.ignored) if self.ignored else None

    def describe(self, class_id: int) -> str:
        """Which values in the file become this class."""
        if self.values is not None:
            return show_values(self.values_of(class_id))
        return f"{'>' if class_id else '≤'} {self.threshold}" if self.threshold else ("not 0" if class_id else "0")


def as_lists(value: Any) -> Any:
    return [as_lists(item) for item in value] if isinstance(value, tuple) else value


def as_tuples(value: Any) -> Any:
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def given_coding(
    mask_values: str | Sequence[MaskClass],
    ignore_value: MaskClass | None = None,
    ignores_unknown: bool = False,
    tolerance: int = 0,
    reason: str = "mask_values",
) -> MaskCoding:
    """The coding that the config writes so; mask_values is not auto."""
    ignored = () if ignore_value is None else tuple(map(as_number, split_values(ignore_value)))
    joined = (ignored[0] if len(ignored) == 1 else ignored) if ignored else None
    if isinstance(mask_values, str):
        threshold = 0 if mask_values == "nonzero" else int(mask_values.removeprefix("above "))
        return MaskCoding(None, threshold, joined, ignores_unknown=ignores_unknown, reason=reason)
    classes = [tuple(map(as_number, split_values(mask_class))) for mask_class in mask_values]
    values, merged = tuple(first for first, *_ in classes), tuple(others for _, *others in classes)
    further = tuple(map(tuple, merged)) if any(merged) else ()
    return MaskCoding(values, 0, joined, further, ignores_unknown, tolerance, reason)


def as_number(value: MaskValue) -> int:
    """A value or colour in the config → its number in a mask."""
    if isinstance(value, int):
        return value
    red, green, blue = value
    return red if red == green == blue else COLOUR + (red << 16) + (green << 8) + blue


def as_written(values: Iterable[int]) -> MaskClass:
    """Numbers in a mask that are one class, as the config writes them."""
    return join_values([channels_of(value) if value >= COLOUR else value for value in values])


def channels_of(value: int) -> tuple[int, int, int]:
    """Red, green and blue of a colour or an 8-bit grey."""
    if value < COLOUR:
        return value, value, value
    return (value >> 16) & 255, (value >> 8) & 255, value & 255


def show_value(value: int) -> str:
    """As the config writes it: a colour is [255, 0, 0]."""
    return str(list(channels_of(value))) if value >= COLOUR else str(value)


def show_values(values: Iterable[int]) -> str:
    return ", ".join(show_value(value) for value in values)


def distance(one: int, other: int) -> int:
    """The largest difference of a channel. Values of more than 8 bits are close to themselves alone."""
    if any(255 < value < COLOUR for value in (one, other)):
        return 0 if one == other else COLOUR
    return max(abs(first - second) for first, second in zip(channels_of(one), channels_of(other), strict=True))


def largest_tolerance(values: Sequence[int]) -> int:
    """With this tolerance or a smaller one, no value is close to two of these."""
    apart = min((distance(one, other) for index, one in enumerate(values) for other in values[:index]), default=COLOUR)
    return min(255, (apart - 1) // 2)


@lru_cache(maxsize=2)
def _nearby_table(known: tuple[tuple[int, int], ...], tolerance: int) -> Pixels:
    """Id by 0xRRGGBB. Costs 16 MiB and is read ten times faster than distances are computed."""
    table = np.full((256, 256, 256), IGNORED, np.uint8)
    for value, class_id in known:
        if value <= 255 or value >= COLOUR:
            near = tuple(slice(max(0, channel - tolerance), channel + tolerance + 1) for channel in channels_of(value))
            table[near] = class_id
    return table.reshape(-1)
