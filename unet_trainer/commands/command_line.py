"""The command line: chooses the command, reads its config, and turns each error into a message and an exit code.
Imports no torch, so that a typo is answered at once."""

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from unet_trainer import __version__
from unet_trainer.commands import COMMANDS, REMOVED_COMMANDS, REMOVED_OPTIONS
from unet_trainer.config.errors import CheckpointError, TrainingFailed, UserError
from unet_trainer.config.load import OTHER_TOOLS_NAMES, check_url, load_config
from unet_trainer.config.parsers import near_miss
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.runs.folder import CONFIG_YAML, check_init_from, find_run, folder_of, newest_run
from unet_trainer.system.console import EXIT_INTERRUPTED, EXIT_USER_ERROR, show_error
from unet_trainer.system.launch import read_launch
from unet_trainer.system.os_errors import is_of_the_machine, sentence
from unet_trainer.system.signals import Interrupted, open_closed_streams

CONFIG_SUFFIXES = (".yaml", ".yml")
ScriptConfig = Callable[[Sequence[str] | Mapping[str, Any]], Config]  # the CONFIG of the script, with overrides
# unlike Path.is_file, False for a name that is too long or has a NUL: reported where it is read
_is_file = os.path.isfile
NEWEST = "\0newest"  # --resume without a name; no name can be this
CONFIG_WORDS = ("CONFIG | key=value", "a YAML file, and settings that override it")
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"default": "auto", "metavar": "D", "help": "auto, cpu, cuda, cuda:N or mps"},
    "json": {"metavar": "FILE", "type": Path, "help": "write everything there as well, for programs"},
    "raw": {"action": "store_true", "help": "the weights as trained, of last.pt, not their average"},
    "threshold": {"type": float, "metavar": "P", "help": "least probability of the foreground (0.5), with one class"},
    "tta": {"action": "store_true", "help": "mean over the mirrored and turned images that training had"},
    "write": {"metavar": "FILE", "type": Path, "help": "write the settings there as a config that runs as it is"},
}


class CommandParser(argparse.ArgumentParser):
    """Answers a mistake with one message, like every other error, in place of the usage."""

    def __init__(
        self,
        command: str,
        description: str | None,
        words: tuple[str, str] | None = CONFIG_WORDS,
        shared: str = "",
        **more: Any,
    ) -> None:
        """`words`: what the words are that are no options, and their help. `shared`: names of SHARED_OPTIONS."""
        super().__init__(f"train_unet.py {command}".rstrip(), description=description, **more)
        self.register("type", Path, _named_path)  # what type=Path means in all commands
        if words is not None:
            self.add_argument("words", nargs="*", metavar=words[0], help=words[1])
        for option in shared.split():
            self.add_argument(f"--{option}", **SHARED_OPTIONS[option])

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        if unknown:
            options = [action.option_strings[-1] for action in self._actions if action.option_strings]
            given = [word for word in words.split() if word.startswith("-")]
            message = "; ".join(_unknown_option(word, options, self.prog) for word in given)
        raise UserError(f"{message} (python {self.prog} --help)")

    def parse_known_intermixed_args(self, *given: Any, **named: Any) -> Any:
        try:
            return super().parse_known_intermixed_args(*given, **named)
        except AttributeError as error:  # argparse fails where a signal interrupts it
            raise (error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error) from None


def find_command(words: Sequence[str]) -> Callable[[Sequence[str], ScriptConfig], int | None] | None:
    """The command that the first word names; None to train. It returns an exit code, or None when it is done."""
    if words and words[0] in REMOVED_COMMANDS and not _is_file(words[0]):
        raise UserError(f"{words[0]} was removed: {REMOVED_COMMANDS[words[0]]}")
    if not words or words[0] not in COMMANDS or _is_file(words[0]):
        return None
    if read_launch().world_size > 1:
        raise UserError(f"{words[0]}: torchrun is for training; python train_unet.py {words[0]} needs one process")
    module, _, function = COMMANDS[words[0]].partition(":")
    return getattr(importlib.import_module(module), function)


def exit_codes(main: Callable[..., int]) -> Callable[..., int]:
    """Makes a message and an exit code of each error that `main` raises."""

    @wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            return _explain_errors(lambda: main(*args, **kwargs))
        except KeyboardInterrupt:  # one more, while the first or an error is reported
            return EXIT_INTERRUPTED

    return run


def _explain_errors(main: Callable[[], int]) -> int:
    try:
        open_closed_streams()
        if read_launch().is_torchrun:
            # before torch is loaded: stack traces of connections that broke
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal that cannot show ✓ shows ?
        if sys.flags.optimize > 1:
            raise UserError(
                "python -OO takes away docstrings that segmentation-models-pytorch needs; leave it out, or use -O"
            )
        return main()
    except (UserError, TrainingFailed) as error:
        return _end(error, str(error), error.exit_code)
    except Interrupted as interruption:
        code = interruption.exit_code
        return code if interruption.is_told else _end(interruption, f"interrupted by {interruption}", code)
    except KeyboardInterrupt as interruption:
        return _end(interruption, "interrupted", EXIT_INTERRUPTED)
    except (OSError, RuntimeError, MemoryError) as error:
        if not is_of_the_machine(error):
            raise
        return _end(error, sentence(error), EXIT_USER_ERROR)


def _end(error: BaseException, text: str, exit_code: int) -> int:
    """Print the error. Before the processes of a job are connected, all have the same."""
    if getattr(error, "is_reported", read_launch().local_rank == 0):
        show_error(text)
    return exit_code


