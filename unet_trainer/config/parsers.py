"""Parsers of config values: small functions that turn raw input into a typed value or say what is needed instead.

Raw input is text from YAML or the command line, or a Python object from a dict. A parser raises ValueError with the part of
the message that follows "got X; ".
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any

from unet_trainer.config.safe_yaml import BOOLEANS, NULLS, Plain, interpret, parse_number

Parser = Callable[[Any], Any]


def near_miss(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to the word; None if none is."""
    word = word.lower()
    matches = difflib.get_close_matches(word, list(known), n=5, cutoff=0.7)

    def similarity(name: str) -> tuple[float, int]:  # of equally similar names, the one with the longer common prefix
        prefix = takewhile(lambda pair: pair[0] == pair[1], zip(name, word, strict=False))
        return difflib.SequenceMatcher(None, name, word).ratio(), sum(1 for _ in prefix)

    return max(matches, key=similarity, default=None)


def python_value(raw: Any) -> Any:
    """A numpy scalar as a Python number or boolean."""
    return raw.item() if hasattr(raw, "item") and getattr(raw, "shape", None) == () else raw


def _can_be_written(raw: str) -> bool:
    """No NUL, which no path may have, and no half of a surrogate pair, which no UTF-8 file may have."""
    return "\0" not in raw and not any("\ud800" <= letter <= "\udfff" for letter in raw)


def text(example: str = "") -> Parser:
    need = "need text" + (f", e.g. {example}" if example else "")

    def parse(raw: Any) -> str:
        if isinstance(raw, os.PathLike):
            raw = os.fspath(raw)
        if not isinstance(raw, str) or not raw.strip() or not _can_be_written(raw):
            raise ValueError(need)
        return str(raw)

    return parse


def word_or_empty(raw: Any) -> str:
    """Text that may be empty, such as a suffix."""
    if not isinstance(raw, str) or not _can_be_written(raw):
        raise ValueError("need text, e.g. _mask")
    return str(raw)


def pattern(raw: Any) -> str:
    """A regular expression."""
    if not isinstance(raw, str) or not raw or not _can_be_written(raw):
        raise ValueError(r"need a regular expression, e.g. '(patient\d+)_'")
    try:
        re.compile(raw)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(rf"need a regular expression, e.g. '(patient\d+)_' ({error})") from None
    return str(raw)


def flag(raw: Any) -> bool:
    raw = python_value(raw)
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in BOOLEANS:
        return BOOLEANS[raw.strip().lower()]
    raise ValueError("need true or false")


