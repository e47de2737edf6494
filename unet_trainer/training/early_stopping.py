"""Early stopping: which epoch was best, and whether patience has run out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Best value of the monitored metric so far and how long ago it was."""

    higher_is_better: bool
    min_delta: float = 0.0
    best_value: float = math.nan
    best_epoch: int = 0  # epochs count from 1; 0: none yet
    reference: float = math.nan  # value that the next one must beat by min_delta to reset the patience
    epochs_since_best: int = 0  # since the last improvement of at least min_delta

    def update(self, value: float, epoch: int) -> bool:
        """Takes in an epoch's value; returns whether it is the best so far. NaN is never better."""
        improved = self._beats(value, self.best_value, 0.0)
        if improved:
            self.best_value, self.best_epoch = value, epoch
        if self._beats(value, self.reference, self.min_delta):
            self.reference, self.epochs_since_best = value, 0
        else:
            self.epochs_since_best += 1
        return improved

    def is_out_of_patience(self, patience: int | None) -> bool:
        return patience is not None and self.epochs_since_best >= patience

    def _beats(self, value: float, other: float, margin: float) -> bool:
        if math.isnan(value):
            return False
        if math.isnan(other):
            return True
        gain = value - other if self.higher_is_better else other - value
        return gain > 0 and gain >= margin

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        del state["higher_is_better"], state["min_delta"]  # settings, not state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
