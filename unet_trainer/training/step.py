"""The training step. Eager or compiled, in any precision, the same code: a disabled GradScaler and a disabled autocast
are no-ops. No line here waits for the device. A step whose numbers are not finite leaves weights, optimizer, batch norm
statistics and averages as they were.

When the state may be checkpointed: weights, statistics and counts are consistent only between accumulation groups, that
is, while `mid_accumulation` is False.

Where gradients live: with one micro-batch a group, in the memory of the backward pass, which under CUDA graphs is the
same at every replay and is overwritten by the next one. With several, in `.grad` tensors that are allocated once and
added to. Under torchrun they lie in the buckets of DistributedDataParallel, which averages them once a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unet_trainer.config.errors import NonFinite
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import paste_pieces
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import confusion_matrix, predicted_ids
from unet_trainer.model.optimizer_and_schedule import Ema
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.training.async_device import AsyncReader, DirectLauncher, Launcher
from unet_trainer.training.parallel import GradientSync
from unet_trainer.training.state import EpochMetrics, all_finite

# N,H,W,C images, N,H,W masks and, for part of a batch, the masks of the whole batch → loss, confusion matrix
TrainForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
MAX_BAD_STEPS = 8  # in a row; more of them, and skipping steps does not help


def build_train_forward(segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics) -> TrainForward:
    """The function that is compiled: normalisation, network, loss and counts in one."""

    def forward(
        images: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with numerics.autocast():
            logits = segmenter(images)
        counts = confusion_matrix(predicted_ids(logits.detach()), masks, logits.shape[1])
        return loss(logits, masks, batch_masks), counts

    return forward


@dataclass
class TrainStep:
    """Forward and backward of each batch of a group; then the optimizer, once.

    step.begin_group(len(group), first_batch)
    for batch in group: step(batch, metrics)
    step.optimizer_step(metrics, learning_rate)
    """

    forward: TrainForward
    segmenter: Segmenter
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    grad_clip: float | None = None
    ema: Ema | None = None
    num_parts: int = 1  # micro-batches that a batch goes through the model in
    launcher: Launcher = field(default_factory=DirectLauncher)  # of the work after the backward pass
    sync: GradientSync | None = None  # with the other processes of a job
    is_trial: bool = field(default=False, init=False)  # this process's own: nothing is exchanged with the others
    mid_accumulation: bool = field(default=False, init=False)
    group_size: int = field(default=1, init=False)
    num_begun: int = field(default=0, init=False)  # batches of the group
    parameters: list[torch.nn.Parameter] = field(init=False)
    guard: FiniteGuard = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.segmenter.parameters())
        self.guard = FiniteGuard(self.segmenter.network, self.device)
        self.one = torch.ones((), device=self.device)
        factors = {group.get("lr_factor", 1.0) for group in self.optimizer.param_groups}
        # By factor, and on the device, where a replayed graph reads them.
        self.learning_rates = {factor: torch.zeros((), device=self.device) for factor in factors}
        self.batch_loss = torch.zeros((), device=self.device)  # of a batch in several parts
        num_ids = self.segmenter.spec.num_ids
        self.batch_counts = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=self.device)

    def begin_group(self, num_batches: int, first_batch: int) -> None:
        """`first_batch`: its number, counted over the whole run."""
        self.group_size, self.num_begun = num_batches, 0
        self.mid_accumulation = True
        self.guard.begin_step(first_batch)
        if self._adds_up():
            self._allocate_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch, metrics: EpochMetrics) -> None:
        """Adds the gradients of one batch of the group."""
        images, masks = to_device((batch.images, batch.masks), self.device)
        if batch.cut_boxes is not None:
            # else the copy may wait
            boxes = batch.cut_boxes.pin_memory() if self.device.type == "cuda" else batch.cut_boxes
            images, masks = paste_pieces(images, masks, *to_device((boxes,), self.device))
        self.num_begun += 1
        if self.num_parts == 1:
            loss, counts = self._forward_backward(images, masks, None)
            self._count(metrics, loss, counts, batch.num_images)
            return
        self.batch_loss.zero_()
        self.batch_counts.zero_()
        size = -(-len(images) // self.num_parts)
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            loss, counts = self._forward_backward(images[part], masks[part], masks, start + size >= len(images))
            self.batch_loss += loss
            self.batch_counts += counts
        self._count(metrics, self.batch_loss, self.batch_counts, batch.num_images)

    def _adds_up(self) -> bool:
        return self.group_size > 1 or self.num_parts > 1

    def _forward_backward(
        self, images: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None, is_last_part: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and counts."""
        if self.sync is None:
            loss, counts = self.forward(images, masks, batch_masks)
        else:
            is_last = is_last_part and self.num_begun == self.group_size and not self.is_trial
            loss, counts = self.sync(images, masks, batch_masks, is_last=is_last)
        self.scaler.scale(loss if self.group_size == 1 else loss / self.group_size).backward()
        return loss.detach(), counts

    def _allocate_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _count(self, metrics: EpochMetrics, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        def count() -> None:
            self.guard.losses_are_finite &= metrics.add(loss, counts, num_images)

        metrics.num_images += num_images
        self.launcher.run("count", (num_images, *_addresses([*metrics.tensors().values(), loss, counts])), count)

    def optimizer_step(self, metrics: EpochMetrics, learning_rate: float) -> None:
        """Updates the weights, unless the group's numbers are not finite; ends the group."""
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            for factor, tensor in self.learning_rates.items():
                tensor.fill_(learning_rate * factor)
        for group in self.optimizer.param_groups:
            factor = group.get("lr_factor", 1.0)
            group["lr"] = self.learning_rates[factor] if on_cuda else learning_rate * factor
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        key = _addresses([*metrics.tensors().values(), *gradients])
        self.launcher.run("optimizer step", key, lambda: self._optimizer_step(metrics, gradients))
        self.optimizer.zero_grad(set_to_none=not self._adds_up())
        self.mid_accumulation = False

    def _optimizer_step(self, metrics: EpochMetrics, gradients: list[torch.Tensor]) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, norm, foreach=True)
        is_good, is_nan = self.guard.judge(norm, self.scaler.scale(self.one))
        metrics.num_skipped += ~is_good
        metrics.num_nan += is_nan
        # What GradScaler.step does, with a judgement that covers losses and buffers as well as gradients.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~is_good).float()  # type: ignore[attr-defined]
        if self.launcher.uses_graphs:
            for group in self.optimizer.param_groups:  # torch requires it while capturing, and warns of it otherwise
                group["capturable"] = torch.cuda.is_current_stream_capturing()
        self.optimizer.step()
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(is_good)

    def abandon_group(self) -> None:
        """Drops a group that was begun, the guard's counts and recorded graphs: the optimizer's state may be
        replaced."""
        self.optimizer.zero_grad(set_to_none=True)
        self.mid_accumulation = False
        self.guard.reset()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else it takes the gradients for unscaled already
        self.launcher.clear()

    def is_connected(self) -> bool:
        """To the other processes, with the parameters that are trained now."""
        return self.sync is not None and self.sync.trains == [parameter.requires_grad for parameter in self.parameters]

    def disconnect(self) -> None:
        """Gradients are this process's own from here on."""
        if self.sync is not None:
            self.sync.close()
        self.sync = None

    def set_num_parts(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many parts."""
        self.num_parts = num_parts
        self.launcher.clear()


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def micro_batches(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """The batch in parts. Padding comes last, so it lies in the last parts."""
    size = -(-len(batch.images) // num_parts)
    for start in range(0, len(batch.images), size):
        num_images = min(max(batch.num_images - start, 0), size)
        sizes = None if batch.mask_sizes is None else batch.mask_sizes[start : start + size]
        yield Batch(batch.images[start : start + size], batch.masks[start : start + size], num_images, mask_sizes=sizes)


class BufferSnapshot:
    """Buffers of one dtype (running mean, variance and count of batch norms), restored after a bad step.

    Concatenated into one tensor: torch.where takes no lists, and a launch for each buffer would cost more than the
    step's end."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers
        self.saved = self.concatenated()
        sizes = [buffer.numel() for buffer in buffers]
        self.saved_views = [
            piece.view_as(buffer) for piece, buffer in zip(self.saved.split(sizes), buffers, strict=True)
        ]

    def concatenated(self) -> torch.Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in self.buffers])

    def save(self) -> None:
        self.saved.copy_(self.concatenated())

    def commit_or_restore(self, is_good: torch.Tensor, current: torch.Tensor) -> None:
        """After a good step saves the current values; after a bad one restores those that were saved."""
        self.saved.copy_(torch.where(is_good, current, self.saved))
        torch._foreach_copy_(self.buffers, self.saved_views)


