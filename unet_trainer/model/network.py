"""Builds a network of segmentation-models-pytorch, loads encoder weights, freezes the encoder."""

import contextlib
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import segmentation_models_pytorch as smp
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.resnet import BasicBlock, Bottleneck

from unet_trainer.config.errors import ConfigError, UserError
from unet_trainer.config.parsers import SMALL_RESNET, encoder_name
from unet_trainer.model.pretrained import fetch, offline, weight_files
from unet_trainer.model.random_state import unchanged
from unet_trainer.model.segmenter import STRIDE, SegmenterSpec
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import ZIP_START, check_zip, open_file
from unet_trainer.system.os_errors import with_advice

DOWNLOAD_LIMIT = 3600.0  # seconds, for weights that the config names
WEIGHT_FILES = (".pt", ".pth", ".safetensors")
FAR = 2048  # pixels; the deepest encoders gather what a pixel depends on from 1,500 around it
RAREST = 0.01  # share of the pixels that an untrained network expects of any class
# Timm's small residual network in the widths of test_resnet, which is a fixture of timm's own tests and may vanish.
SMALL_RESNET_OPTIONS = {
    "block": [BasicBlock, BasicBlock, Bottleneck, BasicBlock],
    "channels": (32, 48, 48, 96),
    "stem_width": 16,
    "stem_type": "deep",
}
WRAPPERS = ("module.", "_orig_mod.", "encoder.", "model.")  # prefixes that other tools put before an encoder's names
BAD_FILE = (SafetensorError, zipfile.BadZipFile, pickle.PickleError, RuntimeError, EOFError, ValueError, LookupError)
NEED_FILE = f"a file ({', '.join(WEIGHT_FILES)})"


def build_network(spec: SegmenterSpec, encoder_weights: str | None) -> torch.nn.Module:
    """The network with fresh decoder weights. Raises UserError for unknown names and weights that can't be loaded."""
    try:
        encoder_name(spec.encoder)
    except ValueError as error:
        raise ConfigError(f"encoder: got {spec.encoder!r}; {error}") from None
    path = Path(encoder_weights or "")
    file = path if path.suffix in WEIGHT_FILES or path.is_file() else None
    named = None if file is not None else encoder_weights
    got = f"encoder_weights: got {encoder_weights!r}"
    encoder, options = spec.encoder, dict[str, Any]()
    if spec.decoder_channels is not None:
        options["decoder_channels"] = spec.decoder_channels
    if spec.decoder_attention != "none":
        options["decoder_attention_type"] = spec.decoder_attention
    if encoder == SMALL_RESNET:
        if named is not None:
            raise ConfigError(f"{got}; {encoder} has no trained ones: need null or {NEED_FILE}")
        encoder, options = "tu-resnet10t", options | SMALL_RESNET_OPTIONS
    is_timm = encoder.startswith("tu-")  # its weights are named in the encoder's name
    if is_timm and named not in (None, "imagenet"):
        raise ConfigError(f"{got}; need imagenet, null or {NEED_FILE}")
    files = [] if named is None else weight_files(encoder, named)
    if not all(weights.is_here() for weights in files) and (failure := fetch(files, DOWNLOAD_LIMIT)) is not None:
        why = f"encoder_weights: {named} for {encoder} could not be downloaded ({failure})"
        raise UserError(f"{why}; use encoder_weights: null, or the path of {NEED_FILE}")
    weights = True if is_timm and named is not None else named
    channels = {"in_channels": spec.image.channels, "classes": spec.num_classes}
    try:
        with offline() if files else contextlib.nullcontext():
            network = smp.create_model(spec.architecture, encoder, weights, **channels, **options)
    except Exception as error:  # smp and timm share no base class
        if files and isinstance(error, SafetensorError | pickle.UnpicklingError | EOFError):
            raise UserError(
                f"encoder_weights: the file of {named} for {encoder} in the download cache is damaged "
                f"({error}); delete it there, and it is downloaded again"
            ) from None
        if isinstance(error, KeyError):
            message = f"{got} for encoder: {spec.encoder}; {error.args[0]}"
        elif isinstance(error, ValueError | NotImplementedError | RuntimeError | TypeError | AttributeError):
            message = f"architecture: {spec.architecture} does not go with encoder: {spec.encoder}; {error}"
        else:
            raise
        raise ConfigError(message) from None
    if file is not None:
        load_encoder_weights(network.encoder, file)
    if spec.class_shares is not None:
        expect_shares(network, spec.class_shares)
    return network


