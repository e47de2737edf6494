"""What the model gets to see and how it is trained: each setting that is left open, decided from what was measured in
the data, the hardware, the cost of a step and a budget of time.

Pure functions from facts to a value and its reason. The figures behind the constants are in docs/quality.md.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from unet_trainer.config.facts import HardwareFacts, Measurements, StepCost

NumberFormat = Literal["float32", "bfloat16", "float16"]
Fit = Literal["resize", "crop"]
Cache = Literal["none", "ram", "disk"]
Size = tuple[int, int]  # height, width

DIFFERENT_IMAGES = 0.33  # share of the pixels' variance between images: light, stain or exposure hides what is in them
WHOLE_IMAGE_STRUCTURE = 0.2  # structures of at least this share of the image's side need the whole image as context
MOST_OF_IMAGE = 0.6  # share of the median image: a crop of so much is no better than the whole (docs/quality.md)
SMALL_SHARE = 0.9  # of the images, no larger than GPU_AREA: the whole image instead of a crop that is most of it
VANISHING = 2.0  # pixels: structures thinner than this in the largest resized image need native resolution
MIN_THICKNESS = 4.0  # pixels: thinner structures are lost in the decoder
GPU_AREA, CPU_AREA = 512**2, 256**2  # of an image that is resized
SHORT_AREA, SHORT_BUDGET = 160**2, 1800.0  # on a CPU in fewer seconds: more images taught more than finer ones
MAX_AREA = 1024**2  # where thin structures need more
GPU_CROPS, CPU_CROPS = (256, 512), (128, 256)  # smallest and largest side of a crop
CROP_STRUCTURES = 8  # a crop is as wide as so many structures
MIN_SIDE, MAX_SIDE, STRIDE = 64, 8192, 32
MAX_CROPS = 16  # of an image in an epoch
WIDE_SPREAD = 2.5  # objects whose sizes differ by more than this factor are scaled further
UPRIGHT_TURN = 5  # degrees
HORIZONTAL_FLIP, VERTICAL_FLIP = {"HorizontalFlip": {"p": 0.5}}, {"VerticalFlip": {"p": 0.5}}
REFLECT = {"border_mode": 4}  # OpenCV's BORDER_REFLECT_101
# Of images that are not 8-bit, in units of the data's standard deviation: albumentations would take them for 0 to 1.
INTENSITY_JITTER = {
    "default": {"IntensityJitter": {"brightness": 0.5, "contrast": 0.2, "noise": 0.0, "p": 0.5}},
    "strong": {"IntensityJitter": {"brightness": 0.8, "contrast": 0.3, "noise": 0.25, "p": 0.6}},
}
CLASS_BALANCE = 0.25  # power of a class's rarity
RARE_CLASS = 0.001  # share of the pixels; classes that are less rare gain nothing by weights
MAX_CLASS_WEIGHT = 2.5  # relative to the median class, its inverse the least: beyond, a few pixels would dominate
MAX_CPU_WORKERS, MAX_GPU_WORKERS = 4, 16
REFERENCE_BATCH = 16  # that the learning rate and the number of steps were found at
NUM_VIEWS = 96_000  # augmented images that a model sees in training: 6,000 steps of the reference batch
MIN_PASSES = 40  # over a large dataset
MAX_VIEWS = 4_000_000
NUM_EPOCHS = 100  # validations of a run, about
VALIDATION_SHARE = 0.1  # of the time, about
SPARE_STEPS = 1.5  # of a single epoch that the time will end: the machine may become faster than in the trial
MIN_STEPS_PER_EPOCH = 10
MIN_VALIDATIONS = 8  # of a run, unless they exceed their share of the time: with fewer, best.pt is no choice
MIN_PART = 0.2  # of an epoch, that is worth a validation
SHORT_SECONDS = 30.0  # of training: in less, epochs of fewer steps than MIN_STEPS_PER_EPOCH are not worth their ends
CPU_BUDGET = 3600.0  # seconds, where none is set
GPU_ENCODER = "resnet34"
# Encoders for CPUs and small budgets, the best first, each with the widths of its decoder (None: the default's).
CPU_ENCODERS: Sequence[tuple[str, tuple[int, ...] | None]] = (
    ("resnet34", None),
    ("resnet18", (128, 64, 48, 32, 16)),
    ("tu-mobilenetv3_small_100", (96, 48, 32, 24, 16)),
    ("tu-mobilenetv3_small_050", (64, 32, 16, 16, 8)),
)
# Of random weights a plain residual network learns more in a short time than a mobile one (docs/quality.md).
CPU_ENCODERS_FROM_NOTHING = (*CPU_ENCODERS[:2], ("small_resnet", (64, 32, 16, 16, 8)))
WANTED_VIEWS = 12_000  # with fewer in the budget, a smaller encoder learns more
COMPILE_SECONDS = 60.0  # of compiling a step on a GPU
COMPILE_GAIN = 0.5  # share of a step's time that compiling saves
MEMORY_SHARE = 0.9  # of the free memory that a step may take
CACHE_SHARE = 0.25  # of the free host memory, or disk, that decoded images may take
MAX_DISK_BYTES = 2**36  # of the disk without being asked
MAX_PILOTS = 3  # learning rates that are tried, see training.pilots
PILOT_SHARE = 0.15  # of the run's steps, that all of them together may take
MIN_PILOT_STEPS, MAX_PILOT_STEPS = 100, 300  # of each
CUTMIX_SHARE, CUTMIX_PASSES = 0.5, 100  # of the images; with fewer passes it changed nothing
AUGMENTED_PASSES = 20  # after 1 to 4, flips alone were better, after 180 all of it; not measured in between
WARMUP_SHARE = 0.03  # of the epochs
EMA_WINDOWS = 10  # the average spans a tenth of the run
PATIENCE_SHARE, MIN_PATIENCE = 0.3, 5  # of the epochs, and epochs


def choose_normalize(brightness_share: float) -> tuple[Literal["dataset", "image"], str]:
    where = f"{brightness_share:.0%} of the variance of pixels lies between images"
    return "image" if brightness_share > DIFFERENT_IMAGES else "dataset", where


def choose_fit(measured: Measurements | None, sizes: Sequence[Size], are_blocks: bool = False) -> tuple[Fit, str]:
    if are_blocks:
        return "crop", "blocks of a larger image, which predict takes in tiles at native resolution"
    if measured is None or measured.relative_structure == 0:
        return "resize", "no structure was measured"
    areas = sorted(height * width for height, width in sizes)
    if 0 < measured.thickness * min(1.0, math.sqrt(MAX_AREA / median(areas))) < VANISHING:
        return "crop", f"structures {measured.thickness:.0f} pixels thin would vanish in a smaller image"
    share = f"structures are {measured.relative_structure:.0%} of the image's side"
    side, _ = choose_image_size("crop", sizes, measured, on_cpu=False)  # what is seen best follows from the data alone
    is_small = areas[int(SMALL_SHARE * (len(areas) - 1))] <= GPU_AREA
    crop_is_most = is_small and isinstance(side, int) and side**2 >= MOST_OF_IMAGE * median(areas)
    if measured.relative_structure >= WHOLE_IMAGE_STRUCTURE or crop_is_most:
        return "resize", f"{share}{', and a crop would be most of it' * crop_is_most}: the model sees the whole image"
    return "crop", f"{share}: crops at native resolution keep them"


def choose_image_size(
    fit: Fit, sizes: Sequence[Size], measured: Measurements | None, on_cpu: bool, budget: float | None = None
) -> tuple[int | tuple[int, int], str]:
    height, width = (int(median(size[axis] for size in sizes)) for axis in (0, 1))
    if fit == "crop":
        structure = 0.0 if measured is None else measured.structure
        low, high = CPU_CROPS if on_cpu else GPU_CROPS
        wanted = _rounded(min(max(CROP_STRUCTURES * structure, low), high))
        side = max(MIN_SIDE, min(wanted, min(height, width) // STRIDE * STRIDE))
        return side, f"structures of {structure:.0f} pixels in images of {width}×{height}"
    is_short = budget is not None and budget < SHORT_BUDGET
    area = GPU_AREA if not on_cpu else SHORT_AREA if is_short else CPU_AREA
    scale = min(1.0, math.sqrt(area / (height * width)))
    thickness = 0.0 if measured is None else measured.thickness
    reason = f"images of {width}×{height}"
    if 0 < thickness * scale < MIN_THICKNESS and scale < 1:
        wanted_scale = min(1.0, MIN_THICKNESS / thickness, math.sqrt(MAX_AREA / (height * width)))
        scale = max(scale, wanted_scale if not on_cpu else min(wanted_scale, 2 * scale))
        reason += f", structures {thickness:.0f} pixels thin"
    if scale == 1 and len(set(sizes)) == 1 and min(height, width) >= MIN_SIDE and max(height, width) <= MAX_SIDE:
        return (height, width), "the size of all images"
    height, width = (min(max(MIN_SIDE, _rounded(side * scale)), MAX_SIDE) for side in (height, width))
    return (height, width), reason


def _rounded(side: float) -> int:
    return max(1, round(side / STRIDE)) * STRIDE


def choose_crops_per_image(fit: Fit, image_sizes: Sequence[Size], size: Size) -> tuple[int, str]:
    if fit == "resize":
        return 1, "not with fit: resize"
    area = median(height * width for height, width in image_sizes)
    crops = min(max(1, round(area / (size[0] * size[1]))), MAX_CROPS)
    return crops, f"as many as fit side by side into an image of median area, at most {MAX_CROPS}"


def count_tiles(length: int, tile: int) -> int:
    """Tiles along an axis that overlap by a quarter at least."""
    return 1 if length <= tile else 1 + math.ceil((length - tile) / (tile * 0.75))


def choose_augmentation(
    measured: Measurements, fit: Fit, channels: int, is_8bit: bool = True, normalize: str = "dataset"
) -> tuple[tuple[Any, ...], str]:
    """A list of albumentations transforms, and what was found in the data."""
    is_upright = not measured.keeps_labels("vertical_flip", fit == "crop")
    is_turned = measured.keeps_labels("quarter_turn", fit == "crop")
    degrees = UPRIGHT_TURN if is_upright else 180 if is_turned else 15
    scale = [0.7, 1.6] if measured.size_spread >= WIDE_SPREAD else [0.8, 1.25]
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
    return tuple(transforms), describe_symmetry(measured, fit)


def _affine(scale: list[float], shift: float, degrees: float, p: float, **more: Any) -> dict[str, Any]:
    moved = {"scale": scale, "translate_percent": [-shift, shift], "rotate": [-degrees, degrees]}
    return {"Affine": {**moved, **more, "p": p, **REFLECT}}


def _change_light(limit: float, p: float) -> dict[str, Any]:
    """Brightness by a share of the image's mean: by a share of 255 (as by val_shift_limit) a dark image would become
    black."""
    limits = {"brightness_limit": limit, "contrast_limit": limit, "brightness_by_max": False}
    return {"RandomBrightnessContrast": {**limits, "p": p}}


def _change_colour(hue: int, saturation: int, p: float) -> dict[str, Any]:
    limits = {"hue_shift_limit": hue, "sat_shift_limit": saturation, "val_shift_limit": 0}
    return {"HueSaturationValue": {**limits, "p": p}}


def describe_symmetry(measured: Measurements, fit: Fit) -> str:
    in_views = fit == "crop"
    up = "are flipped upside down too" if measured.keeps_labels("vertical_flip", in_views) else "have an up"
    up += f" ({measured.share_told('vertical_flip', in_views):.0%} are recognised against their mirror image)"
    flip = "left and right are different classes" if measured.has_sides else "mirrored left to right"
    spread = f"object sizes differ by a factor of {measured.size_spread:.1f}, brightness by"
    return f"{'crops' if in_views else 'images'} {up}; {flip}; {spread} {measured.brightness_spread:.0%}"


def named_augmentation(name: str, channels: int, is_8bit: bool, is_upright: bool) -> tuple[Any, ...]:
    """`default` and `strong`: transforms of geometry, then of light and colour. Images with an up are not turned upside
    down."""
    if name == "default":
        geometry = [_affine([0.8, 1.25], 0.1, UPRIGHT_TURN if is_upright else 30, p=0.7)]
        colour = [_change_light(0.2, p=0.5)]
    else:
        elastic = {"ElasticTransform": {"alpha": 40, "sigma": 6, "p": 0.2, **REFLECT}}
        geometry = [_affine([0.6, 1.6], 0.15, 2 * UPRIGHT_TURN if is_upright else 90, p=0.8, shear=[-8, 8]), elastic]
        colour = [
            _change_light(0.3, p=0.6),
            *([_change_colour(12, 25, p=0.4)] if channels == 3 else []),
            {"RandomGamma": {"gamma_limit": [70, 140], "p": 0.3}},
            {"GaussNoise": {"std_range": [0.01, 0.06], "p": 0.25}},
            {"GaussianBlur": {"blur_limit": [3, 5], "p": 0.15}},
        ]
    flips = [HORIZONTAL_FLIP, *([] if is_upright else [VERTICAL_FLIP])]
    return (*flips, *geometry, *(colour if is_8bit else [INTENSITY_JITTER[name]]))


def choose_number_format(amp_dtype: NumberFormat, hardware: HardwareFacts) -> tuple[NumberFormat, str]:
    """The format of mixed precision: what was asked for if the hardware has it, else the next best; and why."""
    if hardware.has_bfloat16 if amp_dtype == "bfloat16" else hardware.has_float16:
        return amp_dtype, f"{hardware.name} computes in it"
    found: NumberFormat = "float16" if hardware.has_float16 else "float32"
    needs = ", which needs Ampere or newer" if amp_dtype == "bfloat16" and hardware.kind == "cuda" else ""
    return found, f"{hardware.name} has no fast {amp_dtype}{needs}; {found} instead"


def choose_use_amp(hardware: HardwareFacts) -> tuple[bool, str]:
    if hardware.kind == "cuda" and (hardware.has_bfloat16 or hardware.has_float16):
        return True, f"{hardware.name} computes 16-bit numbers faster, in half the memory"
    return False, "float32 is the fastest on most CPUs" if hardware.kind == "cpu" else f"no gain on {hardware.name}"


def choose_num_workers(num_cores: int, on_cpu: bool, num_processes: int = 1) -> int:
    """All cores but one beside a GPU; half of them where the model itself needs the cores. Of each process, times their
    number."""
    own = max(1, num_cores // num_processes)
    return num_processes * (min(own // 2, MAX_CPU_WORKERS) if on_cpu else max(1, min(own - 1, MAX_GPU_WORKERS)))


def choose_class_weights(class_shares: Sequence[float], num_classes: int) -> tuple[tuple[float, ...] | None, str]:
    """None, or, where a class is very rare, the fourth root of (median share / share) of each; 1 for a class that does
    not occur.

    Full balance (the ratio itself) costs more of the common classes than it gives the rare ones.
    """
    if num_classes == 1:
        return None, "one class: the overlap loss counts its pixels alone"
    present = [share for share in class_shares if share > 0]
    if min(present, default=1.0) >= RARE_CLASS:
        return None, f"no class has less than {RARE_CLASS:.1%} of the pixels, and the overlap loss weighs classes alike"
    rarities = [median(present) / share if share > 0 else 1.0 for share in class_shares]
    weights = (min(max(rarity**CLASS_BALANCE, 1 / MAX_CLASS_WEIGHT), MAX_CLASS_WEIGHT) for rarity in rarities)
    return tuple(round(weight, 3) for weight in weights), "rare classes weigh more, by the fourth root of their rarity"


def choose_cutmix(num_passes: float, is_augmented: bool, normalize: str) -> tuple[float, str]:
    """For images that come often enough to be learned by heart."""
    if not is_augmented:
        return 0.0, "augmentation is set"
    if normalize == "image":
        return 0.0, "a piece of a brighter image would change how the whole is normalised"
    return CUTMIX_SHARE if num_passes >= CUTMIX_PASSES else 0.0, f"images come {num_passes:,.0f} times"


class StepPlan(NamedTuple):
    """Epochs of a run, how often each has each image, and why."""

    num_epochs: int
    repeats: float
    reason: str
    share: float = 1.0  # of the epochs' steps, that there is time for: the last epoch may end early


def plan_steps(
    num_samples: int,
    batch_size: int,
    accumulation_steps: int,
    cost: StepCost | None,
    num_val: int,
    budget: float | None,
    repeats: float | None = None,
    may_end_early: bool = False,
) -> StepPlan:
    """Enough views (augmented images) to learn from, within a budget of seconds, in epochs that are as short as leaves
    validation its share of the time, about NUM_EPOCHS at most: their number, and how often each has each image (below
    1: the share of the images that it has). `cost`: of a step that memory holds. `may_end_early`: an epoch that there
    is no time for ends before its last batch."""
    views, is_limited, most = wanted_views(num_samples), False, NUM_EPOCHS
    reason = f"{views:,} augmented images, {views / num_samples:,.0f} passes"
    if cost is not None and budget is not None:
        affordable = affordable_views(batch_size, cost, num_val, budget)
        if is_limited := affordable < views:
            views, reason = affordable, f"{affordable:,} augmented images are what {describe_seconds(budget)} allow"
    steps = max(1, views // batch_size)
    if cost is not None and (val_seconds := num_val * cost.eval_seconds):
        share = steps * cost.seconds * VALIDATION_SHARE / (1 - VALIDATION_SHARE)
        most = min(max(1, round(share / val_seconds)), NUM_EPOCHS)
    is_short = budget is not None and budget < SHORT_SECONDS
    least = max(min(MIN_STEPS_PER_EPOCH, steps // (1 if is_short else MIN_VALIDATIONS)), accumulation_steps)
    # Where no step was timed, the first epochs tell how many there can be.
    per_epoch = least if cost is None and budget is not None else max(math.ceil(steps / most), least)

    def steps_of(repeats: float) -> int:
        return max(1, int(num_samples * repeats) // batch_size)

    def epochs_of(repeats: float) -> int:
        passes = steps / steps_of(repeats)
        if not is_limited:
            return max(1, round(passes))
        # Limited by time: no more epochs than there is time for.
        return max(1, math.ceil(passes - MIN_PART) if may_end_early else int(passes))

    if repeats is None:
        passes = per_epoch * batch_size / num_samples
        is_long = num_samples >= MIN_STEPS_PER_EPOCH * batch_size  # a pass: one more of them may be too many
        repeats = max(1, round(passes) if is_limited and is_long else math.ceil(passes))
        if cost is not None and budget is not None and passes < 2 / 3:
            # A pass is longer than a good epoch; each of its parts has a batch at least.
            repeats = 1 / max(1, min(math.ceil(1 / passes), num_samples // batch_size))
        while epochs_of(repeats) < min(MIN_VALIDATIONS, most) and steps_of(repeats) > least:
            less = repeats - 1 if repeats > 1 else 1 / (round(1 / repeats) + 1)
            if num_samples * less < batch_size:
                break
            repeats = less
        if is_limited and 1 in (most, epochs_of(repeats)) and cost is not None and budget is not None:
            spare = SPARE_STEPS if may_end_early else 1
            in_time = max(accumulation_steps, (budget - num_val * cost.eval_seconds) / cost.seconds) * batch_size
            in_time *= spare
            repeats = math.ceil(in_time / num_samples) if in_time > num_samples else 1 / (num_samples // in_time)
            return StepPlan(1, repeats, f"{reason}: one epoch, as long as there is time", 1 / spare)
    num_epochs, steps_per_epoch = epochs_of(repeats), steps_of(repeats)
    share = min(1.0, steps / (num_epochs * steps_per_epoch)) if is_limited and may_end_early else 1.0
    reason += f"; {math.ceil(share * num_epochs * steps_per_epoch):,} steps of {batch_size}"
    return StepPlan(num_epochs, repeats, reason, share)


def wanted_views(num_samples: int) -> int:
    """Augmented images that a model is trained on if time allows."""
    return min(max(NUM_VIEWS, MIN_PASSES * num_samples), MAX_VIEWS)


def affordable_views(batch_size: int, cost: StepCost, num_val: int, budget: float) -> int:
    """Augmented images that fit into the budget, with one validation at least."""
    per_validation = num_val * cost.eval_seconds
    for_validation = max(per_validation, min(NUM_EPOCHS * per_validation, VALIDATION_SHARE * budget))
    return max(batch_size, int((budget - for_validation) / cost.seconds) * batch_size)


def describe_seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def choose_batch_size(costs: Mapping[int, StepCost], free_memory: int, wanted: int) -> tuple[int, str]:
    """The wanted batch, or the largest smaller one that fits."""
    limit = MEMORY_SHARE * free_memory or math.inf
    fitting = [size for size, cost in costs.items() if cost.is_possible and cost.memory <= limit]
    if not fitting:
        return (min(costs), "the smallest that was tried; memory is short") if costs else (wanted, "no step was tried")
    size = max(fitting)
    gib = f", {costs[size].memory / 2**30:.1f} GiB" if costs[size].memory else ""
    larger = "" if size == wanted else "; larger ones do not fit into memory"
    return size, f"measured: {size / costs[size].seconds:.0f} images/s{gib}{larger}"


def wanted_batch_size(num_samples: int, on_cpu: bool) -> int:
    """The reference batch; half of it on a CPU, where steps are few; twice it where there are many images."""
    if on_cpu:
        return REFERENCE_BATCH // 2
    return REFERENCE_BATCH if MIN_PASSES * num_samples <= 4 * NUM_VIEWS else 2 * REFERENCE_BATCH


def choose_learning_rate(optimizer: str, batch_size: int) -> tuple[float, str]:
    """By the square root of the batch, from what was found at the reference batch."""
    base = {"adamw": 2e-3, "adam": 1e-3, "sgd": 5e-2}[optimizer]
    rate = float(f"{base * math.sqrt(batch_size / REFERENCE_BATCH):.2g}")
    return rate, f"{optimizer}, effective batch {batch_size}"


def num_pilot_steps(num_steps: int) -> int:
    """For each learning rate that a run of so many steps tries; 0: fewer would tell nothing, and none is tried."""
    most = min(MAX_PILOT_STEPS, int(PILOT_SHARE * num_steps) // MAX_PILOTS)
    return most if most >= MIN_PILOT_STEPS else 0


def choose_ema_decay(num_steps: int) -> tuple[float, str]:
    decay = 1 - EMA_WINDOWS / max(num_steps, 2 * EMA_WINDOWS)
    return round(min(decay, 0.9999), 5), "averages over about a tenth of the run"


def choose_warmup(num_epochs: int, is_trained: bool = False) -> tuple[float, str]:
    """`is_trained`: the run begins with a trained model, which large first steps would spoil."""
    usual, least = WARMUP_SHARE * num_epochs, min(1.0, num_epochs / 4)
    if is_trained and usual < least:
        return least, "large first steps would spoil a trained model"
    return float(f"{usual:.2g}"), f"{WARMUP_SHARE:.0%} of the epochs"


def choose_patience(num_epochs: int) -> tuple[int | None, str]:
    patience = max(MIN_PATIENCE, round(PATIENCE_SHARE * num_epochs))
    if patience >= num_epochs:
        return None, "too few epochs to stop early"
    return patience, f"{PATIENCE_SHARE:.0%} of the run, {MIN_PATIENCE} at least, once the learning rate is low"


def choose_compile(hardware: HardwareFacts, cost: StepCost | None, num_steps: int) -> tuple[bool, str]:
    """Compiles when that saves more time than it takes."""
    if hardware.kind != "cuda" or cost is None:
        return False, "pays on NVIDIA and AMD GPUs, where the time of a step is known"
    saved = COMPILE_GAIN * cost.seconds * num_steps
    return saved > COMPILE_SECONDS, f"saves {saved:.0f} s of {num_steps:,} steps, takes {COMPILE_SECONDS:.0f} s"


def choose_cache(num_bytes: int, hardware: HardwareFacts, num_reads: float, num_crops: int) -> tuple[Cache, str]:
    """`num_reads`: times that an image is read in the run; `num_crops`: of these, in an epoch for its crops."""
    if num_reads < 2:  # of each image, for all crops of all epochs
        return "none", "each image is read once"
    size = f"{num_bytes / 2**30:.2f} GiB decoded, {hardware.host_memory / 2**30:.0f} GiB of memory free"
    if hardware.host_memory and num_bytes <= CACHE_SHARE * hardware.host_memory:
        return "ram", size
    if num_crops > 1 and num_bytes <= min(MAX_DISK_BYTES, CACHE_SHARE * hardware.disk):
        return "disk", f"{size}: on the disk an image is decoded once, not for each of its {num_crops} crops"
    return "none", size
