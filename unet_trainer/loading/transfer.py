"""Batches on their way to the GPU, in a stream of their own: one is copied while the step before it still computes."""

from __future__ import annotations

import contextlib
import functools

import torch


def to_device(tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """On a GPU the step waits for the copy, and the host for neither; the memory copied from must stay as it is meanwhile."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    with torch.cuda.stream(copy_stream(device)):
        moved = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(copy_stream(device))
    for tensor in moved:
        tensor.record_stream(computing)  # or its memory could be taken for the next copy while the step still reads it
    return moved


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def pin(memory: torch.Tensor) -> bool:
    """Makes memory that is there already such that a GPU reads it by itself. Without it copies are slower, and as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")  # CUDA keeps the error for the next kernel, which is not to be one of the step
    return False


def unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
