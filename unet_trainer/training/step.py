"""The training step, eager or compiled, in any precision: a disabled GradScaler and a disabled autocast are no-ops. No
line here waits for the device. A step whose numbers are not finite leaves weights, optimizer, batch norm statistics and
averages as they were.

Where gradients live: with one part a step, in the memory of the backward pass, which under CUDA graphs is the same at
every replay and is overwritten by the next one. With several, in `.grad` tensors that are allocated once and added to.
In a job they lie in the buckets of DistributedDataParallel, which averages them once a step.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import paste_pieces
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import confusion_matrix, predicted_ids
from unet_trainer.model.optimizer_and_schedule import Ema
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.training.async_device import AsyncReader, DirectLauncher, Launcher
from unet_trainer.training.state import EpochMetrics, all_finite

MAX_BAD_STEPS = 8  # in a row end the run: skipping steps does not help

# N,K,H,W logits, N,H,W masks and, for a part of a batch, the masks of the whole batch → loss, confusion matrix
Criterion = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class Exchange(Protocol):
    """Averages the gradients of the processes of a job: see parallel.GradientSync."""

    model: Any  # the step's forward pass, with no_sync()
    trains: list[bool]  # of each parameter, whether it is trained

    def spoiled_if_bad(self, loss: torch.Tensor) -> torch.Tensor: ...
    def prepare_compiler(self) -> None: ...
    def close(self) -> None: ...


class Group(NamedTuple):
    """The batches of one step, which may be read while it is taken."""

    batches: Iterable[Batch]
    size: int  # of them
    first: int  # number of the first one, counted over the whole run


class Part(NamedTuple):
    """What goes through the model at once: a batch, or a part of one where memory does not hold it."""

    images: torch.Tensor
    masks: torch.Tensor
    batch_masks: torch.Tensor | None  # of the whole batch, if this is a part
    begins_batch: bool = True
    ends_batch: bool = True


def build_forward(segmenter: Segmenter, numerics: Numerics) -> Callable[[torch.Tensor], torch.Tensor]:
    """N,H,W,C images → logits. Autocast is entered in here too: before torch 2.15, code that was compiled for another
    precision is found again by what the function holds alone."""

    def forward(images: torch.Tensor) -> torch.Tensor:
        with numerics.autocast():
            logits: torch.Tensor = segmenter(images)
            return logits

    return forward


def build_criterion(loss: WeightedLoss) -> Criterion:
    def criterion(
        logits: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = confusion_matrix(predicted_ids(logits.detach()), masks, logits.shape[1])
        return loss(logits, masks, batch_masks), counts

    return criterion


class TrainStep:
    """step(group, learning_rate, metrics): what a group of batches teaches, in one move of the weights."""

    def __init__(
        self,
        segmenter: Segmenter,
        loss: WeightedLoss,
        numerics: Numerics,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        grad_clip: float | None = None,
        ema: Ema | None = None,
        num_parts: int = 1,
    ) -> None:
        self.segmenter, self.numerics, self.device = segmenter, numerics, numerics.device
        self.forward = build_forward(segmenter, numerics)  # may be compiled
        self.criterion = build_criterion(loss)  # may be compiled
        self.optimizer, self.scaler, self.grad_clip, self.ema = optimizer, scaler, grad_clip, ema
        self.num_parts = num_parts  # that a batch goes through the model in
        self.launcher: Launcher = DirectLauncher()  # of the work after the backward pass
        self.sync: Exchange | None = None  # with the other processes of a job
        self.is_trial = False  # this process's own: nothing is exchanged with the others
        self.is_whole = True  # the state is that between two steps, and may be saved
        self.adds_up = False  # gradients of several parts
        self.parameters = list(segmenter.parameters())
        self.guard = FiniteGuard(segmenter.network, self.device)
        self.one = torch.ones((), device=self.device)
        factors = {group.get("lr_factor", 1.0) for group in optimizer.param_groups}
        # By factor, and on the device, where a replayed graph reads them.
        self.learning_rates = {factor: torch.zeros((), device=self.device) for factor in factors}
        num_ids = segmenter.spec.num_ids  # loss and counts of a batch in several parts:
        self.batch_loss = torch.zeros((), device=self.device)
        self.batch_counts = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=self.device)

    @property
    def model(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.forward if self.sync is None else self.sync.model

    def __call__(self, group: Group, learning_rate: float, metrics: EpochMetrics) -> None:
        self._begin(group, learning_rate)
        for number, batch in enumerate(group.batches, start=1):
            for part in self._parts(batch):
                with self.numerics.autocast(), self._exchange(part.ends_batch and number == group.size):
                    logits = self.model(part.images)
                loss, counts = self.criterion(logits, part.masks, part.batch_masks)
                if self.sync is not None:
                    loss = self.sync.spoiled_if_bad(loss)
                self.scaler.scale(loss if group.size == 1 else loss / group.size).backward()
                self._count(part, loss.detach(), counts, batch.num_images, metrics)
                del logits, loss  # their memory is for the next part
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]

        def update() -> None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            if self.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, norm, foreach=True)
            is_good = self.guard.decide(norm, self.scaler.scale(self.one), metrics)
            # What GradScaler.step does, with a judgement that covers losses and buffers as well as gradients.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = (~is_good).float()  # type: ignore[attr-defined] # a bad step changes nothing
            self.optimizer.step()
            self.scaler.update()
            if self.ema is not None:
                self.ema.update(is_good)

        self.launcher.run("update", _addresses([*metrics.tensors().values(), *gradients]), update)
        self.is_whole = True

    def _begin(self, group: Group, learning_rate: float) -> None:
        adds_up = group.size > 1 or self.num_parts > 1
        # What a step of one part left is the memory of its backward pass, which the next replay overwrites.
        self.optimizer.zero_grad(set_to_none=not (adds_up and self.adds_up))
        self.is_whole, self.adds_up = False, adds_up
        self.guard.begin_step(group.first)
        for parameter in self.parameters if self.adds_up else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        on_cuda = self.device.type == "cuda"
        for factor, tensor in self.learning_rates.items() if on_cuda else ():
            tensor.fill_(learning_rate * factor)
        for options in self.optimizer.param_groups:
            factor = options.get("lr_factor", 1.0)
            options["lr"] = self.learning_rates[factor] if on_cuda else learning_rate * factor

    def _parts(self, batch: Batch) -> Iterator[Part]:
        """On the device, with the pieces of CutMix pasted."""
        images, masks = to_device((batch.images, batch.masks), self.device)
        if batch.cut_boxes is not None:
            # else the copy may wait
            boxes = batch.cut_boxes.pin_memory() if self.device.type == "cuda" else batch.cut_boxes
            images, masks = paste_pieces(images, masks, *to_device((boxes,), self.device))
        size = -(-len(images) // self.num_parts)
        for start in range(0, len(images), size):
            piece, stop = slice(start, start + size), start + size
            yield Part(
                images[piece], masks[piece], masks if self.num_parts > 1 else None, not start, stop >= len(images)
            )

    def _exchange(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are averaged over the processes in the last backward pass of the step."""
        is_exchanged = self.sync is None or (is_last and not self.is_trial)
        return contextlib.nullcontext() if self.sync is None or is_exchanged else self.sync.model.no_sync()

    def _count(
        self, part: Part, loss: torch.Tensor, counts: torch.Tensor, num_images: int, metrics: EpochMetrics
    ) -> None:
        if self.num_parts > 1:
            if part.begins_batch:
                self.batch_loss.zero_()
                self.batch_counts.zero_()
            self.batch_loss += loss
            self.batch_counts += counts
            loss, counts = self.batch_loss, self.batch_counts
        if not part.ends_batch:
            return

        def count() -> None:
            self.guard.losses_are_finite &= metrics.add(loss, counts, num_images)

        metrics.num_images += num_images
        self.launcher.run("count", (num_images, *_addresses([*metrics.tensors().values(), loss, counts])), count)

    def abandon(self) -> None:
        """Drops a step that was begun, the guard's counts and recorded graphs: the state may be replaced."""
        self.optimizer.zero_grad(set_to_none=True)
        self.is_whole = True
        self.guard.reset()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else it takes the gradients for unscaled already
        self.launcher.clear()

    def set_num_parts(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many parts."""
        self.num_parts = num_parts
        self.launcher.clear()

    def connect(self, sync: Exchange | None) -> None:
        """From here on gradients are averaged with those of other processes; None: they are this process's own."""
        if self.sync is not None:
            self.sync.close()
        self.sync = sync

    def is_connected(self) -> bool:
        """With the parameters that are trained now."""
        return self.sync is not None and self.sync.trains == [parameter.requires_grad for parameter in self.parameters]


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


class FiniteGuard:
    """Judges every step on the device: one with numbers that are not finite changes nothing and is counted. Buffers
    (running statistics of batch norms) are saved before a step, one tensor for each dtype: torch.where takes no lists,
    and a launch for each would cost more than the step's end."""

    def __init__(self, network: torch.nn.Module, device: torch.device) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for buffer in filter(torch.Tensor.numel, network.buffers()):
            by_dtype[buffer.dtype].append(buffer)
        self.buffers = [*by_dtype.values()]
        self.saved = self._current()
        self.views = [  # into what is saved, in the shapes of the buffers
            [piece.view_as(one) for piece, one in zip(flat.split([each.numel() for each in same]), same, strict=True)]
            for flat, same in zip(self.saved, self.buffers, strict=True)
        ]
        self.is_saved = False  # `saved` holds the buffers as they are
        self.losses_are_finite = torch.ones((), dtype=torch.bool, device=device)
        self.step, self.num_in_a_row, self.most_in_a_row, self.first_bad = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)
        )
        self.reader = AsyncReader(device)

    def _current(self) -> list[torch.Tensor]:
        return [torch.cat([buffer.reshape(-1) for buffer in same]) for same in self.buffers]

    def reset(self) -> None:
        """Forgets the step under way and all bad steps; the buffers may have other values from here on."""
        self.is_saved = False
        self.losses_are_finite.fill_(True)
        for counter in (self.num_in_a_row, self.most_in_a_row, self.first_bad):
            counter.zero_()
        self.reader.clear()

    def begin_step(self, first_batch: int) -> None:
        if not self.is_saved:  # else the last judgement saved them
            for saved, current in zip(self.saved, self._current(), strict=True):
                saved.copy_(current)
            self.is_saved = True
        self.step.fill_(first_batch)

    def buffers_are_finite(self) -> torch.Tensor:
        """As they are now, on the device."""
        floats = [values for values in self._current() if values.is_floating_point()]
        return torch.stack([torch.ones_like(self.losses_are_finite), *map(all_finite, floats)]).all()

    def decide(self, gradient_norm: torch.Tensor, loss_scale: torch.Tensor, metrics: EpochMetrics) -> torch.Tensor:
        """Whether the step is good; restores the buffers and counts it if it is not. Gradients that overflow float16
        are no NaN while the loss scale can still fall."""
        is_good, current = self.losses_are_finite & all_finite(gradient_norm), self._current()
        for values in current:
            is_good = is_good & all_finite(values) if values.is_floating_point() else is_good
        for buffers, saved, views, values in zip(self.buffers, self.saved, self.views, current, strict=True):
            saved.copy_(torch.where(is_good, values, saved))
            torch._foreach_copy_(buffers, views)
        is_nan = ~is_good & ~(self.losses_are_finite & (loss_scale > 1))
        metrics.num_skipped += ~is_good
        metrics.num_nan += is_nan
        self.num_in_a_row.add_(1).mul_(is_nan)
        is_first = (self.num_in_a_row == 1) & (self.most_in_a_row < MAX_BAD_STEPS)
        self.first_bad.copy_(torch.where(is_first, self.step, self.first_bad))
        torch.maximum(self.most_in_a_row, self.num_in_a_row, out=self.most_in_a_row)
        self.losses_are_finite.fill_(True)
        return is_good

    def first_of_many_bad(self, waits: bool = False) -> int | None:
        """The first batch of MAX_BAD_STEPS bad steps in a row, if there were so many: as of a moment ago, or of now,
        which waits for the device."""
        counters, seen = [self.most_in_a_row, self.first_bad], None
        if waits:
            seen = counters
        elif (read := self.reader.poll(counters, 0)) is not None:
            seen, _ = read
        return int(seen[1]) if seen is not None and int(seen[0]) >= MAX_BAD_STEPS else None
