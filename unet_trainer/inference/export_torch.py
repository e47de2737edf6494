"""Exports for programs that have torch but not this package: a program of torch.export (.pt2), or TorchScript.

Input and output are those of the .onnx file. The card lies in the file as `card.json`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import torch

from unet_trainer.inference.export_check import (
    Comparison,
    ExportError,
    ExportNetwork,
    compare,
    dynamic_shapes,
    example_batch,
    exporting,
    quiet,
)
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.model.segmenter import STRIDE, Segmenter
from unet_trainer.system.atomic_files import write_atomically

CARD_FILE = "card.json"
LEAST_PROGRAM_SIDE = 2 * STRIDE  # torch.export takes a size of 1 for a constant, and the deepest stage of 32 pixels has it


def export_pt2(segmenter: Segmenter, card: ModelCard, path: Path) -> Comparison:
    """Writes the file and returns how it compares. Raises ExportError; the file that was there is then as it was."""
    content = io.BytesIO()
    with exporting():
        program = torch.export.export(ExportNetwork(segmenter).eval(), (example_batch(card),), dynamic_shapes=dynamic_shapes())
        torch.export.save(program, content, extra_files={CARD_FILE: card.to_json()})
    return _write(segmenter, card, path, content.getvalue(), _load_pt2, LEAST_PROGRAM_SIDE)


def _load_pt2(content: io.BytesIO, extra_files: dict[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.export.load(content, extra_files=extra_files).module()


def export_torchscript(segmenter: Segmenter, card: ModelCard, path: Path) -> Comparison:
    """As export_pt2. torch calls TorchScript deprecated; a trace costs nothing, and C++ programs still load it."""
    content = io.BytesIO()
    with exporting(), torch.no_grad():
        traced = torch.jit.trace(ExportNetwork(segmenter).eval(), example_batch(card), check_trace=False)
        torch.jit.save(traced, content, _extra_files={CARD_FILE: card.to_json()})
    return _write(segmenter, card, path, content.getvalue(), _load_torchscript, STRIDE)


def _load_torchscript(content: io.BytesIO, extra_files: dict[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.load(content, map_location="cpu", _extra_files=extra_files)


def _write(
    segmenter: Segmenter,
    card: ModelCard,
    path: Path,
    content: bytes,
    load: Callable[[io.BytesIO, dict[str, str]], Callable[[torch.Tensor], torch.Tensor]],
    least_side: int,
) -> Comparison:
    comparison: Comparison | None = None

    @torch.inference_mode()
    def verify(draft: Path) -> None:
        nonlocal comparison
        extra_files = {CARD_FILE: ""}
        with quiet():
            network = load(io.BytesIO(draft.read_bytes()), extra_files)
            if ModelCard.from_json(extra_files[CARD_FILE]) != card:
                raise ExportError(f"{CARD_FILE} was not read back as it was written")

            def run(images: torch.Tensor) -> torch.Tensor:
                return network(images.permute(0, 3, 1, 2).float().contiguous())

            comparison = compare(segmenter, card, run, least_side)

    write_atomically(path, lambda file: file.write(content), verify)
    assert comparison is not None
    return comparison
