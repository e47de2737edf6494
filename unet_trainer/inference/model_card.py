"""What is known of a trained model besides its weights: its spec, the symmetries it was trained with, where it comes from.

Exported files carry the card as JSON; from a checkpoint it is read. Imports no torch beyond what the spec needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from unet_trainer import __version__
from unet_trainer.model.segmenter import SegmenterSpec

Symmetry = Literal["horizontal_flip", "vertical_flip", "quarter_turn"]
SYMMETRIES: tuple[Symmetry, ...] = get_args(Symmetry)

CARD_FORMAT = 1
# Transforms of albumentations → the symmetries that a model trained with them has seen.
TRANSFORM_SYMMETRIES: Mapping[str, tuple[Symmetry, ...]] = {
    "HorizontalFlip": ("horizontal_flip",),
    "VerticalFlip": ("vertical_flip",),
    "RandomRotate90": ("quarter_turn",),
    "Transpose": (),
    "D4": ("horizontal_flip", "vertical_flip", "quarter_turn"),
    "SquareSymmetry": ("horizontal_flip", "vertical_flip", "quarter_turn"),
}
# `default` and `strong` are stored by name only where images have no up.
NAMED_SYMMETRIES: Mapping[str, tuple[Symmetry, ...]] = {
    "default": ("horizontal_flip", "vertical_flip"),
    "strong": ("horizontal_flip", "vertical_flip"),
}


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
        is_right = {
            "symmetries": set(self.symmetries) <= set(SYMMETRIES),
            "run_name": isinstance(self.run_name, str),
            "epoch": self.epoch is None or type(self.epoch) is int,
            "val_iou": self.val_iou is None or type(self.val_iou) in (int, float),
            "version": isinstance(self.version, str),
        }
        wrong = [name for name, is_so in is_right.items() if not is_so]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} cannot be right")

    def to_json(self) -> str:
        content = {
            "format": CARD_FORMAT,
            "spec": self.spec.to_dict(),
            "symmetries": list(self.symmetries),
            "run_name": self.run_name,
            "epoch": self.epoch,
            "val_iou": self.val_iou,
            "version": self.version,
        }
        return json.dumps(content, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ModelCard:
        """Raises ValueError, KeyError, TypeError or RecursionError for text that is no card."""
        content = json.loads(text)
        if type(content["format"]) is not int or content["format"] < 1:
            raise ValueError("no format number")
        if content["format"] > CARD_FORMAT:
            raise ValueError(f"written by a newer version (format {content['format']}); this one reads up to {CARD_FORMAT}")
        return ModelCard(
            SegmenterSpec.from_dict(content["spec"]),
            tuple(content["symmetries"]),
            content["run_name"],
            content["epoch"],
            content["val_iou"],
            content["version"],
        )


def symmetries_of(augmentation: Any) -> tuple[Symmetry, ...]:
    """The symmetries that training with this augmentation, as the config has it, taught: a name or a list of transforms."""
    if isinstance(augmentation, str):
        return NAMED_SYMMETRIES.get(augmentation, ())
    found: set[Symmetry] = set()
    for entry in augmentation if isinstance(augmentation, Sequence) else ():
        name = entry if isinstance(entry, str) else next(iter(entry), "") if isinstance(entry, Mapping) else ""
        found |= set(TRANSFORM_SYMMETRIES.get(str(name), ()))
    return tuple(symmetry for symmetry in SYMMETRIES if symmetry in found)