def read_training_command(arguments: Sequence[str], description: str | None, script_config: ScriptConfig) -> Config:
    """The config that a training command names."""
    parser = CommandParser("", description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-V", "--version", action="version", version=f"U-Net trainer {__version__}")
    parser.add_argument("--config", metavar="FILE", action="append", help="the YAML file, if not given by position")
    help_text = "go on with the newest run, or with a run's name, folder or .pt file"
    parser.add_argument("--resume", nargs="?", const=NEWEST, metavar="RUN", help=help_text)
    given = parser.parse_intermixed_args(arguments)
    words, resume = [*given.words, *(given.config or ())], given.resume
    if resume is not None and resume != NEWEST and (is_override(resume) or Path(resume).suffix in CONFIG_SUFFIXES):
        words.append(resume)  # --resume key=value: the newest run, with an override
        resume = NEWEST
    if resume is not None and not resume.strip():
        raise UserError(
            "--resume: got an empty name; name a run, or leave the name out (is a variable of the shell not set?)"
        )
    if resume is None:
        return read_config_words(words, script_config)
    files, overrides = _sort_words(words)
    return load_config(*_resume_source(resume, files, overrides, script_config))


def read_config_words(words: Sequence[str], script_config: ScriptConfig, command: str = "") -> Config:
    """The config of a command: the file among the words, or else the script's own config, with the overrides."""
    files, overrides = _sort_words(words)
    if command and files and Path(files[0]).is_dir():
        line = shlex.join([command, f"data_dir={files[0]}", *overrides])
        raise UserError(f"{files[0]} is a folder; need a YAML file. To name the data: python train_unet.py {line}")
    config = load_config(Path(files[0]), overrides) if files else script_config(overrides)
    check_url("data_dir", config.data_dir)
    if command:  # a run of several processes checks it in one of them
        check_init_from(config)
    return config


def split_words(words: Sequence[str], command: str, keys: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Names of runs or files, and settings. Raises UserError for settings that the command does not take."""
    settings: dict[str, str] = {}
    names = [word for word in words if not is_override(word) or Path(word).exists()]
    for word in (word for word in words if word not in names):
        name, _, value = word.partition("=")
        key = name.strip().replace("-", "_")
        if key not in keys or key in settings:
            meant = near_miss(key, keys)
            hint = "" if key in keys or meant is None else f"; did you mean {meant}?"
            raise UserError(f"{word}: of settings {command} takes {', '.join(keys)} alone, once each{hint}")
        settings[key] = value
    return names, settings


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
        if word.isidentifier() and not Path(word).is_dir() and not Path("configs", f"{word}.yaml").is_file():
            meant = near_miss(word, COMMANDS)
            hint = f"did you mean {meant}?" if meant else f"commands, which come first, are {', '.join(COMMANDS)}."
            raise UserError(
                f"{word}: no command and no config file; {hint} To train: python train_unet.py [CONFIG] [key=value]"
            )
    if len(files) > 1:
        raise UserError(f"got {len(files)} config files ({', '.join(files)}); need one, and key=value for the rest")
    return files, overrides


def _resume_source(
    run: str, files: Sequence[str], overrides: Sequence[str], script_config: ScriptConfig
) -> tuple[Path, list[str]]:
    """--resume: the named config, or else the run's own; and what to resume from."""
    own = dict(override.split("=", 1) for override in overrides)
    if "resume" in own:
        raise UserError(f"--resume and resume={own['resume']} say the same twice; leave one of them out")
    named = load_config(Path(files[0])) if files else script_config(())
    checkpoint_dir = Path(own.get("checkpoint_dir") or named.checkpoint_dir)
    found = newest_run(checkpoint_dir) if run == NEWEST else find_run(run, checkpoint_dir)
    folder = folder_of(found)
    own_file = (found.parent if folder is None else folder) / CONFIG_YAML
    if not files and (folder is None or not (own_file.is_file() and own_file.stat().st_size)):
        what = f"{own_file.parent} is no run folder, or its {CONFIG_YAML} is missing or empty"
        raise CheckpointError(f"{what}; name the config: python train_unet.py CONFIG --resume {found}")
    return Path(files[0]) if files else own_file, [*overrides, f"resume={found}"]


def train_command(path: Path) -> str:
    """What trains with a config file."""
    return f"python train_unet.py {shlex.quote(str(path))}"


def file_header(path: Path, command: str, data_dir: str) -> str:
    """The first lines of the file of --write, without the signs of a comment."""
    return f"{train_command(path)}\nWritten by {command} for {' '.join(data_dir.split())}; edit it as you like."


def _named_path(text: str) -> Path:
    """Path("") would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("got an empty name; need a path (is a variable of the shell not set?)")
    return Path(text)


def is_override(word: str) -> bool:
    return "=" in word and word.partition("=")[0].strip().replace("-", "_").isidentifier()


def _unknown_option(option: str, options: Sequence[str], program: str) -> str:
    command, plain = program.rpartition(" ")[2], option.partition("=")[0]
    if (instead := REMOVED_OPTIONS.get(f"{command} {plain}")) is not None:
        return f"{command} {plain} was removed: {instead}"
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    name = OTHER_TOOLS_NAMES.get(name, name)
    if name in FIELDS:
        return f"{option}: unknown option; settings are given as {name}=VALUE"
    return f"{option}: unknown option; need {', '.join(options)}, or a setting as key=VALUE"
