"""Averages the gradients of a step over the processes of a torchrun job, together with what they have to know of each other's step.

Not DistributedDataParallel: its hooks take the compiled backward pass out of its CUDA graph (pytorch #139207), and it overlaps
nothing there, since a compiled backward pass hands over all gradients at its end. Here they are copied into one flat buffer,
averaged in one call between the replayed backward pass and the replayed optimizer step, and copied back; the copies are replayed
too. With accumulation that happens once a group.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch

from unet_trainer.system.processes import PeerLost, Processes
from unet_trainer.training.finite_guard import FiniteGuard

NUM_FAULTS = 2  # as FiniteGuard.faults has them
RANKS_PER_VOTE = 64  # an agreement takes a hop from process to process: beyond so many, they agree before every other step, ...


class GradientSync:
    """The gradients of some parameters. A process that has agreed to steps owes the others its part of them, even if it fails."""

    def __init__(self, processes: Processes, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.processes = processes
        self.parameters = list(parameters)
        self.num_owed = 0
        self.steps_per_vote = -(-processes.launch.world_size // RANKS_PER_VOTE)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes) + NUM_FAULTS, device=self.parameters[0].device)
        # With the strides of the parameters (channels last), so that copying is one launch for many tensors.
        starts = [0, *itertools.accumulate(sizes[:-1])]
        self.views = [
            torch.as_strided(self.flat, parameter.shape, parameter.stride(), start)
            for parameter, start in zip(self.parameters, starts, strict=True)
        ]
        self.faults = self.flat[-NUM_FAULTS:]

    def check_layout(self) -> None:
        """Raises if the parameters lie in memory in another order elsewhere: other elements would be averaged with each other."""
        layout = repr([(tuple(parameter.shape), parameter.stride()) for parameter in self.parameters])
        digests = self.processes.gather(hashlib.sha256(layout.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise PeerLost("the processes lay out the model differently in memory; do all machines have the same torch?")

    def _held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients that there are, and their places in the buffer; a frozen encoder has none."""
        pairs = [(view, parameter.grad) for view, parameter in zip(self.views, self.parameters, strict=True)]
        held = [(view, gradient) for view, gradient in pairs if gradient is not None]
        return [view for view, _ in held], [gradient for _, gradient in held]

    @torch.no_grad()
    def pack(self, guard: FiniteGuard) -> None:
        """Copies gradients and faults into the buffer. On the device only: this may be recorded and replayed."""
        self.faults.copy_(guard.faults())
        views, gradients = self._held()
        torch._foreach_copy_(views, gradients)

    def average(self) -> None:
        """The buffer, over all processes. Never recorded: NCCL has a stream and a watchdog of its own."""
        self.num_owed = max(0, self.num_owed - 1)
        self.processes.average(self.flat)

    @torch.no_grad()
    def unpack(self, guard: FiniteGuard) -> None:
        """Each gradient becomes its average, and the guard's faults those of all processes. May be recorded, as `pack`."""
        views, gradients = self._held()
        torch._foreach_copy_(gradients, views)
        guard.take_faults(self.faults)

    @torch.no_grad()
    def average_in_vain(self) -> None:
        """Gives the others what they wait for, with a fault: their steps change nothing."""
        while self.num_owed:
            self.num_owed -= 1
            self.flat.zero_()
            self.faults.fill_(1.0)
            self.processes.average(self.flat)
