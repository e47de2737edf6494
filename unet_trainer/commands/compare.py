"""python train_unet.py compare RUN RUN ...: runs beside each other, with paired differences and what was set differently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.commands.runs import find_named_run, read_run_words
from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.console import EXIT_DONE, Console
from unet_trainer.training.run_summary import read_run_summary

if TYPE_CHECKING:  # a typo is answered before OpenCV is loaded
    from unet_trainer.reports.comparison import Comparison

CHART_WIDTH = 40  # characters
MAX_VALUE = 40  # characters of a setting


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py compare", description="Runs beside each other. The first is the one that the others are compared with."
    )
    parser.add_argument("words", nargs="*", metavar="RUN", help="names or folders of two or more runs")
    parser.add_argument("--html", metavar="FILE", type=Path, help="a page with tables and curves as well")
    given = parser.parse_intermixed_args(arguments)
    words = read_run_words(given.words, script, "compare")
    folders = list(dict.fromkeys(find_named_run(name, words.checkpoint_dir) for name in words.names))
    if len(folders) < 2:
        raise UserError(
            f"compare takes two or more runs, got {', '.join(words.names) or 'none'}: python train_unet.py compare RUN RUN"
        )

    from unet_trainer.reports.comparison import compare_runs, render_comparison

    console = Console()
    summaries = [read_run_summary(folder) for folder in folders]
    for line in comparison_lines(compare_runs(summaries)):
        console.say(line)
    for summary in summaries:
        for problem in summary.problems[:1]:
            console.warn(f"{summary.folder} is damaged; left out: {problem}")
    if given.html is not None:
        try:
            write_bytes_atomically(given.html, render_comparison(summaries).encode())
        except OSError as error:
            raise UserError(f"--html {given.html}: cannot be written ({error.strerror})") from None
        console.say(f"\nPage: {given.html}")
    return EXIT_DONE


def comparison_lines(found: Comparison) -> list[str]:
    """One table, one chart, what the images are, and the settings that differ."""
    lines = [*_run_table(found), "", *_chart_lines(found)]
    if found.note:
        lines += ["", found.note]
    if not found.settings:
        return [*lines, "", "The runs have the same settings, as far as they are kept."]
    rows = [[name, *map(_short, values)] for name, values in found.settings]
    return [*lines, "", *_aligned([["Settings that differ", *found.names], *rows])]


def _run_table(found: Comparison) -> list[str]:
    from unet_trainer.reports.page import NONE, duration, interval, rate, score

    rows = [["Run", "val IoU", "95 % interval", "Difference", "Best epoch", "Time", "Images/s", "GPU memory", "State"]]
    for run in found.runs:
        best = run.summary.best
        progress = NONE if best is None else f"{best.number} of {len(run.summary.epochs)}"
        speed = [duration(run.summary.seconds), rate(run.summary.images_per_second), run.memory_text]
        difference = f"{run.difference_text} {run.verdict}".rstrip()
        rows.append([run.name, score(run.iou), interval(run.interval), difference, progress, *speed, run.summary.state])
    return _aligned(rows)


def _chart_lines(found: Comparison) -> list[str]:
    """Scores and intervals on one scale, as wide as what there is to see."""
    # From the smallest to the largest of score and interval.
    extents = [sorted([*(run.interval or ()), *([] if run.iou is None else [run.iou])]) for run in found.runs]
    values = [value for extent in extents for value in extent]
    if not values:
        return ["No run has a score yet."]
    low, high = max(0.0, min(values) - 0.02), min(1.0, max(values) + 0.02)
    width = max(map(len, found.names))

    def place(value: float) -> int:
        return round((value - low) / (high - low) * (CHART_WIDTH - 1))

    lines = [f"{'':<{width}}  {low:<{CHART_WIDTH - 4}.2f}{high:.2f}"]
    for run, extent in zip(found.runs, extents, strict=True):
        cells = [" "] * CHART_WIDTH
        if extent:
            first, last = place(extent[0]), place(extent[-1])
            cells[first : last + 1] = "─" * (last - first + 1)
        if run.iou is not None:
            cells[place(run.iou)] = "●"
        lines.append(f"{run.name:<{width}}  {''.join(cells)}".rstrip())
    return lines


def _short(value: str) -> str:
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 1]}…"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
