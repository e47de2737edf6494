"""Decides each setting that is left open, from what was measured in the data, the hardware, the cost of a step and a
budget of time: a value, and its reason. Pure: imports no torch and reads no files.

The rules for images are in auto_images, those for steps in auto_training; figures behind them in docs/quality.md.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from unet_trainer.config import auto_images as images
from unet_trainer.config import auto_training as training
from unet_trainer.config import schema
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, StepCost
from unet_trainer.config.parsers import describe_seconds, seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig, Setting, Settings
from unet_trainer.config.schema import Config, as_shape

Encoders = Sequence[tuple[str, tuple[int, ...] | None]]  # the best first, and the widths of its decoder, if not usual
MeasureStep = Callable[[ResolvedConfig], StepCost | None]  # None: it cannot be measured
FindWeights = Callable[[str], tuple[str | None, str]]  # encoder → imagenet or None, and why

GPU_ENCODER = "resnet34"
CPU_ENCODERS: Encoders = (
    ("resnet34", None),
    ("resnet18", (128, 64, 48, 32, 16)),
    ("tu-mobilenetv3_small_100", (96, 48, 32, 24, 16)),
    ("tu-mobilenetv3_small_050", (64, 32, 16, 16, 8)),
)
# Of random weights a plain residual network learns more in a short time than a mobile one.
CPU_ENCODERS_FROM_NOTHING: Encoders = (*CPU_ENCODERS[:2], ("small_resnet", (64, 32, 16, 16, 8)))
WANTED_VIEWS = 12_000  # with fewer in the budget, a smaller encoder learns more
CPU_BUDGET = 3600.0  # seconds, where none is set
MEMORY_SHARE = 0.9  # of the free memory that a step may take
MAX_CROPS = 16  # of an image in an epoch
AUGMENTED_PASSES = 20  # after 1 to 4, flips alone were better, after 180 all of it; not measured in between
CUTMIX_PASSES = 100  # with fewer it changed nothing
WHILE_AUTO = {  # values of a step that is tried, which do not change its cost
    "repeats": 1, "encoder": GPU_ENCODER, "encoder_weights": None, "learning_rate": 1e-3, "weight_decay": 0.0,
    "ema_decay": 0.999, "cutmix": 0.0, "cache": "none",
}  # fmt: skip


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
        gains = hardware.kind == "cuda" and (hardware.has_bfloat16 or hardware.has_float16)
        gain = f"{hardware.name} computes 16-bit numbers faster, in half the memory"
        no_gain = "float32 is the fastest on most CPUs" if self.on_cpu else f"no gain on {hardware.name}"
        self.decide_auto("use_amp", gains, gain if gains else no_gain)
        number_format, reason = training.choose_number_format(self["amp_dtype"], hardware)
        if self["use_amp"] and number_format == "float32":
            self.decide("use_amp", False, reason)
        elif self["use_amp"] and number_format != self["amp_dtype"]:
            self.decide("amp_dtype", number_format, reason)
        cores = max(1, hardware.num_cores // hardware.num_local_processes)  # of a process; the model needs a CPU's
        workers = min(cores // 2, 4) if self.on_cpu else max(1, min(cores - 1, 16))
        reason = f"{hardware.num_cores} core{'s' * (hardware.num_cores > 1)}"
        self.decide_auto("num_workers", hardware.num_local_processes * workers, reason)

    def decide_data(self) -> None:
        data = self.dataset
        self.decide_auto("num_classes", data.num_classes, data.num_classes_reason)
        self.decide_auto("mask_tolerance", data.mask_tolerance, data.mask_reason)
        if self["class_names"] is None and data.class_names is not None:
            self.decide("class_names", data.class_names, data.mask_reason)
        if self["mask_values"] == "auto" and self["ignore_value"] is None and data.ignore_value is not None:
            self.decide("ignore_value", data.ignore_value, data.mask_reason)
        self.decide_auto("mask_values", data.mask_values, data.mask_reason)
        self.decide_auto("in_channels", data.channels, "as the images have")
        self.decide_auto("image_mean", data.mean, data.statistics_reason)
        self.decide_auto("image_std", data.std, data.statistics_reason)
        self.decide_auto("normalize", *images.choose_normalize(data.brightness_share))
        self.decide_auto("class_weights", *training.choose_class_weights(data.class_shares, self["num_classes"]))
        self.decide_auto("loss", {"dice": 1.0, "cross_entropy": 1.0}, "overlap for rare classes, and every pixel")

    def decide_size(self) -> None:
        """What the model sees of an image, and numbers that follow from it, which the later rules go by."""
        data, sizes, measured = self.dataset, self.dataset.train_sizes, self.dataset.measurements
        if data.are_blocks and self["split"] == "random" and not self["group_pattern"] and not self["split_file"]:
            self.decide("split", "blocks", "one image: blocks of it train and validate")
        self.decide_auto("fit", *images.choose_fit(measured, sizes, data.are_blocks))
        seconds = None if self["time_budget"] is None else seconds_of(self["time_budget"])
        self.decide_auto("image_size", *images.choose_image_size(self["fit"], sizes, measured, self.on_cpu, seconds))
        high, wide = as_shape(self["image_size"])
        self.num_crops, self.num_val = 1, len(data.val_sizes)  # training samples of an image; of validation, in all
        self.pixels_seen = 1.0  # in a pass, of an image of median area
        if self["fit"] == "crop":
            area = median(height * width for height, width in sizes)
            fitting = f"as many as fit side by side into an image of median area, at most {MAX_CROPS}"
            self.decide_auto("crops_per_image", min(max(1, round(area / (high * wide))), MAX_CROPS), fitting)
            self.num_crops = self["crops_per_image"]
            self.pixels_seen = self.num_crops * (high * wide) / area
            self.num_val = sum(_num_tiles(height, high) * _num_tiles(width, wide) for height, width in data.val_sizes)
        self.decide_auto("crops_per_image", 1, "not with fit: resize")
        self.num_samples = len(sizes) * self.num_crops  # of one pass
        augmentation: tuple[Any, str] = ("default", "nothing was measured")
        if measured is not None:
            is_8bit = data.bytes_per_value == 1
            augmentation = images.choose_augmentation(measured, self["fit"], data.channels, is_8bit, self["normalize"])
        self.decide_auto("augmentation", *augmentation)

    @property
    def budget(self) -> float | None:
        """Seconds of training that were asked for; on a CPU there is always a limit."""
        if self["time_budget"] is not None:
            return max(1.0, seconds_of(self["time_budget"]) - self.seconds_spent())
        return CPU_BUDGET if self.on_cpu else None

    def decide_model(self, find_weights: FindWeights) -> StepCost | None:
        """Encoder, its weights and the batch size; returns the cost of a step, if it was tried."""
        before = {name: self.settings[name] for name in ("encoder", "decoder_channels", "batch_size")}
        encoders = CPU_ENCODERS_FROM_NOTHING if self["encoder_weights"] is None else CPU_ENCODERS
        cost = self.decide_encoder_and_batch(encoders)
        if self["encoder_weights"] != "auto":
            return cost
        self.decide("encoder_weights", *find_weights(self["encoder"]))
        needs_weights = before["encoder"].value == "auto" and self["encoder"] not in dict(CPU_ENCODERS_FROM_NOTHING)
        if self["encoder_weights"] is None and needs_weights:
            for name, setting in before.items():
                self.settings[name] = setting
            return self.decide_encoder_and_batch(CPU_ENCODERS_FROM_NOTHING)
        return cost

    def decide_encoder_and_batch(self, encoders: Encoders) -> StepCost | None:
        costs: dict[int, StepCost | None] = {}
        sizes = self.batch_sizes_to_try()
        if self["encoder"] == "auto" and self.on_cpu:
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
        wanted = training.wanted_batch_size(num_samples, self.on_cpu)
        if not self["num_epochs"] == repeats == "auto":  # images are repeated only where both are open
            wanted = max(1, min(wanted, int(num_samples * (1 if repeats == "auto" else repeats))))
        return [wanted // 2**halvings for halvings in range(wanted.bit_length())]

    def decide_encoder(self, batch_size: int, encoders: Encoders) -> StepCost | None:
        """The largest encoder that sees enough images in the time; returns its cost. The smallest is tried first:
        its steps are short, and where it is too slow already no other is tried."""
        has_widths = self["decoder_channels"] is None and self["architecture"] in schema.WITH_DECODER_CHANNELS
        least_width = schema.MIN_ATTENTION_CHANNELS if self["decoder_attention"] == "scse" else 1
        num_processes, budget = self.hardware.num_processes, self.budget or CPU_BUDGET
        found: list[tuple[str, tuple[int, ...] | None, StepCost | None, str]] = []
        for encoder, usual in reversed(encoders):
            widths = tuple(max(least_width, width) for width in usual) if usual and has_widths else None
            cost = self.try_step(batch_size, encoder=encoder, decoder_channels=widths or self["decoder_channels"])
            views, reason = 0, "no step could be tried"
            if cost is not None and cost.is_possible:
                num_val = self.num_val // num_processes
                views = training.affordable_views(batch_size * num_processes, cost, num_val, budget)
                reason = f"{batch_size / cost.seconds:.1f} images/s: {views:,} images in {describe_seconds(budget)}"
            if views >= WANTED_VIEWS or not found:
                found.append((encoder, widths, cost, reason))
            if views < WANTED_VIEWS:
                break
        encoder, widths, cost, reason = found[-1]
        self.decide("encoder", encoder, reason)
        if widths is not None:
            self.decide("decoder_channels", widths, f"goes with {encoder}")
        return cost

    def try_step(self, batch_size: int, **model: Any) -> StepCost | None:
        """The cost of a step, where something depends on it. What is open, and settings about the whole run, get values
        that do not change it."""
        requested = self.settings.requested
        needs_cost = "auto" in (requested.num_epochs, requested.encoder)
        if not self.on_cpu:
            compiles = requested.compile_model == "auto" and self.hardware.kind == "cuda"
            needs_cost = self.settings.replans() or requested.batch_size == "auto" or compiles
        if not needs_cost:
            return None
        neutral = {name: value for name, value in WHILE_AUTO.items() if self[name] == "auto"}
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
            plan = training.plan_steps(
                num_samples, batch_size, accumulation, cost, num_val, budget, repeats, ends_early
            )
            share = plan.share
            self.decide("num_epochs", plan.num_epochs, plan.reason)
            batches = max(1, int(num_samples * plan.repeats) // batch_size)
            self.decide_auto("repeats", plan.repeats, f"{batches:,} batches between two validations")
        self.decide_auto("repeats", 1, "num_epochs is set")
        num_epochs, repeats = self["num_epochs"], self["repeats"]
        self.decide_mixing(share * num_epochs * repeats * self.pixels_seen)
        batches = max(1, int(num_samples * repeats) // batch_size)
        num_steps = math.ceil(share * num_epochs * math.ceil(batches / accumulation))
        effective = batch_size * accumulation // (hardware.num_processes if self["scale_lr"] else 1)
        self.decide_auto("learning_rate", *training.choose_learning_rate(self["optimizer"], effective))
        self.decide_auto("weight_decay", 0.05 if self["optimizer"] == "adamw" else 1e-4, self["optimizer"])
        self.decide_auto("ema_decay", *training.choose_ema_decay(num_steps))
        self.decide_auto("warmup_epochs", *training.choose_warmup(num_epochs, self["init_from"] is not None))
        self.decide_auto("early_stopping_patience", *training.choose_patience(num_epochs))
        self.decide_auto("compile_model", *training.choose_compile(hardware, cost, num_steps))
        kept = [*self.dataset.train_sizes, *self.dataset.val_sizes]  # as the cache has them: whole, or resized
        kept = kept if self["fit"] == "crop" else [as_shape(self["image_size"])] * len(kept)
        num_bytes = sum(map(math.prod, kept)) * (self.dataset.channels * self.dataset.bytes_per_value + 1)
        num_reads = num_epochs * repeats * self.num_crops
        self.decide_auto("cache", *training.choose_cache(num_bytes, hardware, num_reads, self.num_crops))

    def decide_mixing(self, passes: float) -> None:
        """How much images are changed and mixed, by how often each of their pixels comes."""
        is_auto = self.settings.requested.augmentation == "auto"
        augmentation, _, reason = self.settings["augmentation"]
        if is_auto and augmentation != "default" and passes < AUGMENTED_PASSES:
            flips = tuple(
                transform for transform in augmentation if transform in (images.HORIZONTAL_FLIP, images.VERTICAL_FLIP)
            )
            seldom = f"images come {passes:.1f} times, too seldom for more than flips"
            self.decide("augmentation", flips or "none", f"{seldom}; {reason}")
        share, reason = 0.5 if passes >= CUTMIX_PASSES else 0.0, f"images come {passes:,.0f} times"
        if self["normalize"] == "image":
            share, reason = 0.0, "a piece of a brighter image would change how the whole is normalised"
        self.decide_auto("cutmix", *((share, reason) if is_auto else (0.0, "augmentation is set")))

    def settle_contradictions(self) -> None:
        """What was set and does not go with what was decided: a config would be refused for it."""
        num_epochs, warmup = self["num_epochs"], self["warmup_epochs"]
        if warmup >= num_epochs:
            self.decide("warmup_epochs", num_epochs / 2, f"{warmup:g} would leave nothing of {num_epochs} epochs")
        if self["sync_batchnorm"] and self["compile_model"] and self.hardware.num_processes > 1:
            self.decide("compile_model", False, "sync_batchnorm breaks the compiled graph, and waits for the host")
        if self["monitor"] != "val_loss" and not self.dataset.has_val_classes:
            reason = f"no validation mask has a class to score, so there is no {self['monitor']}"
            self.decide("monitor", "val_loss", reason)
        if self["batch_parts"] > self["batch_size"]:
            self.decide("batch_parts", self["batch_size"], f"a batch of {self['batch_size']} has no more parts")


def _num_tiles(length: int, tile: int) -> int:
    """Along an axis; they overlap by a quarter at least."""
    return 1 if length <= tile else 1 + math.ceil((length - tile) / (tile * 0.75))
