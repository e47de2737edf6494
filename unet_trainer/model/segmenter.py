"""The deployable model: a network with all that is needed to use it.

    images in the files' own units, N,H,W,C  →  Segmenter  →  logits of every class id at the images' own size, N,K,H,W float32

Training, evaluation, prediction and export use this one module. There is no default spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import OWN, id_names
from unet_trainer.images.drawing import BACKGROUND_COLOUR, class_colours
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding, as_lists, as_tuples

AUXILIARY = "auxiliary"  # module of a network that is used in training only, see deep_supervision
STRIDE = 32  # the deepest encoder stage is 32 times smaller than the image
# Bounds of a spec that is read from a file; config/schema.py has those of what can be asked for.
MAX_CHANNELS, MAX_IDS, MAX_SIDE, MAX_VALUE, MAX_FLOAT32, MAX_MARKS = 4096, 254, 8192, 2**32, 3.4e38, 64


@dataclass(frozen=True)
class SegmenterSpec:
    """What a network was trained for: images, classes and sizes. Saved in every checkpoint."""

    image: ImageSpec
    coding: MaskCoding  # mask value ↔ class id
    num_classes: int  # 1: foreground against background
    id_names: tuple[str, ...]  # a name for each class id, background included
    id_colours: tuple[tuple[int, int, int], ...]  # a colour for each class id
    image_size: tuple[int, int]  # height and width of training samples
    fit: Literal["resize", "crop"]
    architecture: str
    encoder: str
    decoder_channels: tuple[int, ...] | None
    decoder_attention: Literal["none", "scse"] = "none"
    tile: tuple[int, int] | None = None  # fit: crop: height and width that images are cut into; None: image_size
    source_sides: tuple[float, float] | None = None  # fit: resize: √(height × width) of the smallest and largest training image

    @property
    def num_ids(self) -> int:
        return max(2, self.num_classes)

    @property
    def class_names(self) -> list[str]:
        """Of the classes that are reported: with one class, the foreground alone."""
        return list(self.id_names[1:] if self.num_classes == 1 else self.id_names)

    @property
    def has_background(self) -> bool:
        """Whether class 0 is what no class is: it has no colour."""
        return self.id_colours[0] == BACKGROUND_COLOUR

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint holds them."""
        content = {**vars(self), "image": self.image.to_dict(), "coding": self.coding.to_dict()}
        return {name: as_lists(value) for name, value in content.items()}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> SegmenterSpec:
        """Raises KeyError, TypeError or ValueError for content that is no spec. Earlier versions saved fewer fields."""
        _check_content(content)
        known = {field.name: as_tuples(content[field.name]) for field in fields(SegmenterSpec) if field.name in content}
        parts = {"image": ImageSpec.from_dict(content["image"]), "coding": MaskCoding.from_dict(content["coding"])}
        return SegmenterSpec(**{**known, **parts})


def _check_content(content: Mapping[str, Any]) -> None:
    """Raises ValueError for values that no run can have saved: a file may come from anywhere."""
    image, coding = content["image"], content["coding"]
    num_channels, num_classes = image["channels"], content["num_classes"]
    is_count = _is_whole(num_channels, 1, MAX_CHANNELS) and _is_whole(num_classes, 1, MAX_IDS)
    num_ids = max(2, num_classes) if is_count else 0
    decoder_channels, values = content["decoder_channels"], coding["values"]
    tile, sides = content.get("tile"), content.get("source_sides")
    is_right = {
        "channels or num_classes": is_count,
        "depth": isinstance(image["depth"], str),
        "mean": _are_numbers(image["mean"]) and len(image["mean"]) == num_channels,
        "std": _are_numbers(image["std"]) and len(image["std"]) == num_channels and all(value > 0 for value in image["std"]),
        "nodata": _are_numbers(image.get("nodata", []))
        and len(image.get("nodata", [])) <= MAX_MARKS
        and isinstance(image.get("ignores_nodata", False), bool),
        "low and high": _are_numbers([image["low"], image["high"]]),
        "coding": (values is None or len(values) == num_ids)
        and all(value is None or _is_whole(value, -MAX_VALUE, MAX_VALUE) for value in _flat(list(coding.values()))),
        "id_names": _are_texts(content["id_names"]) and len(content["id_names"]) == num_ids,
        "id_colours": len(content["id_colours"]) == num_ids
        and all(len(colour) == 3 and all(_is_whole(part, 0, 255) for part in colour) for colour in content["id_colours"]),
        "image_size": _is_size(content["image_size"]),
        "tile": tile is None or _is_size(tile),
        "source_sides": sides is None or (_are_numbers(sides) and len(sides) == 2 and 0 < sides[0] <= sides[1]),
        "fit": content["fit"] in ("resize", "crop"),
        "architecture or encoder": _are_texts([content["architecture"], content["encoder"]]),
        "decoder_channels": decoder_channels is None or all(_is_whole(number, 1, MAX_CHANNELS) for number in decoder_channels),
        "decoder_attention": content.get("decoder_attention", "none") in ("none", "scse"),
    }
    wrong = [name for name, is_so in is_right.items() if not is_so]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} of its spec cannot be right")


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most


