"""The command line: chooses the command, reads its config, and turns each error into a message and an exit code.

Imports no torch, so that a typo is answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unet_trainer.commands import COMMANDS
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import OTHER_TOOLS_NAMES, load_config
from unet_trainer.config.parsers import near_miss
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.runs.errors import CheckpointError, TrainingFailed
from unet_trainer.runs.run_folder import CONFIG_YAML, find_run, folder_of, newest_run
from unet_trainer.system.console import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TRAINING_FAILED, EXIT_USER_ERROR, show_error
from unet_trainer.system.distributed import current
from unet_trainer.system.os_errors import is_of_the_machine, sentence
from unet_trainer.system.parent_process import end_with_parent
from unet_trainer.system.processes import PeerFailed, PeerLost
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.system.standard_streams import open_closed_streams

CONFIG_SUFFIXES = (".yaml", ".yml")
NEWEST = "\0newest"  # --resume without a name; no name can be this


class Trained(Protocol):
    """What the command line needs of the result of training."""

    @property
    def unwritten(self) -> list[str]: ...

    @property
    def missing(self) -> list[str]: ...


@dataclass(frozen=True)
class Script:
    """What the commands need of train_unet.py."""

    path: Path
    description: str | None
    config: Callable[[Sequence[str] | Mapping[str, Any]], Config]  # its own config, with overrides
    train: Callable[[Config], Trained]


def run_command_line(arguments: Sequence[str], script: Script) -> int:
    """Trains, or runs the command that the first argument names; returns the exit code. Errors become messages here."""
    open_closed_streams()
    if current().launch.is_torchrun:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded: stack traces of connections that broke
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ✓ shows ?
    end_with_parent(current().launch.is_torchrun)
    try:
        if sys.flags.optimize > 1:
            raise UserError("python -OO takes away docstrings that segmentation-models-pytorch needs; leave it out, or use -O")
        if arguments and arguments[0] in COMMANDS and not _is_file(arguments[0]):
            if current().launch.world_size > 1:
                raise UserError(f"{arguments[0]}: torchrun is for training; python train_unet.py {arguments[0]} needs one process")
            with Signals():  # SIGTERM tidies up as Ctrl-C does
                return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:], script)
        result = script.train(read_training_command(arguments, script))
        return EXIT_TRAINING_FAILED if result.unwritten or result.missing else EXIT_DONE
    except UserError as error:
        return _end(str(error), EXIT_USER_ERROR)
    except (TrainingFailed, PeerLost) as error:
        return _end(str(error), EXIT_TRAINING_FAILED)
    except PeerFailed as error:  # that process says it, where it runs
        launch = current().launch
        if launch.rank == 0 and error.rank is not None and not launch.is_on_this_machine(error.rank):
            show_error(str(error))
        return error.exit_code
    except Interrupted as interruption:
        return _end(f"interrupted by {interruption}", 128 + interruption.signal_number)
    except KeyboardInterrupt:
        return _end("interrupted", EXIT_INTERRUPTED)
    except (OSError, RuntimeError) as error:
        if not is_of_the_machine(error):
            raise
        return _end(sentence(error), EXIT_USER_ERROR)


def _end(text: str, exit_code: int) -> int:
    """Of the processes of a job one speaks: the first that knows why it ends."""
    if current().report_failure(text, exit_code):
        show_error(text)
    return exit_code


def read_training_command(arguments: Sequence[str], script: Script) -> Config:
    """The config that a training command names."""
    parser = argparse.ArgumentParser(description=script.description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_words(parser)
    parser.add_argument("--config", metavar="FILE", action="append", help="the YAML file, if not given by position")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        action="append",
        metavar="RUN",
        help="go on with the newest run, or with a run's name, folder or .pt file",
    )
    given, unknown = parser.parse_known_intermixed_args(arguments)
    words = given.words + [word for word in unknown if not word.startswith("-")]  # left over after an unknown option
    options = [word for word in unknown if word.startswith("-")]
    resume, config = _only(given.resume, "--resume"), _only(given.config, "--config")
    if resume is not None and resume != NEWEST and (is_override(resume) or Path(resume).suffix in CONFIG_SUFFIXES):
        words.append(resume)  # --resume key=value: the newest run, with an override
        resume = NEWEST
    if options:
        raise UserError("; ".join(_unknown_option(option) for option in options))
    words += [config] if config is not None else []
    if resume is None:
        return read_config_words(words, script)
    files, overrides = _sort_words(words)
    return load_config(*_resume_source(resume, files, overrides, script))


def _only(values: Sequence[str] | None, option: str) -> str | None:
    """The value of an option that is given once at most. An empty one is what a shell makes of a variable that is not set."""
    if not values:
        return None
    if len(values) > 1:
        raise UserError(f"{option}: given {len(values)} times; need it once")
    if not values[0].strip():
        raise UserError(f"{option}: got an empty name; name one, or leave {option} out")
    return values[0]


def add_config_words(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command: a config file and overrides."""
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")


def read_config_words(words: Sequence[str], script: Script) -> Config:
    """The config of a command: the file among the words, or else the script's own config, with the overrides."""
    files, overrides = _sort_words(words)
    return load_config(Path(files[0]), overrides) if files else script.config(overrides)


def _sort_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files (one at most) and key=value overrides."""
    overrides = [word for word in words if is_override(word)]
    files = [word for word in words if not is_override(word)]
    for word in files:
        if _is_file(word):
            continue
        if not word.strip():
            raise UserError("got an empty word; need a config file or key=value (is a variable of the shell not set?)")
        if word in FIELDS:
            raise UserError(f"{word}: settings are given as {word}=VALUE")
        if Path(word).suffix not in CONFIG_SUFFIXES and (meant := near_miss(word, COMMANDS)) is not None:
            raise UserError(f"{word}: did you mean the command {meant}? It comes first: python train_unet.py {meant}")
    if len(files) > 1:
        raise UserError(f"got {len(files)} config files ({', '.join(files)}); need one, and key=value for the rest")
    return files, overrides


def _resume_source(run: str, files: Sequence[str], overrides: Sequence[str], script: Script) -> tuple[Path, list[str]]:
    """--resume: the named config, or else the run's own; and what to resume from."""
    own = dict(override.split("=", 1) for override in overrides)
    if "resume" in own:
        raise UserError(f"--resume and resume={own['resume']} say the same twice; leave one of them out")
    named = load_config(Path(files[0])) if files else script.config(())
    checkpoint_dir = Path(own.get("checkpoint_dir") or named.checkpoint_dir)
    found = newest_run(checkpoint_dir) if run == NEWEST else find_run(run, checkpoint_dir)
    folder = folder_of(found)
    own_file = (found.parent if folder is None else folder) / CONFIG_YAML
    if not files and (folder is None or not (own_file.is_file() and own_file.stat().st_size)):
        what = f"{own_file.parent} has no {CONFIG_YAML}"
        if own_file.is_file():
            what = f"{own_file.parent} is no run's folder" if own_file.stat().st_size else f"{own_file} is empty"
        raise CheckpointError(f"{what}; name the config: python train_unet.py CONFIG --resume {found}")
    return Path(files[0]) if files else own_file, [*overrides, f"resume={found}"]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL: reported where it is read
        return False


def is_override(word: str) -> bool:
    return "=" in word and word.partition("=")[0].strip().replace("-", "_").isidentifier()


def _unknown_option(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    name = OTHER_TOOLS_NAMES.get(name, name)
    return f"{option}: unknown option" + (f"; settings are given as {name}=VALUE" if name else "")
