"""python train_unet.py runs: the runs that there are, newest first. And which runs `report`, `watch` and `compare` mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet_trainer.commands.command_line import CommandParser, Script, is_override
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.system.console import EXIT_DONE, Colour, Console, counted, num_columns, painted
from unet_trainer.training.run_summary import RunSummary, State, find_runs, is_run, read_run_summary

STATE_COLOURS: dict[State, Colour] = {
    "running": "blue",
    "finished": "green",
    "stopped early": "green",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
}
MIN_NAME = 12  # columns of a name on a narrow terminal
GAP = "  "
NUM_NAMED = 5  # runs that an error names


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser("train_unet.py runs", description="The runs that there are, newest first.")
    metavar = "FOLDER | checkpoint_dir=FOLDER"
    parser.add_argument("words", nargs="*", metavar=metavar, help="where they lie, if not under checkpoints")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_intermixed_args(arguments)
    words = [word.removeprefix("checkpoint_dir=") for word in given.words]
    if len(words) > 1 or any(is_override(word) for word in words):
        raise UserError(f"runs takes one folder, got {' '.join(given.words)}: python train_unet.py runs [checkpoint_dir=FOLDER]")
    folder = Path(words[0] if words else load_config({}).checkpoint_dir)
    if words and not folder.is_dir():
        raise UserError(f"checkpoint_dir: {folder} is no folder")
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
    for summary in summaries:
        if summary.problems:
            more = f" (and {len(summary.problems) - 1} more)" if len(summary.problems) > 1 else ""
            console.warn(f"{summary.folder} is damaged; left out: {summary.problems[0]}{more}")
    running = sum(summary.state == "running" for summary in summaries)
    console.say(f"{counted(len(summaries), 'run')} under {folder}" + (f", {running} running" if running else ""))
    return EXIT_DONE


def as_json(summary: RunSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "folder": str(summary.folder),
        "state": summary.state,
        "best_val_iou": summary.best_iou,
        "best_epoch": None if summary.best is None else summary.best.number,
        "epochs": len(summary.epochs),
        "num_epochs": summary.num_epochs,
        "problems": summary.problems,
        "updated": None if summary.updated is None else summary.updated.isoformat(timespec="seconds"),
    }


def table(summaries: Sequence[RunSummary], columns: int) -> list[str]:
    """A header and a line for each run, no longer than `columns`: on narrow terminals names are cut, then dates left out."""
    rows = [
        [
            summary.name,
            summary.state,
            "–" if (iou := summary.best_iou) is None else f"{iou:.4f}",
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


@dataclass(frozen=True)
class RunWords:
    names: list[str]
    checkpoint_dir: Path
    data_dir: Path | None  # where the data are now, if it was said


def read_run_words(words: Sequence[str], script: Script, command: str, takes_data: bool = False) -> RunWords:
    """Runs, and key=value for where they and their data lie. Raises UserError for other settings."""
    keys = ("checkpoint_dir", "data_dir") if takes_data else ("checkpoint_dir",)
    settings = {}
    names = []
    for word in words:
        if not is_override(word) or is_run(Path(word)):
            names.append(word)
            continue
        key, _, value = word.partition("=")
        if key.replace("-", "_") not in keys:
            raise UserError(f"{word}: {command} takes {' and '.join(f'{name}=FOLDER' for name in keys)} and no other setting")
        settings[key.replace("-", "_")] = value
    checkpoint_dir = Path(settings.get("checkpoint_dir") or script.config(()).checkpoint_dir)
    return RunWords(names, checkpoint_dir, Path(settings["data_dir"]) if "data_dir" in settings else None)


def find_named_run(name: str | None, checkpoint_dir: Path) -> Path:
    """The folder of a run: by its path, its name under checkpoint_dir or a file in it; the newest without a name.

    Raises UserError.
    """
    if name is None:
        found = find_runs(checkpoint_dir)
        if not found:
            raise UserError(f"checkpoint_dir: {checkpoint_dir} holds no runs; python train_unet.py starts one")
        return found[0]
    candidates = [Path(name), checkpoint_dir / name]
    candidates += [candidate.parent for candidate in candidates if candidate.is_file()]
    for candidate in candidates:
        if is_run(candidate):
            return candidate
    runs = [folder.name for folder in find_runs(checkpoint_dir)]
    there = f"holds {', '.join(runs[:NUM_NAMED])}" if runs else "holds no runs"
    raise UserError(f"no run {name}; {checkpoint_dir} {there}")
