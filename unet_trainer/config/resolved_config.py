"""The settings of a run: each value with where it came from and why. How they are decided is in auto.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from unet_trainer.config.facts import NumberFormat
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

    @property
    def whole_repeats(self) -> int:
        """1 where an epoch takes a share of the images."""
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


class Settings(dict[str, Setting]):
    """Every setting of a run by its key: what is printed, written to config.yaml and run.json, and resumed.
    `requested`: the config that they were decided for."""

    def __init__(self, requested: Config) -> None:
        source_of = requested.sources.get
        super().__init__({name: Setting(getattr(requested, name), source_of(name, "default")) for name in FIELDS})
        self.requested = requested

    def __setitem__(self, name: str, setting: Setting) -> None:
        super().__setitem__(name, setting)  # dict.update would pass this by
        self.__dict__.pop("taken", None)

    @cached_property
    def taken(self) -> ResolvedConfig:
        """The values alone."""
        values = {name: setting.value for name, setting in self.items()}
        return ResolvedConfig(**values, sources=self.requested.sources)

    def change(self, reason: str, source: str = "decided", **values: Any) -> None:
        for name, value in values.items():
            self[name] = Setting(value, source, reason)

    def was_open(self, name: str) -> bool:
        """When the run began: a resumed one requests what was decided then."""
        requested = getattr(self.requested, name)
        return requested == "auto" or (self[name].is_decided and requested == self[name].value)

    def replans(self) -> bool:
        """Whether the number of epochs follows the time that they take, and with it the machine."""
        return self.requested.time_budget is not None and self.requested.num_epochs == "auto"

    def repeatable(self) -> Config:
        """The config that repeats the run, also on another machine."""
        values = {name: setting.value for name, setting in self.items()}
        for name in self._machine_keys():
            requested = getattr(self.requested, name)
            if not (name in ("use_amp", "compile_model") and requested == "auto"):
                values[name] = requested
        return Config(**values)

    def repeatable_dict(self) -> dict[str, Any]:
        return as_dict(self.repeatable())

    def _machine_keys(self) -> tuple[str, ...]:
        return (*MACHINE_KEYS, "num_epochs") if self.replans() else MACHINE_KEYS

    def to_yaml(self, header: str, **values: Any) -> str:
        """config.yaml of the run, with the reason of each value that was decided; `values` replace settings that belong
        to one start only."""
        reasons, machine_keys = {}, self._machine_keys()
        for name, setting in self.items():
            here = f"here {value_text(to_plain(setting.value))}" if name in machine_keys else "decided"
            is_decided = setting.is_decided and name != "init_from"  # whose reason is what was loaded
            reasons[name] = f"{here}: {setting.reason}" if is_decided else setting.reason
        return to_yaml(dataclasses.replace(self.repeatable(), **values), header, reasons)

    def explained(self) -> dict[str, dict[str, Any]]:
        """Value, source and reason of every setting, as plain values."""
        return {name: {**setting._asdict(), "value": to_plain(setting.value)} for name, setting in self.items()}

    def sources_and_reasons(self) -> dict[str, list[str]]:
        return {name: [source, reason] for name, (_, source, reason) in self.items()}

    def describe(self) -> list[tuple[str, str, str]]:
        """Key, value and reason of each decided setting that does something and is not printed elsewhere."""
        return [
            (name, value_text(to_plain(setting.value)), setting.reason)
            for name, setting in self.items()
            if setting.is_decided and name not in PRINTED_ELSEWHERE and WITHOUT_EFFECT.get(name, ...) != setting.value
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which another process makes the same settings."""
        return {"requested": as_dict(self.requested), "settings": self.explained()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Settings:
        settings = cls(Config(**{name: parse_value(name, value) for name, value in content["requested"].items()}))
        for name, one in content["settings"].items():
            settings[name] = Setting(parse_value(name, one["value"]), one["source"], one["reason"])
        return settings
