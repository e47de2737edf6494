"""The model that a new run begins from (init_from): reads its file, and loads what fits into the run's network. Nothing
in a file is run, and what it says of itself is checked. Resuming a run is not done here."""

import contextlib
import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, OWN, Config, parse_value, to_plain
from unet_trainer.data.pairs import first_few
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.model.network import adapt_channels, read_tensors
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.runs.folder import SMP_CARD, find_initial_model, shown_model
from unet_trainer.system.console import counted
from unet_trainer.system.input_files import open_file, read_json
from unet_trainer.training.checkpoint import ILL_FORMED, ForeignCheckpoint, model_weights, read_checkpoint

NETWORK_KEYS = ("architecture", "encoder", "decoder_channels", "decoder_attention")
DEFAULT_DECODER = (256, 128, 64, 32, 16)  # what decoder_channels: null stands for
SMP_CONFIG, MAX_CARD_BYTES = "config.json", 2**20


@dataclass(frozen=True)
class LoadedWeights:
    """What a network has of an initial model."""

    summary: str  # "258 of 258 tensors of checkpoints/demo (epoch 7, val IoU 0.9432), sha256 0123456789abcdef"
    remarks: str  # what was adapted, is initialised or is not used; empty: nothing
    is_complete: bool  # nothing is initialised


