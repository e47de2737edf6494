"""The state of training, which a checkpoint saves: weights, optimizer, position within the epoch, metrics so far, best
epoch.

Under torchrun, weights and optimizer state are the same bits on all ranks; batch norm statistics, counts of the epoch
so far and random states differ. At the end of an epoch statistics are averaged before they are saved, and random states
follow from epoch and rank: a job resumes there with the same bits. A save within an epoch holds those of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unet_trainer.model.metrics import Scores, compute_scores
from unet_trainer.model.optimizer_and_schedule import Ema, LearningRate, fill_momentum
from unet_trainer.model.random_state import LOCK, generators
from unet_trainer.model.segmenter import Segmenter, network_weights
from unet_trainer.runs.tables import Row
from unet_trainer.system.launch import ALONE, Launch
from unet_trainer.training.async_device import AsyncReader, HostCopy

RECENT_EPOCHS = 5  # a noisy epoch or two do not mean that training has stopped improving
STOPPING = ("best_value", "best_epoch", "reference", "epochs_since_best", "patience_used")
POSITION = ("epoch", "batch", "seconds", "train_seconds", "wait_seconds")
TABLES = ("history", "per_class_iou", "confusion")
SUMMED_OVER_RANKS = ("loss_sum", "matrix", "num_bad", "num_images")  # skipped steps are the same on all


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """On the device, in three launches; torch.isfinite and all take five. A norm takes two, but may miss NaN on Apple's
    GPUs."""
    return values.abs().amax() < torch.inf


class EpochMetrics:
    """Loss and confusion matrix of an epoch of training, summed on the device and read at intervals."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        num_ids = max(2, num_classes)
        self.num_classes = num_classes
        self.loss_sum = torch.zeros((), dtype=wide_float(device), device=device)
        self.matrix = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps that changed nothing
        self.num_nan = torch.zeros((), dtype=torch.int64, device=device)  # those of them that were no float16 overflow
        self.num_bad = torch.zeros((), dtype=torch.int64, device=device)  # images whose loss was not finite
        self.num_images = 0
        self._reader = AsyncReader(device)

    def add(self, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> torch.Tensor:
        """Returns whether the loss is finite: a skipped batch must not spoil the epoch's mean. On the device only: the
        caller counts `num_images` on the host, since this may be replayed by a CUDA graph."""
        is_finite = all_finite(loss)
        self.loss_sum += torch.where(is_finite, loss, 0.0) * num_images
        self.num_bad += ~is_finite * num_images
        self.matrix += counts * is_finite
        return is_finite

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("loss_sum", "matrix", "num_skipped", "num_nan", "num_bad")}

    def reset(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()
        self.num_images = 0
        self._reader.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**self.tensors(), "num_images": self.num_images}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        self.num_images = state["num_images"]
        self._reader.clear()

    def loss(self) -> float:
        """Mean over images with a finite loss, NaN if there is none. Waits for the device."""
        return _mean_loss(self.loss_sum, self.num_bad, self.num_images)

    def summed(self, gather: Callable[[Any], list[Any]]) -> EpochMetrics:
        """Those of all ranks, on the host; `gather` makes one's own into those of all. Waits for the device."""
        all_ranks = gather(HostCopy(self.state_dict()).content())
        total = EpochMetrics(self.num_classes, torch.device("cpu"))
        total.load_state_dict(all_ranks[0] | {name: sum(one[name] for one in all_ranks) for name in SUMMED_OVER_RANKS})
        return total

    def scores(self) -> Scores:
        """Waits for the device."""
        return compute_scores(self.matrix, self.num_classes)

    def peek(self) -> tuple[float, float] | None:
        """Loss and IoU as they were a moment ago, None when there is nothing new. Never waits for the device."""
        seen = self._reader.poll([self.loss_sum, self.num_bad, self.matrix], self.num_images)
        if seen is None:
            return None
        (loss_sum, num_bad, matrix), num_images = seen
        return _mean_loss(loss_sum, num_bad, num_images), compute_scores(matrix, self.num_classes).iou


