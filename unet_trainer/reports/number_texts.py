"""Numbers as people read them: durations, shares, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

NONE = "–"


def score(value: float | None, digits: int = 4) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Of 1; small shares keep a digit that says something."""
    if share is None or not math.isfinite(share):
        return NONE
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"< {10**-digits:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """90 s is 1 min 30 s."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def rate(images_per_second: float | None) -> str:
    if images_per_second is None or not math.isfinite(images_per_second):
        return NONE
    return f"{images_per_second:.0f}" if images_per_second >= 100 else f"{images_per_second:.3g}"


def count(number: int) -> str:
    """1 234 567, with narrow spaces that do not break."""
    return f"{number:,}".replace(",", "\u202f")


def moment(time: datetime | None) -> str:
    return NONE if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else ""
