"""Copies the state of a run to the host while the device goes on computing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

TensorKey = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]  # address, dtype, shape, strides, device

BLOCK_BYTES = 1 << 25  # pinned memory comes in powers of two: larger blocks would waste more of it


class HostCopy:
    """Copies nested dicts and lists with tensors to the host, as they are now, without waiting for the device.

    Tensors that `other`, made at the same moment, has copied are not copied again.

    The copies lie in a few large blocks of memory: a block is allocated and written to the file with one call. Hundreds of small
    calls would contend with the training loop for the GIL.
    """

    def __init__(self, content: Any, other: HostCopy | None = None) -> None:
        self.places: dict[TensorKey, torch.Tensor] = {} if other is None else dict(other.places)
        sources = {source: tensor for tensor in tensors_in(content) if (source := _key(tensor)) not in self.places}
        for group in _blocks(sources):
            self._allocate({source: sources[source] for source in group})
        if sources:  # one call for all
            torch._foreach_copy_([self.places[source] for source in sources], list(sources.values()), non_blocking=True)
        self.content_now = self._placed(content)
        self.arrived = torch.cuda.Event() if any(device.type == "cuda" for *_, device in self.places) else None
        if self.arrived is not None:
            self.arrived.record()

    def _allocate(self, sources: Mapping[TensorKey, torch.Tensor]) -> None:
        """One block for tensors of one dtype from one device, one behind the other."""
        first = next(iter(sources.values()))
        total = sum(tensor.numel() for tensor in sources.values())
        # Pinned, or the copy would wait for the device.
        block = torch.empty(total, dtype=first.dtype, pin_memory=first.is_cuda)
        start = 0
        for source, tensor in sources.items():
            self.places[source] = block.as_strided(tensor.shape, _dense_strides(tensor), start)
            start += tensor.numel()

    def _placed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.places[_key(value.detach())]
        if isinstance(value, dict):
            return {name: self._placed(item) for name, item in value.items()}
        return [self._placed(item) for item in value] if isinstance(value, list) else value

    def content(self) -> Any:
        """The copy. Waits until all of it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.content_now


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _key(tensor: torch.Tensor) -> TensorKey:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its memory has no gaps, else those of a contiguous tensor."""
    if tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _blocks(sources: Mapping[TensorKey, torch.Tensor]) -> Iterator[list[TensorKey]]:
    """Groups of one dtype and device, of BLOCK_BYTES at most unless a single tensor is larger."""
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[TensorKey], int]] = {}
    for source, tensor in sources.items():
        kind = tensor.dtype, tensor.device
        group, size = open_groups.get(kind, ([], 0))
        if group and size + tensor.nbytes > BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(source)
        open_groups[kind] = group, size + tensor.nbytes
    yield from (group for group, _ in open_groups.values())
