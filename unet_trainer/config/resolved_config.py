"""auto → value and reason, for every setting that the user left open, from facts about the hardware, the dataset and
the cost of a step; and the settings of a run that come of it.

`resolve` is called once per run; the choices themselves are in choices. `Settings` owns what was asked for, what is
taken, and why. Imports no torch and reads no files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from unet_trainer.config import choices
from unet_trainer.config.choices import NumberFormat
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import (
    FIELDS,
    MIN_ATTENTION_CHANNELS,
    WITH_DECODER_CHANNELS,
    Config,
    as_dict,
    as_shape,
    parse_value,
    to_yaml,
)

# config.yaml keeps what was asked for, so that the run can be repeated or resumed on another machine. Where that is
# auto and the choice changes the numbers (use_amp, compile_model), it keeps what was chosen: a resumed run has the same
# bits.
MACHINE_KEYS = ("device", "num_workers", "use_amp", "amp_dtype", "compile_model", "cache")
KEPT_AS_CHOSEN = ("use_amp", "compile_model")
# Decided like the others, and said in lines of their own.
SAID_ELSEWHERE = (
    "device", "num_workers", "mask_values", "ignore_value", "mask_tolerance", "in_channels", "image_mean", "image_std",
    "class_weights", "monitor",
)  # fmt: skip
# Decided values that mean "nothing": they are in config.yaml with their reason, and not printed.
PLAIN = {"crops_per_image": 1, "cutmix": 0.0, "normalize": "dataset"}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A Config in which nothing is left open."""

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


def parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value of as_dict as its field has it, whatever the others are."""
    return {name: parse_value(name, values[name]) for name in FIELDS}


class Decision(NamedTuple):
    """Where a value came from (default, demo, file, config, command line, argument, or decided), and why if decided."""

    source: str
    reason: str = ""


class Settings:
    """The settings of a run. A setting that has to change during the run is changed here and nowhere else."""

    def __init__(self, asked: Config, taken: ResolvedConfig, decisions: Mapping[str, Decision]) -> None:
        self.asked = asked
        self.taken = taken
        self.decisions = dict(decisions)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which another process makes the same settings."""
        return {"asked": as_dict(self.asked), "taken": as_dict(self.taken), "decisions": self.decisions_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Settings:
        decisions = {name: Decision(*decision) for name, decision in content["decisions"].items()}
        return cls(Config(**parsed(content["asked"])), ResolvedConfig(**parsed(content["taken"])), decisions)

    def change(self, reason: str, **values: Any) -> None:
        """Replaces the values that are taken."""
        self.taken = dataclasses.replace(self.taken, **values)
        self.decisions |= dict.fromkeys(values, Decision("decided", reason))

    def repeatable(self) -> Config:
        """The config that repeats the run: the values taken, but for MACHINE_KEYS those asked for."""
        asked = {name: getattr(self.asked, name) for name in self.machine_keys()}
        kept = {name: value for name, value in asked.items() if not (name in KEPT_AS_CHOSEN and value == "auto")}
        return Config(**{name: getattr(self.taken, name) for name in FIELDS} | kept)

    def machine_keys(self) -> tuple[str, ...]:
        """With a time budget, the number of epochs depends on the machine too."""
        return (*MACHINE_KEYS, "num_epochs") if self.replans() else MACHINE_KEYS

    def replans(self) -> bool:
        """Whether the number of epochs follows the time that they take."""
        return self.asked.time_budget is not None and self.asked.num_epochs == "auto"

    def was_open(self, name: str) -> bool:
        """When the run began: a resumed one has what was decided then."""
        asked = getattr(self.asked, name)
        return asked == "auto" or (self.decisions[name].source == "decided" and asked == getattr(self.taken, name))

    def budget(self) -> float:
        """Seconds that the run may take."""
        return math.inf if self.asked.time_budget is None else seconds_of(self.asked.time_budget)

    def repeatable_dict(self) -> dict[str, Any]:
        return as_dict(self.repeatable())

    def to_yaml(self, header: str, **values: Any) -> str:
        """config.yaml of the run, with the reason of each value that was decided; `values` replace settings that belong
        to one start only."""
        taken, machine_keys = as_dict(self.taken), self.machine_keys()
        reasons = {"init_from": self.decisions["init_from"].reason}
        for name, (source, reason) in self.decisions.items():
            if source == "decided" and not (name == "init_from" and reason):
                here = f"here {value_text(taken[name])}" if name in machine_keys else "decided"
                reasons[name] = f"{here}: {reason}"
        return to_yaml(dataclasses.replace(self.repeatable(), **values), header, reasons)

    def decisions_dict(self) -> dict[str, list[str]]:
        return {name: list(decision) for name, decision in self.decisions.items()}

    def explained(self) -> dict[str, dict[str, Any]]:
        """Value, source and reason of every setting."""
        taken = as_dict(self.taken)
        return {name: {"value": taken[name], **decision._asdict()} for name, decision in self.decisions.items()}

    def describe(self) -> list[tuple[str, str, str]]:
        """Key, value and reason of each setting that was left open, does something, and is not said elsewhere."""
        taken = as_dict(self.taken)
        decided = {name: reason for name, (source, reason) in self.decisions.items() if source == "decided"}
        shown = [name for name in decided if name not in SAID_ELSEWHERE and PLAIN.get(name, ...) != taken[name]]
        return [(name, value_text(taken[name]), decided[name]) for name in shown]


# What decides

Costs = Mapping[int, StepCost | None]  # of a step, by batch size
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
    draft = _Draft(config, hardware, dataset, seconds_spent, dict(from_model))
    _resolve_machine(draft)
    _resolve_data(draft)
    _resolve_augmentation(draft)
    costs = _resolve_step(draft, measure_step, may_be_pretrained=config.encoder_weights is not None)
    if draft.is_open("encoder_weights"):
        draft.decide("encoder_weights", *find_weights(draft["encoder"]))
        is_suited = "encoder" not in draft.decided or draft["encoder"] in dict(choices.CPU_ENCODERS_FROM_NOTHING)
        if draft["encoder_weights"] is None and not is_suited:
            for name in ("encoder", "decoder_channels", "batch_size"):
                draft.decided.pop(name, None)
            costs = _resolve_step(draft, measure_step, may_be_pretrained=False)
    _resolve_training(draft, costs)
    _settle_contradictions(draft)
    decisions = {name: Decision(config.sources.get(name, "default")) for name in FIELDS}
    decisions |= {name: Decision("decided", reason) for name, (_, reason) in draft.decided.items()}
    return Settings(config, draft.filled(), decisions)


@dataclass
class _Draft:
    """A config on its way to a resolved one."""

    config: Config
    hardware: HardwareFacts
    dataset: DatasetFacts
    seconds_spent: Callable[[], float]
    decided: dict[str, tuple[Any, str]]

    def __getitem__(self, name: str) -> Any:
        return self.decided[name][0] if name in self.decided else getattr(self.config, name)

    def is_open(self, name: str) -> bool:
        return bool(self[name] == "auto")

    def decide(self, name: str, value: Any, reason: str) -> None:
        self.decided[name] = value, reason

    def decide_if_open(self, name: str, value: Any, reason: str) -> None:
        if self.is_open(name):
            self.decide(name, value, reason)

    def filled(self, **values: Any) -> ResolvedConfig:
        """The config with what is decided so far and these values."""
        return ResolvedConfig(**{name: self[name] for name in FIELDS} | values, sources=self.config.sources)

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


def _resolve_machine(draft: _Draft) -> None:
    hardware = draft.hardware
    draft.decide("device", hardware.device, hardware.name)
    draft.decide_if_open("use_amp", *choices.choose_use_amp(hardware))
    if draft["use_amp"]:
        number_format, reason = choices.choose_number_format(draft["amp_dtype"], hardware)
        if number_format == "float32":
            draft.decide("use_amp", False, reason)
        elif number_format != draft["amp_dtype"]:
            draft.decide("amp_dtype", number_format, reason)
    num_workers = choices.choose_num_workers(hardware.num_cores, draft.on_cpu, hardware.num_local_processes)
    cores = "1 core" if hardware.num_cores == 1 else f"{hardware.num_cores} cores"
    draft.decide_if_open("num_workers", num_workers, cores)


def _resolve_data(draft: _Draft) -> None:
    dataset = draft.dataset
    draft.decide_if_open("num_classes", dataset.num_classes, dataset.num_classes_reason)
    tolerance_reason = dataset.mask_reason if dataset.mask_tolerance else "the values are exact"
    draft.decide_if_open("mask_tolerance", dataset.mask_tolerance, tolerance_reason)
    if draft["class_names"] is None and dataset.class_names is not None:
        draft.decide("class_names", dataset.class_names, dataset.class_names_reason)
    if draft.is_open("mask_values"):
        draft.decide("mask_values", dataset.mask_values, dataset.mask_reason)
        if draft["ignore_value"] is None and dataset.ignore_value is not None:
            draft.decide("ignore_value", dataset.ignore_value, dataset.mask_reason)
    draft.decide_if_open("in_channels", dataset.channels, "as the images have")
    draft.decide_if_open("image_mean", dataset.mean, dataset.statistics_reason)
    draft.decide_if_open("image_std", dataset.std, dataset.statistics_reason)
    draft.decide_if_open("normalize", *choices.choose_normalize(dataset.brightness_share))
    if dataset.are_blocks and draft["split"] == "random" and not draft["group_pattern"] and not draft["split_file"]:
        draft.decide("split", "blocks", "one image: blocks of it train and validate")
    draft.decide_if_open("fit", *choices.choose_fit(dataset.measurements, dataset.train_sizes, dataset.are_blocks))
    seconds = None if draft["time_budget"] is None else seconds_of(draft["time_budget"])
    size = choices.choose_image_size(draft["fit"], dataset.train_sizes, dataset.measurements, draft.on_cpu, seconds)
    draft.decide_if_open("image_size", *size)
    if draft["fit"] == "crop":
        crops = choices.choose_crops_per_image(dataset.train_sizes, as_shape(draft["image_size"]))
        fitting = f"as many as fit side by side into an image of median area, at most {choices.MAX_CROPS}"
        draft.decide_if_open("crops_per_image", crops, fitting)
    draft.decide_if_open("crops_per_image", 1, "not with fit: resize")
    draft.decide_if_open("class_weights", *choices.choose_class_weights(dataset.class_shares, draft["num_classes"]))
    loss_reason = "overlap, so that rare classes count, and every pixel"
    draft.decide_if_open("loss", {"dice": 1.0, "cross_entropy": 1.0}, loss_reason)


def _resolve_augmentation(draft: _Draft) -> None:
    dataset, measured, fit = draft.dataset, draft.dataset.measurements, draft["fit"]
    if measured is None:
        draft.decide_if_open("augmentation", "default", "nothing was measured")
        return
    is_8bit = dataset.bytes_per_value == 1
    chosen = choices.choose_augmentation(measured, fit, dataset.channels, is_8bit, draft["normalize"])
    draft.decide_if_open("augmentation", *chosen)
    name = draft["augmentation"]
    if name in ("default", "strong") and not measured.keeps_labels("vertical_flip", in_views=fit == "crop"):
        transforms = choices.named_augmentation(name, dataset.channels, is_8bit, is_upright=True)
        symmetry = choices.describe_symmetry(measured, fit)
        draft.decide("augmentation", transforms, f"{name} without vertical flips and large turns: {symmetry}")


def _settle_contradictions(draft: _Draft) -> None:
    """What was set and does not go with what was decided: a config would be refused for it."""
    num_epochs, patience, warmup = draft["num_epochs"], draft["early_stopping_patience"], draft["warmup_epochs"]
    if patience is not None and patience >= num_epochs:
        draft.decide("early_stopping_patience", None, f"{patience} can never be reached in {num_epochs} epochs")
    if warmup >= num_epochs:
        draft.decide("warmup_epochs", num_epochs / 2, f"{warmup:g} would leave nothing of {num_epochs} epochs")
    if draft["sync_batchnorm"] and draft["compile_model"] and draft.hardware.num_processes > 1:
        draft.decide("compile_model", False, "sync_batchnorm breaks the compiled graph, and waits for the host")
    if draft["monitor"] != "val_loss" and not draft.dataset.has_val_classes:
        reason = f"no validation mask has a class to score, so there is no {draft['monitor']}"
        draft.decide("monitor", "val_loss", reason)
    if draft["batch_parts"] > draft["batch_size"]:
        draft.decide("batch_parts", draft["batch_size"], f"a batch of {draft['batch_size']} has no more parts")


def needs_cost(config: Config, hardware: HardwareFacts) -> bool:
    """Whether trials of the step decide something."""
    if hardware.kind == "cpu":
        return "auto" in (config.num_epochs, config.encoder)
    is_planned = config.num_epochs == "auto" and config.time_budget is not None
    return is_planned or config.batch_size == "auto" or (config.compile_model == "auto" and hardware.kind == "cuda")


def _resolve_step(draft: _Draft, measure_step: MeasureStep, may_be_pretrained: bool) -> Costs:
    """Encoder and batch size, from trials of the step; the costs that were measured for this encoder."""
    memory = 0 if draft.on_cpu else draft.hardware.free_memory
    sizes = _batch_sizes_to_try(draft)
    must_measure = needs_cost(draft.config, draft.hardware)

    def measure(batch_size: int, **model: Any) -> StepCost | None:
        values = {**_neutral(draft), **model, "batch_size": batch_size}
        return measure_step(draft.filled(**values)) if must_measure else None

    costs: dict[int, StepCost | None] = {}
    if draft.is_open("encoder") and draft.budget is not None:
        encoders = choices.CPU_ENCODERS if may_be_pretrained else choices.CPU_ENCODERS_FROM_NOTHING
        costs[sizes[0]] = _choose_encoder(draft, sizes[0], encoders, measure)
    draft.decide_if_open("encoder", choices.GPU_ENCODER, "a GPU trains it fast")
    limit = choices.MEMORY_SHARE * draft.hardware.free_memory or math.inf
    for size in sizes:
        cost = costs[size] = costs[size] if size in costs else measure(size)
        if cost is None or (cost.is_possible and cost.memory <= limit):  # None: nor can smaller batches be measured
            break
    if draft.is_open("batch_size"):
        known = {size: cost for size, cost in costs.items() if cost is not None}
        draft.decide("batch_size", *choices.choose_batch_size(known, memory, sizes[0]))
    return costs


def _batch_sizes_to_try(draft: _Draft) -> list[int]:
    """The wanted one first, then smaller ones for little memory."""
    if not draft.is_open("batch_size"):
        return [draft["batch_size"]]
    num_samples = draft.num_samples // draft.hardware.num_processes
    wanted = choices.wanted_batch_size(num_samples, draft.on_cpu)
    if not (draft.is_open("num_epochs") and draft.is_open("repeats")):  # images are repeated only where both are open
        wanted = max(1, min(wanted, int(num_samples * (1 if draft.is_open("repeats") else draft["repeats"]))))
    return [wanted // 2**halvings for halvings in range(wanted.bit_length())]


def _choose_encoder(
    draft: _Draft,
    batch_size: int,
    encoders: Sequence[tuple[str, tuple[int, ...] | None]],
    measure: Callable[..., StepCost | None],
) -> StepCost | None:
    """The largest encoder that sees enough images in the budget; returns its cost. On a CPU the smallest is tried
    first: its steps are short, and where it is too slow already no other is tried."""
    has_widths = draft["decoder_channels"] is None and draft["architecture"] in WITH_DECODER_CHANNELS
    on_cpu, num_processes = draft.on_cpu, draft.hardware.num_processes
    num_val = draft.num_val // num_processes
    least_width = MIN_ATTENTION_CHANNELS if draft["decoder_attention"] == "scse" else 1
    chosen: tuple[str, tuple[int, ...] | None, StepCost | None, str] | None = None
    for encoder, usual in reversed(encoders) if on_cpu else encoders:
        widths = usual and tuple(max(least_width, width) for width in usual)
        cost = measure(batch_size, encoder=encoder, **({"decoder_channels": widths} if has_widths else {}))
        if is_tried := cost is not None and cost.is_possible:
            assert cost is not None
            budget = draft.budget or choices.CPU_BUDGET
            views = choices.affordable_views(batch_size * num_processes, cost, num_val, budget)
            cores = f" on {draft.hardware.num_cores} cores" if on_cpu else ""
            speed = f"{batch_size / cost.seconds:.1f} images/s{cores}"
            reason = f"{speed}: {views:,} images in {choices.describe_seconds(budget)}"
        elif on_cpu:
            reason = "the smallest; no step could be tried" if cost is None else "the smallest; memory is short"
        else:
            reason = "the usual one"  # a smaller batch may fit
        is_enough = is_tried and views >= choices.WANTED_VIEWS
        if chosen is None or is_enough or not on_cpu:
            chosen = encoder, widths, cost, reason
        if is_enough != on_cpu or not is_tried:
            break
    assert chosen is not None
    encoder, widths, cost, reason = chosen
    draft.decide("encoder", encoder, reason)
    if widths is not None and has_widths:
        draft.decide("decoder_channels", widths, f"goes with {encoder}")
    return cost


def _neutral(draft: _Draft) -> dict[str, Any]:
    """Values for a trial of the step, which do not change its cost: of settings that are open, and of those about the
    whole run."""
    while_open = {
        "repeats": 1, "encoder": choices.GPU_ENCODER, "encoder_weights": None, "learning_rate": 1e-3,
        "weight_decay": 0.0, "ema_decay": 0.999, "cutmix": 0.0, "cache": "none",
    }  # fmt: skip
    fixed = {"num_epochs": 1, "time_budget": None, "early_stopping_patience": None, "warmup_epochs": 0.0}
    return {name: value for name, value in while_open.items() if draft.is_open(name)} | fixed | {"compile_model": False}


def _resolve_training(draft: _Draft, costs: Costs) -> None:
    hardware, num_samples = draft.hardware, draft.num_samples
    accumulation = draft["accumulation_steps"]
    batch_size = draft["batch_size"] * hardware.num_processes  # of all processes
    cost = costs.get(draft["batch_size"])
    if cost is not None:  # of a batch that memory does not hold: None, training says so
        seconds = cost.eval_seconds / hardware.num_processes
        cost = dataclasses.replace(cost, eval_seconds=seconds) if cost.is_possible else None
    share = 1.0  # of the epochs, that there is time for
    if draft.is_open("num_epochs"):
        repeats = None if draft.is_open("repeats") else draft["repeats"]
        ends_early = draft["time_budget"] is not None and hardware.num_processes == 1
        plan = choices.plan_steps(
            num_samples, batch_size, accumulation, cost, draft.num_val, draft.budget, repeats, ends_early
        )
        share = plan.share
        draft.decide("num_epochs", plan.num_epochs, plan.reason)
        batches = max(1, int(num_samples * plan.repeats) // batch_size)
        between = f"{batches:,} batches between two validations"
        how_often = between if plan.num_epochs > 1 else "one validation, at the end"
        draft.decide_if_open("repeats", plan.repeats, f"{how_often}{plan.few and f': {plan.few}'}")
    draft.decide_if_open("repeats", 1, "num_epochs is set")
    num_epochs, augmentation = draft["num_epochs"], draft["augmentation"]
    passes = share * num_epochs * draft["repeats"]
    if draft["fit"] == "crop":  # each sees a part of an image of median area
        area = median(height * width for height, width in draft.dataset.train_sizes)
        passes *= draft["crops_per_image"] * math.prod(as_shape(draft["image_size"])) / area
    is_augmented = draft.config.augmentation == "auto"
    if is_augmented and augmentation != "default" and passes < choices.AUGMENTED_PASSES:
        seldom = f"images come {passes:.1f} times, too seldom for more than flips"
        reason = f"{seldom}; {draft.decided['augmentation'][1]}"
        draft.decide("augmentation", choices.flips_of(augmentation) or "none", reason)
    draft.decide_if_open("cutmix", *choices.choose_cutmix(passes, is_augmented, draft["normalize"]))
    batches = max(1, int(num_samples * draft["repeats"]) // batch_size)
    num_steps = math.ceil(share * num_epochs * math.ceil(batches / accumulation))
    effective = batch_size * accumulation // (hardware.num_processes if draft["scale_lr"] else 1)
    num_bytes = decoded_bytes(draft["fit"], draft["image_size"], draft.dataset)
    num_reads = num_epochs * draft["repeats"] * draft.num_crops
    rate, rate_reason = choices.choose_learning_rate(draft["optimizer"], effective)
    rate_reason += "" if choices.num_pilot_steps(num_steps) else "; too few steps to try others"
    draft.decide_if_open("learning_rate", rate, rate_reason)
    draft.decide_if_open("weight_decay", 0.05 if draft["optimizer"] == "adamw" else 1e-4, draft["optimizer"])
    draft.decide_if_open("ema_decay", *choices.choose_ema_decay(num_steps))
    draft.decide_if_open("warmup_epochs", *choices.choose_warmup(num_epochs, draft["init_from"] is not None))
    draft.decide_if_open("early_stopping_patience", *choices.choose_patience(num_epochs))
    draft.decide_if_open("compile_model", *choices.choose_compile(hardware, cost, num_steps))
    draft.decide_if_open("cache", *choices.choose_cache(num_bytes, hardware, num_reads, draft.num_crops))


def decoded_bytes(fit: str, image_size: int | tuple[int, int], dataset: DatasetFacts) -> int:
    """Of all pairs as the cache keeps them: resized, or whole."""
    per_pixel = dataset.channels * dataset.bytes_per_value + 1
    sizes: Sequence[tuple[int, int]] = [*dataset.train_sizes, *dataset.val_sizes]
    if fit == "resize":
        sizes = [as_shape(image_size)] * len(sizes)
    return sum(height * width for height, width in sizes) * per_pixel
