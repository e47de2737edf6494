"""Several runs on one page: `compare --html FILE`, and `watch` with several runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from unet_trainer import __version__
from unet_trainer.config.dump import value_text
from unet_trainer.reports.comparison import ComparedRun, Comparison, compare_runs
from unet_trainer.reports.curve_section import NUM_COLOURS, line, thinned
from unet_trainer.reports.html_elements import Child, Html, element, figure, section, table, text
from unet_trainer.reports.number_texts import NONE, duration, rate, score
from unet_trainer.reports.page import fill_page, layout
from unet_trainer.reports.score_sections import scale, state_pill, swatch
from unet_trainer.reports.score_statistics import Difference
from unet_trainer.runs.run_summary import RunSummary
from unet_trainer.system.console import counted


def render_comparison(summaries: Sequence[RunSummary], live: str | None = None, links: bool = False) -> str:
    """`links`: to the report of each run, below the address of this page."""
    found = compare_runs(summaries)
    sections: list[tuple[str, str, Html | None]] = [
        ("runs", "Runs", _run_section(found, links)),
        ("curves", "Curves", _curve_section(found)),
        ("classes", "Classes", _class_section(found)),
        ("settings", "Settings", _setting_section(found)),
    ]
    names = ", ".join(run.name for run in found.runs)
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by U-Net trainer {__version__}. This page asks the network for nothing."
    body = layout(
        f"{counted(len(found.runs), 'run')} compared",
        names,
        sections,
        text(made if live is None else f"U-Net trainer {__version__}"),
    )
    return fill_page(f"{names} – comparison", body, live)


def difference_text(difference: Difference | None) -> str:
    if difference is None:
        return NONE
    ends = "" if difference.interval is None else f" ({difference.interval[0]:+.3f} to {difference.interval[1]:+.3f})"
    return f"{difference.iou:+.4f}{ends}"


def verdict(difference: Difference | None) -> str:
    """In words: whether the difference is more than chance."""
    if difference is None:
        return ""
    if difference.is_open:
        return "no clear difference"
    return "better" if difference.iou > 0 else "worse"


def _run_section(found: Comparison, links: bool) -> Html:
    rows = [_run_row(index, run, found, links) for index, run in enumerate(found.runs)]
    header = [
        "run",
        "state",
        "IoU",
        "",
        "95 % interval",
        "difference to the first",
        "best epoch",
        "time in epochs",
        "images/s",
        "GPU memory",
    ]
    return section(
        "runs",
        "Runs",
        element("p", _best_words(found), " ", found.note, class_="muted"),
        element("div", table(header, rows, "Runs beside each other", numeric_from=4, class_="runs-table"), class_="panel"),
    )


def _run_row(index: int, run: ComparedRun, found: Comparison, links: bool) -> list[Child]:
    summary = run.summary
    name: Child = element("a", run.name, href=f"run/{index}/") if links else run.name
    ends = run.scores.interval if run.scores is not None else None
    best = summary.best
    planned = f" of {summary.num_epochs}" if summary.num_epochs else ""
    return [
        [swatch(index % NUM_COLOURS), name],
        state_pill(summary),
        element("strong", score(run.iou)),
        None if run.iou is None else scale(run.iou, ends, None, index % NUM_COLOURS),
        NONE if ends is None else f"{score(ends[0], 3)} – {score(ends[1], 3)}",
        [difference_text(run.difference), element("br"), element("span", verdict(run.difference), class_="muted small")]
        if run.difference is not None
        else NONE,
        NONE if best is None else f"{best.number}, {len(summary.epochs)}{planned} done",
        duration(run.seconds),
        rate(run.images_per_second),
        NONE if run.memory_gib is None else f"{run.memory_gib:.2f} GiB",
    ]


def _best_words(found: Comparison) -> str:
    best = found.best
    return "No run has a score yet." if best is None else f"The highest IoU: {best.name}, {score(best.iou)}."


def _curve_section(found: Comparison) -> Html | None:
    runs = [(index, run) for index, run in enumerate(found.runs) if run.summary.epochs]
    if not runs:
        return None
    figures = [
        _overlay(runs, "val-iou", "Validation IoU", "val_iou", y=[0, 1]),
        _overlay(runs, "val-loss", "Validation loss", "val_loss", zero=True),
        _overlay(runs, "train-loss", "Training loss", "train_loss", zero=True),
    ]
    return section(
        "curves",
        "Curves",
        element("p", "By epoch or by the time in epochs. Names switch runs on and off.", class_="muted"),
        element("div", figures, class_="grid charts overlays"),
    )


def _overlay(runs: Sequence[tuple[int, ComparedRun]], key: str, title: str, column: str, **limits: Any) -> Html:
    by_epoch, by_time, words = [], [], []
    for index, run in runs:
        epochs = thinned(run.summary.epochs, run.summary.best)
        minutes, passed = {}, 0.0
        for epoch in run.summary.epochs:
            passed += epoch.get("seconds") or 0.0
            minutes[epoch.number] = float(f"{passed / 60:.4g}")
        values = [epoch.get(column) for epoch in epochs]
        by_epoch.append({**line(run.name, values, index), "xs": [epoch.number for epoch in epochs]})
        by_time.append({**line(run.name, values, index), "xs": [minutes[epoch.number] for epoch in epochs]})
        known = [value for value in values if value is not None]
        if known:
            words.append(f"{run.name} {score(known[0])} → {score(known[-1])}")
    views = [{"name": "by epoch", "x": "epoch", "lines": by_epoch}, {"name": "by time", "x": "minutes", "lines": by_time}]
    data = {"xs": [], "x": "epoch", "views": views, "marks": [], "digits": 4, **limits}
    numbers = sorted({epoch.number for _, run in runs for epoch in thinned(run.summary.epochs, run.summary.best)})
    columns = [dict(run.summary.column(column)) for _, run in runs]
    rows: list[list[Child]] = [[number, *(score(values.get(number)) for values in columns)] for number in numbers]
    values_table = table(["epoch", *(run.name for _, run in runs)], rows, title)
    return figure("lines", data, title, "; ".join(words), values_table, key)


def _class_section(found: Comparison) -> Html | None:
    """IoU of each class, where the runs have the same classes and more than one."""
    names = found.runs[0].summary.class_names
    per_class = [run.summary.per_class_iou for run in found.runs]
    if len(names) < 2 or any(run.summary.class_names != names for run in found.runs):
        return None
    rows: list[list[Child]] = [[name, *(score(values.get(name)) for values in per_class)] for name in names]
    return section(
        "classes",
        "IoU of each class",
        element(
            "div", table(["class", *(run.name for run in found.runs)], rows, "IoU of each class at the best epoch"), class_="panel"
        ),
    )


def _setting_section(found: Comparison) -> Html:
    if not found.settings:
        return section(
            "settings", "Settings", element("p", "The runs have the same settings, as far as they are kept.", class_="muted")
        )
    rows = [
        [
            element("code", name),
            *(
                element("code", NONE if value is None and name not in run.summary.settings else value_text(value))
                for run, value in zip(found.runs, values, strict=True)
            ),
        ]
        for name, values in found.settings
    ]
    header = ["setting", *(run.name for run in found.runs)]
    return section(
        "settings",
        "Settings that differ",
        element("div", table(header, rows, "Settings that differ", numeric_from=99, class_="settings"), class_="panel"),
    )