def number(
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
    example: str,
) -> Parser:
    bounds = [
        f"at least {minimum:g}" if minimum is not None else "",
        f"above {above:g}" if above is not None else "",
        f"below {below:g}" if below is not None else "",
        f"at most {maximum:g}" if maximum is not None else "",
    ]
    described = " and ".join(bound for bound in bounds if bound)
    need = "need a positive number" if described == "above 0" else f"need a number {described}".rstrip()
    need += f", e.g. {example}"

    def parse(raw: Any) -> float:
        value = parse_number(raw) if isinstance(raw, str) else python_value(raw)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(need)
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(need) from None
        if not math.isfinite(value):
            raise ValueError(need)
        is_within_bounds = (
            (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (below is None or value < below)
            and (maximum is None or value <= maximum)
        )
        if not is_within_bounds:
            raise ValueError(need)
        return value

    return parse


def integer(*, minimum: int, maximum: int = 2**31, example: str, says_maximum: bool = False) -> Parser:
    """`says_maximum`: the message names the maximum also where nobody would reach it by counting."""
    need = f"need a whole number of at least {minimum}, e.g. {example}"
    if maximum < 2**31 or says_maximum:
        need = f"need a whole number from {minimum} to {maximum}, e.g. {example}"

    def parse(raw: Any) -> int:
        value = parse_number(raw) if isinstance(raw, str) else python_value(raw)
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not minimum <= int(value) <= maximum:
            raise ValueError(need)
        return int(value)

    return parse


def choice(*options: str, other_spellings: Mapping[str, str] | None = None) -> Parser:
    def parse(raw: Any) -> str:
        if isinstance(raw, str) and str(raw) in options:
            return str(raw)
        need = f"need {options[0]}" if len(options) == 1 else f"need one of {', '.join(options)}"
        if isinstance(raw, str):
            meant = (other_spellings or {}).get(raw.lower()) or near_miss(raw, options)
            need += f"; did you mean {meant}?" if meant else ""
        raise ValueError(need)

    return parse


def optional(parser: Parser) -> Parser:
    def parse(raw: Any) -> Any:
        if raw is None or (isinstance(raw, Plain) and raw.lower() in NULLS):
            return None
        try:
            return parser(raw)
        except ValueError as error:
            raise ValueError(f"{error}, or null") from None

    return parse


def either(first: Parser, second: Parser) -> Parser:
    def parse(raw: Any) -> Any:
        try:
            return first(raw)
        except ValueError as first_error:
            try:
                return second(raw)
            except ValueError as second_error:
                if str(first_error).endswith("?"):  # it has a suggestion
                    raise first_error from None
                raise ValueError(f"{first_error}, or {str(second_error).removeprefix('need ')}") from None

    return parse


def auto_or(parser: Parser) -> Parser:
    def parse(raw: Any) -> Any:
        if isinstance(raw, str) and raw.strip().lower() == "auto":
            return "auto"
        try:
            return parser(raw)
        except ValueError as error:
            raise ValueError(str(error) if str(error).endswith("?") else f"{error}, or auto") from None

    return parse


def repeats(raw: Any) -> float:
    """A whole number, or one part of so many: 0.25 is every fourth."""
    value: float = number(minimum=1e-5, maximum=100_000, example="4 or 0.25")(raw)
    if value >= 1:
        if value != int(value):
            raise ValueError("need a whole number, or a share below 1, e.g. 4 or 0.25")
        return int(value)
    return 1 / round(1 / value)


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(raw: Any) -> str:
    """`90s`, `10m`, `1h30m`: kept as text; seconds_of reads it."""
    text = str(raw).strip().lower() if isinstance(raw, str) else ""
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text) or not 0 < seconds_of(text) < 1e9:
        raise ValueError("need a time with its unit, e.g. 10m, 2h or 1h30m")
    return text


def seconds_of(text: str) -> float:
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text))


def doubled(text: str) -> str:
    """Twice a duration, in whole minutes."""
    return f"{math.ceil(2 * seconds_of(text) / 60)}m"


def listing(parser: Parser, *, example: str, minimum: int = 1, maximum: int = 256) -> Parser:
    def parse(raw: Any) -> tuple[Any, ...]:
        if isinstance(raw, str) or not isinstance(raw, Iterable) or isinstance(raw, Mapping):
            raise ValueError(f"need a list, e.g. {example}")
        items = list(raw)
        if not minimum <= len(items) <= maximum:
            count = f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"
            raise ValueError(f"need a list of {count} values, e.g. {example}")
        try:
            return tuple(parser(item) for item in items)
        except ValueError as error:
            raise ValueError(f"need a list, e.g. {example}; in it: {error}") from None

    return parse


def weighted_terms(names: Iterable[str]) -> Parser:
    """`dice`, or `{dice: 1, bce: 0.5}`: always a dict of name → weight."""
    known = choice(*names)
    weight = number(above=0, example="1")

    def parse(raw: Any) -> dict[str, float]:
        if isinstance(raw, str):
            return {known(raw): 1.0}
        if not isinstance(raw, Mapping) or not raw:
            raise ValueError("need a loss or a weighted sum, e.g. {dice: 1, bce: 1}")
        return {known(name): weight(value) for name, value in raw.items()}

    return parse


def transform_list(raw: Any) -> tuple[Any, ...]:
    """A list of transforms: `Name`, or `{Name: {parameter: value}}`; the names are checked where the library is imported."""
    need = "need a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}]"
    if isinstance(raw, str) or not isinstance(raw, list | tuple):
        raise ValueError(need)
    items = interpret(list(raw))
    for item in items:
        if isinstance(item, str):
            continue
        if not isinstance(item, dict) or len(item) != 1 or not isinstance(next(iter(item.values())), dict | type(None)):
            raise ValueError(need)
    return tuple(_parameters(item) for item in items)


def _parameters(value: Any) -> Any:
    """The parameters of a transform, which must survive being written to config.yaml and read back."""
    if isinstance(value, list):
        return [_parameters(item) for item in value]
    if isinstance(value, dict):
        return {name: _parameters(item) for name, item in value.items()}
    value = python_value(value)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError("need numbers, text, true, false or null as parameters of a transform, or lists of them")
    return value
