"""Which runs a command means that shows them: names, folders, or the newest. Unlike for training on, a run needs no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet_trainer.commands.command_line import Script, is_override
from unet_trainer.config.errors import UserError
from unet_trainer.runs.run_summary import find_runs, is_run

NUM_NAMED = 5


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
