"""What computes logits: a network of torch here, an exported file elsewhere. Everything after the logits is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.training_choices import NumberFormat
from unet_trainer.images.image_files import Pixels
from unet_trainer.inference.model_card import ModelCard, Symmetry
from unet_trainer.inference.model_files import read_model
from unet_trainer.loading.transfer import to_device
from unet_trainer.model.network import build_network
from unet_trainer.model.precision import Numerics, choose_device, inspect_hardware
from unet_trainer.model.segmenter import Segmenter, load_network_weights
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.system.console import first_line


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