def _is_size(value: Any) -> bool:
    return len(value) == 2 and all(_is_whole(side, 1, MAX_SIDE) for side in value)


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and abs(value) < MAX_FLOAT32 for value in values)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def build_spec(
    config: ResolvedConfig,
    image: ImageSpec,
    coding: MaskCoding,
    has_background: bool = True,
    sizes: Sequence[tuple[int, int]] = (),
) -> SegmenterSpec:
    """`has_background`: class 0 is what no class is, and has no colour. `sizes`: of the training images."""
    sides = [math.sqrt(height * width) for height, width in sizes] if config.fit == "resize" else []
    names = tuple(id_names(config))
    return SegmenterSpec(
        image=image,
        coding=coding,
        num_classes=config.num_classes,
        id_names=names,
        id_colours=class_colours(len(names), has_background),
        image_size=config.shape,
        fit=config.fit,
        architecture=config.architecture,
        encoder=config.encoder,
        decoder_channels=config.decoder_channels,
        decoder_attention=config.decoder_attention,
        source_sides=(min(sides), max(sides)) if sides else None,
    )


class Segmenter(torch.nn.Module):
    """Normalises, pads to a multiple of STRIDE, runs the network, removes the padding."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, spec: SegmenterSpec, network: torch.nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.spec = spec
        self.network = network
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        # Not persistent: the spec holds them, and a checkpoint's weights are those of the bare network.
        self.register_buffer("mean", torch.tensor(spec.image.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("scale", 1 / torch.tensor(spec.image.std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images of any height and width → N,K,H,W float32 logits."""
        return class_logits(self.network(self.prepare(images))[:, :, : images.shape[1], : images.shape[2]])

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images → N,C,H,W as the network takes them: normalised, and padded to a multiple of STRIDE."""
        height, width = images.shape[1:3]
        pixels = images.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        normalised = (pixels.float() - self.mean) * self.scale
        if height % STRIDE or width % STRIDE:
            normalised = F.pad(normalised, (0, -width % STRIDE, 0, -height % STRIDE), mode="replicate")
        return normalised


def class_logits(logits: torch.Tensor) -> torch.Tensor:
    """N,C,H,W of the network → N,K,H,W float32, a logit for every class id.

    One class and many are one case from here on: a lone foreground logit z stands for the two-class logits (0, z), whose
    softmax is the sigmoid. Float32, because sums over pixels exceed what 16 bits can hold.
    """
    logits = logits.float()
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def network_weights(segmenter: Segmenter) -> dict[str, torch.Tensor]:
    """The network's state under its own names, without the prefixes of compiled and distributed wrappers."""
    return {without_wrappers(name): tensor for name, tensor in segmenter.network.state_dict().items()}


def deployable_weights(segmenter: Segmenter) -> dict[str, torch.Tensor]:
    """The weights that a model is used with: without those that serve training alone."""
    weights, is_own = network_weights(segmenter), segmenter.spec.architecture == OWN  # which may have a part of that name
    return {name: tensor for name, tensor in weights.items() if is_own or not name.startswith(f"{AUXILIARY}.")}


def load_network_weights(segmenter: Segmenter, weights: Mapping[str, torch.Tensor]) -> None:
    own_names = {without_wrappers(name): name for name in segmenter.network.state_dict()}
    segmenter.network.load_state_dict({own_names.get(name, name): tensor for name, tensor in weights.items()})


def without_wrappers(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
