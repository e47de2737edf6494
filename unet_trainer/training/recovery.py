"""Decides what happens when an epoch cannot be finished. No other module turns errors of training into decisions.

`Recovery` wraps an epoch. After non-finite numbers the run goes back to the last saved state, once, with a tenth of the learning
rate. After memory ran out it goes on with smaller parts of a batch if on_oom allows it. Both return to the loop, which begins the
epoch again from the position of the state. Everything else saves the state and ends the run: a dead worker, a signal, a file that
became unreadable, a bug. The processes of a torchrun job agree on the cause first, so that all do the same.
"""

from __future__ import annotations

import contextlib
import traceback
from types import TracebackType

from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import shown_path
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.system.console import first_line
from unet_trainer.system.processes import PeerFailed, PeerLost
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.compilation import restoring_model
from unet_trainer.training.diagnosis import explain
from unet_trainer.training.joint_failure import agree_on_failure
from unet_trainer.training.joint_start import share_state
from unet_trainer.training.out_of_memory import can_shrink, is_out_of_memory, release_device_memory, shrink
from unet_trainer.training.resume_messages import describe_position
from unet_trainer.training.run import Run

ROLLBACK_FACTOR = 0.1  # of the learning rate, after non-finite numbers


class Recovery:
    """`with Recovery(run):` around an epoch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """True when the loop may go on."""
        if error is None:
            return False
        if not isinstance(error, Exception | Interrupted):
            return False  # a second Ctrl-C, which waits for nothing
        if self.run.processes.is_alone:
            return self._handle(error)
        try:
            return self._handle_together(error)
        except PeerLost as lost:  # nothing is saved: the state of one process is not that of the job
            raise PeerLost(f"{lost}; {self.run.checkpointer.describe_saved()}") from None

    def _handle_together(self, error: BaseException) -> bool:
        """As _handle, with the cause that all processes of the job agree on."""
        if isinstance(error, PeerLost):
            raise error
        components = self.run.components
        cause = agree_on_failure(error, self.run.processes, components.train_step, components.state)
        if self._handle(cause):
            return True
        if cause is not error:
            raise cause from None
        return False

    def _handle(self, error: BaseException) -> bool:
        """True when the loop may go on, False when the error ends the run."""
        if isinstance(error, TrainingFailed):
            return False  # saved where it was raised
        if isinstance(error, NonFinite):
            roll_back(self.run, error)
            return True
        if is_out_of_memory(error) and not isinstance(error, WorkerError):
            _clear_frames(error)
            handle_out_of_memory(self.run, first_line(error))
            return True
        if isinstance(error, Interrupted | UserError | WorkerError | PeerFailed):
            save_on_failure(self.run)
        else:  # a bug: an error while saving must not hide it
            with contextlib.suppress(Exception):
                save_on_failure(self.run)
        saved = _describe_saved(self.run)
        if isinstance(error, WorkerError):
            ideas = "Try fewer num_workers, or num_workers=0" if self.run.config.num_workers else "See whether the disk is there"
            raise TrainingFailed(f"{error}. {ideas}; {saved}") from None
        if isinstance(error, UserError):  # a file that became unreadable
            raise UserError(f"{error}; {saved}") from None
        return False


def _clear_frames(error: BaseException | None) -> None:
    """Deletes the local variables of the failed step: they hold its memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def save_on_failure(run: Run) -> None:
    is_whole = not run.components.train_step.mid_accumulation
    if is_whole:
        run.state.gather_ranks(run.processes)
    run.checkpointer.save_on_failure(state_is_whole=is_whole)


def _describe_saved(run: Run) -> str:
    """What there is to go on from. The processes of a job wait here until rank 0 has saved: torchrun ends all when one ends."""
    return run.processes.broadcast(run.checkpointer.describe_saved())


def restore_last(run: Run) -> None:
    """The last saved state, on all processes."""
    run.checkpointer.restore_last()
    share_state(run.state, run.processes)
    run.components.train_step.abandon_group()
    run.state.gather_ranks(run.processes)


def roll_back(run: Run, error: NonFinite) -> None:
    """Restores the last saved state with a lower learning rate; the second time, training ends."""
    state, config, checkpointer = run.state, run.config, run.checkpointer
    found = run.processes.gather(_locate(run, error))  # the batch of one process may be the bad one
    where = next((text for text in found if text != str(error)), found[0])
    if config.on_nan == "stop" or state.num_rollbacks:
        checkpointer.save_on_failure(state_is_whole=False)
        ideas = ["a lower learning_rate", "grad_clip=1.0"] + (["use_amp=false"] if config.use_amp else [])
        raise TrainingFailed(f"{where}. Try {', '.join(ideas)}; {_describe_saved(run)}") from None
    restore_last(run)
    state.num_rollbacks += 1
    state.learning_rate.factor *= ROLLBACK_FACTOR
    run.events.add("rollback", epoch=state.epoch, batch=state.batch, text=where)
    run.console.warn(f"{where}. Going back to {describe_position(state)}, with {ROLLBACK_FACTOR:g} of the learning rate")
    checkpointer.save_state(with_config=False)  # settings that failed are not saved


def _locate(run: Run, error: NonFinite) -> str:
    """Where the numbers went bad: step, files, layer, term of the loss."""
    components, loaders = run.components, run.loaders
    num_batches = len(loaders.train)
    if error.val_batch == -1:
        return str(error)  # another process has it
    if error.val_batch is not None:
        segmenter, loader, epoch, batches = components.state.eval_segmenter, loaders.val, 0, [error.val_batch]
        place = f"in epoch {components.state.epoch + 1}"
    elif error.batch_number is not None:
        epoch, first = divmod(error.batch_number, num_batches)
        segmenter, loader = components.state.segmenter, loaders.train
        batches = list(range(first, min(first + components.accumulation_steps, num_batches)))
        step = epoch * components.state.learning_rate.steps_per_epoch + first // components.accumulation_steps + 1
        place = f"from step {step} on (epoch {epoch + 1}, batch {first + 1} of {num_batches})"
    else:
        return str(error)
    with restoring_model(components.train_step):
        for batch in batches:
            files = loader.files(epoch, batch)
            try:
                found = explain(segmenter, components.loss, components.numerics, loader.read(epoch, batch), files)
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure):
                    raise
                break  # the diagnosis needs more memory than a step
            if found:
                names = ", ".join(map(shown_path, files))
                return f"{error} {place}: {found} (images of the batch: {names})"
    return f"{error} {place}"


def handle_out_of_memory(run: Run, reason: str) -> None:
    """Goes on with smaller parts of a batch from the last consistent state, or saves and raises TrainingFailed."""
    components, checkpointer = run.components, run.checkpointer
    is_whole = not components.train_step.mid_accumulation
    if is_whole:
        run.state.gather_ranks(run.processes)
    if not can_shrink(run.config):
        checkpointer.save_on_failure(is_whole)
    device = components.numerics.device
    components.set_num_parts(shrink(run.settings, reason, device, run.console, _describe_saved(run)))
    release_device_memory(device, run.config.compile_model)
    if not is_whole:
        restore_last(run)
    run.events.add("shrink", epoch=run.state.epoch, batch=run.state.batch, batch_parts=run.config.batch_parts, text=reason)
    run.console.note(f"going on from {describe_position(components.state)}")
    checkpointer.save_state()