@torch.no_grad()
def expect_shares(network: torch.nn.Module, class_shares: Sequence[float]) -> None:
    """Sets the head's bias so that an untrained network predicts each class with its share of the pixels."""
    head = [part for part in network.get_submodule("segmentation_head").modules() if isinstance(part, torch.nn.Conv2d)]
    if head and (bias := head[-1].bias) is not None:
        logits = torch.tensor(class_shares).clamp(min=RAREST).log()
        bias.copy_(logits[1:] - logits[:1] if len(bias) == 1 else logits - logits.mean())


@torch.no_grad()
def sees_far(spec: SegmenterSpec) -> bool:
    """Whether logits depend on pixels at any distance, as where a network pools over its whole input
    (squeeze-and-excite): it sees something else in a larger image than in the crops that it was trained on."""
    with unchanged():
        network = build_network(spec, None).eval()
        for parameter in network.parameters():
            if parameter.ndim < 2 or not parameter.any():  # many encoders begin with branches that are multiplied by 0
                parameter.add_(0.3 * torch.rand_like(parameter) + 0.05)
        pixels = torch.rand(1, spec.image.channels, STRIDE, 2 * FAR)
    changed = torch.cat([pixels[..., :FAR], 2 * pixels[..., FAR:]], -1)
    try:
        near, after = (network(given)[..., :STRIDE] for given in (pixels, changed))
    except (RuntimeError, ValueError, AssertionError):  # made for images of one size
        return True
    return not torch.equal(near, after)


def load_encoder_weights(encoder: torch.nn.Module, path: Path) -> None:
    """Every tensor of the encoder must be in the file; others in the file (a classifier) are not used."""
    in_file = {_encoder_tensor_name(name): tensor for name, tensor in read_tensors(path, "encoder_weights").items()}
    wanted = encoder.state_dict()  # the names of timm encoders begin with model.
    found = {name: in_file[bare] for name in wanted if (bare := _encoder_tensor_name(name)) in in_file}
    missing = [name for name in wanted if name not in found and not name.endswith("num_batches_tracked")]
    if missing:
        raise UserError(
            f"encoder_weights: {path} lacks {len(missing)} of the encoder's {len(wanted)} tensors, e.g. {missing[0]}; "
            "is it another encoder's?"
        )
    stem = next(iter(wanted))
    if stem in found and found[stem].ndim == 4 and found[stem].shape[1] == 3 != wanted[stem].shape[1]:
        found[stem] = adapt_channels(found[stem], wanted[stem].shape[1])
    wrong = [name for name, tensor in found.items() if tensor.shape != wanted[name].shape]
    if wrong:
        shapes = f"{wrong[0]} is {tuple(found[wrong[0]].shape)}, need {tuple(wanted[wrong[0]].shape)}"
        raise UserError(f"encoder_weights: {path} has {len(wrong)} tensors of another shape, e.g. {shapes}")
    bad = [name for name, tensor in found.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise UserError(f"encoder_weights: {path} holds NaN or infinite values, e.g. in {bad[0]}")
    encoder.load_state_dict({name: found.get(name, tensor) for name, tensor in wanted.items()})


def adapt_channels(weight: torch.Tensor, number: int) -> torch.Tensor:
    """The first convolution for images with another number of channels, as timm does: grey ones get the sum over the
    channels, many repeat them, and the output keeps its scale."""
    have = weight.shape[1]
    if number == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-number // have), 1, 1)[:, :number] * (have / number)


def read_tensors(path: Path, key: str) -> dict[str, torch.Tensor]:
    """The plain tensors of a file by name; raises UserError. `key`: the setting that names it."""
    if not path.is_file():
        raise UserError(f"{key}: no file {path}")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with open_file(path) as file:
                if file.read(len(ZIP_START)) == ZIP_START:
                    check_zip(file)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (*BAD_FILE, TypeError, OSError) as error:
        reason = with_advice(error) if isinstance(error, OSError) else first_line(error)
        # torch's message says how to load it anyway
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
            reason = "it holds more than tensors, which could run when it is loaded; save its state_dict"
            reason += ", best as .safetensors"
        raise UserError(f"{key}: {path} is no file of plain tensors ({reason})") from None
    for inner in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(inner), dict):
            content = content[inner]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in items if isinstance(name, str) and _is_plain(value)}
    if not tensors:
        raise UserError(f"{key}: {path} holds no tensors by name")
    return tensors


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_quantized:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _encoder_tensor_name(name: str) -> str:
    """The name of a tensor within the encoder, without the prefixes of wrappers."""
    while (prefix := next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), None)) is not None:
        name = name.removeprefix(prefix)
    return name


def set_training_mode(network: torch.nn.Module, encoder_frozen: bool) -> None:
    """Training mode. A frozen encoder has no gradients, and its normalisation statistics do not change either."""
    network.train()
    encoder = network.get_submodule("encoder")
    encoder.train(not encoder_frozen)
    for parameter in encoder.parameters():
        parameter.requires_grad_(not encoder_frozen)
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.grad = None
