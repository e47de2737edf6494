"""Work on the device that is the same in every step, recorded as a CUDA graph: hundreds of small kernels start with one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

MAX_GRAPHS = 8  # a run needs two, or four when it thaws its encoder; more means that the memory never stays in place


class Recorder:
    """Records work that comes twice in a row with the same key, and replays it from then on.

    The key must hold all that may differ from one time to the next: the addresses of tensors that are handed in, and numbers.
    Work reads and writes device memory alone; what it changes in Python happens when it is recorded, and not again.
    """

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.last: dict[str, Hashable] = {}  # the key that work of a name came with
        self.num_replays = 0

    def run(self, name: str, key: Hashable, work: Callable[[], object]) -> None:
        graph = self.graphs.get((name, key))
        if graph is None and self.last.get(name) == key and len(self.graphs) < MAX_GRAPHS:
            graph = self.graphs[name, key] = _record(work)
        self.last[name] = key
        if graph is None:
            work()
        else:
            graph.replay()
            self.num_replays += 1

    def clear(self) -> None:
        self.graphs.clear()
        self.last.clear()


def _record(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Recording runs nothing. By hand, because torch.cuda.graph would wait for the device and give cached memory back."""
    graph = torch.cuda.CUDAGraph()
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # Other threads pin memory and ask whether copies have arrived; that does no harm here.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    current.wait_stream(aside)
    return graph
