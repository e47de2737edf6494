"""Export as one .onnx file: weights, normalisation and card inside; any number of images, sides of any multiple of 32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from unet_trainer import __version__
from unet_trainer.inference.export_check import (
    Comparison,
    ExportError,
    ExportNetwork,
    compare,
    dynamic_shapes,
    example_batch,
    exporting,
)
from unet_trainer.inference.model_card import ModelCard
from unet_trainer.inference.onnx_engine import CARD_KEY, INPUT, OUTPUT, OnnxEngine, import_optional
from unet_trainer.inference.onnx_file import MAX_FILE_BYTES, add_digest
from unet_trainer.model.segmenter import STRIDE, Segmenter
from unet_trainer.system.atomic_files import write_atomically

OPSET = 20  # of onnxruntime 1.17 (January 2024) and later
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_onnx(segmenter: Segmenter, card: ModelCard, path: Path) -> Comparison:
    """Writes the file and returns how it compares. Raises ExportError; the file that was there is then as it was."""
    for package in PACKAGES:
        import_optional(package)
    message = _message(segmenter, card)
    comparison: Comparison | None = None

    def verify(draft: Path) -> None:
        nonlocal comparison
        comparison = compare(segmenter, card, OnnxEngine(draft, device="cpu").logits, pads=True)

    write_atomically(path, lambda file: file.write(message), verify)
    assert comparison is not None
    return comparison


def _message(segmenter: Segmenter, card: ModelCard) -> bytes:
    """The content of the file."""
    with exporting():
        program = torch.onnx.export(
            ExportNetwork(segmenter).eval(),
            (example_batch(card),),
            dynamo=True,
            external_data=False,
            dynamic_shapes=dynamic_shapes(),
            input_names=[INPUT],
            output_names=[OUTPUT],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _remove_traces(model.graph)
    model.producer_name, model.producer_version = "unet_trainer", __version__
    del model.metadata_props[:]
    for key, value in metadata(card).items():
        model.metadata_props.add(key=key, value=value)
    if model.ByteSize() > MAX_FILE_BYTES - 1024:
        raise ExportError(f"the model has {model.ByteSize() / 1e9:.1f} GB; an ONNX file in one piece holds 2 at most")
    return add_digest(model.SerializeToString())


def _remove_traces(graph: Any) -> None:
    """The exporter notes source lines, with the paths of this machine, at every node and value."""
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def metadata(card: ModelCard) -> dict[str, str]:
    """The card for this program, and its main points for people and other programs. Lists are JSON."""
    spec, image = card.spec, card.spec.image
    return {
        CARD_KEY: card.to_json(),
        "input": f"{INPUT}: N,{image.channels},H,W float32 in the files' own units ({_units(card)}), not normalised; "
        f"H and W multiples of {STRIDE}",
        "output": f"{OUTPUT}: N,{spec.num_ids},H,W float32; over axis 1, argmax gives the class of a pixel, softmax probabilities",
        "classes": json.dumps(spec.id_names, ensure_ascii=False),
        "class_colours": json.dumps(spec.id_colours),
        "mask_values": json.dumps(spec.coding.mask_values),
        "image_channels": str(image.channels),
        "image_depth": image.depth,
        "image_mean": json.dumps(image.mean),
        "image_std": json.dumps(image.std),
        "trained_size": json.dumps(spec.image_size),
        "fit": spec.fit,
        "size_advice": (
            "resize each image to trained_size (height, width), and the logits back"
            if spec.fit == "resize"
            else "give images at their own resolution, padded to multiples of 32 at the lower and right edge by repeating it"
        ),
    }


def _units(card: ModelCard) -> str:
    image = card.spec.image
    return "0 to 255" if image.is_8bit else f"{image.depth}, about {image.low:g} to {image.high:g}"
