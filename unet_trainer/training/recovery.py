"""Decides what happens when an epoch cannot be finished. No other module turns errors of training into decisions.

`recovering` wraps an epoch. After memory ran out the run goes on with smaller parts of a batch if on_oom allows it: it
returns to the loop, which begins the epoch again from the position of the state. Everything else saves the state and
ends the run: steps that stay non-finite, a dead worker, a signal, a file that became unreadable, a bug.

In a torchrun job the process that fails gives the others what they wait for, so that nobody hangs, and tells them at
their next agreement. Then all gather their errors, and the gravest is the cause. One that can be handled (memory,
numbers that are not finite, a signal) becomes an error of the same kind on every rank; any other ends the job, and the
process that had it says so."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from unet_trainer.config.errors import NonFinite, TrainingFailed, UserError
from unet_trainer.images.file_bytes import shown_path
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.worker_pool import WorkerError, to_device
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import resize_masks
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.system.console import first_line
from unet_trainer.system.distributed import PeerFailed, PeerLost, is_of_the_link
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.compilation import (
    can_shrink,
    is_out_of_memory,
    release_device_memory,
    restoring,
    shrink,
    unsynchronized,
)
from unet_trainer.training.resume import describe_position
from unet_trainer.training.run import Run


@contextlib.contextmanager
def recovering(run: Run) -> Iterator[None]:
    """Around an epoch. Returns where the loop may go on; raises what ends the run."""
    try:
        yield
    except (Exception, Interrupted) as error:  # not a second Ctrl-C, which waits for nothing
        if not (_handle(run, error) if run.processes.is_alone else _handle_together(run, error)):
            raise


def _handle_together(run: Run, error: BaseException) -> bool:
    """As _handle, with the cause that all processes of the job agree on."""
    processes, step = run.processes, run.components.train_step
    try:
        if isinstance(error, PeerLost):
            raise error
        if is_of_the_link(error):
            with processes.exchange():
                raise error
        is_full = is_out_of_memory(error)
        if is_full:  # what the others are given takes some
            _clear_frames(error)
            release_device_memory(step.device, is_compiled=False)
        if step.sync is not None and step.sync.is_owed and not isinstance(error, PeerFailed):
            if run.config.sync_batchnorm:  # the others may wait in any layer: none can be told
                processes.leave()
                if not is_full:
                    return False
                text = f"{first_line(error)}: with sync_batchnorm the others cannot go on in smaller parts"
                raise TrainingFailed(f"{text}. Try a smaller batch_size; {run.checkpointer.describe_saved()}") from None
            step.sync.finish_in_vain()
        cause = agree_on_failure(run, error)
        if _handle(run, cause):
            step.disconnect()  # in the middle of a step it cannot be used any more
            return True
    except PeerLost as lost:  # nothing is saved: the state of one process is not that of the job
        raise PeerLost(f"{lost}; {run.checkpointer.describe_saved()}") from None
    if cause is not error:
        raise cause from None
    return False


def _handle(run: Run, error: BaseException) -> bool:
    """True when the loop may go on, False when the error ends the run."""
    if isinstance(error, TrainingFailed):
        return False  # saved where it was raised
    if is_out_of_memory(error) and not isinstance(error, WorkerError):
        _clear_frames(error)
        handle_out_of_memory(run, first_line(error))
        return True
    where = ""
    if isinstance(error, NonFinite):  # the process that has the bad batch says most
        where = max(run.processes.all_gather(_locate(run, error)), key=len)
    is_whole = not run.components.train_step.mid_accumulation
    if isinstance(error, NonFinite) and run.state.batch == len(run.loaders.train):
        is_whole = False  # of an epoch that cannot be finished: the last save is before it
    if is_whole:
        run.state.gather_ranks(run.processes)
    # An error while saving must not hide a bug, or the failure of another process.
    is_foreseen = isinstance(error, Interrupted | UserError | WorkerError | NonFinite)
    with contextlib.nullcontext() if is_foreseen else contextlib.suppress(Exception):
        run.checkpointer.save_on_failure(state_is_whole=is_whole)
    saved = _describe_saved(run)
    if isinstance(error, NonFinite):
        also = ", use_amp=false" if run.config.use_amp else ""
        raise TrainingFailed(f"{where}. Try a lower learning_rate, grad_clip=1.0{also}; {saved}") from None
    if isinstance(error, WorkerError):
        ideas = "Try fewer num_workers, or num_workers=0" if run.config.num_workers else "See whether the disk is there"
        raise TrainingFailed(f"{error}. {ideas}; {saved}") from None
    if isinstance(error, UserError):  # a file that became unreadable
        raise UserError(f"{error}; {saved}") from None
    return False


def _clear_frames(error: BaseException | None) -> None:
    """Deletes the local variables of the failed step: they hold its memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _describe_saved(run: Run) -> str:
    """What there is to go on from. The processes of a job wait here until rank 0 has saved: torchrun ends all when one
    ends."""
    return run.processes.broadcast(run.checkpointer.describe_saved())


