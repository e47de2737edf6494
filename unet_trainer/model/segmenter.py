"""The deployable model, a network with all that is needed to use it: from images in the files' own units, N,H,W,C, to
logits of every class id at the images' own size, N,K,H,W float32. Training, evaluation, prediction and export use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import id_names
from unet_trainer.images.drawing import BACKGROUND_COLOUR, class_colours
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding, as_lists

MAX_SIDE = 8192  # of a training sample or a tile
FLAT = 0.05  # of the dataset's standard deviation: what has less contrast is not amplified to that of others
STRIDE = 32  # the deepest encoder stage is 32 times smaller than the image

# Bounds of what a file may hold, which may come from anywhere. config/schema.py has those of what can be asked for.
Channels = Annotated[int, Field(ge=1, le=4096)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Intensity = Annotated[int, Field(ge=0, le=255)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class SegmenterSpec:
    """What a network was trained for: images, classes and sizes. Saved in every checkpoint."""

    image: ImageSpec
    coding: MaskCoding  # mask value ↔ class id
    num_classes: Annotated[int, Field(ge=1, le=254)]  # 1: foreground against background
    id_names: tuple[str, ...]  # a name for each class id, background included
    id_colours: tuple[tuple[Intensity, Intensity, Intensity], ...]  # a colour for each class id
    image_size: tuple[Side, Side]  # height and width of training samples
    fit: Literal["resize", "crop"]
    architecture: str
    encoder: str
    decoder_channels: tuple[Channels, ...] | None = None
    decoder_attention: Literal["none", "scse"] = "none"
    normalize: Literal["dataset", "image"] = "dataset"
    class_shares: tuple[Share, ...] | None = None  # of the pixels that the masks give a class id
    tile: tuple[Side, Side] | None = None  # fit: crop: height and width that images are cut into; None: image_size
    # fit: resize: √(height × width) of the smallest and largest training image
    source_sides: tuple[float, float] | None = None

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
        """Raises ValueError, which names the first value that no run can have saved."""
        try:
            (spec,) = SAVED_SPECS.validate_python([content])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            names = [name for name in first["loc"] if isinstance(name, str)]
            raise ValueError(": ".join([*names, f"{first['input']!r:.40}", first["msg"]])) from None
        image, coding = spec.image, spec.coding
        sides, num_ids = spec.source_sides or (1.0, 1.0), spec.num_ids
        is_right = {
            "image": len(image.mean) == len(image.std) == image.channels > 0 and min(image.std) > 0,
            "coding": coding.values is None or len(coding.values) == num_ids,
            "id_names or id_colours": len(spec.id_names) == len(spec.id_colours) == num_ids,
            "source_sides": 0 < sides[0] <= sides[1],
            "class_shares": spec.class_shares is None or len(spec.class_shares) == num_ids,
        }
        if wrong := [name for name, is_so in is_right.items() if not is_so]:
            raise ValueError(f"{', '.join(wrong)} of its spec cannot be right")
        return spec


# Of a list of one: inside of a list, dataclasses take over its configuration.
SAVED_SPECS = TypeAdapter(list[SegmenterSpec], config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def build_spec(
    config: ResolvedConfig,
    image: ImageSpec,
    coding: MaskCoding,
    has_background: bool = True,
    sizes: Sequence[tuple[int, int]] = (),
    class_shares: Sequence[float] | None = None,
) -> SegmenterSpec:
    """`has_background`: class 0 is background, and has no colour. `sizes`: of the training images."""
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
        normalize=config.normalize,
        class_shares=None if class_shares is None else tuple(class_shares),
        source_sides=(min(sides), max(sides)) if sides else None,
    )


class Segmenter(torch.nn.Module):
    """Pads to a multiple of STRIDE, normalises, runs the network, removes the padding."""

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
        """N,H,W,C images → N,C,H,W as the network takes them: padded to a multiple of STRIDE, and normalised."""
        height, width = images.shape[1:3]
        pixels = images.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format).float()
        if height % STRIDE or width % STRIDE:
            pixels = F.pad(pixels, (0, -width % STRIDE, 0, -height % STRIDE), mode="replicate")
        return self.normalise(pixels)

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """N,C,H,W float32."""
        normalised = (pixels - self.mean) * self.scale
        if self.spec.normalize == "image":
            spread, mean = torch.std_mean(normalised, (1, 2, 3), correction=0, keepdim=True)
            normalised = (normalised - mean) / (spread + FLAT)
        return normalised


def class_logits(logits: torch.Tensor) -> torch.Tensor:
    """N,C,H,W of the network → N,K,H,W float32, a logit for every class id: a lone foreground logit z stands for the
    two-class logits (0, z), whose softmax is the sigmoid. Sums over pixels exceed what 16 bits can hold."""
    logits = logits.float()
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def network_weights(segmenter: Segmenter) -> dict[str, torch.Tensor]:
    return dict(segmenter.network.state_dict())