def _mean_loss(loss_sum: torch.Tensor, num_bad: torch.Tensor, num_images: int) -> float:
    num_good = num_images - int(num_bad)
    return float(loss_sum) / num_good if num_good else math.nan


def wide_float(device: torch.device) -> torch.dtype:
    """For sums over an epoch; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class EarlyStopping:
    """Best value of the monitored metric so far and how long ago it was."""

    higher_is_better: bool
    min_delta: float = 0.0
    best_value: float = math.nan
    best_epoch: int = 0  # epochs count from 1; 0: none yet
    reference: float = math.nan  # value that the next one must beat by min_delta to reset the patience
    epochs_since_best: int = 0  # since the last improvement of at least min_delta
    patience_used: int = 0  # of these, the epochs that count against the patience

    def update(self, value: float, epoch: int, counts: bool = True) -> bool:
        """Takes in an epoch's value; returns whether it is the best so far. NaN is never better. `counts`: the epoch
        counts against the patience if it brought no improvement."""
        improved = self._beats(value, self.best_value, 0.0)
        if improved:
            self.best_value, self.best_epoch = value, epoch
        if self._beats(value, self.reference, self.min_delta):
            self.reference, self.epochs_since_best, self.patience_used = value, 0, 0
        else:
            self.epochs_since_best += 1
            self.patience_used += counts
        return improved

    def _beats(self, value: float, other: float, margin: float) -> bool:
        if math.isnan(value) or math.isnan(other):
            return not math.isnan(value)
        gain = value - other if self.higher_is_better else other - value
        return gain > 0 and gain >= margin

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STOPPING}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STOPPING:
            setattr(self, name, state[name])


def counts_against_patience(
    epoch: int, learning_rate: LearningRate, freeze_encoder_epochs: int, train_losses: Sequence[float]
) -> bool:
    """Whether an epoch, counted from 1, counts against the patience if it brings no improvement: not in the warm-up or
    while the encoder is frozen, nor, with cosine and poly, while the planned rate is above half of its peak and one of
    the last RECENT_EPOCHS epochs had a lower training loss than all before. Validation often gets better only when the
    rate falls."""
    first_step = (epoch - 1) * learning_rate.steps_per_epoch
    if first_step < learning_rate.num_warmup_steps or epoch <= freeze_encoder_epochs:
        return False
    last_step = first_step + learning_rate.steps_per_epoch - 1
    is_high = learning_rate.scheduler in ("cosine", "poly") and learning_rate.at(last_step) > 0.5 * learning_rate.peak
    lowest_before = min(train_losses[:-RECENT_EPOCHS] or train_losses[:1])
    return not (is_high and min(train_losses[-RECENT_EPOCHS:]) < lowest_before)


@dataclass
class TrainState:
    """Everything that a run needs to go on, at the next epoch or within one, as if it had never stopped."""

    segmenter: Segmenter
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    learning_rate: LearningRate
    early_stopping: EarlyStopping
    ema: Ema | None
    metrics: EpochMetrics  # of the current epoch
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the current epoch that the weights have seen: whole accumulation groups
    history: list[Row] = field(default_factory=list)
    per_class_iou: list[float | None] = field(default_factory=list)  # of the best epoch
    confusion: list[list[int]] = field(default_factory=list)  # of its validation: rows truth, columns prediction
    seconds: float = 0.0  # in finished epochs
    train_seconds: float = 0.0  # in training in the current epoch
    wait_seconds: float = 0.0  # of train_seconds: the device was idle for want of a batch
    launch: Launch = ALONE  # the place of this process in a torchrun job

    @property
    def eval_segmenter(self) -> Segmenter:
        """The one that is evaluated and saved as best.pt: the average where there is one."""
        return self.segmenter if self.ema is None else self.ema.segmenter

    @property
    def device(self) -> torch.device:
        return next(self.segmenter.parameters()).device

    def next_learning_rate(self, accumulation_steps: int) -> float:
        """The rate of the optimizer step that the next batch belongs to."""
        num_steps = math.ceil(self.batch / accumulation_steps)  # of the epoch; the last one may be of fewer batches
        return self.learning_rate.at(self.epoch * self.learning_rate.steps_per_epoch + num_steps)

    def forget_best(self) -> None:
        """The weights of the best epoch are lost: the next epoch is the best one. The patience goes on."""
        self.early_stopping.best_value, self.early_stopping.best_epoch = math.nan, 0
        self.per_class_iou, self.confusion = [], []

    def restart_epoch(self) -> None:
        self.batch = 0
        self.train_seconds = self.wait_seconds = 0.0
        self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        ema = self.ema
        # Samples draw from their own, made from (seed, epoch, index).
        on_host, *on_device = (generator.get_state() for generator in generators(self.device))
        return {
            "model": network_weights(self.segmenter),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "progress": self.early_stopping.state_dict(),
            "ema": None if ema is None else {"model": network_weights(ema.segmenter), "num_updates": ema.num_updates},
            "totals": self.metrics.state_dict(),
            **{name: getattr(self, name) for name in (*POSITION, *TABLES)},
            "num_processes": self.launch.world_size,
            "random_state": on_host,
            "cuda_random_state": on_device[0] if on_device else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises an error of ILL_FORMED for what no run with these settings has saved."""
        _load_weights(self.segmenter, state["model"])
        self._load_optimizer(state["optimizer"])
        if state["scaler"] and self.scaler.is_enabled():  # empty when the run had none
            found = {name: state["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})
        self.learning_rate.load_state_dict(state["learning_rate"])
        self.early_stopping.load_state_dict(state["progress"])
        if self.ema is not None:
            saved = state["ema"] or {"model": state["model"], "num_updates": 0}
            _load_weights(self.ema.segmenter, saved["model"])
            self.ema.num_updates.copy_(torch.as_tensor(saved["num_updates"]))
        self.metrics.load_state_dict(state["totals"])
        for name in POSITION:
            setattr(self, name, state[name])
        self.history = [dict(row) for row in state["history"]]
        self.per_class_iou, self.confusion = list(state["per_class_iou"]), [list(row) for row in state["confusion"]]
        if len(self.history) != self.epoch:
            raise ValueError(f"history has {len(self.history)} rows for {self.epoch} epochs")
        with LOCK:
            random_states = (state["random_state"], state["cuda_random_state"])
            for generator, saved_state in zip(generators(self.device), random_states, strict=False):
                if saved_state is not None:
                    generator.set_state(saved_state.clone())  # torch reads a view from the start of its memory

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Settings are those of this start and this device, not those that were saved. Set before the load, because a
        fused optimizer needs its step counts on the device."""
        groups = self.optimizer.param_groups
        if len(saved["param_groups"]) != len(groups):  # the encoder has groups of its own, or has none
            raise ValueError("encoder_lr_factor was changed to 1 or from it; keep it, or start a new run")
        loaded = [{**own, "params": one["params"]} for own, one in zip(groups, saved["param_groups"], strict=True)]
        self.optimizer.load_state_dict({"state": saved["state"], "param_groups": loaded})
        for parameter, values in self.optimizer.state.items():  # torch would fail in the first step
            if any(value.shape not in (parameter.shape, ()) for value in values.values()):
                raise ValueError("the optimizer's state is that of another model")
        if isinstance(self.optimizer, torch.optim.SGD):
            fill_momentum(self.optimizer)


def _load_weights(segmenter: Segmenter, weights: Mapping[str, torch.Tensor]) -> None:
    try:
        segmenter.network.load_state_dict(weights)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"{why}; was timm or segmentation-models-pytorch changed since?") from None
