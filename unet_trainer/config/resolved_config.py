"""The settings of a run: each value with where it came from and why; and `resolve`, which decides what was left at
auto.

`resolve` is called once per run; the rules themselves are in choices. Imports no torch and reads no files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from unet_trainer.config import choices, schema
from unet_trainer.config.choices import NumberFormat
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, Config, as_dict, as_shape, parse_value, to_plain, to_yaml

# config.yaml has these as they were requested, so that the run can be repeated or resumed on another machine; but an
# auto of use_amp and compile_model as it was decided: it changes the numbers, and a resumed run has the same bits.
MACHINE_KEYS = ("device", "num_workers", "use_amp", "amp_dtype", "compile_model", "cache")
# Decided like the others, and printed in lines of their own.
PRINTED_ELSEWHERE = {
    "device", "mask_values", "ignore_value", "mask_tolerance", "in_channels", "image_mean", "image_std",
}  # fmt: skip
# Decided values that mean "nothing": they are in config.yaml with their reason, and not printed.
WITHOUT_EFFECT = {"crops_per_image": 1, "cutmix": 0.0, "normalize": "dataset", "class_weights": None}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A Config without auto."""

    num_classes: int
    mask_tolerance: int
    encoder_weights: str | None
    cutmix: float
    in_channels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    normalize: Literal["dataset", "image"]
    image_size: int | tuple[int, int]
    fit: Literal["resize", "crop"]
    crops_per_image: int
    repeats: float
    num_workers: int
    cache: Literal["none", "ram", "disk"]
    loss: dict[str, float]
    class_weights: tuple[float, ...] | None
    batch_size: int
    num_epochs: int
    learning_rate: float
    weight_decay: float
    warmup_epochs: float
    ema_decay: float | None
    early_stopping_patience: int | None
    use_amp: bool
    compile_model: bool

    @property
    def whole_repeats(self) -> int:
        """Times that each image comes in an epoch; 1 where an epoch takes a share of them."""
        return max(1, round(self.repeats))

    @property
    def epoch_parts(self) -> int:
        """Epochs in which each image comes once."""
        return max(1, round(1 / self.repeats))

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the images in a batch."""
        return as_shape(self.image_size)

    @property
    def number_format(self) -> NumberFormat:
        """Of the forward pass. Weights, optimizer state and the loss are float32 in each case."""
        return self.amp_dtype if self.use_amp else "float32"


class Setting(NamedTuple):
    """`source`: default, demo, file, config, command line, argument, decided (here), or trials (of learning rates)."""

    value: Any
    source: str
    reason: str = ""

    @property
    def is_decided(self) -> bool:
        return self.source in ("decided", "trials")


class Settings:
    """Every setting of a run by its key. What is printed, written to config.yaml and run.json, and resumed comes from
    here; so does `taken`, the values alone. `requested`: the config that they were decided for."""

    def __init__(self, requested: Config, known: Mapping[str, Setting] = MappingProxyType({})) -> None:
        own = {name: Setting(getattr(requested, name), requested.sources.get(name, "default")) for name in FIELDS}
        self.requested = requested
        self._settings: dict[str, Setting] = own | dict(known)
        self._taken: ResolvedConfig | None = None

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def __setitem__(self, name: str, setting: Setting) -> None:
        self._settings[name] = setting
        self._taken = None

    @property
    def taken(self) -> ResolvedConfig:
        if self._taken is None:
            self._taken = self.with_values()
        return self._taken

    def with_values(self, **values: Any) -> ResolvedConfig:
        """The values, of which some are replaced."""
        own = {name: setting.value for name, setting in self._settings.items()}
        return ResolvedConfig(**own | values, sources=self.requested.sources)

    def change(self, reason: str, source: str = "decided", **values: Any) -> None:
        """Replaces values, of a run that goes on as well."""
        for name, value in values.items():
            self[name] = Setting(value, source, reason)

    def was_open(self, name: str) -> bool:
        """When the run began: a resumed one requests what was decided then."""
        requested = getattr(self.requested, name)
        return requested == "auto" or (self[name].is_decided and requested == self[name].value)

    def replans(self) -> bool:
        """Whether the number of epochs follows the time that they take."""
        return self.requested.time_budget is not None and self.requested.num_epochs == "auto"

    def machine_keys(self) -> tuple[str, ...]:
        """With a time budget, the number of epochs depends on the machine too."""
        return (*MACHINE_KEYS, "num_epochs") if self.replans() else MACHINE_KEYS

    def repeatable(self) -> Config:
        """The config that repeats the run, also on another machine."""
        values = {name: setting.value for name, setting in self._settings.items()}
        for name in self.machine_keys():
            requested = getattr(self.requested, name)
            if name not in ("use_amp", "compile_model") or requested != "auto":
                values[name] = requested
        return Config(**values)

    def repeatable_dict(self) -> dict[str, Any]:
        return as_dict(self.repeatable())

    def to_yaml(self, header: str, **values: Any) -> str:
        """config.yaml of the run, with the reason of each value that was decided; `values` replace settings that belong
        to one start only."""
        reasons, machine_keys = {}, self.machine_keys()
        for name, (value, _, reason) in self._settings.items():
            if self[name].is_decided and name != "init_from":  # whose reason is what was loaded
                here = f"here {value_text(to_plain(value))}" if name in machine_keys else "decided"
                reason = f"{here}: {reason}"
            reasons[name] = reason
        return to_yaml(dataclasses.replace(self.repeatable(), **values), header, reasons)

    def sources_and_reasons(self) -> dict[str, list[str]]:
        return {name: [source, reason] for name, (_, source, reason) in self._settings.items()}

    def explained(self) -> dict[str, dict[str, Any]]:
        """Value, source and reason of every setting, as plain values."""
        return {name: {**one._asdict(), "value": to_plain(one.value)} for name, one in self._settings.items()}

    def describe(self) -> list[tuple[str, str, str]]:
        """Key, value and reason of each decided setting that does something and is not printed elsewhere."""
        return [
            (name, value_text(to_plain(setting.value)), setting.reason)
            for name, setting in self._settings.items()
            if setting.is_decided and name not in PRINTED_ELSEWHERE and WITHOUT_EFFECT.get(name, ...) != setting.value
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which another process makes the same settings."""
        return {"requested": as_dict(self.requested), "settings": self.explained()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Settings:
        requested = Config(**{name: parse_value(name, value) for name, value in content["requested"].items()})
        known = {name: Setting(**one) for name, one in content["settings"].items()}
        return cls(requested, {name: one._replace(value=parse_value(name, one.value)) for name, one in known.items()})


MeasureStep = Callable[[ResolvedConfig], StepCost | None]  # None: it cannot be measured
FindWeights = Callable[[str], tuple[str | None, str]]  # encoder → imagenet or None, and why


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
    known = {name: Setting(value, "decided", reason) for name, (value, reason) in from_model.items()}
    resolver = _Resolver(Settings(config, known), hardware, dataset, measure_step, seconds_spent)
    resolver.decide_machine()
    resolver.decide_data()
    resolver.decide_augmentation()
    cost = resolver.decide_model(find_weights)
    resolver.decide_training(cost)
    resolver.settle_contradictions()
    return resolver.settings


def needs_cost(config: Config, hardware: HardwareFacts) -> bool:
    """Whether trials of the step decide something."""
    if hardware.kind == "cpu":
        return "auto" in (config.num_epochs, config.encoder)
    is_planned = config.num_epochs == "auto" and config.time_budget is not None
    return is_planned or config.batch_size == "auto" or (config.compile_model == "auto" and hardware.kind == "cuda")


@dataclass
class _Resolver:
    """Decides group by group; what comes later depends on what came before."""

    settings: Settings
    hardware: HardwareFacts
    dataset: DatasetFacts
    measure_step: MeasureStep
    seconds_spent: Callable[[], float]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def decide(self, name: str, value: Any, reason: str) -> None:
        self.settings[name] = Setting(value, "decided", reason)

    def decide_auto(self, name: str, value: Any, reason: str) -> None:
        """Keeps a value that was set."""
        if self[name] == "auto":
            self.decide(name, value, reason)

    @property
    def on_cpu(self) -> bool:
        return self.hardware.kind == "cpu"

    @property
    def num_crops(self) -> int:
        """Training samples of an image."""
        return self["crops_per_image"] if self["fit"] == "crop" else 1

    @property
    def num_samples(self) -> int:
        """Training samples of one pass."""
        return len(self.dataset.train_sizes) * self.num_crops

    @property
    def num_val(self) -> int:
        """Validation images, or tiles of them."""
        sizes = self.dataset.val_sizes
        if self["fit"] == "resize":
            return len(sizes)
        height, width = as_shape(self["image_size"])
        return sum(choices.count_tiles(size[0], height) * choices.count_tiles(size[1], width) for size in sizes)

    @property
    def budget(self) -> float | None:
        """Seconds of training that were asked for; on a CPU there is always a limit."""
        if self["time_budget"] is not None:
            return max(1.0, seconds_of(self["time_budget"]) - self.seconds_spent())
        return choices.CPU_BUDGET if self.on_cpu else None

    def decide_machine(self) -> None:
        hardware = self.hardware
        self.decide("device", hardware.device, hardware.name)
        self.decide_auto("use_amp", *choices.choose_use_amp(hardware))
        if self["use_amp"]:
            number_format, reason = choices.choose_number_format(self["amp_dtype"], hardware)
            if number_format == "float32":
                self.decide("use_amp", False, reason)
            elif number_format != self["amp_dtype"]:
                self.decide("amp_dtype", number_format, reason)
        num_workers = choices.choose_num_workers(hardware.num_cores, self.on_cpu, hardware.num_local_processes)
        cores = "1 core" if hardware.num_cores == 1 else f"{hardware.num_cores} cores"
        self.decide_auto("num_workers", num_workers, cores)

    def decide_data(self) -> None:
        dataset = self.dataset
        self.decide_auto("num_classes", dataset.num_classes, dataset.num_classes_reason)
        tolerance_reason = dataset.mask_reason if dataset.mask_tolerance else "the values are exact"
        self.decide_auto("mask_tolerance", dataset.mask_tolerance, tolerance_reason)
        if self["class_names"] is None and dataset.class_names is not None:
            self.decide("class_names", dataset.class_names, dataset.class_names_reason)
        if self["mask_values"] == "auto":
            self.decide("mask_values", dataset.mask_values, dataset.mask_reason)
            if self["ignore_value"] is None and dataset.ignore_value is not None:
                self.decide("ignore_value", dataset.ignore_value, dataset.mask_reason)
        self.decide_auto("in_channels", dataset.channels, "as the images have")
        self.decide_auto("image_mean", dataset.mean, dataset.statistics_reason)
        self.decide_auto("image_std", dataset.std, dataset.statistics_reason)
        self.decide_auto("normalize", *choices.choose_normalize(dataset.brightness_share))
        if dataset.are_blocks and self["split"] == "random" and not self["group_pattern"] and not self["split_file"]:
            self.decide("split", "blocks", "one image: blocks of it train and validate")
        self.decide_auto("fit", *choices.choose_fit(dataset.measurements, dataset.train_sizes, dataset.are_blocks))
        seconds = None if self["time_budget"] is None else seconds_of(self["time_budget"])
        size = choices.choose_image_size(self["fit"], dataset.train_sizes, dataset.measurements, self.on_cpu, seconds)
        self.decide_auto("image_size", *size)
        shape = as_shape(self["image_size"])
        self.decide_auto("crops_per_image", *choices.choose_crops_per_image(self["fit"], dataset.train_sizes, shape))
        self.decide_auto("class_weights", *choices.choose_class_weights(dataset.class_shares, self["num_classes"]))
        loss_reason = "overlap, so that rare classes count, and every pixel"
        self.decide_auto("loss", {"dice": 1.0, "cross_entropy": 1.0}, loss_reason)

    def decide_augmentation(self) -> None:
        dataset, measured, fit = self.dataset, self.dataset.measurements, self["fit"]
        if measured is None:
            self.decide_auto("augmentation", "default", "nothing was measured")
            return
        is_8bit = dataset.bytes_per_value == 1
        chosen = choices.choose_augmentation(measured, fit, dataset.channels, is_8bit, self["normalize"])
        self.decide_auto("augmentation", *chosen)
        name = self["augmentation"]
        is_upright = not measured.keeps_labels("vertical_flip", in_views=fit == "crop")
        if name in ("default", "strong") and is_upright:
            transforms = choices.named_augmentation(name, dataset.channels, is_8bit, is_upright=True)
            symmetry = choices.describe_symmetry(measured, fit)
            self.decide("augmentation", transforms, f"{name} without vertical flips and large turns: {symmetry}")

    def decide_model(self, find_weights: FindWeights) -> StepCost | None:
        """Encoder, its weights and the batch size; returns the cost of a step, if it was tried."""
        before = {name: self.settings[name] for name in ("encoder", "decoder_channels", "batch_size")}
        cost = self.decide_encoder_and_batch(may_be_pretrained=self["encoder_weights"] is not None)
        if self["encoder_weights"] != "auto":
            return cost
        self.decide("encoder_weights", *find_weights(self["encoder"]))
        is_suited = not self.settings["encoder"].is_decided or self["encoder"] in dict(
            choices.CPU_ENCODERS_FROM_NOTHING
        )
        if self["encoder_weights"] is not None or is_suited:
            return cost
        for name, setting in before.items():
            self.settings[name] = setting
        return self.decide_encoder_and_batch(may_be_pretrained=False)

    def decide_encoder_and_batch(self, may_be_pretrained: bool) -> StepCost | None:
        must_measure = needs_cost(self.settings.requested, self.hardware)

        def measure(batch_size: int, **model: Any) -> StepCost | None:
            values = {**self.neutral_values(), **model, "batch_size": batch_size}
            return self.measure_step(self.settings.with_values(**values)) if must_measure else None

        costs: dict[int, StepCost | None] = {}
        sizes = self.batch_sizes_to_try()
        if self["encoder"] == "auto" and self.budget is not None:
            encoders = choices.CPU_ENCODERS if may_be_pretrained else choices.CPU_ENCODERS_FROM_NOTHING
            costs[sizes[0]] = self.decide_encoder(sizes[0], encoders, measure)
        self.decide_auto("encoder", choices.GPU_ENCODER, "a GPU trains it fast")
        limit = choices.MEMORY_SHARE * self.hardware.free_memory or math.inf
        for size in sizes:
            cost = costs[size] = costs[size] if size in costs else measure(size)
            if cost is None or (cost.is_possible and cost.memory <= limit):  # None: nor can smaller ones be measured
                break
        memory = 0 if self.on_cpu else self.hardware.free_memory
        known = {size: cost for size, cost in costs.items() if cost is not None}
        self.decide_auto("batch_size", *choices.choose_batch_size(known, memory, sizes[0]))
        return costs.get(self["batch_size"])

    def batch_sizes_to_try(self) -> list[int]:
        """The wanted one first, then smaller ones for little memory."""
        if self["batch_size"] != "auto":
            return [self["batch_size"]]
        num_samples, repeats = self.num_samples // self.hardware.num_processes, self["repeats"]
        wanted = choices.wanted_batch_size(num_samples, self.on_cpu)
        if not self["num_epochs"] == repeats == "auto":  # images are repeated only where both are open
            wanted = max(1, min(wanted, int(num_samples * (1 if repeats == "auto" else repeats))))
        return [wanted // 2**halvings for halvings in range(wanted.bit_length())]

    def decide_encoder(
        self,
        batch_size: int,
        encoders: Sequence[tuple[str, tuple[int, ...] | None]],
        measure: Callable[..., StepCost | None],
    ) -> StepCost | None:
        """The largest encoder that sees enough images in the budget; returns its cost. On a CPU the smallest is tried
        first: its steps are short, and where it is too slow already no other is tried."""
        has_widths = self["decoder_channels"] is None and self["architecture"] in schema.WITH_DECODER_CHANNELS
        least_width = schema.MIN_ATTENTION_CHANNELS if self["decoder_attention"] == "scse" else 1
        num_processes, on_cpu, budget = self.hardware.num_processes, self.on_cpu, self.budget or choices.CPU_BUDGET
        chosen: tuple[str, tuple[int, ...] | None, StepCost | None, str] | None = None
        for encoder, usual in reversed(encoders) if on_cpu else encoders:
            widths = tuple(max(least_width, width) for width in usual) if usual and has_widths else None
            cost = measure(batch_size, encoder=encoder, **({"decoder_channels": widths} if has_widths else {}))
            views = 0
            if cost is not None and cost.is_possible:
                num_val = self.num_val // num_processes
                views = choices.affordable_views(batch_size * num_processes, cost, num_val, budget)
                cores = f" on {self.hardware.num_cores} cores" if on_cpu else ""
                speed = f"{batch_size / cost.seconds:.1f} images/s{cores}"
                reason = f"{speed}: {views:,} images in {choices.describe_seconds(budget)}"
            elif on_cpu:
                reason = "the smallest; no step could be tried" if cost is None else "the smallest; memory is short"
            else:
                reason = "the usual one"  # a smaller batch may fit
            is_enough = views >= choices.WANTED_VIEWS
            if chosen is None or is_enough or not on_cpu:
                chosen = encoder, widths, cost, reason
            if is_enough != on_cpu or not views:
                break
        assert chosen is not None
        encoder, widths, cost, reason = chosen
        self.decide("encoder", encoder, reason)
        if widths is not None:
            self.decide("decoder_channels", widths, f"goes with {encoder}")
        return cost

    def neutral_values(self) -> dict[str, Any]:
        """Values for a trial of the step, which do not change its cost: of settings that are open, and of those about
        the whole run."""
        while_auto = {
            "repeats": 1, "encoder": choices.GPU_ENCODER, "encoder_weights": None, "learning_rate": 1e-3,
            "weight_decay": 0.0, "ema_decay": 0.999, "cutmix": 0.0, "cache": "none",
        }  # fmt: skip
        fixed = {"num_epochs": 1, "time_budget": None, "early_stopping_patience": None, "warmup_epochs": 0.0}
        open_values = {name: value for name, value in while_auto.items() if self[name] == "auto"}
        return open_values | fixed | {"compile_model": False}

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
            plan = choices.plan_steps(
                num_samples, batch_size, accumulation, cost, self.num_val, self.budget, repeats, ends_early
            )
            share = plan.share
            self.decide("num_epochs", plan.num_epochs, plan.reason)
            batches = max(1, int(num_samples * plan.repeats) // batch_size)
            between = f"{batches:,} batches between two validations"
            how_often = between if plan.num_epochs > 1 else "one validation, at the end"
            self.decide_auto("repeats", plan.repeats, f"{how_often}{plan.few and f': {plan.few}'}")
        self.decide_auto("repeats", 1, "num_epochs is set")
        num_epochs = self["num_epochs"]
        self.decide_mixing(share * num_epochs * self["repeats"])
        batches = max(1, int(num_samples * self["repeats"]) // batch_size)
        num_steps = math.ceil(share * num_epochs * math.ceil(batches / accumulation))
        effective = batch_size * accumulation // (hardware.num_processes if self["scale_lr"] else 1)
        num_bytes = decoded_bytes(self["fit"], self["image_size"], self.dataset)
        num_reads = num_epochs * self["repeats"] * self.num_crops
        rate, reason = choices.choose_learning_rate(self["optimizer"], effective)
        reason += "" if choices.num_pilot_steps(num_steps) else "; too few steps to try others"
        self.decide_auto("learning_rate", rate, reason)
        self.decide_auto("weight_decay", 0.05 if self["optimizer"] == "adamw" else 1e-4, self["optimizer"])
        self.decide_auto("ema_decay", *choices.choose_ema_decay(num_steps))
        self.decide_auto("warmup_epochs", *choices.choose_warmup(num_epochs, self["init_from"] is not None))
        self.decide_auto("early_stopping_patience", *choices.choose_patience(num_epochs))
        self.decide_auto("compile_model", *choices.choose_compile(hardware, cost, num_steps))
        self.decide_auto("cache", *choices.choose_cache(num_bytes, hardware, num_reads, self.num_crops))

    def decide_mixing(self, passes: float) -> None:
        """How much images are changed and mixed, by how often each of their pixels comes."""
        if self["fit"] == "crop":  # each sees a part of an image of median area
            area = median(height * width for height, width in self.dataset.train_sizes)
            passes *= self["crops_per_image"] * math.prod(as_shape(self["image_size"])) / area
        is_augmented = self.settings.requested.augmentation == "auto"
        augmentation, _, reason = self.settings["augmentation"]
        if is_augmented and augmentation != "default" and passes < choices.AUGMENTED_PASSES:
            seldom = f"images come {passes:.1f} times, too seldom for more than flips"
            self.decide("augmentation", choices.flips_of(augmentation) or "none", f"{seldom}; {reason}")
        self.decide_auto("cutmix", *choices.choose_cutmix(passes, is_augmented, self["normalize"]))

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


def decoded_bytes(fit: str, image_size: int | tuple[int, int], dataset: DatasetFacts) -> int:
    """Of all pairs as the cache keeps them: resized, or whole."""
    per_pixel = dataset.channels * dataset.bytes_per_value + 1
    sizes: Sequence[tuple[int, int]] = [*dataset.train_sizes, *dataset.val_sizes]
    if fit == "resize":
        sizes = [as_shape(image_size)] * len(sizes)
    return sum(height * width for height, width in sizes) * per_pixel
