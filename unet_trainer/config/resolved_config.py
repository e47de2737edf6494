"""The settings of a run: a config in which nothing is open, and where each value came from.

`Settings` owns what was asked for, what is taken, and why. Imports no torch and reads no files; `resolve` makes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unet_trainer.config.choices import NumberFormat
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, Config, as_dict, as_shape, parse_value, to_yaml

# config.yaml keeps what was asked for, so that the run can be repeated or resumed on another machine. Where that is auto and the
# choice changes the numbers (use_amp, compile_model), it keeps what was chosen: a resumed run has the same bits.
MACHINE_KEYS = ("device", "num_workers", "use_amp", "amp_dtype", "compile_model", "cache")
KEPT_AS_CHOSEN = ("use_amp", "compile_model")
# Decided like the others, and said in lines of their own.
SAID_ELSEWHERE = (
    "device", "num_workers", "mask_values", "ignore_value", "mask_tolerance", "in_channels", "image_mean", "image_std",
    "class_weights",
)  # fmt: skip
# Decided values that mean "nothing": they are in config.yaml with their reason, and not printed.
PLAIN = {"crops_per_image": 1, "cutmix": 0.0}


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


@dataclass(frozen=True)
class Decision:
    """Where a value came from (default, demo, file, config, command line, argument, or decided) and, if decided, why."""

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
        self.decisions |= {name: Decision("decided", reason) for name in values}

    def repeatable(self) -> Config:
        """The config that repeats the run: the values taken, but for MACHINE_KEYS those asked for."""
        kept = {
            name: getattr(self.asked, name)
            for name in self.machine_keys()
            if not (name in KEPT_AS_CHOSEN and getattr(self.asked, name) == "auto")
        }
        return Config(**{name: getattr(self.taken, name) for name in FIELDS} | kept)

    def machine_keys(self) -> tuple[str, ...]:
        """With a time budget, the number of epochs depends on the machine too."""
        return (*MACHINE_KEYS, *(("num_epochs",) if self.replans() else ()))

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
        """config.yaml of the run, with the reason of each value that was decided; `values` replace settings that belong to one
        start only."""
        taken, machine_keys = as_dict(self.taken), self.machine_keys()
        reasons = {
            name: (f"here {value_text(taken[name])}: " if name in machine_keys else "decided: ") + decision.reason
            for name, decision in self.decisions.items()
            if decision.source == "decided"
        }
        return to_yaml(dataclasses.replace(self.repeatable(), **values), header, reasons)

    def decisions_dict(self) -> dict[str, list[str]]:
        return {name: [decision.source, decision.reason] for name, decision in self.decisions.items()}

    def explained(self) -> dict[str, dict[str, Any]]:
        """Value, source and reason of every setting."""
        taken = as_dict(self.taken)
        return {
            name: {"value": taken[name], "source": decision.source, "reason": decision.reason}
            for name, decision in self.decisions.items()
        }

    def describe(self) -> list[tuple[str, str, str]]:
        """Key, value and reason of each setting that was left open, does something, and is not said elsewhere."""
        taken = as_dict(self.taken)
        return [
            (name, value_text(taken[name]), decision.reason)
            for name, decision in self.decisions.items()
            if decision.source == "decided" and name not in SAID_ELSEWHERE and not (name in PLAIN and taken[name] == PLAIN[name])
        ]
