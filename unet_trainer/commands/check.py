"""python train_unet.py check: reads every file of a dataset and reports what it holds and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unet_trainer.commands.command_line import CommandParser, Script, add_config_words, check_may_write, read_config_words
from unet_trainer.system.console import EXIT_DONE, EXIT_USER_ERROR, Console


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser("train_unet.py check", description="Reads every file of a dataset and reports what is wrong.")
    add_config_words(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well, for programs")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the settings there as a config that runs as it is")
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script.config, "check")
    check_may_write(given.write)

    from unet_trainer.commands.data_check import check_data  # numpy and OpenCV: a typo is answered before they are loaded

    is_good = check_data(config, Console(), given.json, given.write)
    return EXIT_DONE if is_good else EXIT_USER_ERROR
