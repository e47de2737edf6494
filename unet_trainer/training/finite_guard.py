"""Judges every step on the device: a step with numbers that are not finite changes nothing and is counted.

Only `check` waits for the device. The count of bad steps in a row is read late; recovery decides what follows from it.
"""

from __future__ import annotations

import torch

from unet_trainer.runs.errors import NonFinite
from unet_trainer.training.async_reader import AsyncReader

MAX_BAD_STEPS = 8  # in a row; more of them, and skipping steps does not help


class BufferSnapshot:
    """Buffers of one dtype (running mean, variance and count of batch norms), restored after a bad step.

    Concatenated into one tensor: torch.where takes no lists, and a launch for each buffer would cost more than the step's end.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers
        self.saved = self.concatenated()
        sizes = [buffer.numel() for buffer in buffers]
        self.saved_views = [piece.view_as(buffer) for piece, buffer in zip(self.saved.split(sizes), buffers, strict=True)]

    def concatenated(self) -> torch.Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in self.buffers])

    def save(self) -> None:
        self.saved.copy_(self.concatenated())

    def commit_or_restore(self, is_good: torch.Tensor, current: torch.Tensor) -> None:
        """After a good step saves the current values; after a bad one restores those that were saved."""
        self.saved.copy_(torch.where(is_good, current, self.saved))
        torch._foreach_copy_(self.buffers, self.saved_views)


class FiniteGuard:
    """Whether a network's steps are finite. A step is an accumulation group: one bad batch spoils the sum of its gradients."""

    def __init__(self, network: torch.nn.Module, device: torch.device, max_bad_steps: int = MAX_BAD_STEPS) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in network.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self.snapshots = [BufferSnapshot(buffers) for buffers in by_dtype.values()]
        self.max_bad_steps = max_bad_steps
        self.is_saved = False  # the snapshots hold the buffers as they are
        self.first_batch_of_step = torch.zeros((), dtype=torch.int64, device=device)
        self.losses_are_finite = torch.ones((), dtype=torch.bool, device=device)
        self.peers_are_finite = torch.ones((), dtype=torch.bool, device=device)  # losses and buffers of all other processes
        self.num_bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad_batch = torch.zeros((), dtype=torch.int64, device=device)
        self.reader = AsyncReader(device)

    def reset(self) -> None:
        """Forgets the step under way and all bad steps; the buffers may have other values from here on."""
        self.is_saved = False
        self.losses_are_finite.fill_(True)
        self.peers_are_finite.fill_(True)
        for counter in (self.num_bad_in_a_row, self.most_in_a_row, self.first_bad_batch):
            counter.zero_()
        self.reader.clear()

    def begin_step(self, first_batch: int) -> None:
        """`first_batch`: number of the step's first batch, counted over the whole run."""
        if not self.is_saved:  # else the last judgement saved them
            for snapshot in self.snapshots:
                snapshot.save()
            self.is_saved = True
        self.first_batch_of_step.fill_(first_batch)

    def add_loss(self, loss: torch.Tensor) -> None:
        self.losses_are_finite &= torch.isfinite(loss)

    def faults(self) -> torch.Tensor:
        """What the other processes have to know of this one's step, on the device: losses and buffers that are not finite, 0 or 1
        each. Gradients need not be told: their average is not finite either."""
        buffers_are_finite = torch.ones_like(self.losses_are_finite)
        for snapshot in self.snapshots:
            buffers_are_finite = buffers_are_finite & torch.isfinite(snapshot.concatenated()).all()
        return torch.stack([~self.losses_are_finite, ~buffers_are_finite]).float()

    def take_faults(self, faults: torch.Tensor) -> None:
        """Those of all processes, averaged: the next judgement is the same on each of them."""
        self.losses_are_finite.copy_(faults[0] == 0)
        self.peers_are_finite.copy_(faults[1] == 0)

    def judge(self, gradient_norm: torch.Tensor, loss_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the step is good, and whether a bad one counts as NaN; restores the buffers if it is bad.

        Gradients that overflow float16 do not count while the loss scale can still fall.
        """
        is_good = self.losses_are_finite & self.peers_are_finite & torch.isfinite(gradient_norm)
        current = [snapshot.concatenated() for snapshot in self.snapshots]
        for values in current:
            is_good = is_good & torch.isfinite(values).all()
        for snapshot, values in zip(self.snapshots, current, strict=True):
            snapshot.commit_or_restore(is_good, values)
        is_nan = ~is_good & ~(self.losses_are_finite & (loss_scale > 1))
        self.num_bad_in_a_row.add_(1).mul_(is_nan)
        is_first = (self.num_bad_in_a_row == 1) & (self.most_in_a_row < self.max_bad_steps)
        self.first_bad_batch.copy_(torch.where(is_first, self.first_batch_of_step, self.first_bad_batch))
        torch.maximum(self.most_in_a_row, self.num_bad_in_a_row, out=self.most_in_a_row)
        self.losses_are_finite.fill_(True)
        self.peers_are_finite.fill_(True)
        return is_good, is_nan

    def poll(self) -> None:
        """Raises NonFinite if too many steps in a row were bad a moment ago. Never waits for the device."""
        seen = self.reader.poll([self.most_in_a_row, self.first_bad_batch], 0)
        if seen is not None:
            self._raise_if_many(*seen[0])

    def check(self) -> None:
        """Raises NonFinite if too many steps in a row were bad so far. Waits for the device."""
        self._raise_if_many(self.most_in_a_row, self.first_bad_batch)

    def _raise_if_many(self, most_in_a_row: torch.Tensor, first_bad_batch: torch.Tensor) -> None:
        if int(most_in_a_row) >= self.max_bad_steps:
            count = "a step was" if self.max_bad_steps == 1 else f"{self.max_bad_steps} steps in a row were"
            raise NonFinite(f"{count} not finite", int(first_bad_batch))
