"""One training step and one evaluation step: normalise, forward, loss, counts. Eager or compiled, in any precision, the
same code: a disabled scaler and a disabled autocast do nothing. No line here waits for the device. A step whose numbers are
not finite leaves weights, optimizer, statistics and averages as they were.
"""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unet_trainer.dataset import Batch
from unet_trainer.forms import RGB, ImageForm
from unet_trainer.glimpse import Glimpse
from unet_trainer.guard import MAX_BAD_STEPS, Guard
from unet_trainer.losses import WeightedLoss, class_logits
from unet_trainer.memory import is_out_of_memory, one_line
from unet_trainer.metrics import Scores, confusion_matrix, predicted_ids, scores
from unet_trainer.model import Ema
from unet_trainer.precision import DTYPES, Precision
from unet_trainer.recorder import Recorder
from unet_trainer.transfer import to_device

STRIDE = 32  # the deepest encoder stage is 32 times smaller than the image

Forward = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Numerics:
    """How a forward pass computes."""

    device: torch.device
    precision: Precision
    channels_last: bool

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, DTYPES[self.precision.format], enabled=self.precision.uses_amp)


class Totals:
    """Loss and confusion matrix of an epoch, summed on the device and read late and seldom."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        num_ids = max(2, num_classes)
        self.num_classes = num_classes
        self.loss_sum = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.matrix = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps that changed nothing
        self.num_nan = torch.zeros((), dtype=torch.int64, device=device)  # those of them that were no float16 overflow
        self.num_bad = torch.zeros((), dtype=torch.int64, device=device)  # images whose loss was no finite number
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)  # images before the first of them
        self.num_images = 0
        self._num_seen = torch.zeros((), dtype=torch.int64, device=device)  # the same, on the device
        self._glimpse = Glimpse(device)

    def add(self, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        self.num_images += num_images
        self.add_on_device(loss, counts, num_images)

    def add_on_device(self, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        loss = loss.detach()
        is_finite = torch.isfinite(loss)  # a batch that was skipped must not spoil the epoch's mean
        self.first_bad.copy_(torch.where(~is_finite & (self.num_bad == 0), self._num_seen, self.first_bad))
        self.loss_sum += torch.where(is_finite, loss, 0.0) * num_images
        self.num_bad += ~is_finite * num_images
        self.matrix += counts * is_finite
        self._num_seen += num_images

    def _tensors(self) -> dict[str, torch.Tensor]:
        names = ("loss_sum", "matrix", "num_skipped", "num_nan", "num_bad", "first_bad")
        return {name: getattr(self, name) for name in names}

    def on_device(self) -> list[torch.Tensor]:
        return [*self._tensors().values(), self._num_seen]

    def reset(self) -> None:
        for tensor in self.on_device():
            tensor.zero_()
        self.num_images = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self._tensors(), "num_images": self.num_images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self.num_images = state["num_images"]
        self._num_seen.fill_(self.num_images)

    def loss(self) -> float:
        """Mean over images with a finite loss, NaN if there is none. Waits for the device."""
        return _mean_loss(self.loss_sum, self.num_bad, self.num_images)

    def strict_loss(self) -> float:
        """The same, but NaN if any loss was no finite number: validation skips nothing. Waits for the device."""
        return math.nan if int(self.num_bad) else self.loss()

    def scores(self) -> Scores:
        """Waits for the device."""
        return scores(self.matrix, self.num_classes)

    def peek(self) -> tuple[float, float] | None:
        """Loss and IoU as they were a moment ago, None when there is nothing new. Never waits for the device."""
        seen = self._glimpse.take([self.loss_sum, self.num_bad, self.matrix], self.num_images)
        if seen is None:
            return None
        (loss_sum, num_bad, matrix), num_images = seen
        return _mean_loss(loss_sum, num_bad, num_images), scores(matrix, self.num_classes).iou


def _mean_loss(loss_sum: torch.Tensor, num_bad: torch.Tensor, num_images: int) -> float:
    num_good = num_images - int(num_bad)
    return float(loss_sum) / num_good if num_good else math.nan


def build_logits(model: torch.nn.Module, numerics: Numerics, form: ImageForm = RGB) -> Callable[[torch.Tensor], torch.Tensor]:
    """N,H,W,C images in the files' own units → N,K,H,W float32 logits of every class id; any height and width."""
    mean = torch.tensor(form.mean, device=numerics.device).view(1, -1, 1, 1)
    scale = 1 / torch.tensor(form.std, device=numerics.device).view(1, -1, 1, 1)
    layout = torch.channels_last if numerics.channels_last else torch.contiguous_format

    def logits(images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[1:3]
        pixels = images.permute(0, 3, 1, 2).contiguous(memory_format=layout)
        normalised = (pixels.float() - mean) * scale
        if height % STRIDE or width % STRIDE:
            normalised = torch.nn.functional.pad(normalised, (0, -width % STRIDE, 0, -height % STRIDE), mode="replicate")
        with numerics.autocast():
            output = model(normalised)
        return class_logits(output[:, :, :height, :width])  # float32 from here on: sums over pixels exceed what 16 bit can hold

    return logits


def build_forward(model: torch.nn.Module, loss: WeightedLoss, numerics: Numerics, form: ImageForm = RGB) -> Forward:
    """N,H,W,C images and N,H,W uint8 ids → loss and confusion matrix, both on the device."""
    compute_logits = build_logits(model, numerics, form)

    def forward(images: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = compute_logits(images)
        counts = confusion_matrix(predicted_ids(logits.detach()), masks, logits.shape[1])
        return loss(logits, masks), counts

    return forward


@torch.no_grad()
def predict(model: torch.nn.Module, images: torch.Tensor, numerics: Numerics, form: ImageForm = RGB) -> torch.Tensor:
    """N,H,W,C images on any device → N,H,W class ids."""
    model.eval()
    searches, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # for a few images it does not pay
    try:
        return predicted_ids(build_logits(model, numerics, form)(images.to(numerics.device)))
    finally:
        torch.backends.cudnn.benchmark = searches


@dataclass
class TrainStep:
    """Forward, backward and, at the end of an accumulation window, the optimizer, whose kernels are fused."""

    forward: Forward
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    grad_clip: float | None = None
    ema: Ema | None = None
    num_parts: int = 1  # a batch goes through the model in so many pieces
    max_bad_steps: int = MAX_BAD_STEPS
    is_open: bool = False  # within a window: weights, statistics and counts do not belong together
    parameters: list[torch.nn.Parameter] = field(init=False)
    guard: Guard = field(init=False)
    one: torch.Tensor = field(init=False)
    learning_rate: torch.Tensor = field(init=False)
    recorder: Recorder | None = None  # of what follows the backward pass

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())
        self.guard = Guard(self.model, self.device, self.max_bad_steps)
        self.one = torch.ones((), device=self.device)
        self.learning_rate = torch.zeros((), device=self.device)

    def __call__(self, batch: Batch, totals: Totals, window: int, closes_window: bool, learning_rate: float) -> None:
        """One batch of a window of `window` batches whose gradients add up before the weights move."""
        is_alone = window == 1 and self.num_parts == 1
        if is_alone:  # nothing to add to: the gradients are taken where the backward pass leaves them
            self.optimizer.zero_grad(set_to_none=True)
        if not self.is_open:
            self.is_open = True
            self.guard.open_window()
            if not is_alone:
                self._hold_gradients()
        for part in split_batch(batch, self.num_parts):
            images, masks = to_device((part.images, part.masks), self.device)
            loss, counts = self.forward(images, masks)
            share = len(part.images) / len(batch.images) / window
            self.scaler.scale(loss if share == 1 else loss * share).backward()
            self._count(totals, loss.detach(), counts, part.num_images)
        if closes_window:
            self.move_weights(totals, learning_rate)
            self.optimizer.zero_grad(set_to_none=is_alone)
            self.is_open = False

    def _hold_gradients(self) -> None:
        """Gradients that add up need a place of their own: that of a CUDA graph's backward pass is overwritten by the next."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _count(self, totals: Totals, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        def count() -> None:
            totals.add_on_device(loss, counts, num_images)
            self.guard.see_loss(loss)

        totals.num_images += num_images
        self._launch("count", (num_images, *_addresses([*totals.on_device(), loss, counts])), count)

    def move_weights(self, totals: Totals, learning_rate: float) -> None:
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            self.learning_rate.fill_(learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate if on_cuda else learning_rate  # on the device, where a recorded step finds it
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._launch("move", _addresses([*totals.on_device(), *gradients]), lambda: self._move(totals, gradients))

    def _move(self, totals: Totals, gradients: list[torch.Tensor]) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, norm, foreach=True)
        is_good, is_trouble = self.guard.judge(norm, self.scaler.scale(self.one))
        totals.num_skipped += ~is_good
        totals.num_nan += is_trouble
        # What GradScaler.step does, with a judgement that knows more than the gradients.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~is_good).float()  # type: ignore[attr-defined]
        if self.recorder is not None:
            for group in self.optimizer.param_groups:  # torch wants it while it is recorded, and warns of it otherwise
                group["capturable"] = torch.cuda.is_current_stream_capturing()
        self.optimizer.step()
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(is_good)

    def _launch(self, name: str, key: tuple[int, ...], work: Callable[[], None]) -> None:
        if self.recorder is None:
            work()
        else:
            self.recorder.run(name, key, work)

    def abandon_window(self) -> None:
        """Forgets a window that was begun, what the guard has seen and what was recorded: the optimizer's state may be another."""
        self.optimizer.zero_grad(set_to_none=True)
        self.is_open = False
        self.guard.reset()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else it holds that the gradients of the window were unscaled already
        if self.recorder is not None:
            self.recorder.clear()


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


@dataclass
class EvalStep:
    """Forward without gradients, for a model in evaluation mode."""

    forward: Forward
    model: torch.nn.Module
    device: torch.device
    num_parts: int = 1

    @torch.no_grad()
    def __call__(self, batch: Batch, totals: Totals) -> None:
        for part in split_batch(batch, self.num_parts):
            images, masks = to_device((part.images, part.masks), self.device)
            loss, counts = self.forward(images, masks)
            totals.add(loss, counts, part.num_images)


def split_batch(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Padding comes last, so the images that are none lie in the first parts."""
    size = -(-len(batch.images) // num_parts)
    for start in range(0, len(batch.images), size):
        num_images = min(max(batch.num_images - start, 0), size)
        yield Batch(batch.images[start : start + size], batch.masks[start : start + size], num_images)


@contextlib.contextmanager
def leaving_no_trace(train_step: TrainStep) -> Iterator[None]:
    """Steps taken inside change neither weights, statistics, gradients nor random state."""
    saved = {name: value.clone() for name, value in train_step.model.state_dict().items()}
    devices = [train_step.device] if train_step.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        train_step.model.load_state_dict(saved)
        train_step.abandon_window()


def try_steps(
    train_step: TrainStep,
    eval_step: EvalStep,
    batch: Batch,
    totals: Totals,
    phases: Sequence[Callable[[], object]],
    eval_batch: Batch,
    num_times: int = 1,
) -> None:
    """Takes the steps that the run will take: training in each phase (which puts the model into its mode), then evaluation."""
    for begin_phase in phases:
        begin_phase()
        for _ in range(num_times):
            train_step(batch, totals, window=1, closes_window=False, learning_rate=0.0)
    eval_step.model.eval()
    for _ in range(num_times):
        eval_step(eval_batch, totals)
    totals.loss()


def compile_steps(
    train_step: TrainStep,
    eval_step: EvalStep,
    batch: Batch,
    num_classes: int,
    phases: Sequence[Callable[[], object]],
    eval_batch: Batch | None = None,
) -> str | None:
    """Compiles both forward passes and tries them on a batch each; returns None, or why it failed, with the steps as they were."""
    eager = train_step.forward, eval_step.forward
    train_step.recorder = None
    on_cuda = train_step.device.type == "cuda"
    # Replayed as CUDA graphs: below batch 16 the step is bound by kernel launches.
    mode = "reduce-overhead" if on_cuda else "default"
    try:
        torch.compiler.reset()  # else a fifth run in one process finds the table of compiled code full and stays eager
        train_step.forward, eval_step.forward = (_replayed(torch.compile(forward, mode=mode, dynamic=False)) for forward in eager)
        with leaving_no_trace(train_step), warnings.catch_warnings(), _collecting_nothing():
            warnings.simplefilter("ignore")  # advice to compiler developers
            totals = Totals(num_classes, train_step.device)
            try_steps(
                train_step, eval_step, batch, totals, phases, eval_batch or batch, num_times=3
            )  # CUDA graphs: run, record, replay
    except Exception as error:  # compilers fail in every way there is, and the eager steps work in each case
        train_step.forward, eval_step.forward = eager
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {one_line(error)[:200]}"
    train_step.recorder = Recorder() if on_cuda else None
    return None


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """A compiler makes millions of objects that stay; looking through them for garbage again and again takes seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _replayed(compiled: Forward) -> Forward:
    def forward(images: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # the outputs of the last replay may be overwritten from here on
        return compiled(images, masks)

    return forward
