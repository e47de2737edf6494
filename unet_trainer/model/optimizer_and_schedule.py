"""The optimizer, its learning-rate schedule and the average of the weights (EMA).

The rate is a function of the step, so a resumed run needs no replay.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.model.segmenter import Segmenter

POLY_POWER = 0.9
MOMENTUM = 0.9


def build_optimizer(config: ResolvedConfig, network: torch.nn.Module) -> torch.optim.Optimizer:
    """fused=True is required: only fused optimizers honour found_inf without a host sync."""
    groups = parameter_groups(network, config.weight_decay, config.encoder_lr_factor)
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.learning_rate, momentum=MOMENTUM, nesterov=True, fused=True)
        fill_momentum(sgd)
        return may_be_recorded(sgd)
    adam = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer]
    return may_be_recorded(adam(groups, lr=config.learning_rate, fused=True))


def may_be_recorded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As a CUDA graph; torch would warn of it in every step that is not."""
    for group in optimizer.param_groups:
        group["capturable"] = True
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def fill_momentum(sgd: torch.optim.SGD) -> None:
    """Zero momentum buffers: fused SGD would use uninitialised memory after a first step that is skipped."""
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def parameter_groups(
    network: torch.nn.Module, weight_decay: float, encoder_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels; none for biases and normalisation. The encoder apart if its factor is not
    1."""
    slow = set() if encoder_lr_factor == 1 else set(network.get_submodule("encoder").parameters())
    groups: list[dict[str, Any]] = []
    for in_encoder in (True, False) if slow else (False,):
        own = [parameter for parameter in network.parameters() if (parameter in slow) == in_encoder]
        factor = {"lr_factor": encoder_lr_factor} if in_encoder else {}
        for decay, is_kernel in ((weight_decay, True), (0.0, False)):
            params = [parameter for parameter in own if (parameter.ndim > 1) == is_kernel]
            groups.append({"params": params, "weight_decay": decay, **factor})
    return groups


@dataclass
class LearningRate:
    """The schedule: the rate at each step, a linear warm-up first. Only plateau has state."""

    peak: float
    scheduler: str
    num_epochs: int
    steps_per_epoch: int
    num_warmup_steps: int = 0
    plateau_patience: int = 5
    plateau_factor: float = 0.3
    num_drops: int = 0
    epochs_since_drop: int = 0
    end: int | None = None  # the step before which the time of the run ends, if that is not the end of num_epochs

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch if self.end is None else self.end

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0 over the whole run."""
        # Of a run that ends sooner the warm-up is as much shorter.
        share = min(1.0, self.num_steps / max(1, self.num_epochs * self.steps_per_epoch))
        num_warmup_steps = math.ceil(share * self.num_warmup_steps)
        if step < num_warmup_steps:
            return self.peak * (step + 1) / num_warmup_steps
        done = (step - num_warmup_steps) / max(1, self.num_steps - num_warmup_steps)
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
        return {name: getattr(self, name) for name in ("num_drops", "epochs_since_drop", "num_epochs")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drops = state["num_drops"]
        self.epochs_since_drop = state["epochs_since_drop"]


def build_learning_rate(config: ResolvedConfig, steps_per_epoch: int) -> LearningRate:
    return LearningRate(
        config.learning_rate,
        config.scheduler,
        config.num_epochs,
        steps_per_epoch,
        round(config.warmup_epochs * steps_per_epoch),
        config.plateau_patience,
        config.plateau_factor,
    )


class Ema:
    """Average of weights and buffers. The decay rises with the number of updates, so that initial weights are soon
    forgotten, unless they are those of a trained model."""

    def __init__(self, segmenter: Segmenter, decay: float, is_trained: bool = False) -> None:
        self.segmenter = copy.deepcopy(segmenter).eval().requires_grad_(False)
        self.decay = decay
        device = next(segmenter.parameters()).device
        # On the device: the host does not wait to know whether a step was good.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.num_updates = torch.zeros((), dtype=dtype, device=device)
        if is_trained:
            self.num_updates += 10 / (1 - decay)  # at which the rising decay has passed its limit
        # These tensors stay at their addresses: loading a state copies into them.
        named = zip(self.segmenter.state_dict().values(), segmenter.state_dict().values(), strict=True)
        # One that has two names moves once.
        pairs = list({(pair[0].data_ptr(), pair[0].shape): pair for pair in named if pair[0].numel()}.values())
        self.weights = [pair for pair in pairs if _is_plain(*pair)]
        self.floats = [pair for pair in pairs if pair[0].is_floating_point() and not _is_plain(*pair)]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, is_good: torch.Tensor) -> None:
        """Moves the average towards the current weights; a step that was not good leaves it as it is."""
        self.num_updates += is_good
        decay = ((1 + self.num_updates) / (10 + self.num_updates)).clamp(max=self.decay)
        share = ((1 - decay) * is_good).float()
        if self.weights:
            averages, values = [average for average, _ in self.weights], [value for _, value in self.weights]
            # average -= share · (1 · average - value): as one kernel, in a quarter of the time.
            torch._fused_sgd_(
                averages, values, [], lr=share, weight_decay=1.0, maximize=True,
                momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
            )  # fmt: skip
        _move_towards(self.floats, share)
        _move_towards(self.counters, is_good.long())


def _is_plain(average: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fused optimizer takes them."""
    is_dense = average.is_contiguous() or average.is_contiguous(memory_format=torch.channels_last)
    return average.dtype == torch.float32 and is_dense and average.stride() == value.stride()


def _move_towards(pairs: list[tuple[torch.Tensor, torch.Tensor]], share: torch.Tensor) -> None:
    """Each average moves by a share of its distance to the value."""
    if not pairs:
        return
    averages = [average for average, _ in pairs]
    distances = torch._foreach_sub([value for _, value in pairs], averages)
    torch._foreach_mul_(distances, share)
    torch._foreach_add_(averages, distances)
