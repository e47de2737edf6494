"""Exponential moving average of a model's weights."""

from __future__ import annotations

import copy

import torch

from unet_trainer.model.segmenter import Segmenter


class Ema:
    """Average of weights and buffers. The decay rises with the number of updates: the initial weights are soon forgotten."""

    def __init__(self, segmenter: Segmenter, decay: float) -> None:
        self.segmenter = copy.deepcopy(segmenter).eval().requires_grad_(False)
        self.decay = decay
        device = next(segmenter.parameters()).device
        # On the device: the host does not wait to know whether a step was good.
        self.num_updates = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        # These tensors stay at their addresses: loading a state copies into them.
        pairs = list(zip(self.segmenter.state_dict().values(), segmenter.state_dict().values(), strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, is_good: torch.Tensor) -> None:
        """Moves the average towards the current weights; a step that was not good leaves it as it is."""
        self.num_updates += is_good
        decay = ((1 + self.num_updates) / (10 + self.num_updates)).clamp(max=self.decay)
        _move_towards(self.floats, ((1 - decay) * is_good).float())
        if self.counters:
            _move_towards(self.counters, is_good.long())


def _move_towards(pairs: list[tuple[torch.Tensor, torch.Tensor]], share: torch.Tensor) -> None:
    """Each average moves by a share of its distance to the value."""
    averages = [average for average, _ in pairs]
    distances = torch._foreach_sub([value for _, value in pairs], averages)
    torch._foreach_mul_(distances, share)
    torch._foreach_add_(averages, distances)
