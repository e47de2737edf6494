"""Augmentation pipelines, by name or as a list. The one module that imports albumentations. Each sample gets random
states of its own key: a Compose with a seed (2.0.8) correlates its transforms, and forked workers repeat each other."""

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import cv2
import numpy as np

from unet_trainer.config.auto_images import named_augmentation
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.parsers import JITTER_NAME, unknown_transform
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageSpec

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # or the import asks the network for a newer version
import albumentations as A
from albumentations.augmentations.crops.transforms import CropSizeError
from albumentations.core.composition import BaseCompose

GROUPS = ("OneOf", "SomeOf", "Sequential", "RandomOrder")
FLIPS = ("HorizontalFlip", "VerticalFlip")
# They change the dtype or the layout of images: batches keep those of the files, and the device normalises them.
REFUSED = ("Normalize", "ToFloat", "FromFloat", "ToTensorV2", "ToTensor3D", "Lambda", "Compose")
ABSTRACT = ("BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D")
NUM_TRIALS = 8  # a transform of probability p is tried with probability 1 - (1 - p)^8

Transform: TypeAlias = A.BasicTransform | BaseCompose
Jitter = Callable[[Pixels, np.random.Generator], Pixels]


class Strength(NamedTuple):
    """How far brightness and noise (in standard deviations of the data) and contrast vary, and how often."""

    brightness: float
    contrast: float
    noise: float
    p: float


class Augmentation:
    """Applies a pipeline to one pair; the result depends on the pair and the key alone."""

    def __init__(
        self,
        transforms: Sequence[Transform],
        jitter: Jitter | None = None,
        unit_range: tuple[float, float] | None = None,
    ) -> None:
        self.compose = A.Compose(list(transforms), seed=None)
        self.flips = A.Compose([one for one in transforms if type(one).__name__ in FLIPS], seed=None)
        self.jitter = jitter  # brightness, contrast and noise of images that are not 8-bit
        self.unit_range = unit_range  # the range of values that the transforms see as 0 to 1

    def __call__(
        self, image: Pixels, mask: Pixels, key: Sequence[int], is_gentle: bool = False
    ) -> tuple[Pixels, Pixels]:
        """`is_gentle`: its flips alone."""
        generator = np.random.default_rng(key)
        compose = self.flips if is_gentle else self.compose
        compose.set_random_state(generator, random.Random(int(generator.integers(2**63))))
        if is_gentle or self.unit_range is None:
            result = compose(image=image, mask=mask)
        else:
            low, spread = np.float32(self.unit_range[0]), np.float32(self.unit_range[1] - self.unit_range[0])
            result = compose(image=(image - low) / spread, mask=mask)
            result["image"] = result["image"] * spread + low
        image = result["image"] if self.jitter is None or is_gentle else self.jitter(result["image"], generator)
        return image, result["mask"]


def build_augmentation(spec: str | Sequence[Any], size: tuple[int, int], image_spec: ImageSpec) -> Augmentation | None:
    """The pipeline that `augmentation` names or lists, for images of this height and width; None for none. Raises
    ConfigError with every problem. albumentations clips other than uint8 images to 0 to 1: a named pipeline keeps them
    in their units and varies them by their standard deviation; a list sees the range that occurs as 0 to 1."""
    if spec == "none" or len(spec) == 0:
        return None
    if isinstance(spec, str):
        named = named_augmentation(spec, image_spec.channels, image_spec.is_8bit)
        return Augmentation(*_build_all(named, image_spec))
    unit_range = None if image_spec.is_8bit else (image_spec.low, image_spec.high)
    augmentation = Augmentation(*_build_all(spec, image_spec), unit_range)
    _try_out(augmentation, size, image_spec)
    return augmentation


def check_parameters(spec: str | Sequence[Any]) -> None:
    """Raises ConfigError for a list with a transform that cannot be made; before the data are read."""
    if not isinstance(spec, str):
        _build_all(spec, None)


