"""Decides what happens when an epoch cannot be finished. No other module turns errors of training into decisions.

`recovering` wraps an epoch. After memory ran out the run goes on with smaller parts of a batch if on_oom allows it: it
returns to the loop, which begins the epoch again from the position of the state. Everything else saves the state and
ends the run: steps that stay non-finite, a dead worker, a signal, a file that became unreadable, a bug. In a torchrun
job memory that runs out ends the run too: smaller parts are tried before the first epoch, by all processes together."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from unet_trainer.config.errors import NonFinite, PeerLost, TrainingFailed, UserError
from unet_trainer.images.file_bytes import shown_path
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.worker_pool import WorkerError, to_device
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import resize_masks
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.system.console import first_line
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.compilation import (
    can_shrink,
    is_out_of_memory,
    restoring,
    shrink,
    unsynchronized,
)
from unet_trainer.training.parallel import is_of_the_link
from unet_trainer.training.resume import describe_position
from unet_trainer.training.run import Run


@contextlib.contextmanager
def recovering(run: Run) -> Iterator[None]:
    """Around an epoch. Returns where the loop may go on; raises what ends the run."""
    try:
        yield
    except (Exception, Interrupted) as error:  # not a second Ctrl-C, which waits for nothing
        if isinstance(error, PeerLost) or is_of_the_link(error):  # nothing is saved: a GPU may wait for the others
            lost = error if isinstance(error, PeerLost) else run.processes.lost(error)
            with contextlib.suppress(TrainingFailed, NonFinite):
                run.checkpointer.wait()
            raise PeerLost(f"{lost}; {run.checkpointer.describe_saved()}") from None
        if not _handle(run, error):
            raise


def _handle(run: Run, error: BaseException) -> bool:
    """True when the loop may go on, False when the error ends the run."""
    if isinstance(error, TrainingFailed):
        return False  # saved where it was raised
    if is_out_of_memory(error) and not isinstance(error, WorkerError):
        _clear_frames(error)
        handle_out_of_memory(run, first_line(error))
        return True
    where = ""
    if isinstance(error, NonFinite):
        where = _locate(run, error)
    is_whole = not run.components.train_step.mid_accumulation
    if isinstance(error, NonFinite) and run.state.batch == len(run.loaders.train):
        is_whole = False  # of an epoch that cannot be finished: the last save is before it
    # An error while saving must not hide a bug.
    is_foreseen = isinstance(error, Interrupted | UserError | WorkerError | NonFinite)
    with contextlib.nullcontext() if is_foreseen else contextlib.suppress(Exception):
        run.checkpointer.save_on_failure(state_is_whole=is_whole)
    if isinstance(error, Interrupted) and error.is_of_job:
        run.processes.any_rank()  # until rank 0 has saved: torchrun ends all when one ends
    saved = run.checkpointer.describe_saved()
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
    can_go_on = can_shrink(run.config) and run.processes.is_alone
    if not can_go_on:
        checkpointer.save_on_failure(is_whole)
    shrink(run.settings, components, reason, run.console, checkpointer.describe_saved(), can_go_on)
    if not is_whole:
        checkpointer.restore_last()
        components.train_step.abandon_group()
    run.record.add("shrink", reason, run.state.epoch, run.state.batch)
    run.console.note(f"going on from {describe_position(components.state)}")
    checkpointer.save_state()


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
