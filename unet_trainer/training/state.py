"""The state of training, which a checkpoint saves: weights, optimizer, position within the epoch, metrics so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unet_trainer.model.ema import Ema
from unet_trainer.model.metrics import Scores, compute_scores
from unet_trainer.model.network import parameter_groups
from unet_trainer.model.optimizer import LearningRate, fill_momentum
from unet_trainer.model.segmenter import Segmenter, load_network_weights, network_weights
from unet_trainer.runs.checkpoint_content import check_fits
from unet_trainer.runs.history import Row
from unet_trainer.system.processes import Processes
from unet_trainer.training.async_reader import AsyncReader
from unet_trainer.training.early_stopping import EarlyStopping
from unet_trainer.training.rank_state import RankState, load_rank_state, rank_state, sum_totals


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
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)  # number of images before the first of them
        self.num_images = 0
        self._num_seen = torch.zeros((), dtype=torch.int64, device=device)  # num_images, on the device
        self._reader = AsyncReader(device)

    def add(self, loss: torch.Tensor, counts: torch.Tensor, num_images: int) -> None:
        """On the device only: the caller counts `num_images` on the host, since this may be replayed by a CUDA graph."""
        is_finite = torch.isfinite(loss)  # a skipped batch must not spoil the epoch's mean
        self.first_bad.copy_(torch.where(~is_finite & (self.num_bad == 0), self._num_seen, self.first_bad))
        self.loss_sum += torch.where(is_finite, loss, 0.0) * num_images
        self.num_bad += ~is_finite * num_images
        self.matrix += counts * is_finite
        self._num_seen += num_images

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        names = ("loss_sum", "matrix", "num_skipped", "num_nan", "num_bad", "first_bad")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> list[torch.Tensor]:
        return [*self._saved_tensors().values(), self._num_seen]

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()
        self.num_images = 0
        self._reader.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**self._saved_tensors(), "num_images": self.num_images}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._saved_tensors().items():
            tensor.copy_(state[name])
        self.num_images = state["num_images"]
        self._num_seen.fill_(self.num_images)
        self._reader.clear()

    def loss(self) -> float:
        """Mean over images with a finite loss, NaN if there is none. Waits for the device."""
        return _mean_loss(self.loss_sum, self.num_bad, self.num_images)

    def summed(self, processes: Processes) -> EpochMetrics:
        """Those of all processes, on the host. Waits for the device."""
        if processes.is_alone:
            return self
        own = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in self.state_dict().items()}
        total = EpochMetrics(self.num_classes, torch.device("cpu"))
        total.load_state_dict(sum_totals(processes.gather(own)))
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


def wide_float(device: torch.device) -> torch.dtype:
    """For sums over an epoch; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _mean_loss(loss_sum: torch.Tensor, num_bad: torch.Tensor, num_images: int) -> float:
    num_good = num_images - int(num_bad)
    return float(loss_sum) / num_good if num_good else math.nan


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
    num_rollbacks: int = 0  # after non-finite numbers
    rank: int = 0  # of this process in a torchrun job
    world_size: int = 1
    is_in_job: bool = False  # started by torchrun
    ranks: list[RankState] | None = None  # of all processes, when they were gathered last, which is before each save

    @property
    def eval_segmenter(self) -> Segmenter:
        """The one that is evaluated and saved as best.pt: the average where there is one."""
        return self.segmenter if self.ema is None else self.ema.segmenter

    @property
    def device(self) -> torch.device:
        return next(self.segmenter.parameters()).device

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.restart_epoch()

    def restart_epoch(self) -> None:
        self.batch = 0
        self.train_seconds = self.wait_seconds = 0.0
        self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": network_weights(self.segmenter),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "progress": self.early_stopping.state_dict(),
            "ema": None
            if self.ema is None
            else {"model": network_weights(self.ema.segmenter), "num_updates": self.ema.num_updates},
            "totals": self.metrics.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "history": self.history,
            "per_class_iou": self.per_class_iou,
            "confusion": self.confusion,
            "seconds": self.seconds,
            "train_seconds": self.train_seconds,
            "wait_seconds": self.wait_seconds,
            "num_rollbacks": self.num_rollbacks,
            **({} if self.ranks is None else {"ranks": self.ranks}),
            # The generators that a run draws from. Samples have their own, made from (seed, epoch, index).
            "random_state": torch.get_rng_state(),
            "cuda_random_state": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def _numbers_of_parameters(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """For each group of the optimizer, the numbers under which the state of its parameters was saved."""
        groups = self.optimizer.param_groups
        if len(saved_groups) == len(groups):
            return [saved["params"] for saved in saved_groups]
        if not saved_groups:
            raise ValueError("optimizer.param_groups is empty")
        # encoder_lr_factor changed to or from 1: the encoder has groups of its own in one of the two.
        factor = saved_groups[0].get("lr_factor", 1.0)
        then = [parameter for group in parameter_groups(self.segmenter.network, 0.0, factor) for parameter in group["params"]]
        saved = [number for group in saved_groups for number in group["params"]]
        number_of = dict(zip(then, saved, strict=True))
        return [[number_of[parameter] for parameter in group["params"]] for group in groups]

    def check_fits(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless the tensors of a state have the shapes of this model, which torch checks of some alone."""
        own = network_weights(self.segmenter)
        hint = "; was timm or segmentation-models-pytorch changed since?"
        try:
            check_fits("its model", state["model"], own)
            if self.ema is not None and state["ema"]:
                check_fits("its average", state["ema"]["model"], own)
        except ValueError as error:
            raise ValueError(f"{error}{hint}") from None
        totals = self.metrics.state_dict()
        names = [name for name, value in totals.items() if torch.is_tensor(value)]
        check_fits("totals", {name: state["totals"][name] for name in names}, {name: totals[name] for name in names})
        check_fits("the state", {"random_state": state["random_state"]}, {"random_state": torch.get_rng_state()})
        num_ids = len(self.metrics.matrix)
        num_scores = 1 if self.metrics.num_classes == 1 else num_ids
        if state["progress"]["best_epoch"] and len(state["per_class_iou"]) != num_scores:
            raise ValueError(f"per_class_iou has {len(state['per_class_iou'])} values, for {num_scores} classes")
        confusion = state.get("confusion", [])
        if confusion and [len(row) for row in confusion] != [num_ids] * num_ids:
            raise ValueError(f"confusion is no table of {num_ids} × {num_ids}")

    def _check_optimizer(self, saved: Mapping[int, Any], numbers: Sequence[Sequence[int]]) -> None:
        """Raises ValueError unless each parameter's state has its shape: torch would fail in the first step."""
        for group, params in zip(self.optimizer.param_groups, numbers, strict=True):
            if len(group["params"]) != len(params):
                raise ValueError(f"optimizer.param_groups has {len(params)} parameters, for {len(group['params'])} of the model")
            for parameter, number in zip(group["params"], params, strict=True):
                if number in saved:
                    self._check_moments(saved[number], parameter, f"optimizer.state[{number}]")

    def _check_moments(self, saved: Mapping[str, Any], parameter: torch.Tensor, place: str) -> None:
        moments = ("momentum_buffer",) if isinstance(self.optimizer, torch.optim.SGD) else ("exp_avg", "exp_avg_sq")
        for name in moments:
            value = saved.get(name)
            if not torch.is_tensor(value) or value.shape != parameter.shape:
                found = f"has {tuple(value.shape)}" if torch.is_tensor(value) else "is no tensor"
                raise ValueError(f"{place}.{name} {found}; its parameter has {tuple(parameter.shape)}")
        if "exp_avg" in moments and not (torch.is_tensor(step := saved.get("step")) and step.numel() == 1 and float(step) >= 0):
            raise ValueError(f"{place}.step is no number of steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another model, before anything of it is loaded."""
        self.check_fits(state)
        load_network_weights(self.segmenter, state["model"])
        # Settings are those of this start and this device, not those that were saved. Set before the load, because a fused
        # optimizer needs its step counts on the device.
        numbers = self._numbers_of_parameters(state["optimizer"]["param_groups"])
        self._check_optimizer(state["optimizer"]["state"], numbers)
        groups = [{**group, "params": params} for group, params in zip(self.optimizer.param_groups, numbers, strict=True)]
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if isinstance(self.optimizer, torch.optim.SGD):
            fill_momentum(self.optimizer)
        if state["scaler"] and self.scaler.is_enabled():  # empty when the run had none
            found = {name: state["scaler"][name] for name in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **found})
        self.learning_rate.load_state_dict(state["learning_rate"])
        self.early_stopping.load_state_dict(state["progress"])
        if self.ema is not None:
            saved = state["ema"] or {"model": state["model"], "num_updates": 0}
            load_network_weights(self.ema.segmenter, saved["model"])
            self.ema.num_updates.copy_(torch.as_tensor(saved["num_updates"]))
        self.metrics.load_state_dict(state["totals"])
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.history = [dict(row) for row in state["history"]]
        self.per_class_iou = list(state["per_class_iou"])
        self.confusion = [list(counts) for counts in state.get("confusion", [])]  # earlier versions did not save it
        self.seconds = state["seconds"]
        self.train_seconds = state["train_seconds"]
        self.wait_seconds = state["wait_seconds"]
        self.num_rollbacks = state["num_rollbacks"]
        torch.set_rng_state(state["random_state"].clone())  # torch reads a view from the start of its memory
        if state["cuda_random_state"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random_state"].clone(), self.device)
        ranks = state.get("ranks")
        self.ranks = ranks if self.is_in_job and ranks is not None and len(ranks) == self.world_size else None
        load_rank_state(self, ranks)

    def gather_ranks(self, processes: Processes) -> None:
        """Before a save. Waits for the device."""
        if not processes.is_alone:
            self.ranks = processes.gather(rank_state(self))
