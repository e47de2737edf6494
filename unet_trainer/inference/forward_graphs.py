"""Replays the forward pass of batches of one shape as a CUDA graph.

A network is some hundred calls. Between two of them its thread would wait for Python's lock, which readers and writers hold most of
the time on a machine with a fast GPU; a graph is a single call.
"""

from __future__ import annotations

import torch

from unet_trainer.inference.engine import Engine, TorchEngine

NUM_BEFORE_CAPTURE = 3  # batches of one shape after which more of them are expected
NUM_WARM_UP = 2  # calls before the capture: kernels are loaded and workspaces allocated
MAX_GRAPHS = 2  # each keeps the memory of its activations


class ForwardGraphs:
    """Computes logits as the engine does. They are valid until the next call: a graph writes them to the same memory each time.

    Engines that do not compute on a CUDA device are called as they are.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_seen: dict[tuple[int, ...], int] = {}
        self.graphs: dict[tuple[int, ...], _Graph | None] = {}  # None: it could not be captured

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C on the host → N,K,H,W float32."""
        shape = tuple(images.shape)
        self.num_seen[shape] = self.num_seen.get(shape, 0) + 1
        if self.num_seen[shape] >= NUM_BEFORE_CAPTURE:
            self.prepare(shape, images.dtype)
        graph = self.graphs.get(shape)
        return self.engine.logits(images) if graph is None else graph.replay(images)

    def prepare(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Captures the graph of a shape, if there is none and memory allows it."""
        if shape in self.graphs or len(self.graphs) == MAX_GRAPHS:
            return
        if isinstance(self.engine, TorchEngine) and self.engine.device.type == "cuda":
            self.graphs[shape] = _capture(self.engine, shape, dtype)


class _Graph:
    def __init__(self, engine: TorchEngine, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.images = torch.zeros(shape, dtype=dtype, device=engine.device)
        side_stream = torch.cuda.Stream(engine.device)  # a capture must not begin on the default stream
        side_stream.wait_stream(torch.cuda.current_stream(engine.device))
        with torch.cuda.stream(side_stream):
            for _ in range(NUM_WARM_UP):
                engine.forward(self.images)
        torch.cuda.current_stream(engine.device).wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads allocate page-locked memory meanwhile, which a capture in the default mode forbids.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = engine.forward(self.images)

    def replay(self, images: torch.Tensor) -> torch.Tensor:
        self.images.copy_(images, non_blocking=True)
        self.graph.replay()
        return self.logits


def _capture(engine: TorchEngine, shape: tuple[int, ...], dtype: torch.dtype) -> _Graph | None:
    try:
        return _Graph(engine, shape, dtype)
    except RuntimeError:  # memory, or a layer that waits for the device: the engine works without
        torch.cuda.synchronize(engine.device)
        torch.cuda.empty_cache()
        return None
