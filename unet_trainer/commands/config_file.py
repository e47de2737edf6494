"""--write FILE: a config that a command found, as a file that runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

from unet_trainer.config.errors import UserError
from unet_trainer.system.output_files import check_output, is_replaceable, write_output


def check_may_write(path: Path) -> None:
    """Raises UserError where a file stands that would be lost, before minutes are spent on measuring or reading."""
    check_output("--write", path)
    if is_replaceable(path):
        raise UserError(f"--write: {path} exists; name another file, or remove it")


def train_command(path: Path) -> str:
    """What trains with a config file."""
    return f"python train_unet.py {shlex.quote(str(path))}"


def file_header(path: Path, command: str, data_dir: str) -> str:
    """The first lines of the file, without the signs of a comment."""
    return f"{train_command(path)}\nWritten by {command} for {' '.join(data_dir.split())}; edit it as you like."


def write_config_file(path: Path, text: str) -> None:
    write_output("--write", path, text)
