"""--write FILE: a config that a command found, as a file that runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import write_text_atomically


def check_may_write(path: Path) -> None:
    """Raises UserError where something stands that would be lost, before minutes are spent on measuring or reading."""
    if path.exists():
        raise UserError(f"--write: {path} exists; name another file, or remove it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--write: there is no folder {path.absolute().parent}")


def train_command(path: Path) -> str:
    """What trains with a config file."""
    return f"python train_unet.py {shlex.quote(str(path))}"


def file_header(path: Path, command: str, data_dir: str) -> str:
    """The first lines of the file, without the signs of a comment."""
    return f"{train_command(path)}\nWritten by {command} for {' '.join(data_dir.split())}; edit it as you like."


def write_config_file(path: Path, text: str) -> None:
    try:
        write_text_atomically(path, text)
    except OSError as error:
        raise UserError(f"--write: {path} cannot be written ({error.strerror})") from None
