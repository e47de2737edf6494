"""What one call of `train` holds of the system: console, signal handlers, the lock of the run's folder. Closes them in order."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from types import TracebackType

from unet_trainer.config.errors import UserError
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.runs.run_folder import has_checkpoint
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.folder_lock import FolderLock
from unet_trainer.system.signals import Signals


class Session:
    """Entered around a run. The error that ends the run goes into its log; after an interruption it says how to resume."""

    def __init__(self) -> None:
        self.console = Console()
        self.signals = Signals()
        self.lock = FolderLock()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Session:
        self._exits.enter_context(self.signals)
        self._exits.enter_context(self.lock)
        return self

    def on_exit(self, call: Callable[[], object]) -> None:
        """Calls this when the run ends, however it ends; the last one first."""
        self._exits.callback(call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exits.close()
        if isinstance(error, TrainingFailed | UserError):
            self.console.log_only(f"Error: {error}")  # whoever catches it shows it
        elif isinstance(error, Exception):  # a bug: its traceback goes to the terminal
            self.console.log_only(f"Error: {type(error).__name__}: {first_line(error)}")
        elif isinstance(error, KeyboardInterrupt):
            self._say_interrupted()

    def _say_interrupted(self) -> None:
        folder = None if self.console.log is None else self.console.log.parent
        if folder is not None and has_checkpoint(folder):
            command = f"python train_unet.py --resume {shlex.quote(str(folder))}"
            self.console.say(f"Interrupted. To go on where the state was saved: {command}")
        else:
            self.console.say("Interrupted before anything was saved")
