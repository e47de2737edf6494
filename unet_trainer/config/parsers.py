"""Raw input (text of YAML or the command line, or Python objects) as typed values, and what to write instead.

pydantic checks types and bounds; here is what it does not know: how our YAML writes numbers, and values of their own
form. Each function raises ValueError, with a text where the words of its type do not say all.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unet_trainer.config.errors import UserError
from unet_trainer.config.safe_yaml import interpret, map_leaves, parse_number
from unet_trainer.system.input_files import read_text

MaskValue = int | tuple[int, int, int]  # a value in the file, or red, green, blue
MaskClass = int | tuple[Any, ...]  # a MaskValue, or a tuple of several, in which a value may be a tuple of one
MaskValues = str | tuple[MaskClass, ...]  # auto, nonzero, "above N", or what becomes each class, in class order

COLOUR_LENGTH = 3
JITTER_NAME = "IntensityJitter"  # in a list of transforms, the one that albumentations does not have
SMALL_RESNET = "small_resnet"  # of model/network.py
ENCODERS = {"auto", SMALL_RESNET, "tu-mobilenetv3_small_100", "tu-mobilenetv3_small_050"}  # and those of the library
# Those of TERMS in model/losses.py, which imports torch: a typo is answered before that.
LOSSES = ("dice", "iou", "cross_entropy", "bce", "focal", "tversky", "lovasz", "own")


def near_miss(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to the word; None if none is."""
    word = word.lower()

    def similarity(name: str) -> tuple[float, int]:  # of equally similar names, the one with the longer common prefix
        return difflib.SequenceMatcher(None, name, word).ratio(), len(os.path.commonprefix([name, word]))  # noqa: RUF071 (letters)

    return max(difflib.get_close_matches(word, [*known], n=5, cutoff=0.7), key=similarity, default=None)


def number(raw: Any) -> float:
    value: Any = parse_number(raw) if isinstance(raw, str) else raw
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError
    return float(value)


def whole_number(raw: Any) -> int:
    value = number(raw)
    if value != int(value) or abs(value) > 2**31:
        raise ValueError
    return int(value)


def text(raw: Any, may_be_empty: bool = False) -> str:
    """Without a NUL, which no path may have, and half of a surrogate pair, which no UTF-8 file may have."""
    word = os.fspath(raw) if isinstance(raw, os.PathLike) else raw
    if not isinstance(word, str) or re.search("[\0\ud800-\udfff]", word) or not (may_be_empty or word.strip()):
        raise ValueError
    return os.path.expanduser(word) if word.startswith("~/") else str(word)  # noqa: PTH111 (of text that may be no path)


def tile_side(raw: Any, key: str) -> int:
    """Of an option of a command, named by its key; raises UserError."""
    if not str(raw).isdecimal() or int(raw) % 32 or not 32 <= int(raw) <= 8192:
        raise UserError(f"{key}: got {raw}; need a multiple of 32 from 32 to 8192, e.g. 256")
    return int(raw)


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return text


def folder_name(name: str) -> str:
    if re.search(r"[/\\\n\r]", name) or name.strip() in (".", "..") or len(name.encode()) > 200:
        raise ValueError
    return name


@cache
def _names_in_text(package: str, files: str, pattern: str) -> list[str]:
    """Names that a pattern finds in the files of a package, which takes seconds to import; none if it has no text."""
    library = find_spec(package)
    paths = Path(library.origin).parent.glob(files) if library and library.origin else ()
    return re.findall(pattern, "\n".join(map(read_text, paths)), re.MULTILINE)


def encoder_name(name: str) -> str:
    """auto, or an encoder of segmentation-models-pytorch, which knows those of timm as tu-NAME."""
    known = _names_in_text("segmentation_models_pytorch", "encoders/*.py", r'^    "([\w-]+)": \{$')
    if name in ENCODERS or name in known:
        return name
    import segmentation_models_pytorch as smp  # seconds
    import timm

    if name in smp.encoders.encoders or (name.startswith("tu-") and timm.is_model(name[3:])):
        return name
    meant = near_miss(name, [*smp.encoders.encoders, *(f"tu-{model}" for model in timm.list_models())])
    raise ValueError(f"did you mean {meant}?" if meant else "tu-NAME takes any model of timm")


def duration(text: str) -> str:
    """`90s`, `10m`, `1h30m`: kept as text; seconds_of reads it."""
    text = text.strip().lower()
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text) or not 0 < seconds_of(text) < 1e9:
        raise ValueError
    return text


def seconds_of(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))


