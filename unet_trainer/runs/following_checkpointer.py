"""What the processes of a torchrun job have in place of a Checkpointer, but for rank 0: it writes for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.run_folder import resume_command


class FollowingCheckpointer:
    """Writes nothing. Restored states come from rank 0: see share_state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resume_command = resume_command(folder)

    def write_config(self) -> None:
        """Rank 0 does."""

    def write_split(self) -> None:
        """Rank 0 does."""

    def save_epoch(self, *epoch: Any) -> None:
        """Rank 0 does."""

    def save_state(self, with_config: bool = True) -> None:
        """Rank 0 does."""

    def save_if_due(self) -> None:
        """Rank 0 decides."""

    def is_due(self) -> bool:
        return False

    def save_on_failure(self, state_is_whole: bool) -> None:
        """Rank 0 does."""

    def restore_last(self) -> None:
        """Rank 0 reads it."""

    def finish(self) -> None:
        """There is nothing to wait for."""

    def unwritten(self) -> list[str]:
        return []

    def describe_saved(self) -> str:
        return f"to go on: {self.resume_command}"

    def attempt(self, write: Callable[[], object]) -> None:
        """Rank 0 writes it."""


AnyCheckpointer = Checkpointer | FollowingCheckpointer
