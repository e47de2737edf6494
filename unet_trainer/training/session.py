"""What one call of `train` holds and closes in order: console, record, signal handlers, the lock of the folder."""

from __future__ import annotations

import contextlib
import time
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.runs.folder import describe_saved
from unet_trainer.runs.record import RunRecord
from unet_trainer.system.console import Console, first_line, silent_console
from unet_trainer.system.launch import read_launch
from unet_trainer.system.locks import FolderLock
from unet_trainer.system.os_errors import is_of_the_machine, sentence
from unet_trainer.system.signals import Interrupted, Signals

if TYPE_CHECKING:  # it imports torch
    from unet_trainer.training.parallel import Job


class Session:
    """Entered around a run. The error that ends it goes into its log; after an interruption it says how to resume."""

    def __init__(self, started: float | None = None) -> None:
        """`started`: when the command was given, if that was before now."""
        self.started = time.perf_counter() if started is None else started
        self.launch = read_launch()
        self.console = Console() if self.launch.is_main else silent_console()
        self.record, self.signals, self.lock = RunRecord(), Signals(), FolderLock()
        if self.launch.is_main:
            self.console.on_message = self.record.add
        parts, exits = contextlib.ExitStack(), contextlib.ExitStack()
        self.on_exit = parts.callback  # calls a function when the run ends, however it ends; the last one first
        self.close_parts = parts.close  # does so before the run says its result
        self.on_end = exits.callback  # calls a function when the session ends
        self._parts, self._exits = parts, exits

    def __enter__(self) -> Session:
        self.on_end(self.console.close_log)
        for part in (self.signals, self.lock, self._parts):
            self._exits.enter_context(part)
        return self

    @cached_property
    def processes(self) -> Job:
        from unet_trainer.training.parallel import Job  # imports torch

        return Job(self.launch)

    def connect(self) -> None:
        """Waits for the other processes of a job."""
        self.on_end(self.processes.close)
        self.processes.start(self.signals)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shown = self._as_sentence(error) if error is not None and is_of_the_machine(error) else error
        if self.launch.is_torchrun:
            self.signals.is_deferred = True  # torchrun ends the others with a signal when one has ended
            if shown is not None:
                shown.is_reported = True  # type: ignore[attr-defined] # by each process that fails
        with self._exits:  # the lock is held: afterwards another process may go on with the run
            self._log_end(shown)
        if shown is not error and shown is not None:
            raise shown from None

    def _as_sentence(self, error: BaseException) -> TrainingFailed | UserError:
        """An error of the machine (permission, limits, a failing disk), whose traceback would help nobody."""
        if self.console.log is None:  # the run has no folder yet
            return UserError(sentence(error))
        return TrainingFailed(f"{sentence(error)}; {describe_saved(self.console.log.parent)}")

    def _log_end(self, error: BaseException | None) -> None:
        """What ended the run, for its log; `report` has recorded the end of one that came to it."""
        if isinstance(error, KeyboardInterrupt | GeneratorExit):  # GeneratorExit: who follows the run has left the loop
            self._say_interrupted(error)
            self.record.end("interrupted", str(error) or "cancelled")
        elif isinstance(error, Exception):
            # Whoever catches an error that was foreseen shows it; the traceback of a bug goes to the terminal.
            is_foreseen = isinstance(error, TrainingFailed | UserError)
            text = str(error) if is_foreseen else f"{type(error).__name__}: {first_line(error)}"
            self.console.log_only(f"Error: {text}")
            self.record.end("failed", text)
        self.record.save()

    def _say_interrupted(self, error: KeyboardInterrupt | GeneratorExit) -> None:
        what = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Cancelled"
        if isinstance(error, Interrupted):
            what, error.is_told = f"Interrupted by {error}", True
        folder = None if self.console.log is None else self.console.log.parent
        saved = describe_saved(folder)
        if self.record.content.last_end is not None:
            saved = f"the run is finished; python train_unet.py report {folder} makes its report"
        self.console.say(f"{what}; {saved}")
