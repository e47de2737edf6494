"""Pages from Jinja2 templates: each is one file with its style and script in it, and its policy forbids everything else.

Class names, paths, notices and names of files come from users and their data. Templates escape every value; no other code here
makes markup.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unet_trainer import __version__
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.system.console import readable
from unet_trainer.system.input_files import read_text
from unet_trainer.system.local_server import digest

TEMPLATES = Path(__file__).parent / "templates"
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in HTML, or not in UTF-8
NONE = "–"
NUM_COLOURS = 8  # of page.css
NUM_SHADES = 10  # of a cell of the confusion matrix


def render_page(template: str, title: str, live: str | None = None, **values: Any) -> str:
    """`live`: the version of a page that its server refreshes."""
    made = f"Made {moment(datetime.now(UTC))} by U-Net trainer {__version__}"
    shared = {
        **{"title": title, "live": live, "policy": page_policy(live is not None), "num_colours": NUM_COLOURS},
        **{"style": Markup(_file("page.css")), "script": Markup(_file("page.js"))},
        "footer": f"{made}. This page is one file and asks the network for nothing.",
    }
    return _environment().get_template(template).render({**shared, **values})


def page_policy(live: bool = False) -> str:
    """Own style and script by their digests, pictures within the file; a live page may ask its own server as well."""
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{digest(_file('page.js'))}'; style-src '{digest(_file('page.css'))}'; "
        f"img-src data:{connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def _file(name: str) -> str:
    return read_text(TEMPLATES / name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    filters = (score, interval, percent, duration, rate, count, moment, place, shade, counted, value_text)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters["shell"] = lambda path: quote(str(path))
    return environment


def _shown(value: Any) -> Any:
    """Text without what a browser would not take; the environment escapes it afterwards."""
    return value if isinstance(value, Markup) else "" if value is None else CONTROLS.sub("\ufffd", readable(str(value)))


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def score(value: float | None, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if _is_number(value) else NONE


def interval(ends: tuple[float, float] | None) -> str:
    return NONE if ends is None else f"{score(ends[0])} – {score(ends[1])}"


def percent(share: float | None, digits: int = 1) -> str:
    if share is None or not math.isfinite(share):
        return NONE
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"< {10**-digits:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """90 s is 1.5 min."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
    unit, name = next((unit, name) for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (0, "s")) if seconds + 0.5 >= unit)
    value = seconds / max(1, unit)
    return f"{value:.1f}".removesuffix(".0") + f" {name}" if value < 10 else f"{value:.0f} {name}"


def rate(images_per_second: float | None) -> str:
    if images_per_second is None or not math.isfinite(images_per_second):
        return NONE
    return f"{images_per_second:.0f}" if images_per_second >= 100 else f"{images_per_second:.3g}"


def count(number: int) -> str:
    return f"{number:,}"


def counted(number: int, one: str) -> str:
    """1 image, 12,345 images."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def moment(time: datetime | None) -> str:
    return NONE if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def place(value: float, axis: tuple[float, float] = (0.0, 1.0)) -> str:
    """On an axis between two values, for an attribute of SVG."""
    return f"{100 * min(1.0, max(0.0, (value - axis[0]) / (axis[1] - axis[0]))):.2f}%"


def shade(share: float | None) -> int:
    return 0 if share is None else min(NUM_SHADES, round(NUM_SHADES * share))
