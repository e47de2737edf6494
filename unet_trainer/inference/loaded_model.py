"""A trained model for Python: `from unet_trainer import load; model = load("checkpoints/demo"); mask = model(image)`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from unet_trainer.config.choices import NumberFormat
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.inference.engine import Engine, SymmetricEngine, load_engine
from unet_trainer.inference.logits import Logits, all_ids, all_probabilities
from unet_trainer.inference.model_files import ModelCard, find_model
from unet_trainer.inference.predictor import Predictor, chosen_tile

PIL_MODES = ("1", "L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # not indices, CMYK, YCbCr, HSV, LAB


class LoadedModel:
    """Called with an image (numpy, height × width × channels or height × width, in the files' own units, any size) it gives the
    class id of every pixel. May be called from several threads."""

    def __init__(self, engine: Engine, tile: int | None = None) -> None:
        self.engine = engine
        self.predictor = Predictor(engine, chosen_tile(tile, engine.card.spec, "tile"))
        self.has_warned = False  # of an image's scale

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    @property
    def classes(self) -> list[str]:
        """A name for each class id."""
        return list(self.card.spec.id_names)

    @property
    def colours(self) -> list[tuple[int, int, int]]:
        """RGB of each class id."""
        return list(self.card.spec.id_colours)

    def __call__(self, image: ArrayLike, threshold: float | None = None) -> Pixels:
        """H,W,C image → H,W uint8 class ids. `threshold`: least probability of the foreground, with one class."""
        if threshold is not None and self.card.spec.num_ids != 2:
            raise ValueError(f"threshold: for a model of two class ids; this one has {self.card.spec.num_ids}")
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold: got {threshold}; need a number between 0 and 1")
        return all_ids(self._logits(image), threshold)

    def probabilities(self, image: ArrayLike) -> Pixels:
        """H,W,C image → H,W,K float32: the probability of each class id."""
        return all_probabilities(self._logits(image))

    def _logits(self, image: ArrayLike) -> Logits:
        found = self.predictor.predict_image(_pixels(image))
        if (warning := self.predictor.take_scale_warning()) is not None and not self.has_warned:
            self.has_warned = True
            warnings.warn(warning, stacklevel=3)
        return found

    def __repr__(self) -> str:
        spec = self.card.spec
        return f"LoadedModel({spec.architecture} {spec.encoder}, classes {', '.join(self.classes)}, {self.engine.description})"


def _pixels(image: ArrayLike) -> Pixels:
    """Raises DataError for an image of PIL whose numbers are no brightness: numpy would take them for it."""
    mode = getattr(image, "mode", None)
    if mode is not None and mode not in PIL_MODES:
        raise DataError(f"an image of PIL with mode {mode}, whose numbers are no brightness; give image.convert('RGB')")
    return np.asarray(image)


def load(
    model: str | Path,
    device: str = "auto",
    precision: Literal["auto"] | NumberFormat = "auto",
    raw: bool = False,
    tta: bool = False,
    tile: int | None = None,
) -> LoadedModel:
    """A run (its folder or name: best.pt is taken), a .pt file or an exported .onnx file. `raw`: the weights as trained, not their
    average. `tta`: means over the mirrored and turned images that training had. `tile`: side of the tiles of a model of fit: crop,
    in place of the one that training chose. Raises UserError."""
    engine = load_engine(find_model(model, raw=raw), device, precision, raw)
    return LoadedModel(SymmetricEngine(engine, engine.card.symmetries) if tta else engine, tile)
