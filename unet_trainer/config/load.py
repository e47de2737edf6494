"""Reads settings from a dict, a YAML file and key=value overrides into a checked Config.

Input is checked here, once: all problems are reported together, each with its key, its value and the fix. Imports no torch,
so that a typo is answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.config import parsers as p
from unet_trainer.config.dump import as_dict, to_plain
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.mask_classes import MaskClass, MaskValues, as_grey, implied_num_classes, split_values
from unet_trainer.config.safe_yaml import MAX_BYTES, Plain, YamlError, parse_yaml, shorten
from unet_trainer.config.schema import (
    FIELDS,
    MAX_NAME_BYTES,
    MIN_ATTENTION_CHANNELS,
    WITH_ATTENTION,
    WITH_DECODER_CHANNELS,
    Config,
)

# Our key, and what other tools call it.
NAMES_ELSEWHERE = {
    "learning_rate": "lr lr0 base_lr",
    "encoder_lr_factor": "encoder_lr backbone_lr",
    "num_epochs": "epochs max_epochs n_epochs num_steps max_steps iterations",
    "time_budget": "time max_time",
    "repeats": "repeat",
    "batch_size": "batch bs",
    "image_size": "imgsz img_size crop_size size scale patch_size tile_size",
    "early_stopping_patience": "patience early_stopping",
    "early_stopping_min_delta": "min_delta",
    "num_workers": "workers",
    "use_amp": "amp mixed_precision fp32",
    "use_amp and amp_dtype": "bf16 fp16 half",
    "amp_dtype": "precision dtype",
    "compile_model": "compile torch_compile",
    "allow_tf32": "tf32",
    "num_classes": "classes n_classes nc",
    "class_names": "names",
    "ignore_value": "ignore_index",
    "val_fraction": "val_percent val_split validation",
    "num_folds": "k_folds n_splits",
    "in_channels": "n_channels channels",
    "image_mean": "mean",
    "image_std": "std",
    "data_dir": "data dataset data_root",
    "image_dir": "images",
    "mask_dir": "masks labels",
    "augmentation": "augment augmentations transforms",
    "architecture": "arch model",
    "encoder": "backbone encoder_name",
    "encoder_weights": "pretrained weights",
    "freeze_encoder_epochs": "freeze freeze_encoder",
    "loss": "criterion loss_fn",
    "optimizer": "optim",
    "weight_decay": "wd",
    "scheduler": "lr_scheduler schedule cos_lr",
    "warmup_epochs": "warmup",
    "accumulation_steps": "accumulate gradient_accumulation_steps accumulate_grad_batches",
    "grad_clip": "clip_grad gradient_clip_val gradient_clipping max_norm",
    "ema_decay": "ema",
    "monitor": "metric",
    "device": "gpu gpus cuda accelerator",
    "seed": "random_seed",
    "run_name": "name experiment",
    "checkpoint_dir": "project save_dir output_dir work_dir",
    "resume": "resume_from load checkpoint",
}
OTHER_TOOLS_NAMES = {other: ours for ours, others in NAMES_ELSEWHERE.items() for other in others.split()}


def load_config(source: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """One source plus overrides (key=value texts, or a dict) as a checked Config; raises ConfigError with every problem."""
    problems: list[str] = []
    origin, raw, sources = _read_source(source, problems)
    if isinstance(overrides, Mapping):
        given = {str(name): value for name, value in overrides.items()}
    else:
        given = _read_overrides(overrides, problems)
    sources |= dict.fromkeys(given, "argument" if isinstance(overrides, Mapping) else "command line")
    values = _parse_values({**(raw or {}), **given}, problems)
    if "num_epochs" in given:  # a preset that is tried for a few epochs: its patience and warm-up may be longer than that
        if "early_stopping_patience" not in given and _patience_is_too_long(values):
            values["early_stopping_patience"] = None
            sources["early_stopping_patience"] = sources["num_epochs"]
        if "warmup_epochs" not in given and _warmup_is_too_long(values):
            values["warmup_epochs"] = values["num_epochs"] / 2
            sources["warmup_epochs"] = sources["num_epochs"]
    if raw is not None:  # of an unreadable file the overrides would be checked against defaults, which the file may change
        problems += _contradictions(values)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in {origin}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Config(**values, sources=sources)


def _read_source(
    source: Config | Mapping[str, Any] | str | Path, problems: list[str]
) -> tuple[str, dict[str, Any] | None, dict[str, str]]:
    """The name of the source in messages, its raw values (None: a file that cannot be read), and where each came from."""
    if isinstance(source, Config):
        return "the config", as_dict(source), dict(source.sources)
    if isinstance(source, Mapping):
        raw = {str(name): value for name, value in source.items()}
        return "the config", raw, dict.fromkeys(raw, "config")
    if not isinstance(source, str | Path):
        raise TypeError(f"a config is a Config, a dict or a path to a YAML file, not {type(source).__name__}")
    try:
        raw = _read_file(Path(source), problems)
    except YamlError as error:
        problems.append(str(error))
        return str(source), None, {}
    return str(source), raw, dict.fromkeys(raw, "file")


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        if path.is_dir():
            raise IsADirectoryError
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise YamlError(
            f"{path} is a folder; need a YAML file (to train on it: data_dir={path}; to go on with a run: --resume {path})"
        ) from None
    except FileNotFoundError:
        siblings = [str(sibling) for sibling in sorted(path.parent.glob("*.y*ml"))] or [
            str(found) for found in sorted(Path("configs").glob("*.yaml"))
        ]
        by_stem = {Path(sibling).stem: sibling for sibling in siblings}
        meant = p.near_miss(str(path), siblings) or by_stem.get(p.near_miss(path.stem, by_stem) or "")
        hint = f"; did you mean {meant}?" if meant else f"; there are {', '.join(siblings)}" if siblings else ""
        raise YamlError(f"no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise YamlError(f"cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_BYTES:
        raise YamlError(f"more than {MAX_BYTES // 1024} KiB; a config is far smaller")
    try:
        values = parse_yaml(content.decode("utf-8-sig"), problems)
    except UnicodeDecodeError:
        raise YamlError("not UTF-8 text; need a YAML file") from None
    if values is None or (isinstance(values, Plain) and not values):
        return {}
    if not isinstance(values, dict):
        raise YamlError(f"got {shorten(values)}; need lines of the form key: value")
    return values


def _read_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    given: dict[str, str] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append(f"{shorten(override)}: need key=value, e.g. batch_size=16")
            continue
        if name in given:
            problems.append(f"{_one_line(name)}: given twice, {shorten(given[name])} and {shorten(value)}; leave one of them out")
            continue
        given[name] = value
        raw[name] = Plain(value)
        is_text = name in FIELDS and FIELDS[name].type in ("str", "str | None")  # [a-z]+ is text there, not a list
        if value.lstrip()[:1] in (('"', "'") if is_text else ("[", "{", '"', "'")):
            try:
                raw[name] = parse_yaml(value)
            except YamlError as error:
                problems.append(f"{name}: got {shorten(value)}; {error}")
                del raw[name]
    return raw


def _parse_values(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The typed value of every valid key, the default of every key not given; a problem for each of the others."""
    defaults = Config()
    values = {name: getattr(defaults, name) for name in FIELDS if name not in raw}
    for name, value in raw.items():
        if name not in FIELDS:
            problems.append(f"{_one_line(name)}: unknown key{_suggestion(name)}")
            continue
        try:
            values[name] = FIELDS[name].metadata["parse"](value)
        except ValueError as error:
            shown = "null" if value is None else shorten(value)
            problems.append(f"{name}: got {shown}; {error}")
    return values


