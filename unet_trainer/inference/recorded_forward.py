"""The forward pass of a network as CUDA graphs, one for each shape of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from unet_trainer.training.async_device import record_graph

NUM_EAGER = 1  # calls of a shape before it is recorded: they load its kernels and let cuDNN choose among them
MAX_SHAPES = 4  # each keeps the memory of its forward pass
Recording = tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]  # with the images and the logits of its replays


class RecordedForward:
    """Calls `forward`, and replays it as a CUDA graph where a shape comes again. Logits are valid until the next call.

    A network is some hundred calls. Between two of them its thread waits for the GIL, which threads that read and write
    hold most of the time beside a fast GPU: 600 to 800 images/s instead of 2,000. A replay is one call.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.forward = forward
        self.num_calls: Counter[tuple[torch.Size, torch.dtype]] = Counter()
        self.recordings: dict[tuple[torch.Size, torch.dtype], Recording | None] = {}  # None: cannot be recorded

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images on the device → N,K,H,W logits."""
        key = images.shape, images.dtype
        if key not in self.recordings and self.num_calls[key] >= NUM_EAGER and len(self.recordings) < MAX_SHAPES:
            self.recordings[key] = self._record(images)
        self.num_calls[key] += 1
        recording = self.recordings.get(key)
        if recording is None:
            return self.forward(images)
        graph, static, logits = recording
        static.copy_(images)
        graph.replay()
        return logits

    def _record(self, images: torch.Tensor) -> Recording | None:
        static, logits = torch.empty_like(images), list[torch.Tensor]()
        try:
            graph = record_graph(lambda: logits.append(self.forward(static)), torch.cuda.graph_pool_handle())
        except RuntimeError:  # memory is short, or a layer waits for the device: it works without
            torch.cuda.synchronize(images.device)
            torch.cuda.empty_cache()
            return None
        return graph, static, logits[0]
