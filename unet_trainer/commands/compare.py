"""python train_unet.py compare RUN RUN ...: runs beside each other, with paired differences and what was set differently."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import Script
from unet_trainer.commands.named_runs import find_named_run, read_run_words
from unet_trainer.config.dump import value_text
from unet_trainer.config.errors import UserError
from unet_trainer.runs.run_summary import read_run_summary
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.console import EXIT_DONE, Console

if TYPE_CHECKING:  # a typo is answered before OpenCV is loaded
    from unet_trainer.reports.comparison import ComparedRun, Comparison

CHART_WIDTH = 40  # characters
MAX_VALUE = 40  # characters of a setting


def main(arguments: Sequence[str], script: Script) -> int:
    parser = argparse.ArgumentParser(
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

    from unet_trainer.reports.comparison import compare_runs
    from unet_trainer.reports.comparison_page import render_comparison

    console = Console()
    summaries = [read_run_summary(folder) for folder in folders]
    for line in comparison_lines(compare_runs(summaries)):
        console.say(line)
    if given.html is not None:
        try:
            write_bytes_atomically(given.html, render_comparison(summaries).encode())
        except OSError as error:
            raise UserError(f"--html {given.html}: cannot be written ({error.strerror})") from None
        console.say(f"\nPage: {given.html}")
    return EXIT_DONE


def comparison_lines(found: Comparison) -> list[str]:
    """One table, one chart, what the images are, and the settings that differ."""
    lines = [*run_table(found), "", *chart_lines(found)]
    if found.note:
        lines += ["", found.note]
    if found.settings:
        rows = [
            [
                name,
                *(
                    _short("–" if value is None and name not in run.summary.settings else value_text(value))
                    for run, value in zip(found.runs, values, strict=True)
                ),
            ]
            for name, values in found.settings
        ]
        lines += ["", *_aligned([["Settings that differ", *(run.name for run in found.runs)], *rows])]
    else:
        lines += ["", "The runs have the same settings, as far as they are kept."]
    return lines


def run_table(found: Comparison) -> list[str]:
    from unet_trainer.reports.comparison_page import difference_text, verdict
    from unet_trainer.reports.number_texts import NONE, duration, rate, score

    def cells(run: ComparedRun) -> list[str]:
        ends = run.scores.interval if run.scores is not None else None
        best = run.summary.best
        return [
            run.name,
            score(run.iou),
            NONE if ends is None else f"{score(ends[0], 3)} – {score(ends[1], 3)}",
            " ".join(part for part in (difference_text(run.difference), verdict(run.difference)) if part),
            NONE if best is None else f"{best.number} of {len(run.summary.epochs)}",
            duration(run.seconds),
            rate(run.images_per_second),
            NONE if run.memory_gib is None else f"{run.memory_gib:.2f} GiB",
            run.summary.state,
        ]

    header = ["Run", "val IoU", "95 % interval", "Difference", "Best epoch", "Time", "Images/s", "GPU memory", "State"]
    return _aligned([header, *(cells(run) for run in found.runs)])


def chart_lines(found: Comparison) -> list[str]:
    """Scores and intervals on one scale, as wide as what there is to see."""
    from unet_trainer.reports.number_texts import score

    values = [value for run in found.runs for value in _extent(run)]
    if not values:
        return ["No run has a score yet."]
    low, high = max(0.0, min(values) - 0.02), min(1.0, max(values) + 0.02)
    width = max(len(run.name) for run in found.runs)

    def place(value: float) -> int:
        return round((value - low) / (high - low) * (CHART_WIDTH - 1))

    lines = [f"{'':<{width}}  {score(low, 2):<{CHART_WIDTH - 4}}{score(high, 2)}"]
    for run in found.runs:
        cells = [" "] * CHART_WIDTH
        extent = _extent(run)
        if extent:
            cells[place(extent[0]) : place(extent[-1]) + 1] = "─" * (place(extent[-1]) - place(extent[0]) + 1)
        if run.iou is not None:
            cells[place(run.iou)] = "●"
        lines.append(f"{run.name:<{width}}  {''.join(cells).rstrip()}".rstrip())
    return lines


def _extent(run: ComparedRun) -> list[float]:
    """From the smallest to the largest of score and interval."""
    ends = run.scores.interval if run.scores is not None and run.scores.interval is not None else ()
    return sorted([*ends, *([run.iou] if run.iou is not None else [])])


def _short(value: str) -> str:
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 1]}…"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
