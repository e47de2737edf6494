"""Working with a CUDA device without waiting for it: late reads, copies to the host, recorded graphs, and how long it
was idle."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

READ_SECONDS = 0.5  # between two reads
TensorKey = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]  # address, dtype, shape, strides, device
BLOCK_BYTES = 1 << 25  # pinned memory comes in powers of two: larger blocks would waste more of it
MAX_GRAPHS = 8  # a run needs two; more are recorded when tensors move to other addresses
Item = TypeVar("Item")


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


class HostCopy:
    """Copies nested dicts and lists with tensors to the host, as they are now, without waiting for the device.

    The copies lie in a few large blocks of memory: a block is allocated and written to the file with one call. Hundreds
    of small calls would contend with the training loop for the GIL.
    """

    def __init__(self, content: Any) -> None:
        self.places: dict[TensorKey, torch.Tensor] = {}
        tensors = [leaf.detach() for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
        sources = {_key(tensor): tensor for tensor in tensors}
        for group in _blocks(sources):  # of one dtype from one device, one tensor behind the other
            first = next(iter(group.values()))
            total = sum(tensor.numel() for tensor in group.values())
            # Pinned, or the copy would wait for the device.
            block = torch.empty(total, dtype=first.dtype, pin_memory=first.is_cuda)
            start = 0
            for source, tensor in group.items():
                strides = torch.empty_like(tensor, device="meta").stride()  # its own if its memory has no gaps
                self.places[source] = block.as_strided(tensor.shape, strides, start)
                start += tensor.numel()
        on_cuda = any(device.type == "cuda" for *_, device in self.places)
        self.arrived = torch.cuda.Event(blocking=True) if on_cuda else None  # who waits for it sleeps, not spins
        if sources:  # one call for all; without an event, as on Apple's GPUs, it waits
            copies = [self.places[source] for source in sources]
            torch._foreach_copy_(copies, list(sources.values()), non_blocking=self.arrived is not None)
        self.content_now = tree_map_only(torch.Tensor, lambda tensor: self.places[_key(tensor)], content)
        if self.arrived is not None:
            self.arrived.record()

    def content(self) -> Any:
        """The copy. Waits until all of it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.content_now


def _key(tensor: torch.Tensor) -> TensorKey:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _blocks(sources: Mapping[TensorKey, torch.Tensor]) -> Iterator[dict[TensorKey, torch.Tensor]]:
    """Groups of one dtype and device, of BLOCK_BYTES at most unless a single tensor is larger."""
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[dict[TensorKey, torch.Tensor], int]] = {}
    for source, tensor in sources.items():
        kind = tensor.dtype, tensor.device
        group, size = open_groups.get(kind, ({}, 0))
        if group and size + tensor.nbytes > BLOCK_BYTES:
            yield group
            group, size = {}, 0
        group[source] = tensor
        open_groups[kind] = group, size + tensor.nbytes
    yield from (group for group, _ in open_groups.values())


class DirectLauncher:
    """Calls the work. For CPUs, and for steps that are not compiled."""

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        work()

    def clear(self) -> None:
        """Nothing is recorded."""


class CudaGraphCache:
    """Records work that comes twice in a row with the same key as a CUDA graph, and replays it from then on.

    The key must hold all that may differ from one call to the next: the addresses of tensors that are handed in, and
    numbers. Work may read and write device memory only; what it changes in Python happens while it is recorded, and not
    again."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}  # least recently used first
        self.pool: Any = None  # memory shared by all graphs, since one is replayed at a time
        self.last_keys: dict[str, Hashable] = {}  # the key of each name's last call
        self.num_replays = 0

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        graph = self.graphs.pop((name, key), None)
        if graph is None and self.last_keys.get(name) == key:
            if len(self.graphs) >= MAX_GRAPHS:
                torch.cuda.current_stream().synchronize()  # the device may still be replaying it
                del self.graphs[next(iter(self.graphs))]
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = record_graph(work, self.pool)
        self.last_keys[name] = key
        if graph is None:
            work()
        else:
            self.graphs[name, key] = graph
            graph.replay()
            self.num_replays += 1

    def clear(self) -> None:
        if self.graphs:
            torch.cuda.current_stream().synchronize()
        self.graphs.clear()
        self.last_keys.clear()
        self.pool = None


Launcher = DirectLauncher | CudaGraphCache


def record_graph(work: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Recording runs nothing. Not with torch.cuda.graph, which synchronizes and empties the memory cache first."""
    graph = torch.cuda.CUDAGraph()
    current, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    side_stream.wait_stream(current)
    with torch.cuda.stream(side_stream):
        # thread_local: other threads may pin memory and query events meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would hide the real error
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(side_stream)
    return graph


class WaitMeter:
    """How long the device was idle in an epoch for want of a batch. `seconds` lags behind by the steps that it has not
    reached yet.

    On a CUDA device the host runs ahead: while it waits for a batch, the device may still be busy with queued steps. So
    the gap between two steps is measured on the device's own clock, and counts for no longer than the host has waited.
    """

    def __init__(
        self, device: torch.device, seconds: float = 0.0, new_event: Callable[[], torch.cuda.Event] | None = None
    ) -> None:
        if new_event is None and device.type == "cuda":
            new_event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
        self.new_event = new_event
        self.seconds = seconds
        self.last_end: torch.cuda.Event | None = None
        self.gaps: deque[tuple[Any, Any, float]] = deque()  # events: end of a step, begin of the next; the host's wait

    def wait_for(self, take: Callable[[], Item]) -> Item:
        """Takes the batch of a step, which begins now; the host's time in it counts as waiting, unless the device was
        busy."""
        started = time.perf_counter()
        item = take()
        host_seconds = time.perf_counter() - started
        # the host is the device; or nothing is queued before the first step
        if self.new_event is None or self.last_end is None:
            self.seconds += host_seconds
        else:
            begin = self.new_event()
            begin.record()
            self.gaps.append((self.last_end, begin, host_seconds))
            self._collect()
        return item

    def step_ends(self) -> None:
        if self.new_event is not None:
            self.last_end = self.new_event()
            self.last_end.record()

    def _collect(self) -> None:
        while self.gaps and self.gaps[0][1].query():
            end, begin, host_seconds = self.gaps.popleft()
            self.seconds += min(end.elapsed_time(begin) / 1000, host_seconds)

    def finish(self) -> float:
        """The seconds of the epoch. Called when the device is done with it."""
        self._collect()
        return self.seconds
