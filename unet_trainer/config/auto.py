"""`resolve` decides each setting that is left open from what was measured in the data, the hardware, the cost of a step
and a budget of time: a value, and its reason. Imports no torch and reads no files.

The figures behind the constants are in docs/quality.md.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from unet_trainer.config import schema
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, NumberFormat, StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig, Setting, Settings
from unet_trainer.config.schema import Config, as_shape

Size = tuple[int, int]  # height, width
Encoders = Sequence[tuple[str, tuple[int, ...] | None]]  # the best first, and the widths of its decoder, if not usual
MeasureStep = Callable[[ResolvedConfig], StepCost | None]  # None: it cannot be measured
FindWeights = Callable[[str], tuple[str | None, str]]  # encoder → imagenet or None, and why

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
MAX_CROPS = 16  # of an image in an epoch
UPRIGHT_TURN = 5  # degrees
HORIZONTAL_FLIP, VERTICAL_FLIP = {"HorizontalFlip": {"p": 0.5}}, {"VerticalFlip": {"p": 0.5}}
REFLECT = {"border_mode": 4}  # OpenCV's BORDER_REFLECT_101
# Of images that are not 8-bit, in units of the data's standard deviation: albumentations would take them for 0 to 1.
INTENSITY_JITTER = {
    "default": {"IntensityJitter": {"brightness": 0.5, "contrast": 0.2, "noise": 0.0, "p": 0.5}},
    "strong": {"IntensityJitter": {"brightness": 0.8, "contrast": 0.3, "noise": 0.25, "p": 0.6}},
}
RARE_CLASS = 0.001  # share of the pixels; classes that are less rare gain nothing by weights
REFERENCE_BATCH = 16  # that the learning rate and the number of steps were found at
NUM_VIEWS = 96_000  # augmented images that a model sees in training: 6,000 steps of the reference batch
MIN_PASSES, MAX_VIEWS = 40, 4_000_000  # over a large dataset; of a huge one
NUM_EPOCHS = 100  # of a run, about, each with a validation
MIN_VALIDATIONS = 8  # or best.pt is no choice, unless they exceed their share of the time
VALIDATION_SHARE = 0.1  # of the time, about
MIN_STEPS_PER_EPOCH = 10
MIN_PART = 0.2  # of an epoch, that is worth a validation
SPARE_STEPS = 1.5  # of a single epoch that the time will end: the machine may become faster than in the trial
CPU_BUDGET = 3600.0  # seconds, where none is set
GPU_ENCODER = "resnet34"
CPU_ENCODERS: Encoders = (  # and of small budgets
    ("resnet34", None),
    ("resnet18", (128, 64, 48, 32, 16)),
    ("tu-mobilenetv3_small_100", (96, 48, 32, 24, 16)),
    ("tu-mobilenetv3_small_050", (64, 32, 16, 16, 8)),
)
# Of random weights a plain residual network learns more in a short time than a mobile one.
CPU_ENCODERS_FROM_NOTHING: Encoders = (*CPU_ENCODERS[:2], ("small_resnet", (64, 32, 16, 16, 8)))
WANTED_VIEWS = 12_000  # with fewer in the budget, a smaller encoder learns more
COMPILE_SECONDS = 60.0  # of compiling a step on a GPU
MEMORY_SHARE = 0.9  # of the free memory that a step may take
MAX_PILOTS = 3  # learning rates that are tried, see training.pilots
AUGMENTED_PASSES = 20  # after 1 to 4, flips alone were better, after 180 all of it; not measured in between
CUTMIX_PASSES = 100  # with fewer it changed nothing


def resolve(
    config: Config,
    hardware: HardwareFacts,
    dataset: DatasetFacts,
    measure_step: MeasureStep = lambda config: None,
    find_weights: FindWeights = lambda encoder: (None, "not looked for"),
    seconds_spent: Callable[[], float] = lambda: 0.0,
    from_model: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
) -> Settings:
    """Decides all that `config` leaves open; values that it sets are kept. `seconds_spent`: what training does not have
    of time_budget, asked when the time is planned. `from_model`: values and reasons that follow from init_from."""
    resolver = _Resolver(Settings(config), hardware, dataset, measure_step, seconds_spent)
    for name, (value, reason) in from_model.items():
        resolver.decide(name, value, reason)
    resolver.decide_machine()
    resolver.decide_data()
    resolver.decide_size()
    resolver.decide_augmentation()
    resolver.decide_training(resolver.decide_model(find_weights))
    resolver.settle_contradictions()
    return resolver.settings


@dataclasses.dataclass
class _Resolver:
    """Decides group by group; what comes later depends on what came before."""

    settings: Settings
    hardware: HardwareFacts
    dataset: DatasetFacts
    measure_step: MeasureStep
    seconds_spent: Callable[[], float]

    def __post_init__(self) -> None:
        self.on_cpu = self.hardware.kind == "cpu"

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def decide(self, name: str, value: Any, reason: str) -> None:
        self.settings[name] = Setting(value, "decided", reason)

    def decide_auto(self, name: str, value: Any, reason: str) -> None:
        """Keeps a value that was set."""
        if self[name] == "auto":
            self.decide(name, value, reason)

    def decide_machine(self) -> None:
        hardware = self.hardware
        self.decide("device", hardware.device, hardware.name)
        if hardware.kind == "cuda" and (hardware.has_bfloat16 or hardware.has_float16):
            self.decide_auto("use_amp", True, f"{hardware.name} computes 16-bit numbers faster, in half the memory")
        no_gain = "float32 is the fastest on most CPUs" if self.on_cpu else f"no gain on {hardware.name}"
        self.decide_auto("use_amp", False, no_gain)
        number_format, reason = choose_number_format(self["amp_dtype"], hardware)
        if self["use_amp"] and number_format == "float32":
            self.decide("use_amp", False, reason)
        elif self["use_amp"] and number_format != self["amp_dtype"]:
            self.decide("amp_dtype", number_format, reason)
        cores = max(1, hardware.num_cores // hardware.num_local_processes)  # of a process; the model needs a CPU's
        workers = min(cores // 2, 4) if self.on_cpu else max(1, min(cores - 1, 16))
        reason = f"{hardware.num_cores} core{'s' * (hardware.num_cores > 1)}"
        self.decide_auto("num_workers", hardware.num_local_processes * workers, reason)

    def decide_data(self) -> None:
        dataset = self.dataset
        self.decide_auto("num_classes", dataset.num_classes, dataset.num_classes_reason)
        self.decide_auto("mask_tolerance", dataset.mask_tolerance, dataset.mask_reason)
        if self["class_names"] is None and dataset.class_names is not None:
            self.decide("class_names", dataset.class_names, dataset.class_names_reason)
        if self["mask_values"] == "auto" and self["ignore_value"] is None and dataset.ignore_value is not None:
            self.decide("ignore_value", dataset.ignore_value, dataset.mask_reason)
        self.decide_auto("mask_values", dataset.mask_values, dataset.mask_reason)
        self.decide_auto("in_channels", dataset.channels, "as the images have")
        self.decide_auto("image_mean", dataset.mean, dataset.statistics_reason)
        self.decide_auto("image_std", dataset.std, dataset.statistics_reason)
        self.decide_auto("normalize", *choose_normalize(dataset.brightness_share))
        self.decide_auto("class_weights", *choose_class_weights(dataset.class_shares, self["num_classes"]))
        self.decide_auto("loss", {"dice": 1.0, "cross_entropy": 1.0}, "overlap for rare classes, and every pixel")

    def decide_size(self) -> None:
        """What the model sees of an image, and numbers that follow from it, which the later rules go by."""
        dataset, sizes = self.dataset, self.dataset.train_sizes
        if dataset.are_blocks and self["split"] == "random" and not self["group_pattern"] and not self["split_file"]:
            self.decide("split", "blocks", "one image: blocks of it train and validate")
        self.decide_auto("fit", *choose_fit(dataset.measurements, sizes, dataset.are_blocks))
        seconds = None if self["time_budget"] is None else seconds_of(self["time_budget"])
        size = choose_image_size(self["fit"], sizes, dataset.measurements, self.on_cpu, seconds)
        self.decide_auto("image_size", *size)
        high, wide = as_shape(self["image_size"])
        self.num_crops, self.num_val = 1, len(dataset.val_sizes)  # training samples of an image; of validation, in all
        self.pixels_seen = 1.0  # in a pass, of an image of median area
        if self["fit"] == "crop":
            area = median(height * width for height, width in sizes)
            fitting = f"as many as fit side by side into an image of median area, at most {MAX_CROPS}"
            self.decide_auto("crops_per_image", min(max(1, round(area / (high * wide))), MAX_CROPS), fitting)
            self.num_crops = self["crops_per_image"]
            self.pixels_seen = self.num_crops * (high * wide) / area
            self.num_val = sum(_tiles(height, high) * _tiles(width, wide) for height, width in dataset.val_sizes)
        self.decide_auto("crops_per_image", 1, "not with fit: resize")
        self.num_samples = len(sizes) * self.num_crops  # of one pass

    def decide_augmentation(self) -> None:
        dataset, measured, fit = self.dataset, self.dataset.measurements, self["fit"]
        if measured is None:
            self.decide_auto("augmentation", "default", "nothing was measured")
            return
        is_8bit, name = dataset.bytes_per_value == 1, self["augmentation"]
        chosen = choose_augmentation(measured, fit, dataset.channels, is_8bit, self["normalize"])
        self.decide_auto("augmentation", *chosen)
        if name in ("default", "strong") and not measured.keeps_labels("vertical_flip", in_views=fit == "crop"):
            transforms = named_augmentation(name, dataset.channels, is_8bit, is_upright=True)
            self.decide("augmentation", transforms, f"{name} without vertical flips and large turns: {chosen[1]}")

    @property
    def budget(self) -> float | None:
        """Seconds of training that were asked for; on a CPU there is always a limit."""
        if self["time_budget"] is not None:
            return max(1.0, seconds_of(self["time_budget"]) - self.seconds_spent())
        return CPU_BUDGET if self.on_cpu else None

    def decide_model(self, find_weights: FindWeights) -> StepCost | None:
        """Encoder, its weights and the batch size; returns the cost of a step, if it was tried."""
        open_settings = {name: self.settings[name] for name in ("encoder", "decoder_channels", "batch_size")}
        encoders = CPU_ENCODERS_FROM_NOTHING if self["encoder_weights"] is None else CPU_ENCODERS
        cost = self.decide_encoder_and_batch(encoders)
        if self["encoder_weights"] != "auto":
            return cost
        self.decide("encoder_weights", *find_weights(self["encoder"]))
        is_chosen = open_settings["encoder"].value == "auto" and self["encoder"] not in dict(CPU_ENCODERS_FROM_NOTHING)
        if self["encoder_weights"] is None and is_chosen:  # for weights that are not there
            for name, setting in open_settings.items():
                self.settings[name] = setting
            return self.decide_encoder_and_batch(CPU_ENCODERS_FROM_NOTHING)
        return cost

    def decide_encoder_and_batch(self, encoders: Encoders) -> StepCost | None:
        costs: dict[int, StepCost | None] = {}
        sizes = self.batch_sizes_to_try()
        if self["encoder"] == "auto" and self.budget is not None:
            costs[sizes[0]] = self.decide_encoder(sizes[0], encoders)
        self.decide_auto("encoder", GPU_ENCODER, "a GPU trains it fast")
        free_memory = math.inf if self.on_cpu else MEMORY_SHARE * self.hardware.free_memory or math.inf
        for size in sizes:
            cost = costs[size] = costs[size] if size in costs else self.try_step(size)
            if cost is None:  # nor can smaller ones be measured
                break
            if cost.is_possible and cost.memory <= free_memory:
                gib = f", {cost.memory / 2**30:.1f} GiB" if cost.memory else ""
                larger = "" if size == sizes[0] else "; larger ones do not fit into memory"
                self.decide_auto("batch_size", size, f"measured: {size / cost.seconds:.0f} images/s{gib}{larger}")
                break
        known = [size for size, cost in costs.items() if cost is not None]
        reason = "the smallest that was tried; memory is short" if known else "no step was tried"
        self.decide_auto("batch_size", min(known, default=sizes[0]), reason)
        return costs.get(self["batch_size"])

    def batch_sizes_to_try(self) -> list[int]:
        """The wanted one first, then smaller ones for little memory."""
        if self["batch_size"] != "auto":
            return [self["batch_size"]]
        num_samples, repeats = self.num_samples // self.hardware.num_processes, self["repeats"]
        wanted = wanted_batch_size(num_samples, self.on_cpu)
        if not self["num_epochs"] == repeats == "auto":  # images are repeated only where both are open
            wanted = max(1, min(wanted, int(num_samples * (1 if repeats == "auto" else repeats))))
        return [wanted // 2**halvings for halvings in range(wanted.bit_length())]

    def decide_encoder(self, batch_size: int, encoders: Encoders) -> StepCost | None:
        """The largest encoder that sees enough images in the budget; returns its cost. On a CPU the smallest is tried
        first: its steps are short, and where it is too slow already no other is tried."""
        has_widths = self["decoder_channels"] is None and self["architecture"] in schema.WITH_DECODER_CHANNELS
        least_width = schema.MIN_ATTENTION_CHANNELS if self["decoder_attention"] == "scse" else 1
        num_processes, budget = self.hardware.num_processes, self.budget or CPU_BUDGET
        tried = []
        for encoder, usual in reversed(encoders) if self.on_cpu else encoders:
            widths = tuple(max(least_width, width) for width in usual) if usual and has_widths else None
            cost = self.try_step(batch_size, encoder=encoder, decoder_channels=widths or self["decoder_channels"])
            views, reason = 0, "no step could be tried"  # of a GPU, a smaller batch may fit
            if cost is not None and cost.is_possible:
                views = affordable_views(batch_size * num_processes, cost, self.num_val // num_processes, budget)
                reason = f"{batch_size / cost.seconds:.1f} images/s: {views:,} images in {describe_seconds(budget)}"
            tried.append((encoder, widths, cost, reason))
            is_enough = views >= WANTED_VIEWS
            if is_enough != self.on_cpu or not views:
                break
        encoder, widths, cost, reason = tried[-2] if self.on_cpu and not is_enough and len(tried) > 1 else tried[-1]
        self.decide("encoder", encoder, reason)
        if widths is not None:
            self.decide("decoder_channels", widths, f"goes with {encoder}")
        return cost

    def try_step(self, batch_size: int, **model: Any) -> StepCost | None:
        """The cost of a step, where something depends on it. What is open, and settings about the whole run, get values
        that do not change it."""
        requested = self.settings.requested
        if self.on_cpu:
            needs_cost = "auto" in (requested.num_epochs, requested.encoder)
        else:
            compiles = requested.compile_model == "auto" and self.hardware.kind == "cuda"
            needs_cost = self.settings.replans() or requested.batch_size == "auto" or compiles
        if not needs_cost:
            return None
        while_auto = {
            "repeats": 1, "encoder": GPU_ENCODER, "encoder_weights": None, "learning_rate": 1e-3, "weight_decay": 0.0,
            "ema_decay": 0.999, "cutmix": 0.0, "cache": "none",
        }  # fmt: skip
        neutral = {name: value for name, value in while_auto.items() if self[name] == "auto"}
        fixed = {"num_epochs": 1, "time_budget": None, "early_stopping_patience": None, "warmup_epochs": 0.0}
        values = {**neutral, **fixed, "compile_model": False, **model, "batch_size": batch_size}
        return self.measure_step(dataclasses.replace(self.settings.taken, **values))

    def decide_training(self, cost: StepCost | None) -> None:
        hardware, num_samples, accumulation = self.hardware, self.num_samples, self["accumulation_steps"]
        batch_size = self["batch_size"] * hardware.num_processes  # of all processes
        if cost is not None:  # of a batch that memory does not hold: None, training says so
            shared = dataclasses.replace(cost, eval_seconds=cost.eval_seconds / hardware.num_processes)
            cost = shared if cost.is_possible else None
        share = 1.0  # of the epochs, that there is time for
        if self["num_epochs"] == "auto":
            repeats = None if self["repeats"] == "auto" else self["repeats"]
            ends_early = self["time_budget"] is not None and hardware.num_processes == 1
            budget, num_val = self.budget, self.num_val
            plan = plan_steps(num_samples, batch_size, accumulation, cost, num_val, budget, repeats, ends_early)
            share = plan.share
            self.decide("num_epochs", plan.num_epochs, plan.reason)
            batches = max(1, int(num_samples * plan.repeats) // batch_size)
            self.decide_auto("repeats", plan.repeats, f"{batches:,} batches between two validations")
        self.decide_auto("repeats", 1, "num_epochs is set")
        num_epochs, repeats = self["num_epochs"], self["repeats"]
        self.decide_mixing(share * num_epochs * repeats)
        batches = max(1, int(num_samples * repeats) // batch_size)
        num_steps = math.ceil(share * num_epochs * math.ceil(batches / accumulation))
        effective = batch_size * accumulation // (hardware.num_processes if self["scale_lr"] else 1)
        self.decide_auto("learning_rate", *choose_learning_rate(self["optimizer"], effective))
        self.decide_auto("weight_decay", 0.05 if self["optimizer"] == "adamw" else 1e-4, self["optimizer"])
        self.decide_auto("ema_decay", *choose_ema_decay(num_steps))
        self.decide_auto("warmup_epochs", *choose_warmup(num_epochs, self["init_from"] is not None))
        self.decide_auto("early_stopping_patience", *choose_patience(num_epochs))
        self.decide_auto("compile_model", *choose_compile(hardware, cost, num_steps))
        kept = [*self.dataset.train_sizes, *self.dataset.val_sizes]  # as the cache has them: whole, or resized
        kept = kept if self["fit"] == "crop" else [as_shape(self["image_size"])] * len(kept)
        num_bytes = sum(map(math.prod, kept)) * (self.dataset.channels * self.dataset.bytes_per_value + 1)
        num_reads = num_epochs * repeats * self.num_crops
        self.decide_auto("cache", *choose_cache(num_bytes, hardware, num_reads, self.num_crops))

    def decide_mixing(self, passes: float) -> None:
        """How much images are changed and mixed, by how often each of their pixels comes."""
        passes *= self.pixels_seen
        is_augmented = self.settings.requested.augmentation == "auto"
        augmentation, _, reason = self.settings["augmentation"]
        if is_augmented and augmentation != "default" and passes < AUGMENTED_PASSES:
            flips = tuple(transform for transform in augmentation if transform in (HORIZONTAL_FLIP, VERTICAL_FLIP))
            seldom = f"images come {passes:.1f} times, too seldom for more than flips"
            self.decide("augmentation", flips or "none", f"{seldom}; {reason}")
        share, why = 0.5 if passes >= CUTMIX_PASSES else 0.0, f"images come {passes:,.0f} times"
        if self["normalize"] == "image":
            share, why = 0.0, "a piece of a brighter image would change how the whole is normalised"
        self.decide_auto("cutmix", *((share, why) if is_augmented else (0.0, "augmentation is set")))

    def settle_contradictions(self) -> None:
        """What was set and does not go with what was decided: a config would be refused for it."""
        num_epochs, patience, warmup = self["num_epochs"], self["early_stopping_patience"], self["warmup_epochs"]
        if patience is not None and patience >= num_epochs:
            self.decide("early_stopping_patience", None, f"{patience} can never be reached in {num_epochs} epochs")
        if warmup >= num_epochs:
            self.decide("warmup_epochs", num_epochs / 2, f"{warmup:g} would leave nothing of {num_epochs} epochs")
        if self["sync_batchnorm"] and self["compile_model"] and self.hardware.num_processes > 1:
            self.decide("compile_model", False, "sync_batchnorm breaks the compiled graph, and waits for the host")
        if self["monitor"] != "val_loss" and not self.dataset.has_val_classes:
            reason = f"no validation mask has a class to score, so there is no {self['monitor']}"
            self.decide("monitor", "val_loss", reason)
        if self["batch_parts"] > self["batch_size"]:
            self.decide("batch_parts", self["batch_size"], f"a batch of {self['batch_size']} has no more parts")


def choose_number_format(amp_dtype: NumberFormat, hardware: HardwareFacts) -> tuple[NumberFormat, str]:
    """The format of mixed precision: what was asked for if the hardware has it, else the next best; and why."""
    if hardware.has_bfloat16 if amp_dtype == "bfloat16" else hardware.has_float16:
        return amp_dtype, f"{hardware.name} computes in it"
    found: NumberFormat = "float16" if hardware.has_float16 else "float32"
    needs = ", which needs Ampere or newer" if amp_dtype == "bfloat16" and hardware.kind == "cuda" else ""
    return found, f"{hardware.name} has no fast {amp_dtype}{needs}; {found} instead"


def choose_normalize(brightness_share: float) -> tuple[str, str]:
    where = f"{brightness_share:.0%} of the variance of pixels lies between images"
    return "image" if brightness_share > DIFFERENT_IMAGES else "dataset", where


def choose_class_weights(class_shares: Sequence[float], num_classes: int) -> tuple[tuple[float, ...] | None, str]:
    if num_classes == 1:
        return None, "one class: the overlap loss counts its pixels alone"
    present = [share for share in class_shares if share > 0]
    if min(present, default=1.0) >= RARE_CLASS:
        return None, f"no class has less than {RARE_CLASS:.1%} of the pixels, and the overlap loss weighs classes alike"
    # By the rarity itself common classes would lose more than the rare ones gain; beyond 2.5 few pixels would dominate.
    rarities = [median(present) / share if share > 0 else 1.0 for share in class_shares]
    weights = (round(min(max(rarity**0.25, 1 / 2.5), 2.5), 3) for rarity in rarities)
    return tuple(weights), "rare classes weigh more, by the fourth root of their rarity"


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


def _tiles(length: int, tile: int) -> int:
    """Along an axis; they overlap by a quarter at least."""
    return 1 if length <= tile else 1 + math.ceil((length - tile) / (tile * 0.75))


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


def _affine(scale: list[float], shift: float, degrees: float, p: float, **more: Any) -> dict[str, Any]:
    moved = {"scale": scale, "translate_percent": [-shift, shift], "rotate": [-degrees, degrees]}
    return {"Affine": {**moved, **more, "p": p, **REFLECT}}


def _change_light(limit: float, p: float) -> dict[str, Any]:
    # by a share of the image's mean: by a share of 255 (as by val_shift_limit) a dark image would become black
    limits = {"brightness_limit": limit, "contrast_limit": limit, "brightness_by_max": False}
    return {"RandomBrightnessContrast": {**limits, "p": p}}


def _change_colour(hue: int, saturation: int, p: float) -> dict[str, Any]:
    return {"HueSaturationValue": {"hue_shift_limit": hue, "sat_shift_limit": saturation, "val_shift_limit": 0, "p": p}}


def named_augmentation(name: str, channels: int, is_8bit: bool, is_upright: bool) -> tuple[Any, ...]:
    """`default` and `strong`: geometry, then light and colour. Images with an up are not turned upside down."""
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


class StepPlan(NamedTuple):
    """Epochs of a run, how often each has each image (below 1: the share of them that it has), and why."""

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
    validation its share of the time, about NUM_EPOCHS at most. `cost`: of a step that memory holds. `may_end_early`: an
    epoch that there is no time for ends before its last batch."""
    views, is_limited, steps_in_time = wanted_views(num_samples), False, 0.0
    reason = f"{views:,} augmented images, {views / num_samples:,.0f} passes"
    if cost is not None and budget is not None:
        affordable = affordable_views(batch_size, cost, num_val, budget)
        steps_in_time = max(accumulation_steps, (budget - num_val * cost.eval_seconds) / cost.seconds)
        if is_limited := affordable < views:
            views, reason = affordable, f"{affordable:,} augmented images are what {describe_seconds(budget)} allow"
    steps, most = max(1, views // batch_size), NUM_EPOCHS
    if cost is not None and (val_seconds := num_val * cost.eval_seconds):
        share = steps * cost.seconds * VALIDATION_SHARE / (1 - VALIDATION_SHARE)
        most = min(max(1, round(share / val_seconds)), NUM_EPOCHS)
    is_short = budget is not None and budget < 30  # seconds: shorter epochs are not worth their ends
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
        if steps_in_time and passes < 2 / 3:
            # A pass is longer than a good epoch; each of its parts has a batch at least.
            repeats = 1 / max(1, min(math.ceil(1 / passes), num_samples // batch_size))
        while epochs_of(repeats) < min(MIN_VALIDATIONS, most) and steps_of(repeats) > least:
            less = repeats - 1 if repeats > 1 else 1 / (round(1 / repeats) + 1)
            if num_samples * less < batch_size:
                break
            repeats = less
        if is_limited and 1 in (most, epochs_of(repeats)):
            spare = SPARE_STEPS if may_end_early else 1
            in_time = steps_in_time * batch_size * spare
            repeats = math.ceil(in_time / num_samples) if in_time > num_samples else 1 / (num_samples // in_time)
            return StepPlan(1, repeats, f"{reason}: one epoch, as long as there is time", 1 / spare)
    num_epochs, steps_per_epoch = epochs_of(repeats), steps_of(repeats)
    share = min(1.0, steps / (num_epochs * steps_per_epoch)) if is_limited and may_end_early else 1.0
    num_steps = math.ceil(share * num_epochs * steps_per_epoch)
    return StepPlan(num_epochs, repeats, f"{reason}; {num_steps:,} steps of {batch_size}", share)


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


def wanted_batch_size(num_samples: int, on_cpu: bool) -> int:
    """The reference batch; half of it on a CPU, where steps are few; twice it where there are many images."""
    if on_cpu:
        return REFERENCE_BATCH // 2
    return REFERENCE_BATCH if MIN_PASSES * num_samples <= 4 * NUM_VIEWS else 2 * REFERENCE_BATCH


def choose_learning_rate(optimizer: str, batch_size: int) -> tuple[float, str]:
    """By the square root of the batch, from what was found at the reference batch."""
    base = {"adamw": 2e-3, "adam": 1e-3, "sgd": 5e-2}[optimizer]
    return float(f"{base * math.sqrt(batch_size / REFERENCE_BATCH):.2g}"), f"{optimizer}, effective batch {batch_size}"


def num_pilot_steps(num_steps: int) -> int:
    """Of each learning rate that a run of so many steps tries; 0: none is tried."""
    most = min(300, int(0.15 * num_steps) // MAX_PILOTS)  # 15 % of the run for all
    return most if most >= 100 else 0


def choose_ema_decay(num_steps: int) -> tuple[float, str]:
    return round(min(1 - 10 / max(num_steps, 20), 0.9999), 5), "averages over about a tenth of the run"


def choose_warmup(num_epochs: int, is_trained: bool = False) -> tuple[float, str]:
    """`is_trained`: the run begins with a trained model."""
    usual, least = 0.03 * num_epochs, min(1.0, num_epochs / 4)
    if is_trained and usual < least:
        return least, "large first steps would spoil a trained model"
    return float(f"{usual:.2g}"), "3% of the epochs"


def choose_patience(num_epochs: int) -> tuple[int | None, str]:
    patience = max(5, round(0.3 * num_epochs))
    if patience >= num_epochs:
        return None, "too few epochs to stop early"
    return patience, "30% of the run, 5 at least, once the learning rate is low"


def choose_compile(hardware: HardwareFacts, cost: StepCost | None, num_steps: int) -> tuple[bool, str]:
    if hardware.kind != "cuda" or cost is None:
        return False, "pays on NVIDIA and AMD GPUs, where the time of a step is known"
    saved = cost.seconds / 2 * num_steps  # half of each step's time
    return saved > COMPILE_SECONDS, f"saves {saved:.0f} s of {num_steps:,} steps, takes {COMPILE_SECONDS:.0f} s"


def choose_cache(num_bytes: int, hardware: HardwareFacts, num_reads: float, num_crops: int) -> tuple[str, str]:
    """`num_reads`: times that an image is read in the run; `num_crops`: of these, in an epoch for its crops."""
    if num_reads < 2:
        return "none", "each image is read once"
    size = f"{num_bytes / 2**30:.2f} GiB decoded, {hardware.host_memory / 2**30:.0f} GiB of memory free"
    if hardware.host_memory and num_bytes <= hardware.host_memory / 4:
        return "ram", size
    if num_crops > 1 and num_bytes <= min(2**36, hardware.disk / 4):  # 64 GiB are not taken without being asked
        return "disk", f"{size}: on the disk an image is decoded once, not for each of its {num_crops} crops"
    return "none", size
