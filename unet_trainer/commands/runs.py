"""python train_unet.py runs, report and compare: the runs that there are, to look at."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, split_words
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.runs.folder import REPORT, find_runs, find_shown_run
from unet_trainer.runs.record import RunSummary, State, read_run_summary
from unet_trainer.system.atomic_files import HTML_PAGE, check_output, check_replaceable, write_output
from unet_trainer.system.console import Colour, Console, aligned, counted, cut, painted, score_text

if TYPE_CHECKING:  # a typo is answered before OpenCV and torch are loaded
    from unet_trainer.reports.comparison import Comparison

STATE_COLOURS: dict[State, Colour] = {
    "running": "blue",
    "finished": "green",
    "stopped early": "green",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
}
MAX_VALUE = 40  # characters of a setting


def list_runs(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    words = ("FOLDER | checkpoint_dir=FOLDER", "where they lie, if not under checkpoints")
    parser = CommandParser("runs", "The runs that there are, newest first.", words)
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_intermixed_args(arguments)
    names, settings = split_words(given.words, "runs", ["checkpoint_dir"])
    places = [*names, *settings.values()]
    if len(places) > 1:
        raise UserError(
            f"runs takes one folder, got {' '.join(given.words)}: python train_unet.py runs [checkpoint_dir=FOLDER]"
        )
    folder = Path(places[0] if places else script_config(()).checkpoint_dir)
    if places and not folder.is_dir():
        raise UserError(f"checkpoint_dir: {folder} is no folder")
    summaries = [read_run_summary(run) for run in find_runs(folder)]
    if given.json:
        print(json.dumps([as_json(summary) for summary in summaries], indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    if not summaries:
        console.say(f"No runs under {folder} yet; python train_unet.py starts one")
        return
    for line in table(summaries):
        console.say(line)
    _warn_of_damage(summaries, console)
    running = sum(summary.state == "running" for summary in summaries)
    console.say(f"{counted(len(summaries), 'run')} under {folder}" + (f", {running} running" if running else ""))


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


def table(summaries: Sequence[RunSummary]) -> list[str]:
    """A header and a line for each run."""
    rows = [["run", "state", "best IoU", "epochs", "last written"]]
    for summary in summaries:
        written = "" if summary.updated is None else f"{summary.updated.astimezone():%Y-%m-%d %H:%M}"
        rows.append([summary.name, summary.state, score_text(summary.best_iou), summary.progress, written])
    header, *lines = aligned(rows)
    start = header.index("state")
    coloured = []
    for summary, line in zip(summaries, lines, strict=True):
        end = start + len(summary.state)
        coloured.append(line[:start] + painted(line[start:end], STATE_COLOURS[summary.state], sys.stdout) + line[end:])
    return [header, *coloured]


def _warn_of_damage(summaries: Sequence[RunSummary], console: Console) -> None:
    for summary in summaries:
        if summary.problems:
            more = f" (and {len(summary.problems) - 1} more)" if len(summary.problems) > 1 else ""
            console.warn(f"{summary.folder} is damaged; left out: {summary.problems[0]}{more}")


def read_run_words(
    words: Sequence[str], script_config: ScriptConfig, command: str, takes_data: bool = False
) -> tuple[list[str], list[Path], Path | None]:
    """The names of runs, their folders (without a name the newest), and where their data are now. Raises UserError."""
    names, settings = split_words(words, command, ("checkpoint_dir", "data_dir") if takes_data else ("checkpoint_dir",))
    checkpoint_dir = Path(settings.get("checkpoint_dir") or script_config(()).checkpoint_dir)
    wanted: list[str | None] = [*names] or [None]
    folders = [find_shown_run(name, checkpoint_dir) for name in wanted]
    return names, list(dict.fromkeys(folders)), Path(settings["data_dir"]) if "data_dir" in settings else None


def report(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    what = "One page about a run: scores, curves, images, settings. Needs no network to be read."
    words = ("RUN | data_dir=FOLDER", "a run's name or folder (the newest if left out); where its data are now")
    parser = CommandParser("report", what, words, "device")
    parser.add_argument("--out", metavar="FILE", type=Path, help="without it RUN/report.html")
    parser.add_argument("--no-pictures", action="store_true", help="without predicting validation images")
    given = parser.parse_intermixed_args(arguments)
    load_config({"device": given.device})  # checks it
    names, (folder, *_), data_dir = read_run_words(given.words, script_config, "report", takes_data=True)
    if len(names) > 1:
        raise UserError(
            f"got {len(names)} runs ({', '.join(names)}); need one. python train_unet.py compare takes several"
        )

    if given.out is not None:
        check_output("--out", given.out, HTML_PAGE)
    else:
        check_replaceable("report", folder / REPORT, HTML_PAGE)

    from unet_trainer.reports.run_report import write_report  # with OpenCV

    console = Console()
    if not given.no_pictures:
        console.say(f"Predicting validation images of {folder} ...")
    try:
        path = write_report(folder, not given.no_pictures, given.device, given.out, data_dir, console=console)
    except OSError as error:
        place = error.filename or folder
        raise UserError(f"{place}: cannot be written ({error.strerror}); --out FILE names another place") from None
    console.say(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")


def compare(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    what = "Runs beside each other. The first is the one that the others are compared with."
    parser = CommandParser("compare", what, ("RUN", "names or folders of two or more runs"))
    parser.add_argument("--html", metavar="FILE", type=Path, help="a page with tables and curves as well")
    given = parser.parse_intermixed_args(arguments)
    names, folders, _ = read_run_words(given.words, script_config, "compare")
    if len(names) > len(folders) == 1:
        raise UserError(f"{' and '.join(names)} are the same run; name another: python train_unet.py runs lists them")
    if len(folders) < 2:
        raise UserError(
            f"compare takes two or more runs, got {', '.join(names) or 'none'}: python train_unet.py compare RUN RUN"
        )

    if given.html is not None:
        check_output("--html", given.html, HTML_PAGE)

    from unet_trainer.reports.comparison import compare_runs, render_comparison

    console = Console()
    summaries = [read_run_summary(folder) for folder in folders]
    for line in comparison_lines(compare_runs(summaries)):
        console.say(line)
    _warn_of_damage(summaries, console)
    if given.html is not None:
        write_output("--html", given.html, render_comparison(summaries))
        console.say(f"\nPage: {given.html}")


def comparison_lines(found: Comparison) -> list[str]:
    """A table of the runs, what the images are, and the settings that differ."""
    from unet_trainer.reports.page import NONE, duration, interval, rate, score

    header = ["Run", "val IoU", "95 % interval", "Difference", "Best epoch", "Epochs", "Time", "Images/s", "GPU memory"]
    rows = [[*header, "State"]]
    for run in found.runs:
        best, summary = run.summary.best, run.summary
        epochs = [NONE if best is None else str(best.number), summary.progress]
        difference = NONE if run.difference is None else f"{run.difference} {run.difference.verdict}"
        speed = [duration(summary.seconds), rate(summary.images_per_second), run.memory_text]
        rows.append(
            [run.name, score(summary.best_iou, 4), interval(run.interval), difference, *epochs, *speed, summary.state]
        )
    lines = [*aligned(rows), "", *([found.note, ""] if found.note else [])]
    if not found.settings:
        return [*lines, "The runs have the same settings, as far as they are kept."]
    cells = [[name, *(cut(value, MAX_VALUE) for value in values)] for name, values in found.settings]
    return [*lines, *aligned([["Settings that differ", *found.names], *cells])]
