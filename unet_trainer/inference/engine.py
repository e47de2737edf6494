"""A trained model: its file, found from what a user names and read without running anything in it, and what computes
logits: a network of torch here, an exported .onnx file by onnxruntime. Everything after the logits is shared.

The card is what is known of a model besides its weights. Exported files carry it as JSON; from a checkpoint it is read.

    .onnx    input    images   N,C,H,W float32, in the files' own units; any H and W
             output   logits   N,K,H,W float32, a logit for every class id (with one class: 0 for the background)

The last metadata entry of an .onnx file is the SHA-256 digest of every byte before it. A file is checked before
onnxruntime sees it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from unet_trainer import __version__
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.facts import NumberFormat
from unet_trainer.config.load import missing_onnx
from unet_trainer.config.schema import OWN
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.inference.recorded_forward import RecordedForward
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.custom import CustomModel, build_custom_network
from unet_trainer.model.fast_layers import use_fast_layers
from unet_trainer.model.network import build_network
from unet_trainer.model.precision import DTYPES, Numerics, choose_device, inspect_hardware
from unet_trainer.model.random_state import unchanged
from unet_trainer.model.segmenter import Segmenter, SegmenterSpec
from unet_trainer.runs.folder import BEST, LAST, SMP_CARD, find_run, has_checkpoint, newest_run
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import read_bytes
from unet_trainer.training.checkpoint import ILL_FORMED, model_weights, read_checkpoint

Symmetry = Literal["horizontal_flip", "vertical_flip", "quarter_turn"]
SYMMETRIES: tuple[Symmetry, ...] = get_args(Symmetry)
Precision = Literal["auto"] | NumberFormat
Custom = CustomModel | None  # the network of a run that has its own

ONNX_SUFFIX, PT2_SUFFIX = ".onnx", ".pt2"
FOR_OTHERS = f"is an export for other programs; name its run, or export that as {ONNX_SUFFIX}"
CARD_FORMAT = 1
# Transforms of albumentations → the symmetries that a model trained with them has seen. `default` and `strong` are
# stored by name only where images have no up.
TRANSFORM_SYMMETRIES: Mapping[str, tuple[Symmetry, ...]] = {
    "HorizontalFlip": ("horizontal_flip",),
    "VerticalFlip": ("vertical_flip",),
    "RandomRotate90": ("quarter_turn",),
    "D4": SYMMETRIES,
    "SquareSymmetry": SYMMETRIES,
    "default": ("horizontal_flip", "vertical_flip"),
    "strong": ("horizontal_flip", "vertical_flip"),
}
CARD_KEY, DIGEST_KEY = "unet_trainer", "sha256"  # of the metadata; the ModelCard is JSON
MAX_FILE_BYTES = 2**31 - 1  # of a protobuf message
INPUT, OUTPUT = "images", "logits"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SILENT = 4  # log level: what onnxruntime would print on standard error is in the exception too


# The file of a model.


def reason_of(error: Exception) -> str:
    """What one of ILL_FORMED says: a ValueError has a sentence."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ModelCard:
    spec: SegmenterSpec
    symmetries: tuple[Symmetry, ...]  # of training's augmentation
    run_name: str
    epoch: int | None  # that the weights are of
    val_iou: float | None  # of that epoch
    version: str = __version__  # of the trainer that wrote it

    def __post_init__(self) -> None:
        """Raises ValueError for values that no run can have: a card may come from anywhere."""
        is_score = self.val_iou is None or (type(self.val_iou) in (int, float) and math.isfinite(self.val_iou))
        is_epoch = self.epoch is None or type(self.epoch) is int
        if not (is_score and is_epoch and set(self.symmetries) <= set(SYMMETRIES)):
            raise ValueError("its symmetries, epoch or val_iou cannot be right")

    def describe(self) -> str:
        """ ", epoch 3, val IoU 0.5000", as far as it is known."""
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return epoch + ("" if self.val_iou is None else f", val IoU {self.val_iou:.4f}")

    def to_json(self) -> str:
        content = {"format": CARD_FORMAT, **vars(self), "spec": self.spec.to_dict()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ModelCard:
        """Raises one of ILL_FORMED for text that is no card."""
        content = json.loads(text)
        if content["format"] != CARD_FORMAT:
            raise ValueError(f"written by another version (format {content['format']})")
        own = {"spec": SegmenterSpec.from_dict(content["spec"]), "symmetries": tuple(content["symmetries"])}
        return ModelCard(**{field.name: content[field.name] for field in fields(ModelCard)} | own)


def symmetries_of(augmentation: Any) -> tuple[Symmetry, ...]:
    """Those that training with this augmentation, a name or a list of transforms as in the config, taught."""
    entries = augmentation if isinstance(augmentation, list | tuple) else [augmentation]
    names = [next(iter(entry), "") if isinstance(entry, Mapping) else entry for entry in entries]
    taught = {symmetry for name in names for symmetry in TRANSFORM_SYMMETRIES.get(str(name), ())}
    return tuple(symmetry for symmetry in SYMMETRIES if symmetry in taught)


def find_model(where: str | Path | None, checkpoint_dir: Path = Path("checkpoints"), raw: bool = False) -> Path:
    """What RUN|FILE means: a .pt or .onnx file, or the folder or name of a run, by default the newest. Of a run best.pt
    is taken, with `raw` last.pt: where ema_decay is set, best.pt holds averaged weights alone."""
    candidates = [newest_run(checkpoint_dir)] if where is None else [Path(where), checkpoint_dir / where]
    wanted = LAST if raw else BEST
    for path in candidates:
        if path.suffix == PT2_SUFFIX or (path / SMP_CARD).is_file():
            raise CheckpointError(f"{path} {FOR_OTHERS}")
        if path.is_file() or (path / wanted).is_file():
            return path if path.is_file() else path / wanted
    if (folder := next(filter(has_checkpoint, candidates), None)) is not None:
        raise CheckpointError(f"{folder} has no {wanted}; name {folder / LAST} to use the last state")
    if (folder := next(filter(Path.is_dir, candidates), None)) is not None:
        raise CheckpointError(f"{folder} is not a run folder (no {BEST}); name one, or a .pt or {ONNX_SUFFIX} file")
    return find_run(str(where), checkpoint_dir)  # raises, with the names of the runs that there are


def read_model(path: Path, raw: bool = False) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    """Card and weights of a checkpoint, averaged where there are such, unless `raw`. Raises CheckpointError."""
    content = read_checkpoint(path)
    try:
        weights = model_weights(path, content, raw)
        val_iou = (content.get("metrics") or (content.get("history") or [{}])[-1]).get("val_iou")
        card = ModelCard(
            spec=SegmenterSpec.from_dict(content["spec"]),
            symmetries=symmetries_of(content["config"].get("augmentation")),
            run_name=path.absolute().parent.name or path.stem,
            epoch=content.get("epoch"),
            val_iou=val_iou if val_iou is not None and math.isfinite(val_iou) else None,
            version=content.get("version", "unknown"),
        )
    except CheckpointError:
        raise
    except ILL_FORMED as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be used ({reason_of(error)})") from None
    return card, weights


# Engines.


def host_batch(images: Sequence[Pixels], device: torch.device) -> torch.Tensor:
    """H,W,C each → N,H,W,C on the host; in page-locked memory for a GPU, so that copying it there does not wait."""
    first = images[0]
    dtype = torch.uint8 if first.dtype == np.uint8 else torch.float32
    batch = torch.empty((len(images), *first.shape), dtype=dtype, pin_memory=device.type == "cuda")
    # from_numpy warns of arrays that are read-only, as PIL's, and takes none that runs backwards: bgr[..., ::-1].
    suited = [image if image.flags.writeable and min(image.strides) >= 0 else image.copy() for image in images]
    # one call: np.stack takes the GIL again and again
    return torch.stack([torch.from_numpy(image) for image in suited], out=batch)


def build_segmenter(path: Path, raw: bool = False, model: Custom = None) -> tuple[ModelCard, Segmenter]:
    """The model of a checkpoint on the CPU: a plain network, without what serves training or speed alone."""
    card, weights = read_model(path, raw)
    spec = card.spec
    with unchanged():
        custom = build_custom_network(model, spec) if spec.architecture == OWN else None
        try:
            network = build_network(spec, encoder_weights=None) if custom is None else custom
            segmenter = Segmenter(spec, network, channels_last=True)
            segmenter.network.load_state_dict(weights)
        except (RuntimeError, UserError) as error:
            reason = " ".join(str(error).split())[:200]
            if custom is not None:
                raise UserError(f"model: the weights of {path} do not fit it ({reason})") from None
            what = f"the weights do not fit {spec.architecture} with {spec.encoder} as it is built here ({reason})"
            cause = "they may come from other versions of timm or segmentation-models-pytorch"
            raise CheckpointError(f"{path}: {what}; {cause}") from None
    return card, segmenter.eval().requires_grad_(False)


class TorchEngine:
    """A checkpoint on a device of torch. May be called from several threads. Logits are on `device`."""

    def __init__(
        self, path: Path, device: str = "auto", precision: Precision = "auto", raw: bool = False, model: Custom = None
    ) -> None:
        self.card, segmenter = build_segmenter(path, raw, model)
        self.device = choose_device(device)
        # float16 may overflow in a model that was not trained in it.
        has_bfloat16 = self.device.type == "cuda" and inspect_hardware(self.device).has_bfloat16
        number_format: NumberFormat = ("bfloat16" if has_bfloat16 else "float32") if precision == "auto" else precision
        self.numerics = Numerics(self.device, number_format)
        self.description = f"{self.device}, {number_format}"  # for the user
        self.segmenter = segmenter.to(self.device).to(memory_format=segmenter.memory_format)
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self._forward
        if self.device.type == "cuda":
            use_fast_layers(self.segmenter.network)

    def record_forward(self) -> None:
        """On a GPU, replay the forward pass as a CUDA graph. For one thread; logits are valid until the next call."""
        if self.device.type == "cuda" and self.card.spec.architecture != OWN:
            self.forward = RecordedForward(self._forward)

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        with self.numerics.autocast():
            return self.segmenter(images)

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images on the host, as ImageSpec.to_batch gives them → N,K,H,W float32. Any height and width."""
        try:
            (on_device,) = to_device((images,), self.device)
            return self.forward(on_device)
        except torch.OutOfMemoryError:
            if len(images) == 1:
                raise
        torch.cuda.empty_cache()
        return torch.cat([self.logits(half).clone() for half in images.tensor_split([len(images) // 2])])


class OnnxEngine:
    """An exported file, used like a TorchEngine. Logits are on the host."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        content, metadata = read_onnx(path)
        try:
            self.card = ModelCard.from_json(metadata[CARD_KEY])
        except ILL_FORMED as error:
            reason = f"{CARD_KEY} in its metadata: {reason_of(error)[:200]}"
            raise CheckpointError(f"{path} is no model of this trainer ({reason})") from None
        self.device = torch.device("cpu")
        runtime = import_optional("onnxruntime")
        providers = _choose_providers(device, runtime.get_available_providers())
        options = runtime.SessionOptions()
        options.log_severity_level = SILENT
        options.intra_op_num_threads = torch.get_num_threads()  # by default the host's cores, not the container's
        options.enable_mem_pattern = False  # plans memory for one size, and images have many
        try:
            # From memory: what was checked is what is run, and no other file is looked for beside it.
            self.session = runtime.InferenceSession(content, options, providers=providers)
        except Exception as error:  # onnxruntime's errors share no base class
            raise CheckpointError(f"{path} is no model that onnxruntime can run ({first_line(error)[:200]})") from None
        self.description = f"onnxruntime on {'cuda' if self.session.get_providers()[0] == CUDA else 'cpu'}, float32"
        if device.startswith("cuda") and "cuda" not in self.description:
            raise UserError(f"device: onnxruntime cannot load its CUDA libraries for {device}; use device: cpu")

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.permute(0, 3, 1, 2).float().contiguous()
        count, _, height, width = shape = tuple(pixels.shape)
        try:
            (logits,) = self.session.run([OUTPUT], {INPUT: pixels.numpy()})
        except Exception as error:  # see above
            if count > 1 and "alloc" in str(error).lower():  # out of memory
                return torch.cat([self.logits(half) for half in images.tensor_split([len(images) // 2])])
            raise UserError(f"onnxruntime cannot compute {width}×{height} pixels ({first_line(error)[:200]})") from None
        if logits.shape != (count, self.card.spec.num_ids, height, width):
            raise UserError(f"the exported model gives an array of shape {logits.shape} for images of shape {shape}")
        return torch.from_numpy(logits)


def read_onnx(path: Path) -> tuple[bytes, dict[str, str]]:
    """Content and metadata of a file as it was exported, that needs no other file. Raises CheckpointError."""
    onnx = import_optional("onnx")
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
        model = onnx.load_model_from_string(content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except Exception:  # of protobuf, whose implementations share no base class
        raise CheckpointError(f"{path} is no ONNX file, or a damaged one") from None
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if DIGEST_KEY in metadata and content != add_digest(content[: -len(add_digest(b""))]):
        what = "is damaged, or was changed since it was exported: its bytes do not match its digest"
        raise CheckpointError(f"{path} {what} (if you changed it, delete {DIGEST_KEY} from its metadata)")
    tensors = (part for part in _messages(model) if isinstance(part, onnx.TensorProto))
    if any(tensor.external_data or tensor.data_location for tensor in tensors):
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
    """The message with the digest of its bytes as a last metadata entry, always of one length."""
    onnx = import_optional("onnx")
    entry = onnx.StringStringEntryProto(key=DIGEST_KEY, value=hashlib.sha256(message).hexdigest())
    return message + onnx.ModelProto(metadata_props=[entry]).SerializeToString()


def import_optional(name: str) -> Any:
    """A package of requirements-export.txt; raises UserError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_onnx(error.name or name) from None


def _choose_providers(device: str, available: list[str]) -> list[Any]:
    """CUDA if onnxruntime has it and the device allows it, else the CPU."""
    if device == "cpu" or (device == "auto" and CUDA not in available):
        return [CPU]
    if device not in ("auto", "cuda") and not re.fullmatch(r"cuda:\d+", device):
        raise UserError(f"device: got {device!r}; an exported model runs on auto, cpu, cuda or cuda:N")
    if CUDA not in available:
        raise UserError(f"device: {device} needs onnxruntime-gpu in place of onnxruntime; use device: cpu or auto")
    return [(CUDA, {"device_id": device.partition(":")[2] or "0"}), CPU]


class SymmetricEngine:
    """Averages the logits of an engine over mirrored and turned images."""

    def __init__(self, engine: Engine, symmetries: tuple[Symmetry, ...]) -> None:
        self.engine = engine
        self.card: ModelCard = engine.card
        self.device: torch.device = engine.device
        # (mirrored left to right, quarter turns) of every image that the symmetries generate, the original first. A
        # vertical flip is a horizontal flip and half a turn.
        flips = [first for name, first in (("horizontal_flip", 0), ("vertical_flip", 2)) if name in symmetries]
        turns = range(4) if "quarter_turn" in symmetries else (0, 2) if len(flips) == 2 else (0,)
        self.views = [(False, turn) for turn in turns]
        self.views += [(True, (first + turn) % 4) for first in flips[:1] for turn in turns]
        self.description: str = f"{engine.description}, mean of {len(self.views)} views"

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        if isinstance(self.engine, TorchEngine):
            (images,) = to_device((images,), self.device)  # once, and turned there
        total = torch.zeros((), device=self.device)
        for is_flipped, num_turns in self.views:
            view = torch.rot90(images.flip(2) if is_flipped else images, num_turns, (1, 2)).contiguous()
            logits = torch.rot90(self.engine.logits(view), -num_turns, (2, 3))
            total = total + (logits.flip(3) if is_flipped else logits)
        return total / len(self.views)


Engine = TorchEngine | OnnxEngine | SymmetricEngine


def load_engine(
    path: Path, device: str = "auto", precision: Precision = "auto", raw: bool = False, model: Custom = None
) -> Engine:
    """The engine of a file that find_model found. `model`: as in build_segmenter."""
    if path.suffix == ONNX_SUFFIX:
        if raw or precision not in ("auto", "float32"):
            key, value = ("raw", raw) if raw else ("precision", precision)
            raise UserError(f"{key}: got {value}; {path} holds the weights of its export, in float32")
        return OnnxEngine(path, device)
    if precision not in ("auto", *DTYPES):
        raise UserError(f"precision: got {precision!r}; need auto, {', '.join(DTYPES)}")
    return TorchEngine(path, device, precision, raw, model)
