"""Work on the device that is the same in every step, recorded as a CUDA graph: hundreds of small kernels start with one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

MAX_GRAPHS = 8  # that are kept; a run needs two, and others when tensors come to lie elsewhere


class Recorder:
    """Records work that comes twice in a row with the same key, and replays it from then on.

    The key must hold all that may differ from one time to the next: the addresses of tensors that are handed in, and numbers.
    Work reads and writes device memory alone; what it changes in Python happens when it is recorded, and not again.
    """

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}  # the one used last comes last
        self.pool: Any = None  # memory for all of them, since one is replayed at a time
        self.last: dict[str, Hashable] = {}  # the key that work of a name came with
        self.num_replays = 0

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        graph = self.graphs.pop((name, key), None)
        if graph is None and self.last.get(name) == key:
            if len(self.graphs) >= MAX_GRAPHS:
                _wait_for_device()  # it may still be replaying it
                del self.graphs[next(iter(self.graphs))]
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = _record(work, self.pool)
        self.last[name] = key
        if graph is None:
            work()
        else:
            self.graphs[name, key] = graph
            graph.replay()
            self.num_replays += 1

    def clear(self) -> None:
        if self.graphs:
            _wait_for_device()
        self.graphs.clear()
        self.last.clear()
        self.pool = None


def _wait_for_device() -> None:
    torch.cuda.current_stream().synchronize()


def _record(work: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Recording runs nothing. By hand, because torch.cuda.graph would wait for the device and give cached memory back."""
    graph = torch.cuda.CUDAGraph()
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # Other threads pin memory and ask whether copies have arrived; that does no harm here.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which would hide what went wrong
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(aside)
    return graph
