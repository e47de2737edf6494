"""Pages from Jinja2 templates: each is one file, and its policy forbids all but its own style and script. And the data
of the charts that page.js draws. Templates escape every value; no other code here makes markup. Imports no torch."""

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from shlex import quote
from statistics import mean, median
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unet_trainer import __version__
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.runs.record import EpochRecord, RunSummary
from unet_trainer.runs.tables import ImageScore
from unet_trainer.system.console import readable
from unet_trainer.system.input_files import read_text

TEMPLATES = Path(__file__).parent / "templates"
# not allowed in HTML, or not in UTF-8
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
NONE = "–"
NUM_COLOURS = 8  # of page.css
NUM_SHADES = 10  # of a cell of the confusion matrix
RELOAD_SECONDS = 30
STALE_SECONDS = 600.0  # after which a page is not reloaded any more: its run was killed


def render_page(template: str, title: str, remark: str = "", reload_for: float | None = None, **values: Any) -> str:
    """Fill in a template. `remark`: in the footer. `reload_for`: seconds from now for which the page reloads itself."""
    footer = f"Made {moment(datetime.now(UTC))} by U-Net trainer {__version__}. "
    footer += "This page is one file and asks the network for nothing." + remark
    until = None
    if reload_for is not None:
        until = round(1000 * (time.time() + reload_for))
        footer += f" It reloads itself every {RELOAD_SECONDS} s while the run goes on."
    shared = {"title": title, "policy": page_policy(), "num_colours": NUM_COLOURS, "footer": footer}
    reload = {"reload_until": until, "reload_seconds": RELOAD_SECONDS}
    parts = {"style": Markup(_file("page.css")), "script": Markup(_file("page.js"))}
    return _environment().get_template(template).render(**shared, **reload, **parts, **values)


def page_policy() -> str:
    """Allow the page its own style and script, by their digests, and pictures within the file."""
    return (
        f"default-src 'none'; script-src '{digest(_file('page.js'))}'; style-src '{digest(_file('page.css'))}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


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
    filters = (score, interval, percent, duration, rate, moment, place, shade, counted, data_uri, value_text)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {"shell": lambda path: quote(str(path)), "count": "{:,}".format}
    return environment


def _shown(value: Any) -> Any:
    """Text without what a browser would not take; the environment escapes it afterwards."""
    return value if isinstance(value, Markup) else "" if value is None else CONTROLS.sub("\ufffd", readable(str(value)))


def score(value: float | None, digits: int = 3) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


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
    unit, name = next(
        (unit, name) for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (0, "s")) if seconds + 0.5 >= unit
    )
    value = seconds / max(1, unit)
    return f"{value:.1f}".removesuffix(".0") + f" {name}" if value < 10 else f"{value:.0f} {name}"


def rate(images_per_second: float | None) -> str:
    if images_per_second is None or not math.isfinite(images_per_second):
        return NONE
    return f"{images_per_second:.0f}" if images_per_second >= 100 else f"{images_per_second:.3g}"


