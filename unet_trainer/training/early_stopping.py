"""Early stopping: which epoch was best, which epochs count against the patience, and whether it has run out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unet_trainer.model.optimizer import LearningRate

RECENT_EPOCHS = 5  # a noisy epoch or two do not mean that training has stopped improving


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
        """Takes in an epoch's value; returns whether it is the best so far. NaN is never better.

        `counts`: the epoch counts against the patience if it brought no improvement.
        """
        improved = self._beats(value, self.best_value, 0.0)
        if improved:
            self.best_value, self.best_epoch = value, epoch
        if self._beats(value, self.reference, self.min_delta):
            self.reference, self.epochs_since_best, self.patience_used = value, 0, 0
        else:
            self.epochs_since_best += 1
            self.patience_used += counts
        return improved

    def forget_best(self) -> None:
        """The weights of the best epoch are lost: the next epoch is the best one. The patience goes on."""
        self.best_value, self.best_epoch = math.nan, 0

    def is_out_of_patience(self, patience: int | None) -> bool:
        return patience is not None and self.patience_used >= patience

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
        """In a state of an earlier version every epoch since the best one counted."""
        for name, value in {"patience_used": state["epochs_since_best"], **state}.items():
            setattr(self, name, value)


def counts_against_patience(
    epoch: int, learning_rate: LearningRate, freeze_encoder_epochs: int, train_losses: Sequence[float]
) -> bool:
    """Whether an epoch, counted from 1, counts against the patience if it brings no improvement.

    It does not
    - if it begins within the warm-up of the learning rate, or while the encoder is frozen;
    - with the schedulers cosine and poly, while the planned rate is above half of its peak and training still improves: validation
      often gets better only when the rate falls. Training still improves if one of the last RECENT_EPOCHS epochs had a lower
      training loss than all epochs before it. `train_losses` are those of all epochs up to this one.
    """
    first_step = (epoch - 1) * learning_rate.steps_per_epoch
    if first_step < learning_rate.num_warmup_steps or epoch <= freeze_encoder_epochs:
        return False
    last_step = first_step + learning_rate.steps_per_epoch - 1
    rate_falls_later = learning_rate.scheduler in ("cosine", "poly") and learning_rate.planned(last_step) > 0.5 * learning_rate.peak
    return not (rate_falls_later and _still_improves(train_losses))


def _still_improves(train_losses: Sequence[float]) -> bool:
    lowest_before = min(train_losses[:-RECENT_EPOCHS] or train_losses[:1])
    return min(train_losses[-RECENT_EPOCHS:]) < lowest_before
