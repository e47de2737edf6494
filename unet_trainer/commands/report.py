"""python train_unet.py report RUN: report.html of a run, in its folder or where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.commands.runs import find_named_run, read_run_words
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.system.console import EXIT_DONE, Console


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py report", description="One page about a run: scores, curves, images, settings. Needs no network to be read."
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | data_dir=FOLDER",
        help="a run's name or folder (the newest if left out); where its data are now",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="without it RUN/report.html")
    parser.add_argument("--no-pictures", action="store_true", help="without predicting validation images")
    parser.add_argument("--device", default="auto", metavar="D", help="for the pictures: auto, cpu, cuda, cuda:N or mps")
    given = parser.parse_intermixed_args(arguments)
    load_config({"device": given.device})  # checks it
    words = read_run_words(given.words, script, "report", takes_data=True)
    if len(words.names) > 1:
        raise UserError(
            f"got {len(words.names)} runs ({', '.join(words.names)}); need one. python train_unet.py compare takes several"
        )
    folder = find_named_run(next(iter(words.names), None), words.checkpoint_dir)

    from unet_trainer.reports.run_report import write_report  # with OpenCV

    console = Console()
    if not given.no_pictures:
        console.say(f"Predicting validation images of {folder} ...")
    try:
        path = write_report(folder, not given.no_pictures, given.device, given.out, words.data_dir, console=console)
    except OSError as error:
        raise UserError(
            f"{error.filename or given.out or folder}: cannot be written ({error.strerror}); --out FILE names another place"
        ) from None
    console.say(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return EXIT_DONE
