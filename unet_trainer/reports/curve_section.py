"""The curves of a run: data for the page's charts, with their numbers in tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from unet_trainer.reports.html_elements import Child, Html, element, figure, section, table
from unet_trainer.reports.number_texts import NONE, rate, score
from unet_trainer.runs.run_summary import EpochRecord, Event, RunSummary
from unet_trainer.system.console import counted

ScoreName = Literal["iou", "dice", "precision", "recall"]
SCORE_TITLES: dict[ScoreName, str] = {"iou": "IoU", "dice": "Dice", "precision": "Precision", "recall": "Recall"}
MAX_POINTS = 400  # of a curve
MAX_CLASSES = 24  # with a curve each
NUM_COLOURS = 8  # of the page
VAL, TRAIN, OTHER = 0, 1, 2  # colours of these lines
MARK_KINDS = {"interrupted": "interrupted", "killed": "killed", "failed": "failed", "rollback": "rollback", "shrink": "shrink"}
MARK_TEXTS = {"rollback": "went back to a saved state", "shrink": "went on with smaller parts of a batch"}


def curve_section(summary: RunSummary) -> Html | None:
    """None before the first epoch has ended."""
    if not summary.epochs:
        return None
    epochs = thinned(summary.epochs, summary.best)
    figures = [
        _iou_figure(summary, epochs),
        _class_figure(summary, epochs),
        _figure(summary, epochs, "loss", "Loss", [("val", "val_loss", VAL), ("train", "train_loss", TRAIN)], 4),
        _figure(summary, epochs, "rate", "Learning rate", [("learning rate", "learning_rate", OTHER)], 6),
        _figure(summary, epochs, "speed", "Images per second, in training", [("images/s", "images_per_second", OTHER)], 1),
    ]
    left_out = len(summary.epochs) - len(epochs)
    notes = []
    if left_out:
        notes.append(f"{len(epochs)} of {len(summary.epochs)} epochs are shown; metrics.csv has all of them.")
    hint = "Point at a chart, or focus it and use the arrow keys, to read an epoch. Names switch lines on and off."
    return section(
        "curves",
        "Curves",
        element("p", " ".join([hint, *notes]), class_="muted"),
        element("div", figures, class_="grid charts"),
    )


def thinned(epochs: Sequence[EpochRecord], best: EpochRecord | None) -> list[EpochRecord]:
    """At most about MAX_POINTS of them, evenly; the first, the best and the last stay."""
    step = -(-len(epochs) // MAX_POINTS)
    kept = {epochs[0].number, epochs[-1].number, *([best.number] if best else [])}
    return [epoch for index, epoch in enumerate(epochs) if index % step == 0 or epoch.number in kept]


def line(name: str, values: Sequence[float | None], colour: int, thin: bool = False) -> dict[str, Any]:
    return {"name": name, "c": colour % NUM_COLOURS, "ys": [_rounded(value) for value in values], "thin": thin}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def marks(summary: RunSummary) -> list[dict[str, Any]]:
    """What happened at which epoch: the best one, the early stop, interruptions and rollbacks."""
    found: list[dict[str, Any]] = []
    if summary.best is not None:
        found.append({"x": summary.best.number, "kind": "best", "text": f"best epoch: {summary.best.number}"})
    for event in summary.events:
        if event.kind in MARK_KINDS and event.epoch is not None:
            found.append({"x": _place(event, summary), "kind": event.kind, "text": _mark_text(event)})
    if summary.state == "stopped early":
        last = summary.epochs[-1].number
        found.append({"x": last, "kind": "stopped", "text": f"stopped early after epoch {last}"})
    return found


def _mark_text(event: Event) -> str:
    return f"{MARK_TEXTS.get(event.kind, event.kind)} after epoch {event.epoch}"


def _place(event: Event, summary: RunSummary) -> float:
    """Between the last epoch that was finished and the next one, within the chart."""
    return min(max((event.epoch or 0) + 0.5, 1), max(1, summary.epochs[-1].number))


def chart(
    summary: RunSummary, epochs: Sequence[EpochRecord], views: Sequence[dict[str, Any]], digits: int, **limits: Any
) -> dict[str, Any]:
    """What the script draws. A view is a name and its lines; the reader chooses where there are several."""
    return {
        "xs": [epoch.number for epoch in epochs],
        "x": "epoch",
        "views": views,
        "marks": marks(summary),
        "digits": digits,
        **limits,
    }


def _figure(
    summary: RunSummary,
    epochs: Sequence[EpochRecord],
    key: str,
    title: str,
    columns: Sequence[tuple[str, str, int]],
    digits: int,
) -> Html:
    lines = [line(name, [epoch.get(column) for epoch in epochs], colour) for name, column, colour in columns]
    data = chart(summary, epochs, [{"name": title, "lines": lines}], digits, zero=True)
    show = rate if key == "speed" else (lambda value: NONE if value is None else f"{value:.{digits}g}")
    rows: list[list[Child]] = [[epoch.number, *(show(epoch.get(column)) for _, column, _ in columns)] for epoch in epochs]
    values = table(["epoch", *(name for name, _, _ in columns)], rows, f"{title} of each epoch")
    return figure("lines", data, title, _described(epochs, columns, show), values, key)


def _described(epochs: Sequence[EpochRecord], columns: Sequence[tuple[str, str, int]], show: Any) -> str:
    """From the first epoch to the last, in words."""
    parts = []
    for name, column, _ in columns:
        found = [value for epoch in epochs if (value := epoch.get(column)) is not None]
        if found:
            parts.append(f"{name} {show(found[0])} → {show(found[-1])}")
    return "; ".join(parts) or "no values"


def _iou_figure(summary: RunSummary, epochs: Sequence[EpochRecord]) -> Html:
    columns = [("val", "val_iou", VAL), ("train", "train_iou", TRAIN)]
    lines = [line(name, [epoch.get(column) for epoch in epochs], colour) for name, column, colour in columns]
    data = chart(summary, epochs, [{"name": "IoU", "lines": lines}], 4, y=[0, 1])
    best = summary.best
    words = _described(epochs, columns, score)
    if best is not None and best.get("val_iou") is not None:
        words += f"; val is {score(best.get('val_iou'))} at the best epoch, {best.number}"
    rows: list[list[Child]] = [[epoch.number, score(epoch.get("val_iou")), score(epoch.get("train_iou"))] for epoch in epochs]
    return figure("lines", data, "IoU", words, table(["epoch", "val", "train"], rows, "IoU of each epoch"), "iou")


def _class_figure(summary: RunSummary, epochs: Sequence[EpochRecord]) -> Html | None:
    """Of several classes the scores of each; of one class its scores beside each other."""
    told = [epoch for epoch in epochs if epoch.classes]
    if not told:
        return None
    names, note = shown_classes(summary)
    if len(names) == 1:
        return _one_class_figure(summary, told, names[0])
    views = [
        {
            "name": SCORE_TITLES[kind],
            "lines": [line(name, _class_values(told, name, kind), index, thin=True) for index, name in enumerate(names)],
        }
        for kind in get_args(ScoreName)
    ]
    data = chart(summary, told, views, 4, y=[0, 1])
    best = summary.per_class_iou
    known = {name: value for name in names if (value := best.get(name)) is not None}
    words = f"{counted(len(names), 'class', 'classes')} on the validation images{note}"
    if known:
        low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
        words += f"; at the best epoch from {low} (IoU {score(known[low])}) to {high} ({score(known[high])})"
    columns = [_class_values(told, name, "iou") for name in names]
    rows: list[list[Child]] = [[epoch.number, *map(score, values)] for epoch, *values in zip(told, *columns, strict=True)]
    return figure(
        "lines", data, "Scores of each class", words, table(["epoch", *names], rows, "IoU of each class"), "classes-curve"
    )


def _one_class_figure(summary: RunSummary, epochs: Sequence[EpochRecord], name: str) -> Html:
    kinds: list[ScoreName] = ["dice", "precision", "recall"]
    lines = [line(SCORE_TITLES[kind], _class_values(epochs, name, kind), index + 2) for index, kind in enumerate(kinds)]
    data = chart(summary, epochs, [{"name": name, "lines": lines}], 4, y=[0, 1])
    last = epochs[-1].classes[name]
    words = (
        f"{name} on the validation images: precision {score(last.precision)} and recall {score(last.recall)} after the last epoch"
    )
    rows: list[list[Child]] = [
        [epoch.number, *(score(_class_values([epoch], name, kind)[0]) for kind in kinds)] for epoch in epochs
    ]
    numbers = table(["epoch", *(SCORE_TITLES[kind] for kind in kinds)], rows, f"Scores of {name}")
    return figure("lines", data, f"Dice, precision and recall of {name}", words, numbers, "classes-curve")


def shown_classes(summary: RunSummary) -> tuple[list[str], str]:
    """Names with a curve, and a note where they are not all: then those that the best epoch scores worst."""
    names, best = summary.class_names, summary.per_class_iou
    if len(names) <= MAX_CLASSES:
        return names, ""
    worst = sorted(names, key=lambda name: 2.0 if best.get(name) is None else best[name] or 0.0)[:MAX_CLASSES]
    return worst, f", the worst of {len(names)}"


def _class_values(epochs: Sequence[EpochRecord], name: str, kind: ScoreName) -> list[float | None]:
    return [None if (found := epoch.classes.get(name)) is None else getattr(found, kind) for epoch in epochs]
