"""What computes logits: a network of torch here, an exported file elsewhere. Everything after the logits is shared."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from unet_trainer.config.choices import NumberFormat
from unet_trainer.config.errors import UserError
from unet_trainer.images.image_files import Pixels
from unet_trainer.inference.model_files import ONNX_SUFFIX, ModelCard, Symmetry, read_model
from unet_trainer.loading.worker_pool import to_device
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
    # from_numpy warns of arrays that cannot be written to, as PIL's, and takes none that runs backwards: bgr[..., ::-1].
    suited = [image if image.flags.writeable and min(image.strides) >= 0 else image.copy() for image in images]
    return torch.stack([torch.from_numpy(image) for image in suited], out=batch)  # one call: np.stack takes the GIL again and again


def build_segmenter(path: Path, raw: bool = False) -> tuple[ModelCard, Segmenter]:
    """The model of a checkpoint on the CPU, for use: a plain network, without what serves training or speed alone."""
    card, weights = read_model(path, raw)
    spec = card.spec
    try:
        segmenter = Segmenter(spec, build_network(spec, encoder_weights=None), channels_last=True)
        load_network_weights(segmenter, weights)
    except (RuntimeError, UserError) as error:
        heading, *others = str(error).splitlines()
        reason = (others[0].strip() if others and heading.endswith(":") else first_line(error))[:200]
        raise CheckpointError(
            f"{path}: the weights do not fit {spec.architecture} with {spec.encoder} as it is built here ({reason}); they may come "
            "from other versions of timm or segmentation-models-pytorch"
        ) from None
    return card, segmenter.eval().requires_grad_(False)


class TorchEngine:
    """A checkpoint on a device of torch. May be called from several threads."""

    def __init__(
        self, path: Path, device: str = "auto", precision: Literal["auto"] | NumberFormat = "auto", raw: bool = False
    ) -> None:
        self.card, segmenter = build_segmenter(path, raw)
        self.device = choose_device(device)
        # float16 may overflow in a model that was not trained in it.
        has_bfloat16 = self.device.type == "cuda" and inspect_hardware(self.device).has_bfloat16
        number_format: NumberFormat = ("bfloat16" if has_bfloat16 else "float32") if precision == "auto" else precision
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
        if isinstance(self.engine, TorchEngine):
            (images,) = to_device((images,), self.device)  # once, and turned there
        return functools.reduce(torch.add, (self._logits_of_view(images, *view) for view in self.views)) / len(self.views)

    def _logits_of_view(self, images: torch.Tensor, is_flipped: bool, num_turns: int) -> torch.Tensor:
        """Turned back."""
        view = torch.rot90(images.flip(2) if is_flipped else images, num_turns, (1, 2)).contiguous()
        logits = torch.rot90(self.engine.logits(view), -num_turns, (2, 3))
        return logits.flip(3) if is_flipped else logits


def all_views(symmetries: Sequence[Symmetry]) -> list[tuple[bool, int]]:
    """(mirrored left to right, quarter turns) of every image that the symmetries generate; the original first. A vertical flip is
    a horizontal flip and half a turn."""
    is_flipped = "horizontal_flip" in symmetries or "vertical_flip" in symmetries
    turns: tuple[int, ...] = (0, 2) if {"horizontal_flip", "vertical_flip"} <= set(symmetries) else (0,)
    turns = (0, 1, 2, 3) if "quarter_turn" in symmetries else turns
    first = 0 if "horizontal_flip" in symmetries else 2
    return [(False, turn) for turn in turns] + [(True, (first + turn) % 4) for turn in turns if is_flipped]


def with_symmetries(engine: Engine, note: Callable[[str], object]) -> Engine:
    """For --tta."""
    symmetries = engine.card.symmetries
    if not symmetries:
        note("--tta changes nothing: the model was trained without mirrored or turned images")
        return engine
    note(f"--tta: mean over the images that {', '.join(symmetries)} of training make")
    return SymmetricEngine(engine, symmetries)


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
        self.num_seen: Counter[tuple[int, ...]] = Counter()
        self.graphs: dict[tuple[int, ...], _Graph | None] = {}  # by shape; None: it could not be captured

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C on any device → N,K,H,W float32."""
        shape = tuple(images.shape)
        self.num_seen[shape] += 1
        if self.num_seen[shape] >= NUM_BEFORE_CAPTURE:
            self.prepare(shape, images.dtype)
        graph = self.graphs.get(shape)
        return self.engine.logits(images) if graph is None else graph.replay(images)

    def prepare(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Captures the graph of a shape, if there is none and memory allows it."""
        is_gpu = isinstance(self.engine, TorchEngine) and self.engine.device.type == "cuda"
        if not is_gpu or shape in self.graphs or len(self.graphs) == MAX_GRAPHS:
            return
        assert isinstance(self.engine, TorchEngine)
        try:
            self.graphs[shape] = _Graph(self.engine, shape, dtype)
        except RuntimeError:  # memory, or a layer that waits for the device: the engine works without
            self.graphs[shape] = None
            torch.cuda.synchronize(self.engine.device)
            torch.cuda.empty_cache()


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
