"""What computes logits: a network of torch here, an exported file elsewhere. Everything after the logits is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from unet_trainer.config.choices import NumberFormat
from unet_trainer.config.errors import UserError
from unet_trainer.images.image_files import Pixels
from unet_trainer.inference.model_files import ONNX_SUFFIX, ModelCard, Symmetry, read_model
from unet_trainer.loading.transfer import to_device
from unet_trainer.model.network import build_network
from unet_trainer.model.precision import DTYPES, Numerics, choose_device, inspect_hardware
from unet_trainer.model.segmenter import Segmenter, load_network_weights
from unet_trainer.system.console import first_line
from unet_trainer.training.errors import CheckpointError

NUM_BEFORE_CAPTURE = 3  # batches of one shape after which more of them are expected
NUM_WARM_UP = 2  # calls before the capture: kernels are loaded and workspaces allocated
MAX_GRAPHS = 2  # each keeps the memory of its activations


class Engine(Protocol):
    """A model that is ready to run."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def device(self) -> torch.device:
        """Where the logits are."""

    @property
    def description(self) -> str:
        """Device and number format, for the user."""

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images on the host, as ImageSpec.to_batch gives them → N,K,H,W float32 on `device`. Any height and width."""


def host_batch(images: Sequence[Pixels], device: torch.device) -> torch.Tensor:
    """H,W,C each → N,H,W,C on the host; in page-locked memory for a GPU, so that copying it there does not wait."""
    first = images[0]
    dtype = torch.uint8 if first.dtype == np.uint8 else torch.float32
    batch = torch.empty((len(images), *first.shape), dtype=dtype, pin_memory=device.type == "cuda")
    # One call, unlike np.stack, which takes the GIL again after each image.
    return torch.stack([torch.from_numpy(image if _suits_torch(image) else image.copy()) for image in images], out=batch)


def _suits_torch(image: Pixels) -> bool:
    """from_numpy warns of arrays that cannot be written to, as PIL's, and takes none that runs backwards: bgr[..., ::-1]."""
    return image.flags.writeable and min(image.strides) >= 0


def build_segmenter(path: Path, raw: bool = False) -> tuple[ModelCard, Segmenter]:
    """The model of a checkpoint on the CPU, for use: a plain network, without what serves training or speed alone."""
    card, weights = read_model(path, raw)
    spec = card.spec
    try:
        segmenter = Segmenter(spec, build_network(spec, encoder_weights=None), channels_last=True)
        load_network_weights(segmenter, weights)
    except (RuntimeError, UserError) as error:
        raise CheckpointError(
            f"{path}: the weights do not fit {spec.architecture} with {spec.encoder} as it is built here "
            f"({_first_difference(error)}); they may come from other versions of timm or segmentation-models-pytorch"
        ) from None
    return card, segmenter.eval().requires_grad_(False)


def _first_difference(error: Exception) -> str:
    """Of a state_dict that does not fit: the line after the heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[1] if len(lines) > 1 and lines[0].endswith(":") else first_line(error))[:200]


class TorchEngine:
    """A checkpoint on a device of torch. May be called from several threads."""

    def __init__(
        self, path: Path, device: str = "auto", precision: Literal["auto"] | NumberFormat = "auto", raw: bool = False
    ) -> None:
        self.card, segmenter = build_segmenter(path, raw)
        self.device = choose_device(device)
        number_format = _choose_number_format(self.device) if precision == "auto" else precision
        self.numerics = Numerics(self.device, number_format, channels_last=True)
        self.segmenter = segmenter.to(self.device).to(memory_format=segmenter.memory_format)

    @property
    def description(self) -> str:
        return f"{self.device}, {self.numerics.number_format}"

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        try:
            (on_device,) = to_device((images,), self.device)
            return self.forward(on_device)
        except torch.OutOfMemoryError:
            if len(images) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(images) // 2
        return torch.cat([self.logits(images[:half]), self.logits(images[half:])])

    @torch.inference_mode()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """As `logits`, of images on the device."""
        with self.numerics.autocast():
            return self.segmenter(images)


def _choose_number_format(device: torch.device) -> NumberFormat:
    """bfloat16 where the GPU computes it, float32 elsewhere: float16 may overflow in a model that was not trained in it."""
    return "bfloat16" if device.type == "cuda" and inspect_hardware(device).has_bfloat16 else "float32"


class SymmetricEngine:
    """Averages the logits of an engine over mirrored and turned images."""

    def __init__(self, engine: Engine, symmetries: tuple[Symmetry, ...]) -> None:
        self.engine = engine
        self.card, self.device = engine.card, engine.device
        self.views = all_views(symmetries)

    @property
    def description(self) -> str:
        return f"{self.engine.description}, mean of {len(self.views)} views"

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        if isinstance(self.engine, TorchEngine):
            (images,) = to_device((images,), self.device)  # once, and turned there
        for is_flipped, num_turns in self.views:
            view = images.flip(2) if is_flipped else images
            view = torch.rot90(view, num_turns, (1, 2)).contiguous()
            logits = torch.rot90(self.engine.logits(view), -num_turns, (2, 3))
            logits = logits.flip(3) if is_flipped else logits
            total = logits.clone() if total is None else total.add_(logits)
        assert total is not None
        return total / len(self.views)


def all_views(symmetries: tuple[Symmetry, ...]) -> list[tuple[bool, int]]:
    """(mirrored left to right, quarter turns) of every image that the symmetries generate; the original first.

    A vertical flip is a horizontal flip and half a turn.
    """
    generators = {"horizontal_flip": (True, 0), "vertical_flip": (True, 2), "quarter_turn": (False, 1)}
    found = [(False, 0)]
    for view in found:  # grows while it is walked
        for symmetry in symmetries:
            is_flipped, num_turns = generators[symmetry]
            # view, then the generator: a flip turns earlier rotations the other way round.
            turned = (-view[1] if is_flipped else view[1]) + num_turns
            following = (view[0] != is_flipped, turned % 4)
            if following not in found:
                found.append(following)
    return found


def load_engine(path: Path, device: str = "auto", precision: Literal["auto"] | NumberFormat = "auto", raw: bool = False) -> Engine:
    """Of a file that find_model found."""
    if path.suffix == ONNX_SUFFIX:
        if raw:
            raise UserError(f"raw: {path} holds the weights that it was exported with; name the run, or export it with --raw")
        if precision not in ("auto", "float32"):
            raise UserError(f"precision: got {precision!r}; {path} computes in float32")
        from unet_trainer.inference.onnx_engine import OnnxEngine

        return OnnxEngine(path, device)
    if precision not in ("auto", *DTYPES):
        raise UserError(f"precision: got {precision!r}; need auto, {', '.join(DTYPES)}")
    return TorchEngine(path, device, precision, raw)


class ForwardGraphs:
    """Computes logits as the engine does. They are valid until the next call: a graph writes them to the same memory each time.

    A network is some hundred calls. Between two of them its thread would wait for the GIL, which readers and writers hold most of
    the time beside a fast GPU; replaying a CUDA graph is a single call. Other engines are called as they are.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_seen: dict[tuple[int, ...], int] = {}
        self.graphs: dict[tuple[int, ...], _Graph | None] = {}  # None: it could not be captured

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C on any device → N,K,H,W float32."""
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
