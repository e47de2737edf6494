"""What follows where an epoch cannot be finished, and the diagnosis of numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.memory import (
    OutOfMemory,
    is_out_of_memory,
    out_of_memory_message,
    shrink,
    unless_out_of_memory,
)
from unet_trainer.training.resume import describe_position
from unet_trainer.training.run import Run


def shrink_batches(run: Run, reason: str) -> None:
    """After memory ran out: smaller parts of a batch, from the last whole state on. In a job they are tried before the
    first epoch alone, by all processes together."""
    components, is_whole = run.components, run.components.train_step.is_whole
    shrink(run.settings, components, reason, run.console)
    if not is_whole:
        run.checkpointer.go_back_to_last_save()
        components.train_step.abandon()
    run.reporter.record.add("shrink", reason, run.state.epoch, run.state.batch)
    run.console.note(f"going on from {describe_position(components.state)}")


def explained(run: Run, error: BaseException, cause: str) -> BaseException:
    """What the user is told of the error that ends a run, whose state is saved. `cause`: as `find_cause` found it."""
    if isinstance(error, Interrupted):
        run.processes.any_rank()  # all stop at the same step; torchrun ends the others, rank 0 too, when one has ended
    saved = run.checkpointer.describe_saved()
    if isinstance(error, NonFinite):
        also = ", use_amp=false" if run.config.use_amp else ""
        return TrainingFailed(f"{cause}. Try a lower learning_rate, grad_clip=1.0{also}; {saved}")
    if isinstance(error, WorkerError):
        ideas = "Try fewer num_workers, or num_workers=0" if run.config.num_workers else "See whether the disk is there"
        return TrainingFailed(f"{error}. {ideas}; {saved}")
    if isinstance(error, UserError):  # a file that became unreadable
        return UserError(f"{error}; {saved}")
    if is_out_of_memory(error) and not isinstance(error, TrainingFailed):
        reason = first_line(error) or type(error).__name__
        return TrainingFailed(f"{out_of_memory_message(run.config, reason, run.components.numerics.device)}; {saved}")
    return error


def find_cause(run: Run, error: BaseException) -> str:
    """Where the numbers went bad: step, files, layer, term of the loss."""
    if not isinstance(error, NonFinite):
        return ""
    components, num_batches, size = run.components, len(run.loaders.train), run.config.accumulation_steps
    if error.val_batch is not None and error.val_batch >= 0:
        segmenter, loader, epoch, batches = components.state.eval_segmenter, run.loaders.val, 0, [error.val_batch]
        place = f"in epoch {components.state.epoch + 1}"
    elif error.batch_number is not None:
        epoch, first = divmod(error.batch_number, num_batches)
        segmenter, loader = components.state.segmenter, run.loaders.train
        batches = list(range(first, min(first + size, num_batches)))
        step = epoch * components.state.learning_rate.steps_per_epoch + first // size + 1
        place = f"from step {step} on (epoch {epoch + 1}, batch {first + 1} of {num_batches})"
    else:
        return str(error)  # of the weights, or another process has the batch
    with components.restoring(), components.unsynchronized():
        for number in batches:
            batch, files = loader.read(epoch, number), loader.assembler.files(epoch, number)
            model = segmenter, components.loss, components.numerics
            found = unless_out_of_memory(partial(explain, *model, batch, files))
            if isinstance(found, OutOfMemory):
                break  # the diagnosis needs more memory than a step
            if found:
                names = ", ".join(map(shown_path, files))
                return f"{error} {place}: {found} (images of the batch: {names})"
    return f"{error} {place}"


def explain(segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics, batch: Batch, files: Sequence[Path]) -> str:
    """What is not finite in a batch, the cause before its effects; empty if everything is finite, or gradients alone
    are not. Runs the batch once, eagerly, with hooks on every layer: slow, only for training that cannot go on."""
    network, found = segmenter.network, list[str]()
    bad = [str(file) for image, file in zip(batch.images, files, strict=False) if not torch.isfinite(image).all()]
    if bad:
        found.append(f"{', '.join(bad)} holds pixels that are NaN or infinite")
    bad_weights = [name for name, tensor in network.state_dict().items() if not torch.isfinite(tensor).all()]
    if bad_weights:
        found.append(f"the weights {bad_weights[0]} are not finite")
    images, masks = to_device((batch.images, batch.masks), numerics.device)
    if batch.mask_sizes is not None:
        masks = resize_masks(masks, batch.mask_sizes, images.shape[1:3])
    layers = {module: name for name, module in network.named_modules() if not list(module.children())}
    bad_layers: list[str] = []

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