@dataclass(frozen=True)
class InitialModel:
    """Weights by name, and what their file says of the network, the images and the classes."""

    path: Path
    title: str  # for the user
    weights: Mapping[str, torch.Tensor]
    spec: SegmenterSpec | None = None
    network: Mapping[str, Any] = field(default_factory=dict)  # values of NETWORK_KEYS, as far as they are known

    def settings(self, config: Config) -> dict[str, tuple[Any, str]]:
        """Value and reason of the settings that follow from the model. Raises UserError for others that are set."""
        decided: dict[str, tuple[Any, str]] = {}
        if config.encoder_weights == "auto":
            decided["encoder_weights"] = None, "init_from has an encoder"
        if config.architecture == OWN:
            return decided
        if self.network.get("architecture") == OWN:
            fix = "give it from Python, train(model=..., init_from=...)"
            raise UserError(f"init_from: {self.title} has a network of its own, which no file holds; {fix}")
        wrong = []
        for name, value in self.network.items():
            own = getattr(config, name)
            if not _is_set(config, name):
                decided |= {name: (value, self.reason)} if value != own else {}
            elif (value or DEFAULT_DECODER) != own:
                wrong.append(f"{name} is {value_text(to_plain(value))}, and {value_text(to_plain(own))} in the config")
        if wrong:
            fix = "leave these settings out to take the model's, or name another model"
            raise UserError(f"init_from: of {self.title}, {'; '.join(wrong)}; {fix}")
        return decided

    @property
    def reason(self) -> str:
        return f"as {shown_model(self.path)} has it"

    def normalisation(self, config: Config, image: ImageSpec) -> dict[str, tuple[Any, str]]:
        """Likewise of the settings that say how images of this kind are normalised, where the model had such images."""
        if self.spec is None or (self.spec.image.channels, self.spec.image.depth) != (image.channels, image.depth):
            return {}
        own = self.spec.image
        values: dict[str, Any] = {"normalize": self.spec.normalize}
        values |= {"image_mean": own.mean} if own.mean != image.mean else {}
        values |= {"image_std": own.std} if own.std != image.std else {}
        return {name: (value, self.reason) for name, value in values.items() if getattr(config, name) == "auto"}

    @torch.no_grad()
    def load_into(self, network: torch.nn.Module, spec: SegmenterSpec) -> LoadedWeights:
        """Loads every tensor that fits. Raises UserError where none does, and for values that are not finite."""
        wanted = network.state_dict()
        in_file = {_without_wrappers(name, wanted): tensor for name, tensor in self.weights.items()}
        first = next((name for name, tensor in wanted.items() if tensor.ndim == 4), "")
        head, old_ids = _last_layer(network), match_classes(self.spec, spec)
        fitting: dict[str, torch.Tensor] = {}
        remarks, missing = [], []
        for name, target in wanted.items():
            source = in_file.get(name)
            if source is None or source.is_floating_point() != target.is_floating_point():
                missing += [f"{name} {tuple(target.shape)}"] if target.is_floating_point() else []
            elif name in head and self.spec is not None and _have_rows(source, self.spec, target, spec):
                if any(old is not None for old in old_ids):
                    fitting[name] = _class_rows(source, target, old_ids)
            elif source.shape == target.shape:
                fitting[name] = source
            elif name == first and source.numel() and _kernels(source) == _kernels(target):
                fitting[name] = adapt_channels(source, target.shape[1])
                remarks.append(f"{name} is adapted from {source.shape[1]} to {target.shape[1]} channels")
            else:
                missing.append(f"{name} {tuple(target.shape)}, {tuple(source.shape)} in the file")
        if not any(source.is_floating_point() for source in fitting.values()):
            there = next(iter(in_file))
            fix = "is it another network's? architecture, encoder and decoder_channels must be those of the model"
            fix = f"an encoder alone is encoder_weights={self.path}" if f"encoder.{there}" in wanted else fix
            what = f"none of the {counted(len(in_file), 'tensor')} of {self.path} fits the network"
            raise UserError(f"init_from: {what} (e.g. {there:.100}, here {next(iter(wanted))}); {fix}")
        if bad := [name for name, source in fitting.items() if not source.isfinite().all()]:
            raise UserError(f"init_from: {self.path} holds NaN or infinite values, e.g. in {bad[0]}")
        network.load_state_dict({**wanted, **fitting})
        new_names = [name for name, old in zip(spec.id_names, old_ids, strict=True) if old is None]
        missing += [f"the classes {first_few(new_names)} in the last layer"] if head and new_names else []
        remarks += [f"new weights for {first_few(missing)}"] if missing else []
        if unused := [name for name in in_file if name not in wanted]:
            remarks.append(f"{counted(len(unused), 'tensor')} of the file not used, e.g. {unused[0]:.100}")
        with open_file(self.path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # it has readinto
        summary = f"{len(fitting)} of {len(wanted)} tensors of {self.title}, sha256 {digest[:16]}"
        return LoadedWeights(summary, "; ".join(remarks), not missing)


def read_initial_model(init_from: str, checkpoint_dir: Path) -> InitialModel:
    """The model that init_from names. Raises UserError."""
    path = find_initial_model(init_from, checkpoint_dir)
    title, spec, network = shown_model(path), None, dict[str, Any]()
    try:
        if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
            with contextlib.suppress(ForeignCheckpoint):
                content = read_checkpoint(path)
                spec = SegmenterSpec.from_dict(content["spec"])
                scores = content.get("metrics") or (content.get("history") or [{}])[-1]
                if "val_iou" in scores:
                    title += f" (epoch {content['epoch']:d}, val IoU {scores['val_iou']:.4f})"
                return InitialModel(path, title, model_weights(path, content), spec, _network_of(spec))
        weights = read_tensors(path, "init_from")
        if path.suffix == ".safetensors":
            spec, network = _read_cards(path.parent)
        return InitialModel(path, title, weights, spec, network)
    except CheckpointError as error:
        raise UserError(f"init_from: {error}") from None
    except UserError:
        raise
    except (*ILL_FORMED, OSError) as error:
        text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        raise UserError(f"init_from: {path} is not a model that can be used ({text[:300]})") from None


def _network_of(spec: SegmenterSpec) -> dict[str, Any]:
    if spec.architecture == OWN:
        return {"architecture": OWN}
    return {name: parse_value(name, to_plain(getattr(spec, name))) for name in NETWORK_KEYS}


def _read_cards(folder: Path) -> tuple[SegmenterSpec | None, dict[str, Any]]:
    """What lies beside exported weights: our card, or the config of segmentation-models-pytorch."""
    if (folder / SMP_CARD).is_file():
        spec = SegmenterSpec.from_dict(read_json(folder / SMP_CARD, MAX_CARD_BYTES)["spec"])
        return spec, _network_of(spec)
    about = read_json(folder / SMP_CONFIG, MAX_CARD_BYTES) if (folder / SMP_CONFIG).is_file() else None
    if not isinstance(about, dict) or "_model_class" not in about:  # of another library
        return None, {}
    channels = about.get("decoder_channels")
    values = {
        "architecture": str(about["_model_class"]).lower(),
        "encoder": about["encoder_name"],
        "decoder_channels": channels if isinstance(channels, list) else None,
        "decoder_attention": about.get("decoder_attention_type") or "none",
    }
    return None, {name: parse_value(name, value) for name, value in values.items()}


def _is_set(config: Config, name: str) -> bool:
    """Whether the user has chosen the value; one of the demo's own settings gives way."""
    value, source = getattr(config, name), config.sources.get(name)
    is_chosen = source not in (None, "demo") or (source is None and value != FIELDS[name].default)
    return value not in ("auto", None) and is_chosen


def _without_wrappers(name: str, wanted: Mapping[str, Any]) -> str:
    """Without the prefixes of torch.compile, DistributedDataParallel and other tools, however they nest."""
    name = name.replace("_orig_mod.", "")
    while name not in wanted and name.startswith(("module.", "model.")):
        name = name.partition(".")[2]
    return name


def _kernels(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the kernels of a first layer, whatever the channels of the image."""
    return tuple(tensor.shape[:1] + tensor.shape[2:])


def _last_layer(network: torch.nn.Module) -> tuple[str, ...]:
    """The names of the tensors that have a row for each class; none for a network without a segmentation_head."""
    convolutions = [name for name, layer in network.named_modules() if isinstance(layer, torch.nn.Conv2d)]
    layers = [name for name in convolutions if name.split(".")[0] == "segmentation_head"]
    return (f"{layers[-1]}.weight", f"{layers[-1]}.bias") if layers else ()


def match_classes(old: SegmenterSpec | None, new: SegmenterSpec) -> list[int | None]:
    """For each class id of the new model the id that its name has in the old one. Two models of one foreground are
    alike whatever its name, and as many ids of which one model has no names are the same."""
    if old is None:
        return [*range(new.num_ids)]
    have_same_names = old.num_classes == new.num_classes == 1 or not (_has_names(old) and _has_names(new))
    if old.num_ids == new.num_ids and have_same_names:
        return [*range(new.num_ids)]
    ids = {name: index for index, name in enumerate(_plain_names(old))}
    matched = [ids.get(name) for name in _plain_names(new)]
    return matched if new.num_classes > 1 or None not in matched else [None, None]  # a lone logit needs both


def _has_names(spec: SegmenterSpec) -> bool:
    unnamed = [f"class {index}" for index in range(spec.num_classes)]
    return [*spec.id_names] != (["background", "foreground"] if spec.num_classes == 1 else unnamed)


def _plain_names(spec: SegmenterSpec) -> list[str]:
    names = [name.strip().casefold() for name in spec.id_names]
    return ["background", *names[1:]] if spec.has_background else names


def _have_rows(tensor: torch.Tensor, old: SegmenterSpec, own: torch.Tensor, new: SegmenterSpec) -> bool:
    """Whether both have one for each class."""
    return own.shape[0] == new.num_classes and tensor.shape == (old.num_classes, *own.shape[1:])


def _class_rows(tensor: torch.Tensor, own: torch.Tensor, old_ids: list[int | None]) -> torch.Tensor:
    """The last layer's rows; those of new classes are its own. A lone logit z of the foreground stands for the logits
    (0, z), see class_logits."""
    rows = torch.cat([torch.zeros_like(tensor), tensor]) if len(tensor) == 1 else tensor
    if len(own) > 1:
        return torch.stack([own[index] if old is None else rows[old] for index, old in enumerate(old_ids)])
    background, foreground = (rows[old] for old in old_ids if old is not None)
    return (foreground - background)[None]