def counted(number: int, one: str) -> str:
    """1 image, 12,345 images."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def moment(time: datetime | None) -> str:
    return NONE if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def place(value: float, axis: tuple[float, float] = (0.0, 1.0)) -> str:
    """On an axis between two values, for an attribute of SVG."""
    return f"{100 * min(1.0, max(0.0, (value - axis[0]) / (axis[1] - axis[0]))):.2f}%"


def shade(share: float) -> int:
    return 0 if math.isnan(share) else round(NUM_SHADES * share)


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# Charts.

SCORES = {"IoU": "iou", "Dice": "dice", "Precision": "precision", "Recall": "recall"}
MAX_POINTS = 400  # of a curve
MAX_CLASSES = 24  # with a curve each
OTHER = 2  # colour of lines that are neither val, 0, nor train, 1
MARK_WORDS = {"best": "best epoch: {}", "stopped": "stopped early after epoch {}"}
MARK_WORDS |= {kind: f"{kind} after epoch {{}}" for kind in ("interrupted", "killed", "failed")}
MARK_WORDS["shrink"] = "went on with smaller parts of a batch after epoch {}"
Values = Mapping[str, Sequence[float | None]]  # of each line, by its name
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class PageChart:
    """`key`: by which a page that reloads itself keeps what was switched."""

    key: str
    title: str
    words: str
    data: Mapping[str, Any]
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: str = "lines"

    @property
    def json(self) -> str:
        return json.dumps(self.data, allow_nan=False, separators=(",", ":"))


def run_charts(summary: RunSummary, epochs: Sequence[EpochRecord]) -> list[PageChart]:
    """`epochs`: those that are drawn."""
    if not epochs:
        return []

    def chart(key: str, title: str, columns: Mapping[str, str], show: Show, digits: int, **limits: Any) -> PageChart:
        """Columns of metrics.csv, by the name of their line."""
        values = {name: [epoch.get(column) for epoch in epochs] for name, column in columns.items()}
        words = _from_first_to_last(values, show)
        if key == "iou" and summary.best_iou is not None and summary.best is not None:
            words += f"; val is {score(summary.best_iou)} at the best epoch, {summary.best.number}"
        first_colour = 0 if len(columns) > 1 else OTHER
        return _chart(summary, epochs, key, title, words, {title: values}, show, first_colour, digits=digits, **limits)

    charts = [
        chart("iou", "IoU", {"val": "val_iou", "train": "train_iou"}, score, 3, y=[0, 1]),
        _class_chart(summary, [epoch for epoch in epochs if epoch.classes]),
        chart("loss", "Loss", {"val": "val_loss", "train": "train_loss"}, _three_digits, 3, zero=True),
        chart("rate", "Learning rate", {"learning rate": "learning_rate"}, _three_digits, 6, zero=True),
        chart("speed", "Images per second, in training", {"images/s": "images_per_second"}, rate, 1, zero=True),
    ]
    return [found for found in charts if found is not None]


def drawn_epochs(summary: RunSummary) -> list[EpochRecord]:
    """At most about MAX_POINTS of them, evenly; the first, the best and the last stay."""
    epochs, best = summary.epochs, summary.best
    step = -(-len(epochs) // MAX_POINTS)
    kept = {epoch.number for epoch in (*epochs[:1], *epochs[-1:], best) if epoch is not None}
    return [epoch for index, epoch in enumerate(epochs) if index % step == 0 or epoch.number in kept]


def distribution_chart(scores: Sequence[ImageScore]) -> PageChart | None:
    """How the validation images divide by their IoU."""
    values = [image.iou for image in scores if image.iou is not None]
    if not values:
        return None
    low = min(0.9, np.floor(10 * min(values)) / 10)
    edges = np.linspace(low, 1.0, round((1 - low) / (0.05 if low < 0.5 else 0.02)) + 1).round(2).tolist()
    counts = np.histogram(values, edges)[0].tolist()
    middle = score(median(values))
    words = f"{counted(len(values), 'image')}: median {middle}, mean {score(mean(values))}"
    words += f", worst {score(min(values))}, best {score(max(values))}"
    if num_undefined := len(scores) - len(values):
        words += f"; {counted(num_undefined, 'image')} without an IoU, because no class is in truth or prediction"
    mark = {"x": median(values), "text": f"median {middle}"}
    data = {"counts": counts, "from": low, "to": 1, "x": "IoU of an image", "unit": "image", "marks": [mark]}
    rows = [
        [f"{start:.2f} – {end:.2f}", number]
        for start, end, number in zip(edges, edges[1:], counts, strict=False)
        if number
    ]
    return PageChart("distribution", "IoU of each validation image", words, data, ["IoU", "images"], rows, "bars")


def _class_chart(summary: RunSummary, epochs: Sequence[EpochRecord]) -> PageChart | None:
    """Of several classes the scores of each; of one class its scores beside each other."""
    if not epochs:
        return None

    names = summary.worst_classes(MAX_CLASSES)
    views = {
        title: {name: [epoch.score(name, kind) for epoch in epochs] for name in names} for title, kind in SCORES.items()
    }
    if len(names) == 1:
        (name,) = names
        views = {name: {title: views[title][name] for title in SCORES if title != "IoU"}}
        title = f"Dice, precision and recall of {name}"
        precision, recall = (score(epochs[-1].score(name, kind)) for kind in ("precision", "recall"))
        words = f"{name} on the validation images: precision {precision} and recall {recall} after the last epoch"
        return _chart(summary, epochs, "classes-curve", title, words, views, score, OTHER, digits=3, y=[0, 1])
    note = f", the worst of {len(summary.class_names)}" if len(names) < len(summary.class_names) else ""
    words = f"{len(names)} classes on the validation images{note}"
    if known := {name: value for name in names if (value := summary.per_class_iou.get(name)) is not None}:
        low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
        words += f"; at the best epoch from {low} (IoU {score(known[low])}) to {high} ({score(known[high])})"
    return _chart(
        summary, epochs, "classes-curve", "Scores of each class", words, views, score, thin=True, digits=3, y=[0, 1]
    )


def _chart(
    summary: RunSummary,
    epochs: Sequence[EpochRecord],
    key: str,
    title: str,
    words: str,
    views: Mapping[str, Values],
    show: Show,
    first_colour: int = 0,
    thin: bool = False,
    **more: Any,
) -> PageChart:
    """The reader chooses between several views; the table has the numbers of the first."""
    numbers, shown = [epoch.number for epoch in epochs], next(iter(views.values()))
    drawn = [
        {
            "name": name,
            "lines": [_line(line, ys, colour, thin) for colour, (line, ys) in enumerate(values.items(), first_colour)],
        }
        for name, values in views.items()
    ]
    marks = [{"x": m.place, "kind": m.kind, "text": MARK_WORDS[m.kind].format(m.epoch)} for m in summary.marks]
    data = {"xs": numbers, "x": "epoch", "views": drawn, "marks": marks, **more}
    rows = [[number, *map(show, row)] for number, *row in zip(numbers, *shown.values(), strict=True)]
    return PageChart(key, title, words, data, ["epoch", *shown], rows)


def _line(name: str, values: Sequence[float | None], colour: int, thin: bool = False, **more: Any) -> dict[str, Any]:
    rounded = [None if value is None else float(f"{value:.5g}") for value in values]
    return {"name": name, "c": colour % NUM_COLOURS, "ys": rounded, "thin": thin, **more}


def _three_digits(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def _from_first_to_last(values: Values, show: Show) -> str:
    known = {name: [value for value in ys if value is not None] for name, ys in values.items()}
    ends = {name: dict.fromkeys([show(ys[0]), show(ys[-1])]) for name, ys in known.items() if ys}
    return "; ".join(f"{name} {' → '.join(values)}" for name, values in ends.items()) or "no values"


def overlay_charts(runs: Sequence[tuple[str, RunSummary]]) -> list[PageChart]:
    """The same curve of several runs; by epoch or by time."""
    shown = [(index, name, summary) for index, (name, summary) in enumerate(runs) if summary.epochs]
    if not shown:
        return []
    return [
        _overlay(shown, "val-iou", "Validation IoU", "val_iou", y=[0, 1]),
        _overlay(shown, "val-loss", "Validation loss", "val_loss", zero=True),
        _overlay(shown, "train-loss", "Training loss", "train_loss", zero=True),
    ]


def _overlay(
    runs: Sequence[tuple[int, str, RunSummary]], key: str, title: str, column: str, **limits: Any
) -> PageChart:
    by_epoch, by_time, known = [], [], {}
    for index, name, summary in runs:
        minutes, passed = {}, 0.0
        for epoch in summary.epochs:
            passed += epoch.get("seconds") or 0.0
            minutes[epoch.number] = float(f"{passed / 60:.4g}")
        drawn = {epoch.number: epoch.get(column) for epoch in drawn_epochs(summary)}
        known[name] = drawn
        by_epoch.append(_line(name, list(drawn.values()), index, xs=list(drawn)))
        by_time.append(_line(name, list(drawn.values()), index, xs=[minutes[number] for number in drawn]))
    views = [
        {"name": "by epoch", "x": "epoch", "lines": by_epoch},
        {"name": "by time", "x": "minutes", "lines": by_time},
    ]
    data = {"xs": [], "x": "epoch", "views": views, "marks": [], "digits": 3, **limits}
    words = _from_first_to_last({name: list(drawn.values()) for name, drawn in known.items()}, score)
    numbers = sorted({number for drawn in known.values() for number in drawn})
    rows = [[number, *(score(drawn.get(number)) for drawn in known.values())] for number in numbers]
    return PageChart(key, title, words, data, ["epoch", *known], rows)
