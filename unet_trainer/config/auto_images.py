"""What the model sees of an image and how it is varied: rules from measurements to `fit`, `image_size`,
`augmentation` and `normalize`. Pure functions, each with a value and its reason; docs/quality.md has their figures.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from unet_trainer.config.facts import Measurements

Size = tuple[int, int]  # height, width

DIFFERENT_IMAGES = 0.33  # share of the pixels' variance between images: light, stain or exposure hides what is in them
WHOLE_IMAGE_STRUCTURE = 0.2  # structures of at least this share of the image's side need the whole image as context
MOST_OF_IMAGE = 0.6  # share of the median image: a crop of so much is no better than the whole
SMALL_SHARE = 0.9  # of the images, no larger than GPU_AREA: the whole image instead of a crop that is most of it
VANISHING = 2.0  # pixels: structures thinner than this in the largest resized image need native resolution
MIN_THICKNESS = 4.0  # pixels: thinner structures are lost in the decoder
GPU_AREA, CPU_AREA, MAX_AREA = 512**2, 256**2, 1024**2  # of an image that is resized; most: where structures are thin
SHORT_AREA, SHORT_BUDGET = 160**2, 1800.0  # on a CPU in fewer seconds: more images taught more than finer ones
GPU_CROPS, CPU_CROPS = (256, 512), (128, 256)  # smallest and largest side of a crop
CROP_STRUCTURES = 8  # a crop is as wide as so many structures
MIN_SIDE, MAX_SIDE, STRIDE = 64, 8192, 32
UPRIGHT_TURN = 5  # degrees
HORIZONTAL_FLIP, VERTICAL_FLIP = {"HorizontalFlip": {"p": 0.5}}, {"VerticalFlip": {"p": 0.5}}
REFLECT = {"border_mode": 4}  # OpenCV's BORDER_REFLECT_101
# Of images that are not 8-bit, in units of the data's standard deviation: albumentations would take them for 0 to 1.
INTENSITY_JITTER = {
    "default": {"IntensityJitter": {"brightness": 0.5, "contrast": 0.2, "noise": 0.0, "p": 0.5}},
    "strong": {"IntensityJitter": {"brightness": 0.8, "contrast": 0.3, "noise": 0.25, "p": 0.6}},
}


def choose_normalize(brightness_share: float) -> tuple[str, str]:
    where = f"{brightness_share:.0%} of the variance of pixels lies between images"
    return "image" if brightness_share > DIFFERENT_IMAGES else "dataset", where


def choose_fit(measured: Measurements | None, sizes: Sequence[Size], are_blocks: bool = False) -> tuple[str, str]:
    if are_blocks:
        return "crop", "blocks of a larger image, which predict takes in tiles at native resolution"
    if measured is None or measured.relative_structure == 0:
        return "resize", "no structure was measured"
    areas = sorted(height * width for height, width in sizes)
    if 0 < measured.thickness * min(1.0, math.sqrt(MAX_AREA / median(areas))) < VANISHING:
        return "crop", f"structures {measured.thickness:.0f} pixels thin would vanish in a smaller image"
    share = f"structures are {measured.relative_structure:.0%} of the image's side"
    side = _crop_side(measured.structure, sizes, on_cpu=False)  # what is seen best follows from the data alone
    are_small = areas[int(SMALL_SHARE * (len(areas) - 1))] <= GPU_AREA
    crop_is_most = are_small and side**2 >= MOST_OF_IMAGE * median(areas)
    if measured.relative_structure >= WHOLE_IMAGE_STRUCTURE or crop_is_most:
        return "resize", f"{share}{', and a crop would be most of it' * crop_is_most}: the model sees the whole image"
    return "crop", f"{share}: crops at native resolution keep them"


def choose_image_size(
    fit: str, sizes: Sequence[Size], measured: Measurements | None, on_cpu: bool, budget: float | None = None
) -> tuple[int | Size, str]:
    height, width = (int(median(size[axis] for size in sizes)) for axis in (0, 1))
    structure, thickness = (0.0, 0.0) if measured is None else (measured.structure, measured.thickness)
    reason = f"images of {width}×{height}"
    if fit == "crop":
        return _crop_side(structure, sizes, on_cpu), f"structures of {structure:.0f} pixels in {reason}"
    is_short = budget is not None and budget < SHORT_BUDGET
    area = GPU_AREA if not on_cpu else SHORT_AREA if is_short else CPU_AREA
    scale = min(1.0, math.sqrt(area / (height * width)))
    if 0 < thickness * scale < MIN_THICKNESS and scale < 1:
        wanted = min(1.0, MIN_THICKNESS / thickness, math.sqrt(MAX_AREA / (height * width)))
        scale = max(scale, min(wanted, 2 * scale) if on_cpu else wanted)
        reason += f", structures {thickness:.0f} pixels thin"
    if scale == 1 and len(set(sizes)) == 1 and min(height, width) >= MIN_SIDE and max(height, width) <= MAX_SIDE:
        return (height, width), "the size of all images"
    height, width = (min(max(MIN_SIDE, _rounded(side * scale)), MAX_SIDE) for side in (height, width))
    return (height, width), reason


def _crop_side(structure: float, sizes: Sequence[Size], on_cpu: bool) -> int:
    low, high = CPU_CROPS if on_cpu else GPU_CROPS
    least = min(int(median(size[axis] for size in sizes)) for axis in (0, 1))
    return max(MIN_SIDE, min(_rounded(min(max(CROP_STRUCTURES * structure, low), high)), least // STRIDE * STRIDE))


def _rounded(side: float) -> int:
    return max(1, round(side / STRIDE)) * STRIDE


def choose_augmentation(
    measured: Measurements, fit: str, channels: int, is_8bit: bool = True, normalize: str = "dataset"
) -> tuple[tuple[Any, ...], str]:
    in_views = fit == "crop"
    is_upright = not measured.keeps_labels("vertical_flip", in_views)
    is_turned = measured.keeps_labels("quarter_turn", in_views)
    degrees = UPRIGHT_TURN if is_upright else 180 if is_turned else 15
    scale = [0.7, 1.6] if measured.size_spread >= 2.5 else [0.8, 1.25]  # further where objects differ in size
    transforms = [] if measured.has_sides else [HORIZONTAL_FLIP]
    transforms += [] if is_upright else [VERTICAL_FLIP]
    transforms += [{"RandomRotate90": {"p": 0.5}}] if is_turned and not is_upright else []
    transforms.append(_affine(scale, 0.1, degrees, p=0.9))
    if normalize == "dataset":  # else brightness and contrast are taken away again, and what was clipped stays lost
        # At most so far that the mean stays below white, if brightness and contrast grow together.
        room = (1 / max(measured.brightness, 0.1) - 1) / 2
        light = round(min(max(2 * measured.brightness_spread, 0.1), 0.3, room), 2)
        transforms.append(_change_light(light, p=0.6) if is_8bit else INTENSITY_JITTER["default"])
    if channels == 3 and measured.has_colour and is_8bit:
        transforms.append(_change_colour(10, 30, p=0.5))
    up = "have an up" if is_upright else "are flipped upside down too"
    up += f" ({measured.share_told('vertical_flip', in_views):.0%} are recognised against their mirror image)"
    flip = "left and right are different classes" if measured.has_sides else "mirrored left to right"
    spread = f"object sizes differ by a factor of {measured.size_spread:.1f}, brightness by"
    reason = f"{'crops' if in_views else 'images'} {up}; {flip}; {spread} {measured.brightness_spread:.0%}"
    return tuple(transforms), reason


def named_augmentation(name: str, channels: int, is_8bit: bool) -> tuple[Any, ...]:
    """`default` and `strong`: flips, geometry, then light and colour."""
    if name == "default":
        transforms = [_affine([0.8, 1.25], 0.1, 30, p=0.7)]
        colour = [_change_light(0.2, p=0.5)]
    else:
        elastic = {"ElasticTransform": {"alpha": 40, "sigma": 6, "p": 0.2, **REFLECT}}
        transforms = [_affine([0.6, 1.6], 0.15, 90, p=0.8, shear=[-8, 8]), elastic]
        colour = [
            _change_light(0.3, p=0.6),
            *([_change_colour(12, 25, p=0.4)] if channels == 3 else []),
            {"RandomGamma": {"gamma_limit": [70, 140], "p": 0.3}},
            {"GaussNoise": {"std_range": [0.01, 0.06], "p": 0.25}},
            {"GaussianBlur": {"blur_limit": [3, 5], "p": 0.15}},
        ]
    return (HORIZONTAL_FLIP, VERTICAL_FLIP, *transforms, *(colour if is_8bit else [INTENSITY_JITTER[name]]))


def _affine(scale: list[float], shift: float, degrees: float, p: float, **more: Any) -> dict[str, Any]:
    moved = {"scale": scale, "translate_percent": [-shift, shift], "rotate": [-degrees, degrees]}
    return {"Affine": {**moved, **more, "p": p, **REFLECT}}


def _change_light(limit: float, p: float) -> dict[str, Any]:
    # by a share of the image's mean: by a share of 255 (as by val_shift_limit) a dark image would become black
    limits = {"brightness_limit": limit, "contrast_limit": limit, "brightness_by_max": False}
    return {"RandomBrightnessContrast": {**limits, "p": p}}


def _change_colour(hue: int, saturation: int, p: float) -> dict[str, Any]:
    return {"HueSaturationValue": {"hue_shift_limit": hue, "sat_shift_limit": saturation, "val_shift_limit": 0, "p": p}}
