"""What the model gets to see: fit, image_size, crops and augmentation, each decided from what was measured in the data.

Pure functions from facts to a value and its reason. The figures behind the constants are in docs/quality.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from unet_trainer.config.facts import TOLD_SHARE, Measurements

Fit = Literal["resize", "crop"]
Size = tuple[int, int]  # height, width

WHOLE_IMAGE_STRUCTURE = 0.2  # structures of at least this share of the image's side need the whole image as context
VANISHING = 2.0  # pixels: structures thinner than this in the largest resized image need native resolution
MIN_THICKNESS = 4.0  # pixels: thinner structures are lost in the decoder
GPU_AREA, CPU_AREA = 512**2, 256**2  # of an image that is resized
MAX_AREA = 1024**2  # where thin structures need more
GPU_CROPS, CPU_CROPS = (256, 512), (128, 256)  # smallest and largest side of a crop
CROP_STRUCTURES = 8  # a crop is as wide as so many structures
MIN_SIDE, MAX_SIDE = 64, 8192
STRIDE = 32
MAX_CROPS = 16  # of an image in an epoch
WIDE_SPREAD = 2.5  # objects whose sizes differ by more than this factor are scaled further
UPRIGHT_TURN = 5  # degrees
BORDER_REFLECT_101 = 4  # OpenCV's code
# Of images that are not 8-bit, in units of the data's standard deviation: albumentations would take them for 0 to 1.
INTENSITY_JITTER = {
    "default": {"IntensityJitter": {"brightness": 0.5, "contrast": 0.2, "noise": 0.0, "p": 0.5}},
    "strong": {"IntensityJitter": {"brightness": 0.8, "contrast": 0.3, "noise": 0.25, "p": 0.6}},
}


def choose_fit(measured: Measurements, sizes: Sequence[Size]) -> tuple[Fit, str]:
    if measured.relative_structure == 0:
        return "resize", "the masks that were measured hold one class only"
    thinnest = measured.thickness * min(1.0, math.sqrt(MAX_AREA / median(height * width for height, width in sizes)))
    if 0 < thinnest < VANISHING:
        return "crop", f"structures {measured.thickness:.0f} pixels thin would vanish in a smaller image"
    share = f"structures are {measured.relative_structure:.0%} of the image's side"
    if measured.relative_structure >= WHOLE_IMAGE_STRUCTURE:
        return "resize", f"{share}: the model sees the whole image"
    return "crop", f"{share}: crops at native resolution keep them"


def choose_image_size(
    fit: Fit, sizes: Sequence[Size], measured: Measurements | None, on_cpu: bool
) -> tuple[int | tuple[int, int], str]:
    height, width = (int(median(size[axis] for size in sizes)) for axis in (0, 1))
    if fit == "crop":
        structure = 0.0 if measured is None else measured.structure
        low, high = CPU_CROPS if on_cpu else GPU_CROPS
        wanted = min(max(CROP_STRUCTURES * structure, low), high)
        side = max(MIN_SIDE, min(_rounded(wanted), min(height, width) // STRIDE * STRIDE))
        return side, f"structures of {structure:.0f} pixels in images of {width}×{height}"
    area = CPU_AREA if on_cpu else GPU_AREA
    scale = min(1.0, math.sqrt(area / (height * width)))
    thickness = 0.0 if measured is None else measured.thickness
    reason = f"images of {width}×{height}"
    if 0 < thickness * scale < MIN_THICKNESS and scale < 1:
        wanted_scale = min(1.0, MIN_THICKNESS / thickness, math.sqrt(MAX_AREA / (height * width)))
        scale = max(scale, wanted_scale if not on_cpu else min(wanted_scale, 2 * scale))
        reason += f", structures {thickness:.0f} pixels thin"
    if scale == 1 and len(set(sizes)) == 1 and min(height, width) >= MIN_SIDE and max(height, width) <= MAX_SIDE:
        return (height, width), "the size of all images"
    shape = tuple(min(max(MIN_SIDE, _rounded(side * scale)), MAX_SIDE) for side in (height, width))
    return (shape[0], shape[1]), reason


def _rounded(side: float) -> int:
    return max(1, round(side / STRIDE)) * STRIDE


def choose_crops_per_image(image_sizes: Sequence[Size], size: Size) -> int:
    """As many crops as fit side by side into an image of median area."""
    area = median(height * width for height, width in image_sizes)
    return int(min(max(1, round(area / (size[0] * size[1]))), MAX_CROPS))


def count_tiles(length: int, tile: int) -> int:
    """Tiles along an axis that overlap by a quarter at least."""
    return 1 if length <= tile else 1 + math.ceil((length - tile) / (tile * 0.75))


def choose_augmentation(measured: Measurements, fit: Fit, channels: int, is_8bit: bool = True) -> tuple[tuple[Any, ...], str]:
    """A list of albumentations transforms, and what was found in the data."""
    in_views = fit == "crop"
    is_upright = not measured.keeps_labels("vertical_flip", in_views)
    is_turned = measured.keeps_labels("quarter_turn", in_views)
    transforms: list[Any] = []
    if not measured.has_sides:
        transforms.append({"HorizontalFlip": {"p": 0.5}})
    if not is_upright:
        transforms.append({"VerticalFlip": {"p": 0.5}})
        if is_turned:
            transforms.append({"RandomRotate90": {"p": 0.5}})
    degrees = UPRIGHT_TURN if is_upright else 180 if is_turned else 15
    scale = [0.7, 1.6] if measured.size_spread >= WIDE_SPREAD else [0.8, 1.25]
    affine = {"scale": scale, "translate_percent": [-0.1, 0.1], "rotate": [-degrees, degrees], "p": 0.9}
    transforms.append({"Affine": {**affine, "border_mode": BORDER_REFLECT_101}})
    if not is_8bit:
        return (*transforms, INTENSITY_JITTER["default"]), describe_symmetry(measured, fit)
    light = round(min(max(2 * measured.brightness_spread, 0.1), 0.3), 2)
    transforms.append({"RandomBrightnessContrast": {"brightness_limit": light, "contrast_limit": light, "p": 0.6}})
    if channels == 3 and measured.has_colour:
        transforms.append({"HueSaturationValue": {"hue_shift_limit": 10, "sat_shift_limit": 30, "val_shift_limit": 10, "p": 0.5}})
    return tuple(transforms), describe_symmetry(measured, fit)


def describe_symmetry(measured: Measurements, fit: Fit) -> str:
    in_views = fit == "crop"
    seen = "crops" if in_views else "images"
    share = measured.share_told("vertical_flip", in_views)
    up = f"{seen} have an up ({share:.0%} are told from their vertical mirror image)"
    if not measured.is_significant("vertical_flip", in_views) and share >= TOLD_SHARE:
        up = f"too few {seen} to tell whether they have an up"
    elif measured.keeps_labels("vertical_flip", in_views):
        turns = "and turned" if measured.keeps_labels("quarter_turn", in_views) else "but not turned"
        up = f"{seen} look alike upside down ({share:.0%} are told apart, as by chance) {turns}"
    sides = "left and right are different classes: no horizontal flip" if measured.has_sides else "mirrored left to right"
    spread = f"object sizes differ by a factor of {measured.size_spread:.1f}, brightness by {measured.brightness_spread:.0%}"
    return f"{up}; {sides}; {spread}"


def named_augmentation(name: str, channels: int, is_upright: bool) -> tuple[list[Any], list[Any]]:
    """`default` and `strong`: transforms of geometry, and of light and colour. Images with an up are not turned upside down."""
    flips = [{"HorizontalFlip": {"p": 0.5}}, *([] if is_upright else [{"VerticalFlip": {"p": 0.5}}])]
    reflect = {"border_mode": BORDER_REFLECT_101}
    if name == "default":
        turn = UPRIGHT_TURN if is_upright else 30
        affine = {"scale": [0.8, 1.25], "translate_percent": [-0.1, 0.1], "rotate": [-turn, turn], "p": 0.7, **reflect}
        return [*flips, {"Affine": affine}], [
            {"RandomBrightnessContrast": {"brightness_limit": 0.2, "contrast_limit": 0.2, "p": 0.5}}
        ]
    turn = 2 * UPRIGHT_TURN if is_upright else 90
    affine = {
        "scale": [0.6, 1.6],
        "translate_percent": [-0.15, 0.15],
        "rotate": [-turn, turn],
        "shear": [-8, 8],
        "p": 0.8,
        **reflect,
    }
    hue = {"HueSaturationValue": {"hue_shift_limit": 12, "sat_shift_limit": 25, "val_shift_limit": 15, "p": 0.4}}
    return [*flips, {"Affine": affine}, {"ElasticTransform": {"alpha": 40, "sigma": 6, "p": 0.2, **reflect}}], [
        {"RandomBrightnessContrast": {"brightness_limit": 0.3, "contrast_limit": 0.3, "p": 0.6}},
        *([hue] if channels == 3 else []),
        {"RandomGamma": {"gamma_limit": [70, 140], "p": 0.3}},
        {"GaussNoise": {"std_range": [0.01, 0.06], "p": 0.25}},
        {"GaussianBlur": {"blur_limit": [3, 5], "p": 0.15}},
    ]