def _build_all(entries: Sequence[Any], image_spec: ImageSpec | None) -> tuple[list[Transform], Jitter | None]:
    """Transforms and jitter; the latter is left out while the images are not known. Raises ConfigError."""
    problems, transforms, jitter = list[str](), list[Transform](), None
    for entry in entries:
        if not (isinstance(entry, dict) and JITTER_NAME in entry):
            transform = _build_transform(entry, problems)
            transforms += [] if transform is None else [transform]
        elif image_spec is not None:
            jitter = _build_jitter(entry[JITTER_NAME], image_spec, problems)
    if problems:
        raise ConfigError("\n  ".join(f"augmentation: {problem}" for problem in problems))
    return transforms, jitter


def _build_jitter(parameters: Any, image_spec: ImageSpec, problems: list[str]) -> Jitter | None:
    """Of a list's own entry for images that are not 8-bit; adds what is wrong to `problems`."""
    if image_spec.is_8bit:
        problems.append(f"{JITTER_NAME} is for images that are not 8-bit; RandomBrightnessContrast is for these")
    with contextlib.suppress(TypeError):
        strength = Strength(**parameters)
        if all(type(value) in (int, float) and value >= 0 for value in strength):
            return partial(_jitter, strength=strength, spec=image_spec)
    problems.append(f"{JITTER_NAME}: need {', '.join(Strength._fields)}, each a number of at least 0")
    return None


def _jitter(image: Pixels, generator: np.random.Generator, strength: Strength, spec: ImageSpec) -> Pixels:
    if generator.random() >= strength.p:
        return image
    middle, spread = np.asarray(spec.mean, np.float32), np.asarray(spec.std, np.float32)
    gain = np.float32(1 + generator.uniform(-strength.contrast, strength.contrast))
    shift = np.float32(generator.uniform(-strength.brightness, strength.brightness))
    image = (image - middle) * gain + middle + shift * spread
    if strength.noise:
        amount = np.float32(generator.uniform(0, strength.noise))
        image = image + generator.standard_normal(image.shape, np.float32) * amount * spread
    return image


def _build_transform(item: Any, problems: list[str]) -> Transform | None:
    """One entry, `Name` or `{Name: {parameter: value}}`; None if it is wrong, which is added to `problems`."""
    name, parameters = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        problems.append(f"got {item!r}; need Name or {{Name: {{parameter: value}}}}")
        return None
    parameters = dict(parameters or {})
    if name in REFUSED:
        problems.append(f"{name} cannot be used: batches keep the dtype of the files, and the device normalises them")
        return None
    types = {word: value for word, value in vars(A).items() if isinstance(value, type)}
    of_library = {word for word, value in types.items() if issubclass(value, A.BasicTransform)}
    known = [*GROUPS, *sorted(of_library - set(ABSTRACT))]
    if name not in known:
        problems.append(unknown_transform(name, known))
        return None
    if name in GROUPS:
        inner = parameters.pop("transforms", None)
        if not isinstance(inner, list) or not inner:
            problems.append(f"{name} needs transforms: a list")
            return None
        parameters["transforms"] = [_build_transform(entry, problems) for entry in inner]
        if None in parameters["transforms"]:
            return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # albumentations only warns about an unknown parameter
            return getattr(A, name)(**parameters)
    except (UserWarning, ValueError, TypeError) as error:
        problems.append(f"{name}: {' '.join(str(error).split())[:200]}")
        return None


def _try_out(augmentation: Augmentation, size: tuple[int, int], image_spec: ImageSpec) -> None:
    """Runs the pipeline on a synthetic pair, so that one that cannot work is an error before the first step."""
    height, width = size
    noise = np.random.default_rng(0).integers(0, 256, (height, width, image_spec.channels), np.uint8)
    if not image_spec.is_8bit:
        noise = np.float32(image_spec.low) + noise / np.float32(255) * np.float32(image_spec.high - image_spec.low)
    square = np.zeros((height, width), np.uint8)
    square[height // 4 : height // 2, width // 4 : width // 2] = 1
    for trial in range(NUM_TRIALS):
        try:
            image, mask = augmentation(noise, square, (0, trial))
        except (ValueError, TypeError, KeyError, cv2.error, CropSizeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"augmentation: the pipeline fails on a {width}×{height} image: {reason}") from None
        kind = image.dtype, mask.dtype, image.ndim, image.shape[-1]
        if kind != (noise.dtype, np.uint8, 3, image_spec.channels):
            got = f"augmentation: the pipeline returns {image.dtype} {image.shape}"
            raise ConfigError(f"{got}; need {noise.dtype} images as they came in")
