"""python train_unet.py watch [RUN ...]: the report of a run, live in a browser; several runs over each other."""

from __future__ import annotations

from collections.abc import Sequence

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.commands.local_pages import add_page_options, bind, check_port, open_browser, say_address, serve
from unet_trainer.commands.runs import find_named_run, read_run_words
from unet_trainer.system.console import Console
from unet_trainer.training.run_summary import read_run_summary


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py watch",
        description="Shows a run in a browser while it goes on, also one of another process. Reads its folder and no more.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="RUN", help="names or folders of runs (the newest if left out); several are compared"
    )
    add_page_options(parser)
    given = parser.parse_intermixed_args(arguments)
    check_port(given.port)
    words = read_run_words(given.words, script, "watch")
    names: list[str | None] = [*dict.fromkeys(words.names)] or [None]
    folders = [find_named_run(name, words.checkpoint_dir) for name in names]

    from unet_trainer.reports.live_server import WatchServer  # with OpenCV

    console = Console()
    server = bind(given.host, given.port, lambda address: WatchServer(address, folders))
    for folder in folders:
        summary = read_run_summary(folder)
        planned = f" of {summary.num_epochs}" if summary.num_epochs else ""
        console.say(f"{folder}: {summary.state}, {len(summary.epochs)}{planned} epochs")
    say_address(console, server, given.host, "see the runs and their validation images")
    if not given.no_browser:
        open_browser(server.url)
    return serve(server, console)
