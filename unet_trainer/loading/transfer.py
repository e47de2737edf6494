"""Copies batches to the GPU in a separate stream: one is copied while the previous step still computes."""

from __future__ import annotations

import contextlib
import functools

import torch


def to_device(tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """On a GPU the copy is asynchronous: the compute stream waits for it, the host does not. The source must stay as it is."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    with torch.cuda.stream(copy_stream(device)):
        moved = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(copy_stream(device))
    for tensor in moved:
        tensor.record_stream(computing)  # else its memory could be reused for the next copy while the step still reads it
    return moved


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def pin(memory: torch.Tensor) -> bool:
    """Page-locks existing memory, so that copies to the GPU are asynchronous. False if it fails: copies are slower, but correct."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")  # clears the error, which the next kernel would raise
    return False


def unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
