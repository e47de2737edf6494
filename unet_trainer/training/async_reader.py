"""Reads tensors on the device from the host without waiting for the device: at intervals, and a little late."""

from __future__ import annotations

import time

import torch

READ_SECONDS = 0.5  # between two reads


class AsyncReader:
    """Starts a copy to the host every READ_SECONDS, and returns it once it has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.arrived = torch.cuda.Event() if self.on_cuda else None
        self.started = time.perf_counter()
        self.copies: list[torch.Tensor] | None = None
        self.label = 0

    def poll(self, tensors: list[torch.Tensor], label: int) -> tuple[list[torch.Tensor], int] | None:
        """A copy that has arrived, with the label of its start, or None; starts the next copy when it is due."""
        if self.copies is not None:
            if self.arrived is not None and not self.arrived.query():
                return None
            taken, self.copies = (self.copies, self.label), None
            return taken
        if time.perf_counter() - self.started >= READ_SECONDS:
            self.started = time.perf_counter()
            self.label = label
            # Pinned: a copy into pageable memory would wait for the device.
            self.copies = [torch.empty_like(tensor, device="cpu", pin_memory=self.on_cuda) for tensor in tensors]
            for copy, tensor in zip(self.copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            if self.arrived is not None:
                self.arrived.record()
        return None

    def clear(self) -> None:
        """Drops a copy under way: the tensors were given other values."""
        self.copies = None