class FiniteGuard:
    """Judges every step on the device: one with numbers that are not finite changes nothing and is counted. A step is
    an
    accumulation group: one bad batch spoils the sum of its gradients. Only `check` waits for the device."""

    def __init__(self, network: torch.nn.Module, device: torch.device, max_bad_steps: int = MAX_BAD_STEPS) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in filter(torch.Tensor.numel, network.buffers()):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self.snapshots = [BufferSnapshot(buffers) for buffers in by_dtype.values()]
        self.max_bad_steps = max_bad_steps
        self.is_saved = False  # the snapshots hold the buffers as they are
        self.first_batch_of_step = torch.zeros((), dtype=torch.int64, device=device)
        self.losses_are_finite = torch.ones((), dtype=torch.bool, device=device)
        self.num_bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_batch = torch.zeros((), dtype=torch.int64, device=device)
        self.reader = AsyncReader(device)

    def reset(self) -> None:
        """Forgets the step under way and all bad steps; the buffers may have other values from here on."""
        self.is_saved = False
        self.losses_are_finite.fill_(True)
        for counter in (self.num_bad_in_a_row, self.most_in_a_row, self.first_bad_batch):
            counter.zero_()
        self.reader.clear()

    def begin_step(self, first_batch: int) -> None:
        """`first_batch`: number of the step's first batch, counted over the whole run."""
        if not self.is_saved:  # else the last judgement saved them
            for snapshot in self.snapshots:
                snapshot.save()
            self.is_saved = True
        self.first_batch_of_step.fill_(first_batch)

    def buffers_are_finite(self) -> torch.Tensor:
        """As they are now, on the device."""
        is_finite = torch.ones_like(self.losses_are_finite)
        for snapshot in self.snapshots:
            if snapshot.saved.is_floating_point():
                is_finite = is_finite & all_finite(snapshot.concatenated())
        return is_finite

    def judge(self, gradient_norm: torch.Tensor, loss_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the step is good, and whether a bad one counts as NaN; restores the buffers if it is bad.

        Gradients that overflow float16 do not count while the loss scale can still fall.
        """
        is_good = self.losses_are_finite & all_finite(gradient_norm)
        current = [snapshot.concatenated() for snapshot in self.snapshots]
        for values in current:
            is_good = is_good & all_finite(values) if values.is_floating_point() else is_good
        for snapshot, values in zip(self.snapshots, current, strict=True):
            snapshot.commit_or_restore(is_good, values)
        is_nan = ~is_good & ~(self.losses_are_finite & (loss_scale > 1))
        self.num_bad_in_a_row.add_(1).mul_(is_nan)
        is_first = (self.num_bad_in_a_row == 1) & (self.most_in_a_row < self.max_bad_steps)
        self.first_bad_batch.copy_(torch.where(is_first, self.first_batch_of_step, self.first_bad_batch))
        torch.maximum(self.most_in_a_row, self.num_bad_in_a_row, out=self.most_in_a_row)
        self.losses_are_finite.fill_(True)
        return is_good, is_nan

    def poll(self) -> None:
        """Raises NonFinite if too many steps in a row were bad a moment ago. Never waits for the device."""
        seen = self.reader.poll([self.most_in_a_row, self.first_bad_batch], 0)
        if seen is not None:
            self._raise_if_many(*seen[0])

    def check(self) -> None:
        """Raises NonFinite if too many steps in a row were bad so far. Waits for the device."""
        self._raise_if_many(self.most_in_a_row, self.first_bad_batch)

    def _raise_if_many(self, most_in_a_row: torch.Tensor, first_bad_batch: torch.Tensor) -> None:
        if int(most_in_a_row) >= self.max_bad_steps:
            raise NonFinite(f"{self.max_bad_steps} steps in a row were not finite", int(first_bad_batch))
