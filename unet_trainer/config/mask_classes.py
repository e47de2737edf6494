"""How mask_values and ignore_value are written: a value, a colour, or several of them that are one class.

5                                 a value in the file
[64, 0, 128]                      a colour: a list of three numbers always is one
[1, 2]                            two values, one class; likewise four and more
[[1], [2], [3]]                   three values, one class
[[64, 0, 128], [64, 0, 192], 7]   two colours and a value, one class
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from unet_trainer.config.parsers import MAX_ITEMS, Range, is_list, list_items, parse
from unet_trainer.config.safe_yaml import parse_number

MaskValue = int | tuple[int, int, int]  # a value in the file, or red, green, blue
MaskClass = int | tuple[Any, ...]  # a MaskValue, or a tuple of several, in which a value may be a tuple of one
MaskValues = str | tuple[MaskClass, ...]  # auto, nonzero, "above N", or what becomes each class, in class order

COLOUR_LENGTH = 3
MAX_VALUE = 65535
VALUE, CHANNEL = Annotated[int, Range(0, MAX_VALUE)], Annotated[int, Range(0, 255)]


def parse_mask_values(raw: Any) -> MaskValues:
    """`auto`, `nonzero`, `above 127`, or a list with what becomes each class."""
    if isinstance(raw, str):
        name, _, threshold = raw.strip().partition(" ")
        if raw.strip() in ("auto", "nonzero"):
            return raw.strip()
        number = parse_number(threshold)
        if name == "above" and number is not None and number in range(MAX_VALUE):
            return f"above {int(number)}"
        raise ValueError
    classes = list_items(raw)
    if not 2 <= len(classes) <= MAX_ITEMS:
        raise ValueError
    return tuple(parse_mask_class(item) for item in classes)


def parse_mask_class(raw: Any) -> MaskClass:
    """A value, a colour, or a list of several."""
    if not is_list(raw):
        return int(parse(raw, VALUE))
    items = list(raw)
    if not items:
        raise ValueError
    if len(items) == COLOUR_LENGTH and not any(is_list(item) for item in items):
        return _parse_colour(items)
    return join_values([_parse_value(item) for item in items])


def _parse_value(raw: Any) -> MaskValue:
    """Of a list of several: a value, a value in brackets, or a colour."""
    items = list(raw) if is_list(raw) else [raw]
    if len(items) == 1:
        return int(parse(items[0], VALUE))
    if len(items) != COLOUR_LENGTH:
        raise ValueError
    return _parse_colour(items)


def _parse_colour(items: Sequence[Any]) -> tuple[int, int, int]:
    try:
        red, green, blue = (int(parse(item, CHANNEL)) for item in items)
    except ValueError:
        if any(is_list(item) for item in items):
            raise
        shown = ", ".join(str(item) for item in items)
        apart = ", ".join(f"[{item}]" for item in items)
        raise ValueError(f"[{shown}] would be a colour, each from 0 to 255; three values of one class are [{apart}]") from None
    return red, green, blue


def join_values(values: Sequence[MaskValue]) -> MaskClass:
    """Several values as one class, in the form that reads back the same."""
    if len(values) == 1:
        return values[0]
    if len(values) == COLOUR_LENGTH and all(isinstance(value, int) for value in values):
        return tuple((value,) for value in values)  # three bare numbers would be a colour
    return tuple(values)


def split_values(mask_class: MaskClass) -> tuple[MaskValue, ...]:
    """The values and colours that are one class."""
    if isinstance(mask_class, int):
        return (mask_class,)
    if len(mask_class) == COLOUR_LENGTH and all(isinstance(item, int) for item in mask_class):
        red, green, blue = mask_class
        return ((red, green, blue),)
    return tuple(item[0] if isinstance(item, tuple) and len(item) == 1 else item for item in mask_class)


def as_grey(value: MaskValue) -> MaskValue:
    """A grey colour as its brightness, which is the same value in a mask; any other as it is."""
    return value[0] if isinstance(value, tuple) and value[0] == value[1] == value[2] else value


def implied_num_classes(
    class_names: Sequence[str] | None, class_weights: Sequence[float] | str | None, mask_values: MaskValues
) -> int | None:
    """The number of classes that other settings leave no choice about; None where the masks decide it."""
    if class_names:
        return len(class_names)
    if class_weights is not None and not isinstance(class_weights, str):
        return len(class_weights)
    if isinstance(mask_values, str):
        return None if mask_values == "auto" else 1
    return 1 if len(mask_values) == 2 else len(mask_values)
