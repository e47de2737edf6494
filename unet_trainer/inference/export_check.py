"""What every export shares: the network that is exported, and the proof that the exported file computes the same.

    images in the files' own units, N,C,H,W float32, H and W multiples of 32  →  ExportNetwork  →  logits of every class id

Padding is left outside: inside, it breaks programs with variable sizes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.export import Dim

from unet_trainer.config.errors import UserError
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.model.segmenter import STRIDE, Segmenter, class_logits
from unet_trainer.system.console import counted, first_line

TOLERANCE = 1e-3  # largest difference of two logits, where the largest logit is 1 or less; in proportion above
MAX_SIDE = 256  # of the images that are compared, if the model was trained on larger ones: a matter of seconds

Run = Callable[[torch.Tensor], torch.Tensor]  # N,H,W,C images → N,K,H,W logits


class ExportError(UserError):
    """A model that cannot be exported, or not faithfully."""


class ExportNetwork(torch.nn.Module):
    """Normalises and runs a Segmenter's network."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, segmenter: Segmenter) -> None:
        super().__init__()
        self.network = segmenter.network
        self.register_buffer("mean", segmenter.mean.clone())
        self.register_buffer("scale", segmenter.scale.clone())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """N,C,H,W float32 → N,K,H,W float32."""
        return class_logits(self.network((images - self.mean) * self.scale))


def example_batch(card: ModelCard) -> torch.Tensor:
    """N,C,H,W of the size that the model knows. Two images, and sides that differ: a tracer takes one, or equal ones, for fixed."""
    height, width = _trained_size(card)
    return comparison_images(card, 2, height, width + STRIDE).permute(0, 3, 1, 2).float().contiguous()


def dynamic_shapes() -> dict[str, Any]:
    """Any number of images; height and width any multiple of STRIDE."""
    return {"images": {0: Dim("batch"), 2: STRIDE * Dim("rows"), 3: STRIDE * Dim("columns")}}


def _trained_size(card: ModelCard) -> tuple[int, int]:
    """Rounded to multiples of STRIDE."""
    height, width = (min(MAX_SIDE, max(2 * STRIDE, -(-side // STRIDE) * STRIDE)) for side in card.spec.image_size)
    return height, width


def comparison_images(card: ModelCard, count: int, height: int, width: int) -> torch.Tensor:
    """N,H,W,C with coarse shapes and fine noise, spread as the model's training images, in the files' own units."""
    image = card.spec.image
    generator = torch.Generator().manual_seed(height * 10_000 + width * 10 + count)
    coarse = torch.randn(count, image.channels, max(1, height // 16), max(1, width // 16), generator=generator)
    noise = torch.randn(count, image.channels, height, width, generator=generator)
    mixed = F.interpolate(coarse, (height, width), mode="bilinear").add(noise, alpha=0.5).permute(0, 2, 3, 1)
    pixels = mixed * torch.tensor(image.std) + torch.tensor(image.mean)
    return pixels.round().clamp(0, 255).to(torch.uint8) if image.is_8bit else pixels.contiguous()


@dataclass(frozen=True)
class Comparison:
    """Exported file against torch, on all batches together."""

    batches: list[tuple[int, int, int]]  # images, height and width of each
    difference: float  # the largest of any logit
    largest_logit: float
    num_pixels: int
    num_changed: int  # pixels whose class is another one

    def __str__(self) -> str:
        counts = [count for count, _, _ in self.batches]
        sizes = sorted({(height * width, f"{width}×{height}") for _, height, width in self.batches})
        changed = f"{self.num_changed} of {self.num_pixels} pixels change class" if self.num_changed else "no pixel changes class"
        return (
            f"{len(self.batches)} batches of {min(counts)} to {max(counts)} images, {sizes[0][1]} to {sizes[-1][1]}: "
            f"logits reach {self.largest_logit:.1f} and differ by {self.difference:.1e} at most; {changed}"
        )


def compare(segmenter: Segmenter, card: ModelCard, run: Run, least_side: int = STRIDE, pads: bool = False) -> Comparison:
    """Runs several batches of several sizes through both. `pads`: sizes that are no multiples of STRIDE too.

    Raises ExportError where they differ by more than TOLERANCE. Sizes that the network itself cannot take are left out.
    """
    height, width = _trained_size(card)
    batches = [(1, height, width), (2, height, width + STRIDE), (3, 3 * STRIDE, 5 * STRIDE), (1, least_side, least_side)]
    batches += [(2, 45, 83), (1, height - 1, width + 7)] if pads else [(1, height + STRIDE, 2 * STRIDE)]
    compared, difference, largest, num_pixels, num_changed = [], 0.0, 0.0, 0, 0
    for count, rows, columns in batches:
        images = comparison_images(card, count, rows, columns)
        expected = _run_or_none(segmenter, images)
        if expected is None:
            continue
        where = f"{counted(count, 'image')} of {columns}×{rows}"
        try:
            found = run(images)
        except Exception as error:  # of whichever library runs the file
            raise ExportError(f"the exported file fails for {where}: {first_line(error)[:300]}") from None
        if found.shape != expected.shape:
            raise ExportError(f"the exported file gives {tuple(found.shape)} for {where}; need {tuple(expected.shape)}")
        its_largest = expected.abs().max().item()
        its_difference = (found - expected).abs().max().item()
        if not its_difference <= TOLERANCE * max(1.0, its_largest):  # NaN is no small difference
            raise ExportError(
                f"the exported file computes other logits for {where}: they differ by {its_difference:.2g} "
                f"(they reach {its_largest:.3g}; {TOLERANCE:g} of that is allowed)"
            )
        compared.append((count, rows, columns))
        difference, largest = max(difference, its_difference), max(largest, its_largest)
        num_pixels += count * rows * columns
        num_changed += int((found.argmax(1) != expected.argmax(1)).sum())
    if len(compared) < 2:
        raise ExportError("the network can compute too few of the sizes that an export is compared on")
    return Comparison(compared, difference, largest, num_pixels, num_changed)


@torch.inference_mode()
def _run_or_none(segmenter: Segmenter, images: torch.Tensor) -> torch.Tensor | None:
    try:
        return segmenter(images)
    except (RuntimeError, ValueError, AssertionError):  # too small for its deepest stage, or for a fixed size
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn about themselves and log what they raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def exporting() -> Iterator[None]:
    """Around an exporter: quiet, and what it raises becomes an ExportError."""
    with quiet():
        try:
            yield
        except Exception as error:  # the exporters' errors share no base class
            cause = error.__cause__ or error  # the outer one of torch.onnx is a page of advice
            raise ExportError(f"the network cannot be traced ({first_line(cause)[:200]})") from None