def describe_seconds(seconds: float) -> str:
    """3.2 s, 42 s, 12 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def weighted_losses(raw: Any) -> Mapping[str, Any]:
    """`dice`, or `{dice: 1, bce: 0.5}`: always a dict of name → weight."""
    terms = {str(raw): 1.0} if isinstance(raw, str) else raw
    if not isinstance(terms, Mapping) or not terms:
        raise ValueError
    for name in terms:
        if name not in LOSSES:
            meant = near_miss(str(name), LOSSES)
            what = f"did you mean {meant}?" if meant else "unknown"
            raise ValueError("" if isinstance(raw, str) else f"{name}: {what}")
    return terms


def transform_list(raw: Any) -> tuple[Any, ...]:
    """A list of transforms: `Name`, or `{Name: {parameter: value}}`; check_transforms knows the names."""
    if not isinstance(raw, list | tuple):
        raise ValueError
    items = map_leaves(_parameter, raw)
    for item in items:
        is_named = isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item.values())), dict | None)
        if not isinstance(item, str) and not is_named:
            raise ValueError
    return tuple(items)


def _parameter(raw: Any) -> Any:
    """Of a transform: it must survive being written to config.yaml and read back."""
    value = interpret(raw)
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError("parameters are numbers, text, true, false or null, or lists of them")
    return value


def unknown_transforms(entries: Any) -> Iterator[str]:
    """A message for each name that albumentations does not have, without importing it, and torch with it. What has
    another form is refused where the transforms are made."""
    for entry in entries if isinstance(entries, list | tuple) else ():
        known = _names_in_text("albumentations", "**/*.py", r"^class (\w+)\(")
        for name, parameters in entry.items() if isinstance(entry, dict) else [(entry, None)]:
            if known and isinstance(name, str) and name not in (JITTER_NAME, *known):
                yield unknown_transform(name, [JITTER_NAME, *known])
            if isinstance(parameters, dict):
                yield from unknown_transforms(parameters.get("transforms"))


def unknown_transform(name: str, known: Iterable[str]) -> str:
    proper = {word.lower(): word for word in sorted(known)}
    meant = near_miss(name, proper)
    return f"unknown transform {name!r}; " + (f"did you mean {proper[meant]}?" if meant else "see albumentations' list")


def mask_values(raw: Any) -> MaskValues:
    """`auto`, `nonzero`, `above 127`, or a list with what becomes each class."""
    if isinstance(raw, str):
        name, _, threshold = raw.strip().partition(" ")
        if name == "above" and whole_number(threshold) in range(65535):
            return f"above {whole_number(threshold)}"
        if raw.strip() not in ("auto", "nonzero"):
            raise ValueError
        return raw.strip()
    if not isinstance(raw, list) or not 2 <= len(raw) <= 256:
        raise ValueError
    return tuple(map(mask_class, raw))


def mask_class(raw: Any) -> MaskClass:
    """5: a value in the file. [64, 0, 128]: a colour, as a list of three numbers always is. [1, 2]: two values that are
    one class. [[1], [2], [3]]: three. [[64, 0, 128], [64, 0, 192], 7]: two colours and a value."""
    if not isinstance(raw, list) or (len(raw) == COLOUR_LENGTH and not any(isinstance(item, list) for item in raw)):
        return _mask_value(raw)
    if not raw:
        raise ValueError
    return join_values([_mask_value(item) for item in raw])


def _mask_value(raw: Any) -> MaskValue:
    """A value, a value in brackets, or a colour."""
    items = raw if isinstance(raw, list) else [raw]
    is_colour = len(items) == COLOUR_LENGTH
    try:
        values = [whole_number(item) for item in items]
        if not (is_colour or len(items) == 1) or min(values) < 0 or max(values) > (255 if is_colour else 65535):
            raise ValueError
    except ValueError:
        apart = ", ".join(f"[{item}]" for item in items)
        more = f"{raw} would be a colour, each from 0 to 255; three values of one class are [{apart}]"
        raise ValueError(more if is_colour else "") from None
    return (values[0], values[1], values[2]) if is_colour else values[0]


def join_values(values: Sequence[MaskValue]) -> MaskClass:
    """Several values as one class, in the form that reads back the same."""
    if len(values) == COLOUR_LENGTH and all(isinstance(value, int) for value in values):
        return tuple((value,) for value in values)  # three bare numbers would be a colour
    return tuple(values) if len(values) > 1 else values[0]


def split_values(mask_class: MaskClass) -> tuple[MaskValue, ...]:
    """The values and colours that are one class."""
    if isinstance(mask_class, int):
        return (mask_class,)
    if len(mask_class) == COLOUR_LENGTH and all(isinstance(item, int) for item in mask_class):
        return ((mask_class[0], mask_class[1], mask_class[2]),)
    return tuple(item[0] if isinstance(item, tuple) and len(item) == 1 else item for item in mask_class)


def as_grey(value: MaskValue) -> MaskValue:
    """A grey colour as its brightness, which is the same value in a mask; any other as it is."""
    return value[0] if isinstance(value, tuple) and value[0] == value[1] == value[2] else value
