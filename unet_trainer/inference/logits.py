"""Logits of one image in bands of rows, and what is made of them: ids and probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.model.native_resolution import upsampled_rows


class Band(NamedTuple):
    rows: slice
    logits: torch.Tensor  # K,rows,W float32 on the engine's device


class Logits(Protocol):
    """The logits of one image, computed or to be computed."""

    @property
    def size(self) -> Size: ...

    def bands(self) -> Iterator[Band]:
        """From top to bottom, each row once. May be called once only."""


@dataclass(frozen=True)
class WholeLogits:
    logits: torch.Tensor  # K,h,w float32
    size: Size

    def bands(self) -> Iterator[Band]:
        if self.logits.shape[1:] == self.size:
            yield Band(slice(0, self.size[0]), self.logits)
            return
        for rows, logits in upsampled_rows(self.logits.unsqueeze(0), self.size):
            yield Band(rows, logits[0])


def predicted_ids(logits: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """…,K,H,W logits → …,H,W uint8 ids, where the logits are. `threshold`: least probability of the foreground, of two ids."""
    if logits.shape[-3] == 2:
        least = 0.0 if threshold is None else float(np.log(threshold) - np.log1p(-threshold))
        return (logits.select(-3, 1) - logits.select(-3, 0) > least).to(torch.uint8)
    return logits.max(-3).indices.to(torch.uint8)


def band_ids(logits: torch.Tensor, threshold: float | None = None) -> Pixels:
    """K,rows,W logits → rows,W uint8 ids. `threshold` as in predicted_ids."""
    return predicted_ids(logits, threshold).cpu().numpy()


def all_ids(logits: Logits, threshold: float | None = None) -> Pixels:
    """H,W uint8 ids of the whole image."""
    ids = np.empty(logits.size, np.uint8)
    for band in logits.bands():
        ids[band.rows] = band_ids(band.logits, threshold)
    return ids


def all_probabilities(logits: Logits) -> Pixels:
    """H,W,K float32 of the whole image."""
    parts = [band.logits.softmax(0).permute(1, 2, 0).cpu().numpy() for band in logits.bands()]
    return np.concatenate(parts)
