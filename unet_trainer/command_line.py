"""Reads the command line: a config file, key=value, --resume. Imports no torch, so that a typo is answered in a blink."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from unet_trainer.config import FIELDS, OTHER_TOOLS_NAMES, Config, UserError, load_config
from unet_trainer.parsers import near_miss
from unet_trainer.runs import CheckpointError, find_run, newest_run

COMMANDS = ("check", "bench")  # without one, it trains

OwnConfig = Callable[[Sequence[str]], Config]


def read_command_line(arguments: Sequence[str], description: str | None, own_config: OwnConfig) -> Config:
    """The config that a training command names; `own_config` gives the script's own, with overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")
    parser.add_argument("--config", metavar="FILE", help="the YAML file, if not given by position")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="go on with the newest run, or with a run's name, folder or .pt file"
    )
    given, unknown = parser.parse_known_intermixed_args(arguments)
    words = given.words + [word for word in unknown if not word.startswith("-")]  # left over behind an unknown option
    options = [word for word in unknown if word.startswith("-")]
    if given.resume is not None and (_is_override(given.resume) or given.resume.endswith((".yaml", ".yml"))):
        words.append(given.resume)  # --resume key=value: the newest run, with an override
        given.resume = ""
    if options:
        raise UserError("; ".join(_unknown_option(option) for option in options))
    files, overrides = _sort_words([*words, *([given.config] if given.config else [])])
    if given.resume is None:
        return load_config(Path(files[0]), overrides) if files else own_config(overrides)
    return load_config(*_resume_source(given.resume, files, overrides, own_config))


def read_check_command(arguments: Sequence[str], own_config: OwnConfig) -> tuple[Config, Path | None]:
    """The config that a check command names, and the file for its report."""
    parser = argparse.ArgumentParser("train_unet.py check", description="Reads every file of a dataset and reports what is wrong.")
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well, for programs")
    given = parser.parse_intermixed_args(arguments)
    files, overrides = _sort_words(given.words)
    return load_config(Path(files[0]), overrides) if files else own_config(overrides), given.json


def read_bench_command(arguments: Sequence[str], own_config: OwnConfig) -> tuple[Config, bool, bool]:
    """The config that a bench command names, whether it is to be quick, and whether it is to time the step alone."""
    parser = argparse.ArgumentParser("train_unet.py bench", description="Trains in several precisions and compares them.")
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer rows and epochs")
    extent.add_argument("--step", action="store_true", help="no training: the config's step alone, on a batch on the device")
    given = parser.parse_intermixed_args(arguments)
    files, overrides = _sort_words(given.words)
    return load_config(Path(files[0]), overrides) if files else own_config(overrides), given.quick, given.step


def _sort_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files (one at most) and key=value overrides."""
    overrides = [word for word in words if _is_override(word)]
    files = [word for word in words if not _is_override(word)]
    for word in files:
        if word in FIELDS:
            raise UserError(f"{word}: settings are given as {word}=VALUE")
        if (meant := near_miss(word, COMMANDS)) is not None:
            raise UserError(f"{word}: did you mean the command {meant}? It comes first: python train_unet.py {meant}")
    if len(files) > 1:
        raise UserError(f"got {len(files)} config files ({', '.join(files)}); need one, and key=value for the rest")
    return files, overrides


def _resume_source(run: str, files: Sequence[str], overrides: Sequence[str], own_config: OwnConfig) -> tuple[Path, list[str]]:
    """--resume: the named config, or else the run's own; and where to go on from."""
    own = dict(override.split("=", 1) for override in overrides)
    checkpoint_dir = Path(own.get("checkpoint_dir") or (load_config(Path(files[0])) if files else own_config(())).checkpoint_dir)
    found = find_run(run, checkpoint_dir) if run else newest_run(checkpoint_dir)
    folder = found if found.is_dir() else found.parent
    own_file = folder / "config.yaml"
    if not files and not (own_file.is_file() and own_file.stat().st_size):
        what = f"{own_file} is empty" if own_file.is_file() else f"{folder} has no config.yaml"
        raise CheckpointError(f"{what}; name the config: python train_unet.py CONFIG --resume {found}")
    return Path(files[0]) if files else own_file, [*overrides, f"resume={found}"]


def _is_override(word: str) -> bool:
    return "=" in word and word.partition("=")[0].strip().replace("-", "_").isidentifier()


def _unknown_option(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    name = OTHER_TOOLS_NAMES.get(name, name)
    return f"{option}: unknown option" + (f"; settings are given as {name}=VALUE" if name else "")
