"""python train_unet.py runs: the runs that there are, newest first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unet_trainer.commands.command_line import Script, is_override
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.runs.run_summary import RunSummary, State, find_runs, read_run_summary
from unet_trainer.system.console import EXIT_DONE, Console, counted
from unet_trainer.system.terminal import Colour, num_columns, painted

STATE_COLOURS: dict[State, Colour] = {
    "running": "blue",
    "finished": "green",
    "stopped early": "green",
    "interrupted": "yellow",
    "failed": "red",
}
MIN_NAME = 12  # columns of a name on a narrow terminal
GAP = "  "


def main(arguments: Sequence[str], script: Script) -> int:
    given = read_arguments(arguments)
    folder = read_folder(given.words)
    summaries = [read_run_summary(run) for run in find_runs(folder)]
    if given.json:
        print(json.dumps([as_json(summary) for summary in summaries], indent=2, ensure_ascii=False, allow_nan=False))
        return EXIT_DONE
    console = Console()
    if not summaries:
        console.say(f"No runs under {folder} yet; python train_unet.py starts one")
        return EXIT_DONE
    for line in table(summaries, num_columns(sys.stdout)):
        console.say(line)
    running = sum(summary.state == "running" for summary in summaries)
    console.say(f"{counted(len(summaries), 'run')} under {folder}" + (f", {running} running" if running else ""))
    return EXIT_DONE


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("train_unet.py runs", description="The runs that there are, newest first.")
    parser.add_argument(
        "words", nargs="*", metavar="FOLDER | checkpoint_dir=FOLDER", help="where they lie, if not under checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser.parse_intermixed_args(arguments)


def read_folder(words: Sequence[str]) -> Path:
    """Raises UserError."""
    overrides = [word for word in words if is_override(word)]
    folders = [word for word in words if not is_override(word)]
    if any(not override.startswith("checkpoint_dir=") for override in overrides) or len(words) > 1:
        raise UserError(f"runs takes one folder, got {' '.join(words)}: python train_unet.py runs [checkpoint_dir=FOLDER]")
    folder = Path(folders[0] if folders else load_config({}, overrides).checkpoint_dir)
    if words and not folder.is_dir():
        raise UserError(f"checkpoint_dir: {folder} is no folder")
    return folder


def best_iou(summary: RunSummary) -> float | None:
    """Of the best epoch by the monitored metric."""
    return None if summary.best is None else summary.best.get("val_iou")


def as_json(summary: RunSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "folder": str(summary.folder),
        "state": summary.state,
        "best_val_iou": best_iou(summary),
        "best_epoch": None if summary.best is None else summary.best.number,
        "epochs": len(summary.epochs),
        "num_epochs": summary.num_epochs,
        "updated": None if summary.updated is None else summary.updated.isoformat(timespec="seconds"),
    }


def table(summaries: Sequence[RunSummary], columns: int) -> list[str]:
    """A header and a line for each run, no longer than `columns`: on narrow terminals names are cut, then dates left out."""
    rows = [
        [
            summary.name,
            summary.state,
            "–" if (iou := best_iou(summary)) is None else f"{iou:.4f}",
            f"{len(summary.epochs)}" + (f"/{summary.num_epochs}" if summary.num_epochs else ""),
            "" if summary.updated is None else f"{summary.updated.astimezone():%Y-%m-%d %H:%M}",
        ]
        for summary in summaries
    ]
    header = ["run", "state", "best IoU", "epochs", "last written"]
    while True:
        widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
        others = sum(widths[1:]) + len(GAP) * (len(header) - 1)
        widths[0] = min(widths[0], max(MIN_NAME, columns - others))
        if widths[0] + others <= columns or len(header) <= 3:
            break
        header, rows = header[:-1], [row[:-1] for row in rows]
    lines = [_line(header, widths)]
    for row, summary in zip(rows, summaries, strict=True):
        plain = _line([_cut(row[0], widths[0]), *row[1:]], widths)
        start = widths[0] + len(GAP)
        state = painted(row[1], STATE_COLOURS[summary.state], sys.stdout)
        lines.append(plain[:start] + state + plain[start + len(row[1]) :])
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    is_number = (False, False, True, True, False)
    padded = [
        cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(cells, widths, is_number, strict=False)
    ]
    return GAP.join(padded).rstrip()


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"
