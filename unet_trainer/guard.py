"""Judges every step on the device: a step whose numbers are not finite changes nothing and is counted.

Nothing here waits for the device. How often in a row it happened is read late, and what is done then is the script's.
"""

from __future__ import annotations

import torch

from unet_trainer.glimpse import Glimpse

MAX_BAD_STEPS = 8  # in a row; then skipping them is no cure


class NonFinite(RuntimeError):
    """Numbers went bad and stayed so: in a training batch, counted over the whole run, or in one of validation."""

    def __init__(self, what: str, batch_number: int | None = None, val_batch: int | None = None) -> None:
        super().__init__(what)
        self.batch_number = batch_number
        self.val_batch = val_batch


class Statistics:
    """Buffers of one number format (a batch norm's running mean, variance and count), put back after a bad step.

    Joined, because torch has no select for lists of tensors: one by one would be a launch for each buffer.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers
        self.kept = self.joined()
        sizes = [buffer.numel() for buffer in buffers]
        self.kept_pieces = [piece.view_as(buffer) for piece, buffer in zip(self.kept.split(sizes), buffers, strict=True)]

    def joined(self) -> torch.Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in self.buffers])

    def keep(self) -> None:
        self.kept.copy_(self.joined())

    def choose(self, is_good: torch.Tensor, joined: torch.Tensor) -> None:
        """Keeps the new values, or puts the kept ones back."""
        self.kept.copy_(torch.where(is_good, joined, self.kept))
        torch._foreach_copy_(self.buffers, self.kept_pieces)


class Guard:
    """Whether the steps of a model are good. A step is an accumulation window: one bad batch spoils the sum of its gradients."""

    def __init__(self, model: torch.nn.Module, device: torch.device, max_bad_steps: int = MAX_BAD_STEPS) -> None:
        by_format: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            by_format.setdefault(buffer.dtype, []).append(buffer)
        self.statistics = [Statistics(buffers) for buffers in by_format.values()]
        self.max_bad_steps = max_bad_steps
        self.batch_number = 0  # of the batch at hand; set by the loop
        self.has_kept = False  # the statistics as they are
        self.first_of_window = torch.zeros((), dtype=torch.int64, device=device)
        self.losses_are_finite = torch.ones((), dtype=torch.bool, device=device)
        self.num_bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_batch = torch.zeros((), dtype=torch.int64, device=device)
        self.glimpse = Glimpse(device)

    def reset(self) -> None:
        """Forgets the window at hand and all troubles; the statistics may be others from here on."""
        self.has_kept = False
        self.losses_are_finite.fill_(True)
        for counter in (self.num_bad_in_a_row, self.most_in_a_row, self.first_bad_batch):
            counter.zero_()

    def open_window(self) -> None:
        if not self.has_kept:  # else the last judgement kept them
            for statistics in self.statistics:
                statistics.keep()
            self.has_kept = True
        self.first_of_window.fill_(self.batch_number)

    def see_loss(self, loss: torch.Tensor) -> None:
        self.losses_are_finite &= torch.isfinite(loss.detach())

    def judge(self, gradient_norm: torch.Tensor, loss_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the window is good and, if not, whether its numbers are bad for good; puts the buffers back if it is bad.

        Gradients that overflow float16 are no trouble while the loss scale can still fall.
        """
        is_good = self.losses_are_finite & torch.isfinite(gradient_norm)
        new = [statistics.joined() for statistics in self.statistics]
        for joined in new:
            is_good = is_good & torch.isfinite(joined).all()
        for statistics, joined in zip(self.statistics, new, strict=True):
            statistics.choose(is_good, joined)
        is_trouble = ~is_good & ~(self.losses_are_finite & (loss_scale > 1))
        self.num_bad_in_a_row.add_(1).mul_(is_trouble)
        is_first = (self.num_bad_in_a_row == 1) & (self.most_in_a_row < self.max_bad_steps)
        self.first_bad_batch.copy_(torch.where(is_first, self.first_of_window, self.first_bad_batch))
        torch.maximum(self.most_in_a_row, self.num_bad_in_a_row, out=self.most_in_a_row)
        self.losses_are_finite.fill_(True)
        return is_good, is_trouble

    def look(self) -> None:
        """Raises NonFinite if too many steps in a row were bad a moment ago. Never waits for the device."""
        seen = self.glimpse.take([self.most_in_a_row, self.first_bad_batch], 0)
        if seen is not None:
            self._raise_if_many(*seen[0])

    def check(self) -> None:
        """The same of this very moment. Waits for the device."""
        self._raise_if_many(self.most_in_a_row, self.first_bad_batch)

    def _raise_if_many(self, most_in_a_row: torch.Tensor, first_bad_batch: torch.Tensor) -> None:
        if int(most_in_a_row) >= self.max_bad_steps:
            count = "a step was" if self.max_bad_steps == 1 else f"{self.max_bad_steps} steps in a row were"
            raise NonFinite(f"{count} not finite", int(first_bad_batch))
