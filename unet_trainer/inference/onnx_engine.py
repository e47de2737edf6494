"""An exported .onnx file as an engine: onnxruntime computes the logits, from the file alone.

    input    images   N,C,H,W float32, in the files' own units; H and W multiples of 32
    output   logits   N,K,H,W float32, a logit for every class id (with one class: 0 for the background)

Images of other sizes are padded here as the Segmenter pads them, and the padding is cut off again.

The last metadata entry of a file is the SHA-256 digest of every byte before it. A file is checked before onnxruntime sees it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from unet_trainer.config.errors import UserError
from unet_trainer.inference.model_files import ILL_FORMED, ModelCard, reason_of
from unet_trainer.model.segmenter import STRIDE, SegmenterSpec
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import read_bytes
from unet_trainer.training.errors import CheckpointError

CARD_KEY, DIGEST_KEY = "unet_trainer", "sha256"  # of the metadata; the ModelCard is JSON
MAX_FILE_BYTES = 2**31 - 1  # of a protobuf message
INPUT, OUTPUT = "images", "logits"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SILENT = 4  # log level: what onnxruntime would print on standard error is in the exception too


class OnnxEngine:
    """May be called from several threads. Logits are on the host."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        content, metadata = read_onnx(path)
        self.card = _read_card(path, metadata)
        self.device = torch.device("cpu")
        runtime = import_optional("onnxruntime")
        providers = _choose_providers(device, runtime.get_available_providers())
        options = runtime.SessionOptions()
        options.log_severity_level = SILENT
        options.intra_op_num_threads = torch.get_num_threads()  # its own default is the host's cores, not the container's
        options.enable_mem_pattern = False  # plans memory for one size, and images have many
        try:
            # From memory: what was checked is what is run. The name of the file would also be where it looks for others.
            self.session = runtime.InferenceSession(content, options, providers=providers)
        except Exception as error:  # onnxruntime's errors share no base class
            raise CheckpointError(f"{path} is no model that onnxruntime {runtime.__version__} can run ({_reason(error)})") from None
        self.provider: str = self.session.get_providers()[0]
        if device.startswith("cuda") and self.provider != CUDA:
            raise UserError(f"device: {device} cannot be used by onnxruntime (its CUDA libraries do not load); use device: cpu")
        _check_signature(path, self.session, self.card.spec)

    @property
    def description(self) -> str:
        return f"onnxruntime on {'cuda' if self.provider == CUDA else 'cpu'}, float32"

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[1:3]
        pixels = images.permute(0, 3, 1, 2).float()
        pixels = F.pad(pixels, (0, -width % STRIDE, 0, -height % STRIDE), mode="replicate").contiguous()
        try:
            (found,) = self.session.run([OUTPUT], {INPUT: pixels.numpy()})
        except Exception as error:  # see above
            if len(images) > 1 and "alloc" in str(error).lower():  # out of memory
                half = len(images) // 2
                return torch.cat([self.logits(images[:half]), self.logits(images[half:])])
            raise UserError(f"onnxruntime cannot compute {width}×{height} pixels ({_reason(error)})") from None
        if found.shape != (len(images), self.card.spec.num_ids, *pixels.shape[2:]):
            raise UserError(f"the exported model gives an array of shape {found.shape} for images of shape {tuple(pixels.shape)}")
        return torch.from_numpy(found)[:, :, :height, :width]


def read_onnx(path: Path) -> tuple[bytes, dict[str, str]]:
    """Content and metadata of a file whose bytes are as exported, and that needs no other file. Raises CheckpointError."""
    onnx = import_optional("onnx")
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
        model = onnx.load_model_from_string(content)
    except FileNotFoundError:
        raise CheckpointError(f"no model {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except Exception:  # of protobuf, whose implementations share no base class
        raise CheckpointError(f"{path} is no ONNX file, or a damaged one") from None
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if len(metadata) != len(model.metadata_props):
        raise CheckpointError(f"{path} is no model of this trainer: its metadata has two entries of one key")
    if DIGEST_KEY in metadata and content != add_digest(content[: -len(add_digest(b""))]):
        raise CheckpointError(
            f"{path} is damaged, or was changed since it was exported: its bytes do not match its digest "
            f"(if you changed it, delete {DIGEST_KEY} from its metadata)"
        )
    if any(isinstance(part, onnx.TensorProto) and (part.external_data or part.data_location) for part in _messages(model)):
        raise CheckpointError(f"{path} keeps its weights in other files; export it again, into one file")
    return content, metadata


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all that are inside of it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in (value,) if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def add_digest(message: bytes) -> bytes:
    """The message with the digest of its bytes as a last metadata entry, of a length that is always the same."""
    onnx = import_optional("onnx")
    entry = onnx.StringStringEntryProto(key=DIGEST_KEY, value=hashlib.sha256(message).hexdigest())
    return message + onnx.ModelProto(metadata_props=[entry]).SerializeToString()


def import_optional(name: str) -> Any:
    """A package of requirements-export.txt; raises UserError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{error.name or name} is not installed; exported models need: python -m pip install -r requirements-export.txt"
        ) from None


def _read_card(path: Path, metadata: dict[str, str]) -> ModelCard:
    if CARD_KEY not in metadata:
        raise CheckpointError(f"{path} is no model of this trainer: its metadata has no entry {CARD_KEY}")
    try:
        return ModelCard.from_json(metadata[CARD_KEY])
    except ILL_FORMED as error:
        raise CheckpointError(
            f"{path} cannot be used: {CARD_KEY} in its metadata is no card of a model ({reason_of(error)[:200]})"
        ) from None


def _choose_providers(device: str, available: list[str]) -> list[Any]:
    """CUDA if onnxruntime has it and the device allows it, else the CPU."""
    if device == "cpu" or (device == "auto" and CUDA not in available):
        return [CPU]
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit():
        raise UserError(f"device: got {device!r}; an exported model runs on auto, cpu, cuda or cuda:N")
    if CUDA not in available:
        raise UserError(f"device: {device} needs onnxruntime-gpu in place of onnxruntime; use device: cpu or auto")
    return [(CUDA, {"device_id": index or "0"}), CPU]


def _check_signature(path: Path, session: Any, spec: SegmenterSpec) -> None:
    """Raises CheckpointError unless the graph takes and gives what the card says."""
    found = [(value.name, value.type, value.shape[1:2]) for value in (*session.get_inputs(), *session.get_outputs())]
    if found != [(INPUT, "tensor(float)", [spec.image.channels]), (OUTPUT, "tensor(float)", [spec.num_ids])]:
        takes = f"take N,{spec.image.channels},H,W {INPUT} and give N,{spec.num_ids},H,W {OUTPUT}"
        raise CheckpointError(f"{path} cannot be used: its graph does not {takes}")


def _reason(error: Exception) -> str:
    return first_line(error)[:200]
