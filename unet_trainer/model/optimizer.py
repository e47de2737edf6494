"""The optimizer and its learning-rate schedule. The rate is a function of the step, so a resumed run needs no replay."""

from __future__ import annotations

import math
from typing import Any

import torch

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.model.network import parameter_groups

POLY_POWER = 0.9
MOMENTUM = 0.9


def build_optimizer(config: ResolvedConfig, network: torch.nn.Module) -> torch.optim.Optimizer:
    """fused=True is required: only fused optimizers honour found_inf without a host sync."""
    groups = parameter_groups(network, config.weight_decay, config.encoder_lr_factor)
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.learning_rate, momentum=MOMENTUM, nesterov=True, fused=True)
        fill_momentum(sgd)
        return sgd
    adam = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer]
    return adam(groups, lr=config.learning_rate, fused=True)


def fill_momentum(sgd: torch.optim.SGD) -> None:
    """Zero momentum buffers: fused SGD would use uninitialised memory after a first step that is skipped."""
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class LearningRate:
    """The rate at each step: a linear warm-up, then the schedule. Only plateau has state."""

    def __init__(
        self,
        peak: float,
        scheduler: str,
        num_epochs: int,
        steps_per_epoch: int,
        warmup_epochs: float = 0.0,
        plateau_patience: int = 5,
        plateau_factor: float = 0.3,
    ) -> None:
        self.peak = peak
        self.scheduler = scheduler
        self.steps_per_epoch = steps_per_epoch
        self.num_epochs = num_epochs
        self.num_warmup_steps = round(warmup_epochs * steps_per_epoch)
        self.plateau_patience = plateau_patience
        self.plateau_factor = plateau_factor
        self.num_drops = 0
        self.epochs_since_drop = 0
        self.factor = 1.0  # lowered after a step with non-finite numbers
        self.end: int | None = None  # the step before which the time of the run ends, if that is within an epoch

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch if self.end is None else self.end

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0 over the whole run."""
        return self.factor * self.planned(step)

    def planned(self, step: int) -> float:
        """The rate of a step without the reduction after non-finite numbers."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        if self.scheduler == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        if self.scheduler == "poly":
            return self.peak * max(0.0, 1 - done) ** POLY_POWER
        return self.peak * self.plateau_factor**self.num_drops  # constant never drops

    def end_epoch(self, epochs_since_best: int) -> None:
        """Plateau: drops after plateau_patience epochs without improvement, and again after as many more."""
        if self.scheduler != "plateau":
            return
        self.epochs_since_drop = 0 if epochs_since_best == 0 else self.epochs_since_drop + 1
        if self.epochs_since_drop >= self.plateau_patience:
            self.num_drops += 1
            self.epochs_since_drop = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_drops": self.num_drops,
            "epochs_since_drop": self.epochs_since_drop,
            "factor": self.factor,
            "num_epochs": self.num_epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drops = state["num_drops"]
        self.epochs_since_drop = state["epochs_since_drop"]
        self.factor = state["factor"]


def build_learning_rate(config: ResolvedConfig, steps_per_epoch: int) -> LearningRate:
    return LearningRate(
        peak=config.learning_rate,
        scheduler=config.scheduler,
        num_epochs=config.num_epochs,
        steps_per_epoch=steps_per_epoch,
        warmup_epochs=config.warmup_epochs,
        plateau_patience=config.plateau_patience,
        plateau_factor=config.plateau_factor,
    )
