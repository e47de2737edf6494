"""The training step. Eager or compiled, in any precision, the same code: a disabled GradScaler and a disabled autocast are
no-ops. No line here waits for the device. A step whose numbers are not finite leaves weights, optimizer, batch norm
statistics and averages as they were.

When the state may be checkpointed: weights, statistics and counts are consistent only between accumulation groups, that is,
while `mid_accumulation` is False.

Where gradients live: with one micro-batch a group, in the memory of the backward pass, which under CUDA graphs is the same at
every replay and is overwritten by the next one. With several, in `.grad` tensors that are allocated once and added to. Under
torchrun they are averaged over all processes once a group, after its last backward pass and outside of recorded graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unet_trainer.loading.cutmix import paste_pieces
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.transfer import to_device
from unet_trainer.model.deep_supervision import auxiliary_loss, forward_with_auxiliary
from unet_trainer.model.ema import Ema
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import confusion_matrix, predicted_ids
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.training.cuda_graphs import DirectLauncher, Launcher
from unet_trainer.training.finite_guard import MAX_BAD_STEPS, FiniteGuard
from unet_trainer.training.gradient_sync import GradientSync
from unet_trainer.training.state import EpochMetrics

# N,H,W,C images, N,H,W masks and, for part of a batch, the masks of the whole batch → loss, confusion matrix
TrainForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def build_train_forward(
    segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics, deep_supervision: float = 0.0
) -> TrainForward:
    """The function that is compiled: normalisation, network, loss and counts in one."""

    def forward(images: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        with numerics.autocast():
            logits, auxiliary = forward_with_auxiliary(segmenter, images) if deep_supervision else (segmenter(images), [])
        counts = confusion_matrix(predicted_ids(logits.detach()), masks, logits.shape[1])
        value = loss(logits, masks, batch_masks)
        if deep_supervision:
            value = value + deep_supervision * auxiliary_loss(loss, auxiliary, masks, batch_masks)
        return value, counts

    return forward


def accumulation_groups(first: int, num_batches: int, size: int) -> Iterator[range]:
    """Indices of the batches whose gradients are added up before an optimizer step; the last group may be short."""
    for start in range(first, num_batches, size):
        yield range(start, min(start + size, num_batches))


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
    max_bad_steps: int = MAX_BAD_STEPS
    launcher: Launcher = field(default_factory=DirectLauncher)  # of the work after the backward pass
    sync: GradientSync | None = None  # with the other processes of a job; None: there are none, or the steps are trials
    mid_accumulation: bool = field(default=False, init=False)
    group_size: int = field(default=1, init=False)
    parameters: list[torch.nn.Parameter] = field(init=False)
    guard: FiniteGuard = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.segmenter.parameters())
        self.guard = FiniteGuard(self.segmenter.network, self.device, self.max_bad_steps)
        self.one = torch.ones((), device=self.device)
        factors = {group.get("lr_factor", 1.0) for group in self.optimizer.param_groups}
        # By factor, and on the device, where a replayed graph reads them.
        self.learning_rates = {factor: torch.zeros((), device=self.device) for factor in factors}
        self.batch_loss = torch.zeros((), device=self.device)  # of a batch in several parts
        num_ids = self.segmenter.spec.num_ids
        self.batch_counts = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=self.device)

    def begin_group(self, num_batches: int, first_batch: int) -> None:
        """`first_batch`: its number, counted over the whole run."""
        self.group_size = num_batches
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
            boxes = batch.cut_boxes.pin_memory() if self.device.type == "cuda" else batch.cut_boxes  # else the copy may wait
            images, masks = paste_pieces(images, masks, *to_device((boxes,), self.device))
        if self.num_parts == 1:
            loss, counts = self.forward(images, masks, None)
            self._backward(loss)
            self._count(metrics, loss.detach(), counts, batch.num_images)
            return
        self.batch_loss.zero_()
        self.batch_counts.zero_()
        size = -(-len(images) // self.num_parts)
        for part_images, part_masks in zip(images.split(size), masks.split(size), strict=True):
            loss, counts = self.forward(part_images, part_masks, masks)
            self._backward(loss)
            self.batch_loss += loss.detach()
            self.batch_counts += counts
        self._count(metrics, self.batch_loss, self.batch_counts, batch.num_images)

    def _adds_up(self) -> bool:
        return self.group_size > 1 or self.num_parts > 1

    def _backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss if self.group_size == 1 else loss / self.group_size).backward()

    def _allocate_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _count(self, metrics: EpochMetrics, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        def count() -> None:
            metrics.add(loss, counts, num_images)
            self.guard.add_loss(loss)

        metrics.num_images += num_images
        self.launcher.run("count", (num_images, *_addresses([*metrics.tensors(), loss, counts])), count)

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
        if self.sync is not None:
            self.sync.average(self.guard)
        key = _addresses([*metrics.tensors(), *gradients])
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
        """Drops a group that was begun, the guard's counts and recorded graphs: the optimizer's state may be replaced."""
        self.optimizer.zero_grad(set_to_none=True)
        self.mid_accumulation = False
        self.guard.reset()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else it takes the gradients for unscaled already
        self.launcher.clear()

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