def restore_last(run: Run) -> None:
    """The last saved state, on all processes."""
    run.checkpointer.restore_last()
    run.state.broadcast(run.processes)
    run.components.train_step.abandon_group()
    run.state.gather_ranks(run.processes)


def _locate(run: Run, error: NonFinite) -> str:
    """Where the numbers went bad: step, files, layer, term of the loss."""
    components, loaders = run.components, run.loaders
    num_batches = len(loaders.train)
    if error.val_batch is not None and error.val_batch >= 0:
        segmenter, loader, epoch, batches = components.state.eval_segmenter, loaders.val, 0, [error.val_batch]
        place = f"in epoch {components.state.epoch + 1}"
    elif error.batch_number is not None:
        epoch, first = divmod(error.batch_number, num_batches)
        segmenter, loader = components.state.segmenter, loaders.train
        group_size = run.config.accumulation_steps
        batches = list(range(first, min(first + group_size, num_batches)))
        step = epoch * components.state.learning_rate.steps_per_epoch + first // group_size + 1
        place = f"from step {step} on (epoch {epoch + 1}, batch {first + 1} of {num_batches})"
    else:
        return str(error)  # of the weights, or another process has the batch
    with restoring(components), unsynchronized(segmenter.network):
        for batch in batches:
            files = loader.assembler.files(epoch, batch)
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
    shrink(run.settings, components, reason, run.console, _describe_saved(run))
    if not is_whole:
        restore_last(run)
    run.events.add(
        "shrink", epoch=run.state.epoch, batch=run.state.batch, batch_parts=run.config.batch_parts, text=reason
    )
    run.console.note(f"going on from {describe_position(components.state)}")
    checkpointer.save_state()


def agree_on_failure(run: Run, error: BaseException) -> BaseException:
    """The error that this process has to handle: its own if that is the cause, else one of the cause's kind. Raises
    PeerLost.

    The state counts as whole afterwards if it is on all processes.
    """
    step, kind = run.components.train_step, ""
    if is_out_of_memory(error) and not isinstance(error, WorkerError):  # a worker may die of it
        kind = "memory"
    elif isinstance(error, NonFinite):
        kind = "non-finite"
    position = None if step.mid_accumulation else (run.state.epoch, run.state.batch)
    cause = run.processes.agree(error, kind, position)
    step.mid_accumulation = cause.position is None
    if cause.rank == run.processes.launch.rank or (kind and kind == cause.kind):
        return error
    if cause.kind == "memory":
        return MemoryError(cause.text)
    if cause.kind == "non-finite":  # all have judged alike
        return NonFinite(cause.text, int(step.guard.first_bad_batch))
    return cause.as_error()


def explain(segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics, batch: Batch, files: Sequence[Path]) -> str:
    """What is not finite in a batch, the cause before its effects; empty if everything is finite, or gradients alone
    are not. Runs the batch once, eagerly, with hooks on every layer: slow, only for training that cannot go on."""
    network = segmenter.network
    is_float = batch.images.is_floating_point()
    bad = [
        str(file)
        for image, file in zip(batch.images, files, strict=False)
        if is_float and not torch.isfinite(image).all()
    ]
    found = [f"{', '.join(bad)} holds pixels that are NaN or infinite"] if bad else []
    bad_weights = [name for name, tensor in network.state_dict().items() if not torch.isfinite(tensor).all()]
    if bad_weights:
        found.append(f"the weights {bad_weights[0]} are not finite")
    images, masks = to_device((batch.images, batch.masks), numerics.device)
    if batch.mask_sizes is not None:
        masks = resize_masks(masks, batch.mask_sizes, images.shape[1:3])
    bad_layers: list[str] = []

    layers = {module: name for name, module in network.named_modules() if not list(module.children())}

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if module in layers and any(torch.is_tensor(item) and not torch.isfinite(item).all() for item in outputs):
            bad_layers.append(layers[module] or type(module).__name__)

    with register_module_forward_hook(record), numerics.autocast():
        logits = segmenter(images)
    if bad_layers:
        found.append(f"the first layer whose output is not finite is {bad_layers[0]}")
    target = loss.target(logits, masks)
    values = {name: weight * loss.value(name, loss.terms[name].sums(target)) for name, weight in loss.weights.items()}
    bad_terms = [name for name, value in values.items() if not torch.isfinite(value)]
    if bad_terms:
        found.append(f"the loss term {', '.join(bad_terms)} is not finite")
    return "; ".join(found)