def _suggestion(name: str) -> str:
    lowered = name.lower().replace("-", "_").strip()
    if lowered in FIELDS:
        return f"; did you mean {lowered}?"
    if lowered in OTHER_TOOLS_NAMES:
        return f"; the name here is {OTHER_TOOLS_NAMES[lowered]}"
    meant = p.near_miss(lowered, [*FIELDS, *OTHER_TOOLS_NAMES])
    return f"; did you mean {OTHER_TOOLS_NAMES.get(meant, meant)}?" if meant else "; configs/default.yaml lists every key"


def _one_line(name: str) -> str:
    return name if name.isprintable() and len(name) <= 60 else shorten(name)


def _patience_is_too_long(values: Mapping[str, Any]) -> bool:
    """Whether there are too few epochs for early stopping ever to happen."""
    patience, num_epochs = values.get("early_stopping_patience"), values.get("num_epochs")
    return bool(patience and num_epochs and "auto" not in (patience, num_epochs) and patience >= num_epochs)


def _warmup_is_too_long(values: Mapping[str, Any]) -> bool:
    warmup, num_epochs = values.get("warmup_epochs", "auto"), values.get("num_epochs", "auto")
    return "auto" not in (warmup, num_epochs) and bool(warmup >= num_epochs)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Settings that are valid alone and contradict each other. Keys with problems of their own are missing in `values`."""
    found: list[str] = []

    def given(*names: str) -> bool:
        return all(name in values for name in names)

    if given("time_budget", "num_epochs") and values["time_budget"] is not None and values["num_epochs"] != "auto":
        found.append(
            f"time_budget: {values['time_budget']} decides the number of epochs, and num_epochs: {values['num_epochs']} is set; "
            "leave one of them out (time_budget: null or num_epochs: auto)"
        )

    if given("device") and not _is_device(values["device"]):
        found.append(f"device: got {shorten(values['device'])}; need auto, cpu, cuda, cuda:N or mps")
    if (
        given("use_amp", "amp_dtype", "device")
        and values["use_amp"] is True
        and values["amp_dtype"] == "float16"
        and values["device"] == "cpu"
    ):
        found.append("amp_dtype: float16 does not go with device: cpu; use bfloat16, or use_amp: false, which is faster there")
    if _warmup_is_too_long(values):
        found.append(f"warmup_epochs: {values['warmup_epochs']:g} leaves nothing of num_epochs: {values['num_epochs']}; need fewer")
    if _patience_is_too_long(values):
        found.append(
            f"early_stopping_patience: {values['early_stopping_patience']} can never be reached in "
            f"num_epochs: {values['num_epochs']}; need fewer, or null"
        )
    if given("num_folds", "fold") and values["fold"] >= (values["num_folds"] or 1):
        folds = f"0 to {values['num_folds'] - 1}" if values["num_folds"] else "num_folds to be set"
        found.append(f"fold: got {values['fold']}; need {folds}")
    if given("split", "group_pattern") and values["split"] == "blocks" and values["group_pattern"]:
        found.append("split: blocks divides a sequence, group_pattern keeps it together; leave one of them out")
    if given("batch_parts", "batch_size") and values["batch_size"] != "auto" and values["batch_parts"] > values["batch_size"]:
        found.append(f"batch_parts: {values['batch_parts']} is more than batch_size: {values['batch_size']}; need at most that")
    if given("num_classes"):
        found += _class_contradictions(values, given)
    if (
        given("decoder_channels", "architecture")
        and values["decoder_channels"]
        and values["architecture"] not in WITH_DECODER_CHANNELS
    ):
        found.append(
            f"decoder_channels: not for architecture: {values['architecture']}; only for {', '.join(WITH_DECODER_CHANNELS)}"
        )
    if given("architecture"):
        found += _decoder_contradictions(values)
    if given("run_name") and not _is_folder_name(values["run_name"]):
        found.append(
            f"run_name: got {shorten(values['run_name'])}; need a plain name without slashes (checkpoint_dir says where), "
            f"not longer than {MAX_NAME_BYTES} bytes"
        )
    return found


def _decoder_contradictions(values: Mapping[str, Any]) -> list[str]:
    found, architecture = [], values["architecture"]
    if values.get("decoder_attention") == "scse" and architecture not in WITH_ATTENTION:
        found.append(
            f"decoder_attention: scse is for {' and '.join(WITH_ATTENTION)}, not for architecture: {architecture}; use none"
        )
    elif (
        values.get("decoder_attention") == "scse"
        and min(values.get("decoder_channels") or [MIN_ATTENTION_CHANNELS]) < MIN_ATTENTION_CHANNELS
    ):
        found.append(
            f"decoder_attention: scse needs decoder_channels of at least {MIN_ATTENTION_CHANNELS}; "
            f"got {to_plain(values['decoder_channels'])}"
        )
    if values.get("deep_supervision", 0) not in ("auto", 0) and architecture != "unet":
        found.append(
            f"deep_supervision: got {values['deep_supervision']:g}; need 0 with architecture: {architecture}, it is for unet"
        )
    return found


def class_contradictions(config: Config) -> list[str]:
    """The same problems, of a config whose number of classes the masks have decided."""
    values = {name: getattr(config, name) for name in FIELDS}
    return _class_contradictions(values, lambda *names: True)


def _class_contradictions(values: Mapping[str, Any], given: Callable[..., bool]) -> list[str]:
    found = []
    num_classes, source = values["num_classes"], "num_classes"
    mask_values = values.get("mask_values", "auto")
    if num_classes == "auto":
        names, weights = values.get("class_names"), values.get("class_weights")
        num_classes = implied_num_classes(names, weights, mask_values)
        source = "class_names" if names else "class_weights" if isinstance(weights, tuple) else "mask_values"
    if num_classes is not None:
        found += _length_contradictions(values, given, num_classes, source)
    if not given("mask_values"):  # it has a problem of its own
        return found
    if isinstance(mask_values, str):
        if num_classes is not None and num_classes > 2 and mask_values != "auto":
            found.append(f"mask_values: {mask_values} tells two classes apart, {source}: {num_classes} needs a value for each")
    else:
        by_class = [[as_grey(value) for value in split_values(mask_class)] for mask_class in mask_values]
        flat = [value for one_class in by_class for value in one_class]
        needed = len(mask_values) if num_classes is None else max(2, num_classes)
        if len(mask_values) != needed or len(set(flat)) != len(flat):
            order = "background first" if num_classes == 1 else "one a class"
            found.append(f"mask_values: got {to_plain(mask_values)}; need {needed} different values, {order}")
    if given("ignore_value") and values["ignore_value"] is not None:
        found += _ignore_contradictions(values["ignore_value"], mask_values, num_classes)
    return found


def _length_contradictions(values: Mapping[str, Any], given: Callable[..., bool], num_classes: int, source: str) -> list[str]:
    found = []
    if given("loss") and "bce" in values["loss"] and num_classes > 1:
        found.append(f"loss: bce is for num_classes: 1; with {num_classes} classes use cross_entropy")
    if given("class_weights") and isinstance(values["class_weights"], tuple) and len(values["class_weights"]) != num_classes:
        found.append(f"class_weights: got {len(values['class_weights'])} values; need {num_classes}, one for each of {source}")
    if given("class_names") and values["class_names"] and len(values["class_names"]) != num_classes:
        found.append(f"class_names: got {len(values['class_names'])} names; need {num_classes}, one for each of {source}")
    return found


def _ignore_contradictions(ignore_value: MaskClass, mask_values: MaskValues, num_classes: int | None) -> list[str]:
    ignored = [as_grey(value) for value in split_values(ignore_value)]
    if not isinstance(mask_values, str):
        taken = {as_grey(value) for mask_class in mask_values for value in split_values(mask_class)}
        both = [value for value in ignored if value in taken]
        return [f"ignore_value: {to_plain(both[0])} is also in mask_values; need another, or null"] if both else []
    ids = [value for value in ignored if num_classes is not None and value in range(max(2, num_classes))]
    if mask_values == "auto" and ids:
        return [
            f"ignore_value: {ids[0]} is the id of a class (num_classes: {num_classes}); "
            "set mask_values to the values of the classes"
        ]
    return []


def _is_folder_name(name: str) -> bool:
    return not any(mark in name for mark in "/\\\n\r") and name.strip() not in (".", "..") and len(name.encode()) <= MAX_NAME_BYTES


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return (
        name == "auto"
        or (kind in ("cpu", "mps") and not colon)
        or (kind == "cuda" and (not colon or (index.isascii() and index.isdigit() and len(index) < 4)))
    )
