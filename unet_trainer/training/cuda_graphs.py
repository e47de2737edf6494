"""How a step launches the work after its backward pass: directly, or recorded as CUDA graphs that start with one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

MAX_GRAPHS = 8  # a run needs two; more are recorded when tensors move to other addresses


class Launcher(Protocol):
    """Runs work on the device, now or as a replay."""

    uses_graphs: bool

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None: ...

    def clear(self) -> None: ...


class DirectLauncher:
    """Calls the work. For CPUs, and for steps that are not compiled."""

    uses_graphs = False

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        work()

    def clear(self) -> None:
        """Nothing is recorded."""


class CudaGraphCache:
    """Records work that comes twice in a row with the same key as a CUDA graph, and replays it from then on.

    The key must hold all that may differ from one call to the next: the addresses of tensors that are handed in, and numbers.
    Work may read and write device memory only; what it changes in Python happens while it is recorded, and not again.
    """

    uses_graphs = True

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}  # least recently used first
        self.pool: Any = None  # memory shared by all graphs, since one is replayed at a time
        self.last_keys: dict[str, Hashable] = {}  # the key of each name's last call
        self.num_replays = 0

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        graph = self.graphs.pop((name, key), None)
        if graph is None and self.last_keys.get(name) == key:
            if len(self.graphs) >= MAX_GRAPHS:
                _synchronize()  # the device may still be replaying it
                del self.graphs[next(iter(self.graphs))]
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = _record(work, self.pool)
        self.last_keys[name] = key
        if graph is None:
            work()
        else:
            self.graphs[name, key] = graph
            graph.replay()
            self.num_replays += 1

    def clear(self) -> None:
        if self.graphs:
            _synchronize()
        self.graphs.clear()
        self.last_keys.clear()
        self.pool = None


def _synchronize() -> None:
    torch.cuda.current_stream().synchronize()


def _record(work: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
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
